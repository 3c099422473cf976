//! The acts that put a guest to sleep and wake it, as far as they are the microVM's. Their order is the
//! machine's: none here is safe out of it.

use egress::Wanted;
use std::time::Duration;

use policy::Slot;
use tokio::time::{Instant, timeout};
use vmm::{Hypervisor, Process};

use crate::acts::{Acts, Boxed, hello};
use crate::error::chain;
use crate::sandbox::Driver;
use crate::store::Record;

/// How long a guest that was woken may take to hear the time. One whose agent is gone goes on without.
const REFRESH: Duration = Duration::from_secs(3);
/// The pause between two tries to tell it.
const AGAIN: Duration = Duration::from_millis(20);

impl Acts {
    pub(super) async fn pause(&self, record: &Record) -> Result<(), Boxed> {
        let process = process(record)?;
        match record.driver {
            Driver::Qemu => self.hypervisors.qemu.pause(process).await?,
            Driver::External => self.hypervisors.external.pause(process).await?,
        }
        Ok(())
    }

    pub(super) async fn save(&self, record: &mut Record) -> Result<(), Boxed> {
        let (process, machine) = (process(record)?, self.describe(record));
        let saved = match record.driver {
            Driver::Qemu => self.hypervisors.qemu.save(process, &machine).await?,
            Driver::External => self.hypervisors.external.save(process, &machine).await?,
        };
        (record.process, record.saved) = (None, Some(saved));
        if record.driver == Driver::Qemu {
            self.hypervisors.write_back(machine);
        }
        Ok(())
    }

    /// What is left of its connections is known before the save, for a next daemon.
    pub(super) async fn checkpoint(&self, record: &mut Record) -> Result<(), Boxed> {
        self.router.checkpoint(record.slot).await?;
        // Asked for first: what ends between the two is looked at again.
        let ended = self.router.ended(record.slot);
        record.night.keep(self.router.remains(record.slot)?, ended);
        Ok(())
    }

    /// Looks whether connections of a sandbox that sleeps have ended meanwhile: those are in the audit.
    pub(crate) fn count_ends(&self, record: &mut Record) {
        let ended = self.router.ended(record.slot);
        record.night.look(ended, || self.router.remains(record.slot).ok());
    }

    /// Resets what has ended and is no value of the router's.
    pub(super) async fn tell_ends(&self, record: &mut Record) -> Result<(), Boxed> {
        self.router.bury(record.slot, record.night.ended().cloned().collect())?;
        record.night.looked_at = self.router.ended(record.slot);
        self.router.rebuild(record.slot).await?;
        Ok(())
    }

    /// Waits until bytes or callers want the guest of a sandbox that sleeps. One that slept before this daemon
    /// began has no connections left that could.
    pub(crate) async fn wanted(&self, record: &Record, least: Wanted) -> Wanted {
        match self.router.wanted_by(record.slot, least).await {
            Ok(by) => by,
            Err(_) => std::future::pending().await,
        }
    }

    /// When the last byte of payload passed; none while it is not attached.
    pub(crate) fn last_byte(&self, record: &Record) -> Option<Instant> {
        Some(self.router.activity(record.slot)?.last)
    }

    /// The tap outlives its guest, but not the host's boot.
    pub(super) async fn open_tap(&mut self, slot: Slot) -> Result<(), Boxed> {
        let owner = self.uid(slot);
        let open = move || vmm::tap::attach(slot).or_else(|_| vmm::tap::create(slot, Some(owner)));
        self.tap = Some(self.router.within(open).await??);
        Ok(())
    }

    pub(super) async fn prepare(&mut self, record: &mut Record) -> Result<(), Boxed> {
        let machine = self.describe(record);
        let tap = self.tap.take().ok_or("the tap is not open")?;
        let saved = record.saved.as_ref().ok_or("it was not saved")?;
        let process = match record.driver {
            Driver::Qemu => self.hypervisors.qemu.prepare(&machine, tap, saved).await?,
            Driver::External => self.hypervisors.external.prepare(&machine, tap, saved).await?,
        };
        record.process = Some(process);
        Ok(())
    }

    pub(super) async fn unpause(&self, record: &mut Record) -> Result<(), Boxed> {
        let (process, machine) = (process(record)?, self.describe(record));
        match record.driver {
            Driver::Qemu => self.hypervisors.qemu.unpause(process, &machine).await?,
            Driver::External => self.hypervisors.external.unpause(process, &machine).await?,
        }
        record.saved = None;
        Ok(())
    }

    /// Sets the guest's clock. A foreign guest may have no agent.
    pub(super) async fn refresh(&self, record: &Record) -> Result<(), Boxed> {
        if record.driver == Driver::External {
            return Ok(());
        }
        let told = timeout(REFRESH, async {
            loop {
                match hello(&self.router, record).await {
                    Ok(_stream) => return,
                    Err(error) => {
                        let error = chain(&error);
                        tracing::debug!(sandbox = %record.name, error, "not told the time");
                    }
                }
                tokio::time::sleep(AGAIN).await;
            }
        });
        Ok(told.await.map_err(|_| format!("its agent did not answer within {REFRESH:?}"))?)
    }

    /// Ends a process that has not run; what it was made from stays. Somebody else's is as it was.
    pub(super) async fn discard(&mut self, record: &mut Record) -> Result<(), Boxed> {
        self.tap = None;
        if record.driver == Driver::External {
            return Ok(());
        }
        let qemu = self.hypervisors.qemu.clone().with_grace(Duration::ZERO);
        if let Some(process) = &record.process {
            qemu.stop(process).await?;
        }
        qemu.clear(&self.describe(record)).await?;
        record.process = None;
        Ok(())
    }
}

fn process(record: &Record) -> Result<&Process, Boxed> {
    Ok(record.process.as_ref().ok_or("it has no process")?)
}
