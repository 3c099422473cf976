//! The one classifier of addresses: used by DNS answers, by the dialer and by the fence.
//!
//! Tables are the IANA special-purpose address registries (RFC 6890) and multicast. An address that
//! carries an IPv4 address is never more public than what it carries.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use arc_swap::ArcSwap;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

/// What an address is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AddressClass {
    /// Globally reachable unicast.
    Public,
    /// Special purpose: the name of the registry's entry.
    Special(&'static str),
    /// An address of this host.
    Own,
}

impl AddressClass {
    /// Classifies an address; IPv4 carried inside IPv6 is classified as what it carries, or is
    /// special outright where the carrier itself is.
    #[must_use]
    pub fn of(address: IpAddr, own: &OwnAddresses) -> Self {
        let address = address.to_canonical();
        let inner = carried(address);
        if own.contains(address) || inner.is_some_and(|v4| own.contains(v4.into())) {
            return Self::Own;
        }
        match special(address).or_else(|| special(inner?.into())) {
            Some((_, name)) => Self::Special(name),
            None => Self::Public,
        }
    }
}

/// What this host answers for: the addresses of its interfaces, egress addresses included, and the
/// networks that its routes say are its own. Clones share one set.
#[derive(Clone, Debug, Default)]
pub struct OwnAddresses(Arc<ArcSwap<Own>>);

#[derive(Debug, Default)]
struct Own {
    addresses: HashSet<IpAddr>,
    networks: Vec<IpNet>,
}

impl OwnAddresses {
    /// From the addresses that are configured now.
    #[must_use]
    pub fn new(addresses: impl IntoIterator<Item = IpAddr>) -> Self {
        let own = Self::default();
        own.replace(addresses);
        own
    }

    /// Puts another set in place of this one, for every clone.
    pub fn replace(&self, addresses: impl IntoIterator<Item = IpAddr>) {
        self.replace_all(addresses, []);
    }

    /// The same, with networks of which each address is one of this host.
    pub fn replace_all(
        &self,
        addresses: impl IntoIterator<Item = IpAddr>,
        networks: impl IntoIterator<Item = IpNet>,
    ) {
        let addresses = addresses.into_iter().map(|address| address.to_canonical()).collect();
        let mut own = Own { addresses, networks: Vec::new() };
        for net in networks {
            match net.prefix_len() == net.max_prefix_len() {
                true => {
                    own.addresses.insert(net.addr().to_canonical());
                }
                false => own.networks.push(net),
            }
        }
        own.networks = IpNet::aggregate(&own.networks);
        self.0.store(Arc::new(own));
    }

    /// Whether this host has the address.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        let (own, address) = (self.0.load(), address.to_canonical());
        own.addresses.contains(&address) || own.networks.iter().any(|net| net.contains(&address))
    }
}

/// The block that makes an address special, and its name; none for a public one. Does not look
/// inside: ask about [`carried`] too.
pub(crate) fn special(address: IpAddr) -> Option<(IpNet, &'static str)> {
    match address {
        IpAddr::V4(v4) if REACHABLE_V4.iter().any(|(net, _)| net.contains(&v4)) => None,
        IpAddr::V4(v4) => {
            let row = SPECIAL_V4.iter().find(|(net, _)| net.contains(&v4))?;
            Some((row.0.into(), row.1))
        }
        IpAddr::V6(v6) if REACHABLE_V6.iter().any(|(net, _)| net.contains(&v6)) => None,
        IpAddr::V6(v6) => {
            let row = SPECIAL_V6.iter().find(|(net, _)| net.contains(&v6));
            let row = row.map(|(net, name)| ((*net).into(), *name));
            row.or_else(|| is_isatap(v6).then(|| (address.into(), "ISATAP")))
        }
    }
}

/// The IPv4 address that an otherwise public IPv6 address leads to: NAT64 (RFC 6052, section 2.1).
pub(crate) fn carried(address: IpAddr) -> Option<Ipv4Addr> {
    let IpAddr::V6(v6) = address else { return None };
    let low = Ipv4Addr::from_bits(u32::try_from(v6.to_bits() & 0xffff_ffff).ok()?);
    NAT64.contains(&v6).then_some(low)
}

