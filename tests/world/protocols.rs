//! TCP that carries no name of its own, on ports that a rule names: let through by the name that the
//! guest was told for the address, and by nothing else. Real servers and clients are in `clients`.

use std::io::{Read, Write};
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use hickory_proto::rr::RecordType;
use world::client::{self, End, PATIENT};
use world::guest::Guest;
use world::origin::{GREETING, port};
use world::poll::eventually;
use world::world::EGRESS;
use world::{Site, World};

/// Longer than a guest may be silent where nothing it was told could let it through, and far from the
/// time it has to say a name.
const SOON: Duration = Duration::from_secs(4);

/// What no server of the web understands: PostgreSQL's request for TLS, then noise.
const NOISE: &[u8] = b"\x00\x00\x00\x08\x04\xd2\x16\x2f\xff\xfe\x00\x01";

/// A rule that lets these names out on one port, with more keys.
fn on_port(sites: &[&Site], number: u16, more: &str) -> String {
    let names: Vec<String> = sites.iter().map(|site| format!("{:?}", site.name)).collect();
    format!("[[rule]]\nallow = [{}]\nports = [{number}]\n{more}", names.join(", "))
}

/// What the guest is told for a name.
fn told(guest: &Guest<'_>, name: &str) -> Vec<Ipv4Addr> {
    let resolver = (policy::net::GATEWAY_IP, 53).into();
    let query = client::query(name, RecordType::A);
    guest.run(|| client::addresses(&client::ask_udp(resolver, &query).expect("an answer")))
}

/// Sends bytes that are echoed and reads them back.
fn echoes(guest: &Guest<'_>, site: &Site, number: u16, bytes: &[u8]) {
    let back = guest.run(|| {
        let mut stream = client::connect(site.at(number), PATIENT).expect("connect");
        stream.write_all(bytes).expect("write");
        let mut back = vec![0; bytes.len()];
        stream.read_exact(&mut back).expect("an echo");
        back
    });
    assert_eq!(back, bytes);
}

/// Promise 1. Bytes of no protocol we know.
#[test]
fn an_unknown_protocol_is_let_through_by_the_name_its_address_was_told_under() {
    let world = World::shared();
    let (echo, sink) = (world.site("echo"), world.attacker());
    let guest = world.guest(&on_port(&[&echo], port::ECHO, ""));
    let untold = guest.run(|| client::exchange(echo.at(port::ECHO), &[NOISE], PATIENT));
    assert_eq!((untold.end, untold.bytes.len()), (End::Reset, 0), "nothing was told: {untold:?}");
    assert_eq!(world.sent_to(echo.ip), []);
    assert_eq!(told(&guest, &echo.name), [echo.ip]);
    echoes(&guest, &echo, port::ECHO, NOISE);
    assert_eq!(world.origin.connections(echo.ip)[0].peer.ip(), EGRESS);
    guest.event(&[("kind", "connection"), ("outcome", "allow"), ("name", &echo.name)]);
    let refused = guest.at_once(|| client::exchange(sink.at(port::ECHO), &[NOISE], PATIENT));
    assert_eq!((refused.end, refused.bytes.len()), (End::Reset, 0), "{refused:?}");
    assert_eq!(world.sent_to(sink.ip), []);
    guest.event(&[("outcome", "deny"), ("destination", &sink.at(port::ECHO).to_string())]);
}

/// Promise 5. A client that waits for the server to speak is told so, too.
#[test]
fn a_silent_client_is_refused_soon_where_no_name_was_told() {
    let world = World::shared();
    let (database, sink) = (world.site("db"), world.attacker());
    let guest = world.guest(&on_port(&[&database], port::SERVER_FIRST, ""));
    let refused = guest.run(|| client::exchange(sink.at(port::SERVER_FIRST), &[], PATIENT));
    assert_eq!((refused.end, refused.bytes.len()), (End::Reset, 0), "{refused:?}");
    assert!(refused.took < SOON, "{:?}", refused.took);
    assert_eq!(world.sent_to(sink.ip), []);
    let to = sink.at(port::SERVER_FIRST).to_string();
    guest.event(&[("outcome", "deny"), ("code", "no-name"), ("destination", &to)]);
    told(&guest, &database.name);
    let to = database.at(port::SERVER_FIRST);
    let greeted = guest.run(|| client::exchange_until(to, &[], PATIENT, |got| got == GREETING));
    assert_eq!(greeted.bytes, GREETING);
}

/// Promise 5. A rule without ports means TLS and HTTP; what was told for the address does not widen it.
#[test]
fn the_ports_of_the_web_take_no_other_protocol_and_nothing_is_dialled_for_a_silent_client() {
    let world = World::shared();
    let api = world.site("api");
    let guest = world.guest(&world::allow(&[&api]));
    told(&guest, &api.name);
    for number in [80, 443] {
        for bytes in [NOISE, b"SSH-2.0-OpenSSH_9.2\r\n", b"EHLO me\r\nSTARTTLS\r\n"] {
            let reply = guest.at_once(|| client::exchange(api.at(number), &[bytes], PATIENT));
            assert!(matches!(reply.end, End::Reset | End::Closed), "{number}: {reply:?}");
        }
        let mute = guest.run(|| client::exchange(api.at(number), &[], client::AT_ONCE));
        assert_eq!((mute.end, mute.bytes.len()), (End::Open, 0), "{number}: {mute:?}");
    }
    assert_eq!(world.sent_to(api.ip), []);
    guest.event(&[("outcome", "deny"), ("code", "undecidable")]);
    guest.reaches(&api);
}

