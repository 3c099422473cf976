//! Which slots are free. A slot is given to another only after a pause, and the one that was free
//! longest first, so that whatever the kernel still holds for the last guest has time to die.
//! Whose guest it was is known for as long: who comes and goes all the time may not have all slots rest.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use policy::{Slot, TenantName};
use tokio::time::Instant;

/// The slots of this node. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Slots(Arc<Mutex<Table>>);

#[derive(Debug)]
struct Table {
    highest: u16,
    hold_down: Duration,
    last: u16,
    taken: BTreeSet<Slot>,
    /// Taken, though by nobody: something of the last guest is still there.
    stuck: BTreeMap<Slot, Stuck>,
    held: BTreeMap<Slot, Rest>,
}

/// What of the last guest keeps a slot from all; for longer, the further down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stuck {
    /// A tap or parts of a fence.
    Network,
    /// Perhaps a process with the slot's user, too.
    Process,
    /// Perhaps a guest that nobody here can see: as long as this host does not boot anew.
    Guest,
}

/// A slot that is free, but not yet for anybody.
#[derive(Debug)]
struct Rest {
    until: Instant,
    /// Whose guest it had; none where that is not known any more.
    of: Option<TenantName>,
}

impl Slots {
    /// Slots 1 to `highest`, all free.
    pub(crate) fn new(highest: u16, hold_down: Duration) -> Self {
        Self(Arc::new(Mutex::new(Table {
            highest: highest.clamp(1, Slot::MAX),
            hold_down,
            last: 0,
            taken: BTreeSet::new(),
            stuck: BTreeMap::new(),
            held: BTreeMap::new(),
        })))
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        usize::from(self.table().highest)
    }

    /// Marks a slot as taken, as found in the journal.
    pub(crate) fn take_this(&self, slot: Slot) {
        self.table().take_this(slot);
    }

    /// Takes a free slot, going round.
    pub(crate) fn take(&self, now: Instant) -> Option<Slot> {
        self.table().take(now)
    }

    /// Keeps a slot from all until it is given back. What keeps it already is not forgotten over less.
    pub(crate) fn keep(&self, slot: Slot, stuck: Stuck) {
        let mut table = self.table();
        table.taken.insert(slot);
        let known = table.stuck.entry(slot).or_insert(stuck);
        *known = stuck.max(*known);
    }

    /// The slots that are kept from all, and by what.
    pub(crate) fn stuck(&self) -> Vec<(Slot, Stuck)> {
        self.table().stuck.iter().map(|(slot, stuck)| (*slot, *stuck)).collect()
    }

    /// Whether fewer slots rest after guests of this tenant than there are free ones: so whoever
    /// comes and goes all the time leaves some to others.
    pub(crate) fn leaves_some(&self, tenant: &TenantName, now: Instant) -> bool {
        self.table().leaves_some(tenant, now)
    }

    /// Gives a slot back; it is held for a while.
    pub(crate) fn give_back(&self, slot: Slot, of: Option<&TenantName>, now: Instant) {
        let mut table = self.table();
        table.stuck.remove(&slot);
        if table.taken.remove(&slot) {
            table.rest(slot, of, now);
        }
    }

    /// Holds a free slot for a while.
    pub(crate) fn rest(&self, slot: Slot, now: Instant) {
        self.table().rest(slot, None, now);
    }

    /// Each change is whole before the next can panic.
    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn take_this(&mut self, slot: Slot) {
        self.taken.insert(slot);
        self.last = self.last.max(slot.number());
    }

    fn take(&mut self, now: Instant) -> Option<Slot> {
        self.end_rests(now);
        let (start, end) = (self.last + 1, self.highest);
        let free = self.free((start..=end).chain(1..=self.last.min(end))).next()?;
        self.take_this(free);
        self.last = free.number();
        Some(free)
    }

