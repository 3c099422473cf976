//! What no rule names does not get out, and the guest is told so at once, in its own protocol.

use std::io;
use std::net::{SocketAddr, UdpSocket};

use world::client::{self, ACCESS_DENIED, End, PATIENT};
use world::origin::port;
use world::world::METADATA;
use world::{World, allow};

/// Promise 3.
#[test]
fn a_denied_tls_name_gets_alert_49_and_the_far_side_hears_nothing() {
    let world = World::shared();
    let (api, sink) = (world.site("api"), world.attacker());
    let guest = world.guest(&allow(&[&api]));
    let hello = client::client_hello(&world.authority, &sink.name);
    let reply = guest.at_once(|| client::exchange(sink.at(443), &[&hello], PATIENT));
    assert_eq!(reply.alert(), Some(ACCESS_DENIED), "{reply:?}");
    assert_eq!(reply.end, End::Closed);
    assert_eq!(world.sent_to(sink.ip), []);
    assert_eq!(world.names.asked(&sink.name), []);
    let record = guest.event(&[("outcome", "deny"), ("name", &sink.name), ("code", "no-rule")]);
    assert_eq!(record["sandbox"], guest.name);
    guest.reaches(&api);
}

/// Promise 3. A denied name is denied at an allowed name's address too.
#[test]
fn a_denied_tls_name_is_refused_at_the_address_of_an_allowed_one() {
    let world = World::shared();
    let (api, other) = (world.site("api"), world.site("other"));
    let guest = world.guest(&allow(&[&api]));
    guest.reaches(&api);
    let hello = client::client_hello(&world.authority, &other.name);
    let reply = guest.run(|| client::exchange(api.at(443), &[&hello], PATIENT));
    assert_eq!(reply.alert(), Some(ACCESS_DENIED), "{reply:?}");
    assert_eq!(world.origin.connections(api.ip).len(), 1, "that of the control");
    assert_eq!(world.sent_to(other.ip), []);
    guest.event(&[("outcome", "deny"), ("name", &other.name), ("code", "no-rule")]);
}

/// Promise 4. Attacks F01, F02, P02. The guest's idea of an address is evidence, not authority.
#[test]
fn an_allowed_name_at_the_attackers_address_goes_to_our_own_resolution() {
    let world = World::shared();
    let (api, sink) = (world.site("api"), world.attacker());
    let guest = world.guest(&allow(&[&api]));
    for (scheme, number) in [("https", 443), ("http", 80)] {
        let resolve = format!("{}:{number}:{}", api.name, sink.ip);
        let got = guest.curl(&["--resolve", &resolve, &format!("{scheme}://{}/f01", api.name)]);
        assert_eq!(got.status, 200, "{scheme}: {}", got.stderr);
    }
    let requests = world.requests(&api.name);
    assert_eq!(requests.len(), 2);
    assert!(requests.iter().all(|request| request.local.ip() == api.ip), "{requests:?}");
    assert_eq!(world.sent_to(sink.ip), []);
}

/// Promise 3. In clear text: an agent is told what was refused and why, in a form it can act on.
#[test]
fn a_denied_http_host_gets_403_with_the_reason_and_the_far_side_hears_nothing() {
    let world = World::shared();
    let (api, sink) = (world.site("api"), world.attacker());
    let guest = world.guest(&allow(&[&api]));
    let resolve = format!("{}:80:{}", sink.name, sink.ip);
    let got =
        client::at_once(|| guest.curl(&["--resolve", &resolve, &format!("http://{}/", sink.name)]));
    assert_eq!(got.status, 403, "{}", got.stderr);
    assert!(got.head.to_ascii_lowercase().contains("postern-deny: no-rule"), "{}", got.head);
    assert_eq!(got.json()["error"]["code"], "no-rule", "{}", got.text());
    assert_eq!(got.json()["error"]["host"], sink.name, "{}", got.text());
    assert_eq!(world.sent_to(sink.ip), []);
    guest.event(&[("outcome", "deny"), ("name", &sink.name), ("code", "no-rule")]);
    guest.reaches(&api);
}

/// Promise 5. TLS to an address says no name.
#[test]
fn tls_without_a_name_is_refused() {
    let world = World::shared();
    let (api, sink) = (world.site("api"), world.attacker());
    let guest = world.guest(&allow(&[&api]));
    let hello = client::client_hello(&world.authority, &sink.ip.to_string());
    let reply = guest.at_once(|| client::exchange(sink.at(443), &[&hello], PATIENT));
    assert_eq!(reply.alert(), Some(ACCESS_DENIED), "{reply:?}");
    assert_eq!(world.sent_to(sink.ip), []);
    guest.event(&[("outcome", "deny"), ("code", "no-name")]);
    guest.reaches(&api);
}

/// Promise 5. Nor does HTTP to an address.
#[test]
fn http_to_an_address_is_refused() {
    let world = World::shared();
    let (api, sink) = (world.site("api"), world.attacker());
    let guest = world.guest(&allow(&[&api]));
    let got = client::at_once(|| guest.curl(&[&format!("http://{}/", sink.ip)]));
    assert_eq!(got.status, 403, "{}", got.stderr);
    assert_eq!(world.sent_to(sink.ip), []);
    guest.reaches(&api);
}

