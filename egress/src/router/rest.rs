//! A guest that falls asleep and wakes, and its connections: held, turned into values while it is not
//! there, and put back before it is.
//!
//! In order: `hold`, the guest is stopped, `checkpoint`; then `rebuild`, the guest goes on, `release`. Each
//! may be called again, and after a detach. Never gives a guest a byte while it is held.

use std::sync::Arc;
use std::time::Duration;

use policy::Slot;
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep};

use crate::error::Error;
use crate::flows::Judged;
use crate::guest::Guest;
use crate::link;
use crate::repair::{Remains, Untold};
use crate::router::{Router, Shared};
use crate::sever::{ENDING, UNSAID, count, sever};
use crate::side::Wanted;

/// How long a guest may take to acknowledge what it was sent before it is held.
const SETTLE: Duration = Duration::from_millis(200);
/// Connections that are put back before anybody else has a turn in the guests' world: 0.3 ms each.
const AT_ONCE: usize = 16;
/// Pauses between two looks whether it has: soon at first, and then seldom, because each look goes through
/// the sockets of all guests, on the one thread in their world.
const PAUSES: [Duration; 2] = [Duration::from_micros(500), Duration::from_millis(32)];

/// What a checkpoint did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Connections that are kept.
    pub kept: usize,
    /// Connections that could not be, and are ended.
    pub ended: usize,
}

/// What a sandbox does with its connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Activity {
    /// When the last payload byte passed, either way.
    pub last: Instant,
    /// Connections that are open, either way.
    pub open: usize,
}

impl Router {
    /// Gives the guest in this slot nothing more, and waits until it has acknowledged what it was sent,
    /// for 200 ms at most: whether it has. What it sends goes on.
    ///
    /// # Errors
    /// [`Error::Vacant`] when nothing is attached to the slot; otherwise when the kernel cannot be asked:
    /// it is held all the same.
    pub async fn hold(&self, slot: Slot) -> Result<bool, Error> {
        let _turn = self.shared.turn(slot).await;
        let guest = self.shared.guest_in(slot)?;
        guest.gate.hold();
        let ([mut pause, longest], deadline) = (PAUSES, Instant::now() + SETTLE);
        // Those without an owner have something left to say, too.
        while !guest.gate.is_settled() || count(&self.shared.world, slot, UNSAID).await? > 0 {
            if Instant::now() >= deadline {
                return Ok(false);
            }
            sleep(pause).await;
            pause = (pause * 2).min(longest);
        }
        Ok(true)
    }

    /// Turns every connection with the guest in this slot into a value. The guest must not run. What
    /// cannot be kept is reset on both sides. No socket to the guest is left then, but for those of
    /// connections that it has opened and we have not taken, which no timer ends.
    ///
    /// # Errors
    /// [`Error::Vacant`] when nothing is attached to the slot; otherwise when the kernel cannot be asked
    /// about what is left, and all else is done.
    pub async fn checkpoint(&self, slot: Slot) -> Result<Held, Error> {
        let shared = Arc::clone(&self.shared);
        let done = tokio::spawn(async move {
            let _turn = shared.turn(slot).await;
            let guest = shared.guest_in(slot)?;
            let gate = Arc::clone(&guest.gate);
            let (kept, ended) = tokio::task::spawn_blocking(move || gate.keep())
                .await
                .map_err(|_| Error::Interrupted(slot))?;
            // Half-open ones, and those that nobody waits for any more: their timers would run.
            sever(&shared.world, slot, ENDING).await?;
            Ok(Held { kept, ended })
        });
        done.await.map_err(|_| Error::Interrupted(slot))?
    }

    /// What is left of the connections of the guest in this slot that are kept, for a journal: should this
    /// daemon end while the guest sleeps, its far sides end with it, and the guest has yet to hear it. Also
    /// of those that have ended since the guest fell asleep, which it has yet to hear, too.
    ///
    /// # Errors
    /// [`Error::Vacant`] when nothing is attached to the slot.
    pub fn remains(&self, slot: Slot) -> Result<Vec<Remains>, Error> {
        let guest = self.shared.guest_in(slot)?;
        let untold = |judged: &Judged| Untold {
            kind: judged.basis.kind(),
            protocol: judged.basis.protocol().to_owned(),
            name: judged.name(),
            destination: judged.destination,
            dialed: judged.dialed,
        };
        let remains = guest.gate.remains().into_iter();
        Ok(remains
            .map(|one| {
                let judged = guest.flows.under_way(one.flow);
                one.of_open(judged.as_deref().map(untold))
            })
            .collect())
    }

