//! Datagrams that an address rule lets out, on real sockets at both ends.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use policy::Code;
use policy::audit::{Kind, Outcome};
use tokio::net::UdpSocket;
use tokio::time::timeout;

use crate::peers::soon;
use crate::place::{EGRESS, HOST, INNER, ORIGIN, Place, SINK, run, run_brief};

const RULES: &str = r#"
[[rule]]
allow = ["93.184.216.0/24"]
ports = [3478, "5000-5010"]
protocol = "udp"
[[rule]]
deny = ["93.184.216.66"]
ports = [5000]
"#;

/// A socket of the guest that hears only who it sends to.
async fn towards(place: &Place, address: Ipv4Addr, port: u16) -> UdpSocket {
    let socket = place.datagrams();
    socket.connect((address, port)).await.expect("a route");
    socket
}

async fn heard(socket: &UdpSocket) -> (Vec<u8>, SocketAddr) {
    let mut buffer = vec![0; 1 << 16];
    let (length, from) = soon(socket.recv_from(&mut buffer)).await.expect("a datagram");
    buffer.truncate(length);
    (buffer, from)
}

/// Whether the guest is told that its datagrams may not leave, and nothing arrives at `far`.
async fn is_refused(socket: &UdpSocket, far: &UdpSocket) -> bool {
    socket.send(b"refused").await.expect("sent");
    let error = soon(socket.recv(&mut [0; 8])).await.expect_err("an ICMP error");
    assert_eq!(error.kind(), ErrorKind::HostUnreachable, "admin-prohibited");
    let nothing = timeout(Duration::from_millis(50), far.recv(&mut [0; 8])).await;
    nothing.is_err()
}

/// Promise 33.
#[test]
fn an_allowed_datagram_leaves_from_the_egress_address_and_is_answered() {
    run_brief(RULES, async |place| {
        let origin = place.origin_datagrams(ORIGIN, 3478);
        let guest = towards(&place, ORIGIN, 3478).await;
        guest.send(b"ping").await.expect("sent");
        let (ping, peer) = heard(&origin).await;
        assert_eq!((&ping[..], peer.ip()), (&b"ping"[..], IpAddr::from(EGRESS)));
        let allow = place.record(|r| r.kind == Kind::Connection).await;
        assert_eq!((allow.outcome, allow.egress), (Outcome::Allow, Some(peer)));
        assert_eq!(allow.protocol.as_deref(), Some("udp"));
        assert_eq!(allow.dialed, Some(SocketAddr::from((ORIGIN, 3478))));
        for n in 0..50_u8 {
            origin.send_to(&[n; 900], peer).await.expect("sent");
            assert_eq!(heard(&guest).await.0, [n; 900]);
            guest.send(&[n; 700]).await.expect("sent");
            assert_eq!(heard(&origin).await, (vec![n; 700], peer), "one session");
        }
        assert_eq!(place.router.meter(place.slot).expect("attached").open(), 1);
        // Idle in this place is ten seconds.
        let closed = place.record(|r| r.outcome == Outcome::Closed).await;
        assert_eq!((closed.flow, closed.egress), (allow.flow, Some(peer)));
        assert_eq!((closed.bytes_out, closed.bytes_in), (Some(35_004), Some(45_000)));
        assert_eq!(closed.detail.as_deref(), Some("idle; 51 datagrams out, 50 in"));
        assert_eq!(place.router.meter(place.slot).expect("attached").open(), 0);
        guest.send(b"again").await.expect("sent");
        assert_eq!(heard(&origin).await.0, b"again");
    });
}

/// Promise 33. Only who was sent to is heard.
#[test]
fn a_stranger_does_not_get_in_through_a_session() {
    run(RULES, async |place| {
        let (origin, other) =
            (place.origin_datagrams(ORIGIN, 3478), place.origin_datagrams(ORIGIN, 5000));
        let guest = towards(&place, ORIGIN, 3478).await;
        guest.send(b"ping").await.expect("sent");
        let (_, peer) = heard(&origin).await;
        other.send_to(b"stranger", peer).await.expect("sent");
        origin.send_to(b"friend", peer).await.expect("sent");
        assert_eq!(heard(&guest).await.0, b"friend");
    });
}

