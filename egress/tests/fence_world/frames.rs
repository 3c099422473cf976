//! Frames a guest may send: one that passes, and at least one for each reason to refuse.

use std::net::Ipv4Addr;

use egress::fence::Reason;
use etherparse::{Ipv4Header, PacketBuilder, icmpv4};

use crate::wire::{GATEWAY, GUEST};

const ME: [u8; 4] = [169, 254, 100, 2];
const OUTSIDE: [u8; 4] = [192, 0, 2, 80];

fn ethernet(to: [u8; 6], from: [u8; 6], ethertype: u16, payload: &[u8]) -> Vec<u8> {
    [&to[..], &from, &ethertype.to_be_bytes(), payload].concat()
}

fn udp(from: [u8; 4], to: [u8; 4], port: u16) -> Vec<u8> {
    let mut packet = Vec::new();
    let builder = PacketBuilder::ipv4(from, to, 64).udp(5000, port);
    builder.write(&mut packet, b"question").expect("a packet");
    packet
}

fn sent(packet: &[u8]) -> Vec<u8> {
    ethernet(GATEWAY, GUEST, 0x0800, packet)
}

fn of_protocol(number: u8) -> Vec<u8> {
    let header = Ipv4Header::new(8, 64, number.into(), ME, OUTSIDE).expect("a header");
    let mut packet = Vec::new();
    header.write(&mut packet).expect("a packet");
    packet.extend([8; 8]);
    sent(&packet)
}

pub(crate) fn udp_to(to: [u8; 4], port: u16) -> Vec<u8> {
    sent(&udp(ME, to, port))
}

/// The control: it passes, to any address.
pub(crate) fn dns_question() -> Vec<u8> {
    udp_to(OUTSIDE, 53)
}

pub(crate) fn syn(from: u16) -> Vec<u8> {
    let mut packet = Vec::new();
    let builder = PacketBuilder::ipv4(ME, OUTSIDE, 64).tcp(from, 443, 1, 1024).syn();
    builder.write(&mut packet, &[]).expect("a packet");
    sent(&packet)
}

fn tcp_to(to: [u8; 4]) -> Vec<u8> {
    let mut packet = Vec::new();
    PacketBuilder::ipv4(ME, to, 64)
        .tcp(7000, 22, 1, 1024)
        .syn()
        .write(&mut packet, &[])
        .expect("a packet");
    sent(&packet)
}

fn arp(to: [u8; 6], operation: u8, sender: ([u8; 6], [u8; 4]), target: [u8; 4]) -> Vec<u8> {
    let fixed = [0, 1, 8, 0, 6, 4, 0, operation];
    ethernet(to, GUEST, 0x0806, &[&fixed[..], &sender.0, &sender.1, &[0; 6], &target].concat())
}

/// The same packet with some header bytes changed and its checksum mended.
fn altered(mut packet: Vec<u8>, change: impl FnOnce(&mut [u8])) -> Vec<u8> {
    change(&mut packet);
    packet[10..12].fill(0);
    let sum = checksum(&packet[..20]);
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
    packet
}

fn checksum(bytes: &[u8]) -> u16 {
    let sum: u32 = bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !u16::try_from((folded & 0xffff) + (folded >> 16)).expect("folded")
}

