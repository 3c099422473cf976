//! Why the fence dropped a frame: a closed set, the same in rule comments, log prefixes and counters.

use std::fmt;
use std::str::FromStr;

use policy::{Code, Slot};

macro_rules! reasons {
    ($($(#[doc = $doc:literal])* $name:ident = $text:literal => $code:ident,)*) => {
        /// Why the fence dropped a frame.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Reason { $($(#[doc = $doc])* $name,)* }

        impl Reason {
            /// Every reason.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// The reason as it stands in rules.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }

            /// The code of the audit that says this.
            #[must_use]
            pub const fn code(self) -> Code {
                match self { $(Self::$name => Code::$code,)* }
            }
        }
    };
}

reasons! {
    /// Not from the guest's own MAC and IP address.
    Spoof = "spoof" => Protocol,
    /// An ARP frame that is not the guest asking for its gateway.
    Arp = "arp" => Protocol,
    /// IPv6, which is not let out.
    Ipv6 = "ipv6" => Protocol,
    /// Neither IPv4 nor ARP; VLAN tags and MPLS are among these.
    Ethertype = "ethertype" => Protocol,
    /// IPv4 options.
    IpOptions = "ip-options" => Protocol,
    /// A fragment.
    Fragment = "fragment" => Protocol,
    /// An address that no guest can reach: loopback, multicast, broadcast, the guests' own range.
    Destination = "destination" => PrivateAddress,
    /// Neither TCP nor UDP.
    Protocol = "protocol" => Protocol,
    /// More new connections a second than a guest may open.
    SynRate = "syn-rate" => Limit,
    /// More frames, or bytes, a second than a guest may send.
    Rate = "rate" => Limit,
    /// UDP to port 443: answered with ICMP, so that clients fall back to TCP.
    Quic = "quic" => Quic,
    /// UDP to any other port but DNS: answered with ICMP.
    Udp = "udp" => Protocol,
    /// Cut short, or wrong about its own length.
    Malformed = "malformed" => Protocol,
    /// Towards the guest, but not part of anything the router does.
    Stray = "stray" => Protocol,
}

impl Reason {
    /// What marks a rule and its log: `pt<n> <reason>`.
    pub(crate) fn tag(self, slot: Slot) -> String {
        format!("{} {self}", slot.tap())
    }

    /// The slot and reason of such a mark.
    pub(crate) fn of_tag(tag: &str) -> Option<(Slot, Self)> {
        let (tap, reason) = tag.split_once(' ')?;
        Some((Slot::of_tap(tap)?, reason.parse().ok()?))
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Not one of the fence's reasons.
#[derive(Debug, thiserror::Error)]
#[error("not a reason of the fence")]
pub struct UnknownReason;

impl FromStr for Reason {
    type Err = UnknownReason;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL.iter().copied().find(|reason| reason.as_str() == text).ok_or(UnknownReason)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_names_its_slot_and_reason_and_back() {
        let slot = Slot::new(41).expect("in range");
        for &reason in Reason::ALL {
            assert_eq!(Reason::of_tag(&reason.tag(slot)), Some((slot, reason)));
        }
        for bad in ["", "pt41", "pt41 ", "pt0 spoof", "pt41 spoof ", "eth0 spoof"] {
            assert_eq!(Reason::of_tag(bad), None, "{bad}");
        }
    }
}