/// Promise 33. What is not allowed is refused at once by ICMP, whether the fence knows it or only the
/// router does: another port, a denied address inside an allowed network, the host itself.
#[test]
fn what_no_rule_allows_is_refused_and_a_denied_address_in_an_allowed_network_too() {
    run(RULES, async |place| {
        let origin = place.origin_datagrams(ORIGIN, 3479);
        assert!(is_refused(&towards(&place, ORIGIN, 3479).await, &origin).await);
        let record = place.record(|r| r.kind == Kind::Frame).await;
        assert_eq!(record.code, Some(Code::Protocol), "by the fence");

        let denied = place.origin_datagrams(SINK, 5000);
        assert!(is_refused(&towards(&place, SINK, 5000).await, &denied).await);
        let record = place.record(|r| r.kind == Kind::Connection).await;
        assert_eq!((record.outcome, record.code), (Outcome::Deny, Some(Code::Rule)));
        assert_eq!(record.protocol.as_deref(), Some("udp"));

        let own = place.host_datagrams(HOST, 3478);
        assert!(is_refused(&towards(&place, HOST, 3478).await, &own).await);
        let record = place.record(|r| r.kind == Kind::Connection).await;
        assert_eq!(record.code, Some(Code::PrivateAddress));

        let open = place.origin_datagrams(SINK, 5001);
        towards(&place, SINK, 5001).await.send(b"control").await.expect("sent");
        assert_eq!(heard(&open).await.0, b"control");
    });
}

/// A UDP datagram with these ports (RFC 768), without a checksum.
fn datagram(from: u16, to: u16, payload: &[u8]) -> Vec<u8> {
    let length = u16::try_from(8 + payload.len()).expect("short");
    let header = [from, to, length, 0].map(u16::to_be_bytes);
    [header.as_flattened(), payload].concat()
}

/// Promise 33. A socket that is connected to port 0 hears every port, so none ever is.
#[test]
fn datagrams_from_or_to_port_0_are_refused_whatever_a_rule_says() {
    run("[[rule]]\nallow = [\"0.0.0.0/0\"]\nprotocol = \"udp\"\n", async |place| {
        let origin = place.origin_datagrams(ORIGIN, 3478);
        let guest = place.guest_headers();
        let to = SocketAddr::from((ORIGIN, 0)).into();
        for (source, destination) in [(0, 3478), (4000, 0), (0, 0)] {
            guest.send_to(&datagram(source, destination, b"0"), &to).expect("sent");
            let record = place.record(|r| r.kind == Kind::Connection).await;
            assert_eq!((record.outcome, record.code), (Outcome::Deny, Some(Code::Protocol)));
            assert_eq!(record.destination, Some(SocketAddr::from((ORIGIN, destination))));
            assert_eq!(place.router.meter(place.slot).expect("attached").open(), 0);
        }
        guest.send_to(&datagram(4000, 3478, b"control"), &to).expect("sent");
        assert_eq!(heard(&origin).await.0, b"control", "and nothing before it");
    });
}

/// Promise 33. A private address needs a rule that means it.
#[test]
fn a_private_address_is_refused_unless_a_rule_names_its_network() {
    let wide = "[[rule]]\nallow = [\"0.0.0.0/0\"]\nprotocol = \"udp\"\n";
    run(wide, async |place| {
        let inner = place.origin_datagrams(INNER, 3478);
        assert!(is_refused(&towards(&place, INNER, 3478).await, &inner).await);
        let record = place.record(|r| r.kind == Kind::Connection).await;
        assert_eq!(record.code, Some(Code::PrivateAddress));
        place.write(&format!("{wide}[[rule]]\nallow = [\"10.1.0.0/16\"]\nprotocol = \"udp\"\n"), 2);
        place.rejudge().await;
        towards(&place, INNER, 3478).await.send(b"meant").await.expect("sent");
        assert_eq!(heard(&inner).await.0, b"meant");
    });
}

/// Promise 33. A closed port outside is told to the guest as what it is.
#[test]
fn an_error_from_outside_reaches_the_socket_of_the_guest() {
    run(RULES, async |place| {
        let guest = towards(&place, ORIGIN, 3478).await;
        for round in 0..3 {
            guest.send(b"anyone?").await.expect("sent");
            let error = soon(guest.recv(&mut [0; 8])).await.expect_err("nobody");
            assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "round {round}");
        }
        let origin = place.origin_datagrams(ORIGIN, 3478);
        guest.send(b"now?").await.expect("sent");
        assert_eq!(heard(&origin).await.0, b"now?", "the session is still good");
    });
}

