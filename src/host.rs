//! What this host is: its addresses, and the ones its traffic would leave from. Reads, never changes.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

/// The addresses of all interfaces of this network namespace.
pub fn addresses() -> io::Result<Vec<IpAddr>> {
    let found = nix::ifaddrs::getifaddrs()?.filter_map(|interface| {
        let address = interface.address?;
        let v4 = address.as_sockaddr_in().map(|a| IpAddr::V4(a.ip()));
        v4.or_else(|| address.as_sockaddr_in6().map(|a| IpAddr::V6(a.ip())))
    });
    Ok(found.collect())
}

/// The source addresses the kernel chooses towards the internet, at most one per family. No packet
/// is sent for this.
#[must_use]
pub fn sources() -> Vec<IpAddr> {
    // Documentation addresses (RFC 5737, RFC 3849): only their route is looked up.
    let v4 = (IpAddr::from(Ipv4Addr::UNSPECIFIED), IpAddr::from(Ipv4Addr::new(203, 0, 113, 1)));
    let v6_far = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);
    let v6 = (IpAddr::from(Ipv6Addr::UNSPECIFIED), IpAddr::from(v6_far));
    let source = |(any, far): (IpAddr, IpAddr)| {
        let socket = UdpSocket::bind(SocketAddr::new(any, 0)).ok()?;
        socket.connect(SocketAddr::new(far, 9)).ok()?;
        socket.local_addr().ok().map(|address| address.ip())
    };
    [v4, v6].into_iter().filter_map(source).filter(|address| !address.is_loopback()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_source_is_an_address_of_this_host() {
        let own = addresses().expect("addresses");
        assert!(own.iter().any(IpAddr::is_loopback) || own.is_empty());
        for source in sources() {
            assert!(own.contains(&source), "{source} is not in {own:?}");
        }
    }
}
