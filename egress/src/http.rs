//! Clear-text HTTP: every request judged by itself, and sent as it was judged.
//!
//! Both sides are ended here, one HTTP/1 connection with the guest and one with a far side at a time;
//! bytes are never passed through unread, but after an upgrade that a rule lets through. What the guest
//! sends is read strictly (`framing`) before hyper sees it. Bodies stream both ways.

mod screen;
mod upgrade;
mod head;
mod relay;
mod events;
mod timer;
mod wire;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONNECTION, HOST};
use http::request::Parts;
use http::{HeaderValue, Request, Response, StatusCode, Version};
use http_body_util::{Either, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use policy::audit::{AuditRecord, Kind, Outcome, shown};
use policy::judge::Target;
use policy::name::{Authority, AuthorityHost};
use policy::{Code, Revision, canonical_path};
use tokio::io::AsyncWriteExt;
use tokio::time::Instant;

use crate::account::Account;
use crate::buffers;
use crate::dial::Dialed;
use crate::flows::{Basis, Cut, Flow};
use crate::guest::{Guest, Passed};
use crate::http::head::{Claim, Fault};
use crate::http::relay::{Ending, Far, Relay, Relayed};
use crate::http::screen::{Notes, Screen};
use crate::http::timer::AwakeTimer;
use crate::http::upgrade::Handshake;
use crate::http::wire::{Traffic, Wire};
use crate::refuse::{self, Refusal};
use crate::side::{GuestSide, Kept, Watcher};
use crate::tunnel::{Duplex, websocket};

/// Between requests, and from the first to the last byte of a head.
const HEAD_TIME: Duration = Duration::from_secs(60);
/// The most that is held of each direction on each side beyond a head, when the next to take it does not.
const BESIDE: usize = 1024;

const SWITCHING: StatusCode = StatusCode::SWITCHING_PROTOCOLS;

type Answer = Response<Either<Relayed, Full<Bytes>>>;

/// One connection of a guest that speaks HTTP.
struct Visit {
    guest: Arc<Guest>,
    flow: Arc<Flow>,
    destination: SocketAddr,
    relay: Relay,
    notes: Arc<Notes>,
    switched: Once<Switched>,
    early: Once<Box<Early>>,
}

/// What was dialled before the guest had said anything.
#[derive(Debug)]
pub(crate) struct Early {
    pub(crate) dialed: Dialed,
    /// Whom it was let through to.
    pub(crate) target: Target,
    /// Open until it ends, requests or not.
    pub(crate) account: Account,
}

/// An exchange that turned its connections into streams of bytes.
#[derive(Debug)]
struct Switched {
    far: Far,
    ending: Arc<Ending>,
}

/// A place for one value that is taken once.
#[derive(Debug)]
struct Once<T>(Mutex<Option<T>>);

/// A request that is not let through: what the guest is told, and what is recorded.
struct Refused {
    refusal: Refusal,
    status: StatusCode,
    /// Whether nothing that follows it can be trusted to be a request.
    last: bool,
}

/// What a request says of itself, fit for a record: its host canonical where it is one.
#[derive(Default)]
struct Seen {
    host: Option<String>,
    method: Option<String>,
    path: Option<String>,
}

/// Serves requests until either side is done, the connection is idle, or it is cut.
pub(crate) async fn serve(
    guest: Arc<Guest>,
    flow: Arc<Flow>,
    stream: GuestSide,
    (flight, early): (Bytes, Option<Box<Early>>),
    destination: SocketAddr,
) {
    let begun = Instant::now();
    let idle = guest.limits.idle;
    let watched = stream.watcher();
    let most = buffers::heap(flow.rank());
    let screen = Screen::new(Wire::new(stream, flight), most);
    let traffic = screen.traffic();
    let visit = Arc::new(Visit {
        guest: Arc::clone(&guest),
        flow: Arc::clone(&flow),
        destination,
        relay: Relay::default(),
        notes: screen.notes(),
        switched: Once(Mutex::new(None)),
        early: Once(Mutex::new(early)),
    });
    let serving = Arc::clone(&visit);
    let service = service_fn(move |request| {
        let visit = Arc::clone(&serving);
        async move { Ok::<_, Infallible>(visit.serve(request).await) }
    });
    let mut conn = http1::Builder::new()
        .timer(AwakeTimer(Arc::clone(&guest.gate)))
        .half_close(true)
        .header_read_timeout(HEAD_TIME)
        .max_header_size(most)
        .max_buf_size(most + BESIDE)
        .serve_connection(TokioIo::new(screen), service);
    let mut severed_already = false;
    let ended = tokio::select! {
        biased;
        _ = flow.cut() => {
            severed(&guest, &flow);
            severed_already = true;
            None
        }
        () = traffic.quiet_for(idle, &guest.gate) => None,
        () = given_up(watched, &traffic, &guest) => None,
        ended = &mut conn => Some(ended),
    };
    let http1::Parts { io, read_buf, .. } = conn.into_parts();
    let (mut stream, held) = io.into_inner().into_parts();
    if let (Some(switched), Some(Ok(()))) = (visit.switched.take(), &ended) {
        return carry(&guest, &flow, stream, [read_buf, held].concat().into(), switched).await;
    }
    // It has been answered already: its target is none.
    if let Some(Err(error)) = &ended
        && error.is_parse()
    {
        visit.unread(error, begun);
    }
    let told = ended.is_some()
        && tokio::select! {
            biased;
            _ = flow.cut() => false,
            told = refuse::linger(&mut stream) => told,
        };
    match told {
        true => drop(stream),
        false => stream.reset(),
    }
    // What the guest has sent may still be on its way, and is cut as before.
    if !severed_already {
        tokio::select! {
            biased;
            _ = flow.cut() => severed(&guest, &flow),
            () = visit.relay.finish() => {}
        }
    }
}

/// Carries the bytes of what was a request, until either side ends it or it is cut.
async fn carry(
    guest: &Guest,
    flow: &Flow,
    mut stream: GuestSide,
    flight: Bytes,
    Switched { far, ending }: Switched,
) {
    let meter = far.meter.clone();
    let begin = async {
        let (far, early, held) = far.into_switched().await?;
        guest.gate.within(guest.limits.idle, stream.write_all(&early)).await?.ok()?;
        Some((far, held, Duplex::new(&early, &guest.gate)))
    };
    let begun = tokio::select! {
        biased;
        _ = flow.cut() => None,
        far = begin => far,
    };
    let Some((far, held, frames)) = begun else { return stream.reset() };
    let cut = async {
        flow.cut().await;
    };
    let Guest { limits, pool, .. } = guest;
    let with = (&meter, pool, &frames);
    ending.tunnelled(websocket(stream, far, flight, limits, with, cut).await);
    drop(held);
}

/// Records a cut between two requests: the records of both are closed, or not yet opened.
fn severed(guest: &Guest, flow: &Flow) {
    let (Some(Cut::Denied(denial)), Some(judged)) = (flow.was_cut(), flow.resting()) else {
        return;
    };
    let refusal = Refusal::changed(denial.clone());
    let mut record = guest.refused(Kind::Connection, &refusal, judged.destination);
    record.outcome = Outcome::Closed;
    record.flow = Some(flow.id());
    record.protocol = Some(judged.basis.protocol().to_owned());
    record.name = judged.name();
    record.dialed = judged.dialed;
    guest.trail.record(record);
}

/// Returns once the guest has reset the connection; or has sent its last byte, and none has passed
/// for long. Hyper sees neither while it waits for the far side.
async fn given_up(watched: Watcher, traffic: &Traffic, guest: &Guest) {
    if !watched.ended().await {
        tokio::select! {
            () = watched.failed() => {}
            () = traffic.quiet_for(guest.limits.half_closed, &guest.gate) => {}
        }
    }
}

impl Visit {
    /// One request, start to end.
    async fn serve(&self, request: Request<Incoming>) -> Answer {
        let begun = Instant::now();
        let (head, body) = request.into_parts();
        let text = refuse::wants_text(&head.headers);
        let old = head.version == Version::HTTP_10;
        let (seen, passed) = match self.notes.compare(&head, &body) {
            Ok(()) => {
                let seen = Seen::of(&head);
                let passed = self.pass(head, body, &seen).await;
                (seen, passed)
            }
            Err(fault) => {
                (Seen::default(), Err(Refused::fault(self.guest.policy.load().revision(), fault)))
            }
        };
        if !matches!(&passed, Ok(response) if response.status() == SWITCHING) {
            self.notes.resume();
        }
        let (mut answer, last) = match passed {
            Ok(response) => (response.map(Either::Left), old),
            Err(refused) => {
                let last = old || refused.last;
                (self.refuse(refused, &seen, text, begun).map(Either::Right), last)
            }
        };
        if last {
            answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        answer
    }

    /// Records a head that the library could not read, and has answered.
    fn unread(&self, error: &hyper::Error, begun: Instant) {
        let refusal = Refusal::because(Code::Undecidable, self.guest.policy.load().revision());
        let refusal = refusal.detailed(error);
        let status = StatusCode::BAD_REQUEST;
        let refused = Refused { refusal, status, last: true };
        self.refuse(refused, &Seen::default(), false, begun);
    }

    /// Records a refusal and makes the answer.
    fn refuse(
        &self,
        refused: Refused,
        seen: &Seen,
        text: bool,
        begun: Instant,
    ) -> Response<Full<Bytes>> {
        let Refused { refusal, status, .. } = refused;
        let mut record = self.guest.refused(Kind::Request, &refusal, self.destination);
        record.flow = Some(self.flow.id());
        record.protocol = Some("http".to_owned());
        record.name.clone_from(&seen.host);
        record.status = Some(status.as_u16());
        seen.note(&mut record);
        self.guest.trail.record(record.took(begun.elapsed()));
        let host = seen.host.as_deref().unwrap_or_default();
        refuse::response(&refusal, status, host, text)
    }

    /// Read, judge, dial or take the kept connection, judge again if the policy moved, record, send.
    async fn pass(
        &self,
        head: Parts,
        body: Incoming,
        seen: &Seen,
    ) -> Result<Response<Relayed>, Refused> {
        // Whatever becomes of the request, it is the first one's or nobody's.
        let early = self.early.take();
        let revision = self.guest.policy.load().revision();
        let fault = |fault| Refused::fault(revision, fault);
        let claim = Claim::read(&head, self.destination).map_err(fault)?;
        let told = || self.guest.told(self.destination.ip());
        // From here on the connection is judged by this request, and not by the one before it.
        self.relay.settle(self.guest.limits.half_closed).await;
        let mut passed = self.judge(&claim, claim.basis(&head.method, told))?;
        let handshake = Handshake::of(&head);
        if handshake.is_some() {
            passed = self.judge(&claim, claim.upgrade(told))?;
        }
        // What leads elsewhere is closed: by now a cut would not reach it.
        let early = early.filter(|early| early.target == *passed.permit.target());
        // Before it is dialled: what cannot be sent is no reason for a packet.
        let mut head = claim.outgoing(head, self.destination.port()).map_err(fault)?;
        if handshake.is_some() {
            upgrade::ask(&mut head.headers);
        }
        let mut far = match self.relay.take(&passed).await {
            Some(far) => far,
            None => match early {
                Some(early) => self.adopt(early, &passed).await?,
                None => self.dial(&mut passed).await?,
            },
        };
        far.may_switch(handshake.is_some());
        let mut ending = self.record(&mut passed, &far, seen)?;
        let request = far.request(head, body, &ending);
        let sent = far.sender.try_send_request(request).await;
        let response = match sent {
            Ok(response) => response,
            Err(mut failed) => match failed.take_message() {
                // Nothing of it was sent: the kept connection had just ended.
                Some(unsent) if far.used => {
                    let (head, body) = unsent.into_parts();
                    let body = body.into_body();
                    drop(ending);
                    self.relay.settle(self.guest.limits.half_closed).await;
                    far = self.dial(&mut passed).await?;
                    far.may_switch(handshake.is_some());
                    ending = self.record(&mut passed, &far, seen)?;
                    let request = far.request(head, body, &ending);
                    far.sender.send_request(request).await.map_err(|why| broken(&why, revision))?
                }
                _ => return Err(broken(failed.error(), revision)),
            },
        };
        let (mut head, body) = response.into_parts();
        let switches = head.status.is_informational();
        if switches && !handshake.is_some_and(|it| it.is_accepted(&head)) {
            return Err(wrong("it switched to a protocol that was not asked for", revision));
        }
        if !head::has_one_length(&head.headers) {
            return Err(wrong("it said twice how long its answer is", revision));
        }
        head::strip(&mut head.headers);
        head.version = Version::HTTP_11;
        let meter = far.meter.clone();
        if switches {
            upgrade::ask(&mut head.headers);
            self.switched.put(Switched { far, ending: Arc::clone(&ending) });
        } else {
            far.may_switch(false);
            self.relay.keep(far);
        }
        // Set once: there is one answer to an exchange.
        let _ = ending.status.set(head.status);
        let kept = Kept::new(&self.guest.gate, buffers::heap(self.flow.rank()));
        let body = Relayed::answer(&head.headers, body, &ending, &meter, kept);
        Ok(Response::from_parts(head, body))
    }

    fn judge(&self, claim: &Claim, basis: Basis) -> Result<Passed, Refusal> {
        self.guest.judge(&self.flow, basis, self.destination).map_err(|mut refusal| {
            // The names told for an address are none that the request says.
            let unsaid = matches!(refusal.code(), Code::NoRule | Code::Undecidable);
            if unsaid && matches!(claim.host, AuthorityHost::Address(_)) {
                refusal.denial.code = Code::NoName;
            }
            refusal
        })
    }

    async fn dial(&self, passed: &mut Passed) -> Result<Far, Refusal> {
        let dialed = self.guest.dial(&self.flow, passed).await?;
        self.over(dialed, None, passed).await
    }

    /// The far side that the guest is connected to already.
    async fn adopt(&self, early: Box<Early>, passed: &Passed) -> Result<Far, Refusal> {
        let mut far = self.over(early.dialed, Some(early.account), passed).await?;
        // It may have ended while the guest was silent, and has a record.
        far.used = true;
        Ok(far)
    }

    async fn over(
        &self,
        dialed: Dialed,
        account: Option<Account>,
        passed: &Passed,
    ) -> Result<Far, Refusal> {
        let attempt = dialed.attempt();
        self.relay.over(dialed, account, passed, &self.guest, &self.flow).await.map_err(|error| {
            let revision = passed.permit.revision();
            let refusal = Refusal::because(Code::UpstreamUnreachable, revision).detailed(error);
            refusal.after(attempt)
        })
    }

    /// The last look before the first byte, and the record of it.
    fn record(&self, passed: &mut Passed, far: &Far, seen: &Seen) -> Result<Arc<Ending>, Refusal> {
        let confirmed = self.guest.confirm(&self.flow, passed, far.dialed);
        confirmed.map_err(|refusal| refusal.after(far.untold()))?;
        let (guest, flow) = (&self.guest, &self.flow);
        let account = Account::open(guest, flow, Kind::Request, passed, far.egress, |record| {
            record.name = record.name.take().or_else(|| seen.host.clone());
            seen.note(record);
        });
        Ok(Ending::new(far, account, passed))
    }
}

impl<T> Once<T> {
    fn put(&self, value: T) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(value);
    }

    fn take(&self) -> Option<T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Seen {
    fn of(head: &Parts) -> Self {
        let host = head.headers.get(HOST).map(|host| {
            let host = String::from_utf8_lossy(host.as_bytes());
            match Authority::parse(&host).map(|authority| authority.host) {
                Ok(AuthorityHost::Name(name)) => name.to_string(),
                Ok(AuthorityHost::Address(address)) => address.to_string(),
                Err(_) => shown(&host),
            }
        });
        // What was judged and is sent, where there is such a form.
        let sent = head.uri.path();
        let path = canonical_path(sent).map_or_else(|| shown(sent), |path| shown(&path));
        Self { host, method: Some(shown(head.method.as_str())), path: Some(path) }
    }

    fn note(&self, record: &mut AuditRecord) {
        record.method.clone_from(&self.method);
        record.path.clone_from(&self.path);
    }
}

/// An exchange broke: by the guest's own body, which cannot be read, or at the far side.
fn broken(error: &hyper::Error, revision: Revision) -> Refused {
    if error.is_user() {
        let refusal = Refusal::because(Code::Undecidable, revision);
        let refusal = refusal.detailed("the body of the request cannot be read");
        return Refused { refusal, status: StatusCode::BAD_REQUEST, last: true };
    }
    Refusal::because(Code::UpstreamUnreachable, revision).detailed(error).into()
}

/// The far side answered what is no answer.
fn wrong(how: &str, revision: Revision) -> Refused {
    let refusal = Refusal::because(Code::UpstreamUnreachable, revision).detailed(how);
    Refused { last: true, ..refusal.into() }
}

impl From<Refusal> for Refused {
    fn from(refusal: Refusal) -> Self {
        let status = refuse::status(refusal.code());
        Self { refusal, status, last: false }
    }
}

impl Refused {
    /// For a head that cannot be passed on, whatever the policy.
    fn fault(revision: Revision, fault: Fault) -> Self {
        let refusal = Refusal::because(fault.code, revision).detailed(fault.detail);
        Self { refusal, status: fault.status, last: true }
    }
}
