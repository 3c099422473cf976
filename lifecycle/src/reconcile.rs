//! After a start: what the journal says against what there is. Nothing runs that nobody owns, and
//! what an earlier daemon left half done is finished or undone.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use egress::Router;
use fault::Point;
use policy::Slot;
use tokio::time::{Instant, sleep};
use vault::Vault;

use crate::acts::Hypervisors;
use crate::error::{Error, chain};
use crate::machine::{Machine, There};
use crate::night::Night;
use crate::reason::Reason;
use crate::sandbox::Driver;
use crate::slots::{Slots, Stuck};
use crate::state::State;
use crate::store::{Record, Store, number_of};
use crate::terms::Uptime;
use crate::threads::aside;

/// How often it is tried to take away what is left in a slot.
const CLEAR_AGAIN: Duration = Duration::from_secs(2);

/// Where a sandbox of an earlier daemon stands: adopted when it was running and its process still is;
/// asleep when it was saved; on its way back where it was between the two; to boot from its disk where that
/// is allowed and the rest was lost; otherwise on its way down, with the reason where it had none.
pub(crate) async fn judge(hypervisors: &Hypervisors, record: &mut Record) -> Machine {
    record.terms.take_up(Uptime::now());
    let noted = record.process.clone();
    let mut damage = None;
    let stored = matches!(record.state, State::Suspending | State::Suspended);
    if !stored && !matches!(record.state, State::Saving | State::Standby | State::Resuming) {
        // It is over, whatever could be written of that.
        record.night = Night::default();
    }
    if let Some(alarm) = &mut record.night.alarm {
        alarm.take_up(&Uptime::now(), fault::wall_clock());
    }
    let (process, saved) = match record.state {
        State::Running => (hypervisors.adopt(record).await, false),
        State::Saving | State::Standby | State::Suspending | State::Suspended | State::Resuming => {
            let found = hypervisors.find(record).await;
            (record.process, record.saved, damage) = (found.process, found.saved, found.damage);
            let process = record.process.is_some();
            if process && record.saved.is_none() {
                hypervisors.adopt(record).await;
            }
            (process, record.saved.is_some())
        }
        _ => return Machine::leftover(record.state),
    };
    let (mut cold, stored) = (record.cold.due, record.stored.is_some());
    if !process && !saved && !cold && !stored && hypervisors.may_boot(record).await {
        let lost = lost(record.state, noted.as_ref(), vmm::boot_id().as_deref());
        let why = damage.clone().or_else(|| lost.map(Reason::new));
        cold = why.is_some();
        why.into_iter().for_each(|why| record.cold.begin(why));
    }
    let there = There { process, saved, cold, stored };
    let machine = Machine::found(record.state, there);
    let machine = machine.owing(!record.night.remains.is_empty());
    if machine.is_cold() && !process {
        // Of another boot of the host, or of nobody.
        (record.process, record.saved) = (None, None);
    }
    if machine.is_cold() {
        record.reason.clone_from(&record.cold.why);
    }
    if machine.state() == State::Failed && (record.process.is_some() || record.reason.is_none()) {
        let ended = || Reason::new("its microVM ended while no daemon ran");
        record.reason = Some(damage.unwrap_or_else(ended));
    }
    machine
}

/// What took the memory of a guest that has neither a process nor a whole saved state, where that was not
/// its own end: the host's boot, or whoever took its files away.
fn lost(state: State, noted: Option<&vmm::Process>, boot: Option<&str>) -> Option<&'static str> {
    let host = noted.and_then(|process| process.host.as_ref());
    match (state, host) {
        (State::Standby | State::Suspending | State::Suspended, _) => {
            Some("what was saved of it is gone")
        }
        (_, Some(host)) if Some(&*host.boot_id) != boot => {
            Some("the host was started anew, and its memory is lost")
        }
        // Before it has a process again, nothing of it can have run.
        (State::Resuming, None) => Some("what was saved of it is gone"),
        _ => None,
    }
}

