//! What the journal has of sandboxes that sleep, beside their rows: written when it moves, together with
//! their state, and gone when they run.

use std::collections::HashMap;
use std::net::SocketAddrV4;

use egress::Remains;
use rusqlite::{Row, Transaction, params};

use crate::error::Error;
use crate::night::Night;
use crate::store::{Store, json};

/// A connection has a row of its own: there are a thousand of a sandbox, and they end one by one. Earlier
/// versions had them all in the row of the night, where they are still read.
pub(super) const NIGHTS: &str = "
    CREATE TABLE IF NOT EXISTS night (sandbox TEXT PRIMARY KEY, night TEXT NOT NULL) STRICT;
    CREATE TABLE IF NOT EXISTS remains (
        sandbox TEXT NOT NULL,
        ends    TEXT NOT NULL,
        remains TEXT NOT NULL,
        PRIMARY KEY (sandbox, ends)
    ) STRICT, WITHOUT ROWID;
";

/// Writes what of a night is not as it was noted, as a part of something larger; all of it where nobody knows
/// what was.
pub(super) fn write(
    store: &Transaction<'_>,
    name: &str,
    noted: Option<Night>,
    night: &Night,
) -> rusqlite::Result<()> {
    if noted.is_none() {
        store.execute("DELETE FROM remains WHERE sandbox = ?1", [name])?;
    }
    if noted.as_ref().is_none_or(|noted| noted.alarm != night.alarm) {
        match &night.alarm {
            None => store.execute("DELETE FROM night WHERE sandbox = ?1", [name])?,
            alarm => {
                let row = Night { alarm: alarm.clone(), ..Night::default() };
                let row = params![name, json(&row)?];
                store.execute("INSERT OR REPLACE INTO night VALUES (?1, ?2)", row)?
            }
        };
    }
    let noted = noted.unwrap_or_default().remains.into_iter();
    let mut noted: HashMap<_, _> = noted.map(|one| (one.ends(), one)).collect();
    for one in &night.remains {
        if noted.remove(&one.ends()).as_ref() != Some(one) {
            put(store, name, one)?;
        }
    }
    for ends in noted.into_keys() {
        let gone = params![name, key(ends)];
        store.execute("DELETE FROM remains WHERE sandbox = ?1 AND ends = ?2", gone)?;
    }
    Ok(())
}

/// Pairs of text, those that are none left out.
fn rows(store: &Transaction<'_>, query: &str) -> rusqlite::Result<Vec<(String, String)>> {
    let read = |row: &Row<'_>| Ok((row.get(0)?, row.get(1).ok()));
    let rows = store.prepare(query)?.query_map([], read)?.collect::<rusqlite::Result<Vec<_>>>()?;
    Ok(rows.into_iter().filter_map(|(name, text)| Some((name, text?))).collect())
}

fn put(store: &Transaction<'_>, name: &str, one: &Remains) -> rusqlite::Result<usize> {
    let row = params![name, key(one.ends()), json(one)?];
    store.execute("INSERT OR REPLACE INTO remains VALUES (?1, ?2, ?3)", row)
}

fn key((local, remote): (SocketAddrV4, SocketAddrV4)) -> String {
    format!("{local} {remote}")
}

