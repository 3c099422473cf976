//! What a dropped frame was: bytes in, a value out. Pure; property-tested and fuzzed.
//! Cut-off and malformed frames are the normal case here, and say as much as can be read of them.

use std::borrow::Cow;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use etherparse::{EtherType, LaxNetSlice, LaxSlicedPacket, TransportSlice};
use policy::Slot;

use crate::fence::Reason;

/// Frames the fence dropped for one reason, that were alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dropped {
    /// Whose frames.
    pub slot: Slot,
    /// Why.
    pub reason: Reason,
    /// `tcp`, `udp`, `icmp`, `ip-47`, `arp`, `ipv6`, `ethertype-0x88cc`.
    pub protocol: Cow<'static, str>,
    /// Where the first of them said it came from; port 0 where there is none.
    pub source: Option<SocketAddr>,
    /// Where it was to go; port 0 where there is none.
    pub destination: Option<SocketAddr>,
    /// How many were sampled: at least one, and less than were dropped when there were many.
    pub count: u64,
}

/// Reads one sample: the prefix our rule wrote, the Ethernet header (14 bytes or more; its source
/// and destination are not looked at), and the packet after it, cut off anywhere. None when the
/// prefix is not one of ours.
#[must_use]
pub fn read(prefix: &str, ethernet: &[u8], packet: &[u8]) -> Option<Dropped> {
    let (slot, reason) = Reason::of_tag(prefix)?;
    let ethertype = match ethernet {
        [_, _, _, _, _, _, _, _, _, _, _, _, high, low, ..] => u16::from_be_bytes([*high, *low]),
        _ => EtherType::IPV4.0,
    };
    let sliced = LaxSlicedPacket::from_ether_type(EtherType(ethertype), packet);
    let ports = match &sliced.transport {
        Some(TransportSlice::Tcp(tcp)) => (tcp.source_port(), tcp.destination_port()),
        Some(TransportSlice::Udp(udp)) => (udp.source_port(), udp.destination_port()),
        _ => (0, 0),
    };
    let at = |source: IpAddr, destination: IpAddr| {
        (Some(SocketAddr::new(source, ports.0)), Some(SocketAddr::new(destination, ports.1)))
    };
    let (protocol, (source, destination)) = match &sliced.net {
        Some(LaxNetSlice::Ipv4(ip)) => {
            let header = ip.header();
            let ends = at(header.source_addr().into(), header.destination_addr().into());
            (ip_protocol(header.protocol().0), ends)
        }
        Some(LaxNetSlice::Ipv6(ip)) => {
            let header = ip.header();
            let ends = at(header.source_addr().into(), header.destination_addr().into());
            ("ipv6".into(), ends)
        }
        Some(LaxNetSlice::Arp(arp)) => {
            let ip = |bytes: &[u8]| {
                let octets: [u8; 4] = bytes.try_into().ok()?;
                Some(SocketAddr::new(Ipv4Addr::from(octets).into(), 0))
            };
            ("arp".into(), (ip(arp.sender_protocol_addr()), ip(arp.target_protocol_addr())))
        }
        None => (ethertype_name(ethertype), (None, None)),
    };
    Some(Dropped { slot, reason, protocol, source, destination, count: 1 })
}

fn ip_protocol(number: u8) -> Cow<'static, str> {
    match number {
        1 => "icmp".into(),
        6 => "tcp".into(),
        17 => "udp".into(),
        other => format!("ip-{other}").into(),
    }
}

fn ethertype_name(number: u16) -> Cow<'static, str> {
    match number {
        0x0800 => "ip".into(),
        0x0806 => "arp".into(),
        0x86dd => "ipv6".into(),
        other => format!("ethertype-{other:#06x}").into(),
    }
}

#[cfg(test)]
mod tests {
    use etherparse::PacketBuilder;
    use proptest::prelude::*;

    use super::*;

    fn udp_frame(port: u16) -> Vec<u8> {
        let mut frame = Vec::new();
        PacketBuilder::ethernet2([2, 0, 0, 0, 0, 2], [2, 0, 0, 0, 0, 1])
            .ipv4([169, 254, 100, 2], [192, 0, 2, 9], 64)
            .udp(4000, port)
            .write(&mut frame, &[7; 200])
            .expect("a frame");
        frame
    }

    #[test]
    fn a_whole_frame_says_who_what_and_where() {
        let frame = udp_frame(443);
        let dropped = read("pt3 quic", &frame[..14], &frame[14..]).expect("ours");
        assert_eq!((dropped.slot.number(), dropped.reason), (3, Reason::Quic));
        assert_eq!(dropped.protocol, "udp");
        assert_eq!(dropped.source, Some("169.254.100.2:4000".parse().expect("address")));
        assert_eq!(dropped.destination, Some("192.0.2.9:443".parse().expect("address")));
    }

    #[test]
    fn what_is_not_ours_is_nothing() {
        let frame = udp_frame(443);
        assert_eq!(read("eth0 quic", &frame[..14], &frame[14..]), None);
        assert_eq!(read("pt3 nonsense", &frame[..14], &frame[14..]), None);
    }

    #[test]
    fn an_unknown_ethertype_is_named_by_its_number() {
        let mut frame = udp_frame(1);
        frame[12..14].copy_from_slice(&[0x88, 0xcc]);
        let dropped = read("pt3 ethertype", &frame[..14], &frame[14..]).expect("ours");
        assert_eq!((dropped.protocol.as_ref(), dropped.destination), ("ethertype-0x88cc", None));
    }

    proptest! {
        #[test]
        fn no_frame_makes_it_panic_and_none_changes_slot_or_reason(
            ethernet in proptest::collection::vec(any::<u8>(), 0..20),
            packet in proptest::collection::vec(any::<u8>(), 0..160),
        ) {
            let dropped = read("pt9 spoof", &ethernet, &packet).expect("the prefix is ours");
            prop_assert_eq!((dropped.slot.number(), dropped.reason), (9, Reason::Spoof));
        }

        #[test]
        fn a_frame_cut_anywhere_keeps_what_is_left(cut in 0_usize..=186) {
            let frame = udp_frame(443);
            let dropped = read("pt3 quic", &frame[..14], &frame[14..14 + cut]).expect("ours");
            let known = "192.0.2.9:443".parse().expect("address");
            prop_assert!(cut < 28 || dropped.destination == Some(known));
            prop_assert!(cut >= 20 || dropped.destination.is_none());
        }
    }
}
