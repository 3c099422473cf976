//! The fences of attached slots while they are: mended where somebody else changes them, and made to
//! follow their policy. The part that follows, which datagrams go to the relay, is changed alone and
//! in one batch, and never decides: what it lets in is judged all the same.

use std::sync::Arc;

use policy::{PolicyHandle, Slot};

use crate::error::Error;
use crate::fence::{self, SlotFence};
use crate::limits::Limits;
use crate::router::{Router, Shared};
use crate::watch;

impl Router {
    /// Lets the fence of each of these slots hold the datagrams that the policy in force for it may
    /// mean, and reads it back. To be called after [`Router::rejudge`]: what a fence lets in before, or
    /// if it cannot be changed, is judged by the policy in force all the same. Each change is completed
    /// even if the future is dropped.
    ///
    /// # Errors
    /// The last failure, after all were tried: datagrams that the policy lets through may still be
    /// refused there.
    pub async fn refence(&self, slots: &[Slot]) -> Result<(), Error> {
        let mut all = Ok(());
        for &slot in slots {
            let shared = Arc::clone(&self.shared);
            let one = tokio::spawn(async move { shared.refill(slot).await }).await;
            all = one.unwrap_or(Err(Error::Interrupted(slot))).and(all);
        }
        all
    }

    /// Makes sure that the fence of a slot stands as it is meant to, and mends it where it does not: to be
    /// called before a guest that stood still speaks again.
    ///
    /// # Errors
    /// When the slot is not attached, or its fence does not stand and cannot be put up: it is shut then.
    pub async fn assure_fence(&self, slot: Slot) -> Result<(), Error> {
        let shared = Arc::clone(&self.shared);
        if !shared.seats().contains_key(&slot) {
            return Err(Error::Vacant(slot));
        }
        let assured = tokio::spawn(async move { shared.mend(slot).await });
        assured.await.map_err(|_| Error::Interrupted(slot))?.map(drop)
    }
}

impl Shared {
    /// Lets the fence of a slot hold what its policy says of datagrams now. One that cannot be
    /// changed because someone else did is put up anew.
    async fn refill(&self, slot: Slot) -> Result<(), Error> {
        let _turn = self.turn(slot).await;
        let meant = {
            let mut seats = self.seats();
            let Some(seat) = seats.get_mut(&slot) else { return Ok(()) };
            let meant = self.fence(&seat.guest.policy);
            if seat.held && seat.fence == meant {
                return Ok(());
            }
            (seat.held, seat.fence) = (false, meant.clone());
            meant
        };
        if let Err(error) = fence::refill(&self.world, slot, &meant).await {
            tracing::warn!(%slot, error = &error as &dyn std::error::Error, "refill fence");
            fence::attach(&self.world, slot, &meant).await?;
        }
        if let Some(seat) = self.seats().get_mut(&slot) {
            seat.held = true;
        }
        Ok(())
    }

    /// Mends the fence where somebody else has changed it, and records that. What cannot be mended
    /// stays shut until the next look, and keeps nothing else from being looked at.
    ///
    /// # Errors
    /// The first failure, after all was looked at.
    pub(crate) async fn look_after(&self) -> Result<(), Error> {
        let mut all = Ok(());
        match self.world.assure_ways().await {
            Ok(false) => {}
            Ok(true) => watch::record(
                &self.trail,
                None,
                "the rule or the route of diverted connections was gone",
            ),
            Err(error) => all = Err(error),
        }
        let moved = match fence::moved_by_others(&self.world).await {
            Ok(moved) if self.watch.is_sound(moved) => return all,
            Ok(moved) => moved,
            Err(error) => {
                all = all.and(Err(error));
                None
            }
        };
        let mut untouched = true;
        match watch::mend_base(&self.world, self.config.divert_port).await {
            Ok(None) => {}
            Ok(Some(found)) => {
                watch::record(&self.trail, None, &found);
                untouched = false;
            }
            Err(error) => all = all.and(Err(error)),
        }
        let slots: Vec<Slot> = self.seats().keys().copied().collect();
        for slot in slots {
            match self.mend(slot).await {
                Ok(as_meant) => untouched &= as_meant,
                Err(error) => all = all.and(Err(error)),
            }
        }
        if untouched && all.is_ok() {
            self.watch.found_sound(moved);
        }
        all
    }

    /// Mends the fence of one slot. Returns whether there was nothing to mend.
    async fn mend(&self, slot: Slot) -> Result<bool, Error> {
        let _turn = self.turn(slot).await;
        let known = self
            .seats()
            .get(&slot)
            .map(|seat| (Arc::clone(&seat.guest), seat.fence.clone(), seat.shut));
        let Some((guest, meant, shut)) = known else { return Ok(true) };
        let found = watch::inspect(&self.world, slot, &meant).await?;
        let left = || shut.then(|| "an earlier repair left its link down".to_owned());
        let Some(found) = found.or_else(left) else { return Ok(true) };
        self.mark_shut(slot, true);
        if let Err(error) = watch::mend(&self.world, slot, &meant).await {
            tracing::error!(%slot, error = &error as &dyn std::error::Error, "guest stays shut");
            if !shut {
                watch::record_failure(&self.trail, &guest.subject, &found, &error);
            }
            return Err(error);
        }
        self.mark_shut(slot, false);
        watch::record(&self.trail, Some(&guest.subject), &found);
        Ok(false)
    }

    fn mark_shut(&self, slot: Slot, shut: bool) {
        if let Some(seat) = self.seats().get_mut(&slot) {
            seat.shut = shut;
        }
    }

    /// The fence of a slot whose policy is this.
    pub(crate) fn fence(&self, policy: &PolicyHandle) -> SlotFence {
        let Limits { packets, bytes, .. } = self.config.limits;
        let udp = policy.load().datagrams();
        SlotFence { packets, bytes, udp, ..SlotFence::new(self.config.nflog_group) }
    }
}
