//! The router in network namespaces: a real guest stack, a real fence, a real internet to compare.
//!
//! Needs root. Each refusal looks at the far side, and has its positive control on the same path.
#![expect(
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a test ends where the world is not as it must be"
)]

mod stuck;
mod asleep;
mod buried;
mod datagrams;
mod peers;
mod place;
mod requests;
mod corpus;
mod desync;
mod heads;
mod keepalives;
mod leftover;
mod names;
mod endings;
mod exchanges;
mod responses;
mod trouble;
mod upgrades;
mod unwoken;
mod unread;

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use peers::{Tls, count, serve, sink, soon, until};
use place::{EGRESS, ORIGIN, SINK, run};
use policy::Code;
use policy::audit::{Kind, Outcome};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Less than a router waits here for first words, and far more than a slow machine stands still.
const AT_ONCE: Duration = Duration::from_secs(20);

const RULES: &str = r#"
[[rule]]
allow = ["api.example.com"]
[[rule]]
allow = ["mail.example.com"]
ports = [2525]
"#;

#[test]
fn an_allowed_tls_name_passes_and_leaves_from_the_egress_address() {
    run(RULES, async |place| {
        let tls = Tls::new(&["api.example.com"]);
        let seen = tls.echo(place.origin(ORIGIN, 443));
        let stream = soon(place.dial(ORIGIN, 443)).await.expect("connected");
        let mut stream = soon(tls.client(stream, "api.example.com")).await.expect("a handshake");
        stream.write_all(b"hello").await.expect("sent");
        stream.shutdown().await.expect("closed");
        let mut back = Vec::new();
        soon(stream.read_to_end(&mut back)).await.expect("read");
        assert_eq!(back, b"hello");

        let peer = seen.lock().expect("unpoisoned")[0];
        assert_eq!(peer.ip(), IpAddr::from(EGRESS));
        let allow = place.record(|r| r.kind == Kind::Connection).await;
        assert_eq!(allow.outcome, Outcome::Allow);
        assert_eq!(allow.egress, Some(peer), "the audit names the port the far side saw");
        assert_eq!(allow.dialed, Some(SocketAddr::from((ORIGIN, 443))));
        assert_eq!(allow.name.as_deref(), Some("api.example.com"));
        let closed = place.record(|r| r.outcome == Outcome::Closed).await;
        assert_eq!(closed.flow, allow.flow);
        assert!(closed.bytes_out > Some(200) && closed.bytes_in > Some(500), "{closed:?}");
    });
}

/// Attack P02. In TLS; HTTP in `every_request_of_a_connection_is_judged_by_itself`.
#[test]
fn an_allowed_name_sent_to_a_foreign_address_goes_where_we_resolve_it() {
    run(RULES, async |place| {
        let tls = Tls::new(&["api.example.com"]);
        let origin = tls.echo(place.origin(ORIGIN, 443));
        let sink = sink(place.origin(SINK, 443));
        let stream = soon(place.dial(SINK, 443)).await.expect("connected");
        soon(tls.client(stream, "api.example.com")).await.expect("the origin's certificate");
        assert_eq!((count(&origin), count(&sink)), (1, 0));
        let allow = place.record(|r| r.kind == Kind::Connection).await;
        assert_eq!(allow.destination, Some(SocketAddr::from((SINK, 443))));
        assert_eq!(allow.dialed, Some(SocketAddr::from((ORIGIN, 443))));
    });
}

#[test]
fn a_denied_tls_name_gets_an_alert_at_once_and_nothing_leaves() {
    run(RULES, async |place| {
        let tls = Tls::new(&["api.example.com", "evil.example.com"]);
        let origin = tls.echo(place.origin(ORIGIN, 443));
        let stream = soon(place.dial(ORIGIN, 443)).await.expect("connected");
        let begun = Instant::now();
        let refused = soon(tls.client(stream, "evil.example.com")).await.expect_err("refused");
        assert!(refused.to_string().contains("AccessDenied"), "{refused}");
        assert!(begun.elapsed() < AT_ONCE);
        assert_eq!(count(&origin), 0);
        assert!(place.asked.lock().expect("unpoisoned").is_empty(), "a resolver was asked");
        let deny = place.record(|r| r.kind == Kind::Connection).await;
        assert_eq!((deny.outcome, deny.code), (Outcome::Deny, Some(Code::NoRule)));
        assert_eq!(deny.name.as_deref(), Some("evil.example.com"));

        let stream = soon(place.dial(ORIGIN, 443)).await.expect("connected");
        soon(tls.client(stream, "api.example.com")).await.expect("the control");
        assert_eq!(count(&origin), 1);
    });
}

#[test]
fn bytes_that_carry_no_name_are_reset_and_nothing_leaves() {
    run(RULES, async |place| {
        let (web, other) = (sink(place.origin(SINK, 443)), sink(place.origin(SINK, 22)));
        for port in [443, 22] {
            let begun = Instant::now();
            assert!(is_reset(&place, SINK, port, b"SSH-2.0-client\r\n").await, "port {port}");
            assert!(begun.elapsed() < AT_ONCE, "port {port}");
            let deny = place.record(|r| r.kind == Kind::Connection).await;
            assert_eq!((deny.outcome, deny.code), (Outcome::Deny, Some(Code::NoName)));
        }
        assert_eq!((count(&web), count(&other)), (0, 0));
    });
}