/// Promise 5. Nor does the name that was told stand in for a request that a rule wants to see.
#[test]
fn a_rule_that_needs_a_request_lets_no_other_protocol_through() {
    let world = World::shared();
    for more in ["methods = [\"GET\"]\n", "paths = [\"/**\"]\n", "ech = \"deny\"\n"] {
        let site = world.site("api");
        let guest = world.guest(&on_port(&[&site], port::HTTP_ALT, more));
        told(&guest, &site.name);
        let began = Instant::now();
        let spoken = guest.run(|| client::exchange(site.at(port::HTTP_ALT), &[NOISE], PATIENT));
        let mute = guest.run(|| client::exchange(site.at(port::HTTP_ALT), &[], PATIENT));
        for reply in [spoken, mute] {
            assert_eq!((reply.end, reply.bytes.len()), (End::Reset, 0), "{more}: {reply:?}");
        }
        assert!(began.elapsed() < 2 * SOON, "{more}: {:?}", began.elapsed());
        assert_eq!(world.sent_to(site.ip), [], "{more}");
        guest.event(&[("outcome", "deny"), ("code", "undecidable")]);
        let got = guest.curl(&[&format!("http://{}:{}/control", site.name, port::HTTP_ALT)]);
        assert_eq!(got.status, 200, "control: {more}: {}", got.stderr);
    }
}

/// Promise 5. One address, two names: the guest could mean either, so neither may be denied.
#[test]
fn of_two_names_told_for_an_address_none_may_be_denied_and_an_allowed_one_is_dialled() {
    let world = World::shared();
    let (good, other) = (world.site("good"), world.site("other"));
    world.names.set(&other.name, &[good.ip.into()]);
    let (rule, port) = (on_port(&[&good], port::ECHO, ""), port::ECHO);
    let guest = world.guest(&format!("{rule}[[rule]]\nallow = [{:?}]\n", other.name));
    assert_eq!(told(&guest, &good.name), told(&guest, &other.name));
    echoes(&guest, &good, port, NOISE);
    guest.event(&[("kind", "connection"), ("outcome", "allow"), ("name", &good.name)]);
    let denied = format!("{rule}[[rule]]\ndeny = [{:?}]\nports = [{port}]\n", other.name);
    assert_eq!(guest.set_policy(&denied).status, 200);
    let opened = world.origin.connections(good.ip).len();
    let refused = guest.run(|| client::exchange(good.at(port), &[NOISE], PATIENT));
    assert_eq!((refused.end, refused.bytes.len()), (End::Reset, 0), "{refused:?}");
    assert_eq!(world.origin.connections(good.ip).len(), opened);
    guest.event(&[("outcome", "deny"), ("code", "rule")]);
    assert_eq!(guest.set_policy(&rule).status, 200);
    echoes(&guest, &good, port, NOISE);
}

/// Promise 4. The name is dialled, wherever it leads by then, and not the address that was told for it.
#[test]
fn the_name_that_was_told_is_resolved_anew_and_dialled() {
    let world = World::shared();
    let (echo, moved) = (world.site("echo"), world.site("moved"));
    let guest = world.guest(&on_port(&[&echo], port::ECHO, ""));
    let turns = vec![vec![echo.ip.into()], vec![moved.ip.into()]];
    world.names.set_turns(&echo.name, 0, turns);
    assert_eq!(told(&guest, &echo.name), [echo.ip]);
    eventually("the old answer is forgotten", Duration::from_secs(60), || {
        echoes(&guest, &echo, port::ECHO, NOISE);
        let arrived = world.origin.connections(moved.ip).len();
        (arrived > 0).then_some(())
    });
    let before = world.sent_to(echo.ip).len();
    echoes(&guest, &echo, port::ECHO, NOISE);
    assert_eq!(world.sent_to(echo.ip).len(), before);
}

/// Attack D21. What a connection opens with decides, and is final: on a named port, TLS that begins
/// later goes where the first bytes went, whatever name it says.
#[test]
fn tls_that_begins_after_clear_text_goes_to_the_host_of_the_rule_and_nowhere_else() {
    let world = World::shared();
    let (mail, sink) = (world.site("mail"), world.attacker());
    let guest = world.guest(&on_port(&[&mail], port::ECHO, ""));
    told(&guest, &mail.name);
    let hello = client::client_hello(&world.authority, &sink.name);
    let flight = [b"EHLO me\r\nSTARTTLS\r\n", &hello[..]].concat();
    echoes(&guest, &mail, port::ECHO, &flight);
    assert_eq!(world.origin.connections(mail.ip).len(), 1);
    assert_eq!(world.sent_to(sink.ip), []);
    assert_eq!(world.names.asked(&sink.name), []);
    let first = guest.run(|| client::exchange(mail.at(port::ECHO), &[&hello], PATIENT));
    assert_eq!(first.alert(), Some(client::ACCESS_DENIED), "TLS from the start: {first:?}");
}
