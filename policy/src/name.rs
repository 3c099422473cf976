//! Host names in one canonical form, the patterns that name them, and authorities.
//!
//! Only `Host::parse` makes a `Host`, so two spellings of one name cannot be told apart later, and
//! nothing that a resolver or C library would read as an address is ever a name.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use idna::uts46::{AsciiDenyList, DnsLength, Hyphens, Uts46};
use serde::{Deserialize, Serialize};

/// Longest name and longest label, in bytes (RFC 1035, section 2.3.4).
const MAX_NAME: usize = 253;
const MAX_LABEL: usize = 63;
/// Longest text worth mapping; a canonical name is at most 253 bytes.
const MAX_TEXT: usize = 1024;

/// A host name: lower case, A-labels (UTS 46), no trailing dot, at most 253 bytes in labels of at
/// most 63, and not an IP address in any spelling. Two names are the same host when they are equal.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Host(Arc<str>);

/// Why a text is not a host name, a pattern or an authority.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NameError {
    /// Nothing there.
    #[error("is empty")]
    Empty,
    /// More than 253 bytes, or a label of more than 63.
    #[error("is too long: 253 bytes in labels of at most 63")]
    TooLong,
    /// A byte that no host name has, an empty label, a hyphen at an edge, a false A-label.
    #[error("is not a host name")]
    Malformed,
    /// An IP address, in whatever spelling.
    #[error("is an IP address, not a name")]
    IpAddress,
    /// A pattern with a `*` elsewhere than in front.
    #[error("has a wildcard elsewhere than in front")]
    Wildcard,
    /// A wildcard over a whole public suffix (`*.com`, `*.co.uk`).
    #[error("is a wildcard over a whole public suffix")]
    TooWide,
    /// An authority whose port is not 1 to 65535 in plain digits.
    #[error("has a port that is not a number from 1 to 65535")]
    Port,
}

impl Host {
    /// Reads a name in any case, with or without one trailing dot, U-labels or A-labels.
    pub fn parse(text: &str) -> Result<Self, NameError> {
        match text.len() {
            0 => return Err(NameError::Empty),
            1..=MAX_TEXT => {}
            _ => return Err(NameError::TooLong),
        }
        if text.starts_with('[') || text.parse::<IpAddr>().is_ok() {
            return Err(NameError::IpAddress);
        }
        let mapped = Uts46::new()
            .to_ascii(
                text.as_bytes(),
                AsciiDenyList::EMPTY,
                Hyphens::CheckFirstLast,
                DnsLength::Ignore,
            )
            .map_err(|_| NameError::Malformed)?;
        let name = mapped.strip_suffix('.').unwrap_or(&mapped);
        if name.len() > MAX_NAME || name.split('.').any(|label| label.len() > MAX_LABEL) {
            return Err(NameError::TooLong);
        }
        if !name.split('.').all(is_label) {
            return Err(NameError::Malformed);
        }
        if name.rsplit('.').next().is_some_and(is_number) {
            return Err(NameError::IpAddress);
        }
        Ok(Self(Arc::from(name)))
    }

    /// Reads a name as a protocol carries it (SNI, RFC 6066 section 3; a DNS name in text): ASCII
    /// only, because a U-label on the wire is a way to be read differently by someone else.
    pub fn from_wire(bytes: &[u8]) -> Result<Self, NameError> {
        let text = std::str::from_utf8(bytes).map_err(|_| NameError::Malformed)?;
        if !text.is_ascii() {
            return Err(NameError::Malformed);
        }
        Self::parse(text)
    }

    /// The canonical text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether it is this zone's name or a name below it.
    #[must_use]
    pub fn is_within(&self, zone: &Self) -> bool {
        self == zone || self.is_below(zone)
    }

    /// The shortest ending of it that someone can have for himself: a label and a public suffix, those
    /// included that companies list for their customers; the name itself where it is one.
    #[must_use]
    pub fn registrable(&self) -> &str {
        psl::domain_str(&self.0).unwrap_or(&self.0)
    }

    /// What stands in front of its public suffix, without the dot between; empty where it is one.
    #[must_use]
    pub fn before_public_suffix(&self) -> &str {
        let suffix = psl::suffix_str(&self.0).unwrap_or_default();
        self.0.strip_suffix(suffix).unwrap_or_default().trim_end_matches('.')
    }

    /// Whether it is a top-level domain of the registries.
    #[must_use]
    pub fn is_top_level(&self) -> bool {
        !self.0.contains('.')
            && psl::suffix(self.0.as_bytes()).is_some_and(|suffix| suffix.is_known())
    }

    fn is_below(&self, zone: &Self) -> bool {
        self.0.strip_suffix(zone.as_str()).is_some_and(|rest| rest.ends_with('.'))
    }
}

impl TryFrom<String> for Host {
    type Error = NameError;
    fn try_from(text: String) -> Result<Self, NameError> {
        Self::parse(&text)
    }
}