    fn leaves_some(&mut self, tenant: &TenantName, now: Instant) -> bool {
        self.end_rests(now);
        let resting = self.held.values().filter(|rest| rest.of.as_ref() == Some(tenant)).count();
        resting < self.free(1..=self.highest).count()
    }

    fn free(&self, numbers: impl Iterator<Item = u16>) -> impl Iterator<Item = Slot> {
        let slots = numbers.filter_map(Slot::new);
        slots.filter(|slot| !self.taken.contains(slot) && !self.held.contains_key(slot))
    }

    fn rest(&mut self, slot: Slot, of: Option<&TenantName>, now: Instant) {
        self.held.insert(slot, Rest { until: now + self.hold_down, of: of.cloned() });
    }

    fn end_rests(&mut self, now: Instant) {
        self.held.retain(|_, rest| rest.until > now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Promise 28.
    #[test]
    fn a_slot_is_held_back_before_another_gets_it() {
        let start = Instant::now();
        let slots = Slots::new(2, Duration::from_secs(3));
        let first = slots.take(start).unwrap();
        let second = slots.take(start).unwrap();
        assert_ne!(first, second);
        assert_eq!(slots.take(start), None);
        slots.give_back(first, None, start);
        assert_eq!(slots.take(start + Duration::from_secs(2)), None, "held back");
        assert_eq!(slots.take(start + Duration::from_secs(4)), Some(first));
    }

    /// Promise 28.
    #[test]
    fn a_slot_that_is_stuck_is_nobodys_until_it_is_given_back_and_has_rested() {
        let start = Instant::now();
        let slots = Slots::new(1, Duration::from_secs(3));
        let slot = slots.take(start).unwrap();
        slots.keep(slot, Stuck::Network);
        slots.keep(slot, Stuck::Guest);
        slots.keep(slot, Stuck::Network);
        assert_eq!(slots.stuck(), [(slot, Stuck::Guest)], "a tap that would not go is less");
        let later = start + Duration::from_secs(3600);
        assert_eq!((slots.take(later), slots.stuck()), (None, vec![(slot, Stuck::Guest)]));
        slots.give_back(slot, None, later);
        assert_eq!((slots.take(later), slots.stuck()), (None, vec![]), "it rests");
        assert_eq!(slots.take(later + Duration::from_secs(4)), Some(slot));
    }

    /// Promise 55.
    #[test]
    fn who_comes_and_goes_has_fewer_slots_rest_than_it_leaves_free() {
        let start = Instant::now();
        let slots = Slots::new(8, Duration::from_secs(3));
        let tenant = |name: &str| -> TenantName { name.parse().unwrap() };
        let rounds = |name: &str| {
            let of = tenant(name);
            let mut rounds = 0;
            while slots.leaves_some(&of, start) {
                let slot = slots.take(start).unwrap();
                slots.give_back(slot, Some(&of), start);
                rounds += 1;
            }
            rounds
        };
        assert_eq!((rounds("loud"), rounds("other"), rounds("loud")), (4, 2, 0));
        assert!(slots.leaves_some(&tenant("quiet"), start), "there is room for who had none");
        assert!(slots.take(start).is_some());
        let later = start + Duration::from_secs(4);
        assert!(slots.leaves_some(&tenant("loud"), later));
        // Those of a time when there were more take nothing from those there are.
        (9..=16).filter_map(Slot::new).for_each(|slot| slots.take_this(slot));
        assert!(slots.leaves_some(&tenant("loud"), later));
    }

    #[test]
    fn the_slot_that_was_free_longest_comes_first() {
        let now = Instant::now();
        let slots = Slots::new(3, Duration::ZERO);
        let first = slots.take(now).unwrap();
        slots.give_back(first, None, now);
        assert_eq!(slots.take(now).map(Slot::number), Some(2));
        assert_eq!(slots.take(now).map(Slot::number), Some(3));
        assert_eq!(slots.take(now), Some(first));
        assert_eq!(slots.take(now), None);
    }
}
