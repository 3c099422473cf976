//! The audit of one thing that was let through: recorded before its first byte leaves, and again,
//! with what it came to, when it ends, however it ends.

use std::net::SocketAddr;
use std::sync::Arc;

use policy::audit::{AuditRecord, Kind, Outcome};
use tokio::time::Instant;

use crate::flows::{Cut, Flow};
use crate::guest::{Guest, Passed};
use crate::refuse::{self, Refusal};

/// An open account; dropping it records its end.
#[derive(Debug)]
pub(crate) struct Account {
    /// What is recorded at the end; bytes, status and the like are filled in on the way.
    pub(crate) record: AuditRecord,
    guest: Arc<Guest>,
    flow: Arc<Flow>,
    begun: Instant,
}

impl Account {
    /// Records what is let through, from which address and port.
    pub(crate) fn open(
        guest: &Arc<Guest>,
        flow: &Arc<Flow>,
        kind: Kind,
        passed: &Passed,
        egress: SocketAddr,
        fill: impl FnOnce(&mut AuditRecord),
    ) -> Self {
        let mut record = guest.passed(kind, flow, passed, egress);
        fill(&mut record);
        guest.trail.record(record.clone());
        Self { record, guest: Arc::clone(guest), flow: Arc::clone(flow), begun: Instant::now() }
    }

    /// The connection it is about.
    pub(crate) fn flow(&self) -> &Flow {
        &self.flow
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        let mut record = self.record.clone();
        record.time = fault::wall_clock();
        record.outcome = Outcome::Closed;
        // Of one that was only observed it said what would have been; now it ended like any other.
        record.code = None;
        match self.flow.was_cut() {
            Some(Cut::Denied(denial)) => {
                refuse::note(&mut record, &Refusal::changed(denial.clone()));
            }
            Some(Cut::Detached) => {
                let why = "its sandbox was removed or began anew, or the daemon ended";
                record.detail.get_or_insert_with(|| why.to_owned());
            }
            None => {}
        }
        self.guest.trail.record(record.took(self.begun.elapsed()));
    }
}
