//! One attached sandbox as its connections see it: who it is, by what it is judged, how it gets out.
//!
//! The steps that every way out shares are here, each alone; in which order they come is known to
//! `conn` for connections and to `http` for requests.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use dns::{Pinned, Pins};
use policy::audit::{AuditRecord, Kind, Outcome};
use policy::{
    Code, Compiled, OwnAddresses, Permit, PolicyHandle, Revision, Subject, Trail, Verdict,
};

use crate::attempts::Attempts;
use crate::dial::{Dialed, Dialer};
use crate::flows::{Basis, Flow, Flows, Judged};
use crate::limits::Limits;
use crate::meter::Meter;
use crate::refuse::{self, Refusal};
use crate::side::Gate;
use crate::tunnel::Pool;

/// An attached sandbox.
#[derive(Debug)]
pub(crate) struct Guest {
    pub(crate) subject: Arc<Subject>,
    pub(crate) policy: PolicyHandle,
    pub(crate) own: OwnAddresses,
    pub(crate) pins: Arc<Pins>,
    pub(crate) dns: Arc<dns::Guest>,
    pub(crate) dialer: Dialer,
    pub(crate) flows: Arc<Flows>,
    pub(crate) meter: Meter,
    pub(crate) gate: Arc<Gate>,
    pub(crate) limits: Limits,
    pub(crate) pool: Pool,
    pub(crate) trail: Trail,
}

/// What was let through, and by which policy.
#[derive(Clone, Debug)]
pub(crate) struct Passed {
    pub(crate) permit: Permit,
    pub(crate) policy: Arc<Compiled>,
    pub(crate) judged: Arc<Judged>,
}

impl Guest {
    /// The names this sandbox was told for an address.
    pub(crate) fn told(&self, address: IpAddr) -> Pinned {
        self.pins.names(address)
    }

    /// Judges by the policy in force now and notes on the flow what was let through.
    pub(crate) fn judge(
        &self,
        flow: &Flow,
        basis: Basis,
        destination: SocketAddr,
    ) -> Result<Passed, Refusal> {
        let policy = self.policy.load();
        match basis.judge(&policy, destination) {
            Verdict::Pass(permit) => {
                let target = permit.target().clone();
                let (candidates, dialed) = (Vec::new(), None);
                let judged = Judged { basis, destination, target, candidates, dialed };
                let judged = Arc::new(judged);
                let mut passed = Passed { permit, policy, judged };
                self.note(flow, &mut passed).map(|()| passed)
            }
            Verdict::Deny(denial) | Verdict::Undecidable(denial) => {
                // What it is told of that is for it.
                self.gate.answer(flow.id(), denial.revision);
                Err(denial.into())
            }
        }
    }

    /// Dials what was let through. Where to is noted before the first packet leaves: a write that
    /// denies one of the addresses after that cuts the dial, and one before it is obeyed here.
    pub(crate) async fn dial(&self, flow: &Flow, passed: &mut Passed) -> Result<Dialed, Refusal> {
        let candidates = self.dialer.candidates(&passed.policy, &passed.permit).await?;
        Arc::make_mut(&mut passed.judged).candidates =
            candidates.iter().map(|one| one.address()).collect();
        self.note(flow, passed)?;
        let revision = passed.permit.revision();
        let told = Told::new(self, flow, &passed.judged, revision);
        self.dialer.dial(candidates, revision, flow.rank(), &told.attempts).await
    }

    /// Notes where was dialled, and judges that by the policy in force: it may have been dialled by
    /// one before.
    pub(crate) fn confirm(
        &self,
        flow: &Flow,
        passed: &mut Passed,
        dialed: SocketAddr,
    ) -> Result<(), Refusal> {
        let judged = Arc::make_mut(&mut passed.judged);
        (judged.candidates, judged.dialed) = (Vec::new(), Some(dialed));
        self.note(flow, passed)?;
        match passed.policy.judge_address(&passed.permit, dialed.ip(), &self.own) {
            Ok(_) => Ok(()),
            Err(denial) => {
                flow.forget(&passed.judged);
                Err(denial.into())
            }
        }
    }

    /// Notes what was let through, and judges it again when the policy has moved meanwhile: a write
    /// that came before this note did not see the connection, one that comes after does.
    fn note(&self, flow: &Flow, passed: &mut Passed) -> Result<(), Refusal> {
        flow.note(&passed.judged);
        self.gate.heed(flow.id(), &passed.permit);
        let now = self.policy.load();
        if Arc::ptr_eq(&now, &passed.policy) {
            return Ok(());
        }
        match passed.judged.again(&now, &self.own) {
            Ok(permit) => {
                self.gate.heed(flow.id(), &permit);
                (passed.permit, passed.policy) = (permit, now);
            }
            Err(denial) => {
                flow.forget(&passed.judged);
                return Err(denial.into());
            }
        }
        Ok(())
    }

    /// A record about this sandbox and one of its connections.
    pub(crate) fn record(&self, kind: Kind, outcome: Outcome, to: SocketAddr) -> AuditRecord {
        let mut record = AuditRecord::new(fault::wall_clock(), kind, outcome).about(&self.subject);
        record.destination = Some(to);
        record
    }

    /// A record of what was let through, with the addresses at both ends of our own connection.
    pub(crate) fn passed(
        &self,
        kind: Kind,
        flow: &Flow,
        passed: &Passed,
        egress: SocketAddr,
    ) -> AuditRecord {
        let Passed { permit, policy, judged } = passed;
        let mut record = self.record(kind, Outcome::Allow, judged.destination);
        record.flow = Some(flow.id());
        record.protocol = Some(judged.basis.protocol().to_owned());
        record.name = judged.name();
        record.dialed = judged.dialed;
        record.egress = Some(egress);
        let dialed = judged.dialed.map_or(judged.destination.ip(), |dialed| dialed.ip());
        match policy.would_deny(permit, dialed, &self.own) {
            Some(denial) => {
                record.outcome = Outcome::Observe;
                refuse::note(&mut record, &denial.into());
            }
            None => {
                record.layer = Some(permit.layer().as_str().to_owned());
                record.rule = Some(permit.rule());
                record.revision = Some(permit.revision());
            }
        }
        record
    }

    /// A record of a refusal.
    pub(crate) fn refused(&self, kind: Kind, refusal: &Refusal, to: SocketAddr) -> AuditRecord {
        let mut record = self.record(kind, refusal.outcome(), to);
        refuse::note(&mut record, refusal);
        record
    }
}

/// The attempts of a dial: records what is left of them when it is over or given up.
#[derive(Debug)]
struct Told<'a> {
    guest: &'a Guest,
    flow: u64,
    judged: Arc<Judged>,
    revision: Revision,
    attempts: Attempts,
}

impl<'a> Told<'a> {
    /// Of a dial that begins now.
    fn new(guest: &'a Guest, flow: &Flow, judged: &Arc<Judged>, revision: Revision) -> Self {
        let (judged, attempts) = (Arc::clone(judged), Attempts::default());
        Self { guest, flow: flow.id(), judged, revision, attempts }
    }
}

impl Drop for Told<'_> {
    fn drop(&mut self) {
        for attempt in self.attempts.take() {
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
