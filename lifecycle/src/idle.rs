//! Whether a sandbox is idle, since when, and why not; and how often one may be woken by what comes in.
//!
//! Pure: takes instants and samples, returns when it may sleep. Idle is who for a while had no payload in
//! or out, no call of the control API under way, no lease, and processors that were all but still.

use std::time::Duration;

use tokio::time::Instant;

use crate::sandbox::Awake;

/// Over how long the time of processors is compared: it is counted in hundredths of a second.
const WINDOW: Duration = Duration::from_secs(2);
/// The part of one processor below which a guest does nothing worth waiting for, in percent.
const BUSY_PERCENT: u32 = 5;
/// The pause after a try to fall asleep that failed, and the longest to which it grows.
const AGAIN: Duration = Duration::from_secs(30);
const LONGEST_AGAIN: Duration = Duration::from_secs(600);

/// Why a sandbox is awake, as shown to people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    /// It was made or woken.
    Began,
    Bytes,
    Processor,
    Call,
    Lease,
    /// It could not be put to sleep a while ago.
    Failed,
    /// Its disk finds no room, and it waits for some.
    Stuck,
    /// It is idle, and cannot be put to sleep.
    Driver,
    Never,
}

/// What keeps a sandbox awake, as it is shown.
pub(crate) const fn awake(why: Why, left: Option<Duration>) -> Awake {
    Awake { by: why.word(), why: why.as_str(), left }
}

impl Why {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Began => "it was made or woken",
            Self::Bytes => "bytes passed",
            Self::Processor => "its processors were busy",
            Self::Call => "a command of the control API runs",
            Self::Lease => "it is kept awake",
            Self::Failed => "it could not be put to sleep",
            Self::Stuck => "it stands still until its disk finds room",
            Self::Driver => "it is idle, and its driver cannot be put to sleep on this node",
            Self::Never => "it never sleeps",
        }
    }

    /// The same in a word.
    const fn word(self) -> &'static str {
        match self {
            Self::Began => "start",
            Self::Bytes => "bytes",
            Self::Processor => "processors",
            Self::Call => "call",
            Self::Lease => "lease",
            Self::Failed => "failure",
            Self::Stuck => "disk",
            Self::Driver => "driver",
            Self::Never => "never",
        }
    }
}

/// What a look at a sandbox found.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    /// When the last byte of payload passed, either way.
    pub(crate) bytes: Instant,
    /// What its process has had of processors, if it is ours.
    pub(crate) processor: Option<Duration>,
    /// Calls of the control API that are under way.
    pub(crate) calls: usize,
}

/// A reason to be awake, and until when unless something goes on meanwhile; none: nobody knows.
pub(crate) type Hold = (Why, Option<Instant>);

/// What is known of the idleness of one sandbox.
#[derive(Clone, Debug)]
pub(crate) struct Idleness {
    /// None: it never is.
    after: Option<Duration>,
    /// What went on last, and when, each thing once.
    began: Instant,
    bytes: Option<Instant>,
    worked: Option<Instant>,
    called: Option<Instant>,
    calls: usize,
    /// When the window over its processors began, and what they had done by then.
    window: Option<(Instant, Duration)>,
    lease: Option<Instant>,
    /// Whether all but nothing was done in the last window, and whether that is because it cannot go on.
    still: bool,
    stuck: bool,
    /// After tries that failed.
    not_before: Option<Instant>,
    again: Duration,
}

impl Idleness {
    /// Of a sandbox that begins to run now.
    pub(crate) const fn new(after: Option<Duration>, now: Instant) -> Self {
        Self {
            after,
            began: now,
            bytes: None,
            worked: None,
            called: None,
            calls: 0,
            window: None,
            lease: None,
            still: false,
            stuck: false,
            not_before: None,
            again: AGAIN,
        }
    }

