//! Names: what is told to a guest, and what is asked of the outside on its behalf.

use hickory_proto::op::{Message, ResponseCode};
use hickory_proto::rr::RecordType;
use policy::net::GATEWAY_IP;
use world::client::{self, AT_ONCE, PATIENT};
use world::world::{NEIGHBOUR, PUBLIC_RESOLVER};
use world::{Guest, World, allow};

fn ask(guest: &Guest<'_>, name: &str, kind: RecordType) -> Message {
    let query = client::query(name, kind);
    guest.run(|| client::ask_udp((GATEWAY_IP, 53).into(), &query)).expect("an answer")
}

/// Attacks C01, P13. Promise 7. No question leaves about a name that may not be reached; labels carry nothing out.
#[test]
fn a_denied_name_is_nxdomain_with_the_reason_and_is_not_asked_upstream() {
    let world = World::shared();
    let (api, sink) = (world.site("api"), world.attacker());
    let guest = world.guest(&allow(&[&api]));
    for name in [sink.name.clone(), format!("{}.{}", "5ec2e7".repeat(9), sink.name)] {
        let reply = client::at_once(|| ask(&guest, &name, RecordType::A));
        assert_eq!(reply.metadata.response_code, ResponseCode::NXDomain);
        let (code, text) = client::extended_error(&reply).expect("an extended error");
        assert_eq!((code, text.contains("postern:no-rule")), (17, true), "{text}");
    }
    let told = ask(&guest, &api.name, RecordType::A);
    assert_eq!(client::addresses(&told), [api.ip], "{told}");
    assert_eq!(world.names.asked(&sink.name), []);
    assert_ne!(world.names.asked(&api.name), [], "control");
    guest.event(&[("kind", "dns"), ("outcome", "deny"), ("code", "no-rule"), ("name", &sink.name)]);
}

/// Attack C09. Promise 8. Whatever resolver a guest aims at, ours answers, over UDP and TCP.
#[test]
fn a_public_resolver_is_answered_by_ours_and_never_asked() {
    let world = World::shared();
    let (api, sink) = (world.site("api"), world.attacker());
    let guest = world.guest(&allow(&[&api]));
    let public = (PUBLIC_RESOLVER, 53).into();
    for (site, expected) in [(&api, vec![api.ip]), (&sink, vec![])] {
        let query = client::query(&site.name, RecordType::A);
        let udp = guest.run(|| client::ask_udp(public, &query)).expect("an answer by UDP");
        let tcp = guest.run(|| client::ask_tcp(public, &query)).expect("an answer by TCP");
        assert_eq!(client::addresses(&udp), expected);
        assert_eq!(client::addresses(&tcp), expected);
    }
    assert_eq!(world.sent_to(PUBLIC_RESOLVER), []);
    assert_eq!(world.names.asked(&sink.name), []);
    let out = guest.command("dig").args(["+short", "+tcp", "@8.8.4.4", &api.name]).output();
    assert_eq!(String::from_utf8_lossy(&out.expect("dig").stdout).trim(), api.ip.to_string());
}

/// Promise 9. A name that leads to a private address leads nowhere.
#[test]
fn a_name_with_a_private_address_is_not_told_and_not_dialled() {
    let world = World::shared();
    let api = world.site("api");
    let guest = world.guest("[[rule]]\nallow = [\"*.example.com\"]\n");
    let own = [world::world::HOST, world::world::EGRESS, guest.internal(), [127, 0, 0, 1].into()];
    for address in own.into_iter().chain([NEIGHBOUR, world::world::METADATA]) {
        let trap = world.site("trap");
        world.names.set(&trap.name, &[address.into()]);
        let reply = ask(&guest, &trap.name, RecordType::A);
        assert!(client::addresses(&reply).is_empty(), "{address}: {reply}");
        let (code, text) = client::extended_error(&reply).expect("an extended error");
        assert_eq!((code, text.contains("private-address")), (17, true), "{address}: {text}");
        let hello = client::client_hello(&world.authority, &trap.name);
        let reply = guest.run(|| client::exchange(trap.at(443), &[&hello], PATIENT));
        assert_eq!(reply.alert(), Some(client::ACCESS_DENIED), "{address}: {reply:?}");
        guest.event(&[("kind", "connection"), ("code", "private-address"), ("name", &trap.name)]);
        assert_eq!(world.sent_to(address), [], "{address}");
    }
    guest.reaches(&api);
}

