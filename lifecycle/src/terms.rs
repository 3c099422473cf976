//! How long a sandbox lives, and what becomes of it when it is idle: as it was asked for, as the journal
//! keeps it over daemons and boots, and as deadlines.
//!
//! Deadlines go by the clock of this boot, which nobody sets. In another boot the spans begin anew, since no
//! clock tells how long there was none.

use std::time::Duration;

use nix::time::ClockId;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::cold::ColdBoot;
use crate::error::{Error, Field};

/// What becomes of a sandbox that is idle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnIdle {
    /// It is put to sleep, and woken by whoever wants something of it.
    #[default]
    Standby,
    /// The same, and it is put into the object store then.
    Suspend,
    /// It is removed.
    Delete,
    /// Nothing.
    Never,
}

/// What is asked for of a sandbox's rest and life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WantedTerms {
    /// What becomes of it when it is idle; none: as configured, as far as its driver can.
    pub on_idle: Option<OnIdle>,
    /// How long nothing may go on before it counts as idle; none: as configured.
    pub idle_after: Option<Duration>,
    /// It is removed so long after it was made or last renewed; none: as configured.
    pub ttl: Option<Duration>,
    /// It is removed so long after it was made, renewed or not; none: as configured.
    pub max_life: Option<Duration>,
    /// What becomes of it when its memory is lost; none: as configured, as far as its driver can.
    pub cold_boot: Option<ColdBoot>,
}

/// What holds where nothing is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DefaultTerms {
    /// What becomes of idle sandboxes whose driver can be put to sleep; others are left alone unless this
    /// is [`OnIdle::Delete`].
    pub on_idle: OnIdle,
    /// How long nothing may go on before one counts as idle.
    pub idle_after: Duration,
    /// See [`WantedTerms::ttl`]; none: for ever.
    pub ttl: Option<Duration>,
    /// See [`WantedTerms::max_life`]; none: for ever.
    pub max_life: Option<Duration>,
    /// The longest life that may be asked for, and that of whoever asks for none; none: any.
    pub longest_life: Option<Duration>,
    /// See [`WantedTerms::cold_boot`].
    pub cold_boot: ColdBoot,
}

impl WantedTerms {
    /// The shortest and the longest of the spans here.
    pub const SPAN: std::ops::RangeInclusive<Duration> =
        Duration::from_secs(1)..=Duration::from_secs(10 * 365 * 86_400);

    pub(crate) fn check(&self) -> Result<(), Error> {
        let spans =
            [("idle_after", self.idle_after), ("ttl", self.ttl), ("max_life", self.max_life)];
        spans.into_iter().filter_map(|(field, span)| Some((field, span?))).try_for_each(checked)
    }

    /// Refuses a longer life than may be asked for on this node.
    pub(crate) fn checked_by(&self, node: &DefaultTerms) -> Result<(), Error> {
        match (self.max_life, node.longest_life) {
            (Some(life), Some(longest)) if life > longest => {
                let given = format!("{}ms", life.as_millis());
                let problem = "is longer than a sandbox of this node may live";
                let fix = format!(
                    "give {}s or less, as `tenants.max_life` says, or leave it out for that",
                    longest.as_secs()
                );
                Err(Error::Invalid(Field::new("max_life", given, problem, &fix)))
            }
            _ => Ok(()),
        }
    }
}

/// Refuses a span that is out of range.
pub(crate) fn checked((field, span): (&str, Duration)) -> Result<(), Error> {
    if WantedTerms::SPAN.contains(&span) {
        return Ok(());
    }
    let given = format!("{}ms", span.as_millis());
    Err(Error::Invalid(Field::new(field, given, "is out of range", "give 1s to 3650d")))
}

/// What a driver can do with its guests on this node.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Can {
    /// Put them to sleep.
    pub(crate) sleep: bool,
    /// Boot them from their disk alone.
    pub(crate) boot: bool,
    /// Put them into the object store.
    pub(crate) store: bool,
}

/// How long this boot of the host has lasted. No change of the wall clock moves it, and it runs on
/// while the host is suspended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Uptime {
    pub(crate) boot: String,
    pub(crate) seconds: u64,
}

impl Uptime {
    pub(crate) fn now() -> Self {
        let since_boot =
            nix::time::clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(0, |now| now.tv_sec());
        Self {
            boot: vmm::boot_id().unwrap_or_default(),
            seconds: u64::try_from(since_boot).unwrap_or_default(),
        }
    }
}

