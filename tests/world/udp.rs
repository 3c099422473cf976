//! Datagrams that a rule lets out, with the real daemon: what leaves, what comes back, what is told.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use hickory_proto::rr::RecordType;
use serde_json::json;
use world::client::{self, PATIENT};
use world::origin::port;
use world::poll::eventually;
use world::wire::Seen;
use world::world::{EGRESS, HOST, PUBLIC_RESOLVER};
use world::{Guest, Site, World, allow};

const TURN: u16 = 3478;

fn allow_udp(site: &Site, ports: &str) -> String {
    format!("[[rule]]\nallow = [\"{}\"]\nports = [{ports}]\nprotocol = \"udp\"\n", site.ip)
}

/// A socket of an origin.
fn origin(world: &World, at: SocketAddr) -> UdpSocket {
    let socket = world.internet.run(|| UdpSocket::bind(at)).expect("bind an origin");
    socket.set_read_timeout(Some(PATIENT)).expect("a limit");
    socket
}

/// A socket of a guest at this port (0: any) that hears only who it sends to.
fn towards(guest: &Guest<'_>, from: u16, to: SocketAddr) -> UdpSocket {
    guest.run(|| {
        let socket = UdpSocket::bind(("0.0.0.0", from)).expect("bind");
        socket.connect(to).expect("connect");
        socket.set_read_timeout(Some(PATIENT)).expect("a limit");
        socket
    })
}

fn heard(socket: &UdpSocket) -> (Vec<u8>, SocketAddr) {
    let mut buffer = vec![0; 1 << 16];
    let (length, from) = socket.recv_from(&mut buffer).expect("a datagram");
    buffer.truncate(length);
    (buffer, from)
}

/// Sends and is told by ICMP, at once, that this may not leave.
fn is_refused(socket: &UdpSocket) {
    let error = client::at_once(|| {
        socket.send(b"refused").expect("sent");
        socket.recv(&mut [0; 8]).expect_err("nobody answers")
    });
    assert_eq!(error.kind(), ErrorKind::HostUnreachable, "admin-prohibited");
}

fn datagrams_to(world: &World, site: &Site) -> Vec<Seen> {
    world.sent(|seen| seen.is_to(site.ip) && seen.protocol == Some(17))
}

/// Promise 33. From the egress address, audited like a connection, shown like one.
#[test]
fn an_allowed_datagram_leaves_from_the_egress_address_and_the_answer_comes_back() {
    let world = World::shared();
    let turn = world.site("turn");
    let guest = world.guest(&allow_udp(&turn, "3478"));
    let far = origin(world, turn.at(TURN));
    let near = towards(&guest, 0, turn.at(TURN));
    near.send(b"ping").expect("sent");
    let (ping, peer) = heard(&far);
    assert_eq!((&ping[..], peer.ip()), (&b"ping"[..], EGRESS.into()));
    far.send_to(b"pong!", peer).expect("sent");
    assert_eq!(heard(&near), (b"pong!".to_vec(), turn.at(TURN)));
    assert!(datagrams_to(world, &turn).iter().all(|seen| seen.is_from(EGRESS)));
    let opened = guest.event(&[("kind", "connection"), ("outcome", "allow"), ("protocol", "udp")]);
    assert_eq!(opened["egress"], peer.to_string(), "the audit names the port the far side saw");
    assert_eq!(opened["dialed"], turn.at(TURN).to_string());
    assert!(opened["rule"].as_str().is_some_and(|rule| rule.contains("udp")), "{opened}");
    let shown = world.api("GET", &format!("/v1/sandboxes/{}", guest.name), &[]).json;
    assert_eq!(shown["traffic"]["open_flows"], 1, "{shown}");
    assert_eq!(
        (&shown["traffic"]["bytes_out"], &shown["traffic"]["bytes_in"]),
        (&json!(4), &json!(5))
    );
}

/// Promise 33. The record comes before the payload: who can be asked about is known from the first
/// datagram on.
#[test]
fn a_session_that_is_silent_ends_and_its_record_says_what_it_came_to() {
    let world = World::with("[guests]\nudp_idle = \"1s\"\n");
    let turn = world.site("turn");
    let guest = world.guest(&allow_udp(&turn, "3478"));
    let far = origin(&world, turn.at(TURN));
    let near = towards(&guest, 0, turn.at(TURN));
    near.send(b"ping").expect("sent");
    let (_, peer) = heard(&far);
    let closed = guest.event(&[("outcome", "closed"), ("protocol", "udp")]);
    assert_eq!(closed["egress"], peer.to_string());
    assert_eq!((&closed["bytes_out"], &closed["bytes_in"]), (&json!(4), &json!(0)));
    assert_eq!(closed["detail"], "idle; 1 datagrams out, 0 in");
    near.send(b"again").expect("sent");
    assert_eq!(heard(&far).0, b"again", "the next datagram opens another");
}