/// Promise 33. Answers larger than a frame arrive whole.
#[test]
fn a_large_answer_reaches_the_guest_in_fragments() {
    run(RULES, async |place| {
        let origin = place.origin_datagrams(ORIGIN, 3478);
        let guest = towards(&place, ORIGIN, 3478).await;
        guest.send(b"much").await.expect("sent");
        let (_, peer) = heard(&origin).await;
        for length in [1472, 1473, 8000, 60_000] {
            let answer: Vec<u8> = (0..=255).cycle().take(length).collect();
            origin.send_to(&answer, peer).await.expect("sent");
            assert_eq!(heard(&guest).await.0, answer, "{length} bytes");
        }
    });
}

/// Promises 18 and 33. A write acts on sessions and on the fence before it is done.
#[test]
fn a_policy_write_cuts_a_session_and_the_next_write_opens_it_again() {
    run(RULES, async |place| {
        let origin = place.origin_datagrams(ORIGIN, 3478);
        let guest = towards(&place, ORIGIN, 3478).await;
        guest.send(b"ping").await.expect("sent");
        let (_, peer) = heard(&origin).await;
        place.write(RULES, 2);
        assert_eq!(place.rejudge().await.cut, 0);
        assert!(place.nft().contains("udp dport 3478"), "{}", place.nft());
        place.write("", 3);
        assert_eq!(place.rejudge().await.cut, 1);
        assert!(!place.nft().contains("udp dport 3478"), "{}", place.nft());
        let error = soon(guest.recv(&mut [0; 8])).await.expect_err("told at once");
        assert_eq!(error.kind(), ErrorKind::HostUnreachable);
        let closed = place.record(|r| r.outcome == Outcome::Closed).await;
        assert_eq!(closed.code, Some(Code::PolicyChanged));
        assert!(is_refused(&guest, &origin).await);
        origin.send_to(b"late", peer).await.expect("sent");
        place.write(RULES, 4);
        place.rejudge().await;
        guest.send(b"pong").await.expect("sent");
        let (pong, other) = heard(&origin).await;
        assert_eq!(pong, b"pong");
        assert_ne!(other, peer, "another session");
    });
}