/// The terms of one sandbox, as the journal has them. Spans are in milliseconds, deadlines in seconds since
/// the boot that is named.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Terms {
    pub(crate) on_idle: OnIdle,
    idle_after: u64,
    ttl: Option<u64>,
    max_life: Option<u64>,
    boot: String,
    expires: Option<u64>,
    ends: Option<u64>,
    awake_until: Option<u64>,
    /// What an earlier version wrote has none.
    #[serde(default)]
    pub(crate) cold_boot: ColdBoot,
}

impl Terms {
    /// Those of a sandbox of which nothing is known: it is left alone.
    pub(crate) const fn none() -> Self {
        Self {
            on_idle: OnIdle::Never,
            idle_after: 0,
            ttl: None,
            max_life: None,
            boot: String::new(),
            expires: None,
            ends: None,
            awake_until: None,
            cold_boot: ColdBoot::Refused,
        }
    }

    /// Those of a sandbox that is made now. `can` says what its driver can on this node.
    pub(crate) fn agree(wanted: &WantedTerms, defaults: &DefaultTerms, can: Can) -> Self {
        let by_default = match defaults.on_idle {
            OnIdle::Suspend if !can.store => match can.sleep {
                true => OnIdle::Standby,
                false => OnIdle::Never,
            },
            OnIdle::Standby if !can.sleep => OnIdle::Never,
            on_idle => on_idle,
        };
        let cold_boot = if can.boot { defaults.cold_boot } else { ColdBoot::Refused };
        let max_life = wanted.max_life.or(defaults.max_life).or(defaults.longest_life);
        let mut terms = Self {
            on_idle: wanted.on_idle.unwrap_or(by_default),
            idle_after: millis(wanted.idle_after.unwrap_or(defaults.idle_after)),
            ttl: wanted.ttl.or(defaults.ttl).map(millis),
            max_life: max_life.map(millis),
            cold_boot: wanted.cold_boot.unwrap_or(cold_boot),
            ..Self::none()
        };
        terms.begin(Uptime::now());
        terms
    }

    fn begin(&mut self, now: Uptime) {
        let from_now = |span: Option<u64>| Some(now.seconds.saturating_add(span?.div_ceil(1000)));
        (self.expires, self.ends) = (from_now(self.ttl), from_now(self.max_life));
        (self.awake_until, self.boot) = (None, now.boot);
    }

    /// In another boot than the one it was written in the spans begin anew.
    pub(crate) fn take_up(&mut self, now: Uptime) {
        if self.boot != now.boot {
            self.begin(now);
        }
    }

    /// It is removed so long from now, renewed later or not; none: as long as it was given.
    pub(crate) fn renew(&mut self, ttl: Option<Duration>, now: &Uptime) {
        self.ttl = ttl.map(millis).or(self.ttl);
        self.expires = self.ttl.map(|ttl| now.seconds.saturating_add(ttl.div_ceil(1000)));
    }

    /// Whether it was given a span to live.
    pub(crate) const fn is_limited(&self) -> bool {
        self.ttl.is_some()
    }

    /// It is awake so long from now.
    pub(crate) fn keep_awake(&mut self, span: Duration, now: &Uptime) {
        let until = now.seconds.saturating_add(millis(span).div_ceil(1000));
        self.awake_until = self.awake_until.max(Some(until));
    }

    /// How long nothing may go on before it is idle; none: it never is.
    pub(crate) fn idle_after(&self) -> Option<Duration> {
        (self.on_idle != OnIdle::Never).then_some(Duration::from_millis(self.idle_after))
    }

    /// When it is to be removed, whatever it does.
    pub(crate) fn end(&self, now: &Uptime) -> Option<Instant> {
        let end = [self.expires, self.ends].into_iter().flatten().min();
        end.map(|end| instant(end, now))
    }

    /// Until when it is kept awake.
    pub(crate) fn awake_until(&self, now: &Uptime) -> Option<Instant> {
        self.awake_until.filter(|until| *until > now.seconds).map(|until| instant(until, now))
    }
}

fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