    /// It runs again, by another process perhaps.
    pub(crate) const fn woken(&mut self, now: Instant) {
        self.began = now;
        (self.bytes, self.worked, self.called, self.window) = (None, None, None, None);
        (self.still, self.stuck) = (false, false);
    }

    /// Whether its processors stand still, as far as is known.
    pub(crate) const fn is_still(&self) -> bool {
        self.still
    }

    /// It is stopped in the middle of what it does, or goes on.
    pub(crate) const fn stuck(&mut self, stuck: bool) {
        self.stuck = stuck;
    }

    /// Keeps it awake until then; a shorter lease does not end a longer one.
    pub(crate) fn keep(&mut self, until: Instant) {
        self.lease = self.lease.max(Some(until));
    }

    /// It could not be put to sleep: not again at once.
    pub(crate) fn failed(&mut self, now: Instant) {
        self.not_before = Some(now + self.again);
        self.again = (self.again * 2).min(LONGEST_AGAIN);
    }

    /// It fell asleep.
    pub(crate) const fn slept(&mut self) {
        (self.not_before, self.again) = (None, AGAIN);
    }

    /// Takes a look into account.
    pub(crate) fn look(&mut self, now: Instant, sample: Sample) {
        self.calls = sample.calls;
        if sample.calls > 0 {
            self.called = Some(now);
        }
        self.bytes = Some(sample.bytes.min(now)).filter(|at| *at > self.began);
        let Some(had) = sample.processor else { return };
        let Some((since, before)) = self.window else {
            self.window = Some((now, had));
            return;
        };
        let past = now.saturating_duration_since(since);
        if past < WINDOW {
            return;
        }
        self.window = Some((now, had));
        // Another process begins at nothing.
        let used = had.checked_sub(before).unwrap_or(past);
        self.still = used * 100 < past;
        if used * 100 >= past * BUSY_PERCENT {
            self.worked = Some(now);
        }
    }

    /// What keeps it awake now, what does so longest first; nothing: it is idle.
    pub(crate) fn holds(&self, now: Instant) -> Vec<Hold> {
        let Some(after) = self.after else { return vec![(Why::Never, None)] };
        let last = [
            (Why::Began, Some(self.began)),
            (Why::Bytes, self.bytes),
            (Why::Processor, self.worked),
            (Why::Call, self.called.filter(|_| self.calls == 0)),
        ];
        let last = last.into_iter().map(|(why, at)| (why, at.map(|at| at + after)));
        let until = [(Why::Lease, self.lease), (Why::Failed, self.not_before)];
        let mut holds: Vec<Hold> =
            last.chain(until).filter(|(_, until)| until.is_some_and(|until| until > now)).collect();
        holds.sort_by_key(|(_, until)| std::cmp::Reverse(*until));
        if self.calls > 0 {
            holds.insert(0, (Why::Call, None));
        }
        if self.stuck {
            holds.insert(0, (Why::Stuck, None));
        }
        holds
    }
}

/// How often bytes from outside may wake a sandbox: a far side that speaks up each time it has fallen asleep
/// would otherwise have it do nothing but fall asleep and wake. Whoever asks by the control API is exempt.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budget {
    left: u32,
    since: Instant,
}

impl Budget {
    /// Wakes at once.
    const MOST: u32 = 10;
    /// One more after so long.
    const EVERY: Duration = Duration::from_secs(60);

    pub(crate) const fn new(now: Instant) -> Self {
        Self { left: Self::MOST, since: now }
    }