/// Connects, says something, and is reset before anything comes back; a reset may come so early
/// that connecting already reports it.
async fn is_reset(place: &place::Place, address: Ipv4Addr, port: u16, words: &[u8]) -> bool {
    let talk = async {
        let mut stream = place.dial(address, port).await?;
        let _ = stream.write_all(words).await;
        stream.read_u8().await
    };
    soon(talk).await.is_err_and(|error| error.kind() == ErrorKind::ConnectionReset)
}

#[test]
fn a_silent_guest_is_refused_at_once_where_no_rule_names_the_port() {
    run(RULES, async |place| {
        let begun = Instant::now();
        assert!(is_reset(&place, SINK, 22, b"").await);
        assert!(begun.elapsed() < AT_ONCE);
    });
}

#[test]
fn a_server_that_speaks_first_is_reached_by_the_name_the_guest_was_told() {
    run(RULES, async |place| {
        let seen = serve(place.origin(ORIGIN, 2525), async |mut stream| {
            let _ = stream.write_all(b"220 ready\r\n").await;
            let mut line = [0; 64];
            if let Ok(n) = stream.read(&mut line).await {
                let _ = stream.write_all(&line[..n]).await;
            }
        });
        assert!(is_reset(&place, ORIGIN, 2525, b"").await, "no name was told yet");
        assert_eq!(count(&seen), 0);

        ask(&place, Ipv4Addr::new(169, 254, 100, 1), "mail.example.com").await;
        let mut stream = soon(place.dial(ORIGIN, 2525)).await.expect("connected");
        let mut banner = [0; 11];
        soon(stream.read_exact(&mut banner)).await.expect("a banner");
        assert_eq!(&banner, b"220 ready\r\n");
        stream.write_all(b"QUIT").await.expect("sent");
        let mut echo = [0; 4];
        soon(stream.read_exact(&mut echo)).await.expect("an echo");
        let allow =
            place.record(|r| r.outcome == Outcome::Allow && r.kind == Kind::Connection).await;
        assert_eq!(allow.name.as_deref(), Some("mail.example.com"));
    });
}

#[test]
fn a_question_to_any_address_is_answered_from_that_address() {
    run(RULES, async |place| {
        for asked in [[169, 254, 100, 1], [8, 8, 8, 8]].map(Ipv4Addr::from) {
            let answer = ask(&place, asked, "api.example.com").await;
            assert_eq!(answer[3] & 0x0f, 0, "no error");
            assert!(answer.windows(4).any(|four| four == ORIGIN.octets()), "{answer:?}");
        }
        let answer = ask(&place, Ipv4Addr::new(8, 8, 8, 8), "evil.example.com").await;
        assert_eq!(answer[3] & 0x0f, 3, "NXDOMAIN");
        let mut stream = soon(place.dial(Ipv4Addr::new(8, 8, 8, 8), 53)).await.expect("connected");
        let question = question("api.example.com");
        stream.write_u16(question.len().try_into().expect("short")).await.expect("sent");
        stream.write_all(&question).await.expect("sent");
        let mut answer = vec![0; soon(stream.read_u16()).await.expect("an answer").into()];
        soon(stream.read_exact(&mut answer)).await.expect("an answer");
        assert!(answer.windows(4).any(|four| four == ORIGIN.octets()), "{answer:?}");
        let asked = place.asked.lock().expect("unpoisoned").clone();
        assert!(asked.iter().all(|name| name == "api.example.com"), "{asked:?}");
    });
}

