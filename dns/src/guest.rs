//! One sandbox's questions, from bytes to bytes: the only file that knows the order. Limit, read,
//! judge, resolve, judge every address, pin, record, answer.
//!
//! What is asked for a name that the policy lets through:
//!
//! | type | answer |
//! |---|---|
//! | A | its public addresses, and those an address rule names; if it has IPv6 addresses only, one that stands for it |
//! | AAAA, HTTPS, SVCB, SRV | no such records (NODATA), from here: guests speak IPv4, and no hint or `ech` passes |
//! | any other, ANY and zone transfers included | REFUSED: no channel of free text |
//!
//! A name that is refused does not exist (NXDOMAIN), unless something below it may pass: then it has no
//! records (NODATA). Special-use names ([`is_local`]) do not exist and are never asked of anybody.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hickory_proto::op::ResponseCode;
use hickory_proto::rr::RecordType;
use policy::audit::{AuditRecord, Kind, Outcome};
use policy::{
    Code, Compiled, Denial, Evidence, Flow, Host, OwnAddresses, Permit, PolicyHandle, Protocol,
    Subject, Trail, Verdict,
};

use crate::asker::{Asker, is_local, is_special_use};
use crate::budget::{self, Bucket, Ledger};
use crate::chain::Family;
use crate::error::Error;
use crate::pins::Pins;
use crate::question::{Question, Unreadable};
use crate::reply::{self, Info, MAX_UDP, Reply};
use crate::resolver::Answer;

/// For how long a guest is told that addresses are good, at most. What is left of an answer that is kept for
/// all would tell it when another sandbox asked; so it is told how long the answer was good when it came, and
/// may keep it as much longer than we do.
const TOLD: Duration = Duration::from_secs(60);

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
    asker: Asker,
    ipv6: bool,
    bucket: Mutex<Bucket>,
    ledger: Mutex<Ledger>,
}

/// A decision: what the guest is answered and what the audit says.
struct Ruling {
    reply: Reply,
    outcome: Outcome,
    why: Option<Code>,
    by: By,
    detail: Option<String>,
}