/// Takes away the taps and fences of slots that no sandbox in the journal has. Such a slot rests, since
/// nobody knows when its guest ended; one of which something would not go is kept from use.
pub(crate) async fn sweep(router: &Router, slots: &Slots, records: &[Record]) -> Result<(), Error> {
    let present = router.present().await.map_err(|source| Error::Router {
        doing: "listing the taps and fences",
        source: Box::new(source),
    })?;
    let owned: BTreeSet<Slot> = records.iter().map(|record| record.slot).collect();
    for &slot in present.difference(&owned) {
        tracing::warn!(%slot, "tap or fence without a sandbox");
        match clear(router, slot).await {
            Ok(()) => slots.rest(slot, Instant::now()),
            Err(error) => {
                tracing::error!(%slot, error = chain(&error), "slot kept from use");
                slots.keep(slot, Stuck::Network);
            }
        }
    }
    Ok(())
}

/// What keeps the slot of a sandbox that went although its guest may be there.
pub(crate) const fn kept_by(driver: Driver) -> Stuck {
    match driver {
        Driver::Qemu => Stuck::Process,
        Driver::External => Stuck::Guest,
    }
}

/// Forgets what earlier daemons began to put into the object store, or got back from there and did not come
/// to forget: every key up to `last` that none of these sandboxes and snapshots has.
pub(crate) async fn forget_orphans(
    vault: Vault,
    hypervisors: Arc<Hypervisors>,
    kept: BTreeSet<String>,
    last: u64,
) {
    let old = |key: &&String| number_of(key).is_some_and(|number| number <= last);
    let images: BTreeSet<String> = hypervisors.image_keys().await.into_iter().collect();
    for key in images.difference(&kept).filter(old) {
        hypervisors.drop_image(key).await;
    }
    let keys = match vault.keys().await {
        Ok(keys) => keys,
        Err(error) => {
            // The next start tries again.
            return tracing::warn!(error = chain(&error), "object store not looked through");
        }
    };
    for key in keys.difference(&kept).filter(old) {
        match vault.forget(key).await {
            Ok(()) => tracing::info!(key, "forgotten: the object store had it for nobody"),
            Err(error) => tracing::warn!(key, error = chain(&error), "not forgotten"),
        }
    }
}

/// Tries again and again to take away what is left in the slots that are stuck, and gives those back of
/// which nothing is. `uid_base` plus its number is the user of a slot.
pub(crate) async fn clear_stuck(router: Router, slots: Slots, store: Store, uid_base: u32) {
    loop {
        sleep(CLEAR_AGAIN).await;
        // What nobody here can see is not waited for: another boot of the host ends it.
        let stuck = slots.stuck().into_iter().filter(|(_, stuck)| *stuck != Stuck::Guest);
        for (slot, stuck) in stuck {
            if let Err(error) = clear(&router, slot).await {
                tracing::debug!(%slot, error = chain(&error), "slot still stuck");
                continue;
            }
            if stuck == Stuck::Process {
                let user = uid_base + u32::from(slot.number());
                if aside(move || vmm::has_processes(user)).await.unwrap_or(true) {
                    continue;
                }
                if let Err(error) = store.release(slot).await {
                    tracing::error!(%slot, error = chain(&error), "journal not written");
                    continue;
                }
            }
            tracing::info!(%slot, "nothing is left in it: the slot may be used again");
            slots.give_back(slot, None, Instant::now());
        }
    }
}

