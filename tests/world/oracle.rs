//! The measuring instruments themselves: a silent sink proves something only if it can hear.

use policy::Slot;
use policy::net::{GATEWAY_IP, GUEST_IP};
use serde_json::json;
use world::client::{self, End, PATIENT};
use world::netns::run;
use world::wire::Seen;
use world::world::{EGRESS, HOST, HOST_SERVICE, METADATA, NEIGHBOUR};
use world::{Guest, World};

/// Attack K12. Every silence in these tests rests on this: a router with a hole in it would be noticed, because
/// the host forwards, the sink answers and the capture sees the guest's own address.
#[test]
fn a_guest_behind_a_router_that_forwards_is_heard_at_the_sink() {
    let world = World::without_daemon("");
    let sink = world.attacker();
    let slot = Slot::new(1).expect("a slot");
    run(std::process::Command::new("ip").args(["netns", "add", world.taps.name()]));
    let tap = world.taps.run(|| vmm::tap::create(slot, None).expect("a tap"));
    drop(tap);
    world.taps.ip(&format!("addr add {GATEWAY_IP}/30 dev pt1"));
    world.taps.ip("link set pt1 up");
    let hole = ["link", "add", "hole", "netns", world.taps.name(), "type", "veth"];
    let peer = ["peer", "name", "hole", "netns", world.host.name()];
    run(std::process::Command::new("ip").args(hole).args(peer));
    for (netns, address) in [(&world.taps, "10.99.0.1/30"), (&world.host, "10.99.0.2/30")] {
        netns.ip(&format!("addr add {address} dev hole"));
        netns.ip("link set hole up");
    }
    world.taps.ip("route add default via 10.99.0.2");
    world.host.ip("route add 169.254.100.0/30 via 10.99.0.1");
    world.taps.run(|| {
        std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").expect("forward");
    });
    let created = json!({ "tap": "pt1", "netns": world.taps.name() });
    let guest = Guest::behind(&world, "leaky", created);
    let request = format!("GET / HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", sink.name);
    let reply = guest.run(|| client::exchange(sink.at(80), &[request.as_bytes()], PATIENT));
    assert_eq!(reply.end, End::Closed, "{reply:?}");
    assert!(reply.text().contains(&format!("{GUEST_IP}:")), "{}", reply.text());
    assert!(world.sent_to(sink.ip).iter().all(|seen| seen.is_from(GUEST_IP)));
    assert_eq!(world.requests(&sink.name).len(), 1);
    assert_eq!(world.origin.connections(sink.ip).len(), 1);
}

/// What the host sends is seen, whatever the address.
#[test]
fn the_capture_sees_what_the_host_sends_to_the_attacker_and_to_private_addresses() {
    let world = World::without_daemon("");
    let sink = world.attacker();
    for address in [sink.ip, METADATA, NEIGHBOUR] {
        let mut curl = world.host.command("curl");
        curl.args(["-sS", "-m", "5", "--interface", &HOST.to_string()]);
        let got = curl.arg(format!("http://{address}/")).output().expect("curl");
        let got = String::from_utf8_lossy(&got.stdout).into_owned();
        assert!(got.contains(&format!("{address}:80")), "{address}: {got}");
        world.settle();
        assert!(world.wire.any(|seen| seen.is_from(HOST) && seen.is_to(address)), "{address}");
    }
    // The tripwire on the host can be reached by whoever has a path to it.
    for address in [EGRESS, HOST] {
        let to = (address, HOST_SERVICE).into();
        let reply = world.internet.run(|| client::exchange(to, &[], PATIENT));
        assert_eq!(reply.text(), "HOST SERVICE\r\n", "{address}");
    }
    let query = client::query(&sink.name, hickory_proto::rr::RecordType::A);
    let upstream = (world::world::UPSTREAM, 53).into();
    for ask in [client::ask_udp, client::ask_tcp] {
        let reply = world.host.run(|| ask(upstream, &query)).expect("an answer");
        assert_eq!(client::addresses(&reply), [sink.ip]);
    }
    assert_eq!(world.names.asked(&sink.name).len(), 2);
}

#[test]
fn the_capture_reads_addresses_and_ports_of_a_frame() {
    let builder = etherparse::PacketBuilder::ethernet2([2, 0, 0, 0, 0, 2], [2, 0, 0, 0, 0, 1])
        .ipv4([192, 0, 2, 1], [45, 66, 0, 1], 64)
        .udp(1000, 443);
    let mut frame = Vec::new();
    builder.write(&mut frame, b"x").expect("a frame");
    let seen = Seen::of(&frame).expect("longer than a header");
    assert!(seen.is_to([45, 66, 0, 1]) && seen.is_from([192, 0, 2, 1]));
    assert_eq!((seen.ports, seen.protocol), (Some((1000, 443)), Some(17)));
    assert_eq!(Seen::of(&frame[..13]), None);
}
