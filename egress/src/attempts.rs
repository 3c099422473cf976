//! The attempts of one dial: from which egress port to where. Each that sent a packet and is not the
//! connection that came of it is in the audit, however the dial ends: peers know a port and a time.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// One of them: a SYN has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Attempt {
    /// From where.
    pub(crate) egress: SocketAddr,
    /// Where to.
    pub(crate) remote: SocketAddr,
}

/// Those of a dial that is under way. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Attempts(Arc<Mutex<Vec<Attempt>>>);

impl Attempts {
    /// One more.
    pub(crate) fn add(&self, attempt: Attempt) {
        self.all().push(attempt);
    }

    /// Takes the last one out: what is said of the dial is said of it.
    pub(crate) fn last(&self) -> Option<Attempt> {
        self.all().pop()
    }

    /// Takes the one out that became a connection.
    pub(crate) fn won(&self, won: Attempt) {
        self.all().retain(|attempt| *attempt != won);
    }

    /// Takes all out that are left.
    pub(crate) fn take(&self) -> Vec<Attempt> {
        std::mem::take(&mut *self.all())
    }

    fn all(&self) -> MutexGuard<'_, Vec<Attempt>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_one_that_won_is_taken_out_and_the_rest_are_left() {
        let attempts = Attempts::default();
        let [one, two, far] = [1, 2, 3].map(|port| SocketAddr::from(([203, 0, 113, 1], port)));
        attempts.add(Attempt { egress: one, remote: far });
        attempts.clone().add(Attempt { egress: two, remote: far });
        attempts.won(Attempt { egress: two, remote: far });
        assert_eq!(attempts.last(), Some(Attempt { egress: one, remote: far }));
        assert_eq!(attempts.last(), None);
    }

    /// Promise 23. The kernel gives one port towards many far sides.
    #[test]
    fn a_lost_attempt_from_the_port_of_the_one_that_won_is_left_to_be_told() {
        let of = |far: u8| Attempt {
            egress: SocketAddr::from(([192, 0, 2, 1], 40_000)),
            remote: SocketAddr::from(([203, 0, 113, far], 443)),
        };
        let attempts = Attempts::default();
        attempts.add(of(1));
        attempts.add(of(2));
        attempts.won(of(2));
        assert_eq!(attempts.take(), [of(1)]);
    }
}
