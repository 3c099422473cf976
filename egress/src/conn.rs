//! One connection of a guest, start to end: the only file that knows the order.
//!
//! Register, read the first flight, judge, dial, judge again if the policy moved, record, carry,
//! record. Before it is judged nothing of it leaves; what is refused is refused at once.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use policy::audit::{AuditRecord, Kind, Outcome, shown};
use policy::{Code, Verdict};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

use crate::accept::Incoming;
use crate::dial::Dialed;
use crate::flows::{Basis, Cut, Flow};
use crate::guest::{Guest, Passed};
use crate::http;
use crate::questions;
use crate::refuse::{self, Refusal};
use crate::sniff::{Sniffed, Sniffer};
use crate::tunnel::{Why, tunnel};

/// How long a guest may be silent on a port whose server may speak first, before we dial for it.
const SERVER_FIRST: Duration = Duration::from_millis(30);
/// One read of a first flight; a post-quantum hello is about 1.8 kB.
const SEGMENT: usize = 4096;

/// Where a connection goes after its first flight.
enum Way {
    /// Through, as bytes.
    Tunnel(Box<Open>, Bytes),
    /// Through, request by request.
    Requests(Bytes),
}

/// A connection to the far side that was recorded.
struct Open {
    passed: Passed,
    dialed: Dialed,
    record: AuditRecord,
}

/// A refusal, and how the guest is told.
struct Refused {
    refusal: Refusal,
    protocol: &'static str,
    name: Option<String>,
}

/// Carries one connection from accept to its end.
pub(crate) async fn serve(guest: Arc<Guest>, incoming: Incoming) {
    let begun = Instant::now();
    let Incoming { mut stream, destination } = incoming;
    let Some(flow) = guest.flows.register() else {
        let refusal = Refusal::because(Code::Limit, guest.policy.load().revision());
        let mut record = guest.refused(Kind::Connection, &refusal, destination);
        record.protocol = Some("tcp".to_owned());
        guest.trail.record(record.took(begun.elapsed()));
        return refuse::reset(stream);
    };
    if destination.port() == questions::PORT {
        return converse(&guest, &flow, stream, destination).await;
    }
    // Boxed, so that an open connection does not keep the memory of its beginning.
    let way = tokio::select! {
        biased;
        cut = flow.cut() => match cut {
            Cut::Denied(denial) => Err(Refused::tcp(Refusal::changed(denial))),
            Cut::Detached => return refuse::reset(stream),
        },
        way = Box::pin(decide(&guest, &flow, &mut stream, destination)) => way,
    };
    match way {
        Ok(Way::Tunnel(open, flight)) => carry(&guest, &flow, stream, *open, flight).await,
        Ok(Way::Requests(flight)) => {
            Box::pin(http::serve(guest, flow, stream, flight, destination)).await;
        }
        Err(Refused { refusal, protocol, name }) => {
            let mut record = guest.refused(Kind::Connection, &refusal, destination);
            record.flow = Some(flow.id());
            record.protocol = Some(protocol.to_owned());
            record.name = name;
            guest.trail.record(record.took(begun.elapsed()));
            let told = protocol == "tls"
                && tokio::select! {
                    biased;
                    _ = flow.cut() => false,
                    told = refuse::alert(&mut stream) => told,
                };
            if !told {
                refuse::reset(stream);
            }
        }
    }
}

/// Questions over TCP. Each is judged and recorded by the dns room.
async fn converse(guest: &Guest, flow: &Flow, mut stream: TcpStream, asked: SocketAddr) {
    let cut = tokio::select! {
        biased;
        _ = flow.cut() => true,
        served = guest.dns.serve_stream(&mut stream, asked) => served.is_err(),
    };
    if cut {
        refuse::reset(stream);
    }
}

