//! Clear-text HTTP: every request judged by itself, and sent as it was judged.
//!
//! Both sides are ended here, one HTTP/1 connection with the guest and one with a far side at a time;
//! bytes are never passed through unread. Bodies stream both ways. Upgrades are not offered.

mod head;
mod relay;
mod wire;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::HOST;
use http::request::Parts;
use http::{Request, Response, StatusCode, Version};
use http_body_util::{Either, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use policy::audit::{AuditRecord, Kind, Outcome, shown};
use policy::name::{Authority, AuthorityHost};
use policy::{Code, Revision, canonical_path};
use socket2::SockRef;
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::time::Instant;

use crate::account::Account;
use crate::flows::{Cut, Flow};
use crate::guest::{Guest, Passed};
use crate::http::head::{Claim, Fault};
use crate::http::relay::{Ending, Far, Relay, Relayed};
use crate::http::wire::{Traffic, Wire};
use crate::refuse::{self, Refusal};

/// Between requests, and from the first to the last byte of a head.
const HEAD_TIME: Duration = Duration::from_secs(60);
/// Largest head of a request or response.
const HEAD_BYTES: usize = 64 * 1024;
/// The most that is held of each direction on each side, when the next to take it does not.
const BUFFER: usize = 2 * HEAD_BYTES;

type Answer = Response<Either<Relayed, Full<Bytes>>>;

/// One connection of a guest that speaks HTTP.
struct Visit {
    guest: Arc<Guest>,
    flow: Arc<Flow>,
    destination: SocketAddr,
    relay: Relay,
}

/// A request that is not let through: what the guest is told, and what is recorded.
struct Refused {
    refusal: Refusal,
    status: StatusCode,
}

/// What a request says of itself, fit for a record: its host canonical where it is one.
struct Seen {
    host: Option<String>,
    method: String,
    path: String,
}

/// Serves requests until either side is done, the connection is idle, or it is cut.
pub(crate) async fn serve(
    guest: Arc<Guest>,
    flow: Arc<Flow>,
    stream: TcpStream,
    flight: Bytes,
    destination: SocketAddr,
) {
    let begun = Instant::now();
    let idle = guest.limits.idle;
    let visit = Arc::new(Visit {
        guest: Arc::clone(&guest),
        flow: Arc::clone(&flow),
        destination,
        relay: Relay::default(),
    });
    let service = service_fn(move |request| {
        let visit = Arc::clone(&visit);
        async move { Ok::<_, Infallible>(visit.serve(request).await) }
    });
    let watched = watch(&stream);
    let wire = Wire::new(stream, flight);
    let traffic = wire.traffic();
    let mut conn = http1::Builder::new()
        .timer(TokioTimer::new())
        .half_close(true)
        .header_read_timeout(HEAD_TIME)
        .max_header_size(HEAD_BYTES)
        .max_buf_size(BUFFER)
        .serve_connection(TokioIo::new(wire), service);
    let ended = tokio::select! {
        biased;
        _ = flow.cut() => {
            severed(&guest, &flow);
            None
        }
        () = traffic.quiet_for(idle) => None,
        () = given_up(watched, &traffic, guest.limits.half_closed) => None,
        ended = &mut conn => Some(ended),
    };
    match ended {
        None => refuse::reset(conn.into_parts().io.into_inner().into_stream()),
        // It has been answered already: its head could not be read.
        Some(Err(error)) if error.is_parse() => {
            let refusal = Refusal::because(Code::Undecidable, guest.policy.load().revision());
            let refusal = refusal.detailed(&error);
            let mut record = guest.refused(Kind::Request, &refusal, destination);
            record.flow = Some(flow.id());
            record.protocol = Some("http".to_owned());
            let large = error.is_parse_too_large();
            let status = match large {
                true => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
                false => StatusCode::BAD_REQUEST,
            };
            record.status = Some(status.as_u16());
            guest.trail.record(record.took(begun.elapsed()));
        }
        Some(_) => {}
    }
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

/// The guest's socket once more, to see it end while hyper waits for the far side and looks nowhere
/// else. Dropped before the connection is over, or it would hold it open.
fn watch(stream: &TcpStream) -> Option<TcpStream> {
    let again = SockRef::from(stream).try_clone().ok()?;
    TcpStream::from_std(again.into()).ok()
}

/// Returns once the guest has reset the connection; or has sent its last byte, and none has passed
/// for `patience`.
async fn given_up(watched: Option<TcpStream>, traffic: &Traffic, patience: Duration) {
    let Some(stream) = watched else { return std::future::pending().await };
    // The end of what the guest sends shows here too, what it sends does not.
    let ended = stream.ready(Interest::PRIORITY | Interest::ERROR).await;
    if ended.is_ok_and(|ready| !ready.is_error() && !ready.is_write_closed()) {
        tokio::select! {
            _ = stream.ready(Interest::ERROR) => {}
            () = traffic.quiet_for(patience) => {}
        }
    }
}

impl Visit {
    /// One request, start to end.
    async fn serve(&self, request: Request<Incoming>) -> Answer {
        let begun = Instant::now();
        let (head, body) = request.into_parts();
        let text = refuse::wants_text(&head.headers);
        let seen = Seen::of(&head);
        let refused = match self.pass(head, body, &seen).await {
            Ok(response) => return response.map(Either::Left),
            Err(refused) => refused,
        };
        let Refused { refusal, status } = refused;
        let mut record = self.guest.refused(Kind::Request, &refusal, self.destination);
        record.flow = Some(self.flow.id());
        record.protocol = Some("http".to_owned());
        record.name.clone_from(&seen.host);
        record.status = Some(status.as_u16());
        seen.note(&mut record);
        self.guest.trail.record(record.took(begun.elapsed()));
        let host = seen.host.as_deref().unwrap_or_default();
        refuse::response(&refusal, status, host, text).map(Either::Right)
    }

    /// Read, judge, dial or take the kept connection, judge again if the policy moved, record, send.
    async fn pass(
        &self,
        head: Parts,
        body: Incoming,
        seen: &Seen,
    ) -> Result<Response<Relayed>, Refused> {
        let revision = self.guest.policy.load().revision();
        let fault = |fault: Fault| Refused {
            refusal: Refusal::because(fault.code, revision).detailed(fault.detail),
            status: fault.status,
        };
        let claim = Claim::read(&head, self.destination).map_err(fault)?;
        let basis = claim.basis(&head.method);
        let mut passed = self.guest.judge(&self.flow, basis, self.destination)?;
        let mut far = match self.relay.take(&passed).await {
            Some(far) => far,
            None => self.dial(&passed).await?,
        };
        let head = claim.outgoing(head, self.destination.port()).map_err(fault)?;
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
                    far = self.dial(&passed).await?;
                    ending = self.record(&mut passed, &far, seen)?;
                    let request = far.request(head, body, &ending);
                    far.sender.send_request(request).await.map_err(|why| broken(&why, revision))?
                }
                _ => return Err(broken(failed.error(), revision)),
            },
        };
        self.relay.keep(far);
        let (mut head, body) = response.into_parts();
        if head.status.is_informational() {
            let refusal = Refusal::because(Code::UpstreamUnreachable, revision);
            return Err(refusal.detailed("it switched protocols without being asked").into());
        }
        head::strip(&mut head.headers);
        head.version = Version::HTTP_11;
        // Set once: there is one answer to an exchange.
        let _ = ending.status.set(head.status);
        Ok(Response::from_parts(head, Relayed::new(body, &ending)))
    }

    async fn dial(&self, passed: &Passed) -> Result<Far, Refusal> {
        let dialed = self.guest.dialer.dial(&passed.policy, &passed.permit).await?;
        Far::over(dialed, passed, &self.guest, &self.flow).await.map_err(|error| {
            Refusal::because(Code::UpstreamUnreachable, passed.permit.revision()).detailed(error)
        })
    }

    /// The last look before the first byte, and the record of it.
    fn record(&self, passed: &mut Passed, far: &Far, seen: &Seen) -> Result<Arc<Ending>, Refusal> {
        self.guest.confirm(&self.flow, passed, far.dialed)?;
        let (guest, flow) = (&self.guest, &self.flow);
        let account = Account::open(guest, flow, Kind::Request, passed, far.egress, |record| {
            record.name = record.name.take().or_else(|| seen.host.clone());
            seen.note(record);
        });
        Ok(Ending::new(far, account, passed))
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
        Self { host, method: shown(head.method.as_str()), path }
    }

    fn note(&self, record: &mut AuditRecord) {
        record.method = Some(self.method.clone());
        record.path = Some(self.path.clone());
    }
}

/// An exchange broke: by the guest's own body, which cannot be read, or at the far side.
fn broken(error: &hyper::Error, revision: Revision) -> Refused {
    if error.is_user() {
        let refusal = Refusal::because(Code::Undecidable, revision);
        let refusal = refusal.detailed("the body of the request cannot be read");
        return Refused { refusal, status: StatusCode::BAD_REQUEST };
    }
    Refusal::because(Code::UpstreamUnreachable, revision).detailed(error).into()
}

impl From<Refusal> for Refused {
    fn from(refusal: Refusal) -> Self {
        let status = refuse::status(refusal.code());
        Self { refusal, status }
    }
}