/// Promise 6. Attack B02. QUIC leaves neither to a known host nor to a stranger, while the name is
/// allowed by TCP; a rule for other datagrams does not change that, and a rule that names it does.
#[test]
fn quic_leaves_only_where_a_rule_names_it() {
    let world = World::shared();
    let (api, sink, quic) = (world.site("api"), world.attacker(), world.site("quic"));
    let guest = world.guest(&(allow(&[&api, &quic]) + &allow_udp(&quic, "443, 3478")));
    for site in [&api, &sink] {
        is_refused(&towards(&guest, 0, site.at(443)));
        assert_eq!(datagrams_to(world, site), []);
    }
    guest.event(&[("kind", "frame"), ("code", "quic")]);
    guest.reaches(&api);
    let far = origin(world, quic.at(443));
    towards(&guest, 0, quic.at(443)).send(b"initial").expect("sent");
    assert_eq!(heard(&far).0, b"initial");
}

/// Promises 6 and 33. A rule opens what it names: not the next port, not the next address, nothing
/// of the host, and not for another sandbox.
#[test]
fn a_rule_opens_no_other_port_address_or_sandbox() {
    let world = World::shared();
    let (turn, sink) = (world.site("turn"), world.attacker());
    let rules = allow_udp(&turn, "\"3000-4000\"")
        + &format!("[[rule]]\nallow = [\"{HOST}\", \"{EGRESS}\"]\nprotocol = \"udp\"\n");
    let (guest, other) = (world.guest(&rules), world.guest(&allow(&[&turn])));
    for to in [turn.at(4001), turn.at(2999), sink.at(TURN), (HOST, TURN).into(), (EGRESS, 9).into()]
    {
        is_refused(&towards(&guest, 0, to));
    }
    is_refused(&towards(&other, 0, turn.at(TURN)));
    assert_eq!(world.sent_to(sink.ip), []);
    assert_eq!(datagrams_to(world, &turn), []);
    guest.event(&[("code", "private-address"), ("protocol", "udp")]);
    let far = origin(world, turn.at(4000));
    towards(&guest, 0, turn.at(4000)).send(b"control").expect("sent");
    assert_eq!(heard(&far).0, b"control");
}

/// A name that is denied is denied by UDP, at the addresses the sandbox was told for it.
#[test]
fn a_denied_name_keeps_datagrams_from_its_address() {
    let world = World::shared();
    let (turn, api) = (world.site("turn"), world.site("api"));
    let denied = format!("[[rule]]\ndeny = [\"{}\"]\n", turn.name);
    let guest = world.guest(&(allow_udp(&turn, "3478") + &allow(&[&turn, &api])));
    guest.reaches(&turn);
    let (far, near) = (origin(world, turn.at(TURN)), towards(&guest, 0, turn.at(TURN)));
    near.send(b"control").expect("sent");
    assert_eq!(heard(&far).0, b"control");
    let written = guest.set_policy(&(allow_udp(&turn, "3478") + &allow(&[&api]) + &denied));
    assert_eq!((written.status, &written.json["cut"]), (200, &json!(1)), "{}", written.text);
    assert_eq!(near.recv(&mut [0; 8]).expect_err("told").kind(), ErrorKind::HostUnreachable);
    let before = datagrams_to(world, &turn).len();
    is_refused(&near);
    assert_eq!(datagrams_to(world, &turn).len(), before);
}

