//! How many bytes of names a sandbox may have asked upstream, where it chose them itself: under a
//! wildcard, whoever runs a zone below reads every label that is looked up (a DNS tunnel).
//!
//! Decided on time handed in, without a clock. Never holds more zones than [`ZONES`], nor the names
//! themselves. What a rule lists by name costs nothing: there a guest has nothing to choose.

use std::collections::HashMap;
use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

use policy::Host;

use crate::budget::Bucket;

/// What all zones together may cost, in allowances of one zone.
const ALL: u32 = 4;
/// Zones that may be below their full allowance at a time; names of another are refused then.
const ZONES: usize = 1024;
/// What it costs to ask again for one of the names asked lately: there are at most 2 times [`LATELY`]
/// of them, so which one it is tells less than two bytes.
const AGAIN: u32 = 2;
const LATELY: usize = 2048;

/// Bytes of names, for each registrable domain (`example.co.uk`); four times as much for all together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Names {
    /// At once.
    pub burst: u32,
    /// A second, for long.
    pub rate: u32,
}

impl Default for Names {
    fn default() -> Self {
        Self { burst: 16 * 1024, rate: 64 }
    }
}

/// What is left of it for one sandbox.
#[derive(Debug)]
pub(crate) struct Allowance {
    names: Names,
    all: Bucket,
    zones: HashMap<Box<str>, Bucket>,
    /// Digests of names that were asked, of this generation and the one before.
    lately: [HashSet<u64>; 2],
    digest: RandomState,
}

impl Allowance {
    /// A whole one.
    pub(crate) fn new(names: Names, now: Instant) -> Self {
        Self {
            names: Names { burst: names.burst, rate: names.rate.max(1) },
            all: Bucket::new(now),
            zones: HashMap::new(),
            lately: [HashSet::new(), HashSet::new()],
            digest: RandomState::new(),
        }
    }

    /// Takes what it costs to ask upstream for this name: the bytes in front of its public suffix, since
    /// whoever runs a suffix reads what is looked up below it, and two. False, and nothing is taken,
    /// when not so much is left.
    pub(crate) fn spend(&mut self, host: &Host, now: Instant) -> bool {
        let zone = host.registrable();
        let digest = self.digest.hash_one(host);
        let chosen = host.before_public_suffix().len();
        let known = self.lately.iter().any(|names| names.contains(&digest));
        let cost = AGAIN + if known { 0 } else { u32::try_from(chosen).unwrap_or(u32::MAX) };
        if !self.zones.contains_key(zone) && self.zones.len() >= ZONES {
            self.zones.retain(|_, bucket| !bucket.is_full(now));
            if self.zones.len() >= ZONES {
                return false;
            }
        }
        let byte = Duration::from_secs(1) / self.names.rate;
        let (price, most) = (byte * cost, byte.saturating_mul(self.names.burst));
        let own = self.zones.entry(zone.into()).or_insert_with(|| Bucket::new(now));
        if !own.has(now, price, most) || !self.all.take(now, price / ALL, most) {
            return false;
        }
        own.take(now, price, most);
        self.remember(digest);
        true
    }

    fn remember(&mut self, digest: u64) {
        let [new, old] = &mut self.lately;
        if new.len() >= LATELY {
            *old = std::mem::take(new);
        }
        new.insert(digest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: Names = Names { burst: 1000, rate: 10 };

    fn host(text: &str) -> Host {
        Host::parse(text).expect("host")
    }

    /// Asks for ever new names of `of` until one is refused or a thousand were asked: bytes in front
    /// of the zone.
    fn drain(allowance: &mut Allowance, of: impl Fn(usize) -> String, now: Instant) -> usize {
        let mut passed = 0;
        for n in 0..1000 {
            let name = host(&of(n));
            if !allowance.spend(&name, now) {
                break;
            }
            passed += name.as_str().len() - name.registrable().len();
        }
        passed
    }

    #[test]
    fn a_tunnel_gets_its_burst_and_then_its_rate() {
        let start = Instant::now();
        let mut allowance = Allowance::new(NAMES, start);
        let name = |n| format!("{}.{n:06}.t.example.com", "d".repeat(60));
        let first = drain(&mut allowance, name, start);
        assert!((800..=1000).contains(&first), "{first}");
        let hour = start + Duration::from_secs(3600);
        let later = |second: u64| start + Duration::from_secs(second);
        let mut passed = 0;
        for second in 1..3600 {
            let more = |n| format!("{}.{second:06}{n:03}.t.example.com", "e".repeat(50));
            passed += drain(&mut allowance, more, later(second));
        }
        assert!((25_000..=36_000).contains(&passed), "{passed} bytes in an hour at 10 a second");
        assert!(drain(&mut allowance, |n| format!("{n:06}-again.example.com"), hour) <= 1000);
    }

    #[test]
    fn zones_have_each_their_own_and_four_times_that_together() {
        let start = Instant::now();
        let mut allowance = Allowance::new(NAMES, start);
        let label = "x".repeat(50);
        let each = (0..6).map(|zone| {
            drain(&mut allowance, |n| format!("{label}{n:03}.zone{zone}.example"), start)
        });
        let each: Vec<_> = each.collect();
        assert!(each[..3].iter().all(|bytes| *bytes > 800), "{each:?}");
        assert!(each.iter().sum::<usize>() <= 4000 && each[5] == 0, "{each:?}");
    }

    #[test]
    fn a_name_asked_again_costs_next_to_nothing() {
        let start = Instant::now();
        let mut allowance = Allowance::new(NAMES, start);
        let long = host(&format!("{}.example.com", "shard".repeat(12)));
        assert!((0..400).all(|_| allowance.spend(&long, start)), "400 times 2 and 69 once");
        assert!((0..1000).any(|_| !allowance.spend(&long, start)), "but not nothing");
    }

    #[test]
    fn labels_right_in_front_of_a_public_suffix_are_paid_for() {
        let start = Instant::now();
        let mut allowance = Allowance::new(NAMES, start);
        let name = |n: usize| format!("{}{n:06}.duckdns.org", "d".repeat(50));
        let asked = (0..1000).take_while(|n| allowance.spend(&host(&name(*n)), start)).count();
        assert!((60..=70).contains(&asked), "{asked} of 59 bytes, of 4000 for all zones together");
    }

    #[test]
    fn zones_that_are_held_are_bounded_and_a_rested_one_makes_room() {
        let start = Instant::now();
        let mut allowance = Allowance::new(Names { burst: 1 << 20, rate: 1000 }, start);
        let ask = |allowance: &mut Allowance, n: usize, now| {
            allowance.spend(&host(&format!("a.zone{n}.example")), now)
        };
        assert!((0..ZONES).all(|n| ask(&mut allowance, n, start)));
        assert!(!ask(&mut allowance, ZONES, start));
        assert_eq!(allowance.zones.len(), ZONES);
        assert!(ask(&mut allowance, ZONES, start + Duration::from_secs(1)));
    }

    #[test]
    fn names_asked_lately_are_bounded() {
        let start = Instant::now();
        let mut allowance = Allowance::new(Names { burst: u32::MAX, rate: 1_000_000 }, start);
        for n in 0..3 * LATELY {
            assert!(allowance.spend(&host(&format!("n{n}.example.com")), start));
        }
        assert!(allowance.lately.iter().map(HashSet::len).sum::<usize>() <= 2 * LATELY);
    }
}
