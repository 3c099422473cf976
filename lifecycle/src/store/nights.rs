//! What the journal has of sandboxes that sleep, beside their rows: written when it moves, together with
//! their state, and gone when they run.

use rusqlite::{Transaction, params};

use crate::error::Error;
use crate::night::Night;
use crate::store::{Store, json};

pub(super) const NIGHTS: &str = "
    CREATE TABLE IF NOT EXISTS night (sandbox TEXT PRIMARY KEY, night TEXT NOT NULL) STRICT;
";

/// Writes what there is of a night, as a part of something larger.
pub(super) fn write(store: &Transaction<'_>, name: &str, night: &Night) -> rusqlite::Result<usize> {
    if night.is_empty() {
        return store.execute("DELETE FROM night WHERE sandbox = ?1", [name]);
    }
    store.execute("INSERT OR REPLACE INTO night VALUES (?1, ?2)", params![name, json(night)?])
}

impl Store {
    /// The audit has the end of every connection of every sandbox that sleeps.
    pub(crate) async fn ends_told(&self) -> Result<(), Error> {
        self.run("noting the ends of connections", |store| {
            let rows: Vec<(String, String)> = store
                .prepare("SELECT sandbox, night FROM night")?
                .query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?
                .collect::<rusqlite::Result<_>>()?;
            for (name, text) in rows {
                // What cannot be read tells the next daemon of nothing, either.
                let Ok(mut night) = serde_json::from_str::<Night>(&text) else { continue };
                night.told();
                write(store, &name, &night)?;
            }
            Ok(())
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::Driver;
    use crate::state::State;
    use crate::store::Record;
    use crate::store::tests::record;

    /// A connection as an earlier daemon wrote it.
    const REMAINS: &str = "{\"flow\":7,\"local\":\"93.184.216.34:25\",\"remote\":\"198.18.0.1:4711\",\
        \"next_in\":1,\"next_out\":2,\"window\":[1,2,3,4,5],\"segment\":1460,\"scales\":[7,7],\
        \"sack\":true,\"timestamp\":9,\"untold\":{\"kind\":\"connection\",\"protocol\":\"tcp\",\
        \"name\":null,\"destination\":\"93.184.216.34:25\",\"dialed\":null}}";

    fn night() -> Night {
        Night { remains: vec![serde_json::from_str(REMAINS).unwrap()], alarm: None }
    }

    /// Promise 41.
    #[tokio::test]
    async fn what_is_left_of_connections_is_there_until_the_sandbox_runs_or_is_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("postern.db");
        let name = "a".parse().unwrap();
        let found = async || Store::open(&path).unwrap().sandboxes().await.unwrap().remove(0).night;
        let store = Store::open(&path).unwrap();
        store.insert(record("a", 1), "{}".to_owned()).await.unwrap();
        assert_eq!(found().await, Night::default());
        let asleep = Record { driver: Driver::Qemu, night: night(), ..record("a", 1) };
        store.note(&asleep, State::Saving, true).await.unwrap();
        assert_eq!(found().await, night());
        store.note(&record("a", 1), State::Standby, false).await.unwrap();
        assert_eq!(found().await, night(), "it did not move");
        store.ends_told().await.unwrap();
        let told = found().await;
        assert_eq!((told.ended().count(), night().ended().count()), (1, 0));
        store.note(&record("a", 1), State::Running, true).await.unwrap();
        assert_eq!(found().await, Night::default());
        store.note(&asleep, State::Standby, true).await.unwrap();
        store.forget(&name, false).await.unwrap();
        store.insert(record("a", 1), "{}".to_owned()).await.unwrap();
        assert_eq!(found().await, Night::default(), "of another one of this name");
    }

    /// Promise 56. It only tells of what has ended: the guest hears that at its next word, too.
    #[tokio::test]
    async fn a_night_that_cannot_be_read_is_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("postern.db")).unwrap();
        store.insert(record("a", 1), "{}".to_owned()).await.unwrap();
        let asleep = Record { night: night(), ..record("a", 1) };
        store.note(&asleep, State::Standby, true).await.unwrap();
        for damaged in ["'{'", "'{\"remains\":[{\"flow\":7}]}'", "CAST(x'ff' AS TEXT)"] {
            let damage = format!("UPDATE night SET night = {damaged}");
            store.run("damaging it", move |store| store.execute(&damage, [])).await.unwrap();
            let [found] = &store.sandboxes().await.unwrap()[..] else { panic!("one") };
            assert_eq!((found.state, &found.night), (State::Standby, &Night::default()));
        }
    }
}