/// A frame, and what is wrong with it.
type Bad = (&'static str, Vec<u8>);

/// Every way to be refused that is not a matter of rate.
pub(crate) fn refused() -> Vec<(Reason, Vec<Bad>)> {
    let good = || udp(ME, OUTSIDE, 53);
    let me = (GUEST, ME);
    let options = {
        let mut packet = good();
        packet.splice(20..20, [1, 1, 1, 0]);
        let len = u16::try_from(packet.len()).expect("short");
        altered(packet, |header| {
            header[0] = 0x46;
            header[2..4].copy_from_slice(&len.to_be_bytes());
        })
    };
    let tagged = |tag: u16| {
        let inner = [&[0, 5, 8, 0][..], &good()].concat();
        ethernet(GATEWAY, GUEST, tag, &inner)
    };
    let priority_tagged = ethernet(GATEWAY, GUEST, 0x8100, &[&[0, 0, 8, 0][..], &good()].concat());
    let odd_mac = [2, 0, 0, 0, 0, 9];
    vec![
        (
            Reason::Spoof,
            vec![
                ("another MAC", ethernet(GATEWAY, odd_mac, 0x0800, &good())),
                ("another MAC, ARP", ethernet(GATEWAY, odd_mac, 0x0806, &[0; 28])),
                ("a neighbour's address", sent(&udp([198, 18, 0, 2], OUTSIDE, 53))),
                ("its own outer address", sent(&udp([198, 18, 0, 1], OUTSIDE, 53))),
                ("the gateway's address", sent(&udp([169, 254, 100, 1], OUTSIDE, 53))),
                ("no address", sent(&udp([0; 4], OUTSIDE, 53))),
            ],
        ),
        (
            Reason::Arp,
            vec![
                ("who has another", arp([0xff; 6], 1, me, [169, 254, 100, 3])),
                ("gratuitous", arp([0xff; 6], 1, me, ME)),
                ("a reply", arp(GATEWAY, 2, me, [169, 254, 100, 1])),
                ("a probe", arp([0xff; 6], 1, (GUEST, [0; 4]), [169, 254, 100, 1])),
                ("as another", arp([0xff; 6], 1, (odd_mac, ME), [169, 254, 100, 1])),
            ],
        ),
        (Reason::Ipv6, vec![("a packet", ethernet(GATEWAY, GUEST, 0x86dd, &[0x60; 48]))]),
        (
            Reason::Ethertype,
            vec![
                ("LLDP", ethernet(GATEWAY, GUEST, 0x88cc, &[0; 46])),
                ("MPLS", ethernet(GATEWAY, GUEST, 0x8847, &[0; 46])),
                ("802.3", ethernet(GATEWAY, GUEST, 46, &[0xaa; 46])),
                ("VLAN", tagged(0x8100)),
                ("QinQ", tagged(0x88a8)),
                ("priority tag", priority_tagged),
            ],
        ),
        (Reason::IpOptions, vec![("no-operation", sent(&options))]),
        (
            Reason::Fragment,
            vec![
                ("the first", sent(&altered(good(), |header| header[6] = 0x20))),
                ("a later one", sent(&altered(good(), |header| header[7] = 1))),
            ],
        ),
        (
            Reason::Destination,
            vec![
                ("loopback", udp_to([127, 0, 0, 1], 53)),
                ("this network", udp_to([0, 0, 0, 0], 53)),
                ("multicast", udp_to([224, 0, 0, 251], 53)),
                ("reserved", udp_to([240, 0, 0, 1], 53)),
                ("broadcast", udp_to([255; 4], 67)),
                ("another guest, UDP", udp_to([198, 18, 0, 2], 53)),
                ("another guest, TCP", tcp_to([198, 18, 0, 2])),
                ("its own outer address", tcp_to([198, 18, 0, 1])),
                ("beside the gateway", tcp_to([169, 254, 100, 3])),
                ("another MAC", ethernet(odd_mac, GUEST, 0x0800, &good())),
                ("everybody", ethernet([0xff; 6], GUEST, 0x0800, &good())),
            ],
        ),
        (
            Reason::Protocol,
            vec![
                ("ICMP", of_protocol(1)),
                ("IP in IP", of_protocol(4)),
                ("GRE", of_protocol(47)),
                ("SCTP", of_protocol(132)),
            ],
        ),
        (Reason::Quic, vec![("port 443", udp_to(OUTSIDE, 443))]),
        (
            Reason::Udp,
            vec![("NTP", udp_to(OUTSIDE, 123)), ("metadata", udp_to([169, 254, 169, 254], 80))],
        ),
        (
            Reason::Malformed,
            vec![
                ("longer than it is", sent(&altered(good(), |header| header[2] = 9))),
                ("shorter than its header", sent(&altered(good(), |header| header[3] = 8))),
                ("TCP cut short", {
                    let packet = udp(ME, OUTSIDE, 53);
                    sent(&altered(packet[..24].to_vec(), |header| {
                        (header[3], header[9]) = (24, 6);
                    }))
                }),
            ],
        ),
    ]
}

/// An ICMP error about a packet that this slot has sent to the outside.
pub(crate) fn icmp_error(icmp_type: u8, slot: Ipv4Addr) -> Vec<u8> {
    let quoted = udp(slot.octets(), OUTSIDE, 443);
    let mut error = vec![icmp_type, 0, 0, 0, 0, 0, 0, 0];
    if icmp_type == icmpv4::TYPE_DEST_UNREACH {
        error[1] = 4;
        error[6..8].copy_from_slice(&1400_u16.to_be_bytes());
    }
    error.extend(&quoted[..28]);
    let sum = checksum(&error);
    error[2..4].copy_from_slice(&sum.to_be_bytes());
    error
}

/// The IPv4 packet in the frame, when it is an ICMP message of this type to the guest.
pub(crate) fn icmp_of_type(frame: &[u8], icmp_type: u8) -> Option<Vec<u8>> {
    let wanted = frame.len() >= 42
        && frame[..6] == GUEST
        && frame[12..14] == [8, 0]
        && frame[14 + 9] == 1
        && frame[34] == icmp_type;
    wanted.then(|| frame[14..].to_vec())
}

/// It is addressed to the guest, quotes a packet of the guest, and every checksum is right.
pub(crate) fn assert_quotes_guest(packet: &[u8]) {
    let total = usize::from(u16::from_be_bytes([packet[2], packet[3]]));
    let icmp = &packet[20..total];
    assert_eq!(packet[16..20], ME, "addressed to the guest");
    assert_eq!(icmp[8 + 12..8 + 16], ME, "quotes the guest's address");
    assert_eq!(checksum(&packet[..20]), 0, "the header's checksum");
    assert_eq!(checksum(&icmp[8..28]), 0, "the quoted header's checksum");
    assert_eq!(checksum(icmp), 0, "the message's checksum");
}
