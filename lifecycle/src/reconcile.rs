//! After a start: what the journal says against what there is. Nothing runs that nobody owns, and
//! what an earlier daemon left half done is finished or undone.

use std::collections::BTreeSet;

use egress::Router;
use policy::Slot;

use crate::acts::Hypervisors;
use crate::error::Error;
use crate::machine::Machine;
use crate::state::State;
use crate::store::Record;

/// Where a sandbox of an earlier daemon stands: adopted when it was running and its process still
/// is; otherwise on its way down, with the reason where it had none.
pub(crate) async fn judge(hypervisors: &Hypervisors, record: &mut Record) -> Machine {
    if record.state == State::Running {
        if hypervisors.adopt(record).await {
            return Machine::adopt();
        }
        record.reason = Some("its microVM ended while no daemon ran".to_owned());
    }
    Machine::leftover(record.state)
}

/// Takes away the taps and fences of slots that no sandbox in the journal has; gives the slots whose
/// tap would not go.
pub(crate) async fn sweep(router: &Router, records: &[Record]) -> Result<Vec<Slot>, Error> {
    let fail = |doing| move |source| Error::Router { doing, source: Box::new(source) };
    let owned: BTreeSet<Slot> = records.iter().map(|record| record.slot).collect();
    let mut kept = Vec::new();
    for slot in router.present().await.map_err(fail("listing the taps"))? {
        if owned.contains(&slot) {
            continue;
        }
        tracing::warn!(%slot, "tap without a sandbox: removed");
        router.detach(slot).await.map_err(fail("lowering a fence nobody owns"))?;
        fault::at(fault::Point::OrphanFenceLowered);
        if let Err(error) = router.delete_tap(slot).await {
            tracing::error!(%slot, %error, "tap not deleted");
            kept.push(slot);
        }
    }
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::*;
    use crate::config::Config;
    use crate::sandbox::Driver;

    #[tokio::test]
    async fn a_sandbox_whose_microvm_ended_meanwhile_has_failed_with_a_reason() {
        let hypervisors = Hypervisors::new(&Config {
            state_dir: "/nonexistent".into(),
            run_dir: "/nonexistent".into(),
            image_dir: "/nonexistent".into(),
            qemu: "/nonexistent".into(),
            netns: "none".to_owned(),
            egress: Vec::new(),
            slots: 1,
            tenant_slots: 1,
            hold_down: Duration::ZERO,
            boot_deadline: Duration::ZERO,
            uid_base: 64_000,
            hooks: vmm::external::Hooks::default(),
        });
        let mut record = Record {
            name: "demo".parse().unwrap(),
            tenant: "default".parse().unwrap(),
            driver: Driver::Qemu,
            slot: Slot::new(1).unwrap(),
            incarnation: 1,
            memory_mib: 256,
            vcpus: 1,
            state: State::Running,
            reason: None,
            process: None,
            created: SystemTime::UNIX_EPOCH,
        };
        let machine = judge(&hypervisors, &mut record).await;
        assert_eq!(machine.state(), State::Failed);
        assert!(record.reason.is_some());
    }
}
