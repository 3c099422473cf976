//! Who holds how many ports towards where, and who may have one more. Asks nobody, and has no clock.
//!
//! A quarter of the ports is for all slots, in even parts. Of the rest a guest has one more only while it
//! holds fewer of them than are left: whoever wants all gets half, and of what is left others get half.
//! Never forgets a port that the kernel may still hold.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::net::{IpAddr, SocketAddr};

use policy::Slot;
use tokio::time::Instant;

/// The part that is divided evenly: one of so many.
const EVEN: usize = 4;

/// From an egress address to one far side; to all, for datagrams.
pub(super) type Way = (IpAddr, Option<SocketAddr>);

/// A connection, by its two ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Line {
    pub(super) ours: SocketAddr,
    pub(super) far: SocketAddr,
}

/// A port that is taken by nobody's socket any more.
#[derive(Debug)]
struct Rest {
    slot: Slot,
    until: Instant,
    /// Whether it is free then; otherwise that is to be asked.
    last: bool,
}

#[derive(Debug)]
pub(super) struct Table {
    slots: usize,
    held: HashMap<Way, HashMap<Slot, usize>>,
    resting: HashMap<Line, Rest>,
    due: BinaryHeap<Reverse<(Instant, Line)>>,
}

impl Table {
    pub(super) fn new(slots: usize) -> Self {
        Self { slots, held: HashMap::new(), resting: HashMap::new(), due: BinaryHeap::new() }
    }

    /// Takes one of `count` ports on a way, if the guest may have one more.
    pub(super) fn take(&mut self, way: Way, slot: Slot, count: usize) -> bool {
        let even = count / EVEN / self.slots;
        let common = count - even * self.slots;
        let held = self.held.entry(way).or_default();
        let taken: usize = held.values().map(|of| of.saturating_sub(even)).sum();
        let mine = held.get(&slot).copied().unwrap_or_default();
        let may = mine < even || mine.saturating_sub(even) < common.saturating_sub(taken);
        if may {
            *held.entry(slot).or_default() += 1;
        }
        if held.is_empty() {
            self.held.remove(&way);
        }
        may
    }

    /// Gives one back.
    pub(super) fn free(&mut self, way: Way, slot: Slot) {
        let Some(held) = self.held.get_mut(&way) else { return };
        if let Some(mine) = held.get_mut(&slot) {
            *mine = mine.saturating_sub(1);
            if *mine == 0 {
                held.remove(&slot);
            }
        }
        if held.is_empty() {
            self.held.remove(&way);
        }
    }

    /// Leaves a port with the guest that had it until then.
    pub(super) fn rest(&mut self, line: Line, slot: Slot, until: Instant, last: bool) {
        self.wake(line);
        self.resting.insert(line, Rest { slot, until, last });
        self.due.push(Reverse((until, line)));
    }

    /// The kernel has given this port to somebody else.
    pub(super) fn wake(&mut self, line: Line) {
        if let Some(rest) = self.resting.remove(&line) {
            self.free((line.ours.ip(), Some(line.far)), rest.slot);
        }
    }

    /// Gives back what has rested; what is to be asked about is returned, and held still.
    pub(super) fn due(&mut self, now: Instant) -> Vec<(Slot, Line)> {
        let mut unknown = Vec::new();
        while let Some(&Reverse((until, line))) = self.due.peek()
            && until <= now
        {
            self.due.pop();
            // It may have been given to another meanwhile, and rest anew.
            if self.resting.get(&line).is_none_or(|rest| rest.until != until) {
                continue;
            }
            match self.resting.remove(&line) {
                Some(Rest { slot, last: false, .. }) => unknown.push((slot, line)),
                Some(Rest { slot, .. }) => self.free((line.ours.ip(), Some(line.far)), slot),
                None => {}
            }
        }
        unknown
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const COUNT: usize = 28_232;
    const SLOTS: usize = 1024;

    fn slot(n: usize) -> Slot {
        Slot::new(u16::try_from(n).expect("small")).expect("in range")
    }

    fn line(port: u16) -> Line {
        let far = SocketAddr::from(([192, 0, 2, 1], 443));
        Line { ours: SocketAddr::from(([198, 51, 100, 7], port)), far }
    }

    fn way() -> Way {
        (line(0).ours.ip(), Some(line(0).far))
    }

    /// As many as this guest gets.
    fn all(table: &mut Table, of: Slot) -> usize {
        std::iter::repeat_with(|| table.take(way(), of, COUNT)).take_while(|took| *took).count()
    }

    #[test]
    fn one_guest_alone_gets_as_many_as_it_can_open_for_a_minute_and_leaves_more_than_a_third() {
        let mut table = Table::new(SLOTS);
        let got = all(&mut table, slot(1));
        assert!((11_000..COUNT / 2).contains(&got), "{got}");
    }

    #[test]
    fn whatever_all_others_take_each_guest_has_its_even_part() {
        let mut table = Table::new(SLOTS);
        let got: Vec<usize> = (1..=SLOTS).map(|n| all(&mut table, slot(n))).collect();
        let even = COUNT / EVEN / SLOTS;
        assert!(even >= 6, "as many as a browser opens to one host: {even}");
        assert!(got.iter().all(|got| *got >= even), "{got:?}");
        assert!(got.iter().sum::<usize>() <= COUNT, "{got:?}");
    }

    #[test]
    fn guests_that_take_by_turns_get_the_same_and_leave_as_much() {
        let mut table = Table::new(SLOTS);
        let mut got = [0; 3];
        while got.iter_mut().zip(1..).fold(false, |any, (got, n)| {
            let took = table.take(way(), slot(n), COUNT);
            *got += usize::from(took);
            any | took
        }) {}
        assert!(got.iter().all(|of| of.abs_diff(COUNT / 5) < 200), "{got:?}");
        assert!(all(&mut table, slot(9)) > 2_000);
    }

    #[test]
    fn one_destination_takes_nothing_from_another() {
        let mut table = Table::new(SLOTS);
        let got = all(&mut table, slot(1));
        let mut other = table.held.clone();
        let (from, to) = way();
        let elsewhere = (from, to.map(|to| SocketAddr::new(to.ip(), 444)));
        assert!((0..got).all(|_| table.take(elsewhere, slot(1), COUNT)));
        assert!(!table.take(elsewhere, slot(1), COUNT));
        (0..got).for_each(|_| table.free(elsewhere, slot(1)));
        assert_eq!(table.held.remove(&way()), other.remove(&way()), "and leaves nothing");
        assert!(table.held.is_empty());
    }

    #[test]
    fn a_port_that_rests_is_held_until_its_time_and_given_back_once() {
        let (mut table, now) = (Table::new(SLOTS), Instant::now());
        let held = |table: &Table| {
            table.held.get(&way()).and_then(|held| held.get(&slot(1))).copied().unwrap_or_default()
        };
        let later = now + Duration::from_secs(60);
        for port in [1, 2, 3] {
            assert!(table.take(way(), slot(1), COUNT));
            table.rest(line(port), slot(1), later, port != 3);
        }
        assert_eq!((table.due(now), held(&table)), (Vec::new(), 3));
        // The kernel gives the first to a new connection of another guest.
        assert!(table.take(way(), slot(2), COUNT));
        table.wake(line(1));
        assert_eq!(held(&table), 2);
        // Of the third it is not known whether it is free.
        assert_eq!(table.due(later), [(slot(1), line(3))]);
        assert_eq!(held(&table), 1);
        table.free(way(), slot(1));
        table.free(way(), slot(2));
        assert!(table.held.is_empty() && table.resting.is_empty() && table.due.is_empty());
    }
}
