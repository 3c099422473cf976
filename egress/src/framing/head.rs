//! The head of a request, line by line as it arrives, in time linear in its length.
//!
//! Keeps what frames the message and nothing else; the bytes stay with the caller.

use crate::framing::{Flaw, Length, field, is_token};

/// Largest head, in bytes.
pub const MAX_HEAD: usize = 64 * 1024;
/// Most fields.
const MAX_FIELDS: usize = 100;
/// Longer than every registered method.
const MAX_METHOD: usize = 32;
/// Most bytes of empty lines before a request line (RFC 9112, section 2.2).
const MAX_BLANK: usize = 16;
/// Digits of a length that fits whatever a server counts in.
const MAX_DIGITS: usize = 18;

/// What a head says of its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// Bytes of empty lines before it.
    pub blank: usize,
    /// Where it ends, counted from the first byte that was read.
    pub end: usize,
    /// How long the body is.
    pub length: Length,
    /// Whether it is of HTTP/1.0, after which we say no more.
    pub last: bool,
    /// Whether it asks for another protocol.
    pub upgrade: bool,
}

/// Reads one head.
#[derive(Clone, Debug)]
pub struct HeadReader {
    /// The most bytes it may have.
    most: usize,
    /// Where the line begins that is not whole yet, and how far it was looked at.
    line: usize,
    seen: usize,
    blank: usize,
    begun: bool,
    fields: usize,
    last: bool,
    upgrade: bool,
    content_length: Option<u64>,
    chunked: bool,
}

impl Default for HeadReader {
    fn default() -> Self {
        Self::bounded(MAX_HEAD)
    }
}

impl HeadReader {
    /// For a head of at most so many bytes, and never more than [`MAX_HEAD`].
    #[must_use]
    pub fn bounded(most: usize) -> Self {
        Self {
            most: most.min(MAX_HEAD),
            line: 0,
            seen: 0,
            blank: 0,
            begun: false,
            fields: 0,
            last: false,
            upgrade: false,
            content_length: None,
            chunked: false,
        }
    }

    /// Looks at everything that has arrived so far, which must begin with what was there before.
    /// None: it is not whole yet.
    pub fn read(&mut self, bytes: &[u8]) -> Result<Option<Head>, Flaw> {
        while let Some(at) = bytes.get(self.seen..).and_then(line_end) {
            let end = self.seen + at;
            if bytes.get(end) == Some(&b'\r') && end + 1 == bytes.len() {
                // Its LF is not there yet.
                self.seen = end;
                return self.whole_so_far(bytes.len());
            }
            if bytes.get(end..end + 2) != Some(b"\r\n") {
                return Err(Flaw::LineEnd);
            }
            let line = bytes.get(self.line..end).unwrap_or_default();
            self.line = end + 2;
            self.seen = self.line;
            if self.line > self.most {
                return Err(Flaw::TooLarge);
            }
            match (line.is_empty(), self.begun) {
                (true, true) => return Ok(Some(self.head())),
                (true, false) => {
                    self.blank = self.line;
                    if self.blank > MAX_BLANK {
                        return Err(Flaw::RequestLine);
                    }
                }
                (false, true) => self.field(line)?,
                (false, false) => {
                    self.request_line(line)?;
                    self.begun = true;
                }
            }
        }
        self.seen = bytes.len();
        self.whole_so_far(bytes.len())
    }

