//! Whether a sandbox is idle, since when, and why not; and how often one may be woken by what comes in.
//!
//! Pure: takes instants and samples, returns when it may sleep. Idle is who for a while had no payload in
//! or out, no call of the control API under way, no lease, and processors that were all but still.

use std::time::Duration;

use tokio::time::Instant;

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
    Never,
}

impl Why {
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Began => "it was made or woken",
            Self::Bytes => "bytes passed",
            Self::Processor => "its processors were busy",
            Self::Call => "a command of the control API runs",
            Self::Lease => "it is kept awake",
            Self::Failed => "it could not be put to sleep",
            Self::Never => "it never sleeps",
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

/// What follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Awake for this reason, and until then unless something goes on meanwhile; none: nobody knows.
    Awake(Why, Option<Instant>),
    Idle,
}

/// What is known of the idleness of one sandbox.
#[derive(Clone, Debug)]
pub(crate) struct Idleness {
    /// None: it never is.
    after: Option<Duration>,
    busy: (Why, Instant),
    calls: usize,
    /// When the window over its processors began, and what they had done by then.
    window: Option<(Instant, Duration)>,
    lease: Option<Instant>,
    /// After tries that failed.
    not_before: Option<Instant>,
    again: Duration,
}

impl Idleness {
    /// Of a sandbox that begins to run now.
    pub(crate) const fn new(after: Option<Duration>, now: Instant) -> Self {
        Self {
            after,
            busy: (Why::Began, now),
            calls: 0,
            window: None,
            lease: None,
            not_before: None,
            again: AGAIN,
        }
    }

    /// It runs again, by another process perhaps.
    pub(crate) const fn woken(&mut self, now: Instant) {
        self.busy = (Why::Began, now);
        self.window = None;
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
            self.touch(Why::Call, now);
        }
        self.touch(Why::Bytes, sample.bytes.min(now));
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
        if used * 100 >= past * BUSY_PERCENT {
            self.touch(Why::Processor, now);
        }
    }

    fn touch(&mut self, why: Why, at: Instant) {
        if at > self.busy.1 {
            self.busy = (why, at);
        }
    }

    /// Whether it is idle now.
    pub(crate) fn verdict(&self, now: Instant) -> Verdict {
        let Some(after) = self.after else { return Verdict::Awake(Why::Never, None) };
        if self.calls > 0 {
            return Verdict::Awake(Why::Call, None);
        }
        let (why, busy) = self.busy;
        let reasons =
            [(why, Some(busy + after)), (Why::Lease, self.lease), (Why::Failed, self.not_before)];
        let latest = reasons.into_iter().filter_map(|(why, until)| Some((until?, why)));
        match latest.max_by_key(|(until, _)| *until) {
            Some((until, why)) if until > now => Verdict::Awake(why, Some(until)),
            _ => Verdict::Idle,
        }
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
        assert_eq!(idle.verdict(start), Verdict::Awake(Why::Began, Some(start + AFTER)));
        let later = start + Duration::from_secs(9);
        idle.look(later, Sample { bytes: later, ..quiet(start) });
        assert_eq!(idle.verdict(later), Verdict::Awake(Why::Bytes, Some(later + AFTER)));
        idle.keep(start + Duration::from_secs(60));
        let still = Verdict::Awake(Why::Lease, Some(start + Duration::from_secs(60)));
        assert_eq!(idle.verdict(start + Duration::from_secs(50)), still);
        idle.keep(start + Duration::from_secs(20));
        assert_eq!(idle.verdict(start + Duration::from_secs(50)), still, "the longer one");
        assert_eq!(idle.verdict(start + Duration::from_secs(60)), Verdict::Idle);
        let never = Idleness::new(None, start);
        let awake = never.verdict(start + Duration::from_secs(1 << 20));
        assert_eq!(awake, Verdict::Awake(Why::Never, None));
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
            assert_eq!(idle.verdict(now) == Verdict::Idle, idle_at_end, "{percent} %");
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
            let Verdict::Awake(Why::Failed, Some(until)) = idle.verdict(now) else {
                panic!("idle")
            };
            pauses.push((until - now).as_secs());
            now = until;
            assert_eq!(idle.verdict(now), Verdict::Idle);
        }
        assert_eq!(pauses, [30, 60, 120, 240, 480, 600, 600]);
        idle.slept();
        idle.failed(now);
        assert_eq!(idle.verdict(now), Verdict::Awake(Why::Failed, Some(now + AGAIN)));
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
                let verdict = idle.verdict(now);
                if verdict == Verdict::Idle {
                    prop_assert!(now >= last + AFTER && now >= lease && calls == 0);
                }
                if let Verdict::Awake(_, Some(until)) = verdict {
                    prop_assert!(until > now, "it says when");
                }
            }
            // Nothing more happens: it sleeps, at the latest one window after what was last noticed.
            let end = now.max(lease) + AFTER + WINDOW + WINDOW;
            while now < end {
                now += LOOK;
                idle.look(now, Sample { bytes, processor: Some(had), calls: 0 });
            }
            prop_assert_eq!(idle.verdict(now), Verdict::Idle);
        }
    }
}