/// Addresses that may be told, and what the audit says of the others.
struct Filtered {
    told: Vec<IpAddr>,
    refused: Option<Denial>,
    /// Why one of those that may be told would not be, by a layer that only observes.
    observed: Option<Denial>,
    detail: Option<String>,
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
    /// of this host (`own`) as private, asks by `asker`, and records into `trail`. `ipv6`: whether its
    /// connections can leave by IPv6.
    #[must_use]
    pub fn new(
        subject: Arc<Subject>,
        policy: PolicyHandle,
        pins: Arc<Pins>,
        own: OwnAddresses,
        asker: Asker,
        ipv6: bool,
        trail: Trail,
    ) -> Self {
        let now = Instant::now();
        Self {
            policy,
            pins,
            own,
            asker,
            ipv6,
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
        if !budget::question(&mut locked(&self.bucket), start) {
            locked(&self.ledger).dropped(start, 1);
            return None;
        }
        let question = match Question::read(query) {
            Ok(question) => question,
            Err(unreadable) => return self.unreadable(&unreadable, asked, start),
        };
        let host = question.host();
        let ruling = self.rule(&question, host.as_ref()).await;
        if let Some(host) = &host {
            let policy = self.policy.load();
            for address in &ruling.reply.addresses {
                self.pins.pin(*address, host, |name| policy.denies_some_of(name));
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

    /// Counts messages of the guest that were dropped unread.
    pub fn dropped(&self, count: usize) {
        let count = u64::try_from(count).unwrap_or(u64::MAX);
        locked(&self.ledger).dropped(Instant::now(), count);
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
        let policy = self.policy.load();
        let permit = match judge(&policy, host) {
            Ok(permit) => permit,
            Err(denial) => return Ruling::absent(&policy, host, denial),
        };
        if is_local(host) {
            let denial = Denial::because(Code::PrivateAddress, permit.revision());
            return match host.is_top_level() {
                true => Ruling::absent(&policy, host, denial),
                false => Ruling::denied(denial),
            };
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
        drop(policy);
        let found = self.look_up(&permit, host).await;
        // Judged again, because the policy may have changed while an upstream was asked.
        let policy = self.policy.load();
        let permit = match judge(&policy, host) {
            Ok(permit) => permit,
            Err(denial) => return Ruling::absent(&policy, host, denial),
        };
        let (family, answer) = match found {
            Ok(found) => found,
            Err(error) if error.is_limit() => {
                return Ruling::refused(ResponseCode::ServFail, Info::Other, Code::Limit, &permit);
            }
            Err(error) => return Ruling::unresolved(&error, &permit),
        };
        let filtered = self.filter(&policy, &permit, &answer.addresses);
        let Filtered { told, refused, observed, detail } = filtered;
        let ttl = answer.lifetime.min(TOLD).as_secs();
        match (family, refused) {
            (_, Some(denial)) if told.is_empty() => Ruling::denied(denial).detailed(detail),
            (Family::V4, _) => {
                Ruling::told(told, ttl, &permit).observing(observed).detailed(detail)
            }
            (Family::V6, _) if self.ipv6 => {
                let denied = |name: &Host| policy.denies_some_of(name);
                let standing = self.pins.standing_for(host, denied);
                let detail = format!("{standing} stands for {}", listed(&told));
                let told = vec![standing.into()];
                Ruling::told(told, ttl, &permit).observing(observed).detailed(Some(detail))
            }
            (Family::V6, _) => {
                let detail = format!("it has IPv6 addresses only: {}", listed(&told));
                Ruling::unreachable(&permit).detailed(Some(detail))
            }
        }
    }

    /// Its IPv4 addresses, or else the IPv6 addresses, which are asked for only then.
    async fn look_up(&self, permit: &Permit, host: &Host) -> Result<(Family, Arc<Answer>), Error> {
        match self.asker.addresses_now(permit, host, Family::V4).await {
            Ok(answer) => Ok((Family::V4, answer)),
            Err(none @ Error::NoAddresses { .. }) => {
                match self.asker.addresses_now(permit, host, Family::V6).await {
                    Ok(answer) => Ok((Family::V6, answer)),
                    // Without a way out by IPv6 it does not matter what could not be found there.
                    Err(Error::NoAddresses { .. } | Error::NoSuchName { .. }) => Err(none),
                    Err(_) if !self.ipv6 => Err(none),
                    Err(error) => Err(error),
                }
            }
            Err(error) => Err(error),
        }
    }

    fn filter(&self, policy: &Compiled, permit: &Permit, addresses: &[IpAddr]) -> Filtered {
        let (mut told, mut withheld) = (Vec::new(), Vec::new());
        let (mut refused, mut observed) = (None, None);
        for &address in addresses {
            match policy.judge_address(permit, address, &self.own) {
                Ok(_) => {
                    told.push(address);
                    observed = observed.or_else(|| policy.would_deny(permit, address, &self.own));
                }
                Err(denial) => {
                    withheld.push(address);
                    refused = Some(denial);
                }
            }
        }
        let detail = refused
            .as_ref()
            .map(|denial| format!("withheld by {}: {}", denial.code, listed(&withheld)));
        Filtered { told, refused, observed, detail }
    }

    fn unreadable(&self, why: &Unreadable, asked: SocketAddr, start: Instant) -> Option<Vec<u8>> {
        let (status, answer) = match why {
            Unreadable::Silent => (None, None),
            Unreadable::Refused { metadata, code } => {
                (Some(u16::from(*code)), reply::unread(metadata, *code))
            }
        };
        let mut record = AuditRecord::new(fault::wall_clock(), Kind::Dns, Outcome::Deny);
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
        Self { reply, outcome: Outcome::Allow, why: None, by: By::permit(permit), detail: None }
    }

    fn detailed(self, detail: Option<String>) -> Self {
        Self { detail, ..self }
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

    /// The name is refused. What may pass below it must not be taken for absent (RFC 8020).
    fn absent(policy: &Compiled, host: &Host, denial: Denial) -> Self {
        match !is_special_use(host) && policy.passes_below(host) {
            true => Self::answered(ResponseCode::NoError, denial),
            false => Self::denied(denial),
        }
    }

    fn answered(code: ResponseCode, denial: Denial) -> Self {
        Self {
            reply: Reply::without(code, Some((Info::Filtered, denial.code))),
            outcome: Outcome::Deny,
            why: Some(denial.code),
            by: By::denial(denial),
            detail: None,
        }
    }

    /// The name is allowed, this question for it is not.
    fn refused(code: ResponseCode, info: Info, why: Code, permit: &Permit) -> Self {
        let reply = Reply::without(code, Some((info, why)));
        let by = By::permit(permit);
        Self { reply, outcome: Outcome::Deny, why: Some(why), by, detail: None }
    }

    /// The name is allowed, and its addresses are of a family by which the sandbox cannot leave.
    fn unreachable(permit: &Permit) -> Self {
        let why = Code::EgressIpUnavailable;
        let reply = Reply::without(ResponseCode::NoError, Some((Info::Other, why)));
        let by = By::permit(permit);
        Self { reply, outcome: Outcome::Fail, why: Some(why), by, detail: None }
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
        let by = By::permit(permit);
        Self { reply, outcome: Outcome::Fail, why: Some(why), by, detail: None }
    }

    fn record(
        self,
        name: String,
        record_type: RecordType,
        asked: SocketAddr,
        start: Instant,
    ) -> AuditRecord {
        let mut record = AuditRecord::new(fault::wall_clock(), Kind::Dns, self.outcome);
        record.protocol = Some("dns".into());
        record.name = Some(name);
        record.destination = Some(asked);
        record.code = self.why;
        record.layer = self.by.layer.map(|layer| layer.as_str().to_owned());
        record.rule = self.by.rule;
        record.revision = Some(self.by.revision);
        record.path = Some(record_type.to_string());
        record.status = Some(self.reply.code.into());
        record.detail = self.detail;
        record.took(start.elapsed())
    }
}

impl By {
    fn denial(denial: Denial) -> Self {
        Self { layer: denial.layer, rule: denial.rule, revision: denial.revision }
    }

    fn permit(permit: &Permit) -> Self {
        Self { layer: Some(permit.layer()), rule: Some(permit.rule()), revision: permit.revision() }
    }
}

fn judge(policy: &Compiled, host: &Host) -> Result<Permit, Denial> {
    let evidence = Evidence::Question(host);
    match policy.judge(&Flow { protocol: Protocol::Tcp, port: 0, destination: None, evidence }) {
        Verdict::Pass(permit) => Ok(permit),
        Verdict::Deny(denial) | Verdict::Undecidable(denial) => Err(denial),
    }
}

/// Addresses, as many as a record has room for.
fn listed(addresses: &[IpAddr]) -> String {
    let text: Vec<_> = addresses.iter().map(ToString::to_string).collect();
    policy::audit::shown(&text.join(", "))
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
