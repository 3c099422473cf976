//! The body of a request as it arrives: how many bytes of what came are still of it.
//!
//! Holds no more than one line of a trailer; the bytes pass by.

use crate::framing::{Flaw, Length, field, is_lookalike};

/// Longest line of a chunk's size or of a trailer, in bytes.
pub const MAX_LINE: usize = 4096;
/// Most bytes of a trailer section.
const MAX_TRAILERS: usize = 16 * 1024;
/// Digits of a chunk's size.
const MAX_HEX: usize = 15;

/// A body that is not over.
#[derive(Clone, Debug)]
pub struct Body(State);

#[derive(Clone, Debug)]
enum State {
    /// This much is to come, and then it is over.
    Known(u64),
    /// In the line of a chunk's size: what it says so far, its digits, and the bytes of the line.
    Size {
        size: u64,
        digits: usize,
        line: usize,
        extension: bool,
        cr: bool,
    },
    /// In a chunk, or in the CR LF that ends it, which is counted.
    Data(u64),
    Cr,
    Lf,
    /// In a trailer section: the line so far, the bytes of all lines, and whether the CR is there.
    Trailer {
        line: Vec<u8>,
        total: usize,
        cr: bool,
    },
    Over,
}

const SIZE: State = State::Size { size: 0, digits: 0, line: 0, extension: false, cr: false };

impl Body {
    /// None for an empty one.
    #[must_use]
    pub fn new(length: Length) -> Option<Self> {
        match length {
            Length::Known(0) => None,
            Length::Known(length) => Some(Self(State::Known(length))),
            Length::Chunked => Some(Self(SIZE)),
        }
    }

    /// Whether all of it has been read.
    #[must_use]
    pub fn is_over(&self) -> bool {
        matches!(self.0, State::Over)
    }

    /// Takes the next bytes and says how many of them are the body's: all, unless it is over.
    pub fn read(&mut self, bytes: &[u8]) -> Result<usize, Flaw> {
        let mut at = 0;
        while let Some(&byte) = bytes.get(at).filter(|_| !self.is_over()) {
            match &mut self.0 {
                State::Known(left) | State::Data(left) => {
                    let rest = bytes.len() - at;
                    let taken = usize::try_from(*left).unwrap_or(usize::MAX).min(rest);
                    *left -= taken as u64;
                    at += taken;
                    if *left == 0 {
                        self.0 = match self.0 {
                            State::Data(_) => State::Cr,
                            _ => State::Over,
                        };
                    }
                    continue;
                }
                _ => self.0 = std::mem::replace(&mut self.0, State::Over).step(byte)?,
            }
            at += 1;
        }
        Ok(at)
    }
}

impl State {
    /// The state after one byte of chunked framing.
    fn step(self, byte: u8) -> Result<Self, Flaw> {
        match (self, byte) {
            (Self::Size { size: 0, cr: true, .. }, b'\n') => {
                Ok(Self::Trailer { line: Vec::new(), total: 0, cr: false })
            }
            (Self::Size { size, cr: true, .. }, b'\n') => Ok(Self::Data(size)),
            (Self::Size { size, digits: digits @ 1.., line, extension, cr: false }, b'\r') => {
                Ok(Self::Size { size, digits, line, extension, cr: true })
            }
            (Self::Size { size, digits, line, extension: false, cr: false }, byte)
                if byte.is_ascii_hexdigit() && digits < MAX_HEX =>
            {
                let digit = char::from(byte).to_digit(16).unwrap_or_default();
                let size = size * 16 + u64::from(digit);
                Ok(Self::Size {
                    size,
                    digits: digits + 1,
                    line: line + 1,
                    extension: false,
                    cr: false,
                })
            }
            (Self::Size { size, digits: digits @ 1.., line, extension, cr: false }, byte)
                if line < MAX_LINE
                    && (byte == b';' || extension)
                    && (byte == b'\t' || (byte >= b' ' && byte != 0x7f)) =>
            {
                Ok(Self::Size { size, digits, line: line + 1, extension: true, cr: false })
            }
            (Self::Cr, b'\r') => Ok(Self::Lf),
            (Self::Lf, b'\n') => Ok(SIZE),
            (Self::Trailer { line, total, cr: false }, b'\r') => {
                Ok(Self::Trailer { line, total, cr: true })
            }
            (Self::Trailer { line, total, cr: true }, b'\n') => {
                if line.is_empty() {
                    return Ok(Self::Over);
                }
                let (name, _) = field(&line)?;
                if is_framing(name) {
                    return Err(Flaw::Lookalike);
                }
                Ok(Self::Trailer { line: Vec::new(), total, cr: false })
            }
            (Self::Trailer { mut line, total, cr: false }, byte)
                if byte != b'\n' && line.len() < MAX_LINE && total < MAX_TRAILERS =>
            {
                line.push(byte);
                Ok(Self::Trailer { line, total: total + 1, cr: false })
            }
            _ => Err(Flaw::Chunk),
        }
    }
}

