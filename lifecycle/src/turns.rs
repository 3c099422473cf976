//! Turns, of waking or of going into the store: so many sandboxes of a node do so at once, and whoever waits
//! for a turn does so behind one of each other tenant's at most.
//!
//! Tenants that wait are served one after the other, and each one's own sandboxes in the order in which
//! they asked. A turn that nobody takes any more is the next one's. Never looks at who has had how many.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

use policy::TenantName;
use tokio::sync::oneshot;

use crate::threads::locked;

/// The turns of a node. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Turns(Arc<Mutex<Table>>);

/// A place in the line; given up when it is dropped.
pub(crate) type Place = oneshot::Receiver<Turn>;

/// One's turn, over when it is dropped.
#[derive(Debug)]
pub(crate) struct Turn(Option<Turns>);

#[derive(Debug)]
struct Table {
    free: usize,
    waiting: Lines<oneshot::Sender<Turn>>,
}

/// Who waits, a line for each tenant.
#[derive(Debug)]
struct Lines<W> {
    lines: HashMap<TenantName, VecDeque<W>>,
    /// Whose line is next; each tenant that waits is there once.
    order: VecDeque<TenantName>,
}

impl Turns {
    /// So many at once, one at least.
    pub(crate) fn new(many: usize) -> Self {
        Self(Arc::new(Mutex::new(Table { free: many.max(1), waiting: Lines::new() })))
    }

    /// A place in the line of this tenant.
    pub(crate) fn ask(&self, tenant: &TenantName) -> Place {
        let (sender, place) = oneshot::channel();
        locked(&self.0).waiting.push(tenant, sender);
        self.give();
        place
    }

    /// Gives the turns that are free to who is next.
    fn give(&self) {
        loop {
            let next = {
                let mut table = locked(&self.0);
                if table.free == 0 {
                    return;
                }
                let Some(next) = table.waiting.pop() else { return };
                table.free -= 1;
                next
            };
            if let Err(mut unused) = next.send(Turn(Some(self.clone()))) {
                // Who asked has left. Not by its drop, which would come back here.
                unused.0 = None;
                locked(&self.0).free += 1;
            }
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(turns) = self.0.take() {
            locked(&turns.0).free += 1;
            turns.give();
        }
    }
}

impl<W> Lines<W> {
    fn new() -> Self {
        Self { lines: HashMap::new(), order: VecDeque::new() }
    }

    fn push(&mut self, tenant: &TenantName, who: W) {
        let line = self.lines.entry(tenant.clone()).or_default();
        if line.is_empty() {
            self.order.push_back(tenant.clone());
        }
        line.push_back(who);
    }

    fn pop(&mut self) -> Option<W> {
        let tenant = self.order.pop_front()?;
        let line = self.lines.get_mut(&tenant)?;
        let who = line.pop_front();
        if line.is_empty() {
            self.lines.remove(&tenant);
        } else {
            self.order.push_back(tenant);
        }
        who
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tenant(name: &str) -> TenantName {
        name.parse().unwrap()
    }

    /// Promise 62.
    #[test]
    fn who_wakes_one_sandbox_waits_for_one_of_a_tenant_that_wakes_five_hundred() {
        let turns = Turns::new(2);
        let mut many: Vec<Place> = (0..500).map(|_| turns.ask(&tenant("many"))).collect();
        let mut under_way: VecDeque<Turn> =
            many.iter_mut().filter_map(|place| place.try_recv().ok()).collect();
        assert_eq!(under_way.len(), 2, "as many as there are");
        let mut other = turns.ask(&tenant("other"));
        let mut others = turns.ask(&tenant("others"));
        assert!(other.try_recv().is_err());
        // The tenant with many is next, once; then whoever else waits.
        under_way.pop_front();
        under_way.pop_front();
        let other = other.try_recv().expect("behind one of theirs");
        let more: Vec<Turn> = many.iter_mut().filter_map(|place| place.try_recv().ok()).collect();
        assert_eq!(more.len(), 1);
        assert!(others.try_recv().is_err());
        drop(other);
        others.try_recv().expect("and so is the third");
    }

    #[test]
    fn a_place_that_was_left_is_passed_over_and_a_turn_is_never_lost() {
        let turns = Turns::new(1);
        let first = turns.ask(&tenant("a")).try_recv().expect("free");
        let places: Vec<Place> = (0..1000).map(|_| turns.ask(&tenant("a"))).collect();
        let mut last = turns.ask(&tenant("b"));
        drop(places);
        drop(first);
        drop(last.try_recv().expect("nobody else is left"));
        // One that was given and not looked at is given on, too.
        let unseen = turns.ask(&tenant("a"));
        let mut next = turns.ask(&tenant("a"));
        assert!(next.try_recv().is_err());
        drop(unseen);
        assert!(next.try_recv().is_ok());
        assert!(locked(&turns.0).waiting.order.is_empty());
        assert!(locked(&turns.0).waiting.lines.is_empty());
    }

    proptest! {
        /// Between two of one tenant's, whoever else waited all the time has been served.
        #[test]
        fn nobody_who_waits_is_passed_twice_by_the_same_tenant(
            asked in proptest::collection::vec((0_u8..5, any::<bool>()), 1..200),
        ) {
            let mut lines = Lines::new();
            // Who waits, in the order in which they asked, and whom each of them was passed by.
            let mut waiting: Vec<(u8, usize, Vec<u8>)> = Vec::new();
            for (number, (who, pops)) in asked.iter().enumerate() {
                lines.push(&tenant(&format!("t{who}")), (*who, number));
                waiting.push((*who, number, Vec::new()));
                if !pops {
                    continue;
                }
                let (served, number) = lines.pop().expect("somebody waits");
                let own = waiting.iter().position(|(who, ..)| *who == served);
                let (_, first, _) = waiting.remove(own.expect("it waits"));
                prop_assert_eq!(first, number, "its own in their order");
                // The first in each line is passed by any other tenant once at most.
                let mut seen = Vec::new();
                for (who, _, passed) in &mut waiting {
                    if *who != served && !seen.contains(who) {
                        prop_assert!(!passed.contains(&served), "{who} by {served}");
                        passed.push(served);
                    }
                    seen.push(*who);
                }
            }
            let left = std::iter::from_fn(|| lines.pop()).count();
            prop_assert_eq!(left, waiting.len());
        }
    }
}
