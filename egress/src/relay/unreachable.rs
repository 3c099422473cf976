//! ICMP that tells a guest's kernel what became of its datagram (RFC 792): values in, bytes out.
//! Pure. The quoted packet carries the slot's address; the fence makes it the guest's own.

use etherparse::{Icmpv4Header, Icmpv4Type, IpNumber, Ipv4Header, UdpHeader, icmpv4};
use policy::Slot;

use crate::refuse::Refusal;
use crate::relay::Key;

/// Why a datagram does not arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    /// It may not (RFC 1812, section 5.2.7.1: communication administratively prohibited).
    Prohibited,
    /// It could not be sent.
    Host,
    /// What a router or the far side said: a code of type 3.
    Said(u8),
}

impl Why {
    /// What a refusal is told as.
    pub(crate) fn of(refusal: &Refusal) -> Self {
        match refusal.outcome() {
            policy::audit::Outcome::Fail => Self::Host,
            _ => Self::Prohibited,
        }
    }

    /// What an error from outside is told as; none for one that says nothing about arriving. A path
    /// that is too narrow is dealt with on our side of it: the host's kernel fragments.
    pub(crate) fn from_outside(icmp_type: u8, code: u8) -> Option<Self> {
        (icmp_type == icmpv4::TYPE_DEST_UNREACH
            && code != icmpv4::CODE_DST_UNREACH_NEED_FRAG
            && code <= icmpv4::CODE_DST_UNREACH_PRECEDENCE_CUTOFF)
            .then_some(Self::Said(code))
    }

    fn code(self) -> u8 {
        match self {
            Self::Prohibited => icmpv4::CODE_DST_UNREACH_FILTER_PROHIB,
            Self::Host => icmpv4::CODE_DST_UNREACH_HOST,
            Self::Said(code) => code,
        }
    }
}

/// A whole IPv4 packet towards the guest in a slot, from where its datagram was to go.
pub(crate) fn message(slot: Slot, key: Key, why: Why) -> Vec<u8> {
    let [guest, to] = [slot.address().octets(), key.to.ip().octets()];
    let header = |length, protocol, source, destination| {
        Ipv4Header::new(length, 64, protocol, source, destination).unwrap_or_default()
    };
    let quoted_ports = UdpHeader {
        source_port: key.source,
        destination_port: key.to.port(),
        length: 8,
        checksum: 0,
    };
    let mut quoted = header(8, IpNumber::UDP, guest, to);
    quoted.header_checksum = quoted.calc_header_checksum();
    let quoted = [&quoted.to_bytes()[..], &quoted_ports.to_bytes()].concat();
    let unreachable = Icmpv4Type::Unknown {
        type_u8: icmpv4::TYPE_DEST_UNREACH,
        code_u8: why.code(),
        bytes5to8: [0; 4],
    };
    let icmp = Icmpv4Header::with_checksum(unreachable, &quoted);
    let body = [&icmp.to_bytes()[..], &quoted].concat();
    let length = u16::try_from(body.len()).unwrap_or_default();
    let mut outer = header(length, IpNumber::ICMP, to, guest);
    outer.header_checksum = outer.calc_header_checksum();
    [&outer.to_bytes()[..], &body].concat()
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddrV4};

    use etherparse::{NetSlice, SlicedPacket, TransportSlice};

    use super::*;

    #[test]
    fn it_quotes_the_datagram_and_says_why() {
        let slot = Slot::new(7).expect("in range");
        let to = SocketAddrV4::new(Ipv4Addr::new(192, 0, 2, 9), 3478);
        let bytes = message(slot, Key { source: 4000, to }, Why::Said(3));
        let outer = SlicedPacket::from_ip(&bytes).expect("a packet");
        let Some(NetSlice::Ipv4(ip)) = &outer.net else { panic!("not IPv4") };
        assert_eq!(ip.header().source_addr(), *to.ip());
        assert_eq!(ip.header().destination_addr(), slot.address());
        let Some(TransportSlice::Icmpv4(icmp)) = &outer.transport else { panic!("not ICMP") };
        assert_eq!((icmp.type_u8(), icmp.code_u8()), (3, 3));
        let checked = Icmpv4Header::with_checksum(icmp.icmp_type(), icmp.payload());
        assert_eq!(icmp.checksum(), checked.checksum);
        let quoted = etherparse::LaxSlicedPacket::from_ip(icmp.payload()).expect("a packet");
        let Some(etherparse::LaxNetSlice::Ipv4(ip)) = &quoted.net else { panic!("not IPv4") };
        assert_eq!(ip.header().source_addr(), slot.address());
        assert_eq!(ip.header().destination_addr(), *to.ip());
        assert_eq!(ip.header().header_checksum(), ip.header().to_header().calc_header_checksum());
        let Some(TransportSlice::Udp(udp)) = &quoted.transport else { panic!("not UDP") };
        assert_eq!((udp.source_port(), udp.destination_port()), (4000, 3478));
    }

    #[test]
    fn only_what_says_that_nothing_arrives_is_passed_on() {
        assert_eq!(Why::from_outside(3, 3), Some(Why::Said(3)));
        assert_eq!(Why::from_outside(3, 13), Some(Why::Said(13)));
        for (icmp_type, code) in [(3, 4), (3, 16), (3, 255), (11, 0), (12, 0), (5, 1), (0, 0)] {
            assert_eq!(Why::from_outside(icmp_type, code), None, "{icmp_type} {code}");
        }
    }
}