/// A field that a trailer must not have (RFC 9110, section 6.5.1); near ones are flaws already.
fn is_framing(name: &[u8]) -> bool {
    // One more byte makes it a lookalike of itself.
    is_lookalike(&[name, b"-"].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many bytes are the body's, and whether it is over.
    fn read(length: Length, bytes: &[u8]) -> Result<(usize, bool), Flaw> {
        let mut body = Body::new(length).expect("a body");
        let used = body.read(bytes)?;
        Ok((used, body.is_over()))
    }

    #[test]
    fn a_known_length_is_that_long() {
        assert!(Body::new(Length::Known(0)).is_none());
        assert_eq!(read(Length::Known(3), b"ab"), Ok((2, false)));
        assert_eq!(read(Length::Known(3), b"abcGET"), Ok((3, true)));
    }

    #[test]
    fn chunks_extensions_and_trailers_are_followed_to_their_end() {
        for body in [
            &b"0\r\n\r\n"[..],
            b"3\r\nabc\r\n0\r\n\r\n",
            b"00A\r\n0123456789\r\n0;a=\"b c\"\r\n\r\n",
            b"3;x\r\n\r\n\n\r\n000\r\nx-sum: 1\r\ny:\r\n\r\n",
        ] {
            let more = [body, b"GET / HTTP/1.1\r\n"].concat();
            assert_eq!(read(Length::Chunked, &more), Ok((body.len(), true)), "{body:?}");
            let mut one = Body::new(Length::Chunked).expect("a body");
            for byte in body {
                assert!(!one.is_over());
                assert_eq!(one.read(&[*byte]), Ok(1));
            }
            assert!(one.is_over());
        }
    }

    #[test]
    fn what_is_no_chunk_is_a_flaw() {
        let long = format!("1;{}\r\n", "x".repeat(MAX_LINE));
        let trailers = format!("0\r\n{}\r\n", "a: b\r\n".repeat(9000));
        for bad in [
            "\r\n",
            ";x\r\n",
            " 1\r\n",
            "1 \r\n",
            "+1\r\n",
            "0x1\r\n",
            "g\r\n",
            "1\n",
            "1\r1",
            "1\r\nab\r\n",
            "1\r\na\n",
            "1\r\na\r1",
            "1;a\nb\r\n",
            "1;a\rb",
            "1;\0\r\n",
            "-1\r\n",
            "1000000000000000\r\n",
            "0\r\nx\r\n",
            "0\r\n x: 1\r\n",
            "0\r\nx : 1\r\n",
            "0\r\n\n",
            "0\r\nHost: a\r\n",
            "0\r\nContent-Length: 1\r\n",
            "0\r\nTransfer_Encoding: a\r\n",
            &long,
            &trailers,
        ] {
            assert!(read(Length::Chunked, bad.as_bytes()).is_err(), "{bad:?}");
        }
    }
}
