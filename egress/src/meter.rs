//! What one sandbox has sent and received and to whom, how many connections it holds, and when it last
//! spoke.
//!
//! Bytes are counted by atomics: that never blocks and never fails. Whom a connection leads to is looked
//! up once, and of those no more than [`PLACES`] are kept apart; the sums are exact whatever a guest does.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Destinations whose bytes are counted apart between two looks; bytes for more are counted together.
pub const PLACES: usize = 2048;

/// The counters of one attached slot. Clones see the same; one [`Meter::towards`] somebody counts for that
/// destination, too.
#[derive(Clone, Debug)]
pub struct Meter {
    counters: Arc<Counters>,
    place: Arc<Place>,
}

#[derive(Debug)]
struct Counters {
    since: Instant,
    sent: AtomicU64,
    received: AtomicU64,
    open: AtomicUsize,
    /// Milliseconds from `since` to the last payload byte.
    last: AtomicU64,
    places: Mutex<HashMap<Box<str>, Arc<Place>>>,
    /// For nobody in particular.
    elsewhere: Arc<Place>,
}

/// Bytes of one destination that nobody has taken account of.
#[derive(Debug, Default)]
struct Place {
    sent: AtomicU64,
    received: AtomicU64,
}

/// What passed between a sandbox and one destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Carried {
    /// The name it was judged by, or the address where there is none; none: those that are not kept apart.
    pub to: Option<Box<str>>,
    /// Payload bytes from the guest.
    pub bytes_out: u64,
    /// Payload bytes to the guest.
    pub bytes_in: u64,
}

impl Meter {
    /// Counters at zero, last byte now.
    #[must_use]
    pub fn new() -> Self {
        let elsewhere = Arc::<Place>::default();
        let place = Arc::clone(&elsewhere);
        let counters = Counters {
            since: Instant::now(),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
            open: AtomicUsize::new(0),
            last: AtomicU64::new(0),
            places: Mutex::default(),
            elsewhere,
        };
        Self { counters: Arc::new(counters), place }
    }

    /// The same counters, for bytes to and from this destination.
    #[must_use]
    pub fn towards(&self, name: &str) -> Self {
        let mut places = self.places();
        let place = match places.get(name) {
            Some(place) => Arc::clone(place),
            None if places.len() >= PLACES => Arc::clone(&self.counters.elsewhere),
            None => Arc::clone(places.entry(name.into()).or_default()),
        };
        Self { counters: Arc::clone(&self.counters), place }
    }

    /// Takes what was counted by destination since it was last taken: each byte is in one answer, once. A
    /// destination that nothing leads to any more is forgotten.
    #[must_use]
    pub fn take(&self) -> Vec<Carried> {
        let mut carried = Vec::new();
        let mut add = |to: Option<&str>, place: &Place| {
            let bytes_out = place.sent.swap(0, Relaxed);
            let bytes_in = place.received.swap(0, Relaxed);
            if bytes_out > 0 || bytes_in > 0 {
                carried.push(Carried { to: to.map(Into::into), bytes_out, bytes_in });
            }
        };
        self.places().retain(|name, place| {
            // Asked first: whoever held it has counted all its bytes by then.
            let forgotten = Arc::get_mut(place).is_some();
            add(Some(name), place);
            !forgotten
        });
        add(None, &self.counters.elsewhere);
        carried
    }

