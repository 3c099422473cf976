//! The account of one sandbox: fed with what it is, what its process has had and what passed, at which
//! instants; owes the book what is to be added to it, by hours of the wall clock.
//!
//! Pure. Time is counted by the clock of the boot, so that nothing is counted twice or not at all whatever
//! the wall clock does; that decides only which hour it is counted in.

use std::collections::BTreeMap;

use egress::Carried;
use serde::{Deserialize, Serialize};

use crate::usage::amount::{Amounts, Phase};

/// Milliseconds in an hour.
pub(crate) const HOUR: u64 = 3_600_000;
/// Destinations that are owed apart for an hour, and hours for which they are.
const PLACES: usize = 256;
const HOURS: usize = 48;
const MIB: u64 = 1 << 20;

/// An instant by both clocks, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Moment {
    /// Since the host began.
    pub(crate) up: u64,
    /// Since 1970.
    pub(crate) wall: u64,
}

/// What has to be known of an account to go on with it, in another daemon perhaps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Mark {
    /// The boot of the host, and until when in it everything is counted.
    boot: String,
    until: u64,
    phase: Phase,
    /// Which process was looked at last, and what of processors it had had by then.
    process: Option<String>,
    had: u64,
}

/// Bytes by destination, out and in. The one without a name stands for all that are not kept apart.
pub(crate) type Places = BTreeMap<Box<str>, (u64, u64)>;

/// What is to be added to one hour.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Owed {
    pub(crate) amounts: Amounts,
    pub(crate) places: Places,
}

/// By hours since 1970.
pub(crate) type Hours = BTreeMap<u64, Owed>;

/// The account.
#[derive(Clone, Debug)]
pub(crate) struct Account {
    vcpus: u64,
    memory_mib: u64,
    mark: Mark,
    /// What a process had had before this account began is not its.
    baseline: bool,
    resident_mib: u64,
    saved_mib: u64,
    wall: u64,
    owed: Hours,
}

impl Account {
    /// Of a sandbox that is made now; or, where it is `old`, of one that nobody kept an account of.
    pub(crate) fn begin(
        (vcpus, memory_mib): (u8, u32),
        (phase, old): (Phase, bool),
        boot: &str,
        now: Moment,
    ) -> Self {
        let mark = Mark { boot: boot.to_owned(), until: now.up, phase, process: None, had: 0 };
        Self::of(vcpus, memory_mib, mark, old, now)
    }

    /// Goes on with one, of which nobody has seen what became of the sandbox since: it counts as what it was
    /// or what it is now, whichever costs less. The time in which there was no host counts for nothing.
    pub(crate) fn resume(
        (vcpus, memory_mib): (u8, u32),
        mut mark: Mark,
        phase: Phase,
        boot: &str,
        now: Moment,
    ) -> Self {
        if mark.boot != boot {
            (mark.boot, mark.until) = (boot.to_owned(), 0);
        }
        mark.phase = mark.phase.min(phase);
        let mut account = Self::of(vcpus, memory_mib, mark, false, now);
        account.turn(phase, now);
        account
    }

    fn of(vcpus: u8, memory_mib: u32, mark: Mark, baseline: bool, now: Moment) -> Self {
        Self {
            vcpus: vcpus.into(),
            memory_mib: memory_mib.into(),
            mark,
            baseline,
            resident_mib: 0,
            saved_mib: 0,
            wall: now.wall,
            owed: Hours::new(),
        }
    }

    pub(crate) fn phase(&self) -> Phase {
        self.mark.phase
    }

    /// What is to be known to go on from here.
    pub(crate) fn mark(&self) -> &Mark {
        &self.mark
    }

    /// Counts the time until now.
    pub(crate) fn advance(&mut self, now: Moment) {
        let mut left = now.up.saturating_sub(self.mark.until);
        self.mark.until = self.mark.until.max(now.up);
        self.wall = now.wall;
        let mut end = now.wall;
        while left > 0 {
            // Those before 1970 are of its first hour: only a clock that is far off says so.
            let hour = end.saturating_sub(1) / HOUR;
            let part = if hour == 0 { left } else { left.min(end - hour * HOUR) };
            self.spend(hour, part);
            left -= part;
            end = end.saturating_sub(part);
        }
    }

