//! Waiting for a thing to become true, with a deadline; never a bare sleep.

use std::time::{Duration, Instant};

/// The first `Some` of `look`, asked every few milliseconds.
///
/// # Panics
/// When `limit` has passed without one.
pub fn eventually<T>(what: &str, limit: Duration, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "not within {limit:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Holds for the whole of `span`, asked every few milliseconds; for what must not happen.
///
/// # Panics
/// When `holds` is false once.
pub fn throughout(what: &str, span: Duration, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + span;
    while Instant::now() < end {
        assert!(holds(), "did not hold: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
