//! What a rule names gets out, whole, from the egress address.

use std::io::{Read, Write};
use std::net::Shutdown;

use world::client::{self, End, PATIENT};
use world::origin::{GREETING, pattern, port, sum};
use world::world::EGRESS;
use world::{World, allow};

/// Promise 1. The origin sees our egress address, and the name by which the guest asked.
#[test]
fn an_allowed_tls_host_is_reached_from_the_egress_address() {
    let world = World::shared();
    let api = world.site("api");
    let guest = world.guest(&allow(&[&api]));
    let got = guest.curl(&[&format!("https://{}/hello", api.name)]);
    assert_eq!(got.status, 200, "{}", got.stderr);
    let requests = world.requests(&api.name);
    let [request] = &requests[..] else { panic!("{requests:?}") };
    assert_eq!(request.sni.as_deref(), Some(&*api.name));
    assert_eq!(request.peer.ip(), EGRESS);
    assert_eq!(request.local, api.at(443));
    guest.event(&[("kind", "connection"), ("outcome", "allow"), ("name", &api.name)]);
}

/// Promise 2. The same in clear text.
#[test]
fn an_allowed_http_host_is_reached_from_the_egress_address() {
    let world = World::shared();
    let api = world.site("api");
    let guest = world.guest(&allow(&[&api]));
    let got = guest.curl(&[&format!("http://{}/hello?q=1", api.name)]);
    assert_eq!(got.status, 200, "{}", got.stderr);
    let requests = world.requests(&api.name);
    let [request] = &requests[..] else { panic!("{requests:?}") };
    assert_eq!((request.peer.ip(), &*request.target), (EGRESS.into(), "/hello?q=1"));
    let record = guest.event(&[("kind", "request"), ("outcome", "allow"), ("name", &api.name)]);
    assert_eq!(record["path"], "/hello", "the query is nobody's business");
}

/// Promise 1. Every name below it, at any depth, and not itself.
#[test]
fn a_wildcard_rule_lets_out_what_is_below_it_and_not_the_name_itself() {
    let world = World::shared();
    let zone = world.site("zone");
    for name in ["a", "a.b"] {
        world.names.set(&format!("{name}.{}", zone.name), &[zone.ip.into()]);
    }
    let guest = world.guest(&format!("[[rule]]\nallow = [\"*.{}\"]\n", zone.name));
    for name in ["a", "a.b", "A.B"] {
        let got = guest.curl(&[&format!("https://{name}.{}/", zone.name)]);
        assert_eq!(got.status, 200, "{name}: {}", got.stderr);
    }
    let got = guest.curl(&[
        "--resolve",
        &format!("{0}:443:{1}", zone.name, zone.ip),
        &format!("https://{}/", zone.name),
    ]);
    assert_eq!(got.status, 0, "{}", got.head);
}

/// Promise 1. A server that speaks first is reached by the name its address was told under.
#[test]
fn a_server_that_speaks_first_is_reached_on_a_port_that_a_rule_names() {
    let world = World::shared();
    let database = world.site("db");
    let rule =
        format!("[[rule]]\nallow = [\"{}\"]\nports = [{}]\n", database.name, port::SERVER_FIRST);
    let guest = world.guest(&rule);
    let greeting = guest.run(|| {
        let resolver = (policy::net::GATEWAY_IP, 53).into();
        let query = client::query(&database.name, hickory_proto::rr::RecordType::A);
        let told = client::addresses(&client::ask_udp(resolver, &query).expect("an answer"));
        let mut stream =
            client::connect((told[0], port::SERVER_FIRST).into(), PATIENT).expect("connect");
        let mut greeting = [0; GREETING.len()];
        stream.read_exact(&mut greeting).expect("it speaks first");
        stream.write_all(b"select 1").expect("write");
        let mut reply = [0; 8];
        stream.read_exact(&mut reply).expect("it echoes");
        assert_eq!(&reply, b"select 1");
        greeting
    });
    assert_eq!(greeting, GREETING);
    assert_eq!(world.origin.connections(database.ip)[0].peer.ip(), EGRESS);
}

/// Promise 1. An address literal goes out by a rule that names it, and by nothing else.
#[test]
fn an_address_goes_out_by_a_rule_that_names_the_address() {
    let world = World::shared();
    let (named, other) = (world.attacker(), world.attacker());
    let guest = world.guest(&format!("[[rule]]\nallow = [\"{}\"]\nports = [7]\n", named.ip));
    let reply = guest.run(|| {
        let mut stream = client::connect(named.at(port::ECHO), PATIENT).expect("connect");
        stream.write_all(b"hello\r\n").expect("write");
        let mut reply = [0; 7];
        stream.read_exact(&mut reply).map(|()| reply)
    });
    assert_eq!(&reply.expect("an echo"), b"hello\r\n");
    let refused = guest.run(|| client::exchange(other.at(port::ECHO), &[b"hello\r\n"], PATIENT));
    assert_eq!(refused.end, End::Reset);
    assert_eq!(world.sent_to(other.ip), []);
}