/// Promise 18. A write acts on a session and on the next datagram before it is answered.
#[test]
fn a_policy_write_cuts_a_session_and_the_answer_says_so() {
    let world = World::shared();
    let (kept, cut) = (world.site("kept"), world.site("cut"));
    let guest = world.guest(&(allow_udp(&kept, "3478") + &allow_udp(&cut, "3478")));
    let far = [&kept, &cut].map(|site| origin(world, site.at(TURN)));
    let near = [&kept, &cut].map(|site| towards(&guest, 0, site.at(TURN)));
    for (near, far) in near.iter().zip(&far) {
        near.send(b"ping").expect("sent");
        assert_eq!(heard(far).0, b"ping");
    }
    let tighter = guest.set_policy(&allow_udp(&kept, "3478"));
    assert_eq!((&tighter.json["checked"], &tighter.json["cut"]), (&json!(2), &json!(1)));
    let sent = datagrams_to(world, &cut).len();
    assert_eq!(near[1].recv(&mut [0; 8]).expect_err("told").kind(), ErrorKind::HostUnreachable);
    is_refused(&near[1]);
    assert_eq!(datagrams_to(world, &cut).len(), sent);
    near[0].send(b"still").expect("sent");
    assert_eq!(heard(&far[0]).0, b"still");
    guest.event(&[("outcome", "closed"), ("code", "policy-changed"), ("protocol", "udp")]);
    assert_eq!(guest.set_policy("").json["cut"], 1);
    assert_eq!(near[0].recv(&mut [0; 8]).expect_err("told").kind(), ErrorKind::HostUnreachable);
    is_refused(&near[0]);
    let fresh = world.site("fresh");
    let (far, near) = (origin(world, fresh.at(TURN)), towards(&guest, 0, fresh.at(TURN)));
    is_refused(&near);
    assert_eq!(guest.set_policy(&allow_udp(&fresh, "3478")).status, 200);
    near.send(b"fresh").expect("sent");
    assert_eq!(heard(&far).0, b"fresh", "the fence follows before the write is answered");
}

/// Promise 15. By UDP: same source port, same destination, at the same time.
#[test]
fn two_guests_with_one_source_port_and_destination_hear_only_their_own_datagrams() {
    const ROUNDS: u32 = 200;
    let world = World::shared();
    let turn = world.site("turn");
    let far = origin(world, turn.at(TURN));
    let guests = [0, 1].map(|_| world.guest(&allow_udp(&turn, "3478")));
    let near = guests.each_ref().map(|guest| towards(guest, 40_000, turn.at(TURN)));
    let mut peers = BTreeSet::new();
    for round in 0..ROUNDS {
        for (n, socket) in near.iter().enumerate() {
            socket.send(format!("{n} {round}").as_bytes()).expect("sent");
        }
        for _ in &near {
            let (said, peer) = heard(&far);
            peers.insert((said[0], peer));
            far.send_to(&said, peer).expect("sent");
        }
        for (n, socket) in near.iter().enumerate() {
            assert_eq!(heard(socket).0, format!("{n} {round}").as_bytes());
        }
    }
    assert_eq!(peers.len(), 2, "an egress port each: {peers:?}");
}

/// Promise 33. One guest, many ports and destinations, and TCP beside it, all at once.
#[test]
fn sessions_of_one_guest_and_its_connections_do_not_mix() {
    let world = World::shared();
    let (one, two, echo) = (world.site("one"), world.site("two"), world.site("echo"));
    let tcp = format!("[[rule]]\nallow = [\"{}\"]\nports = [7]\n", one.ip);
    let guest = world
        .guest(&(tcp + &allow_udp(&one, "7, 3478") + &allow_udp(&two, "3478") + &allow(&[&echo])));
    let places = [one.at(7), one.at(TURN), two.at(TURN)];
    let far = places.map(|at| origin(world, at));
    let near: Vec<_> = (0..4).flat_map(|_| places.map(|at| (towards(&guest, 0, at), at))).collect();
    for (n, (socket, _)) in near.iter().enumerate() {
        socket.send(&n.to_be_bytes()).expect("sent");
    }
    for socket in &far {
        for _ in 0..4 {
            let (said, peer) = heard(socket);
            socket.send_to(&said, peer).expect("sent");
        }
    }
    let reply = guest.run(|| {
        client::exchange_until(one.at(port::ECHO), &[b"x\r\n"], PATIENT, |so_far| {
            so_far == b"x\r\n"
        })
    });
    assert_eq!(reply.text(), "x\r\n");
    for (n, (socket, at)) in near.iter().enumerate() {
        assert_eq!(heard(socket), (n.to_be_bytes().to_vec(), *at));
    }
    guest.reaches(&echo);
}

/// Promise 33. What outside says of a datagram, the guest's kernel hears: a closed port is refused.
#[test]
fn a_closed_port_outside_is_connection_refused_in_the_guest() {
    let world = World::shared();
    let turn = world.site("turn");
    let guest = world.guest(&allow_udp(&turn, "3478"));
    let near = towards(&guest, 0, turn.at(TURN));
    near.send(b"anyone?").expect("sent");
    let error = near.recv(&mut [0; 8]).expect_err("nobody");
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    let far = origin(world, turn.at(TURN));
    near.send(b"now?").expect("sent");
    assert_eq!(heard(&far).0, b"now?");
}

