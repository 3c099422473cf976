//! What the journal remembers of slots that nobody has: since when they rest, and of which the last guest
//! may be there still. By clocks that nobody sets, of one boot of this host: nothing here outlives that.

use std::time::Duration;

use policy::Slot;
use rusqlite::params;

use crate::error::Error;
use crate::sandbox::Driver;
use crate::store::rows::text;
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
        let rows = self.run("reading the slots that rest", move |store| {
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
            store
                .prepare("SELECT slot FROM resting ORDER BY slot")?
                .query_map([], |row| row.get(0))?
                .collect::<rusqlite::Result<Vec<i64>>>()
        });
        rows.await?.into_iter().map(|number| self.slot("resting", number)).collect()
    }

    /// The slots whose last guest may be there, and what ran it. Nothing of another boot is; what does
    /// not say of which boot it is may be of this one, and what does not say what ran it, anybody's.
    pub(crate) async fn kept(&self) -> Result<Vec<(Slot, Driver)>, Error> {
        let rows = self.run("reading the slots that are kept", |store| {
            let now = Uptime::now().boot;
            let rows: Vec<(i64, String, String)> = store
                .prepare("SELECT slot, boot, driver FROM kept ORDER BY slot")?
                .query_map([], |row| Ok((row.get(0)?, text(row, "boot"), text(row, "driver"))))?
                .collect::<rusqlite::Result<_>>()?;
            let (over, kept): (Vec<_>, Vec<_>) =
                rows.into_iter().partition(|(_, boot, _)| *boot != now && is_boot(boot));
            for (slot, ..) in over {
                store.execute("DELETE FROM kept WHERE slot = ?1", [slot])?;
            }
            Ok(kept)
        });
        let ours = word(&Driver::Qemu);
        let read = |(number, boot, driver): (i64, String, String)| {
            if !is_boot(&boot) {
                tracing::error!(slot = number, "damaged in the journal: table kept, column boot");
            }
            let is_ours = ours.as_ref() == Some(&driver);
            let driver = if is_ours { Driver::Qemu } else { Driver::External };
            Ok((self.slot("kept", number)?, driver))
        };
        rows.await?.into_iter().map(read).collect()
    }

    /// The slot that a row is about. One that is none may be anybody's.
    fn slot(&self, table: &str, number: i64) -> Result<Slot, Error> {
        let slot = u16::try_from(number).ok().and_then(Slot::new);
        slot.ok_or_else(|| {
            let problem = format!("its slot is not a number from 1 to {}", Slot::MAX);
            self.unreadable(table, number, &number.to_string(), &problem)
        })
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

/// Whether this is the name of a boot, of which the kernel makes one each time.
fn is_boot(text: &str) -> bool {
    let hex = |part: &str, length| {
        part.len() == length && part.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    let parts: Vec<&str> = text.split('-').collect();
    parts.len() == 5 && parts.iter().zip([8, 4, 4, 4, 12]).all(|(part, length)| hex(part, length))
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
            store.execute("UPDATE kept SET boot = '01234567-89ab-cdef-0123-456789abcdef'", [])
        };
        store.run("another boot", other).await.unwrap();
        assert_eq!(store.kept().await.unwrap(), []);
    }

    /// Promise 56.
    #[tokio::test]
    async fn a_damaged_row_of_a_slot_keeps_that_slot_or_is_named_with_its_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("postern.db")).unwrap();
        let slot = Slot::new(2).unwrap();
        let ours = Record { driver: Driver::Qemu, ..record("b", 2) };
        store.insert(ours, "{}".to_owned()).await.unwrap();
        store.forget(&"b".parse().unwrap(), true).await.unwrap();
        let change = async |statement: &str| {
            let statement = statement.to_owned();
            let changed = store.run("damaging it", move |store| store.execute(&statement, []));
            assert_eq!(changed.await.unwrap(), 1);
        };
        // Whose guest is there nobody knows then, but in which slot.
        change("UPDATE kept SET driver = CAST(x'ff' AS TEXT)").await;
        assert_eq!(store.kept().await.unwrap(), [(slot, Driver::External)]);
        for boot in ["'another'", "''", "CAST(x'ff' AS TEXT)"] {
            change(&format!("UPDATE kept SET boot = {boot}")).await;
            assert_eq!(store.kept().await.unwrap(), [(slot, Driver::External)], "{boot}");
        }
        for (table, number) in [("kept", 70_000_i64), ("resting", -1)] {
            change(&format!("UPDATE {table} SET slot = {number}")).await;
            let rest = Duration::from_secs(60);
            let refused = match table {
                "kept" => store.kept().await.map(drop),
                _ => store.resting(rest).await.map(drop),
            };
            let Err(Error::Row { row, remedy, .. }) = refused else { panic!("{refused:?}") };
            assert!(row.contains(table) && row.contains(&number.to_string()), "{row}");
            change(&remedy).await;
        }
        assert_eq!(store.kept().await.unwrap(), []);
        assert_eq!(store.resting(Duration::from_secs(60)).await.unwrap(), []);
    }
}