    /// Takes one; or else tells from when on there is one.
    pub(crate) fn take(&mut self, now: Instant) -> Result<(), Instant> {
        while self.left < Self::MOST && now >= self.since + Self::EVERY {
            self.since += Self::EVERY;
            self.left += 1;
        }
        if self.left == Self::MOST {
            self.since = now;
        }
        self.left = self.left.checked_sub(1).ok_or(self.since + Self::EVERY)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const AFTER: Duration = Duration::from_secs(15);
    const LOOK: Duration = Duration::from_millis(500);

    fn quiet(start: Instant) -> Sample {
        Sample { bytes: start, processor: None, calls: 0 }
    }

    #[test]
    fn a_sandbox_is_idle_after_its_time_without_anything_and_says_until_when_it_is_not() {
        let start = Instant::now();
        let mut idle = Idleness::new(Some(AFTER), start);
        assert_eq!(idle.holds(start), [(Why::Began, Some(start + AFTER))]);
        let later = start + Duration::from_secs(9);
        idle.look(later, Sample { bytes: later, ..quiet(start) });
        let both = [(Why::Bytes, Some(later + AFTER)), (Why::Began, Some(start + AFTER))];
        assert_eq!(idle.holds(later), both);
        idle.keep(start + Duration::from_secs(60));
        let still = [(Why::Lease, Some(start + Duration::from_secs(60)))];
        assert_eq!(idle.holds(start + Duration::from_secs(50)), still);
        idle.keep(start + Duration::from_secs(20));
        assert_eq!(idle.holds(start + Duration::from_secs(50)), still, "the longer one");
        assert_eq!(idle.holds(start + Duration::from_secs(60)), []);
        let never = Idleness::new(None, start);
        assert_eq!(never.holds(start + Duration::from_secs(1 << 20)), [(Why::Never, None)]);
    }

    /// Promise 76. Nobody would wake it for what it was at.
    #[test]
    fn a_guest_that_is_stopped_for_want_of_room_is_still_and_not_idle() {
        let start = Instant::now();
        let mut idle = Idleness::new(Some(AFTER), start);
        for second in 0..30 {
            let processor =
                Some(Duration::from_millis(if second < 10 { second * 100 } else { 900 }));
            idle.look(start + Duration::from_secs(second), Sample { processor, ..quiet(start) });
            assert_eq!(idle.is_still(), second >= 12, "{second}");
        }
        let later = start + Duration::from_secs(30);
        assert_eq!(idle.holds(later), [], "control");
        idle.stuck(true);
        assert_eq!(idle.holds(later), [(Why::Stuck, None)]);
        idle.woken(later);
        assert!(!idle.is_still());
        assert_eq!(idle.holds(later), [(Why::Began, Some(later + AFTER))]);
    }

    #[test]
    fn each_thing_that_keeps_it_awake_is_told_what_does_so_longest_first() {
        let start = Instant::now();
        let mut idle = Idleness::new(Some(AFTER), start);
        let at = |seconds| start + Duration::from_secs(seconds);
        let had = |seconds| Some(Duration::from_secs(seconds));
        idle.look(at(1), Sample { bytes: start, processor: had(0), calls: 0 });
        idle.look(at(4), Sample { bytes: at(2), processor: had(3), calls: 1 });
        idle.keep(at(100));
        let (worked, bytes) = ((Why::Processor, Some(at(19))), (Why::Bytes, Some(at(17))));
        let (lease, began) = ((Why::Lease, Some(at(100))), (Why::Began, Some(at(15))));
        assert_eq!(idle.holds(at(4)), [(Why::Call, None), lease, worked, bytes, began]);
        idle.look(at(5), Sample { bytes: at(2), processor: had(3), calls: 0 });
        let called = (Why::Call, Some(at(19)));
        assert_eq!(idle.holds(at(16)), [lease, worked, called, bytes], "when it is over, too");
        idle.woken(at(200));
        idle.look(at(201), Sample { bytes: at(2), processor: had(3), calls: 0 });
        assert_eq!(idle.holds(at(201)), [(Why::Began, Some(at(215)))], "not of an earlier day");
    }

    #[test]
    fn who_computes_without_a_byte_is_not_idle_and_who_only_ticks_is() {
        for (percent, idle_at_end) in [(3, true), (6, false), (100, false), (400, false)] {
            let start = Instant::now();
            let mut idle = Idleness::new(Some(AFTER), start);
            let mut now = start;
            let mut had = Duration::from_secs(7);
            for _ in 0..600 {
                now += LOOK;
                had += LOOK * percent / 100;
                idle.look(now, Sample { processor: Some(had), ..quiet(start) });
            }
            assert_eq!(idle.holds(now).is_empty(), idle_at_end, "{percent} %");
        }
    }

    #[test]
    fn who_could_not_be_put_to_sleep_is_not_tried_all_the_time() {
        let start = Instant::now();
        let mut idle = Idleness::new(Some(AFTER), start);
        let mut now = start + AFTER;
        let mut pauses = Vec::new();
        for _ in 0..7 {
            idle.failed(now);
            let [(Why::Failed, Some(until))] = idle.holds(now)[..] else { panic!("idle") };
            pauses.push((until - now).as_secs());
            now = until;
            assert_eq!(idle.holds(now), []);
        }
        assert_eq!(pauses, [30, 60, 120, 240, 480, 600, 600]);
        idle.slept();
        idle.failed(now);
        assert_eq!(idle.holds(now), [(Why::Failed, Some(now + AGAIN))]);
    }

    #[test]
    fn a_far_side_that_wakes_it_again_and_again_is_slowed_down_and_not_for_ever() {
        let start = Instant::now();
        let mut budget = Budget::new(start);
        let mut now = start;
        for _ in 0..Budget::MOST {
            assert_eq!(budget.take(now), Ok(()));
            now += Duration::from_secs(1);
        }
        let then = budget.take(now).unwrap_err();
        assert!(then > now && then <= now + Budget::EVERY);
        assert_eq!(budget.take(then), Ok(()), "when it said");
        assert!(budget.take(then).is_err());
        let mut woken = 0;
        for second in 0..3600 {
            woken += u32::from(budget.take(then + Duration::from_secs(second)).is_ok());
        }
        assert!((59..=60).contains(&woken), "{woken} in an hour");
        let rested = then + Duration::from_secs(36_000);
        let at_once = (0..100).filter(|_| budget.take(rested).is_ok()).count();
        assert_eq!(at_once, Budget::MOST as usize);
    }

    proptest! {
        /// Looks with whatever happens in between, at any distance.
        #[test]
        fn nobody_sleeps_before_its_time_and_nobody_is_awake_for_ever(
            events in proptest::collection::vec((1_u64..4000, 0_u8..6, 1_u64..40_000), 1..60),
        ) {
            let start = Instant::now();
            let mut idle = Idleness::new(Some(AFTER), start);
            let (mut now, mut last, mut bytes, mut had) = (start, start, start, Duration::ZERO);
            let mut lease = start;
            for (millis, what, span) in events {
                let before = now;
                now += Duration::from_millis(millis);
                let mut calls = 0;
                match what {
                    0 => bytes = now,
                    1 => had += now - before,
                    2 => calls = 1,
                    3 => {
                        lease = lease.max(now + Duration::from_millis(span));
                        idle.keep(now + Duration::from_millis(span));
                    }
                    _ => {}
                }
                if matches!(what, 0 | 2) {
                    last = now;
                }
                idle.look(now, Sample { bytes, processor: Some(had), calls });
                let holds = idle.holds(now);
                if holds.is_empty() {
                    prop_assert!(now >= last + AFTER && now >= lease && calls == 0);
                }
                prop_assert!(holds.iter().all(|(_, until)| until.is_none_or(|until| until > now)));
                prop_assert!(holds.is_sorted_by(|a, b| b.1.is_none_or(|b| a.1.is_none_or(|a| a >= b)) ));
            }
            // Nothing more happens: it sleeps, at the latest one window after what was last noticed.
            let end = now.max(lease) + AFTER + WINDOW + WINDOW;
            while now < end {
                now += LOOK;
                idle.look(now, Sample { bytes, processor: Some(had), calls: 0 });
            }
            prop_assert_eq!(idle.holds(now), []);
        }
    }
}
