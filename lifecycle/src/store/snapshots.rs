//! What the journal has of snapshots, and who has a key of the object store: a key that nobody has is
//! forgotten there, and no other.
//!
//! A sandbox that is made of a snapshot has its key as long as the store has all of it, so that the
//! snapshot may be removed meanwhile; a key comes to others only through the snapshot's own row.

use policy::{Revision, SandboxName, SnapshotName, TenantName};
use rusqlite::{OptionalExtension, Transaction, params};

use fault::Point;

use crate::error::{Error, Field};
use crate::snapshot::Snapshot;
use crate::state::State;
use crate::store::{Record, Store, advance, enter, json, nights, note_cold, note_stored, word};

pub(super) const SNAPSHOTS: &str = "
    CREATE TABLE IF NOT EXISTS snapshot (
        name TEXT PRIMARY KEY, tenant TEXT NOT NULL, key TEXT NOT NULL, bytes INTEGER NOT NULL,
        snapshot TEXT NOT NULL
    ) STRICT;
";

/// Snapshots that one tenant may have, whatever they hold: each is a row that is read to list them.
const MOST: u64 = 1000;

/// What a snapshot may be, as far as the journal knows.
enum Room {
    Fits,
    Taken,
    Many,
    Over(u64),
}

impl Store {
    /// Every snapshot by name; what cannot be read of them is logged and left out.
    pub(crate) async fn snapshots(&self) -> Result<Vec<Snapshot>, Error> {
        let texts = self.run("reading the snapshots", |store| {
            store
                .prepare("SELECT snapshot FROM snapshot ORDER BY name")?
                .query_map([], |row| row.get::<_, String>(0))?
                .collect::<rusqlite::Result<Vec<_>>>()
        });
        Ok(texts.await?.iter().filter_map(|text| read(text)).collect())
    }

    /// The snapshot of this name.
    pub(crate) async fn snapshot(&self, name: &SnapshotName) -> Result<Option<Snapshot>, Error> {
        let name = name.to_string();
        let text = self.run("reading a snapshot", move |store| {
            let select = "SELECT snapshot FROM snapshot WHERE name = ?1";
            store.query_row(select, [name], |row| row.get::<_, String>(0)).optional()
        });
        Ok(text.await?.and_then(|text| read(&text)))
    }

    /// Refuses a snapshot whose name is taken, or whose tenant has as much as one may have already.
    pub(crate) async fn check_snapshot(
        &self,
        name: &SnapshotName,
        tenant: &TenantName,
        most: u64,
    ) -> Result<(), Error> {
        let (key, whose) = (name.clone(), tenant.clone());
        let room = self.run("looking for room for a snapshot", move |store| {
            // It needs some.
            room(store, &key, &whose, 1, most)
        });
        refused(room.await?, name, tenant, most)
    }

    /// Writes a snapshot: from here on there is one. Refused as above, by the bytes that it has.
    pub(crate) async fn keep_snapshot(&self, snapshot: &Snapshot, most: u64) -> Result<(), Error> {
        let Snapshot { name, tenant, .. } = snapshot;
        let written = snapshot.clone();
        let kept = self.run("writing a snapshot", move |store| {
            let Snapshot { name, tenant, stored, .. } = &written;
            let room = room(store, name, tenant, stored.bytes, most)?;
            if matches!(room, Room::Fits) {
                store.execute(
                    "INSERT INTO snapshot VALUES (?1, ?2, ?3, ?4, ?5)",
                    params![
                        name.as_str(),
                        tenant.as_str(),
                        stored.key,
                        i64::try_from(stored.bytes).unwrap_or(i64::MAX),
                        json(&written)?
                    ],
                )?;
            }
            fault::at(Point::SnapshotToNote);
            Ok(room)
        });
        refused(kept.await?, name, tenant, most)?;
        fault::at(Point::SnapshotNoted);
        Ok(())
    }

