//! The open account of one sandbox, shared by its driver, which tells what the sandbox is, and the ledger,
//! which looks at its process, its bytes and its files. Its lock is held for no longer than that takes.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, UNIX_EPOCH};

use egress::{Meter, Router};
use nix::time::ClockId;
use policy::{SandboxName, Slot, TenantName};
use tokio::sync::Notify;
use tokio::time::Instant;
use vmm::hypervisor::HostProcess;

use crate::state::State;
use crate::store::Record;
use crate::threads::locked;
use crate::usage::account::{Account, Mark, Moment};
use crate::usage::amount::Phase;
use crate::usage::book::Entry;

/// How long a sandbox of which nothing is owed but time waits to be written.
const RARELY: Duration = Duration::from_secs(60);

/// An open account. Clones are the same.
#[derive(Clone, Debug)]
pub(crate) struct Tab(Arc<Mutex<Inner>>, Arc<Notify>);

#[derive(Debug)]
struct Inner {
    id: u64,
    tenant: TenantName,
    sandbox: SandboxName,
    slot: Slot,
    /// Its memory and its state, while it sleeps.
    files: [PathBuf; 2],
    account: Account,
    process: Option<HostProcess>,
    /// The one that was looked at last: bytes may be counted after its slot is detached.
    meter: Option<Meter>,
    gone: bool,
    turned: bool,
    written: Instant,
}

impl Tab {
    pub(super) fn new(
        record: &Record,
        state: State,
        mark: Option<Mark>,
        files: [PathBuf; 2],
        turned: &Arc<Notify>,
    ) -> Self {
        let (given, phase) = ((record.vcpus, record.memory_mib), phase(state, record));
        let boot = vmm::boot_id().unwrap_or_default();
        let account = match mark {
            Some(mark) => Account::resume(given, mark, phase, &boot, now()),
            None => Account::begin(given, (phase, state != State::Creating), &boot, now()),
        };
        let inner = Inner {
            id: record.incarnation,
            tenant: record.tenant.clone(),
            sandbox: record.name.clone(),
            slot: record.slot,
            files,
            account,
            process: host(record),
            meter: None,
            gone: false,
            turned: true,
            written: Instant::now(),
        };
        Self(Arc::new(Mutex::new(inner)), Arc::clone(turned))
    }

    /// What the sandbox is from now on, and what runs it.
    pub(crate) fn see(&self, state: State, record: &Record) {
        let mut inner = locked(&self.0);
        if state == State::Gone && inner.gone {
            return;
        }
        // A last look at a process that is about to end.
        inner.work();
        inner.process = host(record);
        let turned = inner.account.turn(phase(state, record), now());
        inner.gone = state == State::Gone;
        if turned {
            inner.work();
        }
        if let (Phase::Suspended, Some(stored)) = (inner.account.phase(), &record.stored) {
            inner.account.keep(stored.bytes);
        }
        if inner.gone
            && let Some(meter) = &inner.meter
        {
            // Nobody looks at it again.
            let carried = meter.take();
            inner.account.carry(carried);
        }
        if turned || inner.gone {
            inner.turned = true;
            self.1.notify_one();
        }
    }

    pub(super) fn look(&self, router: &Router, files: bool) {
        let mut inner = locked(&self.0);
        inner.account.advance(now());
        inner.work();
        let meter = router.meter(inner.slot).filter(|_| !inner.gone);
        let same = match (&inner.meter, &meter) {
            (Some(one), Some(other)) => one.is(other),
            _ => false,
        };
        if let Some(known) = &inner.meter {
            let carried = known.take();
            inner.account.carry(carried);
        }
        if !same && let Some(meter) = meter {
            let carried = meter.take();
            inner.account.carry(carried);
            inner.meter = Some(meter);
        }
        if files && matches!(inner.account.phase(), Phase::Standby) {
            let kept = inner.files.iter().map(|file| kept(file)).sum();
            inner.account.keep(kept);
        }
    }

    /// Whether it is time to write what it owes.
    pub(super) fn is_due(&self) -> bool {
        let inner = locked(&self.0);
        inner.turned
            || inner.account.phase() == Phase::Running
            || inner.account.owes_more_than_time()
            || inner.written.elapsed() >= RARELY
    }