/// Promise 5. Attack F12. Any other TCP, at once; the manual says that it is accepted before it is judged.
#[test]
fn any_other_tcp_is_reset_at_once() {
    let world = World::shared();
    let (api, sink) = (world.site("api"), world.attacker());
    let guest = world.guest(&allow(&[&api]));
    for number in [22, 25, 853, 3306, 6667, 9418, port::ECHO, 65_535] {
        let reply =
            guest.at_once(|| client::exchange(sink.at(number), &[b"SSH-2.0-x\r\n"], PATIENT));
        assert_eq!((reply.end, reply.bytes.len()), (End::Reset, 0), "port {number}");
    }
    assert_eq!(world.sent_to(sink.ip), []);
    guest.event(&[("outcome", "deny"), ("destination", &format!("{}:22", sink.ip))]);
    guest.reaches(&api);
}

/// Promise 5. The port is part of the rule.
#[test]
fn an_allowed_name_on_another_port_is_refused_with_code_port() {
    let world = World::shared();
    let api = world.site("api");
    let guest = world.guest(&allow(&[&api]));
    guest.reaches(&api);
    let hello = client::client_hello(&world.authority, &api.name);
    let reply = guest.at_once(|| client::exchange(api.at(port::HTTPS_ALT), &[&hello], PATIENT));
    assert!(reply.alert() == Some(ACCESS_DENIED) || reply.end == End::Reset, "{reply:?}");
    let to_port = |seen: &world::wire::Seen| {
        seen.is_to(api.ip) && seen.ports.is_some_and(|(_, to)| to == port::HTTPS_ALT)
    };
    assert_eq!(world.sent(to_port), []);
    guest.event(&[("outcome", "deny"), ("code", "port")]);
}

/// Promise 5. Attack D10. On 443 and 80 only TLS and HTTP pass, whatever was told about the address.
#[test]
fn bytes_that_are_neither_tls_nor_http_are_undecidable_and_reset() {
    let world = World::shared();
    let api = world.site("api");
    let guest = world.guest(&allow(&[&api]));
    guest.reaches(&api);
    let opened = world.origin.connections(api.ip).len();
    for number in [443, 80] {
        let junk: &[&[u8]] = &[b"\x00\x01\x02 not a protocol anyone knows\r\n\r\n"];
        let reply = guest.at_once(|| client::exchange(api.at(number), junk, PATIENT));
        assert_ne!(reply.end, End::Open, "port {number}");
    }
    assert_eq!(world.origin.connections(api.ip).len(), opened);
    guest.event(&[("outcome", "deny"), ("code", "undecidable")]);
}

/// Promise 6. QUIC and every other UDP is answered by an ICMP error, so clients fall back at once.
#[test]
fn udp_is_refused_with_an_icmp_error_at_once() {
    let world = World::shared();
    let (api, sink) = (world.site("api"), world.attacker());
    let guest = world.guest(&allow(&[&api]));
    for (site, number) in [(&sink, 443), (&api, 443), (&sink, 123), (&sink, 5353), (&sink, 853)] {
        let error = guest.at_once(|| icmp_error(site.at(number)));
        assert_eq!(error, io::ErrorKind::HostUnreachable, "port {number}");
    }
    let udp = |seen: &world::wire::Seen| {
        seen.protocol == Some(17) && (seen.is_to(sink.ip) || seen.is_to(api.ip))
    };
    assert_eq!(world.sent(udp), []);
    guest.event(&[("kind", "frame"), ("code", "quic")]);
    guest.reaches(&api);
}

fn icmp_error(to: SocketAddr) -> io::ErrorKind {
    let socket = UdpSocket::bind("0.0.0.0:0").expect("bind");
    socket.connect(to).expect("connect");
    socket.set_read_timeout(Some(PATIENT)).expect("timeout");
    socket.send(&[0xc0; 1200]).expect("send");
    socket.recv(&mut [0; 16]).expect_err("nobody answers").kind()
}

/// Promise 10. Attack F04. The metadata service of the cloud is not reached by any spelling.
#[test]
fn the_metadata_service_is_refused_by_address_and_by_a_name_that_leads_there() {
    let world = World::shared();
    let (api, trap) = (world.site("api"), world.site("trap"));
    world.names.set(&trap.name, &[METADATA.into()]);
    let guest = world.guest(&allow(&[&api, &trap]));
    let by_address =
        client::at_once(|| guest.curl(&[&format!("http://{METADATA}/latest/meta-data/")]));
    assert_eq!(by_address.status, 403, "{}", by_address.stderr);
    let by_host =
        guest.curl(&["-H", &format!("Host: {}", api.name), &format!("http://{METADATA}/m")]);
    assert_eq!(by_host.status, 200, "goes to {}: {}", api.name, by_host.stderr);
    let resolve = format!("{}:80:{METADATA}", trap.name);
    let by_name = guest.curl(&["--resolve", &resolve, &format!("http://{}/", trap.name)]);
    assert_eq!(by_name.status, 403, "{}", by_name.stderr);
    assert_eq!(by_name.json()["error"]["code"], "private-address", "{}", by_name.text());
    assert_eq!(guest.curl(&[&format!("https://{}/", trap.name)]).code, 6, "not told an address");
    assert_eq!(world.sent_to(METADATA), []);
}