/// Promise 18. A session that is being opened is cut like one that is open, and the write waits for it.
#[test]
fn a_session_that_is_being_opened_is_cut_when_it_is_denied() {
    run(RULES, async |place| {
        let origin = place.origin_datagrams(ORIGIN, 3478);
        let guest = towards(&place, ORIGIN, 3478).await;
        // Nothing is made in the guests' world as long as somebody else is at work there.
        let (done, work) = std::sync::mpsc::channel::<()>();
        let (begun, begins) = tokio::sync::oneshot::channel();
        let router = place.router.clone();
        let work = move || begun.send(()).is_ok() && work.recv().is_err();
        let busy = tokio::spawn(async move { router.within(work).await });
        begins.await.expect("at work");
        guest.send(b"ping").await.expect("sent");
        let judged = async {
            while place.router.rejudge(&[place.slot]).await.checked == 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        soon(judged).await;
        place.write("", 2);
        let judged = soon(place.router.rejudge(&[place.slot])).await;
        assert_eq!((judged.cut, judged.closing), (1, 0));
        drop(done);
        assert!(busy.await.expect("no panic").expect("it ran"));
        let record = place.record(|r| r.kind == Kind::Connection).await;
        assert_eq!(record.code, Some(Code::PolicyChanged));
        let error = soon(guest.recv(&mut [0; 8])).await.expect_err("told");
        assert_eq!(error.kind(), ErrorKind::HostUnreachable);
        place.write(RULES, 3);
        place.rejudge().await;
        guest.send(b"pong").await.expect("sent");
        assert_eq!(heard(&origin).await.0, b"pong", "and nothing of the one before");
    });
}

/// Promise 33. The fence alone does not decide: what an older fence would let in is judged by the
/// policy in force.
#[test]
fn a_policy_in_force_is_obeyed_before_the_fence_follows_it() {
    run(RULES, async |place| {
        let origin = place.origin_datagrams(ORIGIN, 3478);
        let guest = towards(&place, ORIGIN, 3478).await;
        place.write("", 2);
        assert!(is_refused(&guest, &origin).await);
        let record = place.record(|r| r.kind == Kind::Connection).await;
        assert_eq!((record.outcome, record.code), (Outcome::Deny, Some(Code::Protocol)));
    });
}

/// Promise 33. A fence that somebody else changed is put up anew by the next write.
#[test]
fn a_write_repairs_a_fence_without_its_chain() {
    run("", async |place| {
        // At once, since what is missing is soon put back.
        place.edit("flush chain netdev postern_0 guest_pt1; delete chain netdev postern_0 udp_pt1");
        place.write(RULES, 2);
        place.rejudge().await;
        let origin = place.origin_datagrams(ORIGIN, 3478);
        towards(&place, ORIGIN, 3478).await.send(b"ping").await.expect("sent");
        assert_eq!(heard(&origin).await.0, b"ping");
    });
}

/// A session ends with its slot, and its sockets with it.
#[test]
fn a_detach_ends_sessions_and_leaves_no_socket() {
    run(RULES, async |place| {
        let origin = place.origin_datagrams(ORIGIN, 3478);
        let guest = towards(&place, ORIGIN, 3478).await;
        guest.send(b"ping").await.expect("sent");
        let (_, peer) = heard(&origin).await;
        assert!(place.datagram_sockets().contains(":3478"), "{}", place.datagram_sockets());
        assert_eq!(place.router.detach(place.slot).await.expect("detached").cut, 1);
        assert_eq!(place.datagram_sockets(), "");
        let answered = origin.send_to(b"late", peer).await.and(origin.connect(peer).await);
        answered.expect("sent");
        origin.send(b"late").await.expect("sent");
        let error = soon(origin.recv(&mut [0; 8])).await.expect_err("nobody");
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "the egress port is closed");
        place.attach().await.expect("attached again");
    });
}

/// Attack B17. Random ports fill a guest's own places and no more; a session in use keeps its own.
#[test]
fn over_the_cap_a_new_session_is_refused_until_one_has_been_silent() {
    run(RULES, async |place| {
        let origin = place.origin_datagrams(ORIGIN, 3478);
        let mut sources = std::collections::HashSet::new();
        let mut open = Vec::new();
        // The cap in this place is eight.
        for _ in 0..8 {
            let guest = towards(&place, ORIGIN, 3478).await;
            guest.send(b"ping").await.expect("sent");
            sources.insert(heard(&origin).await.1);
            open.push(guest);
        }
        assert_eq!(sources.len(), 8);
        for guest in &open {
            guest.send(b"in use").await.expect("sent");
            assert_eq!(heard(&origin).await.0, b"in use");
        }
        let late = towards(&place, ORIGIN, 3478).await;
        assert!(is_refused(&late, &origin).await);
        let refused = place.record(|r| r.code == Some(Code::Limit)).await;
        assert_eq!(refused.outcome, Outcome::Deny);
        assert_eq!(place.router.meter(place.slot).expect("attached").open(), 8);
        open[0].send(b"still here").await.expect("sent");
        assert_eq!(heard(&origin).await.0, b"still here");
    });
}

#[test]
fn refusals_that_are_not_told_yet_are_told_when_the_slot_ends() {
    run(RULES, async |place| {
        let guest = towards(&place, SINK, 5000).await;
        for _ in 0..40 {
            guest.send(b"refused").await.expect("sent");
            soon(guest.recv(&mut [0; 8])).await.expect_err("an ICMP error");
        }
        place.router.detach(place.slot).await.expect("detached");
        let mut refused = 0;
        let told = soon(async {
            while refused < 40 {
                // What the guest's kernel says by itself is dropped as frames.
                let denied = place.recorded().into_iter();
                let denied = denied.filter(|r| r.outcome == Outcome::Deny && r.kind != Kind::Frame);
                refused += denied.map(|record| record.count.unwrap_or(1)).sum::<u64>();
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        told.await;
        assert_eq!(refused, 40);
    });
}
