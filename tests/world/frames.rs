//! Frames that no honest kernel sends, put straight on the tap.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use etherparse::{
    EtherType, IpFragOffset, IpNumber, Ipv4Header, Ipv4Options, PacketBuilder, VlanId,
};
use hickory_proto::rr::RecordType;
use policy::net::{GATEWAY_IP, GATEWAY_MAC, GUEST_IP, GUEST_MAC};
use world::client::{self, PATIENT};
use world::poll::eventually;
use world::wire::{Seen, Wire};
use world::{World, allow};

/// A question for an allowed name: whatever way it reached the router, it would be asked upstream.
fn question(name: &str) -> Vec<u8> {
    client::query(name, RecordType::A).to_vec().expect("a query")
}

/// A question in UDP in IPv4 from `source`, the header changed by `edit`.
fn ipv4(
    source: Ipv4Addr,
    to: Ipv4Addr,
    question: &[u8],
    edit: impl FnOnce(&mut Ipv4Header),
) -> Vec<u8> {
    let mut udp = Vec::new();
    let ports = PacketBuilder::ipv4(source.octets(), to.octets(), 64).udp(4000, 53);
    ports.write(&mut udp, question).expect("a datagram");
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

fn ipv6(to: [u8; 16], question: &[u8]) -> Vec<u8> {
    let mut source = [0; 16];
    source[..6].copy_from_slice(&[0xfd, 0, 0x70, 0x6f, 0x73, 0x74]);
    source[15] = 2;
    let builder =
        PacketBuilder::ethernet2(GUEST_MAC, GATEWAY_MAC).ipv6(source, to, 64).udp(4000, 53);
    let mut frame = Vec::new();
    builder.write(&mut frame, question).expect("a frame");
    frame
}

/// ICMPv6 of this type from an address of the link to all nodes (RFC 4861): a router's
/// advertisement, a neighbour's.
fn discovery(kind: u8) -> Vec<u8> {
    let (source, all) = (link_local(2), multicast_v6(1));
    let mut frame = Vec::new();
    PacketBuilder::ethernet2(GUEST_MAC, [0x33, 0x33, 0, 0, 0, 1])
        .ipv6(source, all, 255)
        .icmpv6_raw(kind, 0, [0; 4])
        .write(&mut frame, &[0; 24])
        .expect("a frame");
    frame
}

/// DHCPv6 (RFC 8415) to this group of servers, or to a client.
fn dhcp_v6(to: [u8; 16], port: u16) -> Vec<u8> {
    let mut frame = Vec::new();
    PacketBuilder::ethernet2(GUEST_MAC, [0x33, 0x33, 0, 1, 0, 2])
        .ipv6(link_local(2), to, 1)
        .udp(1093 - port, port)
        .write(&mut frame, &[7, 1, 2, 3])
        .expect("a frame");
    frame
}

/// IPv6 with a chain of extension headers: hop-by-hop, twice, then nothing (RFC 8200).
fn extended_v6() -> Vec<u8> {
    let mut frame = framed(GUEST_MAC, EtherType::IPV6.0, &[0x60, 0, 0, 0, 0, 16, 0, 64]);
    frame.extend(link_local(2));
    frame.extend(multicast_v6(1));
    frame.extend([0, 0, 1, 4, 0, 0, 0, 0, 59, 0, 1, 4, 0, 0, 0, 0]);
    frame
}

fn link_local(host: u8) -> [u8; 16] {
    [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, host]
}

fn multicast_v6(group: u8) -> [u8; 16] {
    [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, group]
}

/// A datagram, sent to a group's or to everybody's MAC address where it is for one.
fn datagram(ports: (u16, u16), to: [u8; 4]) -> Vec<u8> {
    let mac = match to {
        [224..=239, b, c, d] => [1, 0, 0x5e, b & 0x7f, c, d],
        [255, ..] | [169, 254, 100, 3] => [0xff; 6],
        _ => GATEWAY_MAC,
    };
    let mut frame = Vec::new();
    PacketBuilder::ethernet2(GUEST_MAC, mac)
        .ipv4(GUEST_IP.octets(), to, 64)
        .udp(ports.0, ports.1)
        .write(&mut frame, &[2, 1, 6, 0])
        .expect("a frame");
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

/// Promise 11. Attacks A01, A02, A04, A05, A06, A07, A09, A10, A11, A12, B01. Nothing but ARP for the gateway, and TCP and UDP of the guest's own address and card,
/// passes the tap; the rest is dropped there, counted, and sampled in the audit.
#[test]
fn a_frame_that_is_not_plainly_the_guests_own_is_dropped_counted_and_in_the_audit() {
    let world = World::shared();
    let (api, probe, sink) = (world.site("api"), world.site("probe"), world.attacker());
    let guest = world.guest(&allow(&[&api, &probe]));
    let other = world.guest(&allow(&[&api, &probe]));
    let question = &question(&probe.name);
    let ipv4 = |source, to, edit: &dyn Fn(&mut Ipv4Header)| ipv4(source, to, question, edit);
    let whole = &|_: &mut Ipv4Header| {};
    let plain = ipv4(GUEST_IP, sink.ip, whole);
    let mut tagged = Vec::new();
    PacketBuilder::ethernet2(GUEST_MAC, GATEWAY_MAC)
        .single_vlan(VlanId::try_new(1).expect("an id"))
        .ipv4(GUEST_IP.octets(), sink.ip.octets(), 64)
        .udp(4000, 53)
        .write(&mut tagged, question)
        .expect("a frame");
    let mut forged_card = plain.clone();
    forged_card[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 9]);
    let protocol = |number| ipv4(GUEST_IP, sink.ip, &move |ip| ip.protocol = IpNumber(number));
    let to = |address: [u8; 4]| ipv4(GUEST_IP, address.into(), whole);
    let options = |ip: &mut Ipv4Header| {
        // Loose source route by way of the attacker (RFC 791 section 3.1).
        let route = [131, 7, 4, 45, 66, 0, 1, 0];
        ip.options = Ipv4Options::try_from(&route[..]).expect("options");
        ip.total_len += 8;
    };
    let igmp = protocol(2)[14..].to_vec();
    let igmp = {
        let mut header = Ipv4Header::from_slice(&igmp).expect("a header").0;
        header.destination = [224, 0, 0, 1];
        header.header_checksum = header.calc_header_checksum();
        [header_bytes(&header), igmp[20..].to_vec()].concat()
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
        ("another guest's address", "spoof", ipv4(other.internal(), sink.ip, whole)),
        ("its own internal address", "spoof", ipv4(guest.internal(), sink.ip, whole)),
        ("a public address", "spoof", ipv4(world::world::EGRESS, sink.ip, whole)),
        ("no address", "spoof", ipv4(Ipv4Addr::UNSPECIFIED, sink.ip, whole)),
        ("another card", "spoof", forged_card),
        (
            "IPv6, global",
            "ipv6",
            ipv6([0x26, 6, 0x28, 0, 2, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1], question),
        ),
        (
            "IPv6, all routers",
            "ipv6",
            ipv6([0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2], question),
        ),
        ("IPv6, of the link", "ipv6", ipv6(link_local(1), question)),
        ("IPv6, unique local", "ipv6", ipv6([0xfd; 16], question)),
        ("IPv6, extension headers", "ipv6", extended_v6()),
        ("a router advertisement", "ipv6", discovery(134)),
        ("a router solicitation", "ipv6", discovery(133)),
        ("a neighbour advertisement", "ipv6", discovery(136)),
        (
            "DHCPv6, asking",
            "ipv6",
            dhcp_v6([0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 2], 547),
        ),
        ("DHCPv6, answering", "ipv6", dhcp_v6(link_local(1), 546)),
        ("QinQ", "ethertype", framed(GUEST_MAC, 0x88a8, &[&[0, 1, 8, 0], &plain[14..]].concat())),
        ("EAPOL", "ethertype", framed(GUEST_MAC, 0x888e, &[1, 1, 0, 0])),
        // A bridge's hello (IEEE 802.1D): a length, then LLC.
        ("STP", "ethertype", framed(GUEST_MAC, 38, &[0x42, 0x42, 3, 0, 0, 0, 0])),
        ("a VLAN tag", "ethertype", tagged),
        ("MPLS", "ethertype", framed(GUEST_MAC, 0x8847, &plain[14..])),
        ("LLDP", "ethertype", framed(GUEST_MAC, 0x88cc, &[2, 7, 4, 2, 0, 0, 0, 0, 2])),
        ("IP options", "ip-options", ipv4(GUEST_IP, sink.ip, &options)),
        ("a first fragment", "fragment", ipv4(GUEST_IP, sink.ip, &fragment)),
        ("a later fragment", "fragment", ipv4(GUEST_IP, sink.ip, &later)),
        ("ICMP", "protocol", protocol(1)),
        ("IP in IP", "protocol", protocol(4)),
        ("IPv6 in IP", "protocol", protocol(41)),
        ("GRE", "protocol", protocol(47)),
        ("ESP", "protocol", protocol(50)),
        ("SCTP", "protocol", protocol(132)),
        ("IGMP", "destination", framed(GUEST_MAC, EtherType::IPV4.0, &igmp)),
        ("mDNS", "destination", datagram((5353, 5353), [224, 0, 0, 251])),
        ("LLMNR", "destination", datagram((4000, 5355), [224, 0, 0, 252])),
        ("SSDP", "destination", datagram((4000, 1900), [239, 255, 255, 250])),
        ("DHCP, asking", "destination", datagram((68, 67), [255; 4])),
        ("DHCP, answering", "destination", datagram((67, 68), [255; 4])),
        ("DHCP to the gateway", "udp", datagram((68, 67), GATEWAY_IP.octets())),
        ("DHCP to far away", "udp", datagram((67, 67), sink.ip.octets())),
        ("NetBIOS to the subnet", "destination", datagram((137, 137), [169, 254, 100, 3])),
        ("multicast", "destination", to([224, 0, 0, 251])),
        ("broadcast", "destination", to([255, 255, 255, 255])),
        ("loopback", "destination", to([127, 0, 0, 1])),
        ("another guest", "destination", to(other.internal().octets())),
        ("ARP for another", "arp", arp(GUEST_IP, other.internal())),
        ("ARP under another address", "arp", arp(sink.ip, GATEWAY_IP)),
    ];
    let heard_by_other = Wire::tapped(&other.netns);
    for (_, _, frame) in &cases {
        guest.cable.inject(frame).expect("the tap takes it");
    }
    for runt in [0, 1, 13, 14, 20] {
        // The kernel may refuse these itself.
        let _ = guest.cable.inject(&plain[..runt]);
    }
    let mut reasons: BTreeMap<&str, u64> = BTreeMap::new();
    for (_, reason, _) in &cases {
        *reasons.entry(reason).or_default() += 1;
    }
    for (reason, sent) in reasons {
        eventually(&format!("{sent} counted as {reason}"), PATIENT, || {
            let records = world.records(&format!("sandbox={}&kind=frame", guest.name));
            let those = records.iter().filter(|record| {
                let detail = record["detail"].as_str().unwrap_or_default();
                detail.split(' ').next() == Some(reason)
            });
            let counted: u64 = those.map(|record| record["count"].as_u64().unwrap_or(1)).sum();
            (counted >= sent).then_some(())
        });
    }
    other.reaches(&api);
    assert_eq!(world.names.asked(&probe.name), []);
    assert_eq!(world.sent_to(sink.ip), []);
    let from_one = |seen: &Seen| seen.is_from(guest.internal()) || seen.is_to(other.internal());
    assert_eq!(heard_by_other.frames(from_one), []);
    // The control: the same question, sent the same way, in an honest frame.
    guest.cable.inject(&plain).expect("the tap takes it");
    eventually("the honest frame is understood", PATIENT, || {
        (!world.names.asked(&probe.name).is_empty()).then_some(())
    });
    guest.reaches(&api);
}

/// Attacks A10, C16. A guest may leave it to us to cut one frame into many datagrams (UDP segmentation offload), and
/// the fence has counted one: of so many questions the first few are answered, and the rest is counted.
#[test]
fn of_a_frame_that_is_cut_into_questions_only_the_first_are_answered() {
    const FLAGS_NEEDS_CSUM: u8 = 1;
    const GSO_UDP_L4: u8 = 5;
    const QUESTIONS: usize = 40;
    let world = World::shared();
    let api = world.site("api");
    let guest = world.guest(&allow(&[&api]));
    let denied = question(&world.attacker().name);
    let send = |count: usize| {
        let frame = ipv4(GUEST_IP, GATEWAY_IP, &denied.repeat(count), |_| {});
        let size = u16::try_from(denied.len()).expect("short");
        let mut bytes = vec![FLAGS_NEEDS_CSUM, GSO_UDP_L4];
        // Header length, segment size, checksum start and offset, buffers.
        bytes.extend([42, size, 34, 6, 0].map(u16::to_le_bytes).concat());
        bytes.extend_from_slice(&frame);
        guest.cable.inject_raw(&bytes)
    };
    // A kernel from before Linux 6.2 does not know such frames, and refuses them.
    if send(2).is_err_and(|error| error.kind() == std::io::ErrorKind::InvalidInput) {
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").expect("its release");
        assert!(release.starts_with("5.") || release.starts_with("6.1."), "{release}");
        return;
    }
    let told = |code: &str| -> u64 {
        let events = world.events(&guest.name);
        let ours = events.iter().filter(|event| event["kind"] == "dns" && event["code"] == code);
        ours.map(|event| event["count"].as_u64().unwrap_or(1)).sum()
    };
    eventually("the control: both of two are answered", PATIENT, || {
        (told("no-rule") == 2).then_some(())
    });
    send(QUESTIONS).expect("the tap takes it");
    eventually("every question is told or counted", PATIENT, || {
        // What is counted is told when another second has begun.
        guest.run(|| {
            client::ask_udp((GATEWAY_IP, 53).into(), &client::query(&api.name, RecordType::A))
                .expect("an answer")
        });
        (told("limit") > 0).then_some(())
    });
    assert_eq!(told("limit"), 36, "of {QUESTIONS}");
    assert_eq!(told("no-rule"), 2 + 4);
}

/// Promise 11. Attack A10. The header before a frame is the guest's word too: wrong lengths and offsets, and
/// segments of any size, do no harm and carry nothing out.
#[test]
fn a_frame_with_a_hostile_virtio_header_does_no_harm() {
    let world = World::shared();
    let (api, sink) = (world.site("api"), world.attacker());
    let guest = world.guest(&allow(&[&api]));
    let plain = ipv4(GUEST_IP, sink.ip, &question(&api.name), |_| {});
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
