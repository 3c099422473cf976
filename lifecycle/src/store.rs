//! The journal: which sandboxes exist, how far their journeys went, and which policies are in force.
//!
//! SQLite in WAL mode with full sync: what a call here returned for is on disk. One connection; each
//! call is one transaction, run off the async threads. Never holds a secret.

mod nights;
mod snapshots;
mod rests;
mod rows;
mod counter;
mod record;
mod stored;

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use fault::Point;
use policy::{Revision, SandboxName};
use rusqlite::{Transaction, params};

use crate::cold::Cold;
use crate::database::{Database, Layout};
use crate::error::Error;
use crate::night::Night;
use crate::state::State;
use crate::store::counter::advance;
use crate::store::nights::NIGHTS;
pub(crate) use crate::store::record::{PolicyRow, Record};
use crate::store::rests::{KEPT, RESTS};
use crate::store::rows::{read_policy, read_record, text};
use crate::store::snapshots::SNAPSHOTS;
use crate::store::stored::{STORED, note_stored};
use crate::terms::{Terms, Uptime};

pub(crate) use crate::store::stored::number_of;

/// The layout of the tables. A store of an older layout is brought to it when it is opened; one of
/// another is refused, never guessed at.
const VERSION: i64 = 2;

/// From layout 1, whose sandboxes never slept, to 2.
const TO_2: &str = "
    ALTER TABLE sandbox ADD COLUMN terms TEXT;
    ALTER TABLE sandbox ADD COLUMN saved TEXT;
";