    /// Forgets this very snapshot; whether it was there.
    pub(crate) async fn drop_snapshot(&self, snapshot: &Snapshot) -> Result<bool, Error> {
        let (name, key) = (snapshot.name.to_string(), snapshot.stored.key.clone());
        let dropped = self.run("forgetting a snapshot", move |store| {
            let gone = "DELETE FROM snapshot WHERE name = ?1 AND key = ?2";
            let gone = store.execute(gone, params![name, key])?;
            fault::at(Point::SnapshotToForget);
            Ok(gone > 0)
        });
        let dropped = dropped.await?;
        fault::at(Point::SnapshotForgotten);
        Ok(dropped)
    }

    /// Writes a new sandbox that goes on from this snapshot, with its policy: all or nothing. Gives its
    /// incarnation and the policy's revision; none where the snapshot is gone.
    pub(crate) async fn insert_clone(
        &self,
        record: Record,
        document: String,
        of: &Snapshot,
    ) -> Result<Option<(u64, Revision)>, Error> {
        let (name, key) = (of.name.to_string(), of.stored.key.clone());
        self.run("writing a new sandbox", move |store| {
            let there = "SELECT 1 FROM snapshot WHERE name = ?1 AND key = ?2";
            if store.query_row(there, params![name, key], |_| Ok(())).optional()?.is_none() {
                return Ok(None);
            }
            let entered = enter(store, &record, &document)?;
            note_stored(store, &record.name, record.stored.as_ref())?;
            nights::write(store, record.name.as_str(), None, &record.night)?;
            fault::at(Point::CloneToInsert);
            Ok(Some(entered))
        })
        .await
        .inspect(|_| fault::at(Point::CloneInserted))
    }

    /// Writes that a sandbox is what this snapshot is, as another incarnation: what it was is over in the same
    /// step. Gives its number; none where the snapshot is gone.
    pub(crate) async fn rewind(&self, record: Record, to: &Snapshot) -> Result<Option<u64>, Error> {
        let (snapshot, key) = (to.name.to_string(), to.stored.key.clone());
        let done = self.run("noting that a sandbox goes back to a snapshot", move |store| {
            let there = "SELECT 1 FROM snapshot WHERE name = ?1 AND key = ?2";
            let found = store.query_row(there, params![snapshot, key], |_| Ok(())).optional()?;
            if found.is_none() {
                return Ok(None);
            }
            let name = record.name.as_str();
            let incarnation = advance(store, "incarnation")?;
            // The process stays noted: a next daemon has to end it.
            store.execute(
                "UPDATE sandbox SET incarnation = ?2, state = ?3, saved = NULL, reason = NULL
                 WHERE name = ?1",
                params![name, incarnation, word(&State::Suspended)],
            )?;
            note_stored(store, &record.name, record.stored.as_ref())?;
            note_cold(store, &record.name, &record.cold)?;
            nights::write(store, name, None, &record.night)?;
            fault::at(Point::RewindToNote);
            Ok(Some(incarnation))
        });
        let done = done.await?;
        fault::at(Point::RewindNoted);
        Ok(done)
    }

    /// Whether a snapshot, or a sandbox other than this one, has this key.
    pub(crate) async fn is_held(
        &self,
        key: String,
        but: Option<SandboxName>,
    ) -> Result<bool, Error> {
        self.run("looking who has a key of the object store", move |store| {
            store.query_row(
                "SELECT EXISTS (SELECT 1 FROM snapshot WHERE key = ?1) OR EXISTS (
                     SELECT 1 FROM stored WHERE sandbox IS NOT ?2 AND json_extract(stored, '$.key') = ?1)",
                params![key, but.as_ref().map(SandboxName::as_str)],
                |row| row.get(0),
            )
        })
        .await
    }

    /// The keys of all snapshots, of those that cannot be read, too.
    pub(crate) async fn snapshot_keys(&self) -> Result<Vec<String>, Error> {
        self.run("reading the keys of snapshots", |store| {
            store.prepare("SELECT key FROM snapshot")?.query_map([], |row| row.get(0))?.collect()
        })
        .await
    }
}

