//! The book of accounts on disk: what each sandbox used in each hour, with whom, and how far each open
//! account is counted.
//!
//! A SQLite file of its own, so that it never holds up the journal. What is added and how far that counts is
//! one transaction: nothing is counted twice, whenever the daemon ends. A tenant that fills it has its own
//! oldest hours joined into sums; sums are never lost before their time.

mod ask;
mod room;

use std::collections::BTreeMap;
use std::path::Path;

use policy::{SandboxName, TenantName};
use rusqlite::{Transaction, params};

use crate::database::{Database, Layout};
use crate::error::Error;
use crate::usage::account::{Hours, Mark};
use crate::usage::amount::{Amounts, PEAK};

/// The layout of the tables; one of another is refused, never guessed at.
const VERSION: i64 = 1;
/// Destinations of a sandbox that are kept apart for an hour: those with most bytes.
pub(crate) const PLACES: usize = 100;

/// An open account and what is to be added for it.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) account: u64,
    pub(crate) tenant: TenantName,
    pub(crate) sandbox: SandboxName,
    pub(crate) hours: Hours,
    /// How far that counts; none: the account is closed.
    pub(crate) mark: Option<Mark>,
}

/// The book. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Book(Database);

impl Book {
    /// Opens it, making it where there is none.
    pub(crate) fn open(path: &Path) -> Result<Self, Error> {
        let layout = Layout {
            synchronous: "NORMAL",
            version: VERSION,
            tables: &tables(),
            older: &[],
            later: &[],
        };
        Database::open(path, &layout).map(Self)
    }

    async fn run<T: Send + 'static>(
        &self,
        doing: &'static str,
        act: impl FnOnce(&Transaction<'_>) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, Error> {
        self.0.run(doing, act).await
    }

    /// How far the open accounts are counted, by sandbox, and whose they are. One that cannot be read is
    /// left out: its time until now is lost, and said so.
    pub(crate) async fn open_accounts(&self) -> Result<BTreeMap<SandboxName, Opened>, Error> {
        let rows = self.run("reading the open accounts", |book| {
            let read = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get(1)?, row.get(2)?));
            book.prepare("SELECT sandbox, tenant, mark FROM open")?
                .query_map([], read)?
                .collect::<rusqlite::Result<Vec<(String, String, String)>>>()
        });
        let read = |(sandbox, tenant, mark): (String, String, String)| {
            let mark = serde_json::from_str(&mark)
                .inspect_err(|error| tracing::error!(sandbox, %error, "account not readable"));
            Some((sandbox.parse().ok()?, (tenant.parse().ok()?, mark.ok()?)))
        };
        Ok(rows.await?.into_iter().filter_map(read).collect())
    }

    /// Forgets open accounts but these: their sandboxes are not there.
    pub(crate) async fn close_others(&self, open: Vec<SandboxName>) -> Result<(), Error> {
        self.run("closing accounts", move |book| {
            let open: Vec<&str> = open.iter().map(SandboxName::as_str).collect();
            let open = serde_json::to_string(&open).unwrap_or_default();
            book.execute(
                "DELETE FROM open WHERE sandbox NOT IN (SELECT value FROM json_each(?1))",
                [open],
            )
        })
        .await
        .map(drop)
    }

    /// Adds all of this, or nothing.
    pub(crate) async fn add(&self, entries: Vec<Entry>) -> Result<(), Error> {
        self.run("adding to the accounts", move |book| {
            let add_to_hour = add_to_hour();
            for entry in &entries {
                for (hour, owed) in &entry.hours {
                    let key = (entry.tenant.as_str(), *hour, entry.sandbox.as_str());
                    let mut values: Vec<rusqlite::types::Value> =
                        vec![key.0.to_owned().into(), number(key.1), key.2.to_owned().into()];
                    values.extend(owed.amounts.values().into_iter().map(number));
                    book.prepare_cached(&add_to_hour)?
                        .execute(rusqlite::params_from_iter(values))?;
                    for (place, bytes) in &owed.places {
                        add_to_place(book, key, place, *bytes)?;
                    }
                    if !owed.places.is_empty() {
                        room::keep_the_largest(book, key)?;
                    }
                }
                note(book, entry)?;
            }
            Ok(())
        })
        .await
    }
}