    /// How many connections of the guest in this slot have ended since it fell asleep: when that moves,
    /// so do its [`Router::remains`].
    #[must_use]
    pub fn ended(&self, slot: Slot) -> usize {
        self.shared.guest_in(slot).map_or(0, |guest| guest.gate.ended())
    }

    /// Takes what an earlier daemon left of the connections of the guest in this slot: each is reset by
    /// [`Router::rebuild`]. To be called before the guest runs. Records nothing.
    ///
    /// # Errors
    /// [`Error::Vacant`] when nothing is attached to the slot.
    pub fn bury(&self, slot: Slot, remains: Vec<Remains>) -> Result<(), Error> {
        let guest = self.shared.guest_in(slot)?;
        for one in remains {
            guest.gate.bury(one.into(), true);
        }
        Ok(())
    }

    /// Puts the connections of the guest in this slot back on sockets. Its tap is open, and it does not
    /// run yet. What cannot be put back is reset on the far side.
    ///
    /// # Errors
    /// [`Error::Vacant`] when nothing is attached to the slot; [`Error::NoTap`] when there is none, and
    /// nothing is put back then.
    pub async fn rebuild(&self, slot: Slot) -> Result<Held, Error> {
        let shared = Arc::clone(&self.shared);
        let done = tokio::spawn(async move {
            let _turn = shared.turn(slot).await;
            shared.rebuild(slot).await
        });
        done.await.map_err(|_| Error::Interrupted(slot))?
    }

    /// Gives the guest in this slot what has come for it meanwhile.
    ///
    /// # Errors
    /// [`Error::Vacant`] when nothing is attached to the slot.
    pub async fn release(&self, slot: Slot) -> Result<(), Error> {
        let _turn = self.shared.turn(slot).await;
        self.shared.guest_in(slot)?.gate.release();
        Ok(())
    }

    /// Undoes a hold, and a checkpoint if there was one: the guest goes on where it was.
    ///
    /// # Errors
    /// [`Error::Vacant`] when nothing is attached to the slot.
    pub async fn abort(&self, slot: Slot) -> Result<(), Error> {
        self.rebuild(slot).await?;
        self.release(slot).await
    }

    /// Returns once something has come for a guest since it was held, whoever wants it.
    ///
    /// # Errors
    /// [`Error::Vacant`] when nothing is attached to the slot.
    pub async fn wanted(&self, slot: Slot) -> Result<(), Error> {
        self.wanted_by(slot, Wanted::Data).await.map(drop)
    }

    /// Returns once something has come for a guest since it was held, and for whom it is wanted: bytes from a
    /// far side, or the end of one from which it waits for an answer; a call to a port of it, or what a
    /// caller says there. Only once somebody wants it who counts for as much as `least`.
    ///
    /// # Errors
    /// [`Error::Vacant`] when nothing is attached to the slot.
    pub async fn wanted_by(&self, slot: Slot, least: Wanted) -> Result<Wanted, Error> {
        let guest = self.shared.guest_in(slot)?;
        Ok(guest.gate.wanted(least).await)
    }

    /// What the sandbox in an attached slot does with its connections.
    #[must_use]
    pub fn activity(&self, slot: Slot) -> Option<Activity> {
        let guest = self.shared.guest_in(slot).ok()?;
        Some(Activity { last: guest.meter.last().into(), open: guest.meter.open() })
    }
}

impl Shared {
    fn guest_in(&self, slot: Slot) -> Result<Arc<Guest>, Error> {
        let seats = self.seats();
        seats.get(&slot).map(|seat| Arc::clone(&seat.guest)).ok_or(Error::Vacant(slot))
    }

    async fn rebuild(&self, slot: Slot) -> Result<Held, Error> {
        let gate = Arc::clone(&self.guest_in(slot)?.gate);
        let mut held = Held::default();
        if gate.rouse() == 0 {
            return Ok(held);
        }
        // What is sent before the tap has its carrier is lost, and would be said again by a timer only.
        link::carrier(&self.world, slot, link::CARRIER_WAIT).await?;
        while gate.rouse() > 0 {
            let (gate, runtime) = (Arc::clone(&gate), Handle::current());
            let back = move || {
                // The sockets belong to this runtime and are made in that world.
                let _entered = runtime.enter();
                gate.rebuild(slot, AT_ONCE)
            };
            let (kept, ended) = self.world.run(back).await?;
            held.kept += kept;
            held.ended += ended;
        }
        Ok(held)
    }
}