impl std::str::FromStr for Host {
    type Err = NameError;
    fn from_str(text: &str) -> Result<Self, NameError> {
        Self::parse(text)
    }
}

impl From<Host> for String {
    fn from(host: Host) -> Self {
        host.0.as_ref().to_owned()
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What a rule calls hosts by.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Pattern {
    /// `x`: this name only.
    Exact(Host),
    /// `*.x`: every name below x, at any depth, not x itself.
    Below(Host),
    /// `.x`: x and every name below it.
    Within(Host),
    /// `*`: any public name.
    AnyPublic,
}

impl Pattern {
    /// Reads `x`, `*.x`, `.x` or `*`. A wildcard may not cover a public suffix of the registries.
    pub fn parse(text: &str) -> Result<Self, NameError> {
        if text == "*" {
            return Ok(Self::AnyPublic);
        }
        let wide = |rest| Host::parse(rest).and_then(narrow_enough);
        let parsed = if let Some(rest) = text.strip_prefix("*.") {
            wide(rest).map(Self::Below)
        } else if let Some(rest) = text.strip_prefix('.') {
            wide(rest).map(Self::Within)
        } else {
            Host::parse(text).map(Self::Exact)
        };
        parsed.map_err(|error| match error {
            NameError::Malformed if text.contains('*') => NameError::Wildcard,
            other => other,
        })
    }

    /// Whether the pattern names this host.
    #[must_use]
    pub fn matches(&self, host: &Host) -> bool {
        match self {
            Self::Exact(name) => host == name,
            Self::Below(zone) => host.is_below(zone),
            Self::Within(zone) => host.is_within(zone),
            Self::AnyPublic => true,
        }
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exact(host) => write!(f, "{host}"),
            Self::Below(zone) => write!(f, "*.{zone}"),
            Self::Within(zone) => write!(f, ".{zone}"),
            Self::AnyPublic => f.write_str("*"),
        }
    }
}

/// An HTTP authority without user information: `host[:port]` (RFC 9110, section 7.2; RFC 3986,
/// section 3.2). IPv6 in brackets only, IPv4 in four plain decimals only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Authority {
    /// Who is asked for.
    pub host: AuthorityHost,
    /// The port, where one is written.
    pub port: Option<u16>,
}

/// The host of an authority.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AuthorityHost {
    /// A name.
    Name(Host),
    /// An address in its one usual spelling.
    Address(IpAddr),
}

impl Authority {
    /// Reads the value of a `Host` header or the authority of a request target. ASCII only.
    pub fn parse(text: &str) -> Result<Self, NameError> {
        if let Some(rest) = text.strip_prefix('[') {
            let (inside, after) = rest.split_once(']').ok_or(NameError::Malformed)?;
            let address: Ipv6Addr = inside.parse().map_err(|_| NameError::Malformed)?;
            let port = match after.strip_prefix(':') {
                Some(digits) => Some(port(digits)?),
                None if after.is_empty() => None,
                None => return Err(NameError::Malformed),
            };
            return Ok(Self { host: AuthorityHost::Address(address.into()), port });
        }
        let (name, port) = match text.split_once(':') {
            Some((name, digits)) if !digits.contains(':') => (name, Some(port(digits)?)),
            Some(_) => return Err(NameError::IpAddress),
            None => (text, None),
        };
        let host = match name.parse::<Ipv4Addr>() {
            Ok(address) => AuthorityHost::Address(address.into()),
            Err(_) => AuthorityHost::Name(Host::from_wire(name.as_bytes())?),
        };
        Ok(Self { host, port })
    }
}

fn is_label(label: &str) -> bool {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'-' | b'_');
    !label.is_empty()
        && !label.starts_with('-')
        && !label.ends_with('-')
        && label.bytes().all(inner)
}

/// Whether a last label makes the whole an IPv4 address (WHATWG URL, "ends in a number"): digits,
/// or `0x` and hexadecimal digits.
fn is_number(label: &str) -> bool {
    match label.strip_prefix("0x") {
        Some(hex) => hex.bytes().all(|b| b.is_ascii_hexdigit()),
        None => label.bytes().all(|b| b.is_ascii_digit()),
    }
}

/// Refuses a bare top-level label and whatever the registries call a public suffix. Suffixes that
/// companies list for their customers (`github.io`) stay allowed: a person may mean all of them.
fn narrow_enough(zone: Host) -> Result<Host, NameError> {
    let suffix = psl::suffix(zone.as_str().as_bytes());
    let public = suffix.is_some_and(|suffix| {
        suffix.typ() == Some(psl::Type::Icann) && suffix.as_bytes() == zone.as_str().as_bytes()
    });
    if public || !zone.as_str().contains('.') { Err(NameError::TooWide) } else { Ok(zone) }
}

fn port(digits: &str) -> Result<u16, NameError> {
    let plain = digits.bytes().all(|b| b.is_ascii_digit()) && digits.len() <= 5;
    match digits.parse() {
        Ok(port) if plain && port != 0 => Ok(port),
        _ => Err(NameError::Port),
    }
}
