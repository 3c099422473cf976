//! TLS records in, one handshake message out (RFC 8446, sections 4 and 5.1).
//!
//! Each byte is looked at once, however it arrived. Checks are made in the order of the bytes they
//! are about, so that the answer cannot depend on segmentation.

use crate::sniff::Flaw;

/// The most bytes, record headers included, that a ClientHello may take.
pub const MAX_FLIGHT: usize = 64 * 1024;

/// The most records that a ClientHello may be spread over.
pub const MAX_RECORDS: u16 = 4096;

const CHANGE_CIPHER_SPEC: u8 = 20;
const ALERT: u8 = 21;
const HANDSHAKE: u8 = 22;
const CLIENT_HELLO: u8 = 1;
const MAX_FRAGMENT: usize = 1 << 14;

/// Whether this begins like a record of TLS in everything but its version, which some servers (those
/// of Java and Go) do not look at in the first one. None: too short to tell.
pub(super) fn is_misversioned(flight: &[u8]) -> Option<bool> {
    let &[kind, _, _, high, low, first] = flight.first_chunk()?;
    let length = u16::from_be_bytes([high, low]);
    Some(match kind {
        HANDSHAKE => length > 0 && first == CLIENT_HELLO,
        // A warning or a fatal one (RFC 8446, section 6); a server may go on after the former.
        ALERT => length == 2 && matches!(first, 1 | 2),
        CHANGE_CIPHER_SPEC => length == 1 && first == 1,
        _ => false,
    })
}

/// The reassembly so far.
#[derive(Debug)]
pub(super) struct Records {
    /// The most bytes it may all take.
    most: usize,
    /// How much of the flight has been read.
    at: usize,
    /// What the record being read still owes.
    owed: usize,
    records: u16,
    message: Vec<u8>,
}

impl Records {
    /// None yet, of at most so many bytes.
    pub(super) fn bounded(most: usize) -> Self {
        Self { most: most.min(MAX_FLIGHT), at: 0, owed: 0, records: 0, message: Vec::new() }
    }

    /// Reads on in `flight`, which begins with all that was passed before, and returns the body of
    /// the ClientHello once it is whole.
    pub(super) fn advance(&mut self, flight: &[u8]) -> Result<Option<&[u8]>, Flaw> {
        loop {
            if self.owed == 0 {
                let Some(header) = flight.get(self.at..).and_then(<[u8]>::first_chunk) else {
                    return Ok(None);
                };
                self.open(*header)?;
            }
            let rest = flight.get(self.at..).unwrap_or_default();
            let fragment = rest.get(..self.owed).unwrap_or(rest);
            if fragment.is_empty() {
                return Ok(None);
            }
            self.message.extend_from_slice(fragment);
            self.at += fragment.len();
            self.owed -= fragment.len();
            if self.is_whole()? {
                return Ok(self.message.get(4..));
            }
        }
    }

    fn open(&mut self, header: [u8; 5]) -> Result<(), Flaw> {
        let [kind, major, minor, high, low] = header;
        if kind != HANDSHAKE {
            return Err(Flaw::RecordType);
        }
        if major != 3 || minor > 4 {
            return Err(Flaw::RecordVersion);
        }
        let length = usize::from(u16::from_be_bytes([high, low]));
        if length == 0 || length > MAX_FRAGMENT {
            return Err(Flaw::RecordLength);
        }
        if self.records == MAX_RECORDS {
            return Err(Flaw::TooManyRecords);
        }
        self.records += 1;
        self.at += header.len();
        self.owed = length;
        if self.at + self.owed > self.most { Err(Flaw::TooLong) } else { Ok(()) }
    }

    /// Whether the message is there: it must end where its last record ends.
    fn is_whole(&self) -> Result<bool, Flaw> {
        if self.message.first().is_some_and(|&kind| kind != CLIENT_HELLO) {
            return Err(Flaw::NotClientHello);
        }
        let Some(&[_, a, b, c]) = self.message.first_chunk() else { return Ok(false) };
        let whole = 4 + usize::from(a) * 0x1_0000 + usize::from(u16::from_be_bytes([b, c]));
        if whole > self.most {
            return Err(Flaw::TooLong);
        }
        if self.message.len() + self.owed > whole {
            return Err(Flaw::Malformed);
        }
        Ok(self.message.len() == whole)
    }
}