/// The block of addresses that serve the host itself and say its credentials to whoever asks from one
/// of its addresses: link-local ones and the clouds' metadata services. None for any other address.
/// Looks inside IPv6 that carries IPv4.
#[must_use]
pub fn host_service(address: IpAddr) -> Option<IpNet> {
    let of = |address: IpAddr| HOST_SERVICES.iter().find(|(net, _)| net.contains(&address));
    let address = address.to_canonical();
    if let Some((net, _)) = of(address) {
        return Some(*net);
    }
    let IpAddr::V6(v6) = address else { return None };
    let bits = v6.to_bits();
    // 6to4 has it behind its prefix (RFC 3056, section 2).
    let six_to_four = (bits >> 112 == 0x2002).then_some((bits >> 80) & 0xffff_ffff);
    let inner = match (carried(address), special(address)) {
        (Some(v4), _) => [Some(v4.to_bits().into()); 6],
        (None, Some(_)) => translated(bits),
        (None, None) => [None; 6],
    };
    let v4 = |bits: u128| u32::try_from(bits).ok().map(Ipv4Addr::from_bits);
    let mut inner = inner.into_iter().chain([six_to_four]).flatten().filter_map(v4);
    inner.any(|v4| of(v4.into()).is_some()).then(|| address.into())
}

/// The IPv4 addresses that stand in these bits behind prefixes of 96 bits and of 64, 56, 48, 40 and 32,
/// of which a translator may have any in a network for local use (RFC 6052, section 2.2; RFC 8215).
/// Bits 64 to 71 are nobody's, and 0; what stands behind the address is read over.
fn translated(bits: u128) -> [Option<u128>; 6] {
    let around = (bits >> 56) & 0xff == 0;
    let behind = |prefix: u32| {
        let without = ((bits >> 64) << 56) | (bits & 0x00ff_ffff_ffff_ffff);
        around.then_some((without >> (88 - prefix)) & 0xffff_ffff)
    };
    [Some(bits & 0xffff_ffff), behind(64), behind(56), behind(48), behind(40), behind(32)]
}

/// RFC 5214, section 6.1: an interface identifier `[02]00:5efe` and an IPv4 address, in any prefix.
fn is_isatap(address: Ipv6Addr) -> bool {
    let [.., marker, flag, _, _] = address.segments();
    flag == 0x5efe && (marker & !0x0200) == 0
}

const fn v4(a: u8, b: u8, c: u8, d: u8, prefix: u8) -> Ipv4Net {
    Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, d), prefix)
}

const fn v6(a: u16, b: u16, c: u16, d: u16, prefix: u8) -> Ipv6Net {
    Ipv6Net::new_assert(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0), prefix)
}

/// Special IPv4 blocks, each before the wider one that holds it, with the registry's names.
/// [`REACHABLE_V4`] are the holes in them.
pub const SPECIAL_V4: &[(Ipv4Net, &str)] = &[
    (v4(0, 0, 0, 0, 8), "This network"),
    (v4(10, 0, 0, 0, 8), "Private-Use"),
    (v4(100, 64, 0, 0, 10), "Shared Address Space"),
    (v4(127, 0, 0, 0, 8), "Loopback"),
    // Not in the registry, but on that cloud it is the host's, whatever the route says.
    (v4(168, 63, 129, 16, 32), "Azure platform address"),
    (v4(169, 254, 0, 0, 16), "Link Local"),
    (v4(172, 16, 0, 0, 12), "Private-Use"),
    (v4(192, 0, 0, 0, 29), "IPv4 Service Continuity Prefix"),
    (v4(192, 0, 0, 8, 32), "IPv4 dummy address"),
    (v4(192, 0, 0, 170, 31), "NAT64/DNS64 Discovery"),
    (v4(192, 0, 0, 0, 24), "IETF Protocol Assignments"),
    (v4(192, 0, 2, 0, 24), "Documentation (TEST-NET-1)"),
    (v4(192, 88, 99, 2, 32), "6a44-relay anycast address"),
    (v4(192, 88, 99, 0, 24), "Deprecated (6to4 Relay Anycast)"),
    (v4(192, 168, 0, 0, 16), "Private-Use"),
    (v4(198, 18, 0, 0, 15), "Benchmarking"),
    (v4(198, 51, 100, 0, 24), "Documentation (TEST-NET-2)"),
    (v4(203, 0, 113, 0, 24), "Documentation (TEST-NET-3)"),
    (v4(224, 0, 0, 0, 4), "Multicast"),
    (v4(255, 255, 255, 255, 32), "Limited Broadcast"),
    (v4(240, 0, 0, 0, 4), "Reserved"),
];

