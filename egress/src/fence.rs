//! The fence: which frames of a guest reach the router, and that nothing else goes anywhere.
//!
//! The ruleset is a value that prints as nftables text, is applied over netlink in one atomic batch,
//! and is read back and compared before it counts as installed. Rules only ever change here, and
//! only in the guests' namespace: `inet postern` for all, `netdev postern_<n>` for 128 slots each.

mod apply;
mod netlink;
mod layout;
mod batch;
mod encode;
mod decode;
mod print;
mod reach;
mod rule;
mod field;
mod reason;

use policy::Slot;

pub use field::Field;
pub use layout::{SlotFence, base, ruleset, slot};
pub use reason::{Reason, UnknownReason};
pub use rule::{Chain, Expr, Family, Hook, Point, Rule, Ruleset, Set, Table, TableId};

use crate::error::Error;
use crate::world::World;

/// Installs what all slots share: what is diverted to the router, and that nothing is forwarded.
/// Guests' chains stay as they are. Then reads it back.
///
/// # Errors
/// When the kernel refuses, and nothing is changed then; [`Error::Differs`] when what the kernel
/// holds afterwards is not what was meant.
pub async fn install_base(world: &World, divert_port: u16) -> Result<(), Error> {
    world.run(move || apply::install_base(&base(divert_port))).await?
}

/// Puts the fence of a slot around its tap, which must exist, in place of whatever chains the slot
/// has, and reads it back. A slot for which this fails must not come up.
///
/// # Errors
/// When the kernel refuses, and nothing is changed then; [`Error::Differs`] when what the kernel
/// holds afterwards is not what was meant.
pub async fn attach(world: &World, at: Slot, fence: &SlotFence) -> Result<(), Error> {
    let meant = slot(at, fence);
    world.run(move || apply::attach(at, &meant)).await?
}

/// Changes which datagrams of a slot go to the relay, at once and without a gap for anything else,
/// and reads it back.
///
/// # Errors
/// When the kernel refuses, and nothing is changed then; [`Error::Differs`] when what the kernel
/// holds afterwards is not what was meant.
pub async fn refill(world: &World, at: Slot, fence: &SlotFence) -> Result<(), Error> {
    let meant = slot(at, fence);
    let chain = layout::datagrams(at, fence);
    world.run(move || apply::refill(&meant, &chain)).await?
}

/// Compares the fence of a slot with what it should be.
///
/// # Errors
/// [`Error::Differs`] when someone else has changed or removed a part of it.
pub async fn verify(world: &World, at: Slot, fence: &SlotFence) -> Result<(), Error> {
    let meant = slot(at, fence);
    world.run(move || apply::verify(&meant)).await?
}

/// Compares what all slots share with what it should be.
///
/// # Errors
/// [`Error::Differs`] when someone else has changed or removed a part of it.
pub async fn verify_base(world: &World, divert_port: u16) -> Result<(), Error> {
    world.run(move || apply::verify(&base(divert_port))).await?
}

/// A number that every change of rules in the guests' namespace moves that is not made here: as long as
/// it stands, so does everything that was verified. None where the kernel does not say.
///
/// # Errors
/// When the kernel cannot be asked.
pub async fn moved_by_others(world: &World) -> Result<Option<u32>, Error> {
    world.run(apply::moved_by_others).await?
}

/// Removes the fence of a slot; its tap may be gone already, and so may parts of the fence.
///
/// # Errors
/// When the kernel refuses; nothing is changed then.
pub async fn detach(world: &World, at: Slot) -> Result<(), Error> {
    world.run(move || apply::detach(at)).await?
}

/// The slots that have any part of a fence, in order.
///
/// # Errors
/// When the kernel cannot be asked.
pub async fn present(world: &World) -> Result<Vec<Slot>, Error> {
    world.run(apply::present).await?
}

/// What the fence of a slot has refused since it was put up: reason, packets, bytes.
///
/// # Errors
/// When the kernel cannot be asked.
pub async fn counters(world: &World, at: Slot) -> Result<Vec<(Reason, u64, u64)>, Error> {
    world.run(move || apply::counters(at)).await?
}

/// Removes every rule of ours. Nothing passes without them either.
///
/// # Errors
/// When the kernel refuses; nothing is changed then.
pub async fn flush(world: &World) -> Result<(), Error> {
    world.run(apply::flush).await?
}
