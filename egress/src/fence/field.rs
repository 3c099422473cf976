//! What a rule can look at: where it lies in a packet, and how nftables prints it.
//! Offsets are those of RFC 826, RFC 791, RFC 792, RFC 768 and RFC 9293; numbers of the kernel are
//! those of `linux/netfilter/nf_tables.h`.

/// One thing of a packet that can be compared or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// As nftables spells it.
    pub(crate) name: &'static str,
    pub(crate) load: Load,
    pub(crate) shown: Shown,
}

/// Where it comes from. Lengths and offsets in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Load {
    /// Bytes of a header.
    Payload { base: u32, offset: u32 },
    /// What the kernel knows about the packet, by key.
    Meta(u32),
}

/// How values are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shown {
    Mac,
    Ip,
    Decimal,
    Hex,
    /// Bits, as `value / mask`.
    Flags(&'static [(u8, &'static str)]),
    /// A number in the byte order of the machine.
    Mark,
    /// A link type in the byte order of the machine; we know Ethernet only.
    LinkType,
    /// A name of an interface, padded with NUL; a shorter value is a prefix.
    Interface,
    Named(&'static [(&'static [u8], &'static str)]),
}

const LINK: u32 = 0;
const NETWORK: u32 = 1;
const TRANSPORT: u32 = 2;

const fn payload(name: &'static str, base: u32, offset: u32, shown: Shown) -> Field {
    Field { name, load: Load::Payload { base, offset }, shown }
}

const fn meta(name: &'static str, key: u32, shown: Shown) -> Field {
    Field { name, load: Load::Meta(key), shown }
}

pub(crate) const ETHERTYPE_IP: [u8; 2] = [0x08, 0x00];
pub(crate) const ETHERTYPE_ARP: [u8; 2] = [0x08, 0x06];
pub(crate) const ETHERTYPE_IP6: [u8; 2] = [0x86, 0xdd];
/// The link type of Ethernet (`linux/if_arp.h`), in the byte order of the machine.
pub(crate) const ARPHRD_ETHER: [u8; 2] = 1_u16.to_ne_bytes();
pub(crate) const ICMP: [u8; 1] = [1];
pub(crate) const TCP: [u8; 1] = [6];
pub(crate) const UDP: [u8; 1] = [17];

const ETHERTYPES: Shown =
    Shown::Named(&[(&ETHERTYPE_IP, "ip"), (&ETHERTYPE_ARP, "arp"), (&ETHERTYPE_IP6, "ip6")]);
const PROTOCOLS: Shown = Shown::Named(&[(&ICMP, "icmp"), (&TCP, "tcp"), (&UDP, "udp")]);
const ARP_OPERATIONS: Shown = Shown::Named(&[(&[0, 1], "request"), (&[0, 2], "reply")]);
const ICMP_TYPES: Shown = Shown::Named(&[
    (&[3], "destination-unreachable"),
    (&[5], "redirect"),
    (&[11], "time-exceeded"),
    (&[12], "parameter-problem"),
]);
const NF_FAMILIES: Shown = Shown::Named(&[(&[2], "ipv4")]);
const TCP_FLAGS: Shown = Shown::Flags(&[(0x02, "syn"), (0x04, "rst"), (0x10, "ack")]);

pub(crate) const META_PROTOCOL: Field = meta("meta protocol", 1, ETHERTYPES);
pub(crate) const META_MARK: Field = meta("meta mark", 3, Shown::Mark);
pub(crate) const IIFNAME: Field = meta("iifname", 6, Shown::Interface);
pub(crate) const META_IIFTYPE: Field = meta("meta iiftype", 8, Shown::LinkType);
pub(crate) const OIFNAME: Field = meta("oifname", 7, Shown::Interface);
pub(crate) const META_NFPROTO: Field = meta("meta nfproto", 15, NF_FAMILIES);
/// Only there when the kernel could read the IPv4 header: a rule that asks for it fails otherwise.
pub(crate) const META_L4PROTO: Field = meta("meta l4proto", 16, PROTOCOLS);

pub(crate) const ETHER_DADDR: Field = payload("ether daddr", LINK, 0, Shown::Mac);
pub(crate) const ETHER_SADDR: Field = payload("ether saddr", LINK, 6, Shown::Mac);
/// What follows the source address on the wire: of a tagged frame, the tag's own type.
pub(crate) const ETHER_TYPE: Field = payload("ether type", LINK, 12, ETHERTYPES);

pub(crate) const ARP_HTYPE: Field = payload("arp htype", NETWORK, 0, Shown::Decimal);
pub(crate) const ARP_PTYPE: Field = payload("arp ptype", NETWORK, 2, ETHERTYPES);
pub(crate) const ARP_HLEN: Field = payload("arp hlen", NETWORK, 4, Shown::Decimal);
pub(crate) const ARP_PLEN: Field = payload("arp plen", NETWORK, 5, Shown::Decimal);
pub(crate) const ARP_OPERATION: Field = payload("arp operation", NETWORK, 6, ARP_OPERATIONS);
pub(crate) const ARP_SADDR_ETHER: Field = payload("arp saddr ether", NETWORK, 8, Shown::Mac);
pub(crate) const ARP_SADDR_IP: Field = payload("arp saddr ip", NETWORK, 14, Shown::Ip);
pub(crate) const ARP_DADDR_IP: Field = payload("arp daddr ip", NETWORK, 24, Shown::Ip);

/// Version and header length in one byte.
pub(crate) const IP_VERSION_IHL: Field = payload("@nh,0,8", NETWORK, 0, Shown::Hex);
pub(crate) const IP_FRAG_OFF: Field = payload("ip frag-off", NETWORK, 6, Shown::Decimal);
pub(crate) const IP_PROTOCOL: Field = payload("ip protocol", NETWORK, 9, PROTOCOLS);
pub(crate) const IP_SADDR: Field = payload("ip saddr", NETWORK, 12, Shown::Ip);
pub(crate) const IP_DADDR: Field = payload("ip daddr", NETWORK, 16, Shown::Ip);

pub(crate) const UDP_DPORT: Field = payload("udp dport", TRANSPORT, 2, Shown::Decimal);
pub(crate) const TCP_FLAG_BITS: Field = payload("tcp flags", TRANSPORT, 13, TCP_FLAGS);
pub(crate) const ICMP_TYPE: Field = payload("icmp type", TRANSPORT, 0, ICMP_TYPES);
/// The source address inside the packet that an ICMP error quotes (RFC 792).
pub(crate) const ICMP_QUOTED_SADDR: Field = payload("@th,160,32", TRANSPORT, 20, Shown::Hex);
