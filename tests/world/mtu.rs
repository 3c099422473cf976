//! Links with small frames, on the far side and on the guest's: bulk data arrives, both ways.

use std::net::Ipv4Addr;
use std::process::Command;

use world::client::PATIENT;
use world::netns::{Netns, run};
use world::origin::{Origin, pattern, sum};
use world::poll::eventually;
use world::wire::Seen;
use world::world::EGRESS;
use world::{Site, World, allow};

/// More than any buffer on the way.
const BULK: usize = 12_000_000;

/// An honest origin behind a link of the internet whose frames are smaller than ours: it can only be
/// reached by who heeds the errors of the router before it (RFC 1191).
fn behind_a_narrow_link(world: &World, mtu: u16) -> (Netns, Site) {
    let far = Netns::new("far");
    let ip = Ipv4Addr::new(151, 102, 0, 1);
    let made = ["link", "add", "narrow", "netns", world.internet.name(), "type", "veth"];
    let peer = ["peer", "name", "narrow", "netns", far.name()];
    run(Command::new("ip").args(made).args(peer));
    for (netns, address) in [(&world.internet, "10.98.0.1/30"), (&far, "10.98.0.2/30")] {
        netns.ip(&format!("link set narrow mtu {mtu}"));
        netns.ip(&format!("addr add {address} dev narrow"));
        netns.ip("link set narrow up");
    }
    far.ip(&format!("addr add {ip}/32 dev lo"));
    // It lets itself be sent more than its own link takes, as hosts behind a tunnel do.
    far.ip("route add default via 10.98.0.1 advmss 1460");
    world.internet.ip(&format!("route add {ip}/32 via 10.98.0.2"));
    world.internet.run(|| {
        std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").expect("a router");
        // Each error counts, however many there were.
        std::fs::write("/proc/sys/net/ipv4/icmp_ratemask", "0").expect("a router");
    });
    let authority = world.authority.clone();
    let (listening, ready) = std::sync::mpsc::channel();
    far.spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(async move {
            Origin::default().serve(&authority).await.expect("it listens");
            let _ = listening.send(());
            std::future::pending::<()>().await;
        });
    });
    ready.recv().expect("it listens");
    let site = Site { name: "narrow.example.com".to_owned(), ip };
    world.names.set(&site.name, &[ip.into()]);
    (far, site)
}

/// Sends and fetches in bulk, and says for how long.
fn both_ways(world: &World, guest: &world::Guest<'_>, site: &Site, what: &str) {
    let sent = pattern(BULK);
    let file = world.dir().join(format!("bulk-{}", guest.name));
    std::fs::write(&file, &sent).expect("a file");
    let upload = format!("@{}", file.display());
    for scheme in ["https", "http"] {
        let url = format!("{scheme}://{}/sum", site.name);
        let words = ["-m", "60", "-H", "Expect:", "--data-binary", &upload, &url];
        let got = guest.curl(&words);
        assert_eq!(got.text(), sum(&sent), "{what}, {scheme}, sent: {}", got.stderr);
        let url = format!("{scheme}://{}/bytes/{BULK}", site.name);
        let got = guest.curl(&["-m", "60", &url]);
        assert_eq!(sum(&got.body), sum(&sent), "{what}, {scheme}, fetched: {}", got.stderr);
    }
}

/// Attack A15. A far side behind a narrow link is sent to in frames that fit.
#[test]
fn bulk_data_passes_a_link_of_the_far_side_that_is_narrower_than_ours() {
    let world = World::new();
    let (_far, narrow) = behind_a_narrow_link(&world, 1000);
    let guest = world.guest(&allow(&[&narrow]));
    both_ways(&world, &guest, &narrow, "a link of 1000 bytes");
    // The control: the link was too narrow for what was sent at first, and said so.
    let told = |seen: &Seen| seen.protocol == Some(1) && seen.is_to(EGRESS);
    assert!(world.wire.any(told), "an error was sent to the egress address");
}

/// Attack A15. A guest's own link may have any size, and another one in the middle of a transfer.
#[test]
fn bulk_data_passes_whatever_the_guest_makes_of_its_own_link() {
    let world = World::shared();
    let api = world.site("api");
    let guest = world.guest(&allow(&[&api]));
    for mtu in [576, 1280, 9000] {
        guest.netns.ip(&format!("link set eth0 mtu {mtu}"));
        both_ways(world, &guest, &api, &format!("a link of {mtu} bytes"));
    }
    guest.netns.ip("link set eth0 mtu 1500");
    let url = format!("https://{}/bytes/{BULK}", api.name);
    let got = std::thread::scope(|scope| {
        let fetching = scope.spawn(|| guest.curl(&["--limit-rate", "8M", &url]));
        eventually("the transfer is under way", PATIENT, || {
            (!world.requests(&api.name).is_empty()
                && world.requests(&api.name).iter().any(|r| r.target.starts_with("/bytes")))
            .then_some(())
        });
        guest.netns.ip("link set eth0 mtu 700");
        fetching.join().expect("curl")
    });
    assert_eq!(sum(&got.body), sum(&pattern(BULK)), "{}", got.stderr);
}

/// Attack A15. A frame larger than the link, not to be cut, is no way out and no way to stop others.
#[test]
fn oversized_frames_that_may_not_be_cut_do_no_harm() {
    const PORT: u16 = 9;
    let world = World::shared();
    let (api, sink, peer) = (world.site("api"), world.attacker(), world.site("peer"));
    let datagrams = format!("[[rule]]\nallow = [\"{}\"]\nprotocol = \"udp\"\n", peer.ip);
    let guest = world.guest(&format!("{}{datagrams}", allow(&[&api])));
    let send = |to: Ipv4Addr, port, length| {
        let mut frame = Vec::new();
        etherparse::PacketBuilder::ethernet2(policy::net::GUEST_MAC, policy::net::GATEWAY_MAC)
            .ipv4(policy::net::GUEST_IP.octets(), to.octets(), 64)
            .udp(4000, port)
            .write(&mut frame, &vec![7; length])
            .expect("a frame");
        // "Do not fragment" is set by the builder.
        assert_eq!(frame[14 + 6] & 0x40, 0x40);
        let _ = guest.cable.inject(&frame);
    };
    for length in [1473, 9000, 60_000] {
        for port in [53, 443, PORT] {
            send(sink.ip, port, length);
        }
        let before = world.sent_to(peer.ip).len();
        send(peer.ip, PORT, length);
        // Ours is another datagram: it leaves in the pieces that our link takes, behind what was refused.
        let pieces = length.div_ceil(1480);
        let sent = || world.sent_to(peer.ip).len() - before;
        eventually("the control leaves", PATIENT, || (sent() >= pieces).then_some(()));
    }
    assert_eq!(world.sent_to(sink.ip), []);
    guest.reaches(&api);
}