/// Whose an open account is, and how far it is counted.
pub(crate) type Opened = (TenantName, Mark);

/// Tenant, hour since 1970 and sandbox; the sandbox without a name stands for all that are joined.
type Key<'a> = (&'a str, u64, &'a str);

fn tables() -> String {
    let columns: String =
        Amounts::COLUMNS.iter().map(|name| format!("{name} INTEGER NOT NULL,\n")).collect();
    format!(
        "CREATE TABLE used (
            tenant TEXT NOT NULL, hour INTEGER NOT NULL, sandbox TEXT NOT NULL,
            {columns} PRIMARY KEY (tenant, hour, sandbox)
        ) STRICT, WITHOUT ROWID;
        CREATE TABLE carried (
            tenant TEXT NOT NULL, hour INTEGER NOT NULL, sandbox TEXT NOT NULL, place TEXT NOT NULL,
            bytes_out INTEGER NOT NULL, bytes_in INTEGER NOT NULL,
            PRIMARY KEY (tenant, hour, sandbox, place)
        ) STRICT, WITHOUT ROWID;
        CREATE TABLE open (
            sandbox TEXT PRIMARY KEY, account INTEGER NOT NULL, tenant TEXT NOT NULL, mark TEXT NOT NULL
        ) STRICT;"
    )
}

/// Adds to the row of an hour, or makes it.
fn add_to_hour() -> String {
    let columns = Amounts::COLUMNS;
    let marks: String = columns.iter().map(|_| ", ?").collect();
    let sums: Vec<String> = columns
        .iter()
        .map(|name| match *name {
            PEAK => format!("{name} = MAX({name}, excluded.{name})"),
            name => format!("{name} = {name} + excluded.{name}"),
        })
        .collect();
    format!(
        "INSERT INTO used (tenant, hour, sandbox, {}) VALUES (?, ?, ?{marks})
         ON CONFLICT DO UPDATE SET {}",
        columns.join(", "),
        sums.join(", ")
    )
}

fn add_to_place(
    book: &Transaction<'_>,
    (tenant, hour, sandbox): Key<'_>,
    place: &str,
    (out, back): (u64, u64),
) -> rusqlite::Result<()> {
    book.prepare_cached(
        "INSERT INTO carried VALUES (?1, ?2, ?3, ?4, ?5, ?6) ON CONFLICT DO UPDATE SET
         bytes_out = bytes_out + excluded.bytes_out, bytes_in = bytes_in + excluded.bytes_in",
    )?
    .execute(params![tenant, number(hour), sandbox, place, number(out), number(back)])
    .map(drop)
}

/// Notes how far an account is counted. A sandbox that came after another one of its name has an account of
/// its own, which the end of the other's does not close.
fn note(book: &Transaction<'_>, entry: &Entry) -> rusqlite::Result<()> {
    let (sandbox, account) = (entry.sandbox.as_str(), number(entry.account));
    let Some(mark) = &entry.mark else {
        let close = "DELETE FROM open WHERE sandbox = ?1 AND account = ?2";
        return book.prepare_cached(close)?.execute(params![sandbox, account]).map(drop);
    };
    let mark = serde_json::to_string(mark)
        .map_err(|error| rusqlite::Error::ToSqlConversionFailure(Box::new(error)))?;
    book.prepare_cached("INSERT OR REPLACE INTO open VALUES (?1, ?2, ?3, ?4)")?
        .execute(params![sandbox, account, entry.tenant.as_str(), mark])
        .map(drop)
}

/// As SQLite holds it: nothing here comes near its largest number.
fn number(value: u64) -> rusqlite::types::Value {
    i64::try_from(value).unwrap_or(i64::MAX).into()
}

#[cfg(test)]
mod tests;
