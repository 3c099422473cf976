//! The first bytes of a guest's connection: which protocol they open and under which name.
//!
//! Pure: bytes in, a value out; no socket, no clock. The verdict depends on the bytes alone, never on
//! how they were cut into segments or records, and comes at the first byte that settles it. Nothing
//! here falls back: what starts like TLS and is not a well-formed ClientHello is `Undecidable`.

mod hello;
mod record;
mod text;
mod wire;

use bytes::{Bytes, BytesMut};

pub use crate::sniff::hello::{ClientHello, Ech, Sni};
pub use crate::sniff::record::{MAX_FLIGHT, MAX_RECORDS};

/// What the bytes so far are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sniffed {
    /// Nothing that settles it yet. The caller owns the deadline.
    NeedMore,
    /// A whole ClientHello.
    Tls(ClientHello),
    /// An HTTP/1 request line has begun (RFC 9112, section 3).
    Http,
    /// The HTTP/2 connection preface, with prior knowledge (RFC 9113, section 3.4).
    Http2,
    /// Neither TLS nor HTTP; SSH, for example.
    Other,
    /// Meant as TLS, and not to be read: close.
    Undecidable(Flaw),
}

/// Why a first flight cannot be judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Flaw {
    /// An SSLv2 record around the hello.
    #[error("an SSLv2 hello")]
    Sslv2,
    /// A record that is not a handshake record before the hello is whole.
    #[error("a TLS record of another type than handshake")]
    RecordType,
    /// A record version that no client sends.
    #[error("an unknown TLS record version")]
    RecordVersion,
    /// An empty record, or one of more than 2^14 bytes.
    #[error("a TLS record of an impossible length")]
    RecordLength,
    /// More records than [`MAX_RECORDS`].
    #[error("a ClientHello in too many records")]
    TooManyRecords,
    /// More bytes than [`MAX_FLIGHT`], or than this connection may have.
    #[error("a ClientHello that is too long")]
    TooLong,
    /// The first handshake message is another one.
    #[error("a handshake that does not begin with a ClientHello")]
    NotClientHello,
    /// A length inside the hello disagrees with what is there, or a field has a value it cannot have.
    #[error("a malformed ClientHello")]
    Malformed,
    /// No version from TLS 1.2 on is offered.
    #[error("only TLS versions before 1.2 offered")]
    Version,
    /// One extension twice (RFC 8446, section 4.2).
    #[error("a ClientHello with one extension twice")]
    DuplicateExtension,
    /// More extensions or protocols than any client sends.
    #[error("a ClientHello with too many extensions or protocols")]
    TooMany,
    /// A server name list of other than exactly one host name (RFC 6066, section 3).
    #[error("a server name list without exactly one host name")]
    NameList,
}

/// Reads a first flight as it arrives, in time linear in its length, and keeps it to be forwarded.
#[derive(Debug)]
pub struct Sniffer {
    flight: BytesMut,
    records: record::Records,
    line: text::Line,
    verdict: Sniffed,
}

impl Sniffer {
    /// Nothing read yet.
    #[must_use]
    pub fn new() -> Self {
        Self::bounded(MAX_FLIGHT)
    }

    /// The same, for a ClientHello of at most so many bytes, and never more than [`MAX_FLIGHT`].
    #[must_use]
    pub fn bounded(most: usize) -> Self {
        Self {
            flight: BytesMut::new(),
            records: record::Records::bounded(most),
            line: text::Line::default(),
            verdict: Sniffed::NeedMore,
        }
    }

    /// Takes the next segment. Once a verdict is out, later segments are kept and do not change it.
    pub fn feed(&mut self, segment: &[u8]) -> Sniffed {
        self.flight.extend_from_slice(segment);
        if self.verdict == Sniffed::NeedMore {
            self.verdict = self.look();
        }
        self.verdict.clone()
    }

    /// Every byte fed so far.
    #[must_use]
    pub fn into_flight(self) -> Bytes {
        self.flight.freeze()
    }

    fn look(&mut self) -> Sniffed {
        match *self.flight {
            [] | [0x14..=0x18] => Sniffed::NeedMore,
            [0x14..=0x18, 0x03, ..] => match self.records.advance(&self.flight) {
                Ok(None) => Sniffed::NeedMore,
                Ok(Some(message)) => match hello::parse(message) {
                    Ok(hello) => Sniffed::Tls(hello),
                    Err(flaw) => Sniffed::Undecidable(flaw),
                },
                Err(flaw) => Sniffed::Undecidable(flaw),
            },
            [0x14..=0x16, ..] => match record::is_misversioned(&self.flight) {
                None => Sniffed::NeedMore,
                Some(true) => Sniffed::Undecidable(Flaw::RecordVersion),
                Some(false) => Sniffed::Other,
            },
            // A two-byte SSLv2 header, CLIENT-HELLO, then the version (RFC 5246, appendix E.2).
            [0x80..=0xff, _, 0x01, 0x03, ..] | [0x80..=0xff, _, 0x01, 0x00, 0x02, ..] => {
                Sniffed::Undecidable(Flaw::Sslv2)
            }
            [0x80..=0xff]
            | [0x80..=0xff, _]
            | [0x80..=0xff, _, 0x01]
            | [0x80..=0xff, _, 0x01, 0x00] => Sniffed::NeedMore,
            _ => self.line.look(&self.flight),
        }
    }
}

impl Default for Sniffer {
    fn default() -> Self {
        Self::new()
    }
}

/// The verdict on bytes that are all there at once.
#[must_use]
pub fn sniff(flight: &[u8]) -> Sniffed {
    Sniffer::new().feed(flight)
}

/// The fatal alert `access_denied` in a record of its own, as a client without keys reads it
/// (RFC 8446, section 6).
#[must_use]
pub const fn alert_access_denied() -> [u8; 7] {
    [0x15, 0x03, 0x03, 0x00, 0x02, 0x02, 49]
}
