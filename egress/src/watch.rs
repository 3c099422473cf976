//! Looks whether the fence still stands as it was put up, and puts it up again where it does not.
//!
//! Whoever else edits rules in the guests' namespace moves a number that is looked at now and then;
//! only when it moved is anything read back: a change of ours is, when it is made. A slot whose fence
//! is not as it was is shut until it is. Never lets a slot speak whose fence was not read back.

use std::sync::{Mutex, PoisonError};

use policy::audit::{AuditRecord, Kind, Outcome};
use policy::{Slot, Subject, Trail};

use crate::error::Error;
use crate::fence::{self, SlotFence};
use crate::link;
use crate::world::World;

/// How far others had moved the rules when all of ours were last found as meant.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    sound: Mutex<Option<u32>>,
}

impl Watch {
    /// Whether all is as it was found when this was so; a kernel that does not say is never trusted to
    /// be at rest.
    pub(crate) fn is_sound(&self, moved_by_others: Option<u32>) -> bool {
        let sound = self.sound.lock().unwrap_or_else(PoisonError::into_inner);
        moved_by_others.is_some() && moved_by_others == *sound
    }

    /// All was as meant, read after this was. An edit meanwhile has moved it on.
    pub(crate) fn found_sound(&self, moved_by_others: Option<u32>) {
        *self.sound.lock().unwrap_or_else(PoisonError::into_inner) = moved_by_others;
    }
}

/// What was wrong with what all slots share, which stands again.
pub(crate) async fn mend_base(world: &World, divert_port: u16) -> Result<Option<String>, Error> {
    let found = differs(fence::verify_base(world, divert_port).await)?;
    if found.is_some() {
        fence::install_base(world, divert_port).await?;
    }
    Ok(found)
}

/// What is wrong with the fence of a slot, if anything is.
pub(crate) async fn inspect(
    world: &World,
    slot: Slot,
    meant: &SlotFence,
) -> Result<Option<String>, Error> {
    differs(fence::verify(world, slot, meant).await)
}

/// Shuts a slot, puts its fence up again, and then lets it speak. Nobody else may change the slot
/// meanwhile. After an error it must be called again: the slot may be shut.
pub(crate) async fn mend(world: &World, slot: Slot, meant: &SlotFence) -> Result<(), Error> {
    let down = link::down(world, slot).await;
    // A slot that cannot be shut needs its fence all the more.
    fence::attach(world, slot, meant).await.and(down)?;
    link::prepare(world, slot).await?;
    link::up(world, slot).await.map(drop)
}

/// Records that the fence of a slot could not be put up again; where its link is down, it is shut.
pub(crate) fn record_failure(trail: &Trail, whose: &Subject, found: &str, error: &Error) {
    let record = AuditRecord::new(fault::wall_clock(), Kind::Control, Outcome::Fail);
    let detail = "the fence was changed by somebody else and could not be put up again yet";
    let full = format!("{detail}: {found}: {error}");
    trail.record(record.about(whose).saying(&full, detail));
}

/// Records and logs that something of the fence was put up again.
pub(crate) fn record(trail: &Trail, whose: Option<&Subject>, found: &str) {
    let sandbox = whose.map(|subject| subject.sandbox.to_string());
    tracing::error!(sandbox, found, "fence changed by somebody else: put up again");
    let detail = "the fence was changed by somebody else and put up again";
    let record = AuditRecord::new(fault::wall_clock(), Kind::Control, Outcome::Fail)
        .saying(&format!("{detail}: {found}"), detail);
    trail.record(match whose {
        Some(subject) => record.about(subject),
        None => record,
    });
}

fn differs(verified: Result<(), Error>) -> Result<Option<String>, Error> {
    match verified {
        Ok(()) => Ok(None),
        Err(found @ Error::Differs { .. }) => Ok(Some(found.to_string())),
        Err(other) => Err(other),
    }
}
