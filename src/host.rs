//! What this host is: its addresses, the networks that it answers for, and the addresses its traffic
//! would leave from. Reads, never changes.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use futures_util::stream::BoxStream;
use futures_util::{FutureExt, StreamExt, TryStreamExt};
use ipnet::IpNet;
use rtnetlink::packet_core::{NetlinkMessage, NetlinkPayload};
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::packet_route::route::{RouteAddress, RouteAttribute, RouteMessage, RouteType};
use rtnetlink::{Handle, MulticastGroup, RouteMessageBuilder};

/// The kernel's table of what is the host's own (`rtnetlink(7)`, `RT_TABLE_LOCAL`).
const TABLE_LOCAL: u8 = 255;
/// What changes what is the host's own.
const GROUPS: [MulticastGroup; 4] = [
    MulticastGroup::Ipv4Ifaddr,
    MulticastGroup::Ipv6Ifaddr,
    MulticastGroup::Ipv4Route,
    MulticastGroup::Ipv6Route,
];

/// The kernel's routes, as far as they say what this host answers for. Its tasks end with it.
pub struct Routes {
    handle: Handle,
    changes: BoxStream<'static, NetlinkMessage<RouteNetlinkMessage>>,
    tasks: [tokio::task::JoinHandle<()>; 2],
}

impl Routes {
    /// Those of this network namespace.
    pub fn open() -> io::Result<Self> {
        let (asking, handle, _) = rtnetlink::new_connection()?;
        let (listening, _, changes) = rtnetlink::new_multicast_connection(&GROUPS)?;
        let tasks = [tokio::spawn(asking), tokio::spawn(listening)];
        let changes = changes.map(|(message, _)| message).boxed();
        Ok(Self { handle, changes, tasks })
    }

    /// By what the kernel is asked.
    #[must_use]
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Returns once something has changed of what is this host's. Routes elsewhere change all the time
    /// on some hosts, and are none of it.
    pub async fn changed(&mut self) {
        while let Some(message) = self.changes.next().await {
            let message = match message.payload {
                NetlinkPayload::InnerMessage(message) => message,
                // Some were lost, this host's perhaps among them.
                NetlinkPayload::Overrun(_) => return,
                _ => continue,
            };
            match message {
                RouteNetlinkMessage::NewAddress(_) | RouteNetlinkMessage::DelAddress(_) => return,
                RouteNetlinkMessage::NewRoute(route) | RouteNetlinkMessage::DelRoute(route)
                    if own(&route).is_some() =>
                {
                    return;
                }
                _ => {}
            }
        }
        // Only the timer is left.
        std::future::pending().await
    }

    /// Throws away what has been told so far.
    pub fn forget(&mut self) {
        while self.changes.next().now_or_never().flatten().is_some() {}
    }
}

impl Drop for Routes {
    fn drop(&mut self) {
        self.tasks.iter().for_each(tokio::task::JoinHandle::abort);
    }
}

/// The networks of all tables that the kernel delivers to this host, whatever its interfaces have
/// (`ip route add local`). One of everything in another table than its own is not among them: those
/// are of transparent proxies and meant for marked packets only.
pub async fn networks(handle: &Handle) -> io::Result<Vec<IpNet>> {
    let mut networks = Vec::new();
    for kind in [RouteType::Local, RouteType::Anycast] {
        let v4 = RouteMessageBuilder::<Ipv4Addr>::new().kind(kind).build();
        let v6 = RouteMessageBuilder::<Ipv6Addr>::new().kind(kind).build();
        for mut asked in [v4, v6] {
            let plain = RouteMessage::default().header;
            asked.header.protocol = plain.protocol;
            asked.header.scope = plain.scope;
            asked.header.table = plain.table;
            asked.attributes.clear();
            let mut routes = handle.route().get(asked).execute();
            while let Some(route) = routes.try_next().await.map_err(io::Error::other)? {
                networks.extend(own(&route));
            }
        }
    }
    Ok(networks)
}

impl std::fmt::Debug for Routes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Routes").finish_non_exhaustive()
    }
}

/// The network of a route to this host itself.
fn own(route: &RouteMessage) -> Option<IpNet> {
    let header = &route.header;
    if !matches!(header.kind, RouteType::Local | RouteType::Anycast) {
        return None;
    }
    let to = route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Destination(RouteAddress::Inet(v4)) => Some(IpAddr::from(*v4)),
        RouteAttribute::Destination(RouteAddress::Inet6(v6)) => Some(IpAddr::from(*v6)),
        _ => None,
    });
    let length = header.destination_prefix_length;
    match to {
        Some(to) => IpNet::new(to, length).ok(),
        None if header.table == TABLE_LOCAL => {
            let any = if header.address_family == rtnetlink::packet_route::AddressFamily::Inet {
                IpAddr::from(Ipv4Addr::UNSPECIFIED)
            } else {
                IpAddr::from(Ipv6Addr::UNSPECIFIED)
            };
            IpNet::new(any, length).ok()
        }
        None => None,
    }
}

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
