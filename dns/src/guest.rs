//! One sandbox's questions, from bytes to bytes: the only file that knows the order. Limit, read,
//! judge, resolve, judge every address, pin, record, answer.
//!
//! What is asked for a name that the policy lets through:
//!
//! | type | answer |
//! |---|---|
//! | A | its public addresses, and those an address rule names |
//! | AAAA, HTTPS, SVCB, SRV | no such records (NODATA), from here: guests speak IPv4, and no hint or `ech` passes |
//! | any other, ANY and zone transfers included | REFUSED: no channel of free text |
//!
//! Special-use names ([`is_local`]) do not exist here and are never asked of anybody.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime};

use hickory_proto::op::ResponseCode;
use hickory_proto::rr::RecordType;
use policy::audit::{AuditRecord, Kind, Outcome};
use policy::{
    Code, Compiled, Denial, Evidence, Flow, Host, OwnAddresses, Permit, PolicyHandle, Protocol,
    Subject, Trail, Verdict,
};
use tokio::sync::Semaphore;

use crate::budget::{Bucket, Ledger};
use crate::chain::Family;
use crate::error::Error;
use crate::pins::Pins;
use crate::question::{Question, Unreadable};
use crate::reply::{self, Info, MAX_UDP, Reply};
use crate::resolver::Resolver;

/// Lookups of one sandbox under way at once.
const MAX_LOOKUPS: usize = 64;

/// How a question came, and so how long its answer may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// A datagram.
    Udp,
    /// A message of a stream.
    Tcp,
}

/// The resolver as one sandbox sees it. Lives as long as its slot is attached.
#[derive(Debug)]
pub struct Guest {
    policy: PolicyHandle,
    pins: Arc<Pins>,
    own: OwnAddresses,
    resolver: Resolver,
    lookups: Semaphore,
    bucket: Mutex<Bucket>,
    ledger: Mutex<Ledger>,
}

/// A decision: what the guest is answered and what the audit says.
struct Ruling {
    reply: Reply,
    outcome: Outcome,
    why: Option<Code>,
    by: By,
}

/// By what it was decided.
#[derive(Default)]
struct By {
    layer: Option<policy::Layer>,
    rule: Option<String>,
    revision: policy::Revision,
}

impl Guest {
    /// The resolver of `subject`, which judges by `policy`, pins into `pins`, treats the addresses
    /// of this host (`own`) as private, and records into `trail`.
    #[must_use]
    pub fn new(
        subject: Arc<Subject>,
        policy: PolicyHandle,
        pins: Arc<Pins>,
        own: OwnAddresses,
        resolver: Resolver,
        trail: Trail,
    ) -> Self {
        let now = Instant::now();
        Self {
            policy,
            pins,
            own,
            resolver,
            lookups: Semaphore::new(MAX_LOOKUPS),
            bucket: Mutex::new(Bucket::new(now)),
            ledger: Mutex::new(Ledger::new(subject, trail, now)),
        }
    }

    /// Answers one message of the guest, sent to `asked`; none when it gets no answer. Every
    /// address in the answer is pinned before this returns.
    pub async fn answer(
        &self,
        query: &[u8],
        asked: SocketAddr,
        transport: Transport,
    ) -> Option<Vec<u8>> {
        let start = Instant::now();
        if !locked(&self.bucket).take(start) {
            locked(&self.ledger).dropped(start);
            return None;
        }
        let question = match Question::read(query) {
            Ok(question) => question,
            Err(unreadable) => return self.unreadable(&unreadable, asked, start),
        };
        let host = question.host();
        let ruling = self.rule(&question, host.as_ref()).await;
        if let Some(host) = &host {
            for address in &ruling.reply.addresses {
                self.pins.pin(*address, host);
            }
        }
        let limit = match (transport, question.edns) {
            (Transport::Tcp, _) => u16::MAX,
            (Transport::Udp, size) => size.unwrap_or(512).clamp(512, MAX_UDP),
        };
        let answer = ruling.reply.encode(&question, limit.into());
        let name = host.map_or_else(|| question.shown(), |host| host.as_str().to_owned());
        let record = ruling.record(name, question.record_type(), asked, start);
        locked(&self.ledger).write(start, record);
        answer
    }