/// An A question.
fn question(name: &str) -> Vec<u8> {
    let mut query = vec![0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.split('.') {
        query.push(u8::try_from(label.len()).expect("short"));
        query.extend(label.bytes());
    }
    query.extend([0, 0, 1, 0, 1]);
    query
}

/// The answer to an A question of the guest, which must come from where it was asked.
async fn ask(place: &place::Place, server: Ipv4Addr, name: &str) -> Vec<u8> {
    let socket = place.datagrams();
    let query = question(name);
    socket.send_to(&query, (server, 53)).await.expect("sent");
    let mut answer = vec![0; 1500];
    let (length, from) = soon(socket.recv_from(&mut answer)).await.expect("an answer");
    assert_eq!(from, SocketAddr::from((server, 53)));
    answer.truncate(length);
    answer
}

#[test]
fn a_policy_that_is_tightened_cuts_the_connection_it_denies() {
    run(RULES, async |place| {
        let tls = Tls::new(&["api.example.com"]);
        tls.echo(place.origin(ORIGIN, 443));
        let stream = soon(place.dial(ORIGIN, 443)).await.expect("connected");
        let mut stream = soon(tls.client(stream, "api.example.com")).await.expect("a handshake");

        place.write(RULES, 2);
        let kept = soon(place.rejudge()).await;
        assert_eq!((kept.checked, kept.cut), (1, 0), "an equal policy cuts nothing");
        place.write("", 3);
        assert_eq!(soon(place.rejudge()).await.cut, 1);
        let error = soon(stream.read_u8()).await.expect_err("cut");
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        let closed = place.record(|r| r.outcome == Outcome::Closed).await;
        assert_eq!(closed.code, Some(Code::PolicyChanged));
    });
}

#[test]
fn a_detach_cuts_and_leaves_nothing_and_the_slot_can_be_attached_again() {
    run(RULES, async |place| {
        let tls = Tls::new(&["api.example.com"]);
        tls.echo(place.origin(ORIGIN, 443));
        let fenced = place.nft();
        assert!(fenced.contains("in_pt1"), "{fenced}");
        let stream = soon(place.dial(ORIGIN, 443)).await.expect("connected");
        let _open = soon(tls.client(stream, "api.example.com")).await.expect("a handshake");
        assert_eq!(place.router.meter(place.slot).expect("attached").open(), 1);

        let detached = soon(place.router.detach(place.slot)).await.expect("detached");
        assert_eq!(detached.cut, 1);
        assert!(detached.bytes_in > 0 && detached.bytes_out > 0);
        assert!(!place.nft().contains("pt1"));
        assert!(place.router.meter(place.slot).is_none());
        assert_eq!(soon(place.router.detach(place.slot)).await.expect("again").cut, 0);

        soon(place.attach()).await.expect("attached again");
        let stream = soon(place.dial(ORIGIN, 443)).await.expect("connected");
        soon(tls.client(stream, "api.example.com")).await.expect("a handshake");
        assert!(place.attach().await.is_err(), "the slot is taken");
        soon(
            tls.client(soon(place.dial(ORIGIN, 443)).await.expect("connected"), "api.example.com"),
        )
        .await
        .expect("a refused attach leaves the slot as it was");
    });
}

#[test]
fn a_port_of_the_guest_is_reached_from_its_gateway_and_cut_by_a_detach() {
    run(RULES, async |place| {
        let listener = place.guest_listener(1007);
        let mut ours = soon(place.router.connect(place.slot, 1007)).await.expect("ours");
        ours.write_all(b"ping").await.expect("sent");
        let mut word = [0; 4];
        // A slow guest may answer a try that was given up meanwhile: that one ends without a word.
        let mut theirs = loop {
            let (mut theirs, peer) = soon(listener.accept()).await.expect("theirs");
            assert_eq!(peer.ip(), IpAddr::from([169, 254, 100, 1]));
            match soon(theirs.read_exact(&mut word)).await {
                Ok(_) => break theirs,
                Err(error) => assert_eq!(error.kind(), ErrorKind::UnexpectedEof),
            }
        };
        assert_eq!(&word, b"ping");
        theirs.write_all(b"pong").await.expect("sent");
        soon(ours.read_exact(&mut word)).await.expect("read");
        assert_eq!(&word, b"pong");

        let waiting = tokio::spawn(async move { ours.read_u8().await });
        soon(place.router.detach(place.slot)).await.expect("detached");
        let error = soon(waiting).await.expect("no panic").expect_err("cut");
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        assert!(place.router.connect(place.slot, 1007).await.is_err());
    });
}

#[test]
fn bytes_queued_for_a_guest_do_not_wait_for_the_next_guest_of_its_slot() {
    run(RULES, async |place| {
        let listener = place.guest_listener(1007);
        let (ours, theirs) =
            tokio::join!(soon(place.router.connect(place.slot, 1007)), soon(listener.accept()));
        let (mut ours, _deaf) = (ours.expect("ours"), theirs.expect("theirs"));
        // A second for each small piece: an emulated machine is slow, and is not meant to seem full.
        let flood = vec![7; 1 << 16];
        while tokio::time::timeout(Duration::from_secs(1), ours.write_all(&flood)).await.is_ok() {}
        drop(ours);
        until(|| place.sockets().contains("FIN-WAIT-1")).await;
        soon(place.router.detach(place.slot)).await.expect("detached");
        assert_eq!(place.sockets(), "");
    });
}

#[test]
fn over_the_cap_a_connection_is_reset_and_recorded() {
    run(RULES, async |place| {
        let mut held = Vec::new();
        for _ in 0..64 {
            held.push(soon(place.dial(ORIGIN, 443)).await.expect("connected"));
        }
        place.has_open(64).await;
        assert!(is_reset(&place, ORIGIN, 443, b"").await);
        place.record(|r| r.code == Some(Code::Limit)).await;
        drop(held);
    });
}

#[test]
fn a_dropped_frame_is_in_the_audit_with_its_reason() {
    run(RULES, async |place| {
        let socket = place.datagrams();
        socket.connect((SINK, 443)).await.expect("a route");
        socket.send(b"quic").await.expect("sent");
        let error = soon(socket.recv(&mut [0; 1])).await.expect_err("an ICMP error");
        assert_eq!(error.kind(), ErrorKind::HostUnreachable);
        let record = place.record(|r| r.kind == Kind::Frame).await;
        assert_eq!(record.code, Some(Code::Quic));
        assert_eq!(record.destination, Some(SocketAddr::from((SINK, 443))));
    });
}