    /// Whether anything but empty lines has arrived.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        self.begun || self.seen > self.line
    }

    fn whole_so_far(&self, length: usize) -> Result<Option<Head>, Flaw> {
        if length > self.most { Err(Flaw::TooLarge) } else { Ok(None) }
    }

    fn head(&self) -> Head {
        let length = match self.chunked {
            true => Length::Chunked,
            false => Length::Known(self.content_length.unwrap_or_default()),
        };
        Head { blank: self.blank, end: self.line, length, last: self.last, upgrade: self.upgrade }
    }

    fn request_line(&mut self, line: &[u8]) -> Result<(), Flaw> {
        let mut words = line.split(|&byte| byte == b' ');
        let (method, target, version) = (words.next(), words.next(), words.next());
        let (Some(method), Some(target), Some(version), None) =
            (method, target, version, words.next())
        else {
            return Err(Flaw::RequestLine);
        };
        if method.is_empty() || !method.iter().copied().all(is_token) {
            return Err(Flaw::RequestLine);
        }
        if method.len() > MAX_METHOD || method.iter().any(u8::is_ascii_lowercase) {
            return Err(Flaw::Method);
        }
        if target.is_empty() || !target.iter().all(|&b| b.is_ascii_graphic() && b != b'#') {
            return Err(Flaw::Target);
        }
        self.last = match version {
            b"HTTP/1.1" => false,
            b"HTTP/1.0" => true,
            _ if version.starts_with(b"HTTP/") => return Err(Flaw::Version),
            _ => return Err(Flaw::RequestLine),
        };
        Ok(())
    }

    fn field(&mut self, line: &[u8]) -> Result<(), Flaw> {
        self.fields += 1;
        if self.fields > MAX_FIELDS {
            return Err(Flaw::TooLarge);
        }
        let (name, value) = field(line)?;
        let is = |field: &str| name.eq_ignore_ascii_case(field.as_bytes());
        if is("content-length") {
            if self.content_length.is_some() {
                return Err(Flaw::ContentLength);
            }
            self.content_length = Some(number(value).ok_or(Flaw::ContentLength)?);
        } else if is("transfer-encoding") {
            if self.chunked || self.last || !value.eq_ignore_ascii_case(b"chunked") {
                return Err(Flaw::TransferEncoding);
            }
            self.chunked = true;
        } else if is("upgrade") {
            self.upgrade = true;
        }
        if self.chunked && self.content_length.is_some() {
            return Err(Flaw::BothLengths);
        }
        Ok(())
    }
}

/// Where the next CR or LF is.
fn line_end(bytes: &[u8]) -> Option<usize> {
    bytes.iter().position(|byte| matches!(byte, b'\r' | b'\n'))
}

