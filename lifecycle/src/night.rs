//! What the journal has of a sandbox's night beside its saved state: its connections, should this daemon
//! end before it wakes, and when it is to be woken.
//!
//! Begun when it falls asleep, over when it runs again. Holds nothing of a guest's payload. Goes by the
//! clock of this boot, as all deadlines do; in another boot by the clock on the wall, since that is what
//! was asked for.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use egress::Remains;
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use tokio::time::Instant;

use crate::error::{Error, Field};
use crate::terms::{Uptime, WantedTerms, checked, instant};

/// When a sandbox that is put to sleep is to be woken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wake {
    /// So long from now.
    In(Duration),
    /// At this time, to the second.
    At(SystemTime),
}

/// One night of one sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Night {
    /// What is left of its connections: those that are kept, of which the audit has no end, and those that
    /// have ended since, which the guest has yet to hear.
    #[serde(default)]
    pub(crate) remains: Vec<Remains>,
    /// When it ends by itself.
    #[serde(default)]
    pub(crate) alarm: Option<Alarm>,
    /// How many of this daemon's had ended when these were looked at.
    #[serde(skip)]
    pub(crate) looked_at: usize,
}

/// A time to be woken at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Alarm {
    /// By the clock on the wall, in seconds since 1970.
    wall: u64,
    /// In seconds since this boot of the host.
    boot: String,
    seconds: u64,
}

impl Night {
    /// Connections of which the audit has the end, and the guest has not.
    pub(crate) fn ended(&self) -> impl Iterator<Item = &Remains> {
        self.remains.iter().filter(|one| !one.is_untold())
    }

    /// Its connections are these now, of which so many have ended. What ended before stays: the guest may not
    /// have heard it.
    pub(crate) fn keep(&mut self, remains: Vec<Remains>, ended: usize) {
        self.remains.retain(|one| !one.is_untold());
        self.remains.extend(remains);
        self.looked_at = ended;
    }

    /// So many of this daemon's have ended by now: where that is more than before, its connections are what
    /// there is now. Those that rest, of which the audit has the end, too, have not ended.
    pub(crate) fn look(&mut self, ended: usize, remains: impl FnOnce() -> Option<Vec<Remains>>) {
        if ended > self.looked_at
            && let Some(remains) = remains()
        {
            (self.remains, self.looked_at) = (remains, ended);
        }
    }

    /// Every end is in the audit.
    pub(crate) fn told(&mut self) {
        self.remains.iter_mut().for_each(Remains::told);
    }
}

impl Alarm {
    /// For what was asked for at this time.
    pub(crate) fn set(wake: Wake, now: &Uptime, wall: SystemTime) -> Result<Self, Error> {
        let left = match wake {
            Wake::In(span) => {
                checked(("wake_in", span))?;
                span
            }
            Wake::At(at) => at.duration_since(wall).unwrap_or_default(),
        };
        if left.is_zero() || left > *WantedTerms::SPAN.end() {
            let problem = if left.is_zero() { "is over" } else { "is too far away" };
            let fix = "give a time from now on, within 3650d; `resume` wakes it at once";
            let given = match wake {
                Wake::At(at) => OffsetDateTime::from(at).to_string(),
                Wake::In(span) => format!("{}s", span.as_secs()),
            };
            return Err(Error::Invalid(Field::new("wake_at", given, problem, fix)));
        }
        let seconds = left.as_secs() + u64::from(left.subsec_nanos() > 0);
        Ok(Self {
            wall: since_1970(wall).saturating_add(left).as_secs(),
            boot: now.boot.clone(),
            seconds: now.seconds.saturating_add(seconds),
        })
    }

    /// At once.
    pub(crate) fn now(now: &Uptime, wall: SystemTime) -> Self {
        Self { wall: since_1970(wall).as_secs(), boot: now.boot.clone(), seconds: now.seconds }
    }

    /// In another boot than the one it was set in only the clock on the wall knows how long it has yet.
    pub(crate) fn take_up(&mut self, now: &Uptime, wall: SystemTime) {
        if self.boot != now.boot {
            let left = self.wall.saturating_sub(since_1970(wall).as_secs());
            (self.boot, self.seconds) = (now.boot.clone(), now.seconds.saturating_add(left));
        }
    }

