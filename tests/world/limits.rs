//! What a guest can make us hold is bounded, and the bound is its own.

use std::io::{ErrorKind, Read, Write};
use std::net::UdpSocket;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use etherparse::PacketBuilder;
use hickory_proto::rr::RecordType;
use policy::net::{GATEWAY_IP, GATEWAY_MAC, GUEST_IP, GUEST_MAC};
use world::client::{self, End, PATIENT};
use world::origin::port;
use world::poll::eventually;
use world::{World, allow};

/// One guest at its limit is refused more, and takes nothing from another.
#[test]
fn a_guest_at_its_limit_of_flows_is_refused_more_and_others_are_not() {
    const FLOWS: usize = 16;
    let world = World::with(&format!("[guests]\nflows = {FLOWS}\n"));
    let (api, echo) = (world.site("api"), world.site("echo"));
    let rule = format!("{}[[rule]]\nallow = [\"{}\"]\nports = [7]\n", allow(&[&api]), echo.ip);
    let (greedy, other) = (world.guest(&rule), world.guest(&rule));
    let mut held = greedy.run(|| {
        let connect = |_| client::connect(echo.at(port::ECHO), PATIENT).expect("connect");
        (0..FLOWS).map(connect).collect::<Vec<_>>()
    });
    for stream in &mut held {
        let mut reply = [0; 3];
        stream.write_all(b"x\r\n").and_then(|()| stream.read_exact(&mut reply)).expect("an echo");
    }
    let refused = greedy.at_once(|| client::exchange(echo.at(port::ECHO), &[b"x\r\n"], PATIENT));
    assert_eq!((refused.end, refused.bytes.len()), (End::Reset, 0), "{refused:?}");
    greedy.event(&[("outcome", "deny"), ("code", "limit")]);
    other.reaches(&api);
    held.pop();
    eventually("a place is free again", PATIENT, || {
        let reply =
            greedy.run(|| client::exchange(echo.at(port::ECHO), &[b"x\r\n"], client::AT_ONCE / 4));
        (reply.bytes == b"x\r\n").then_some(())
    });
}

/// Promise 11. A flood of new connections ends at the tap; a neighbour does not notice.
#[test]
fn a_flood_of_new_connections_is_dropped_at_the_tap_and_others_go_on() {
    let world = World::shared();
    let (api, sink) = (world.site("api"), world.attacker());
    let (flooding, other) = (world.guest(&allow(&[&api])), world.guest(&allow(&[&api])));
    for source in 10_000..14_000 {
        let mut frame = Vec::new();
        PacketBuilder::ethernet2(GUEST_MAC, GATEWAY_MAC)
            .ipv4(GUEST_IP.octets(), sink.ip.octets(), 64)
            .tcp(source, 443, 1, 64_000)
            .syn()
            .write(&mut frame, &[])
            .expect("a frame");
        flooding.cable.inject(&frame).expect("the tap takes it");
    }
    other.reaches(&api);
    world.event_that(&flooding.name, "of syn-rate", |record| {
        record["detail"].as_str().is_some_and(|detail| detail.starts_with("syn-rate"))
    });
    assert_eq!(world.sent_to(sink.ip), []);
}