    async fn rule(&self, question: &Question, host: Option<&Host>) -> Ruling {
        let Some(host) = host else {
            let revision = self.policy.load().revision();
            if question.query.name.is_root() {
                // Not NXDOMAIN: a cache would conclude that nothing exists at all (RFC 8020).
                let denial = Denial::because(Code::NoName, revision);
                return Ruling::answered(ResponseCode::Refused, denial);
            }
            return Ruling::denied(Denial::because(Code::BadName, revision));
        };
        let permit = match judge(&self.policy.load(), host) {
            Ok(permit) => permit,
            Err(denial) => return Ruling::denied(denial),
        };
        if is_local(host) {
            return Ruling::denied(Denial::because(Code::PrivateAddress, permit.revision()));
        }
        match question.record_type() {
            RecordType::A => {}
            RecordType::AAAA | RecordType::HTTPS | RecordType::SVCB | RecordType::SRV => {
                return Ruling::empty(&permit);
            }
            _ => {
                let (code, info) = (ResponseCode::Refused, Info::NotSupported);
                return Ruling::refused(code, info, Code::Protocol, &permit);
            }
        }
        let Ok(_slot) = self.lookups.try_acquire() else {
            return Ruling::refused(ResponseCode::ServFail, Info::Other, Code::Limit, &permit);
        };
        let answer = match self.resolver.addresses(host, Family::V4).await {
            Ok(answer) => answer,
            Err(error) => return Ruling::unresolved(&error, &permit),
        };
        // Judged again, because the policy may have changed while an upstream was asked.
        let policy = self.policy.load();
        let permit = match judge(&policy, host) {
            Ok(permit) => permit,
            Err(denial) => return Ruling::denied(denial),
        };
        let (mut told, mut refused, mut observed) = (Vec::new(), None, None);
        for &address in &answer.addresses {
            match policy.judge_address(&permit, address, &self.own) {
                Ok(_) => {
                    told.push(address);
                    observed = observed.or_else(|| policy.would_deny(&permit, address, &self.own));
                }
                Err(denial) => refused = Some(denial),
            }
        }
        match refused {
            Some(denial) if told.is_empty() => Ruling::denied(denial),
            _ => Ruling::told(told, answer.ttl().as_secs(), &permit).observing(observed),
        }
    }

    fn unreadable(&self, why: &Unreadable, asked: SocketAddr, start: Instant) -> Option<Vec<u8>> {
        let (status, answer) = match why {
            Unreadable::Silent => (None, None),
            Unreadable::Refused { metadata, code } => {
                (Some(u16::from(*code)), reply::unread(metadata, *code))
            }
        };
        let mut record = AuditRecord::new(SystemTime::now(), Kind::Dns, Outcome::Deny);
        record.protocol = Some("dns".into());
        record.destination = Some(asked);
        record.code = Some(Code::Undecidable);
        record.status = status;
        record.revision = Some(self.policy.load().revision());
        locked(&self.ledger).write(start, record.took(start.elapsed()));
        answer
    }
}

impl Ruling {
    fn told(addresses: Vec<IpAddr>, ttl: u64, permit: &Permit) -> Self {
        let ttl = u32::try_from(ttl).unwrap_or(u32::MAX).max(1);
        let reply = Reply { code: ResponseCode::NoError, addresses, ttl, reason: None };
        Self { reply, outcome: Outcome::Allow, why: None, by: By::permit(permit) }
    }

    fn empty(permit: &Permit) -> Self {
        Self::told(Vec::new(), 0, permit).observing(permit.would_deny().cloned())
    }

    /// The same answer, recorded as one that would have been refused.
    fn observing(self, would_deny: Option<Denial>) -> Self {
        match would_deny {
            Some(denial) => Self {
                outcome: Outcome::Observe,
                why: Some(denial.code),
                by: By::denial(denial),
                ..self
            },
            None => self,
        }
    }

