//! The small world every guest sees, and the slot that tells guests apart on the outside.
//!
//! All guests have the same addresses inside, so that a snapshot can be resumed in any slot. These
//! values are part of every snapshot: they never change.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr};

use ipnet::Ipv4Net;
use serde::{Deserialize, Serialize};

/// A guest's address, the same in every guest.
pub const GUEST_IP: Ipv4Addr = Ipv4Addr::new(169, 254, 100, 2);
/// Prefix length of the guest's link.
pub const GUEST_PREFIX: u8 = 30;
/// The guest's gateway, resolver and metadata address.
pub const GATEWAY_IP: Ipv4Addr = Ipv4Addr::new(169, 254, 100, 1);
/// A guest's MAC address, the same in every guest.
pub const GUEST_MAC: [u8; 6] = [0x02, 0, 0, 0, 0, 0x02];
/// The MAC address of every tap as a guest sees it.
pub const GATEWAY_MAC: [u8; 6] = [0x02, 0, 0, 0, 0, 0x01];
/// First address of the internal range 198.18.0.0/16; slot `n` is this plus `n`.
pub const INTERNAL_BASE: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 0);
/// The range of addresses that stand for names without an IPv4 address, 198.19.0.0/16: inside a guest
/// only. Like the internal range it is kept for benchmarks (RFC 2544), and so routed by nobody.
pub const SYNTHETIC: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(198, 19, 0, 0), 16);
/// TCP port of the agent inside a guest.
pub const AGENT_PORT: u16 = 1007;

/// A place for one sandbox on this node: tap `pt<n>`, internal address 198.18.0.0 + n.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Slot(u16);

impl Slot {
    /// Highest slot: 198.18.255.254.
    pub const MAX: u16 = 0xfffe;

    /// Slot `n`, 1 to [`Slot::MAX`].
    #[must_use]
    pub fn new(n: u16) -> Option<Self> {
        (1..=Self::MAX).contains(&n).then_some(Self(n))
    }

    /// Its number.
    #[must_use]
    pub fn number(self) -> u16 {
        self.0
    }

    /// The name of its tap, `pt<n>`: at most 7 characters of the 15 the kernel allows.
    #[must_use]
    pub fn tap(self) -> String {
        format!("pt{}", self.0)
    }

    /// The address that stands for its guest on our side of the tap.
    #[must_use]
    pub fn address(self) -> Ipv4Addr {
        Ipv4Addr::from_bits(INTERNAL_BASE.to_bits() + u32::from(self.0))
    }

    /// The slot whose tap has this name.
    #[must_use]
    pub fn of_tap(name: &str) -> Option<Self> {
        let digits = name.strip_prefix("pt")?;
        let slot = Self::new(digits.parse().ok()?)?;
        (slot.tap() == name).then_some(slot)
    }
}

/// Whether an address means something else to a guest or to us than to the world outside: that of a
/// slot, or one that stands for a name.
pub(crate) fn is_ours(address: IpAddr) -> bool {
    let IpAddr::V4(v4) = address else { return false };
    SYNTHETIC.contains(&v4) || Ipv4Net::new_assert(INTERNAL_BASE, 16).contains(&v4)
}

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_names_its_tap_and_address_and_back() {
        let slot = Slot::new(258).expect("in range");
        assert_eq!(slot.tap(), "pt258");
        assert_eq!(slot.address(), Ipv4Addr::new(198, 18, 1, 2));
        assert_eq!(Slot::of_tap("pt258"), Some(slot));
        for bad in ["pt", "pt0", "pt0258", "pt+1", "pt65535", "eth0", "pt1 "] {
            assert_eq!(Slot::of_tap(bad), None, "{bad}");
        }
    }
}