const TABLES: &str = "
    CREATE TABLE sandbox (
        name        TEXT PRIMARY KEY,
        tenant      TEXT NOT NULL,
        driver      TEXT NOT NULL,
        slot        INTEGER NOT NULL UNIQUE,
        incarnation INTEGER NOT NULL,
        memory_mib  INTEGER NOT NULL,
        vcpus       INTEGER NOT NULL,
        state       TEXT NOT NULL,
        reason      TEXT,
        process     TEXT,
        created     INTEGER NOT NULL,
        terms       TEXT,
        saved       TEXT
    ) STRICT;
    CREATE TABLE policy (
        scope    TEXT PRIMARY KEY,
        document TEXT NOT NULL,
        revision INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE counter (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT;
    INSERT INTO counter VALUES ('revision', 0), ('incarnation', 0);
";

/// What the disks of sandboxes can grow to.
const DISKS: &str = "
    CREATE TABLE IF NOT EXISTS disk (sandbox TEXT PRIMARY KEY, bytes INTEGER) STRICT;
";

/// What there was and is to be of boots from a disk alone.
const COLD: &str = "
    CREATE TABLE IF NOT EXISTS cold (sandbox TEXT PRIMARY KEY, cold TEXT NOT NULL) STRICT;
";

const SANDBOXES: &str = "
    SELECT sandbox.rowid, sandbox.*, disk.bytes AS disk, cold.cold AS cold, night.night AS night,
           (SELECT group_concat(remains, char(10)) FROM remains WHERE remains.sandbox = sandbox.name) AS remains,
           stored.stored AS stored
    FROM sandbox LEFT JOIN disk ON disk.sandbox = sandbox.name
    LEFT JOIN cold ON cold.sandbox = sandbox.name
    LEFT JOIN stored ON stored.sandbox = sandbox.name
    LEFT JOIN night ON night.sandbox = sandbox.name ORDER BY incarnation
";

/// The store. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Store(Database);

impl Store {
    /// Opens the store, making it where there is none.
    pub(crate) fn open(path: &Path) -> Result<Self, Error> {
        let layout = Layout {
            synchronous: "FULL",
            version: VERSION,
            tables: TABLES,
            older: &[(1, TO_2)],
            later: &[RESTS, KEPT, DISKS, COLD, NIGHTS, STORED, SNAPSHOTS],
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

    /// Every sandbox, oldest first. One whose row is damaged is there, too, as long as the row says
    /// whose it is.
    pub(crate) async fn sandboxes(&self) -> Result<Vec<Record>, Error> {
        let rows = self.run("reading the sandboxes", |store| {
            store
                .prepare(SANDBOXES)?
                .query_map([], |row| Ok((row.get("rowid")?, text(row, "name"), read_record(row))))?
                .collect::<rusqlite::Result<Vec<_>>>()
        });
        let read = |(id, name, record): (i64, String, rusqlite::Result<Record>)| {
            record.map_err(|problem| self.unreadable("sandbox", id, &name, &problem.to_string()))
        };
        rows.await?.into_iter().map(read).collect()
    }

    /// The refusal to go on without knowing what a row means.
    pub(crate) fn unreadable(&self, table: &str, id: i64, key: &str, problem: &str) -> Error {
        Error::Row {
            row: format!("the row {key:?} of the table {table}"),
            path: self.0.path().to_owned(),
            problem: problem.to_owned(),
            remedy: format!("DELETE FROM {table} WHERE rowid = {id}"),
        }
    }

    /// Writes a new sandbox with its policy: both or neither. Gives its incarnation and the
    /// policy's revision.
    pub(crate) async fn insert(
        &self,
        record: Record,
        document: String,
    ) -> Result<(u64, Revision), Error> {
        self.run("writing a new sandbox", move |store| {
            let entered = enter(store, &record, &document)?;
            fault::at(Point::SandboxToInsert);
            Ok(entered)
        })
        .await
        .inspect(|_| fault::at(Point::SandboxInserted))
    }

    /// Writes where a sandbox's journey is: its state, and what there is of it; of its night what is not as
    /// it was noted, if it was.
    pub(crate) async fn note(
        &self,
        record: &Record,
        state: State,
        noted: Option<&Night>,
    ) -> Result<(), Error> {
        let Record { name, process, reason, saved, cold, stored, .. } = record.clone();
        let moved = noted != Some(&record.night);
        let night = moved.then(|| (noted.cloned(), record.night.clone()));
        self.run("noting the state of a sandbox", move |store| {
            let process = process.as_ref().map(json).transpose()?;
            let saved = saved.as_ref().map(json).transpose()?;
            let reason = reason.as_ref().map(json).transpose()?;
            if let Some((noted, night)) = night {
                nights::write(store, name.as_str(), noted, &night)?;
            }
            store.execute(
                "UPDATE sandbox SET state = ?2, process = ?3, reason = ?4, saved = ?5 WHERE name = ?1",
                params![name.as_str(), word(&state), process, reason, saved],
            )?;
            note_stored(store, &name, stored.as_ref())?;
            note_cold(store, &name, &cold)
        })
        .await
    }

    /// Writes that a sandbox is another incarnation, which boots from its disk alone. Gives its number.
    pub(crate) async fn begin_anew(&self, record: &Record) -> Result<u64, Error> {
        let Record { name, cold, .. } = record.clone();
        self.run("noting a new incarnation of a sandbox", move |store| {
            let incarnation = advance(store, "incarnation")?;
            store.execute(
                "UPDATE sandbox SET incarnation = ?2, process = NULL WHERE name = ?1",
                params![name.as_str(), incarnation],
            )?;
            note_cold(store, &name, &cold)?;
            Ok(incarnation)
        })
        .await
    }

    /// Writes how long a sandbox lives and stays awake.
    pub(crate) async fn agree(&self, name: &SandboxName, terms: Terms) -> Result<(), Error> {
        let name = name.to_string();
        self.run("noting the terms of a sandbox", move |store| {
            store.execute(
                "UPDATE sandbox SET terms = ?2 WHERE name = ?1",
                params![name, json(&terms)?],
            )
        })
        .await
        .map(|_| ())
    }

    /// Forgets a sandbox and its policy, and remembers since when its slot rests; and that its
    /// `process` may be there, if so.
    pub(crate) async fn forget(&self, name: &SandboxName, process: bool) -> Result<(), Error> {
        let name = name.to_string();
        self.run("forgetting a sandbox", move |store| {
            let Uptime { boot, seconds } = Uptime::now();
            store.execute(
                "INSERT OR REPLACE INTO resting SELECT slot, ?2, ?3 FROM sandbox WHERE name = ?1",
                params![name, boot, seconds],
            )?;
            if process {
                store.execute(
                    "INSERT OR REPLACE INTO kept SELECT slot, ?2, driver FROM sandbox WHERE name = ?1",
                    params![name, boot],
                )?;
            }
            store.execute("DELETE FROM policy WHERE scope = ?1", [format!("sandbox/{name}")])?;
            for table in ["disk", "cold", "stored", "night", "remains"] {
                store.execute(&format!("DELETE FROM {table} WHERE sandbox = ?1"), [&name])?;
            }
            let gone = store.execute("DELETE FROM sandbox WHERE name = ?1", [name])?;
            fault::at(Point::SandboxToForget);
            Ok(gone)
        })
        .await
        .map(|_| fault::at(Point::SandboxForgotten))
    }

    /// Every policy there is, those that cannot be read among them.
    pub(crate) async fn policies(&self) -> Result<Vec<PolicyRow>, Error> {
        self.run("reading the policies", |store| {
            store
                .prepare("SELECT rowid, scope, document, revision FROM policy")?
                .query_map([], read_policy)?
                .collect()
        })
        .await
    }

    /// Writes a policy and gives its revision.
    pub(crate) async fn set_policy(
        &self,
        scope: String,
        document: String,
    ) -> Result<Revision, Error> {
        self.run("writing a policy", move |store| {
            let revision = advance(store, "revision")?;
            store.execute(
                "INSERT OR REPLACE INTO policy VALUES (?1, ?2, ?3)",
                params![scope, document, revision],
            )?;
            fault::at(Point::PolicyToWrite);
            Ok(Revision(revision))
        })
        .await
        .inspect(|_| fault::at(Point::PolicyWritten))
    }
}

impl Error {
    pub(crate) fn store(
        doing: &'static str,
        path: &Path,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        let (path, source) = (path.to_owned(), source.into());
        let code =
            source.downcast_ref::<rusqlite::Error>().and_then(rusqlite::Error::sqlite_error_code);
        if code == Some(rusqlite::ErrorCode::DiskFull) {
            return Self::NoRoom { doing, path, source };
        }
        Self::Store { doing, path, source }
    }
}

/// Writes a new sandbox with its policy, as a part of something larger.
fn enter(
    store: &Transaction<'_>,
    record: &Record,
    document: &str,
) -> rusqlite::Result<(u64, Revision)> {
    let incarnation = advance(store, "incarnation")?;
    let revision = advance(store, "revision")?;
    store.execute(
        "INSERT INTO sandbox (name, tenant, driver, slot, incarnation, memory_mib, vcpus, state, \
         created, terms) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)",
        params![
            record.name.as_str(),
            record.tenant.as_str(),
            word(&record.driver),
            record.slot.number(),
            incarnation,
            record.memory_mib,
            record.vcpus,
            word(&record.state),
            record.created.map(seconds).unwrap_or_default(),
            json(&record.terms)?,
        ],
    )?;
    store.execute(
        "INSERT OR REPLACE INTO policy VALUES (?1, ?2, ?3)",
        params![format!("sandbox/{}", record.name), document, revision],
    )?;
    store.execute(
        "INSERT OR REPLACE INTO disk VALUES (?1, ?2)",
        params![record.name.as_str(), record.disk],
    )?;
    Ok((incarnation, Revision(revision)))
}

/// One that was never booted so, and is not to be, has no row.
fn note_cold(store: &Transaction<'_>, name: &SandboxName, cold: &Cold) -> rusqlite::Result<()> {
    if *cold == Cold::default() {
        return Ok(());
    }
    let row = params![name.as_str(), json(cold)?];
    store.execute("INSERT OR REPLACE INTO cold VALUES (?1, ?2)", row).map(|_| ())
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

fn word<T: serde::Serialize>(value: &T) -> Option<String> {
    serde_json::to_value(value).ok()?.as_str().map(str::to_owned)
}

fn json<T: serde::Serialize>(value: &T) -> rusqlite::Result<String> {
    serde_json::to_string(value).map_err(|e| rusqlite::Error::ToSqlConversionFailure(Box::new(e)))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::time::Duration;

    use policy::{Policy, Slot};

    use super::*;
    use crate::reason::Reason;
    use crate::sandbox::Driver;

    pub(crate) fn record(name: &str, slot: u16) -> Record {
        Record {
            name: name.parse().unwrap(),
            tenant: "default".parse().unwrap(),
            driver: Driver::External,
            slot: Slot::new(slot).unwrap(),
            incarnation: 0,
            memory_mib: 256,
            vcpus: 1,
            disk: Some(7),
            state: State::Creating,
            reason: None,
            process: None,
            created: Some(UNIX_EPOCH + Duration::from_secs(7)),
            terms: Terms::none(),
            saved: None,
            cold: Cold::default(),
            night: Night::default(),
            stored: None,
        }
    }

    #[tokio::test]
    async fn what_was_written_is_there_after_a_reopen() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("postern.db");
        let document = Policy::default().to_json().to_string();
        {
            let store = Store::open(&path).unwrap();
            let first = store.insert(record("a", 1), document.clone()).await.unwrap();
            let second = store.insert(record("b", 2), document.clone()).await.unwrap();
            assert!(second.0 > first.0 && second.1 > first.1);
            let reason = Some(Reason::told_as("the whole".to_owned(), "a part"));
            let failed = Record { reason, ..record("b", 2) };
            store.note(&failed, State::Failed, Some(&failed.night)).await.unwrap();
            store.forget(&"a".parse().unwrap(), false).await.unwrap();
        }
        let store = Store::open(&path).unwrap();
        let resting = store.resting(Duration::from_secs(60)).await.unwrap();
        assert_eq!(resting, [Slot::new(1).unwrap()], "the slot of the forgotten one");
        let found = store.sandboxes().await.unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].name.as_str(), "b");
        assert_eq!(found[0].state, State::Failed);
        let reason = found[0].reason.as_ref().unwrap();
        assert_eq!((reason.full(), reason.told()), ("the whole", "a part"));
        assert_eq!(found[0].disk, Some(7));
        assert_eq!(found[0].created, Some(UNIX_EPOCH + Duration::from_secs(7)));
        let scopes: Vec<_> =
            store.policies().await.unwrap().into_iter().map(|row| row.scope).collect();
        assert_eq!(scopes, ["sandbox/b"]);
    }

    /// What an earlier version took, this one reads.
    #[tokio::test]
    async fn a_policy_in_the_journal_is_read_however_long_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("postern.db")).unwrap();
        let long =
            format!("{{\"default\":\"allow\"{}}}", " ".repeat(policy::document::MAX_DOCUMENT));
        assert!(Policy::from_json(&long).is_err(), "control: nobody could write it anew");
        store.set_policy("tenant/acme".to_owned(), long).await.unwrap();
        let [row] = &store.policies().await.unwrap()[..] else { panic!("one") };
        assert_eq!(row.scope, "tenant/acme");
        let policy = row.policy.as_ref().unwrap();
        assert_eq!(policy.default_effect(), policy::document::Effect::Allow);
    }

    #[tokio::test]
    async fn a_taken_name_or_slot_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("postern.db")).unwrap();
        let (_, first) = store.insert(record("a", 1), "{}".to_owned()).await.unwrap();
        assert!(store.insert(record("a", 2), "{}".to_owned()).await.is_err());
        assert!(store.insert(record("b", 1), "{}".to_owned()).await.is_err());
        assert_eq!(store.sandboxes().await.unwrap().len(), 1);
        let revision = store.set_policy("platform".to_owned(), "{}".to_owned()).await.unwrap();
        assert!(revision > first);
    }

    #[test]
    fn a_store_of_another_layout_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("postern.db");
        rusqlite::Connection::open(&path)
            .unwrap()
            .execute_batch("PRAGMA user_version = 99")
            .unwrap();
        let error = Store::open(&path).unwrap_err();
        let cause = std::error::Error::source(&error).unwrap().to_string();
        assert!(cause.contains("layout 99"), "{cause}");
    }

    /// Promise 21. What an older program wrote goes on as it was: asleep it never is.
    #[tokio::test]
    async fn a_store_of_the_layout_before_is_brought_to_this_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("postern.db");
        Store::open(&path).unwrap().insert(record("a", 1), "{}".to_owned()).await.unwrap();
        let old = "ALTER TABLE sandbox DROP COLUMN terms; ALTER TABLE sandbox DROP COLUMN saved;
                   PRAGMA user_version = 1";
        rusqlite::Connection::open(&path).unwrap().execute_batch(old).unwrap();
        let store = Store::open(&path).unwrap();
        let found = store.sandboxes().await.unwrap();
        assert_eq!((found[0].terms.clone(), found[0].reason.clone()), (Terms::none(), None));
        store.insert(record("b", 2), "{}".to_owned()).await.unwrap();
        assert_eq!(Store::open(&path).unwrap().sandboxes().await.unwrap().len(), 2);
    }
}
