//! First flights on the wire: hellos that hide their name, have none, come late or never whole, and
//! more different ones than any client sends.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

use hickory_proto::rr::RecordType;
use policy::net::GATEWAY_IP;
use world::client::{self, ACCESS_DENIED, End, PATIENT};
use world::poll::eventually;
use world::world::PUBLIC_RESOLVER;
use world::{World, allow};

/// The name that every recorded hello says.
const RECORDED: &str = "api.example.test";

fn recorded(client: &str) -> Vec<u8> {
    let hellos = Path::new(env!("CARGO_MANIFEST_DIR")).join("../egress/tests/data/hellos");
    std::fs::read(hellos.join(client).with_extension("bin")).expect("a recorded hello")
}

/// Attacks D19, P08. The outer name is judged; a rule may refuse what hides an inner one; DNS never
/// tells the keys that a client would need.
#[test]
fn a_hello_that_hides_a_name_is_judged_by_the_outer_one_or_refused_as_the_rule_says() {
    let world = World::new();
    let site = world.site("outer");
    world.names.set(RECORDED, &[site.ip.into()]);
    let rule = format!("[[rule]]\nallow = [\"{RECORDED}\"]\n");
    let guest = world.guest(&format!("{rule}ech = \"deny\"\n"));
    let send = |client: &str| {
        let hello = recorded(client);
        let some = |reply: &[u8]| !reply.is_empty();
        guest.run(|| client::exchange_until(site.at(443), &[&hello], PATIENT, some))
    };
    for client in ["chrome152", "firefox155"] {
        let reply = send(client);
        assert_eq!(reply.alert(), Some(ACCESS_DENIED), "{client}: {reply:?}");
    }
    assert_eq!(world.sent_to(site.ip), []);
    guest.event(&[("outcome", "deny"), ("code", "ech"), ("name", RECORDED)]);
    assert_eq!(send("curl").bytes.first(), Some(&22), "the control: a hello without the extension");
    let keys = client::query(RECORDED, RecordType::HTTPS);
    let told = guest.run(|| client::ask_udp((GATEWAY_IP, 53).into(), &keys)).expect("an answer");
    assert!(told.answers.is_empty(), "{told}");
    assert_eq!(guest.set_policy(&rule).status, 200);
    for client in ["chrome152", "firefox155"] {
        assert_eq!(send(client).bytes.first(), Some(&22), "{client}: its outer name is allowed");
    }
    assert_eq!(guest.set_policy("").status, 200);
    assert_eq!(send("chrome152").alert(), Some(ACCESS_DENIED));
}

/// Attacks D06, P07. The address of an allowed name, which the guest was even told, is no name.
#[test]
fn a_hello_without_a_name_is_refused_at_once_at_an_allowed_names_address() {
    let world = World::shared();
    let api = world.site("api");
    let guest = world.guest(&allow(&[&api]));
    guest.reaches(&api);
    let opened = world.origin.connections(api.ip).len();
    let hello = client::client_hello(&world.authority, &api.ip.to_string());
    let reply = guest.at_once(|| client::exchange(api.at(443), &[&hello], PATIENT));
    assert_eq!(reply.alert(), Some(ACCESS_DENIED), "{reply:?}");
    assert_eq!(world.origin.connections(api.ip).len(), opened);
    guest.event(&[("outcome", "deny"), ("code", "no-name")]);
}

/// A resolver of the guest's own choice by DNS over TLS, with and without its name.
#[test]
fn dns_over_tls_is_refused_at_once() {
    const NAME: &str = "dns.google";
    let world = World::new();
    let api = world.site("api");
    let guest = world.guest(&allow(&[&api]));
    world.names.set(NAME, &[PUBLIC_RESOLVER.into()]);
    let at = (PUBLIC_RESOLVER, 853).into();
    let hello = |name: &str| client::client_hello(&world.authority, name);
    for name in [NAME, &PUBLIC_RESOLVER.to_string()] {
        let reply = guest.at_once(|| client::exchange(at, &[&hello(name)], PATIENT));
        assert!(reply.end == End::Reset || reply.alert().is_some(), "{name}: {reply:?}");
    }
    guest.event(&[("kind", "connection"), ("outcome", "deny"), ("destination", &at.to_string())]);
    assert_eq!(world.sent_to(PUBLIC_RESOLVER), []);
    guest.reaches(&api);
    let open = world.guest(&format!("[[rule]]\nallow = [{NAME:?}]\nports = [853]\n"));
    // The control: it is there.
    eventually("it is reached", PATIENT, || {
        open.run(|| client::exchange(at, &[&hello(NAME)], client::AT_ONCE));
        (!world.sent_to(PUBLIC_RESOLVER).is_empty()).then_some(())
    });
}