    /// Whether both are counters of the same slot, attached once.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.counters, &other.counters)
    }

    /// Payload bytes from the guest to far sides.
    #[must_use]
    pub fn bytes_out(&self) -> u64 {
        self.counters.sent.load(Relaxed)
    }

    /// Payload bytes from far sides to the guest.
    #[must_use]
    pub fn bytes_in(&self) -> u64 {
        self.counters.received.load(Relaxed)
    }

    /// Connections that are open now, either way.
    #[must_use]
    pub fn open(&self) -> usize {
        self.counters.open.load(Relaxed)
    }

    /// When the last payload byte passed, either way.
    #[must_use]
    pub fn last(&self) -> Instant {
        self.counters.since + Duration::from_millis(self.counters.last.load(Relaxed))
    }

    /// How long ago the last payload byte passed, either way.
    #[must_use]
    pub fn quiet(&self) -> Duration {
        self.last().elapsed()
    }

    /// Counts bytes from the guest to a far side.
    pub fn sent(&self, bytes: u64) {
        self.counters.sent.fetch_add(bytes, Relaxed);
        self.place.sent.fetch_add(bytes, Relaxed);
        self.touch();
    }

    /// Counts bytes from a far side to the guest.
    pub fn received(&self, bytes: u64) {
        self.counters.received.fetch_add(bytes, Relaxed);
        self.place.received.fetch_add(bytes, Relaxed);
        self.touch();
    }

    /// Counts bytes that only keep a connection open, out and in: nobody is busy for their sake.
    pub fn kept_open(&self, bytes_out: u64, bytes_in: u64) {
        self.counters.sent.fetch_add(bytes_out, Relaxed);
        self.place.sent.fetch_add(bytes_out, Relaxed);
        self.counters.received.fetch_add(bytes_in, Relaxed);
        self.place.received.fetch_add(bytes_in, Relaxed);
    }

    pub(crate) fn opened(&self) {
        self.counters.open.fetch_add(1, Relaxed);
    }

    pub(crate) fn closed(&self) {
        self.counters.open.fetch_sub(1, Relaxed);
    }

    /// Notes that a payload byte has passed.
    pub(crate) fn touch(&self) {
        let since = self.counters.since;
        let millis = u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.counters.last.fetch_max(millis, Relaxed);
    }

    fn places(&self) -> std::sync::MutexGuard<'_, HashMap<Box<str>, Arc<Place>>> {
        // Every change under the lock is whole.
        self.counters.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for Meter {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sums(carried: &[Carried]) -> (u64, u64) {
        carried.iter().fold((0, 0), |(out, back), one| (out + one.bytes_out, back + one.bytes_in))
    }

    /// Promise 67.
    #[test]
    fn a_guest_that_speaks_to_more_than_are_kept_apart_is_counted_to_the_last_byte() {
        let meter = Meter::new();
        let open: Vec<Meter> =
            (0..PLACES + 100).map(|n| meter.towards(&format!("h{n}.example"))).collect();
        open.iter().for_each(|one| one.sent(3));
        meter.received(5);
        let carried = meter.take();
        assert_eq!(sums(&carried), (3 * open.len() as u64, 5));
        assert_eq!(carried.len(), PLACES + 1);
        let other = carried.iter().find(|one| one.to.is_none()).expect("the rest");
        assert_eq!((other.bytes_out, other.bytes_in), (300, 5));
        assert_eq!(meter.take(), [], "once");
        drop(open);
        let _ = meter.take();
        let again = meter.towards("late.example");
        again.sent(1);
        assert_eq!(meter.take().first().and_then(|one| one.to.as_deref()), Some("late.example"));
    }

    proptest! {
        /// Promise 67. Whenever it is taken and whoever holds what: each byte once, under its name.
        #[test]
        fn each_byte_is_taken_once_under_its_destination(
            acts in proptest::collection::vec((0_u8..4, 0_usize..5, 1_u64..1000), 1..200),
        ) {
            let meter = Meter::new();
            let mut held: Vec<(usize, Meter)> = Vec::new();
            let (mut taken, mut told) = (HashMap::new(), HashMap::new());
            let mut take = || for one in meter.take() {
                *taken.entry(one.to.expect("few")).or_insert(0) += one.bytes_out;
            };
            for (act, place, bytes) in acts {
                match act {
                    0 => held.push((place, meter.towards(&place.to_string()))),
                    1 => held.retain(|(at, _)| *at != place),
                    2 => take(),
                    _ => if let Some((at, one)) = held.get(place) {
                        one.sent(bytes);
                        *told.entry(at.to_string().into_boxed_str()).or_insert(0) += bytes;
                    },
                }
            }
            take();
            prop_assert_eq!(taken, told);
            prop_assert!(meter.places().len() <= held.len());
        }
    }
}