/// Promise 6. The errors that answer one guest's flood are not taken from another's.
#[test]
fn a_flood_of_refused_datagrams_leaves_a_neighbour_its_refusals() {
    const ASKED: usize = 20;
    let world = World::shared();
    let sink = world.attacker();
    let (flooding, other) = (world.guest(""), world.guest(""));
    let (sent, done) = (AtomicUsize::new(0), AtomicBool::new(false));
    let refused = std::thread::scope(|scope| {
        scope.spawn(|| {
            flooding.run(|| {
                let socket = UdpSocket::bind("0.0.0.0:0").expect("bind");
                while !done.load(Relaxed) {
                    let _ = socket.send_to(b"x", sink.at(9));
                    if sent.fetch_add(1, Relaxed) % 64 == 0 {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                }
            });
        });
        eventually("the flood is under way", PATIENT, || (sent.load(Relaxed) > 5000).then_some(()));
        let refused = other.run(|| {
            let is_refused = |_: &usize| {
                let socket = UdpSocket::bind("0.0.0.0:0").expect("bind");
                socket.set_read_timeout(Some(PATIENT)).expect("a limit");
                let sent = socket.connect(sink.at(443)).and_then(|()| socket.send(b"x"));
                let answer = sent.and_then(|_| socket.recv(&mut [0; 1]));
                answer.is_err_and(|error| error.kind() == ErrorKind::HostUnreachable)
            };
            (0..ASKED).filter(is_refused).count()
        });
        done.store(true, Relaxed);
        refused
    });
    assert_eq!(refused, ASKED);
    assert_eq!(world.sent_to(sink.ip), []);
}

/// A guest that begins many hellos and ends none holds its own places only, and not for long.
#[test]
fn hellos_that_never_end_are_cut_at_a_deadline_and_others_go_on() {
    let world = World::shared();
    let api = world.site("api");
    let (slow, other) = (world.guest(&allow(&[&api])), world.guest(&allow(&[&api])));
    let hello = client::client_hello(&world.authority, &api.name);
    let begun: Vec<_> = slow.run(|| {
        let begin = |_| {
            let mut stream = client::connect(api.at(443), PATIENT).expect("connect");
            stream.write_all(&hello[..hello.len() / 2]).expect("half a hello");
            stream
        };
        (0..64).map(begin).collect()
    });
    other.reaches(&api);
    slow.reaches(&api);
    let deadline = std::time::Instant::now() + 2 * PATIENT;
    for mut stream in begun {
        let left = deadline.saturating_duration_since(std::time::Instant::now());
        assert_ne!(client::read_to_end(&mut stream, &mut Vec::new(), left), End::Open);
    }
    assert_eq!(world.origin.connections(api.ip).len(), 2, "the controls");
    slow.event(&[("outcome", "deny"), ("code", "undecidable")]);
}

/// A guest that floods the resolver is answered less, and its neighbour as before.
#[test]
fn a_flood_of_questions_is_bounded_and_others_are_answered() {
    const FLOOD: usize = 3000;
    let world = World::shared();
    let (zone, api) = (world.site("zone"), world.site("api"));
    let flooding = world.guest(&format!("[[rule]]\nallow = [\"*.{}\"]\n", zone.name));
    let other = world.guest(&allow(&[&api]));
    flooding.run(|| {
        let socket = UdpSocket::bind("0.0.0.0:0").expect("bind");
        for n in 0..FLOOD {
            let query = client::query(&format!("q{n}.{}", zone.name), RecordType::A);
            let _ = socket.send_to(&query.to_vec().expect("a query"), (GATEWAY_IP, 53));
        }
    });
    let query = client::query(&api.name, RecordType::A);
    let told = other.run(|| client::ask_udp((GATEWAY_IP, 53).into(), &query)).expect("an answer");
    assert_eq!(client::addresses(&told), [api.ip]);
    flooding.event(&[("kind", "dns"), ("code", "limit")]);
    let asked = world.names.asked(&zone.name).len();
    assert!(asked > 0 && asked < FLOOD, "{asked} of {FLOOD} were asked upstream");
}

/// Attack B06. Where the host's own rules track connections, each of a guest leaves an entry, and the lines
/// of the operator's guide take the egress addresses out of that.
#[test]
fn a_host_that_tracks_connections_tracks_none_of_a_guest_behind_notrack() {
    const MANY: usize = 20;
    let world = World::new();
    let api = world.site("api");
    let guest = world.guest(&allow(&[&api]));
    let nft = |rules: &str| {
        let done = world.host.bare_command("nft").arg(rules).output().expect("run nft");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    };
    let count = || {
        let read = || std::fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_count");
        let text = world.host.run(read).expect("a count");
        text.trim().parse::<usize>().expect("a number")
    };
    let request = format!("GET / HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", api.name);
    let open = || {
        let before = count();
        for _ in 0..MANY {
            let reply = guest.run(|| client::exchange(api.at(80), &[request.as_bytes()], PATIENT));
            assert!(reply.text().starts_with("HTTP/1.1 200"), "{}", reply.text());
        }
        count().saturating_sub(before)
    };
    nft("add table inet fw; add chain inet fw out { type filter hook output priority 0; }; \
         add rule inet fw out ct state new,established accept");
    let tracked = open();
    assert!(tracked >= MANY, "control: {tracked}");
    let guide = include_str!("../../docs/operator.md");
    let lines = guide.split("```\n").find(|block| block.starts_with("table inet postern_notrack"));
    nft(&lines.expect("the lines").replace("198.51.100.10", &world::world::EGRESS.to_string()));
    let tracked = open();
    assert!(tracked < MANY / 2, "{tracked}");
}
