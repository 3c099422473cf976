//! A policy that has moved, and the open connections that were let through before: judged again, and
//! cut where it denies them. Never says that a cut is over before it is.
//!
//! Slots have turns, and whoever else has work on this thread has one between them: what a tenant's
//! policy costs to judge holds up neither the cuts of others nor their traffic.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use policy::Slot;
use tokio::task::yield_now;

use crate::flows::{Ending, Rejudged};
use crate::router::{DRAIN, Router};

/// How long the connections of one slot are judged before it is the next one's turn.
const TURN: Duration = Duration::from_millis(1);

impl Router {
    /// Judges the open connections of these slots again, each by the policy in force for it now, and
    /// cuts those that it denies. Returns once both sides of what was cut are closed, by an earlier
    /// call too, and nothing that was queued on them can leave any more; what is not within two
    /// seconds is counted as `closing`. To be called after the policies are stored.
    pub async fn rejudge(&self, slots: &[Slot]) -> Rejudged {
        let (ending, begun) = (Ending::new(), Instant::now());
        let guests = slots.iter().filter_map(|slot| {
            let guest = self.shared.seats().get(slot).map(|seat| Arc::clone(&seat.guest))?;
            let (mut again, ending) = (guest.flows.again(), &ending);
            // Each by what is in force by then: another write may have come meanwhile.
            Some(move || {
                let (one, stays) = again.next(&guest.policy.load(), &guest.own, ending)?;
                if let Some((flow, permit)) = stays {
                    guest.gate.heed(flow, &permit);
                }
                Some(one)
            })
        });
        let mut done = by_turns(guests.collect()).await;
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

/// Judges what each of these gives until it gives nothing.
async fn by_turns(mut waiting: VecDeque<impl FnMut() -> Option<Rejudged>>) -> Rejudged {
    let (mut done, mut held) = (Rejudged::default(), Instant::now());
    while let Some(mut next) = waiting.pop_front() {
        let turn = Instant::now();
        while let Some(one) = next() {
            done.add(one);
            if turn.elapsed() >= TURN {
                waiting.push_back(next);
                break;
            }
        }
        if held.elapsed() >= TURN {
            yield_now().await;
            held = Instant::now();
        }
    }
    done
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    fn slot<'a>(
        mut connections: usize,
        each: &'a dyn Fn(),
    ) -> impl FnMut() -> Option<Rejudged> + 'a {
        move || {
            connections = connections.checked_sub(1)?;
            each();
            Some(Rejudged { checked: 1, ..Rejudged::default() })
        }
    }

    /// Promise 18.
    #[tokio::test]
    async fn a_slot_that_costs_much_holds_up_neither_the_next_nor_the_thread() {
        let (costly, seen, ran) = (Cell::new(0), Cell::new(None), Cell::new(0));
        let dear = || {
            costly.set(costly.get() + 1);
            std::thread::sleep(TURN);
        };
        let cheap = || seen.set(seen.get().or(Some(costly.get())));
        let slots: [(usize, &dyn Fn()); 2] = [(20, &dear), (2, &cheap)];
        let slots = slots.map(|(connections, each)| slot(connections, each));
        let others = async {
            loop {
                ran.set(ran.get() + 1);
                yield_now().await;
            }
        };
        let done = tokio::select! {
            done = by_turns(slots.into()) => done,
            () = others => Rejudged::default(),
        };
        assert_eq!(done.checked, 22);
        assert_eq!(seen.get(), Some(1), "after the first turn of the other");
        assert!(ran.get() >= 10, "{}", ran.get());
    }
}
