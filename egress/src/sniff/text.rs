//! HTTP in clear, or something that is neither HTTP nor TLS.
//!
//! Only says whether a request line has begun; reading the request is hyper's business. What lenient
//! servers take for a request (an empty line first, a method in lower case) is HTTP here too, so that
//! it is judged request by request.

use crate::sniff::Sniffed;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

const SCHEME: &[u8] = b"http";

/// Longer than every registered method.
const MAX_METHOD: usize = 32;
/// How much of an empty start is skipped; what has more is HTTP, which skips it, or nothing.
const MAX_BLANK: usize = 16;

/// Looks at what does not begin like TLS. Reads a bounded prefix only.
pub(super) fn look(flight: &[u8]) -> Sniffed {
    if flight.starts_with(PREFACE) {
        return Sniffed::Http2;
    }
    if PREFACE.starts_with(flight) {
        return Sniffed::NeedMore;
    }
    let blank = flight.iter().take_while(|byte| matches!(byte, b'\r' | b'\n'));
    let blank = blank.take(MAX_BLANK).count();
    if blank == MAX_BLANK {
        return Sniffed::Http;
    }
    let line = flight.get(blank..).unwrap_or_default();
    if line.is_empty() {
        return Sniffed::NeedMore;
    }
    let length = line.iter().take(MAX_METHOD + 1).take_while(|&&byte| is_token(byte)).count();
    let (method, rest) = line.split_at(length);
    if length > MAX_METHOD || method.first().is_some_and(|first| !first.is_ascii_alphabetic()) {
        return Sniffed::Other;
    }
    match *rest {
        _ if length == 0 => Sniffed::Other,
        [] | [b' '] => Sniffed::NeedMore,
        [b' ', ..] if method.eq_ignore_ascii_case(b"CONNECT") => Sniffed::Http,
        [b' ', b'/' | b'*', ..] => Sniffed::Http,
        [b' ', ref target @ ..] => absolute(target),
        _ => Sniffed::Other,
    }
}

/// Whether this is an absolute-form target (RFC 9112, section 3.2.2) of `http` or `https`.
fn absolute(target: &[u8]) -> Sniffed {
    let scheme = target.get(..SCHEME.len()).unwrap_or(target);
    match SCHEME.get(..scheme.len()).is_some_and(|start| start.eq_ignore_ascii_case(scheme)) {
        true if scheme.len() == SCHEME.len() => Sniffed::Http,
        true => Sniffed::NeedMore,
        false => Sniffed::Other,
    }
}

/// `tchar` of RFC 9110, section 5.6.2.
fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}