/// Promise 33. A datagram of a whole frame leaves whole, and an answer of many frames arrives.
#[test]
fn datagrams_of_a_whole_frame_pass_and_larger_answers_too() {
    let world = World::shared();
    let turn = world.site("turn");
    let guest = world.guest(&allow_udp(&turn, "3478"));
    let (far, near) = (origin(world, turn.at(TURN)), towards(&guest, 0, turn.at(TURN)));
    for length in [0, 1, 1472] {
        let datagram = vec![7; length];
        near.send(&datagram).expect("sent");
        assert_eq!(heard(&far).0, datagram);
    }
    let peer = {
        near.send(b"more").expect("sent");
        heard(&far).1
    };
    for length in [0, 1473, 20_000, 65_507] {
        let datagram = vec![9; length];
        far.send_to(&datagram, peer).expect("sent");
        assert_eq!(heard(&near).0, datagram, "{length} bytes");
    }
    let before = datagrams_to(world, &turn).len();
    // The guest's kernel cuts it into fragments, which the fence drops.
    near.send(&[7; 1473]).expect("sent");
    world.event_that(&guest.name, "of a fragment", |record| {
        record["detail"].as_str().is_some_and(|detail| detail.starts_with("fragment"))
    });
    assert_eq!(datagrams_to(world, &turn).len(), before);
}

/// Attack B17. Random ports get a guest as many egress ports as it may have and no more, and take
/// nothing from a session in use nor from a neighbour.
#[test]
fn a_flood_of_random_ports_is_bounded_and_recorded() {
    const CAP: usize = 16;
    let world = World::with(&format!("[guests]\nudp_sessions = {CAP}\n"));
    let turn = world.site("turn");
    let (flooding, other) =
        (world.guest(&allow_udp(&turn, "3478")), world.guest(&allow_udp(&turn, "3478")));
    let far = origin(&world, turn.at(TURN));
    let start = Instant::now();
    let used = towards(&flooding, 0, turn.at(TURN));
    flooding.run(|| {
        for n in 0..CAP * 20 {
            let socket = UdpSocket::bind("0.0.0.0:0").expect("bind");
            let _ = socket.send_to(b"flood", turn.at(TURN));
            if n % CAP == 0 {
                used.send(b"used").expect("sent");
            }
        }
    });
    flooding.event(&[("code", "limit"), ("protocol", "udp")]);
    let flood = datagrams_to(&world, &turn);
    let ports: BTreeSet<u16> = flood.iter().filter_map(|seen| Some(seen.ports?.0)).collect();
    // Every two seconds those that were silent may be replaced.
    let rounds = usize::try_from(start.elapsed().as_secs()).expect("short") / 2 + 1;
    assert!((CAP..=CAP * rounds).contains(&ports.len()), "{} ports", ports.len());
    let near = towards(&other, 0, turn.at(TURN));
    near.send(b"neighbour").expect("sent");
    eventually("the neighbour is heard", PATIENT, || (heard(&far).0 == b"neighbour").then_some(()));
    let shown = world.api("GET", &format!("/v1/sandboxes/{}", flooding.name), &[]).json;
    let open = shown["traffic"]["open_flows"].as_u64().expect("a number");
    assert!((1..=CAP as u64).contains(&open), "{shown}");
}

/// A flood in one session neither grows the daemon nor starves a neighbour, by TCP or by UDP.
#[test]
fn a_burst_in_one_session_leaves_a_neighbour_its_connections() {
    const BURST: usize = 10_000;
    let world = World::new();
    let (turn, api) = (world.site("turn"), world.site("api"));
    let rules = allow_udp(&turn, "3478") + &allow(&[&api]);
    let (flooding, other) = (world.guest(&rules), world.guest(&rules));
    let far = origin(&world, turn.at(TURN));
    let near = towards(&flooding, 0, turn.at(TURN));
    near.send(b"first").expect("sent");
    let peer = heard(&far).1;
    other.reaches(&api);
    let resident = || resident(world.daemon().pid().expect("it runs"));
    let before = resident();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..BURST {
                near.send(&[7; 1200]).expect("sent");
                far.send_to(&[9; 1200], peer).expect("sent");
            }
            done.store(true, Relaxed);
        });
        let mut rounds = 0;
        while !done.load(Relaxed) || rounds == 0 {
            other.reaches(&api);
            rounds += 1;
        }
    });
    let (far_heard, near_heard) = (drained(&far), drained(&near));
    assert!(far_heard > 0 && near_heard > 0, "{far_heard} out, {near_heard} in");
    near.send(b"after").expect("sent");
    // Behind what was still on its way.
    eventually("the session goes on", PATIENT, || (heard(&far).0 == b"after").then_some(()));
    let grown = resident().saturating_sub(before);
    assert!(grown < 16 << 10, "{grown} KiB");
}

