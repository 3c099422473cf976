//! One connection of a guest, start to end: the only file that knows the order.
//!
//! Register, read the first flight, judge, dial, judge again if the policy moved, record, carry,
//! record. Before it is judged nothing of it leaves; what is refused is refused at once.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fault::Point;
use policy::audit::Kind;
use policy::{Code, Verdict};
use tokio::net::TcpStream;
use tokio::time::Instant;

use crate::accept::Incoming;
use crate::account::Account;
use crate::buffers;
use crate::dial::Dialed;
use crate::flows::{Basis, Cut, Flow};
use crate::guest::{Guest, Passed};
use crate::http::{self, Early};
use crate::meter::Meter;
use crate::questions;
use crate::refuse::{self, Refusal};
use crate::side::GuestSide;
use crate::sniff::{Sniffed, Sniffer};
use crate::tunnel::tunnel;

/// How long a guest may be silent on a port whose server may speak first, before we dial for it.
const SERVER_FIRST: Duration = Duration::from_millis(30);
/// How long a guest may be silent on such a port when only a name that it has yet to say could let it
/// through: who waits for the server to speak is refused, too, and is told so at once.
const UNNAMED: Duration = Duration::from_secs(1);
/// One read of a first flight; a post-quantum hello is about 1.8 kB.
const SEGMENT: usize = 4096;

/// Where a connection goes after its first flight.
enum Way {
    /// Through, as bytes.
    Tunnel(Box<Open>, Bytes),
    /// Through, request by request, the first over what was dialled for the guest's silence.
    Requests(Bytes, Option<Box<Early>>),
}

/// A connection to the far side.
struct Open {
    passed: Passed,
    dialed: Dialed,
    account: Account,
}

impl From<Box<Open>> for Early {
    fn from(open: Box<Open>) -> Self {
        let Open { passed, dialed, account } = *open;
        Self { dialed, target: passed.permit.target().clone(), account }
    }
}

/// Who speaks first, and what was dialled before that is known.
enum Opening {
    Guest(Option<Box<Open>>),
    Server(Box<Open>),
}

/// A refusal, and in which protocol the guest is told.
struct Refused {
    refusal: Refusal,
    protocol: &'static str,
    name: Option<String>,
}

/// Carries one connection from accept to its end.
pub(crate) async fn serve(guest: Arc<Guest>, incoming: Incoming) {
    // The router's own time counts from when the guest has said enough.
    let mut heard = Instant::now();
    let Incoming { stream, destination } = incoming;
    fault::at(Point::ConnectionTaken);
    let Some(flow) = guest.flows.register().map(Arc::new) else {
        let refusal = Refusal::because(Code::Limit, guest.policy.load().revision());
        let mut record = guest.refused(Kind::Connection, &refusal, destination);
        record.protocol = Some("tcp".to_owned());
        guest.trail.record(record.took(heard.elapsed()));
        return refuse::reset(stream);
    };
    buffers::bound(&stream, flow.rank());
    let mut stream = GuestSide::new(stream, &guest.gate, flow.id());
    if destination.port() == questions::PORT {
        return Box::pin(converse(&guest, &flow, stream, destination)).await;
    }
    // Boxed, so that an open connection does not keep the memory of its beginning.
    let way = tokio::select! {
        biased;
        cut = flow.cut() => match cut {
            Cut::Denied(denial) => Err(Refused::tcp(Refusal::changed(denial))),
            Cut::Detached => return stream.reset(),
        },
        way = Box::pin(decide(&guest, &flow, &mut stream, destination, &mut heard)) => way,
    };
    fault::at(Point::ConnectionDecided);
    match way {
        Ok(Way::Tunnel(open, flight)) => {
            // The policy it passed by is let go: it may be replaced long before this ends.
            let Open { dialed, account, passed } = *open;
            let Dialed { stream: far, port, remote, .. } = dialed;
            let meter = guest.meter.towards(&passed.judged.place(remote));
            drop(passed);
            carry(&guest, &flow, stream, far, (Box::new(account), meter), flight).await;
            drop(port);
        }
        Ok(Way::Requests(flight, early)) => {
            Box::pin(http::serve(guest, flow, stream, (flight, early), destination)).await;
        }
        Err(Refused { refusal, protocol, name }) => {
            let mut record = guest.refused(Kind::Connection, &refusal, destination);
            record.flow = Some(flow.id());
            record.protocol = Some(protocol.to_owned());
            record.name = name;
            guest.trail.record(record.took(heard.elapsed()));
            let told = protocol == "tls"
                && tokio::select! {
                    biased;
                    _ = flow.cut() => false,
                    told = Box::pin(refuse::alert(&mut stream)) => told,
                };
            if !told {
                stream.reset();
            }
        }
    }
}

