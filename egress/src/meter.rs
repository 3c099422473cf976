//! What one sandbox has sent and received, how many connections it holds, and when it last spoke.
//!
//! Atomics only: metering never blocks and never fails.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// The counters of one attached slot. Clones see the same.
#[derive(Clone, Debug)]
pub struct Meter(Arc<Counters>);

#[derive(Debug)]
struct Counters {
    since: Instant,
    sent: AtomicU64,
    received: AtomicU64,
    open: AtomicUsize,
    /// Milliseconds from `since` to the last payload byte.
    last: AtomicU64,
}

impl Meter {
    /// Counters at zero, last byte now.
    #[must_use]
    pub fn new() -> Self {
        Self(Arc::new(Counters {
            since: Instant::now(),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
            open: AtomicUsize::new(0),
            last: AtomicU64::new(0),
        }))
    }

    /// Payload bytes from the guest to far sides.
    #[must_use]
    pub fn bytes_out(&self) -> u64 {
        self.0.sent.load(Relaxed)
    }

    /// Payload bytes from far sides to the guest.
    #[must_use]
    pub fn bytes_in(&self) -> u64 {
        self.0.received.load(Relaxed)
    }

    /// Connections that are open now, either way.
    #[must_use]
    pub fn open(&self) -> usize {
        self.0.open.load(Relaxed)
    }

    /// When the last payload byte passed, either way.
    #[must_use]
    pub fn last(&self) -> Instant {
        self.0.since + Duration::from_millis(self.0.last.load(Relaxed))
    }

    /// How long ago the last payload byte passed, either way.
    #[must_use]
    pub fn quiet(&self) -> Duration {
        self.last().elapsed()
    }

    /// Counts bytes from the guest to a far side.
    pub fn sent(&self, bytes: u64) {
        self.0.sent.fetch_add(bytes, Relaxed);
        self.touch();
    }

    /// Counts bytes from a far side to the guest.
    pub fn received(&self, bytes: u64) {
        self.0.received.fetch_add(bytes, Relaxed);
        self.touch();
    }

    pub(crate) fn opened(&self) {
        self.0.open.fetch_add(1, Relaxed);
    }

    pub(crate) fn closed(&self) {
        self.0.open.fetch_sub(1, Relaxed);
    }

    /// Notes that a payload byte has passed.
    pub(crate) fn touch(&self) {
        let millis = u64::try_from(self.0.since.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.0.last.fetch_max(millis, Relaxed);
    }
}

impl Default for Meter {
    fn default() -> Self {
        Self::new()
    }
}
