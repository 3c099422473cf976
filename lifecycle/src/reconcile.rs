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
/// is; otherwise on its way down.
pub(crate) async fn judge(hypervisors: &Hypervisors, record: &Record) -> Machine {
    if record.state == State::Running && hypervisors.adopt(record).await {
        Machine::adopt()
    } else {
        Machine::leftover(record.state)
    }
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
        if let Err(error) = router.delete_tap(slot).await {
            tracing::error!(%slot, %error, "tap not deleted");
            kept.push(slot);
        }
    }
    Ok(kept)
}
