//! Frames that no honest kernel sends, put straight on the tap.

use std::net::Ipv4Addr;

use etherparse::{
    EtherType, IpFragOffset, IpNumber, Ipv4Header, Ipv4Options, PacketBuilder, VlanId,
};
use policy::net::{GATEWAY_MAC, GUEST_IP, GUEST_MAC};
use world::client::PATIENT;
use world::poll::eventually;
use world::wire::Wire;
use world::{World, allow};

const PAYLOAD: &[u8] = b"exfiltrated";

/// A UDP datagram in IPv4 from `source`, the header changed by `edit`.
fn ipv4(source: Ipv4Addr, to: Ipv4Addr, edit: impl FnOnce(&mut Ipv4Header)) -> Vec<u8> {
    let mut udp = Vec::new();
    let ports = PacketBuilder::ipv4(source.octets(), to.octets(), 64).udp(4000, 443);
    ports.write(&mut udp, PAYLOAD).expect("a datagram");
    let body = &udp[20..];
    let length = u16::try_from(body.len()).expect("short");
    let mut header =
        Ipv4Header::new(length, 64, IpNumber::UDP, source.octets(), to.octets()).expect("a header");
    edit(&mut header);
    header.header_checksum = header.calc_header_checksum();
    let mut packet = header_bytes(&header);
    packet.extend_from_slice(body);
    framed(GUEST_MAC, EtherType::IPV4.0, &packet)
}

fn header_bytes(header: &Ipv4Header) -> Vec<u8> {
    let mut bytes = Vec::new();
    header.write(&mut bytes).expect("a header");
    bytes
}

fn framed(source: [u8; 6], ethertype: u16, packet: &[u8]) -> Vec<u8> {
    [&GATEWAY_MAC[..], &source, &ethertype.to_be_bytes(), packet].concat()
}

fn ipv6(to: [u8; 16]) -> Vec<u8> {
    let mut source = [0; 16];
    source[..6].copy_from_slice(&[0xfd, 0, 0x70, 0x6f, 0x73, 0x74]);
    source[15] = 2;
    let builder =
        PacketBuilder::ethernet2(GUEST_MAC, GATEWAY_MAC).ipv6(source, to, 64).udp(4000, 443);
    let mut frame = Vec::new();
    builder.write(&mut frame, PAYLOAD).expect("a frame");
    frame
}

fn arp(sender: Ipv4Addr, target: Ipv4Addr) -> Vec<u8> {
    let head = [0, 1, 8, 0, 6, 4, 0, 1];
    let zero = [0; 6];
    let body = [&head[..], &GUEST_MAC, &sender.octets(), &zero, &target.octets()].concat();
    let mut frame = framed(GUEST_MAC, EtherType::ARP.0, &body);
    frame[..6].fill(0xff);
    frame
}