fn read(text: &str) -> Option<Snapshot> {
    let read = serde_json::from_str(text);
    read.inspect_err(|error| tracing::error!(%error, "a snapshot is damaged in the journal")).ok()
}

fn room(
    store: &Transaction<'_>,
    name: &SnapshotName,
    tenant: &TenantName,
    bytes: u64,
    most: u64,
) -> rusqlite::Result<Room> {
    let taken = "SELECT 1 FROM snapshot WHERE name = ?1";
    if store.query_row(taken, [name.as_str()], |_| Ok(())).optional()?.is_some() {
        return Ok(Room::Taken);
    }
    let has = "SELECT count(*), coalesce(sum(bytes), 0) FROM snapshot WHERE tenant = ?1";
    let (count, has): (u64, u64) =
        store.query_row(has, [tenant.as_str()], |row| Ok((row.get(0)?, row.get(1)?)))?;
    let all = has.saturating_add(bytes);
    Ok(match all > most {
        _ if count >= MOST => Room::Many,
        true => Room::Over(all),
        false => Room::Fits,
    })
}

fn refused(room: Room, name: &SnapshotName, tenant: &TenantName, most: u64) -> Result<(), Error> {
    let (problem, fix) = match room {
        Room::Fits => return Ok(()),
        Room::Taken => return Err(Error::SnapshotExists(name.clone())),
        Room::Many => (
            format!("would be one more than the {MOST} that tenant {tenant} may have"),
            "remove a snapshot",
        ),
        Room::Over(all) => (
            format!(
                "would make {} MiB of tenant {tenant} in the object store, which is more than the {} MiB \
                 that one tenant's snapshots may have",
                all >> 20,
                most >> 20
            ),
            "remove a snapshot, or have `tenants.snapshots` raised",
        ),
    };
    Err(Error::Share(Field::new("snapshot", name, &problem, fix)))
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;
    use crate::store::tests::record;

    fn snapshot(name: &str, number: u64, bytes: u64) -> Snapshot {
        let stored = serde_json::json!({
            "key": format!("{number}-a"), "url": "/store", "bytes": bytes, "list": "ab",
        });
        let stored = serde_json::from_value(stored).unwrap();
        let when = UNIX_EPOCH + Duration::from_secs(7);
        record("a", 1).snapshot(name.parse().unwrap(), stored, when)
    }

    fn clone_of(snapshot: &Snapshot, name: &str, slot: u16) -> Record {
        Record { stored: Some(snapshot.stored.clone()), ..record(name, slot) }
    }

    /// Promise 70.
    #[tokio::test]
    async fn a_snapshot_is_there_once_it_is_written_and_its_tenant_has_no_more_than_it_may() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("postern.db");
        let store = Store::open(&path).unwrap();
        let (one, two) = (snapshot("one", 1, 6 << 20), snapshot("two", 2, 4 << 20));
        store.keep_snapshot(&one, 10 << 20).await.unwrap();
        let taken = store.keep_snapshot(&snapshot("one", 3, 1), 10 << 20).await;
        assert!(matches!(taken, Err(Error::SnapshotExists(_))), "{taken:?}");
        let refused = store.keep_snapshot(&two, (10 << 20) - 1).await;
        let Err(Error::Share(field)) = refused else { panic!("{refused:?}") };
        assert!(field.fix.contains("tenants.snapshots"), "{field:?}");
        store.keep_snapshot(&two, 10 << 20).await.unwrap();
        let (name, tenant) = ("three".parse().unwrap(), "default".parse().unwrap());
        assert!(store.check_snapshot(&name, &tenant, 10 << 20).await.is_err(), "it is full");
        let other = "other".parse().unwrap();
        store.check_snapshot(&name, &other, 10 << 20).await.expect("another tenant has none");
        drop(store);
        let store = Store::open(&path).unwrap();
        assert_eq!(store.snapshots().await.unwrap(), [one.clone(), two.clone()]);
        // Another one under its name is not what was found.
        assert!(!store.drop_snapshot(&snapshot("one", 9, 1)).await.unwrap());
        assert!(store.drop_snapshot(&one).await.unwrap());
        assert!(!store.drop_snapshot(&one).await.unwrap());
        assert_eq!(store.snapshot(&two.name).await.unwrap(), Some(two));
        assert_eq!(store.snapshot(&one.name).await.unwrap(), None);
    }

    /// Promises 70, 71. What still goes on from a snapshot that is removed has its key.
    #[tokio::test]
    async fn a_key_is_held_by_its_snapshot_and_by_each_sandbox_that_has_not_got_its_files_yet() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("postern.db")).unwrap();
        let one = snapshot("one", 1, 1);
        let held = async |but: &str| {
            store.is_held(one.stored.key.clone(), but.parse().ok()).await.unwrap()
        };
        assert!(!held("b").await);
        store.keep_snapshot(&one, 9).await.unwrap();
        assert!(held("b").await);
        let clone =
            |name, slot| store.insert_clone(clone_of(&one, name, slot), "{}".to_owned(), &one);
        let first = clone("b", 2).await.unwrap().expect("made");
        let second = clone("c", 3).await.unwrap().expect("made");
        assert!(second.0 > first.0, "another incarnation");
        assert!(store.drop_snapshot(&one).await.unwrap());
        assert!(clone("d", 4).await.unwrap().is_none(), "nobody comes to it any more");
        assert_eq!(store.sandboxes().await.unwrap().len(), 2);
        assert!(held("b").await && held("c").await);
        store.note(&record("c", 3), State::Running, None).await.unwrap();
        assert!(!held("b").await && held("c").await, "only its own row has it");
        store.forget(&"b".parse().unwrap(), false).await.unwrap();
        assert!(!held("c").await);
    }

    /// Promise 72.
    #[tokio::test]
    async fn a_sandbox_that_goes_back_is_the_snapshot_in_one_step_or_is_what_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("postern.db")).unwrap();
        let one = snapshot("one", 1, 1);
        let first = store.insert(record("a", 1), "{}".to_owned()).await.unwrap().0;
        store.note(&record("a", 1), State::Running, None).await.unwrap();
        let then = || Record { stored: Some(one.stored.clone()), ..record("a", 1) };
        let found = async || store.sandboxes().await.unwrap().remove(0);
        assert_eq!(store.rewind(then(), &one).await.unwrap(), None, "there is no such snapshot");
        let is = found().await;
        assert_eq!((is.state, is.incarnation, is.stored), (State::Running, first, None));
        store.keep_snapshot(&one, 9).await.unwrap();
        let second = store.rewind(then(), &one).await.unwrap().expect("done");
        let is = found().await;
        assert_eq!((is.state, is.incarnation), (State::Suspended, second));
        assert!(second > first && is.stored == Some(one.stored.clone()));
    }

    /// Promise 56. Its files are kept, for whoever mends it.
    #[tokio::test]
    async fn a_snapshot_that_cannot_be_read_is_left_out_and_keeps_its_key() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("postern.db")).unwrap();
        let (one, two) = (snapshot("one", 1, 1), snapshot("two", 2, 1));
        store.keep_snapshot(&one, 9).await.unwrap();
        store.keep_snapshot(&two, 9).await.unwrap();
        let damage = "UPDATE snapshot SET snapshot = '{' WHERE name = 'one'";
        store.run("damaging it", move |store| store.execute(damage, [])).await.unwrap();
        assert_eq!(store.snapshots().await.unwrap(), [two]);
        assert_eq!(store.snapshot(&one.name).await.unwrap(), None);
        assert_eq!(store.snapshot_keys().await.unwrap(), ["1-a", "2-a"]);
    }
}
