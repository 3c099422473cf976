//! What the journal has of sandboxes that the object store has: where they are, under which keys nobody's
//! are, and which part of the store is this installation's.

use policy::SandboxName;
use rusqlite::{Transaction, params};
use vault::Stored;

use crate::error::Error;
use crate::store::{Store, json};

/// Where each is that is there; the last key that was given; the installation's name.
pub(super) const STORED: &str = "
    CREATE TABLE IF NOT EXISTS stored (sandbox TEXT PRIMARY KEY, stored TEXT NOT NULL) STRICT;
    CREATE TABLE IF NOT EXISTS node (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
    INSERT OR IGNORE INTO counter VALUES ('stored', 0);
    INSERT OR IGNORE INTO node VALUES ('installation', lower(hex(randomblob(8))));
";

impl Store {
    /// The name of this installation in a store that it may share: no other has it.
    pub(crate) async fn installation(&self) -> Result<String, Error> {
        self.run("reading the name of this installation", |store| {
            let name = "SELECT value FROM node WHERE name = 'installation'";
            store.query_row(name, [], |row| row.get(0))
        })
        .await
    }

    /// A key under which nothing was ever stored.
    pub(crate) async fn next_key(&self, name: &SandboxName) -> Result<String, Error> {
        let number = self.run("taking a key of the object store", |store| {
            crate::store::advance(store, "stored")
        });
        Ok(format!("{}-{name}", number.await?))
    }

    /// The number of the key that was given last.
    pub(crate) async fn last_key(&self) -> Result<u64, Error> {
        self.run("reading the last key of the object store", |store| {
            let last = "SELECT value FROM counter WHERE name = 'stored'";
            store.query_row(last, [], |row| row.get(0))
        })
        .await
    }
}

/// The number in a key.
pub(crate) fn number_of(key: &str) -> Option<u64> {
    key.split_once('-')?.0.parse().ok()
}

pub(super) fn note_stored(
    store: &Transaction<'_>,
    name: &SandboxName,
    stored: Option<&Stored>,
) -> rusqlite::Result<()> {
    let done = match stored {
        Some(stored) => store.execute(
            "INSERT OR REPLACE INTO stored VALUES (?1, ?2)",
            params![name.as_str(), json(stored)?],
        ),
        None => store.execute("DELETE FROM stored WHERE sandbox = ?1", [name.as_str()]),
    };
    done.map(|_| ())
}