/// Attack D26. One deadline for the whole hello, however its bytes trickle, and a bound on how many
/// a guest may leave half said; a neighbour does not notice.
#[test]
fn half_hellos_end_at_their_deadline_and_take_nothing_from_a_neighbour() {
    const MORE_THAN_ANY: usize = 1100;
    let world = World::new();
    let (api, sink) = (world.site("api"), world.attacker());
    let (slow, other) = (world.guest(&allow(&[&api])), world.guest(&allow(&[&api])));
    let hello = client::client_hello(&world.authority, &api.name);
    let begun = Instant::now();
    let (mut trickle, held): (TcpStream, Vec<TcpStream>) = slow.run(|| {
        let connect = |_| client::connect(sink.at(443), PATIENT).ok();
        let trickle = client::connect(api.at(443), PATIENT).expect("connect");
        (trickle, (1..MORE_THAN_ANY).filter_map(connect).collect())
    });
    for mut stream in &held {
        let _ = stream.write_all(&hello[..hello.len() / 2]);
    }
    // By its own bound, not by that of the fence on new connections a second.
    slow.event(&[("kind", "connection"), ("outcome", "deny"), ("code", "limit")]);
    other.reaches(&api);
    let mut bytes = hello.iter();
    trickle.set_read_timeout(Some(Duration::from_millis(100))).expect("read timeout");
    loop {
        let last = bytes.next().is_none_or(|byte| trickle.write_all(&[*byte]).is_err());
        let ended = match trickle.read(&mut [0; 64]) {
            Ok(length) => length == 0,
            Err(e) => !matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut),
        };
        if ended || last {
            break;
        }
        assert!(begun.elapsed() < PATIENT * 6, "a byte now and then keeps it open");
    }
    for mut stream in held {
        let end = client::read_to_end(&mut stream, &mut Vec::new(), PATIENT * 3);
        assert_ne!(end, End::Open, "after {:?}", begun.elapsed());
    }
    assert_eq!(world.sent_to(sink.ip), []);
    slow.reaches(&api);
    assert_eq!(world.origin.connections(api.ip).len(), 2, "the two controls");
}

/// Attack P51. A guest that may reach nothing says a thousand names; nothing is made for any of them.
#[test]
fn a_thousand_names_from_a_guest_without_a_policy_are_refused_and_leave_nothing_behind() {
    const NAMES: usize = 1000;
    let world = World::new();
    let (api, sink) = (world.site("api"), world.attacker());
    let (loud, other) = (world.guest(""), world.guest(&allow(&[&api])));
    let memory = || {
        let pid = world.daemon().pid().expect("it runs");
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("its status");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("its memory");
        line.trim().split(' ').next().and_then(|kib| kib.parse::<u64>().ok()).expect("a number")
    };
    other.reaches(&api);
    let before = memory();
    std::thread::scope(|scope| {
        for worker in 0..4 {
            let (loud, world, sink) = (&loud, &world, &sink);
            scope.spawn(move || {
                for n in (worker..NAMES).step_by(4) {
                    let name = format!("n{n}.{}", sink.name);
                    let hello = client::client_hello(&world.authority, &name);
                    let reply = loud.run(|| client::exchange(sink.at(443), &[&hello], PATIENT));
                    assert_eq!(reply.alert(), Some(ACCESS_DENIED), "{name}: {reply:?}");
                }
            });
        }
        other.reaches(&api);
    });
    let grown = memory().saturating_sub(before);
    assert!(grown < 64 << 10, "{grown} KiB");
    assert_eq!(world.sent_to(sink.ip), []);
    let counted = || -> u64 {
        let query = format!("sandbox={}&kind=connection&outcome=deny&code=no-rule", loud.name);
        let count = |record: &serde_json::Value| record["count"].as_u64().unwrap_or(1);
        world.records(&query).iter().map(count).sum()
    };
    let names = u64::try_from(NAMES).expect("a thousand");
    eventually("each is counted", PATIENT, || (counted() >= names).then_some(()));
    assert_eq!(counted(), names, "once");
    assert_eq!(world.names.asked(&sink.name), []);
    other.reaches(&api);
}
