//! The attempts of one dial: from which egress port to where. Each that sent a packet and is not the
//! connection that came of it is in the audit, however the dial ends: peers know a port and a time.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use policy::audit::{Kind, Outcome};
use policy::{Code, Revision};

use crate::flows::{Flow, Judged};
use crate::guest::Guest;
use crate::refuse::{self, Refusal};

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
    pub(crate) fn won(&self, egress: SocketAddr) {
        self.all().retain(|attempt| attempt.egress != egress);
    }

    fn all(&self) -> MutexGuard<'_, Vec<Attempt>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Records what is left of them when the dial is over or given up.
#[derive(Debug)]
pub(crate) struct Told<'a> {
    pub(crate) guest: &'a Guest,
    pub(crate) flow: u64,
    pub(crate) judged: Arc<Judged>,
    pub(crate) revision: Revision,
    pub(crate) attempts: Attempts,
}

impl<'a> Told<'a> {
    /// Of a dial that begins now.
    pub(crate) fn new(
        guest: &'a Guest,
        flow: &Flow,
        judged: &Arc<Judged>,
        revision: Revision,
    ) -> Self {
        let (judged, attempts) = (Arc::clone(judged), Attempts::default());
        Self { guest, flow: flow.id(), judged, revision, attempts }
    }
}

impl Drop for Told<'_> {
    fn drop(&mut self) {
        let left = std::mem::take(&mut *self.attempts.all());
        for attempt in left {
            let refusal = Refusal::because(Code::UpstreamUnreachable, self.revision);
            let refusal = refusal.detailed("an attempt of which no connection came").after(attempt);
            let to = self.judged.destination;
            let mut record = self.guest.record(Kind::Connection, Outcome::Fail, to);
            refuse::note(&mut record, &refusal);
            record.flow = Some(self.flow);
            record.protocol = Some(self.judged.basis.protocol().to_owned());
            record.name = self.judged.name();
            self.guest.trail.record(record);
        }
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
        attempts.won(two);
        assert_eq!(attempts.last(), Some(Attempt { egress: one, remote: far }));
        assert_eq!(attempts.last(), None);
    }
}