/// Questions over TCP. Each is judged and recorded by the dns room.
async fn converse(guest: &Guest, flow: &Flow, mut stream: GuestSide, asked: SocketAddr) {
    let cut = tokio::select! {
        biased;
        _ = flow.cut() => true,
        ended = async {
            let served = guest.dns.serve_stream(&mut stream, asked).await;
            served.is_err() || !refuse::linger(&mut stream).await
        } => ended,
    };
    if cut {
        stream.reset();
    }
}

/// From the first byte to a way through or a refusal.
async fn decide(
    guest: &Arc<Guest>,
    flow: &Arc<Flow>,
    stream: &mut GuestSide,
    destination: SocketAddr,
    heard: &mut Instant,
) -> Result<Way, Refused> {
    let unnamed = Basis::Pinned(guest.told(destination.ip()));
    let early = match opening(guest, flow, stream, destination, &unnamed).await? {
        Opening::Server(open) => return Ok(Way::Tunnel(open, Bytes::new())),
        Opening::Guest(early) => early,
    };
    let most = buffers::heap(flow.rank());
    let (sniffed, flight) = first_flight(stream, guest.limits.first_flight, most).await;
    *heard = Instant::now();
    let revision = guest.policy.load().revision();
    let (basis, tls) = match (sniffed, early.as_ref()) {
        (Sniffed::Http, _) => {
            return Ok(Way::Requests(flight, early.map(|open| Box::new(Early::from(open)))));
        }
        (Sniffed::Tls(hello), _) => match hello.sni.host() {
            Ok(sni) => (Basis::Tls { sni: sni.clone(), ech: hello.ech.is_some() }, true),
            // Without a name it is bytes like any others; a name that is none is refused.
            Err(Code::NoName) => (unnamed, true),
            Err(code) => return Err(Refused::tls(Refusal::because(code, revision), None)),
        },
        (Sniffed::Other, _) => (unnamed, false),
        // The guest is done before it has said anything, and may still listen.
        (Sniffed::NeedMore, Some(_)) if flight.is_empty() => (unnamed, false),
        (Sniffed::NeedMore, _) => {
            let refusal = Refusal::because(Code::Undecidable, revision);
            return Err(Refused::tcp(refusal.detailed("its first bytes did not come, or not all")));
        }
        (Sniffed::Http2, _) => {
            let refusal = Refusal::because(Code::Protocol, revision);
            return Err(Refused::tcp(refusal.detailed("HTTP/2 in clear")));
        }
        (Sniffed::Undecidable(flaw), _) => {
            let refusal = Refusal::because(Code::Undecidable, revision);
            return Err(Refused::tls(refusal.detailed(flaw), None));
        }
    };
    let refused = |mut refusal: Refusal, name: Option<String>| match (tls, refusal.code()) {
        (false, _) => Refused::tcp(refusal),
        (true, Code::NoRule | Code::Undecidable) if name.is_none() => {
            refusal.denial.code = Code::NoName;
            Refused::tls(refusal, name)
        }
        (true, _) => Refused::tls(refusal, name),
    };
    let name = match &basis {
        Basis::Tls { sni, .. } => Some(sni.as_str().to_owned()),
        _ => None,
    };
    let mut passed = match guest.judge(flow, basis, destination) {
        Ok(passed) => passed,
        Err(refusal) => return Err(refused(refusal, name)),
    };
    // What was dialled for a silent guest serves it still, when its words lead to the same place.
    let open = match early {
        Some(mut open) if open.passed.permit.target() == passed.permit.target() => {
            let confirmed = guest.confirm(flow, &mut passed, open.dialed.remote);
            open.passed = passed;
            confirmed.map(|()| open)
        }
        // To another place: by now it is judged by that one, and a cut would not reach the first.
        elsewhere => {
            drop(elsewhere);
            open(guest, flow, passed).await.map(Box::new)
        }
    };
    match open {
        Ok(open) => Ok(Way::Tunnel(open, flight)),
        Err(refusal) => Err(refused(refusal, name)),
    }
}