/// A plain decimal number without leading zeros.
fn number(digits: &[u8]) -> Option<u64> {
    let plain = (1..=MAX_DIGITS).contains(&digits.len())
        && digits.iter().all(u8::is_ascii_digit)
        && (digits.len() == 1 || digits.first() != Some(&b'0'));
    std::str::from_utf8(digits).ok().filter(|_| plain)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(head: &[u8]) -> Result<Option<Head>, Flaw> {
        HeadReader::default().read(head)
    }

    fn with(field: &str) -> Result<Length, Flaw> {
        let head = format!("POST / HTTP/1.1\r\nHost: a.example\r\n{field}\r\n\r\n");
        read(head.as_bytes()).map(|head| head.expect("whole").length)
    }

    #[test]
    fn a_plain_head_is_read_and_its_end_found() {
        let text = b"\r\nGET /a?b HTTP/1.1\r\nHost: a.example\r\nX:\r\nY: \tb c\x80 \r\n\r\nrest";
        let head = read(text).expect("no flaw").expect("whole");
        assert_eq!((head.blank, head.end, head.length), (2, text.len() - 4, Length::Known(0)));
        assert!(!head.last && !head.upgrade);
        assert_eq!(with("content-LENGTH: 10"), Ok(Length::Known(10)));
        assert_eq!(with("Transfer-Encoding:\tChunked "), Ok(Length::Chunked));
        let old = b"GET / HTTP/1.0\r\nUpgrade: x\r\n\r\n";
        assert!(read(old).is_ok_and(|head| head.is_some_and(|head| head.last && head.upgrade)));
    }

    #[test]
    fn a_length_is_one_plain_number_or_chunked_and_never_both() {
        for value in ["+1", "-1", "0x10", "010", "00", "", "1,1", "1, 1", "1 1", "1e1", "\u{b}1"] {
            let flaw = with(&format!("Content-Length: {value}")).expect_err(value);
            assert!(matches!(flaw, Flaw::ContentLength | Flaw::FieldValue), "{value}: {flaw}");
        }
        assert_eq!(with("Content-Length: 9999999999999999999"), Err(Flaw::ContentLength));
        assert_eq!(with("Content-Length: 5\r\ncontent-length: 5"), Err(Flaw::ContentLength));
        for value in ["identity", "chunked, identity", ",chunked", "chunked,", "gzip, chunked", ""]
        {
            let line = format!("Transfer-Encoding: {value}");
            assert_eq!(with(&line), Err(Flaw::TransferEncoding), "{value}");
        }
        let twice = "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked";
        assert_eq!(with(twice), Err(Flaw::TransferEncoding));
        for both in [
            "Content-Length: 5\r\nTransfer-Encoding: chunked",
            "Transfer-Encoding: chunked\r\nContent-Length: 0",
        ] {
            assert_eq!(with(both), Err(Flaw::BothLengths), "{both}");
        }
        let old = b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n";
        assert_eq!(read(old), Err(Flaw::TransferEncoding));
    }

    #[test]
    fn lines_and_fields_have_one_form() {
        for (field, flaw) in [
            (" folded", Flaw::Fold),
            ("X: 1\r\n\tfolded", Flaw::Fold),
            ("X : 1", Flaw::FieldName),
            (": 1", Flaw::FieldName),
            ("X", Flaw::FieldName),
            ("X\u{e9}: 1", Flaw::FieldName),
            ("X: a\0b", Flaw::FieldValue),
            ("X: a\u{7f}b", Flaw::FieldValue),
            ("X: a\rb", Flaw::LineEnd),
            ("X: a\nY: b", Flaw::LineEnd),
            ("X: a\r\r\nY: b", Flaw::LineEnd),
            ("Content_Length: 5", Flaw::Lookalike),
            ("Transfer.Encoding: chunked", Flaw::Lookalike),
            ("Host_: b.example", Flaw::Lookalike),
        ] {
            assert_eq!(with(field), Err(flaw), "{field:?}");
        }
    }

    #[test]
    fn a_request_line_has_three_words_and_a_version_we_speak() {
        for (line, flaw) in [
            ("GET /", Flaw::RequestLine),
            ("GET  / HTTP/1.1", Flaw::RequestLine),
            ("GET / HTTP/1.1 ", Flaw::RequestLine),
            (" GET / HTTP/1.1", Flaw::RequestLine),
            ("GET\t/ HTTP/1.1", Flaw::RequestLine),
            ("GET / http/1.1", Flaw::RequestLine),
            ("GET / HTTP/1.32", Flaw::Version),
            ("GET / HTTP/2.0", Flaw::Version),
            ("PRI * HTTP/2.0", Flaw::Version),
            ("get / HTTP/1.1", Flaw::Method),
            ("GET /a#b HTTP/1.1", Flaw::Target),
            ("GET /\u{e9} HTTP/1.1", Flaw::Target),
            ("GET /a\0 HTTP/1.1", Flaw::Target),
        ] {
            let head = format!("{line}\r\nHost: a.example\r\n\r\n");
            assert_eq!(read(head.as_bytes()), Err(flaw), "{line}");
        }
        let long = format!("{} / HTTP/1.1\r\n\r\n", "M".repeat(33));
        assert_eq!(read(long.as_bytes()), Err(Flaw::Method));
    }

    #[test]
    fn a_head_is_bounded_in_bytes_and_fields() {
        let many = format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(101));
        assert_eq!(read(many.as_bytes()), Err(Flaw::TooLarge));
        let long = format!("GET / HTTP/1.1\r\na: {}", "b".repeat(MAX_HEAD));
        assert_eq!(read(long.as_bytes()), Err(Flaw::TooLarge));
        assert_eq!(read(&b"\r\n".repeat(9)), Err(Flaw::RequestLine));
        let short = format!("GET / HTTP/1.1\r\na: {}\r\n\r\n", "b".repeat(100));
        let bounded = |most| HeadReader::bounded(most).read(short.as_bytes());
        assert!(matches!(bounded(short.len()), Ok(Some(_))));
        assert_eq!(bounded(short.len() - 1), Err(Flaw::TooLarge));
    }

    #[test]
    fn the_verdict_does_not_depend_on_how_the_bytes_arrive() {
        let text = b"\r\nGET / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 3\r\n\r\nabc";
        let whole = read(text);
        let mut reader = HeadReader::default();
        let pieces = (0..=text.len()).map(|n| reader.read(text.get(..n).expect("in range")));
        let first = pieces.into_iter().find(|verdict| *verdict != Ok(None)).expect("a verdict");
        assert_eq!(first, whole);
    }
}
