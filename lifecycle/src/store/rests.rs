//! What the journal remembers of slots that nobody has: since when they rest, and of which the last guest
//! may be there still. By clocks that nobody sets, of one boot of this host: nothing here outlives that.

use std::time::Duration;

use policy::Slot;
use rusqlite::params;

use crate::error::Error;
use crate::sandbox::Driver;
use crate::store::{Store, word};
use crate::terms::Uptime;

/// Slots that were given up, and when: by the clock that nobody sets, of one boot of this host.
pub(super) const RESTS: &str = "
    CREATE TABLE IF NOT EXISTS resting (
        slot  INTEGER PRIMARY KEY,
        boot  TEXT NOT NULL,
        since INTEGER NOT NULL
    ) STRICT;
";

/// Slots whose last guest may be there though its sandbox is not, in one boot of this host, and what
/// ran it.
pub(super) const KEPT: &str = "
    CREATE TABLE IF NOT EXISTS kept (
        slot   INTEGER PRIMARY KEY,
        boot   TEXT NOT NULL,
        driver TEXT NOT NULL
    ) STRICT;
";

impl Store {
    /// The slots that were given up less than `pause` ago, or in another boot: how long ago that was,
    /// no clock can tell.
    pub(crate) async fn resting(&self, pause: Duration) -> Result<Vec<Slot>, Error> {
        self.run("reading the slots that rest", move |store| {
            let Uptime { boot, seconds } = Uptime::now();
            // Those of another boot begin anew: nothing here outlives a boot, so one rest is enough.
            store.execute(
                "UPDATE resting SET boot = ?1, since = ?2 WHERE boot <> ?1",
                params![boot, seconds],
            )?;
            store.execute(
                "DELETE FROM resting WHERE since + ?1 < ?2",
                params![pause.as_secs(), seconds],
            )?;
            let slots: Vec<i64> = store
                .prepare("SELECT slot FROM resting")?
                .query_map([], |row| row.get(0))?
                .collect::<rusqlite::Result<_>>()?;
            Ok(slots.into_iter().filter_map(|slot| Slot::new(slot.try_into().ok()?)).collect())
        })
        .await
    }

    /// The slots whose last guest may be there, and what ran it. Nothing of another boot is.
    pub(crate) async fn kept(&self) -> Result<Vec<(Slot, Driver)>, Error> {
        self.run("reading the slots that are kept", |store| {
            store.execute("DELETE FROM kept WHERE boot <> ?1", [Uptime::now().boot])?;
            let kept: Vec<(u16, String)> = store
                .prepare("SELECT slot, driver FROM kept")?
                .query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?
                .collect::<rusqlite::Result<_>>()?;
            // What is not known to be a process of ours may be anybody's.
            let ours = word(&Driver::Qemu);
            let driver = |text| match ours.as_ref() == Some(&text) {
                true => Driver::Qemu,
                false => Driver::External,
            };
            let kept = kept.into_iter();
            Ok(kept.filter_map(|(slot, text)| Some((Slot::new(slot)?, driver(text)))).collect())
        })
        .await
    }

    /// The last guest of a slot has ended: from now on the slot rests.
    pub(crate) async fn release(&self, slot: Slot) -> Result<(), Error> {
        self.run("giving back a slot", move |store| {
            let Uptime { boot, seconds } = Uptime::now();
            store.execute(
                "INSERT OR REPLACE INTO resting VALUES (?1, ?2, ?3)",
                params![slot.number(), boot, seconds],
            )?;
            store.execute("DELETE FROM kept WHERE slot = ?1", [slot.number()])
        })
        .await
        .map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Record;
    use crate::store::tests::record;

    /// Promise 28. The clock on the wall may say what it will.
    #[tokio::test]
    async fn a_rest_goes_by_the_clock_of_the_boot_and_begins_anew_after_a_boot() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("postern.db")).unwrap();
        store.insert(record("a", 1), "{}".to_owned()).await.unwrap();
        store.forget(&"a".parse().unwrap(), false).await.unwrap();
        let rests = async || !store.resting(Duration::from_secs(60)).await.unwrap().is_empty();
        let change = async |columns: &'static str| {
            let update = format!("UPDATE resting SET {columns}");
            store.run("changing a rest", move |store| store.execute(&update, [])).await.unwrap();
        };
        assert!(rests().await);
        change("since = since - 50").await;
        assert!(rests().await, "not yet long enough");
        change("since = since - 3600, boot = 'another'").await;
        assert!(rests().await, "who knows how long ago that was");
        assert!(rests().await, "and it is not over at the next look");
        change("since = since - 61").await;
        assert!(!rests().await, "an hour of this boot is enough");
    }

    /// Promises 28, 59.
    #[tokio::test]
    async fn a_slot_whose_guest_may_be_there_is_kept_until_another_boot_or_until_it_is_given_back()
    {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("postern.db")).unwrap();
        let (a, b) = (Slot::new(1).unwrap(), Slot::new(2).unwrap());
        store.insert(record("a", 1), "{}".to_owned()).await.unwrap();
        let ours = Record { driver: Driver::Qemu, ..record("b", 2) };
        store.insert(ours, "{}".to_owned()).await.unwrap();
        store.forget(&"a".parse().unwrap(), true).await.unwrap();
        store.forget(&"b".parse().unwrap(), true).await.unwrap();
        assert_eq!(store.kept().await.unwrap(), [(a, Driver::External), (b, Driver::Qemu)]);
        store.release(b).await.unwrap();
        assert_eq!(store.kept().await.unwrap(), [(a, Driver::External)]);
        assert!(store.resting(Duration::from_secs(60)).await.unwrap().contains(&b));
        let other = |store: &rusqlite::Transaction<'_>| {
            store.execute("UPDATE kept SET boot = 'another'", [])
        };
        store.run("another boot", other).await.unwrap();
        assert_eq!(store.kept().await.unwrap(), []);
    }
}
