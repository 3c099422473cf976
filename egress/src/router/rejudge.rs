//! A policy that has moved, and the open connections that were let through before: judged again, and
//! cut where it denies them. Never says that a cut is over before it is.

use std::sync::Arc;

use policy::Slot;
use tokio::task::coop::consume_budget;
use tokio::time::Instant;

use crate::flows::{Ending, Rejudged};
use crate::router::{DRAIN, Router};

impl Router {
    /// Judges the open connections of these slots again, each by the policy in force for it now, and
    /// cuts those that it denies. Returns once both sides of what was cut are closed, by an earlier
    /// call too, and nothing that was queued on them can leave any more; what is not within two
    /// seconds is counted as `closing`. To be called after the policies are stored.
    pub async fn rejudge(&self, slots: &[Slot]) -> Rejudged {
        let (ending, mut done) = (Ending::new(), Rejudged::default());
        let begun = Instant::now();
        for slot in slots {
            let guest = self.shared.seats().get(slot).map(|seat| Arc::clone(&seat.guest));
            let Some(guest) = guest else { continue };
            let one = guest.flows.rejudge(&guest.policy.load(), &guest.own, &ending);
            done.checked += one.checked;
            done.cut += one.cut;
            consume_budget().await;
        }
        let judged = begun.elapsed();
        done.closing = ending.over(DRAIN).await;
        let Rejudged { checked, cut, closing } = done;
        if closing > 0 {
            tracing::error!(closing, "connections outlive their cut");
        }
        tracing::debug!(checked, cut, ?judged, over = ?begun.elapsed(), "judged again");
        done
    }
}