/// Attack C05. Promise 9. Public when asked, private when dialled.
#[test]
fn a_name_that_turns_private_after_it_was_told_is_not_dialled() {
    let world = World::shared();
    let (api, trap) = (world.site("api"), world.site("trap"));
    world.names.set_turns(&trap.name, 0, vec![vec![trap.ip.into()], vec![NEIGHBOUR.into()]]);
    let guest = world.guest(&allow(&[&api, &trap]));
    assert_eq!(client::addresses(&ask(&guest, &trap.name, RecordType::A)), [trap.ip], "control");
    // A positive answer may be cached for a moment by our own resolver: until it is asked again, the
    // public address may be dialled; the private one never.
    let hello = client::client_hello(&world.authority, &trap.name);
    world::poll::eventually("the name is refused", PATIENT, || {
        let reply = guest.run(|| client::exchange(trap.at(443), &[&hello], AT_ONCE));
        (reply.alert() == Some(client::ACCESS_DENIED)).then_some(())
    });
    assert_eq!(world.sent_to(NEIGHBOUR), []);
    guest.event(&[("outcome", "deny"), ("code", "private-address"), ("name", &trap.name)]);
    guest.reaches(&api);
}

/// Promise 7. The guest has no IPv6, and hears nothing that would let it hide a name.
#[test]
fn questions_for_ipv6_and_service_bindings_have_no_data() {
    let world = World::shared();
    let api = world.site("api");
    let guest = world.guest(&allow(&[&api]));
    for kind in [RecordType::AAAA, RecordType::HTTPS, RecordType::SVCB] {
        let reply = ask(&guest, &api.name, kind);
        assert_eq!(reply.metadata.response_code, ResponseCode::NoError, "{kind}");
        assert!(reply.answers.is_empty(), "{kind}");
    }
    assert_eq!(client::addresses(&ask(&guest, &api.name, RecordType::A)), [api.ip], "control");
}

/// Attack C19. Promise 7. What only this machine or its network knows is not asked outside.
#[test]
fn local_names_are_not_asked_upstream() {
    let world = World::shared();
    let guest = world.guest("default = \"allow\"\n");
    for name in ["localhost", "printer.local", "metadata.google.internal", "hostname", "x.internal"]
    {
        let reply = ask(&guest, name, RecordType::A);
        assert_eq!(reply.metadata.response_code, ResponseCode::NXDomain, "{name}");
        assert_eq!(world.names.asked(name), [], "{name}");
    }
}

/// Attack C15. Promise 4. Without a resolver an allowed name leads nowhere: never to where the guest says it is.
#[test]
fn a_name_that_cannot_be_resolved_is_not_dialled_at_the_guests_word() {
    let world = World::with("[dns]\nupstreams = [\"45.66.255.1:53\"]\ntimeout = \"200ms\"\n");
    let api = world.site("api");
    let guest = world.guest(&allow(&[&api]));
    let hello = client::client_hello(&world.authority, &api.name);
    let reply = guest.run(|| client::exchange(api.at(443), &[&hello], PATIENT));
    assert_eq!(reply.alert(), Some(client::ACCESS_DENIED), "{reply:?}");
    let told = ask(&guest, &api.name, RecordType::A);
    assert_eq!(told.metadata.response_code, ResponseCode::ServFail);
    assert_eq!(world.sent_to(api.ip), []);
    guest.event(&[("outcome", "fail"), ("code", "unresolvable"), ("name", &api.name)]);
}

/// Attack C15. A resolver that is down costs a moment, not the way out.
#[test]
fn a_second_upstream_answers_for_a_first_that_is_down() {
    let upstreams = format!("[\"45.66.255.1:53\", \"{}:53\"]", world::world::UPSTREAM);
    let world = World::with(&format!("[dns]\nupstreams = {upstreams}\ntimeout = \"4s\"\n"));
    let api = world.site("api");
    world.guest(&allow(&[&api])).reaches(&api);
    assert_ne!(world.sent_to([45, 66, 255, 1]), [], "control: the first one was asked");
}

/// Attack K06. What a guest can make the DNS library complain of is not for the daemon's log.
#[test]
fn neither_a_guests_messages_nor_the_answers_that_it_provokes_write_the_log() {
    let world = World::new();
    let flat = world.site("flat");
    world.names.flatten(&flat.name);
    let guest = world.guest(&allow(&[&flat]));
    let mut broken_options = client::query(&flat.name, RecordType::A).to_vec().expect("a query");
    // An option of two bytes, of which one is there.
    *broken_options.last_mut().expect("their length") = 5;
    broken_options.extend_from_slice(&[0, 10, 0, 2, 7]);
    let told = guest.run(|| {
        let socket = std::net::UdpSocket::bind("0.0.0.0:0").expect("bind");
        socket.set_read_timeout(Some(PATIENT)).expect("a limit");
        socket.send_to(&broken_options, (GATEWAY_IP, 53)).expect("asked");
        let mut reply = [0; 1500];
        let length = socket.recv(&mut reply).expect("control: it was read");
        Message::from_vec(&reply[..length]).expect("a reply")
    });
    assert_eq!(client::addresses(&told), [flat.ip], "{told}");
    assert!(world.names.asked(&flat.name).len() > 1, "control: again, over TCP");
    guest.event(&[("kind", "dns"), ("name", &flat.name)]);
    let log = world.daemon().log();
    let said: Vec<&str> = log.lines().filter(|line| line.contains("WARN hickory")).collect();
    assert_eq!(said, [""; 0]);
}
