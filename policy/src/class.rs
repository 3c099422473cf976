//! The one classifier of addresses: used by DNS answers, by the dialer and by the fence.

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::Arc;

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
    /// Classifies an address; IPv4 carried inside IPv6 is classified as what it carries.
    #[must_use]
    pub fn of(address: IpAddr, own: &OwnAddresses) -> Self {
        if own.contains(address) { Self::Own } else { Self::Public }
    }
}

/// The addresses of this host's interfaces, egress addresses included. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct OwnAddresses(Arc<HashSet<IpAddr>>);

impl OwnAddresses {
    /// From the addresses that are configured now.
    #[must_use]
    pub fn new(addresses: impl IntoIterator<Item = IpAddr>) -> Self {
        Self(Arc::new(addresses.into_iter().collect()))
    }

    /// Whether this host has the address.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        self.0.contains(&address)
    }
}
