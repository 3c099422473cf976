//! The ClientHello (RFC 8446, section 4.1.2): its server name, and what else a decision needs.
//!
//! Stricter than a server has to be: a hello that two readers could read in two ways is refused.
//! Values that are not known (GREASE, RFC 8701) are stepped over, lengths that lie never are.

use policy::{Code, Host};

use crate::sniff::Flaw;
use crate::sniff::wire::Reader;

const SERVER_NAME: u16 = 0;
const ALPN: u16 = 16;
const SUPPORTED_VERSIONS: u16 = 43;
const ENCRYPTED_CLIENT_HELLO: u16 = 0xfe0d;

const TLS12: u16 = 0x0303;
const TLS13: u16 = 0x0304;

/// Clients send about twenty.
const MAX_EXTENSIONS: usize = 128;
/// Clients send two or three.
const MAX_PROTOCOLS: usize = 16;

/// What a ClientHello says about the connection it opens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientHello {
    /// The server name; with ECH, the outer one.
    pub sni: Sni,
    /// The `encrypted_client_hello` extension (RFC 9849). Whether it is GREASE cannot be told.
    pub ech: Option<Ech>,
    /// The protocols offered by ALPN (RFC 7301), in order; at most 16, of 1 to 255 bytes each.
    pub alpn: Vec<Box<[u8]>>,
    /// Whether TLS 1.3 is offered. TLS 1.2 is the least that is let through.
    pub tls13: bool,
}

/// The `server_name` extension (RFC 6066, section 3).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sni {
    /// The extension is not there.
    Absent,
    /// One host name.
    Host(Host),
    /// An IP address in some spelling, which names nothing.
    Address,
    /// Not a host name: a byte that none has, a U-label, a wrong length.
    Bad,
}

/// Which kind of `encrypted_client_hello` it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ech {
    /// An outer hello with a sealed inner one, or GREASE.
    Outer,
    /// The mark of an inner hello, which a client never sends in the open.
    Inner,
}

impl Sni {
    /// The name to judge, or the reason why there is none.
    pub fn host(&self) -> Result<&Host, Code> {
        match self {
            Self::Host(host) => Ok(host),
            Self::Absent | Self::Address => Err(Code::NoName),
            Self::Bad => Err(Code::BadName),
        }
    }
}

/// Reads the body of a ClientHello.
pub(super) fn parse(body: &[u8]) -> Result<ClientHello, Flaw> {
    let mut hello = Reader::new(body);
    let legacy_version = hello.u16()?;
    let _random = hello.take(32)?;
    let session = hello.short()?;
    let suites = hello.long()?;
    let compression = hello.short()?;
    if session.len() > 32 || suites.is_empty() || suites.len() % 2 != 0 || compression.is_empty() {
        return Err(Flaw::Malformed);
    }
    // TLS 1.3 freezes this field at 1.2; anything else is an older protocol or a trick.
    if legacy_version != TLS12 {
        return Err(Flaw::Version);
    }
    let mut read = ClientHello { sni: Sni::Absent, ech: None, alpn: Vec::new(), tls13: false };
    if hello.is_empty() {
        return Ok(read);
    }
    let mut extensions = Reader::new(hello.long()?);
    hello.end()?;

    let mut seen = Vec::with_capacity(32);
    while !extensions.is_empty() {
        let kind = extensions.u16()?;
        let data = Reader::new(extensions.long()?);
        if seen.contains(&kind) {
            return Err(Flaw::DuplicateExtension);
        }
        if seen.len() == MAX_EXTENSIONS {
            return Err(Flaw::TooMany);
        }
        seen.push(kind);
        match kind {
            SERVER_NAME => read.sni = server_name(data)?,
            ALPN => read.alpn = protocols(data)?,
            SUPPORTED_VERSIONS => read.tls13 = offers_tls13(data)?,
            ENCRYPTED_CLIENT_HELLO => read.ech = Some(encrypted(data)?),
            _ => {}
        }
    }
    Ok(read)
}

/// A list of exactly one entry, of type host_name.
fn server_name(mut data: Reader<'_>) -> Result<Sni, Flaw> {
    let mut list = Reader::new(data.long()?);
    data.end()?;
    if list.is_empty() {
        return Err(Flaw::NameList);
    }
    let kind = list.u8()?;
    let name = list.long()?;
    if kind != 0 || !list.is_empty() {
        return Err(Flaw::NameList);
    }
    Ok(host(name))
}

/// Only A-labels are sent (RFC 6066, section 3), so a byte outside ASCII names nothing.
fn host(name: &[u8]) -> Sni {
    let Some(text) = std::str::from_utf8(name).ok().filter(|text| text.is_ascii()) else {
        return Sni::Bad;
    };
    match Host::parse(text) {
        Ok(host) => Sni::Host(host),
        Err(policy::name::NameError::IpAddress) => Sni::Address,
        Err(_) => Sni::Bad,
    }
}

fn protocols(mut data: Reader<'_>) -> Result<Vec<Box<[u8]>>, Flaw> {
    let mut list = Reader::new(data.long()?);
    data.end()?;
    if list.is_empty() {
        return Err(Flaw::Malformed);
    }
    let mut protocols = Vec::new();
    while !list.is_empty() {
        let protocol = list.short()?;
        if protocol.is_empty() {
            return Err(Flaw::Malformed);
        }
        if protocols.len() == MAX_PROTOCOLS {
            return Err(Flaw::TooMany);
        }
        protocols.push(protocol.into());
    }
    Ok(protocols)
}

/// Whether 1.3 is in `supported_versions`; an offer without 1.3 and 1.2 is refused.
fn offers_tls13(mut data: Reader<'_>) -> Result<bool, Flaw> {
    let mut list = Reader::new(data.short()?);
    data.end()?;
    if list.is_empty() {
        return Err(Flaw::Malformed);
    }
    let (mut tls12, mut tls13) = (false, false);
    while !list.is_empty() {
        match list.u16()? {
            TLS12 => tls12 = true,
            TLS13 => tls13 = true,
            _ => {}
        }
    }
    if tls12 || tls13 { Ok(tls13) } else { Err(Flaw::Version) }
}

/// `ECHClientHello` (RFC 9849, section 5).
fn encrypted(mut data: Reader<'_>) -> Result<Ech, Flaw> {
    let kind = match data.u8()? {
        0 => {
            let _suite = data.take(4)?;
            let _config = data.u8()?;
            let _encapsulated_key = data.long()?;
            if data.long()?.is_empty() {
                return Err(Flaw::Malformed);
            }
            Ech::Outer
        }
        1 => Ech::Inner,
        _ => return Err(Flaw::Malformed),
    };
    data.end()?;
    Ok(kind)
}
