//! Rows of the journal as they are read. A damaged one is a sandbox that has failed, or a policy that closes
//! its scope; what does not say whose it is, is no row. Never guesses at what a damaged column meant.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use policy::{Policy, Revision, Slot};
use rusqlite::Row;

use crate::night::Night;
use crate::reason::Reason;
use crate::sandbox::Driver;
use crate::state::State;
use crate::store::{PolicyRow, Record};
use crate::terms::Terms;

/// The last second of the year 9999, beyond which RFC 3339 knows no time.
const LAST_SECOND: u64 = 253_402_300_799;

/// A row must say whose it is and in which slot. Where something else is damaged that it needs to run, nobody
/// knows what runs there: it is taken for one that ran and of whose process nothing is known, with the
/// reason. What only describes it is left out.
pub(crate) fn read_record(row: &Row<'_>) -> rusqlite::Result<Record> {
    let slot: u16 = row.get("slot")?;
    let mut damage = None;
    let record = Record {
        name: parsed(row, "name")?,
        tenant: parsed(row, "tenant")?,
        slot: Slot::new(slot).ok_or_else(|| corrupt("slot", "out of range"))?,
        incarnation: intact("incarnation", row.get("incarnation"), 0, &mut damage),
        driver: intact("driver", parsed(row, "driver"), Driver::default(), &mut damage),
        memory_mib: intact("memory_mib", row.get("memory_mib"), 0, &mut damage),
        // Only counted: nothing of the sandbox depends on it.
        disk: row.get("disk").unwrap_or_default(),
        vcpus: intact("vcpus", row.get("vcpus"), 0, &mut damage),
        state: intact("state", parsed(row, "state"), State::Running, &mut damage),
        reason: described(row, "reason", row.get::<_, Option<String>>("reason")).map_or_else(
            || Some(Reason::new("the journal's word for it is damaged")),
            |text| text.map(Reason::read),
        ),
        process: intact("process", read_json(row, "process"), None, &mut damage),
        created: described(row, "created", read_time(row)),
        // What there is on disk tells as much.
        saved: described(row, "saved", read_json(row, "saved")).flatten(),
        cold: described(row, "cold", read_json(row, "cold")).flatten().unwrap_or_default(),
        night: read_night(row),
        stored: intact("stored", read_json(row, "stored"), None, &mut damage),
        // Rows of layout 1 have none: such a sandbox goes on as it was, and so does one of which nobody knows.
        terms: described(row, "terms", read_json(row, "terms"))
            .flatten()
            .unwrap_or_else(Terms::none),
    };
    Ok(match damage {
        None => record,
        Some(column) => {
            let place = place(row, column);
            let full = format!("its row in the journal is damaged: {place}");
            let reason = Some(Reason::told_as(full, "the node's journal of it is damaged"));
            Record { state: State::Running, process: None, saved: None, reason, ..record }
        }
    })
}

/// What can be read of its night: it only tells of what has ended.
fn read_night(row: &Row<'_>) -> Night {
    let mut night: Night =
        described(row, "night", read_json(row, "night")).flatten().unwrap_or_default();
    let remains = described(row, "remains", row.get::<_, Option<String>>("remains")).flatten();
    for line in remains.iter().flat_map(|lines| lines.lines()) {
        let read = serde_json::from_str(line).map_err(|error| corrupt("remains", error));
        night.remains.extend(described(row, "remains", read));
    }
    night
}

/// What was read of a column, or else something in its place, and the column is noted as damaged.
fn intact<T>(
    column: &'static str,
    read: rusqlite::Result<T>,
    instead: T,
    damage: &mut Option<&'static str>,
) -> T {
    read.unwrap_or_else(|_| {
        damage.get_or_insert(column);
        instead
    })
}

/// What was read of a column without which a sandbox can run; what is wrong with it is logged.
fn described<T>(row: &Row<'_>, column: &str, read: rusqlite::Result<T>) -> Option<T> {
    let place = || place(row, column);
    read.inspect_err(|error| tracing::error!(%error, "damaged in the journal: {}", place())).ok()
}

/// Where in the table of sandboxes somebody has to look.
fn place(row: &Row<'_>, column: &str) -> String {
    let id: i64 = row.get("rowid").unwrap_or_default();
    format!("table sandbox, row {id}, column {column}")
}

fn read_time(row: &Row<'_>) -> rusqlite::Result<SystemTime> {
    let seconds: u64 = row.get("created")?;
    match seconds {
        0..=LAST_SECOND => Ok(UNIX_EPOCH + Duration::from_secs(seconds)),
        _ => Err(corrupt("created", "beyond the year 9999")),
    }
}

/// A column that holds a value as JSON, or nothing.
fn read_json<T: serde::de::DeserializeOwned>(
    row: &Row<'_>,
    column: &str,
) -> rusqlite::Result<Option<T>> {
    let text: Option<String> = row.get(column)?;
    text.map(|text| serde_json::from_str(&text).map_err(|e| corrupt(column, e))).transpose()
}

pub(crate) fn read_policy(row: &Row<'_>) -> rusqlite::Result<PolicyRow> {
    let bytes = |column| Ok::<_, rusqlite::Error>(row.get_ref(column)?.as_bytes()?);
    // What is not even text is told from what cannot be asked for: only its own scope is closed by it.
    let document = str::from_utf8(bytes("document")?).map_err(|problem| problem.to_string());
    let policy =
        document.and_then(|text| Policy::from_written(text).map_err(|problem| problem.to_string()));
    let (id, scope): (i64, _) = (row.get("rowid")?, text(row, "scope"));
    let revision = row
        .get("revision")
        .map_err(|problem| format!("table policy, row {id}, column revision: {problem}"));
    // A document that says what it says at no known revision may be any of its scope's.
    let (policy, revision) = match revision {
        Ok(revision) => (policy, Revision(revision)),
        Err(problem) => (Err(problem), Revision::default()),
    };
    Ok(PolicyRow { id, scope, policy, revision })
}

/// A column as text to show and to compare, whatever its bytes are; empty where it has none.
pub(crate) fn text(row: &Row<'_>, column: &str) -> String {
    let bytes = row.get_ref(column).ok().and_then(|value| value.as_bytes().ok());
    String::from_utf8_lossy(bytes.unwrap_or_default()).into_owned()
}

/// A column that holds one word: a name, or the name of a variant.
fn parsed<T: serde::de::DeserializeOwned>(row: &Row<'_>, column: &str) -> rusqlite::Result<T> {
    let text: String = row.get(column)?;
    serde_json::from_value(serde_json::Value::String(text)).map_err(|e| corrupt(column, e))
}

fn corrupt(
    column: &str,
    problem: impl Into<Box<dyn std::error::Error + Send + Sync>>,
) -> rusqlite::Error {
    let problem = format!("column {column}: {}", problem.into());
    rusqlite::Error::FromSqlConversionFailure(0, rusqlite::types::Type::Text, problem.into())
}