/// From the first byte to a way through or a refusal.
async fn decide(
    guest: &Guest,
    flow: &Flow,
    stream: &mut TcpStream,
    destination: SocketAddr,
) -> Result<Way, Refused> {
    let deadline = Instant::now() + guest.limits.first_flight;
    let web = matches!(destination.port(), 80 | 443);
    let unnamed = Basis::Pinned(guest.told(destination.ip()));
    let policy = guest.policy.load();
    let server_first = match unnamed.judge(&policy, destination) {
        Verdict::Pass(_) => !web,
        // Nothing the guest could say on this port would be let through, so nothing is waited for.
        // On the ports of the web its name is read all the same, to tell why.
        Verdict::Deny(denial) | Verdict::Undecidable(denial)
            if !web && !policy.names_port(destination.port()) =>
        {
            return Err(Refused::tcp(denial.into()));
        }
        _ => false,
    };

    let mut early = None;
    if server_first && timeout(SERVER_FIRST, spoken(stream)).await.is_err() {
        let open = open(guest, flow, unnamed.clone(), destination).await.map_err(Refused::tcp)?;
        let guest_spoke = tokio::select! {
            biased;
            () = spoken(stream) => true,
            () = spoken(&open.dialed.stream) => false,
            () = sleep_until(deadline) => false,
        };
        if !guest_spoke {
            return Ok(Way::Tunnel(Box::new(open), Bytes::new()));
        }
        early = Some(open);
    }

    let mut sniffer = Sniffer::new();
    let sniffed = match timeout_at(deadline, hear(stream, &mut sniffer)).await {
        Ok(Ok(sniffed)) => sniffed,
        Ok(Err(_)) | Err(_) => Sniffed::NeedMore,
    };
    let flight = sniffer.into_flight();
    let undecidable = |why: &dyn ToString| {
        Refusal::because(Code::Undecidable, policy.revision()).detailed(why.to_string())
    };
    let (basis, sni) = match sniffed {
        Sniffed::NeedMore => match early {
            // The guest is done before it has said anything, and may still listen.
            Some(open) if flight.is_empty() => {
                return Ok(Way::Tunnel(Box::new(open), flight));
            }
            early => {
                guest.unused(early);
                return Err(Refused::tcp(undecidable(&"the first bytes did not come, or not all")));
            }
        },
        Sniffed::Http => {
            guest.unused(early);
            return Ok(Way::Requests(flight));
        }
        Sniffed::Http2 => {
            guest.unused(early);
            let refusal = Refusal::because(Code::Protocol, policy.revision());
            return Err(Refused::tcp(refusal.detailed("HTTP/2 in clear")));
        }
        Sniffed::Undecidable(flaw) => {
            guest.unused(early);
            return Err(Refused::tls(undecidable(&flaw), None));
        }
        Sniffed::Other => (unnamed, None),
        Sniffed::Tls(hello) => match hello.sni.host() {
            Ok(sni) => (Basis::Tls { sni: sni.clone(), ech: hello.ech.is_some() }, None),
            // Without a name it is bytes like any others; a name that is none is refused.
            Err(Code::NoName) => (unnamed, Some(Code::NoName)),
            Err(code) => {
                guest.unused(early);
                let name = shown(&format!("{:?}", hello.sni));
                let refusal = Refusal::because(code, policy.revision());
                return Err(Refused::tls(refusal, Some(name)));
            }
        },
    };
    let tls = sni.is_some() || matches!(basis, Basis::Tls { .. });
    let name = match &basis {
        Basis::Tls { sni, .. } => Some(sni.as_str().to_owned()),
        _ => None,
    };
    let refused = |mut refusal: Refusal| {
        if let (Some(code), Code::NoRule) = (sni, refusal.code()) {
            refusal.denial.code = code;
        }
        if tls { Refused::tls(refusal, name.clone()) } else { Refused::tcp(refusal) }
    };
    if let Some(mut open) = early {
        // What was dialled for a silent guest serves it still, when its words lead to the same place.
        match guest.judge(flow, basis.clone(), destination) {
            Ok(mut passed) if passed.permit.target() == open.passed.permit.target() => {
                guest.confirm(flow, &mut passed, open.dialed.remote).map_err(&refused)?;
                open.passed = passed;
                return Ok(Way::Tunnel(Box::new(open), flight));
            }
            _ => guest.unused(Some(open)),
        }
    }
    let open = open(guest, flow, basis, destination).await.map_err(refused)?;
    Ok(Way::Tunnel(Box::new(open), flight))
}

/// Judges, dials, judges again if the policy moved, and records, before any payload byte leaves.
async fn open(
    guest: &Guest,
    flow: &Flow,
    basis: Basis,
    destination: SocketAddr,
) -> Result<Open, Refusal> {
    let mut passed = guest.judge(flow, basis, destination)?;
    let dialed = guest.dialer.dial(&passed.policy, &passed.permit).await?;
    guest.confirm(flow, &mut passed, dialed.remote)?;
    let record = guest.passed(Kind::Connection, flow, &passed, dialed.egress);
    guest.trail.record(record.clone());
    Ok(Open { passed, dialed, record })
}

/// Returns once there is a byte to read, or there will be none. Readiness alone may be false.
async fn spoken(stream: &TcpStream) {
    let _ = stream.peek(&mut [0]).await;
}

/// Reads until the bytes settle what they are; `NeedMore` when the guest is done before that.
async fn hear(stream: &mut TcpStream, sniffer: &mut Sniffer) -> io::Result<Sniffed> {
    let mut segment = [0; SEGMENT];
    loop {
        let length = stream.read(&mut segment).await?;
        let sniffed = sniffer.feed(segment.get(..length).unwrap_or_default());
        if length == 0 || sniffed != Sniffed::NeedMore {
            return Ok(sniffed);
        }
    }
}

/// Carries bytes until either side ends it or it is cut, and records what it came to.
async fn carry(guest: &Guest, flow: &Flow, stream: TcpStream, open: Open, flight: Bytes) {
    let begun = Instant::now();
    let Open { dialed, mut record, .. } = open;
    let cut = async {
        flow.cut().await;
    };
    let Guest { limits, meter, pool, .. } = guest;
    let ended = tunnel(stream, dialed.stream, flight, limits, meter, pool, cut).await;
    record.time = SystemTime::now();
    record.outcome = Outcome::Closed;
    record.bytes_out = Some(ended.bytes_out);
    record.bytes_in = Some(ended.bytes_in);
    record.detail = match ended.why {
        Why::Closed | Why::Revoked => None,
        Why::GuestReset => Some("reset by the guest".to_owned()),
        Why::FarReset => Some("reset by the far side".to_owned()),
        Why::Idle => Some("idle".to_owned()),
    };
    if let Some(Cut::Denied(denial)) = flow.was_cut() {
        refuse::note(&mut record, &Refusal::changed(denial.clone()));
    }
    guest.trail.record(record.took(begun.elapsed()));
}

impl Guest {
    /// Closes what was dialled for a silent guest and then not used; its record gets its end.
    fn unused(&self, open: Option<Open>) {
        if let Some(Open { mut record, .. }) = open {
            record.outcome = Outcome::Closed;
            record.bytes_out = Some(0);
            self.trail.record(record);
        }
    }
}

impl Refused {
    fn tcp(refusal: Refusal) -> Self {
        Self { refusal, protocol: "tcp", name: None }
    }

    fn tls(refusal: Refusal, name: Option<String>) -> Self {
        Self { refusal, protocol: "tls", name }
    }
}
