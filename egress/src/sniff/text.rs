//! HTTP in clear, or something that is neither HTTP nor TLS.
//!
//! Only says whether a request line has begun or stands there; reading the request is hyper's business.
//! What lenient servers take for a request (white space first, two spaces, a method in lower case, a
//! target of any form) is HTTP here too, so that no request passes unread as bytes of something else.

use crate::sniff::Sniffed;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

const VERSION: &[u8] = b"HTTP/";

/// The byte-order mark of UTF-8, which some read over and others take for part of the first word.
const MARK: &[u8] = b"\xef\xbb\xbf";

/// How much of an empty start is skipped; what has more is HTTP, which skips it, or nothing.
const MAX_BLANK: usize = 16;
/// Where a request line that begins like most of them has shown it, longest method included.
const MAX_START: usize = 64;
/// How much of a line that begins as no request should is counted in words.
const MAX_PROSE: usize = 512;
/// Longer than the first line of any protocol of lines; what has no end by then is HTTP, or nothing.
const MAX_LINE: usize = 8192;

/// A first line as it arrives; each byte of it is looked at once.
#[derive(Debug, Default)]
pub(super) struct Line {
    /// How much of it has neither ended it nor made it something else.
    seen: usize,
    /// Whether there was a space in it.
    parted: bool,
}

impl Line {
    /// Looks at what does not begin like TLS, which begins with all that was there before.
    pub(super) fn look(&mut self, flight: &[u8]) -> Sniffed {
        if flight.starts_with(PREFACE) {
            return Sniffed::Http2;
        }
        if PREFACE.starts_with(flight) {
            return Sniffed::NeedMore;
        }
        let blank =
            flight.iter().take_while(|byte| b"\r\n\t ".contains(byte) || is_odd_space(**byte));
        let blank = blank.take(MAX_BLANK).count();
        let (blanks, line) = flight.split_at(blank);
        match line.first() {
            _ if blank == MAX_BLANK || begins_request(line) => Sniffed::Http,
            None => Sniffed::NeedMore,
            Some(_) if blanks.iter().any(|byte| is_odd_space(*byte)) => self.end(line),
            Some(_) if line.len() < MARK.len() && MARK.starts_with(line) => Sniffed::NeedMore,
            Some(first) if first.is_ascii_control() => Sniffed::Other,
            Some(first) if !is_token(*first) && is_prose(line) => Sniffed::Other,
            Some(_) => self.end(line),
        }
    }

    /// Looks for the end of a line of text: with a version there, some server takes it for a request.
    /// Behind a letter servers were seen to take all but NUL, and behind a first word that too.
    fn end(&mut self, line: &[u8]) -> Sniffed {
        let line = line.get(..MAX_LINE).unwrap_or(line);
        let word = line.strip_prefix(MARK).unwrap_or(line);
        let worded = word.first().is_some_and(u8::is_ascii_alphabetic);
        for &byte in line.get(self.seen..).unwrap_or_default() {
            match byte {
                b'\n' if says_version(line.get(..self.seen).unwrap_or_default()) => {
                    return Sniffed::Http;
                }
                b'\n' => return Sniffed::Other,
                b' ' | b'\t' => self.parted = true,
                0 if worded && self.parted => {}
                1.. if worded || is_text(byte) => {}
                _ => return Sniffed::Other,
            }
            self.seen += 1;
        }
        if line.len() == MAX_LINE { Sniffed::Http } else { Sniffed::NeedMore }
    }
}

/// Whether this begins as requests do, whatever comes behind: a word, white space, and a path, `*` or
/// an address of the web (RFC 9112, section 3.2).
fn begins_request(line: &[u8]) -> bool {
    let line = line.get(..MAX_START).unwrap_or(line);
    let length = line.iter().take_while(|&&byte| is_token(byte)).count();
    let (method, rest) = line.split_at(length);
    let spaces = rest.iter().take_while(|byte| b" \t\r".contains(byte) || is_odd_space(**byte));
    let (spaces, target) = rest.split_at(spaces.count());
    // A carriage return may be the end of the line.
    let ends = spaces.ends_with(b"\r") && matches!(target, [] | [b'\n', ..]);
    method.first().is_some_and(u8::is_ascii_alphabetic)
        && !spaces.is_empty()
        && !ends
        && (method.eq_ignore_ascii_case(b"CONNECT")
            || matches!(target, [b'/' | b'*', ..])
            || target.get(..4).is_some_and(|scheme| scheme.eq_ignore_ascii_case(b"http")))
}

/// Whether this has more words than a request line, however its words are parted: some servers part them by
/// one space, others by any white space. Whatever begins with no token is a request to few, and is
/// mostly a document (`<?xml ..`, `{ ..`) whose sender may end no line before it is answered.
fn is_prose(line: &[u8]) -> bool {
    let line = line.get(..MAX_PROSE).unwrap_or(line);
    // What comes behind the line may not have arrived, and says nothing of it.
    let line = line.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let third_is_other = |parts: fn(&u8) -> bool| {
        let mut words = line.split(parts).filter(|word| !word.is_empty());
        let begins =
            |word: &[u8]| word.iter().zip(VERSION).all(|(byte, of)| byte.eq_ignore_ascii_case(of));
        words.nth(2).is_some_and(|word| !begins(word))
    };
    third_is_other(|byte| *byte == b' ')
        && third_is_other(|byte| b" \t\r".contains(byte) || is_odd_space(*byte))
}

/// White space of other alphabets, by which Python's `str.split` parts what it read as Latin-1, in front of
/// a request and in it.
fn is_odd_space(byte: u8) -> bool {
    matches!(byte, 0x0b | 0x0c | 0x1c..=0x1f | 0x85 | 0xa0)
}

fn says_version(line: &[u8]) -> bool {
    line.windows(VERSION.len()).any(|word| word.eq_ignore_ascii_case(VERSION))
}

/// What a line of text may hold, and the white space that servers were seen to part words by.
fn is_text(byte: u8) -> bool {
    matches!(byte, b'\t' | 0x0b | 0x0c | b'\r') || !byte.is_ascii_control()
}

/// `tchar` of RFC 9110, section 5.6.2.
fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}