/// What a process has in memory, in KiB.
fn resident(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("its status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a size");
    line.trim().trim_end_matches("kB").trim().parse().expect("a number")
}

/// Reads what waits, and says how many there were.
fn drained(socket: &UdpSocket) -> usize {
    socket.set_read_timeout(Some(Duration::from_millis(200))).expect("a limit");
    let count = std::iter::from_fn(|| socket.recv(&mut [0; 2048]).ok()).count();
    socket.set_read_timeout(Some(PATIENT)).expect("a limit");
    count
}

/// Attack P16. With nothing allowed, a question to a public resolver is refused here and never
/// leaves, nor do datagrams to its other ports.
#[test]
fn without_a_rule_a_question_to_a_public_resolver_is_denied_and_does_not_leave() {
    let world = World::shared();
    let (sink, fair) = (world.attacker(), world.site("fair"));
    let (closed, open) = (world.guest(""), world.guest(&allow(&[&fair])));
    let ask = |guest: &Guest<'_>, name: &str| {
        let query = client::query(name, RecordType::A);
        let to = (PUBLIC_RESOLVER, 53).into();
        [client::ask_udp, client::ask_tcp]
            .map(|ask| guest.run(|| ask(to, &query)).expect("an answer"))
    };
    for answer in ask(&closed, &sink.name) {
        assert_eq!(client::extended_error(&answer), Some((17, "postern:no-rule".to_owned())));
        assert_eq!(answer.metadata.response_code, hickory_proto::op::ResponseCode::NXDomain);
    }
    is_refused(&towards(&closed, 0, (PUBLIC_RESOLVER, 853).into()));
    closed.event(&[("kind", "dns"), ("outcome", "deny"), ("code", "no-rule")]);
    for answer in ask(&open, &fair.name) {
        assert_eq!(client::addresses(&answer), [fair.ip]);
    }
    assert_eq!(world.names.asked(&sink.name), []);
    assert_eq!(world.sent_to(PUBLIC_RESOLVER), []);
}

/// Attack P17. A host that is denied by name and address is refused within a second and with one
/// code, whatever is spoken to it.
#[test]
fn a_denied_host_is_refused_at_once_with_one_code_by_every_protocol() {
    let world = World::shared();
    let (api, sink) = (world.site("api"), world.attacker());
    let guest = world.guest(&format!(
        "{}[[rule]]\nallow = [\"0.0.0.0/0\"]\n[[rule]]\nallow = [\"0.0.0.0/0\"]\nprotocol = \"udp\"\n\
         [[rule]]\ndeny = [\"{}\", \"{}\"]\n",
        allow(&[&api]), sink.name, sink.ip
    ));
    let hello = client::client_hello(&world.authority, &sink.name);
    let exchange = |number, words: &[u8]| {
        let to = sink.at(number);
        guest.at_once(|| client::exchange(to, &[words], PATIENT))
    };
    let (tls, tcp) = (exchange(443, &hello), exchange(port::ECHO, b"x"));
    assert_eq!(tls.alert(), Some(client::ACCESS_DENIED), "{tls:?}");
    assert_eq!((tcp.end, tcp.text()), (client::End::Reset, String::new()));
    let resolve = format!("{}:80:{}", sink.name, sink.ip);
    let url = format!("http://{}/", sink.name);
    let http = client::at_once(|| guest.curl(&["--resolve", &resolve, &url]));
    assert_eq!(
        (http.status, &http.json()["error"]["code"]),
        (403, &json!("rule")),
        "{}",
        http.text()
    );
    let query = client::query(&sink.name, RecordType::A);
    let dns = guest.at_once(|| client::ask_udp((PUBLIC_RESOLVER, 53).into(), &query));
    let dns = dns.expect("an answer");
    assert_eq!(client::extended_error(&dns), Some((17, "postern:rule".to_owned())));
    is_refused(&towards(&guest, 0, sink.at(TURN)));
    for protocol in ["tls", "tcp", "http", "dns", "udp"] {
        let refused = guest.event(&[("outcome", "deny"), ("protocol", protocol)]);
        assert_eq!(refused["code"], "rule", "{refused}");
    }
    assert_eq!(world.sent_to(sink.ip), []);
    let fair = world.site("fair");
    let far = origin(world, fair.at(TURN));
    towards(&guest, 0, fair.at(TURN)).send(b"control").expect("sent");
    assert_eq!(heard(&far).0, b"control");
    guest.reaches(&api);
}
