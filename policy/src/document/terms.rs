//! The words of the policy language, each read from its text and written back the same.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::document::PolicyError;
use crate::name::{NameError, Pattern};
use crate::path::PathGlob;

/// What a rule does, or what happens where no rule matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Effect {
    /// Lets through.
    Allow,
    /// Refuses.
    Deny,
}

/// What a policy does with what it refuses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PolicyMode {
    /// Refuses it.
    #[default]
    Enforce,
    /// Lets it through as far as the layers above do, and has it recorded.
    Observe,
}

impl PolicyMode {
    /// As a policy says it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Enforce => "enforce",
            Self::Observe => "observe",
        }
    }
}

impl fmt::Display for PolicyMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The transport of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

/// What an allow rule does with a ClientHello that hides its inner name (RFC 9849).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ech {
    /// The outer name decides. Browsers send the extension to hosts that have no keys, too.
    #[default]
    Allow,
    /// The rule does not let it through.
    Deny,
}

/// Whom a rule names.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Peer {
    /// Hosts by name.
    Name(Pattern),
    /// A network; one address is a network of its full length.
    Net(IpNet),
}

/// What must hold for a rule to match, besides the peer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Conditions {
    /// The ports; none: for an allowed name TLS on 443 and HTTP on 80, otherwise every port.
    pub ports: Vec<PortRange>,
    /// The transport; none: TCP for an allow rule, both for a deny rule.
    pub protocol: Option<Protocol>,
    /// Request methods, exact; none: any.
    pub methods: Vec<String>,
    /// Request paths; none: any.
    pub paths: Vec<PathGlob>,
    /// Whether connections with an encrypted ClientHello are let through.
    pub ech: Ech,
    /// The other layers need not allow it: platform layer only.
    pub always: bool,
    /// What its far sides do wakes no sandbox that sleeps: `wake_on_data = false`.
    pub unwoken: bool,
}

/// Ports `from` to `to`, both included, `1 <= from <= to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortRange {
    from: u16,
    to: u16,
}

impl Protocol {
    /// As it is written: `tcp` or `udp`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

impl Conditions {
    /// Whether the rule looks at single requests, and so needs to see them.
    #[must_use]
    pub fn needs_requests(&self) -> bool {
        !self.methods.is_empty() || !self.paths.is_empty()
    }
}

impl PortRange {
    /// A range; none when it is empty or begins with 0.
    #[must_use]
    pub fn new(from: u16, to: u16) -> Option<Self> {
        (1 <= from && from <= to).then_some(Self { from, to })
    }

    /// The first port.
    #[must_use]
    pub fn first(self) -> u16 {
        self.from
    }

    /// The last port.
    #[must_use]
    pub fn last(self) -> u16 {
        self.to
    }

    /// Whether the port is in it.
    #[must_use]
    pub fn contains(self, port: u16) -> bool {
        (self.from..=self.to).contains(&port)
    }
}

impl FromStr for PortRange {
    type Err = PolicyError;
    fn from_str(text: &str) -> Result<Self, PolicyError> {
        let (from, to) = text.split_once('-').unwrap_or((text, text));
        let number = |digits: &str| {
            let plain = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
            plain.then(|| digits.parse().ok()).flatten()
        };
        let range = number(from).zip(number(to)).and_then(|(from, to)| Self::new(from, to));
        range.ok_or_else(|| {
            let fix = "write a port from 1 to 65535, or a range as \"8000-8099\"";
            PolicyError::new("", "is not a port or a range of ports", fix).with_value(text)
        })
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.from == self.to {
            return write!(f, "{}", self.from);
        }
        write!(f, "{}-{}", self.from, self.to)
    }
}

impl FromStr for Peer {
    type Err = PolicyError;
    fn from_str(text: &str) -> Result<Self, PolicyError> {
        let wrong = |problem: &str, fix: &str| PolicyError::new("", problem, fix).with_value(text);
        if let Ok(address) = text.parse::<IpAddr>() {
            return net(address.into(), text);
        }
        if text.contains("://") {
            return Err(wrong("is a URL", "write the host name alone; a path goes under 'paths'"));
        }
        if text.contains('/') {
            let fix = "write an address and a prefix length, as in \"203.0.113.0/24\"; a path \
                       goes under 'paths'";
            let parsed = text.parse().map_err(|_| wrong("is not a network", fix))?;
            return net(parsed, text);
        }
        Pattern::parse(text).map(Self::Name).map_err(|error| {
            let fix = match error {
                NameError::IpAddress => "write an address in its usual form, as in \"203.0.113.7\"",
                NameError::Wildcard => {
                    "put the wildcard in front: \"*.example.com\" for what is below, \
                     \".example.com\" for the name too"
                }
                NameError::TooWide => "name the domain below it, as in \"*.example.com\"",
                _ if text.contains(':') => "write the host name alone; a port goes under 'ports'",
                _ => "write a host name, as in \"api.example.com\"",
            };
            wrong(&error.to_string(), fix)
        })
    }
}

fn net(net: IpNet, text: &str) -> Result<Peer, PolicyError> {
    let wrong = |problem: &str, fix: String| PolicyError::new("", problem, fix).with_value(text);
    if let IpNet::V6(v6) = net
        && let Some(v4) = v6.network().to_ipv4_mapped()
        && v6.prefix_len() >= 96
    {
        let fix = format!("write \"{v4}/{}\"", v6.prefix_len() - 96);
        return Err(wrong("is IPv4 in an IPv6 spelling", fix));
    }
    if net.trunc() != net {
        let fix = format!("write \"{}\", or \"{}\" for the one address", net.trunc(), net.addr());
        return Err(wrong("has bits beyond its prefix length", fix));
    }
    Ok(Peer::Net(net))
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(pattern) => pattern.fmt(f),
            Self::Net(net) if net.prefix_len() == net.max_prefix_len() => net.addr().fmt(f),
            Self::Net(net) => net.fmt(f),
        }
    }
}