impl Store {
    /// The audit has the end of every connection of every sandbox that sleeps.
    pub(crate) async fn ends_told(&self) -> Result<(), Error> {
        self.run("noting the ends of connections", |store| {
            // What cannot be read tells the next daemon of nothing, either.
            for (name, text) in rows(store, "SELECT sandbox, night FROM night")? {
                let Ok(mut night) = serde_json::from_str::<Night>(&text) else { continue };
                night.told();
                let row = params![name, json(&night)?];
                store.execute("UPDATE night SET night = ?2 WHERE sandbox = ?1", row)?;
            }
            for (name, text) in rows(store, "SELECT sandbox, remains FROM remains")? {
                let Ok(mut one) = serde_json::from_str::<Remains>(&text) else { continue };
                if one.is_untold() {
                    one.told();
                    put(store, &name, &one)?;
                }
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
        Night { remains: vec![serde_json::from_str(REMAINS).unwrap()], ..Night::default() }
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
        store.note(&asleep, State::Saving, None).await.unwrap();
        assert_eq!(found().await, night());
        store.note(&record("a", 1), State::Standby, Some(&Night::default())).await.unwrap();
        assert_eq!(found().await, night(), "it did not move");
        store.ends_told().await.unwrap();
        let told = found().await;
        assert_eq!((told.ended().count(), night().ended().count()), (1, 0));
        store.note(&record("a", 1), State::Running, Some(&told)).await.unwrap();
        assert_eq!(found().await, Night::default());
        store.note(&asleep, State::Standby, Some(&Night::default())).await.unwrap();
        store.forget(&name, false).await.unwrap();
        store.insert(record("a", 1), "{}".to_owned()).await.unwrap();
        assert_eq!(found().await, Night::default(), "of another one of this name");
    }

    /// Promise 57. A thousand that end one by one, and alarms that are moved, are a row each.
    #[tokio::test]
    async fn what_moves_in_a_night_is_all_that_is_written_of_it() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("postern.db")).unwrap();
        store.insert(record("a", 1), "{}".to_owned()).await.unwrap();
        let one = |port: u16| {
            let text = REMAINS.replace(":4711", &format!(":{port}"));
            serde_json::from_str::<Remains>(&text).unwrap()
        };
        let before = Night { remains: (1..=1000).map(one).collect(), ..Night::default() };
        let asleep = |night: &Night| Record { night: night.clone(), ..record("a", 1) };
        store.note(&asleep(&before), State::Standby, None).await.unwrap();
        let changes = || store.run("counting", |store| Ok(store.total_changes()));
        let found = async || {
            let mut night = store.sandboxes().await.unwrap().remove(0).night;
            night.remains.sort_by_key(Remains::ends);
            night
        };
        assert_eq!(found().await, before);
        let mut after = before.clone();
        after.remains[6].told();
        after.remains.pop();
        after.alarm = serde_json::from_str("{\"wall\":9,\"boot\":\"one\",\"seconds\":7}").unwrap();
        let start = changes().await.unwrap();
        store.note(&asleep(&after), State::Standby, Some(&before)).await.unwrap();
        // The two, the alarm, the sandbox itself, and that the store does not have it.
        assert!(changes().await.unwrap() - start <= 5);
        assert_eq!(found().await, after);
        store.note(&asleep(&Night::default()), State::Running, Some(&after)).await.unwrap();
        assert_eq!(found().await, Night::default());
    }

    /// Promise 41. What an earlier version has written is found, and written anew as a whole.
    #[tokio::test]
    async fn a_night_of_an_earlier_version_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("postern.db")).unwrap();
        store.insert(record("a", 1), "{}".to_owned()).await.unwrap();
        let row = format!("INSERT INTO night VALUES ('a', '{{\"remains\":[{REMAINS}]}}')");
        store.run("as it was", move |store| store.execute(&row, [])).await.unwrap();
        let found = async || store.sandboxes().await.unwrap().remove(0).night;
        assert_eq!(found().await, night());
        store.ends_told().await.unwrap();
        let told = found().await;
        assert_eq!((told.remains.len(), told.ended().count()), (1, 1));
        let asleep = Record { night: night(), ..record("a", 1) };
        store.note(&asleep, State::Standby, None).await.unwrap();
        assert_eq!(found().await, night(), "once");
    }

    /// Promise 56. It only tells of what has ended: the guest hears that at its next word, too.
    #[tokio::test]
    async fn a_night_that_cannot_be_read_is_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("postern.db")).unwrap();
        store.insert(record("a", 1), "{}".to_owned()).await.unwrap();
        let asleep = Record { night: night(), ..record("a", 1) };
        store.note(&asleep, State::Standby, None).await.unwrap();
        let alarm = "INSERT INTO night VALUES ('a', '{}')";
        store.run("an alarm", move |store| store.execute(alarm, [])).await.unwrap();
        for damaged in ["'{'", "'{\"remains\":[{\"flow\":7}]}'", "CAST(x'ff' AS TEXT)"] {
            for table in ["night", "remains"] {
                let damage = format!("UPDATE {table} SET {table} = {damaged}");
                store.run("damaging it", move |store| store.execute(&damage, [])).await.unwrap();
            }
            store.ends_told().await.unwrap();
            let [found] = &store.sandboxes().await.unwrap()[..] else { panic!("one") };
            assert_eq!((found.state, &found.night), (State::Standby, &Night::default()));
        }
    }
}