pub(crate) fn instant(seconds: u64, now: &Uptime) -> Instant {
    let left = Duration::from_secs(seconds.saturating_sub(now.seconds));
    let at = Instant::now();
    // What is further away than clocks go is as good as for ever.
    at.checked_add(left).unwrap_or_else(|| at + *WantedTerms::SPAN.end())
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEFAULTS: DefaultTerms = DefaultTerms {
        on_idle: OnIdle::Standby,
        idle_after: Duration::from_secs(15),
        ttl: None,
        max_life: Some(Duration::from_secs(1000)),
        longest_life: None,
        cold_boot: ColdBoot::Allowed,
    };
    const ALL: Can = Can { sleep: true, boot: true, store: true };

    fn at(boot: &str, seconds: u64) -> Uptime {
        Uptime { boot: boot.to_owned(), seconds }
    }

    fn left(end: Option<Instant>) -> Option<u64> {
        end.map(|end| (end - Instant::now()).as_millis().div_ceil(1000).try_into().unwrap())
    }

    #[test]
    fn a_driver_that_cannot_sleep_is_left_alone_unless_somebody_says_otherwise() {
        let on_idle = |wanted, default, can| {
            let wanted = WantedTerms { on_idle: wanted, ..WantedTerms::default() };
            let can = Can { sleep: can, ..ALL };
            Terms::agree(&wanted, &DefaultTerms { on_idle: default, ..DEFAULTS }, can).on_idle
        };
        assert_eq!(on_idle(None, OnIdle::Standby, true), OnIdle::Standby);
        assert_eq!(on_idle(None, OnIdle::Standby, false), OnIdle::Never);
        assert_eq!(on_idle(None, OnIdle::Delete, false), OnIdle::Delete);
        assert_eq!(on_idle(Some(OnIdle::Never), OnIdle::Standby, true), OnIdle::Never);
        assert_eq!(Terms::none().idle_after(), None);
    }

    #[test]
    fn a_disk_survives_by_default_where_its_driver_has_one() {
        let cold = |wanted, boot| {
            let wanted = WantedTerms { cold_boot: wanted, ..WantedTerms::default() };
            Terms::agree(&wanted, &DEFAULTS, Can { boot, ..ALL }).cold_boot
        };
        assert_eq!(cold(None, true), ColdBoot::Allowed);
        assert_eq!(cold(None, false), ColdBoot::Refused);
        assert_eq!(cold(Some(ColdBoot::Refused), true), ColdBoot::Refused);
    }

    /// Promise 64.
    #[test]
    fn a_life_ends_with_its_span_renewed_or_not_and_spans_begin_anew_in_another_boot() {
        let wanted = WantedTerms { ttl: Some(Duration::from_secs(100)), ..WantedTerms::default() };
        let mut terms = Terms::agree(&wanted, &DEFAULTS, ALL);
        terms.begin(at("one", 5000));
        assert_eq!(left(terms.end(&at("one", 5040))), Some(60));
        terms.renew(None, &at("one", 5090));
        assert_eq!(left(terms.end(&at("one", 5090))), Some(100));
        terms.renew(Some(Duration::from_secs(7000)), &at("one", 5090));
        assert_eq!(left(terms.end(&at("one", 5090))), Some(910), "no longer than its life");
        assert_eq!(left(terms.end(&at("one", 9000))), Some(0), "it is over");
        terms.keep_awake(Duration::from_secs(30), &at("one", 5100));
        terms.keep_awake(Duration::from_secs(10), &at("one", 5101));
        assert_eq!(left(terms.awake_until(&at("one", 5101))), Some(29), "the longer one");
        let text = serde_json::to_string(&terms).unwrap();
        let mut read: Terms = serde_json::from_str(&text).unwrap();
        read.take_up(at("one", 5110));
        assert_eq!(read, terms);
        read.take_up(at("two", 3));
        assert_eq!(
            (left(read.end(&at("two", 3))), read.awake_until(&at("two", 3))),
            (Some(1000), None)
        );
    }

    #[test]
    fn spans_out_of_range_are_refused_with_their_field() {
        let second = Duration::from_secs(1);
        for wanted in [
            WantedTerms { ttl: Some(Duration::ZERO), ..WantedTerms::default() },
            WantedTerms { ttl: Some(*WantedTerms::SPAN.end() + second), ..WantedTerms::default() },
        ] {
            let Err(Error::Invalid(field)) = wanted.check() else { panic!("taken") };
            assert_eq!(field.field, "ttl");
        }
        let wanted = WantedTerms { idle_after: Some(second), ..WantedTerms::default() };
        assert!(wanted.check().is_ok());
    }
}