/// Finds out who speaks first, and refuses where nothing that is said could matter.
///
/// Where a rule names the port for a name the guest was told, the server may speak first: a guest
/// that stays silent is connected, and then either may. However long that takes, a guest that is first
/// after all is read: a guess after a while would let requests through unread.
async fn opening(
    guest: &Arc<Guest>,
    flow: &Arc<Flow>,
    stream: &GuestSide,
    destination: SocketAddr,
    unnamed: &Basis,
) -> Result<Opening, Refused> {
    // On the ports of the web the client speaks first, and its name is read to tell why not.
    if matches!(destination.port(), 80 | 443) {
        return Ok(Opening::Guest(None));
    }
    let policy = guest.policy.load();
    match unnamed.judge(&policy, destination) {
        Verdict::Deny(denial) | Verdict::Undecidable(denial) => {
            let may_be_named = policy.names_port(destination.port())
                && guest.gate.within(UNNAMED, stream.spoken()).await.is_some();
            return match may_be_named {
                true => Ok(Opening::Guest(None)),
                false => Err(Refused::tcp(denial.into())),
            };
        }
        Verdict::Pass(_) if guest.gate.within(SERVER_FIRST, stream.spoken()).await.is_some() => {
            return Ok(Opening::Guest(None));
        }
        Verdict::Pass(_) => {}
    }
    let passed = guest.judge(flow, unnamed.clone(), destination).map_err(Refused::tcp)?;
    let open = Box::new(open(guest, flow, passed).await.map_err(Refused::tcp)?);
    let begun = Instant::now();
    tokio::select! {
        biased;
        () = stream.spoken() => Ok(Opening::Guest(Some(open))),
        () = spoken(&open.dialed.stream) => Ok(Opening::Server(open)),
        () = guest.gate.quiet(guest.limits.idle, || begun) => {
            let refusal = Refusal::because(Code::Undecidable, open.passed.permit.revision());
            Err(Refused::tcp(refusal.detailed("neither side said anything")))
        }
    }
}

/// Dials what was let through, judges again if the policy moved, and records, before any payload
/// byte leaves.
async fn open(guest: &Arc<Guest>, flow: &Arc<Flow>, mut passed: Passed) -> Result<Open, Refusal> {
    let dialed = guest.dial(flow, &mut passed).await?;
    let confirmed = guest.confirm(flow, &mut passed, dialed.remote);
    confirmed.map_err(|refusal| refusal.after(dialed.attempt()))?;
    let account = Account::open(guest, flow, Kind::Connection, &passed, dialed.egress, |_| ());
    Ok(Open { passed, dialed, account })
}

/// Returns once there is a byte to read, or there will be none. Readiness alone may be false.
async fn spoken(stream: &TcpStream) {
    let _ = stream.peek(&mut [0]).await;
}

/// Reads until the bytes settle what they are; `NeedMore` when the guest is done, or late, before
/// that.
async fn first_flight(stream: &GuestSide, patience: Duration, most: usize) -> (Sniffed, Bytes) {
    let mut sniffer = Sniffer::bounded(most);
    let hear = async {
        let mut segment = [0; SEGMENT];
        loop {
            let length = stream.read(&mut segment).await.unwrap_or_default();
            let sniffed = sniffer.feed(segment.get(..length).unwrap_or_default());
            if length == 0 || sniffed != Sniffed::NeedMore {
                return sniffed;
            }
        }
    };
    let sniffed = stream.gate().within(patience, hear).await.unwrap_or(Sniffed::NeedMore);
    (sniffed, sniffer.into_flight())
}

/// Carries bytes until either side ends it or it is cut.
async fn carry(
    guest: &Guest,
    flow: &Flow,
    stream: GuestSide,
    far: TcpStream,
    (mut account, meter): (Box<Account>, Meter),
    flight: Bytes,
) {
    let cut = async {
        flow.cut().await;
    };
    let Guest { limits, pool, .. } = guest;
    let ended = tunnel(stream, far, flight, limits, &meter, pool, cut).await;
    account.record.bytes_out = Some(ended.bytes_out);
    account.record.bytes_in = Some(ended.bytes_in);
    account.record.detail = ended.why.detail().map(str::to_owned);
}

impl Refused {
    fn tcp(refusal: Refusal) -> Self {
        Self { refusal, protocol: "tcp", name: None }
    }

    fn tls(refusal: Refusal, name: Option<String>) -> Self {
        Self { refusal, protocol: "tls", name }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a connection's task holds, beside what it points to.
    fn size<F>(_: impl Fn(Arc<Guest>, Incoming) -> F) -> usize {
        size_of::<F>()
    }

    #[test]
    fn an_open_connection_is_a_small_task() {
        assert!(size(serve) <= 4096, "{} bytes", size(serve));
    }
}