    /// What is to be written of it.
    pub(super) fn take(&self) -> Entry {
        let mut inner = locked(&self.0);
        inner.account.advance(now());
        (inner.turned, inner.written) = (false, Instant::now());
        Entry {
            account: inner.id,
            tenant: inner.tenant.clone(),
            sandbox: inner.sandbox.clone(),
            hours: inner.account.take(),
            mark: (!inner.gone).then(|| inner.account.mark().clone()),
        }
    }

    pub(super) fn owe_again(&self, entry: Entry) {
        let mut inner = locked(&self.0);
        inner.account.owe_again(entry.hours);
        inner.turned = true;
    }

    pub(super) fn is_of(&self, tenant: &TenantName) -> bool {
        locked(&self.0).tenant == *tenant
    }

    pub(super) fn name(&self) -> SandboxName {
        locked(&self.0).sandbox.clone()
    }
}

impl Inner {
    /// Looks at its process, if it is ours.
    fn work(&mut self) {
        let Some(process) = &self.process else { return };
        let Some(had) = process.processor() else { return };
        let had = u64::try_from(had.as_millis()).unwrap_or(u64::MAX);
        let which = format!("{}-{}-{}", process.pid, process.start_time, process.boot_id);
        self.account.work(&which, had, process.resident());
    }
}

/// How one passes its time that is in this state. Until it has a process again one that is woken sleeps, here or
/// elsewhere, however long the store or those who are woken before it take.
fn phase(state: State, record: &Record) -> Phase {
    match state {
        State::Resuming if record.stored.is_some() => Phase::Suspended,
        State::Resuming if record.process.is_none() => Phase::Standby,
        state => Phase::from(state),
    }
}

fn host(record: &Record) -> Option<HostProcess> {
    record.process.as_ref()?.host.clone()
}

/// Bytes that a file takes on the disk, or in a tmpfs.
fn kept(file: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(file).map_or(0, |file| file.blocks().saturating_mul(512))
}

/// Now, by both clocks.
pub(super) fn now() -> Moment {
    let since_boot =
        nix::time::clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::ZERO, Into::into);
    let since_1970 = fault::wall_clock().duration_since(UNIX_EPOCH).unwrap_or_default();
    let millis = |span: Duration| u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
    Moment { up: millis(since_boot), wall: millis(since_1970) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::tests::record;

    /// Promise 67.
    #[test]
    fn who_waits_for_the_store_pays_for_no_processors_or_memory_until_there_is_a_process() {
        let here = record("demo", 1);
        let process = vmm::hypervisor::Process {
            driver: vmm::hypervisor::DriverName::External,
            name: here.name.clone(),
            tenant: here.tenant.clone(),
            slot: here.slot,
            run_dir: PathBuf::new(),
            host: None,
        };
        let stored = serde_json::from_value(serde_json::json!({
            "key": "1-demo", "url": "s3://bucket", "bytes": 5 << 20, "list": "00"
        }));
        let elsewhere = Record { stored: Some(stored.unwrap()), ..record("demo", 1) };
        let loaded = Record { process: Some(process), ..record("demo", 1) };
        let open = |record, state| {
            Tab::new(record, state, None, [PathBuf::new(), PathBuf::new()], &Arc::default())
        };
        let tab = open(&elsewhere, State::Suspended);
        let is = |tab: &Tab| locked(&tab.0).account.phase();
        for (state, record, phase) in [
            (State::Suspended, &elsewhere, Phase::Suspended),
            (State::Resuming, &elsewhere, Phase::Suspended),
            (State::Resuming, &here, Phase::Standby),
            (State::Resuming, &loaded, Phase::Running),
            (State::Running, &loaded, Phase::Running),
            (State::Saving, &loaded, Phase::Running),
            (State::Standby, &here, Phase::Standby),
            (State::Suspending, &here, Phase::Standby),
        ] {
            tab.see(state, record);
            assert_eq!(is(&tab), phase, "{state:?}");
        }
        let next = open(&elsewhere, State::Resuming);
        assert_eq!(is(&next), Phase::Suspended, "and so by the next daemon");
    }
}