    fn denied(denial: Denial) -> Self {
        Self::answered(ResponseCode::NXDomain, denial)
    }

    fn answered(code: ResponseCode, denial: Denial) -> Self {
        Self {
            reply: Reply::without(code, Some((Info::Filtered, denial.code))),
            outcome: Outcome::Deny,
            why: Some(denial.code),
            by: By::denial(denial),
        }
    }

    /// The name is allowed, this question for it is not.
    fn refused(code: ResponseCode, info: Info, why: Code, permit: &Permit) -> Self {
        let reply = Reply::without(code, Some((info, why)));
        Self { reply, outcome: Outcome::Deny, why: Some(why), by: By::permit(permit) }
    }

    /// The name is allowed; the upstreams do not know it, or do not answer.
    fn unresolved(error: &Error, permit: &Permit) -> Self {
        let why = Code::Unresolvable;
        let (code, info) = match error {
            Error::NoSuchName { .. } => (ResponseCode::NXDomain, None),
            Error::NoAddresses { .. } => (ResponseCode::NoError, None),
            Error::TimedOut { .. } => (ResponseCode::ServFail, Some(Info::NoReachableAuthority)),
            _ => (ResponseCode::ServFail, Some(Info::NetworkError)),
        };
        let reply = Reply::without(code, info.map(|info| (info, why)));
        Self { reply, outcome: Outcome::Fail, why: Some(why), by: By::permit(permit) }
    }

    fn record(
        self,
        name: String,
        record_type: RecordType,
        asked: SocketAddr,
        start: Instant,
    ) -> AuditRecord {
        let mut record = AuditRecord::new(SystemTime::now(), Kind::Dns, self.outcome);
        record.protocol = Some("dns".into());
        record.name = Some(name);
        record.destination = Some(asked);
        record.code = self.why;
        record.layer = self.by.layer.map(|layer| layer.as_str().to_owned());
        record.rule = self.by.rule;
        record.revision = Some(self.by.revision);
        record.path = Some(record_type.to_string());
        record.status = Some(self.reply.code.into());
        record.took(start.elapsed())
    }
}

impl By {
    fn denial(denial: Denial) -> Self {
        Self { layer: denial.layer, rule: denial.rule, revision: denial.revision }
    }

    fn permit(permit: &Permit) -> Self {
        Self {
            layer: Some(permit.layer()),
            rule: Some(permit.rule().to_owned()),
            revision: permit.revision(),
        }
    }
}

fn judge(policy: &Compiled, host: &Host) -> Result<Permit, Denial> {
    let evidence = Evidence::Question(host);
    match policy.judge(&Flow { protocol: Protocol::Tcp, port: 0, destination: None, evidence }) {
        Verdict::Pass(permit) => Ok(permit),
        Verdict::Deny(denial) | Verdict::Undecidable(denial) => Err(denial),
    }
}

/// Names that never mean a public host: single labels, and everything below the special-use
/// domains (RFC 6761, 6762, 7686, 8375, 9476) and `internal`. `arpa` is here because reverse names
/// tell an outsider what a guest looks at, and a guest nothing that it may dial.
fn is_local(host: &Host) -> bool {
    const LOCAL: [&str; 7] = ["alt", "arpa", "internal", "invalid", "local", "localhost", "onion"];
    match host.as_str().rsplit_once('.') {
        Some((_, last)) => LOCAL.contains(&last),
        None => true,
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn special_use_names_and_single_labels_are_local() {
        let local = |text: &str| is_local(&Host::parse(text).expect(text));
        for name in ["localhost", "a.localhost", "printer.local", "metadata.google.internal"] {
            assert!(local(name), "{name}");
        }
        for name in ["db", "1.0.168.192.in-addr.arpa", "router.home.arpa", "x.onion"] {
            assert!(local(name), "{name}");
        }
        for name in ["example.com", "local.example.com", "xlocal.net", "internal.example.org"] {
            assert!(!local(name), "{name}");
        }
    }
}