    fn spend(&mut self, hour: u64, ms: u64) {
        let (vcpus, memory) = (self.vcpus, self.memory_mib);
        let (resident, saved) = (self.resident_mib, self.saved_mib);
        let phase = self.mark.phase;
        let amounts = &mut self.hour(hour).amounts;
        let mut used = Amounts::default();
        match phase {
            Phase::Running => {
                used.running_ms = ms;
                used.vcpu_ms = vcpus.saturating_mul(ms);
                used.memory_mib_ms = memory.saturating_mul(ms);
                used.resident_mib_ms = resident.saturating_mul(ms);
                used.resident_peak_mib = resident;
            }
            Phase::Standby => {
                used.standby_ms = ms;
                used.saved_mib_ms = saved.saturating_mul(ms);
            }
            Phase::Suspended => {
                used.suspended_ms = ms;
                used.saved_mib_ms = saved.saturating_mul(ms);
            }
            Phase::Other => used.other_ms = ms,
        }
        amounts.add(&used);
    }

    /// From now on it is in this phase; says whether that is another.
    pub(crate) fn turn(&mut self, phase: Phase, now: Moment) -> bool {
        self.advance(now);
        let turned = self.mark.phase != phase;
        if turned {
            (self.mark.phase, self.resident_mib, self.saved_mib) = (phase, 0, 0);
        }
        turned
    }

    /// A process of it was looked at: what it has had of processors, in milliseconds, and how many bytes it
    /// holds in memory.
    pub(crate) fn work(&mut self, process: &str, had: u64, resident: Option<u64>) {
        let same = self.mark.process.as_deref() == Some(process);
        let before = match (same, self.baseline) {
            (true, _) => self.mark.had,
            (false, true) => had,
            (false, false) => 0,
        };
        self.baseline = false;
        if !same {
            self.mark.process = Some(process.to_owned());
        }
        let more = had.saturating_sub(before);
        self.mark.had = before.saturating_add(more);
        self.resident_mib = resident.unwrap_or_default().div_ceil(MIB);
        let peak = self.resident_mib;
        let used = Amounts { cpu_ms: more, resident_peak_mib: peak, ..Amounts::default() };
        if more > 0 || peak > 0 {
            self.now().amounts.add(&used);
        }
    }

    /// So many bytes are kept of it while it sleeps.
    pub(crate) fn keep(&mut self, bytes: u64) {
        self.saved_mib = bytes.div_ceil(MIB);
    }

    /// These bytes passed.
    pub(crate) fn carry(&mut self, carried: Vec<Carried>) {
        for Carried { to, bytes_out, bytes_in } in carried {
            let owed = self.now();
            owed.amounts.add(&Amounts { bytes_out, bytes_in, ..Amounts::default() });
            owed.pass(to.unwrap_or_default(), (bytes_out, bytes_in));
        }
    }

    /// Whether anything is owed but time.
    pub(crate) fn owes_more_than_time(&self) -> bool {
        self.owed.values().any(|owed| !owed.places.is_empty() || owed.amounts.cpu_ms > 0)
    }

    /// Takes what is owed, to be written together with [`Account::mark`].
    pub(crate) fn take(&mut self) -> Hours {
        std::mem::take(&mut self.owed)
    }

    /// It was not written.
    pub(crate) fn owe_again(&mut self, hours: Hours) {
        for (hour, owed) in hours {
            let mine = self.hour(hour);
            mine.amounts.add(&owed.amounts);
            for (place, bytes) in owed.places {
                mine.pass(place, bytes);
            }
        }
    }

    fn now(&mut self) -> &mut Owed {
        self.hour(self.wall.saturating_sub(1) / HOUR)
    }

    fn hour(&mut self, hour: u64) -> &mut Owed {
        if !self.owed.contains_key(&hour) && self.owed.len() >= HOURS {
            // Nothing could be written for long: the sums stay.
            let apart = self.owed.values_mut().find(|owed| owed.places.len() > 1);
            apart.into_iter().for_each(Owed::join);
        }
        self.owed.entry(hour).or_default()
    }
}

impl Owed {
    fn pass(&mut self, place: Box<str>, bytes: (u64, u64)) {
        let full = self.places.len() >= PLACES && !self.places.contains_key(&place);
        let place = if full { Box::default() } else { place };
        let sums = self.places.entry(place).or_default();
        sums.0 = sums.0.saturating_add(bytes.0);
        sums.1 = sums.1.saturating_add(bytes.1);
    }

    fn join(&mut self) {
        for (_, bytes) in std::mem::take(&mut self.places) {
            self.pass(Box::default(), bytes);
        }
    }
}

#[cfg(test)]
mod tests;