/// Promise 1. From the egress address or not at all.
#[test]
fn without_its_egress_address_nothing_leaves_from_another() {
    let world = World::new();
    let api = world.site("api");
    let guest = world.guest(&allow(&[&api]));
    guest.reaches(&api);
    let before = world.sent_to(api.ip).len();
    world.host.ip(&format!("addr del {EGRESS}/28 dev uplink"));
    let got = guest.curl(&[&format!("http://{}/", api.name)]);
    assert_eq!(got.status, 503, "{} {}", got.stderr, got.text());
    assert_eq!(got.json()["error"]["code"], "egress-ip-unavailable", "{}", got.text());
    let from_others = |seen: &world::wire::Seen| seen.is_to(api.ip) && !seen.is_from(EGRESS);
    world.settle();
    assert_eq!(world.wire.frames(from_others), []);
    assert!(world.sent_to(api.ip).iter().skip(before).all(|seen| !seen.opens));
    world.host.ip(&format!("addr add {EGRESS}/28 dev uplink"));
    guest.reaches(&api);
}

/// Promise 14. Nothing is lost or changed on the way, in either direction.
#[test]
fn fifty_megabytes_each_way_arrive_unchanged() {
    const COUNT: usize = 50_000_000;
    let world = World::shared();
    let api = world.site("bulk");
    let guest = world.guest(&allow(&[&api]));
    let expected = sum(&pattern(COUNT));
    let down = guest.curl(&["-m", "60", &format!("https://{}/bytes/{COUNT}", api.name)]);
    assert_eq!((down.body.len(), sum(&down.body)), (COUNT, expected.clone()), "{}", down.stderr);
    let file = world.dir().join("bulk");
    std::fs::write(&file, pattern(COUNT)).expect("write");
    let data = format!("@{}", file.display());
    for scheme in ["https", "http"] {
        let url = format!("{scheme}://{}/sum", api.name);
        let up = guest.curl(&["-m", "60", "-H", "Expect:", "--data-binary", &data, &url]);
        assert_eq!(up.text(), expected, "{scheme}: {}", up.stderr);
    }
    let record = guest.event(&[("kind", "connection"), ("outcome", "closed"), ("name", &api.name)]);
    assert!(record["bytes_in"].as_u64().is_some_and(|bytes| bytes > COUNT as u64), "{record}");
}

/// Promise 14. Attack P31. A client that is done sending still gets its answer.
#[test]
fn a_half_closed_connection_still_gets_its_answer() {
    let world = World::shared();
    let echo = world.site("echo");
    let guest = world.guest(&format!("[[rule]]\nallow = [\"{}\"]\nports = [7]\n", echo.ip));
    let sent = pattern(300_000);
    let received = guest.run(|| {
        let mut stream = client::connect(echo.at(port::ECHO), PATIENT).expect("connect");
        let mut writer = stream.try_clone().expect("clone");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                writer.write_all(&sent).expect("write");
                writer.shutdown(Shutdown::Write).expect("half-close");
            });
            let mut received = Vec::new();
            let end = client::read_to_end(&mut stream, &mut received, PATIENT);
            assert_eq!(end, End::Closed);
            received
        })
    });
    assert_eq!(sum(&received), sum(&sent));
}

/// Promise 15. Guests are the same inside; who speaks is decided by the tap.
#[test]
fn two_guests_with_one_address_and_one_source_port_speak_at_once_and_are_told_apart() {
    const COUNT: usize = 3_000_000;
    let world = World::shared();
    let api = world.site("twins");
    let twins = [world.guest(&allow(&[&api])), world.guest(&allow(&[&api]))];
    let url = format!("https://{}/bytes/{COUNT}", api.name);
    std::thread::scope(|scope| {
        for twin in &twins {
            scope.spawn(|| {
                let got = twin.curl(&["--local-port", "40000", "--limit-rate", "3M", &url]);
                assert_eq!(sum(&got.body), sum(&pattern(COUNT)), "{}", got.stderr);
            });
        }
    });
    let ports = twins.each_ref().map(|twin| {
        let fields = [("kind", "connection"), ("outcome", "allow"), ("name", &*api.name)];
        twin.event(&fields)["egress"].as_str().expect("an egress address").to_owned()
    });
    let peers: Vec<String> =
        world.requests(&api.name).iter().map(|request| request.peer.to_string()).collect();
    assert_ne!(ports[0], ports[1]);
    assert!(ports.iter().all(|port| peers.contains(port)), "{ports:?} {peers:?}");
}