/// Addresses that answer the host they run on, with its role and secrets: only the operator opens them.
pub const HOST_SERVICES: &[(IpNet, &str)] = &[
    (IpNet::V4(v4(169, 254, 0, 0, 16)), "Link Local"),
    (IpNet::V4(v4(168, 63, 129, 16, 32)), "Azure platform address"),
    (IpNet::V4(v4(100, 100, 100, 200, 32)), "Alibaba metadata"),
    (IpNet::V4(v4(192, 0, 0, 192, 32)), "Oracle metadata"),
    (IpNet::V6(v6(0xfe80, 0, 0, 0, 10)), "Link-Local Unicast"),
    (IpNet::V6(v6(0xfd00, 0xec2, 0, 0, 32)), "Amazon services"),
    (IpNet::V6(v6(0xfd20, 0xce, 0, 0, 64)), "Google metadata"),
    (IpNet::V6(v6(0xfd00, 0xc1, 0, 0, 64)), "Oracle metadata"),
    (IpNet::V6(v6(0xfd00, 0x42, 0, 0, 64)), "Scaleway metadata"),
];

/// IPv4 addresses inside special blocks that the registry calls globally reachable.
pub const REACHABLE_V4: &[(Ipv4Net, &str)] = &[
    (v4(192, 0, 0, 9, 32), "Port Control Protocol Anycast"),
    (v4(192, 0, 0, 10, 32), "Traversal Using Relays around NAT Anycast"),
];

/// Special IPv6 blocks, each before the wider one that holds it. Outside `2000::/3` only NAT64 is
/// allocated for global unicast, so the rest of the space stands here as a whole, last.
pub const SPECIAL_V6: &[(Ipv6Net, &str)] = &[
    (Ipv6Net::new_assert(Ipv6Addr::UNSPECIFIED, 128), "Unspecified Address"),
    (Ipv6Net::new_assert(Ipv6Addr::LOCALHOST, 128), "Loopback Address"),
    (Ipv6Net::new_assert(Ipv6Addr::new(0, 0, 0, 0, 0, 0xffff, 0, 0), 96), "IPv4-mapped Address"),
    (
        Ipv6Net::new_assert(Ipv6Addr::new(0, 0, 0, 0, 0xffff, 0, 0, 0), 96),
        "IPv4-translated Address",
    ),
    (v6(0, 0, 0, 0, 96), "IPv4-compatible Address"),
    (v6(0x64, 0xff9b, 1, 0, 48), "IPv4-IPv6 Translation, local-use"),
    (v6(0x100, 0, 0, 0, 64), "Discard-Only Address Block"),
    (v6(0x100, 0, 0, 1, 64), "Dummy IPv6 Prefix"),
    (v6(0x2001, 0, 0, 0, 32), "TEREDO"),
    (v6(0x2001, 2, 0, 0, 48), "Benchmarking"),
    (v6(0x2001, 0x10, 0, 0, 28), "Deprecated (ORCHID)"),
    (v6(0x2001, 0, 0, 0, 23), "IETF Protocol Assignments"),
    (v6(0x2001, 0xdb8, 0, 0, 32), "Documentation"),
    (v6(0x2002, 0, 0, 0, 16), "6to4"),
    (v6(0x3fff, 0, 0, 0, 20), "Documentation"),
    (v6(0x5f00, 0, 0, 0, 16), "Segment Routing (SRv6) SIDs"),
    (v6(0xfc00, 0, 0, 0, 7), "Unique-Local"),
    (v6(0xfe80, 0, 0, 0, 10), "Link-Local Unicast"),
    (v6(0xfec0, 0, 0, 0, 10), "Deprecated (Site-Local)"),
    (v6(0xff00, 0, 0, 0, 8), "Multicast"),
    (v6(0, 0, 0, 0, 3), "Not allocated for global unicast"),
    (v6(0x4000, 0, 0, 0, 2), "Not allocated for global unicast"),
    (v6(0x8000, 0, 0, 0, 1), "Not allocated for global unicast"),
];

/// IPv6 blocks inside special ones that the registry calls globally reachable.
pub const REACHABLE_V6: &[(Ipv6Net, &str)] = &[
    (NAT64, "IPv4-IPv6 Translation"),
    (anycast(1), "Port Control Protocol Anycast"),
    (anycast(2), "Traversal Using Relays around NAT Anycast"),
    (anycast(3), "DNS-SD Service Registration Protocol Anycast"),
    (v6(0x2001, 3, 0, 0, 32), "AMT"),
    (v6(0x2001, 4, 0x112, 0, 48), "AS112-v6"),
    (v6(0x2001, 0x20, 0, 0, 28), "ORCHIDv2"),
    (v6(0x2001, 0x30, 0, 0, 28), "Drone Remote ID Protocol Entity Tags"),
];

const NAT64: Ipv6Net = v6(0x64, 0xff9b, 0, 0, 96);

const fn anycast(last: u16) -> Ipv6Net {
    Ipv6Net::new_assert(Ipv6Addr::new(0x2001, 1, 0, 0, 0, 0, 0, last), 128)
}
