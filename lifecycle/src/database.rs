//! A SQLite file of this room, in WAL mode: opened at the layout that this program knows, and asked in whole
//! transactions, off the threads that serve guests.
//!
//! Never guesses at a file of another layout, and never leaves a part of a transaction behind.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use rusqlite::{Connection, Transaction};

use crate::error::Error;
use crate::threads::{aside, locked};

/// What a file is to look like.
#[derive(Debug)]
pub(crate) struct Layout<'a> {
    /// When a transaction is on the disk (SQLite's `synchronous`): `FULL` when it has returned, `NORMAL` so
    /// that an end of the process loses none, and a power failure the last ones.
    pub(crate) synchronous: &'static str,
    /// Its number, kept as `user_version`. A file without one is new.
    pub(crate) version: i64,
    /// Makes its tables.
    pub(crate) tables: &'a str,
    /// What brings which older layout to this one.
    pub(crate) older: &'a [(i64, &'a str)],
    /// Makes the tables that came without a new number, where they are missing.
    pub(crate) later: &'a [&'a str],
}

/// An open file. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Database {
    connection: Arc<Mutex<Connection>>,
    path: PathBuf,
}

impl Database {
    /// Opens it, making it where there is none.
    pub(crate) fn open(path: &Path, layout: &Layout<'_>) -> Result<Self, Error> {
        let fail = |doing| move |source| Error::store(doing, path, source);
        let Layout { synchronous, version, tables, older, later } = layout;
        let connection = Connection::open(path).map_err(fail("opening"))?;
        connection
            .execute_batch(&format!(
                "PRAGMA journal_mode = WAL; PRAGMA synchronous = {synchronous};"
            ))
            .map_err(fail("setting up the journal mode"))?;
        let found: i64 = connection
            .query_row("PRAGMA user_version", [], |row| row.get(0))
            .map_err(fail("reading the version"))?;
        let change = |text: &str, doing| {
            let text = format!("BEGIN; {text} PRAGMA user_version = {version}; COMMIT;");
            connection.execute_batch(&text).map_err(fail(doing))
        };
        match older.iter().find(|(older, _)| *older == found) {
            _ if found == *version => {}
            Some((_, step)) => change(step, "bringing the tables to this program's layout")?,
            None if found == 0 => change(tables, "making the tables")?,
            None => {
                let problem = format!("it has layout {found}, this program knows {version}");
                return Err(Error::store("reading the version", path, problem));
            }
        }
        for later in *later {
            connection.execute_batch(later).map_err(fail("making the tables"))?;
        }
        Ok(Self { connection: Arc::new(Mutex::new(connection)), path: path.to_owned() })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Does all of this, or nothing.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        doing: &'static str,
        act: impl FnOnce(&Transaction<'_>) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, Error> {
        let connection = Arc::clone(&self.connection);
        let done = aside(move || -> rusqlite::Result<T> {
            // A holder that panicked did so inside a transaction, which was rolled back.
            let mut connection = locked(&connection);
            let transaction = connection.transaction()?;
            let out = act(&transaction)?;
            transaction.commit()?;
            Ok(out)
        });
        match done.await {
            Ok(done) => done.map_err(|source| Error::store(doing, &self.path, source)),
            Err(lost) => Err(Error::store(doing, &self.path, lost)),
        }
    }
}