/// Promise 11. Nothing but ARP for the gateway, and TCP and UDP of the guest's own address and card,
/// passes the tap; the rest is dropped there, counted, and sampled in the audit.
#[test]
fn a_frame_that_is_not_plainly_the_guests_own_is_dropped_counted_and_in_the_audit() {
    let world = World::shared();
    let (api, sink) = (world.site("api"), world.attacker());
    let guest = world.guest(&format!("{}[[rule]]\nallow = [\"{}\"]\n", allow(&[&api]), sink.ip));
    let other = world.guest(&allow(&[&api]));
    let plain = ipv4(GUEST_IP, sink.ip, |_| {});
    let mut tagged = Vec::new();
    PacketBuilder::ethernet2(GUEST_MAC, GATEWAY_MAC)
        .single_vlan(VlanId::try_new(1).expect("an id"))
        .ipv4(GUEST_IP.octets(), sink.ip.octets(), 64)
        .udp(4000, 443)
        .write(&mut tagged, PAYLOAD)
        .expect("a frame");
    let mut forged_card = plain.clone();
    forged_card[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 9]);
    let protocol = |number| ipv4(GUEST_IP, sink.ip, move |ip| ip.protocol = IpNumber(number));
    let to = |address: [u8; 4]| ipv4(GUEST_IP, address.into(), |_| {});
    let options = |ip: &mut Ipv4Header| {
        // Loose source route by way of the attacker (RFC 791 section 3.1).
        let route = [131, 7, 4, 45, 66, 0, 1, 0];
        ip.options = Ipv4Options::try_from(&route[..]).expect("options");
        ip.total_len += 8;
    };
    let fragment = |ip: &mut Ipv4Header| {
        ip.dont_fragment = false;
        ip.more_fragments = true;
    };
    let later = |ip: &mut Ipv4Header| {
        ip.dont_fragment = false;
        ip.fragment_offset = IpFragOffset::try_new(3).expect("an offset");
    };
    let cases: Vec<(&str, &str, Vec<u8>)> = vec![
        ("another guest's address", "spoof", ipv4(other.internal(), sink.ip, |_| {})),
        ("its own internal address", "spoof", ipv4(guest.internal(), sink.ip, |_| {})),
        ("a public address", "spoof", ipv4(world::world::EGRESS, sink.ip, |_| {})),
        ("no address", "spoof", ipv4(Ipv4Addr::UNSPECIFIED, sink.ip, |_| {})),
        ("another card", "spoof", forged_card),
        ("IPv6, global", "ipv6", ipv6([0x26, 6, 0x28, 0, 2, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1])),
        ("IPv6, all routers", "ipv6", ipv6([0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2])),
        ("a VLAN tag", "ethertype", tagged),
        ("MPLS", "ethertype", framed(GUEST_MAC, 0x8847, &plain[14..])),
        ("LLDP", "ethertype", framed(GUEST_MAC, 0x88cc, &[2, 7, 4, 2, 0, 0, 0, 0, 2])),
        ("IP options", "ip-options", ipv4(GUEST_IP, sink.ip, options)),
        ("a first fragment", "fragment", ipv4(GUEST_IP, sink.ip, fragment)),
        ("a later fragment", "fragment", ipv4(GUEST_IP, sink.ip, later)),
        ("ICMP", "protocol", protocol(1)),
        ("IP in IP", "protocol", protocol(4)),
        ("IPv6 in IP", "protocol", protocol(41)),
        ("GRE", "protocol", protocol(47)),
        ("ESP", "protocol", protocol(50)),
        ("SCTP", "protocol", protocol(132)),
        ("multicast", "destination", to([224, 0, 0, 251])),
        ("broadcast", "destination", to([255, 255, 255, 255])),
        ("loopback", "destination", to([127, 0, 0, 1])),
        ("another guest", "destination", to(other.internal().octets())),
        ("ARP for another", "arp", arp(GUEST_IP, other.internal())),
        ("ARP under another address", "arp", arp(sink.ip, policy::net::GATEWAY_IP)),
    ];
    let heard_by_other = Wire::tapped(&other.netns);
    for (_, _, frame) in &cases {
        guest.cable.inject(frame).expect("the tap takes it");
    }
    for runt in [0, 1, 13, 14, 20] {
        // The kernel may refuse these itself.
        let _ = guest.cable.inject(&plain[..runt]);
    }
    let mut reasons: Vec<&str> = cases.iter().map(|(_, reason, _)| *reason).collect();
    reasons.sort_unstable();
    reasons.dedup();
    for reason in reasons {
        world.event_that(&guest.name, reason, |record| {
            let detail = record["detail"].as_str().unwrap_or_default();
            record["kind"] == "frame" && detail.split(' ').next() == Some(reason)
        });
    }
    other.reaches(&api);
    let leaked = world.sent(|seen| {
        seen.is_to(sink.ip)
            || seen.is_from(GUEST_IP)
            || seen.addresses.is_some_and(|(from, _)| from.to_string().starts_with("198.18."))
            || seen.addresses.is_some_and(|(from, _)| from.to_string().starts_with("fd00:706f"))
    });
    assert_eq!(leaked, []);
    let known = [policy::net::GATEWAY_IP.into(), std::net::IpAddr::from(GUEST_IP)];
    let strangers = heard_by_other.frames(|seen| {
        seen.addresses.is_some_and(|(from, to)| {
            from == std::net::IpAddr::from(sink.ip) || !known.contains(&from) && to != known[1]
        })
    });
    assert!(strangers.iter().all(|seen| !seen.is_to(other.internal())), "{strangers:?}");
    guest.reaches(&api);
}

/// Promise 11. The control of the test above: the same way of sending reaches the router when the
/// frame is honest.
#[test]
fn an_honest_frame_put_on_the_tap_the_same_way_is_answered() {
    let world = World::shared();
    let (api, sink) = (world.site("api"), world.attacker());
    let guest = world.guest(&allow(&[&api]));
    let heard = Wire::tapped(&guest.netns);
    let builder = PacketBuilder::ethernet2(GUEST_MAC, GATEWAY_MAC)
        .ipv4(GUEST_IP.octets(), sink.ip.octets(), 64)
        .tcp(4000, 443, 1, 64_000)
        .syn();
    let mut frame = Vec::new();
    builder.write(&mut frame, &[]).expect("a frame");
    guest.cable.inject(&frame).expect("the tap takes it");
    eventually("the router answers a SYN", PATIENT, || {
        heard.any(|seen| seen.is_from(sink.ip) && seen.ports == Some((443, 4000))).then_some(())
    });
    assert_eq!(world.sent_to(sink.ip), []);
}

/// Promise 11. The header before a frame is the guest's word too: wrong lengths and offsets, and
/// segments of any size, do no harm and carry nothing out.
#[test]
fn a_frame_with_a_hostile_virtio_header_does_no_harm() {
    let world = World::shared();
    let (api, sink) = (world.site("api"), world.attacker());
    let guest = world.guest(&allow(&[&api]));
    let plain = ipv4(GUEST_IP, sink.ip, |_| {});
    for flags in [0, 1, 2, 0xff] {
        for segmentation in [0, 1, 3, 4, 5, 0x80, 0xff] {
            for number in [0, 1, 14, 0xffff_u16] {
                let number = number.to_le_bytes();
                let mut bytes = vec![flags, segmentation];
                // Header length, segment size, checksum start and offset, buffers.
                bytes.extend([number; 5].concat());
                bytes.extend_from_slice(&plain);
                // The kernel refuses most of these itself.
                let _ = guest.cable.inject_raw(&bytes);
            }
        }
    }
    assert_eq!(world.sent_to(sink.ip), []);
    guest.reaches(&api);
}
