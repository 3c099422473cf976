//! How many refusals of datagrams are recorded one by one. Each costs a guest one packet, so without
//! a bound it could fill the queue of the audit that all sandboxes share.

use std::time::Duration;

use tokio::time::Instant;

/// Refusals recorded one by one: at once, and a second. As the fence samples what it refuses.
const BURST: u32 = 20;
const RATE: u32 = 10;
/// How long the others are counted before their number is recorded.
const WINDOW: Duration = Duration::from_secs(1);

/// The refusals of one slot.
#[derive(Debug)]
pub(crate) struct Refusals {
    left: u32,
    filled: Instant,
    held: u64,
    since: Option<Instant>,
}

impl Default for Refusals {
    fn default() -> Self {
        Self { left: BURST, filled: Instant::now(), held: 0, since: None }
    }
}

impl Refusals {
    /// Whether so many are to be recorded now; otherwise they are counted.
    pub(crate) fn add(&mut self, count: u64) -> bool {
        let now = Instant::now();
        let each = Duration::from_secs(1) / RATE;
        while self.left < BURST && now.duration_since(self.filled) >= each {
            self.left += 1;
            self.filled += each;
        }
        if self.left == BURST {
            self.filled = now;
        }
        match self.left.checked_sub(1) {
            Some(left) => {
                self.left = left;
                true
            }
            None => {
                self.hold(count);
                false
            }
        }
    }

    /// Counts so many without recording them.
    pub(crate) fn hold(&mut self, count: u64) {
        self.held = self.held.saturating_add(count);
        self.since.get_or_insert_with(Instant::now);
    }

    /// When [`Refusals::take`] has something to say.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.since.map(|since| since + WINDOW)
    }

    /// How many were counted and not recorded, and begins anew.
    pub(crate) fn take(&mut self) -> Option<u64> {
        self.since = None;
        Some(std::mem::take(&mut self.held)).filter(|held| *held > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_burst_is_told_then_a_rate_and_the_rest_is_counted() {
        let mut refusals = Refusals::default();
        let told = (0..100).filter(|_| refusals.add(1)).count();
        assert_eq!(told, 20);
        assert_eq!(refusals.due().map(|due| due - Instant::now()), Some(WINDOW));
        assert_eq!(refusals.take(), Some(80));
        assert_eq!((refusals.take(), refusals.due()), (None, None));
        tokio::time::advance(Duration::from_millis(510)).await;
        assert_eq!((0..100).filter(|_| refusals.add(1)).count(), 5);
        tokio::time::advance(Duration::from_secs(3600)).await;
        assert_eq!((0..100).filter(|_| refusals.add(1)).count(), 20);
    }
}
