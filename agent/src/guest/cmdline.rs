//! What the host wrote on the kernel's command line for us: `postern.<key>=<value>`.
//!
//! The host's numbers live on the host only; this program has no address of its own.

use std::fs;
use std::io;
use std::net::Ipv4Addr;

/// What process 1 and the agent need to know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cmdline {
    /// Host name.
    pub(crate) name: String,
    /// Our address.
    pub(crate) address: Ipv4Addr,
    /// Prefix length of our link.
    pub(crate) prefix: u8,
    /// Gateway and resolver, and the only peer the agent listens to.
    pub(crate) gateway: Ipv4Addr,
    /// The agent's TCP port.
    pub(crate) port: u16,
    /// When the host wrote this line, in nanoseconds since the Unix epoch.
    pub(crate) clock: Option<u64>,
}

impl Cmdline {
    /// Reads `/proc/cmdline`.
    pub(crate) fn read() -> io::Result<Self> {
        let text = fs::read_to_string("/proc/cmdline")?;
        Self::parse(&text).ok_or_else(|| {
            io::Error::other("the kernel's command line lacks postern.{name,address,gateway,port}")
        })
    }

    fn parse(text: &str) -> Option<Self> {
        let value = |key: &str| {
            text.split_ascii_whitespace()
                .filter_map(|word| word.strip_prefix("postern.")?.split_once('='))
                .find_map(|(name, value)| (name == key).then_some(value))
        };
        let (address, prefix) = value("address")?.split_once('/')?;
        Some(Self {
            name: value("name")?.to_owned(),
            address: address.parse().ok()?,
            prefix: prefix.parse().ok()?,
            gateway: value("gateway")?.parse().ok()?,
            port: value("port")?.parse().ok()?,
            clock: value("clock").and_then(|nanos| nanos.parse().ok()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hosts_words_are_found_among_the_kernels() {
        let text = "console=ttyS0 quiet postern.name=demo postern.address=169.254.100.2/30 \
                    postern.gateway=169.254.100.1 postern.port=1007 postern.clock=17 panic=-1\n";
        let cmdline = Cmdline::parse(text).expect("complete");
        assert_eq!(cmdline.name, "demo");
        assert_eq!((cmdline.address, cmdline.prefix), (Ipv4Addr::new(169, 254, 100, 2), 30));
        assert_eq!((cmdline.port, cmdline.clock), (1007, Some(17)));
        assert_eq!(Cmdline::parse(&text.replace("postern.gateway", "gateway")), None);
    }
}