/// Takes away what the kernel has of a slot that nobody owns: each part, whatever happens to the others.
async fn clear(router: &Router, slot: Slot) -> Result<(), egress::Error> {
    let lowered = router.detach(slot).await;
    fault::at(Point::OrphanFenceLowered);
    let deleted = router.delete_tap(slot).await;
    lowered.and(deleted)
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::cold::{Cold, ColdBoot};
    use crate::config::{Config, Quota};
    use crate::terms::{DefaultTerms, OnIdle, Terms};

    fn hypervisors(state_dir: &std::path::Path) -> Hypervisors {
        Hypervisors::new(&Arc::new(Config {
            state_dir: state_dir.to_owned(),
            memory_dir: "/nonexistent".into(),
            run_dir: "/nonexistent".into(),
            image_dir: "/nonexistent".into(),
            qemu: "/nonexistent".into(),
            netns: "none".to_owned(),
            egress: Vec::new(),
            slots: 1,
            quota: Quota { sandboxes: 1, memory_mib: 0, vcpus: 0, disk: 0, snapshots: 0 },
            state_reserve: 0,
            hold_down: Duration::ZERO,
            boot_deadline: Duration::ZERO,
            uid_base: 64_000,
            hooks: vmm::external::Hooks::default(),
            terms: DefaultTerms {
                on_idle: OnIdle::Standby,
                idle_after: Duration::ZERO,
                ttl: None,
                max_life: None,
                longest_life: None,
                cold_boot: ColdBoot::Allowed,
            },
            usage: crate::config::UsageBounds { keep: Duration::ZERO, rows: 0 },
            wakes: 1,
            wake_deadline: Duration::ZERO,
            store: vault::Location::default(),
        }))
    }

    fn record(state: State) -> Record {
        Record {
            name: "demo".parse().unwrap(),
            tenant: "default".parse().unwrap(),
            driver: Driver::Qemu,
            slot: Slot::new(1).unwrap(),
            incarnation: 1,
            memory_mib: 256,
            vcpus: 1,
            disk: None,
            state,
            reason: None,
            process: None,
            created: Some(SystemTime::UNIX_EPOCH),
            terms: Terms::none(),
            saved: None,
            cold: Cold::default(),
            night: Night::default(),
            stored: None,
        }
    }

    #[tokio::test]
    async fn a_sandbox_whose_microvm_ended_meanwhile_has_failed_with_a_reason() {
        let (hypervisors, mut record) =
            (hypervisors("/nonexistent".as_ref()), record(State::Running));
        let machine = judge(&hypervisors, &mut record).await;
        assert_eq!(machine.state(), State::Failed);
        assert!(record.reason.is_some());
    }

    /// Promise 63.
    #[tokio::test]
    async fn a_saved_state_that_cannot_be_read_now_leaves_its_sandbox_asleep() {
        let dir = tempfile::tempdir().unwrap();
        let hypervisors = hypervisors(dir.path());
        let state = dir.path().join("sandboxes/demo/state");
        // A folder in its place is opened, and not read.
        std::fs::create_dir_all(&state).unwrap();
        let saved = serde_json::json!({ "driver": "qemu", "state": state, "state_bytes": 9, "digest": "ab" });
        let saved: vmm::Saved = serde_json::from_value(saved).unwrap();
        for (was, noted, is) in [
            (State::Standby, true, State::Standby),
            (State::Resuming, true, State::Standby),
            // Nothing says what was saved.
            (State::Saving, false, State::Failed),
        ] {
            let noted = noted.then(|| saved.clone());
            let mut record = Record { saved: noted.clone(), ..record(was) };
            let machine = judge(&hypervisors, &mut record).await;
            assert_eq!((machine.state(), machine.is_cold(), &record.saved), (is, false, &noted));
            assert!(!hypervisors.is_used_up(&record).await, "nothing has run from it");
        }
        std::fs::remove_dir(&state).unwrap();
        let mut record = Record { saved: Some(saved), ..record(State::Standby) };
        assert!(hypervisors.is_used_up(&record).await, "the control");
        assert_eq!(judge(&hypervisors, &mut record).await.state(), State::Failed);
        std::fs::write(&state, "torn").unwrap();
        assert!(!hypervisors.is_used_up(&record).await, "of no use, and not used");
        record.state = State::Standby;
        assert_eq!(judge(&hypervisors, &mut record).await.state(), State::Failed);
    }

    fn process(boot: &str) -> vmm::Process {
        let host = serde_json::json!({
            "pid": 1, "start_time": 1, "boot_id": boot, "groups": [],
        });
        let process = serde_json::json!({
            "driver": "qemu", "name": "demo", "tenant": "default", "slot": 1, "run_dir": "/none", "host": host,
        });
        serde_json::from_value(process).unwrap()
    }

    /// Promise 65. What ended by itself has failed; what the host took is not its guest's fault.
    #[test]
    fn memory_is_lost_to_a_boot_of_the_host_and_not_to_the_end_of_its_process() {
        let (before, this) = (process("before"), process("this"));
        let lost = |state, noted| lost(state, noted, Some("this")).is_some();
        for state in [State::Running, State::Saving, State::Resuming] {
            assert!(lost(state, Some(&before)), "{state:?}");
            assert!(!lost(state, Some(&this)), "{state:?}: it ended by itself");
        }
        assert!(!lost(State::Running, None), "nobody knows");
        assert!(!lost(State::Saving, None), "nobody knows");
        assert!(lost(State::Resuming, None) && lost(State::Standby, None));
    }
}