    /// When it is.
    pub(crate) fn instant(&self, now: &Uptime) -> Instant {
        instant(self.seconds, now)
    }

    /// What it is by the clock on the wall, as it was asked for.
    pub(crate) fn wall(&self) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(self.wall)
    }
}

fn since_1970(time: SystemTime) -> Duration {
    time.duration_since(UNIX_EPOCH).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(boot: &str, seconds: u64) -> Uptime {
        Uptime { boot: boot.to_owned(), seconds }
    }

    fn wall(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(seconds)
    }

    fn left(alarm: &Alarm, now: &Uptime) -> u64 {
        let left = alarm.instant(now).saturating_duration_since(Instant::now());
        left.as_millis().div_ceil(1000).try_into().unwrap()
    }

    /// With a beginning in the audit and no end there, or with both.
    fn one(flow: u64, untold: bool) -> Remains {
        let untold = untold.then(|| {
            serde_json::json!({"kind": "connection", "protocol": "tcp", "name": null,
                "destination": "93.184.216.34:25", "dialed": null})
        });
        serde_json::from_value(serde_json::json!({
            "flow": flow, "local": "93.184.216.34:25", "remote": "198.18.0.1:4711", "next_in": 1,
            "next_out": 1, "window": [0, 0, 0, 0, 0], "segment": 536, "scales": null, "sack": true,
            "timestamp": null, "untold": untold,
        }))
        .unwrap()
    }

    /// Promise 41.
    #[test]
    fn an_end_at_night_is_noted_however_many_connections_rest() {
        let mut night = Night::default();
        night.keep(vec![one(1, false), one(2, false), one(3, true)], 0);
        night.look(0, || panic!("nothing has ended"));
        night.look(1, || Some(vec![one(1, false), one(2, false), one(0, false)]));
        assert_eq!(night.ended().count(), 3, "the audit has each end");
        night.look(1, || panic!("nothing more has ended"));
        // The next daemon, which has buried all of them.
        let text = serde_json::to_string(&night).unwrap();
        let mut night: Night = serde_json::from_str(&text).unwrap();
        night.look(0, || panic!("nothing has ended"));
        night.looked_at = 3;
        night.look(2, || panic!("some have been told"));
        assert_eq!(night.ended().count(), 3);
    }

    /// Promise 64.
    #[test]
    fn an_alarm_goes_by_the_clock_of_its_boot_and_in_another_by_the_wall() {
        for wake in [Wake::In(Duration::from_secs(100)), Wake::At(wall(7100))] {
            let mut alarm = Alarm::set(wake, &at("one", 5000), wall(7000)).unwrap();
            assert_eq!(alarm.wall(), wall(7100));
            let text = serde_json::to_string(&alarm).unwrap();
            assert_eq!(serde_json::from_str::<Alarm>(&text).unwrap(), alarm);
            // Somebody sets the clock on the wall.
            alarm.take_up(&at("one", 5040), wall(9_000_000));
            assert_eq!(left(&alarm, &at("one", 5040)), 60, "{wake:?}");
            assert_eq!(left(&alarm, &at("one", 6000)), 0, "{wake:?}: it is over");
            alarm.take_up(&at("two", 3), wall(7090));
            assert_eq!(left(&alarm, &at("two", 3)), 10, "{wake:?}");
            alarm.take_up(&at("three", 3), wall(8000));
            assert_eq!(left(&alarm, &at("three", 3)), 0, "{wake:?}: it passed meanwhile");
        }
    }

    #[test]
    fn a_time_that_is_over_or_too_far_away_is_refused_with_its_field() {
        let (second, far) = (Duration::from_secs(1), *WantedTerms::SPAN.end());
        for (wake, field) in [
            (Wake::In(Duration::ZERO), "wake_in"),
            (Wake::In(far + second), "wake_in"),
            (Wake::At(wall(7000)), "wake_at"),
            (Wake::At(wall(3)), "wake_at"),
            (Wake::At(wall(7001) + far), "wake_at"),
        ] {
            let refused = Alarm::set(wake, &at("one", 5000), wall(7000));
            let Err(Error::Invalid(named)) = refused else { panic!("{refused:?}") };
            assert_eq!(named.field, field, "{wake:?}");
        }
        assert!(Alarm::set(Wake::At(wall(7001)), &at("one", 0), wall(7000)).is_ok());
    }
}
