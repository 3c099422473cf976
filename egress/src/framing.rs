//! The requests of a connection as raw bytes: where each begins and ends, by a grammar that leaves
//! nothing to taste (RFC 9112), read before and beside the library that serves them.
//!
//! Pure. What two servers could frame in two ways is a [`Flaw`], also where the standard lets a
//! server choose. Must never accept what hyper frames otherwise; `http::screen` compares the two.

mod body;
mod head;

use std::fmt;

pub use crate::framing::body::{Body, MAX_LINE};
pub use crate::framing::head::{Head, HeadReader, MAX_HEAD};

/// How long the body of a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Length {
    /// `content-length`, in bytes; 0 without it.
    Known(u64),
    /// `transfer-encoding: chunked`.
    Chunked,
}

/// What makes a request unfit to be passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Flaw {
    /// The request line is not a method, a target and a version with one space between
    /// (RFC 9112, section 3); an HTTP/0.9 request is one such.
    RequestLine,
    /// A method in lower case, which some servers raise and others do not, or of over 32 bytes.
    Method,
    /// A target with a fragment, a space, a control or a byte that is not ASCII.
    Target,
    /// Neither HTTP/1.1 nor HTTP/1.0.
    Version,
    /// A line that ends otherwise than with CR LF, or a CR elsewhere.
    LineEnd,
    /// A line of the head that begins with white space (RFC 9112, section 5.2).
    Fold,
    /// A field name that is no token, or white space before its colon (RFC 9112, section 5.1).
    FieldName,
    /// A control byte in a field value (RFC 9110, section 5.5).
    FieldValue,
    /// A name that a server may take for `content-length`, `transfer-encoding` or `host`.
    Lookalike,
    /// A `content-length` that is not one plain decimal number, or there is more than one.
    ContentLength,
    /// Anything but `chunked`, once, and in HTTP/1.1.
    TransferEncoding,
    /// Both of them (RFC 9112, section 6.1).
    BothLengths,
    /// A head of more than [`MAX_HEAD`] bytes or 100 fields.
    TooLarge,
    /// The guest was done in the middle of a head.
    Incomplete,
    /// A chunk size, extension or end that is not one (RFC 9112, section 7.1).
    Chunk,
}

impl Flaw {
    /// What is wrong, for the audit.
    #[must_use]
    pub const fn text(self) -> &'static str {
        match self {
            Self::RequestLine => "a malformed request line",
            Self::Method => "a method that is not in upper case, or too long",
            Self::Target => "a target with a byte that it cannot have",
            Self::Version => "another version than HTTP/1.1 and HTTP/1.0",
            Self::LineEnd => "a line that does not end with CR LF",
            Self::Fold => "a folded line",
            Self::FieldName => "a malformed field name",
            Self::FieldValue => "a control byte in a field value",
            Self::Lookalike => "a field name that looks like one of framing",
            Self::ContentLength => "a content-length that is not one plain number",
            Self::TransferEncoding => "a transfer-encoding that is not chunked, once, in HTTP/1.1",
            Self::BothLengths => "a content-length beside a transfer-encoding",
            Self::TooLarge => "a head that is too large",
            Self::Incomplete => "a head that ends too early",
            Self::Chunk => "a malformed chunk",
        }
    }
}

impl fmt::Display for Flaw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

impl std::error::Error for Flaw {}

/// The form of a field name in which names that some server confuses are equal: letters and digits
/// alone, in lower case. True if that is one of framing, and the name is not exactly that field.
fn is_lookalike(name: &[u8]) -> bool {
    const EXACT: [&[u8]; 3] = [b"content-length", b"transfer-encoding", b"host"];
    let bare = |name: &[u8]| -> Vec<u8> {
        let kept = name.iter().filter(|byte| byte.is_ascii_alphanumeric());
        kept.map(u8::to_ascii_lowercase).collect()
    };
    let seen = bare(name);
    EXACT.iter().any(|exact| !name.eq_ignore_ascii_case(exact) && bare(exact) == seen)
}

/// Reads a field line without its end: name and value, the value without white space around it.
fn field(line: &[u8]) -> Result<(&[u8], &[u8]), Flaw> {
    if line.first().is_some_and(|byte| matches!(byte, b' ' | b'\t')) {
        return Err(Flaw::Fold);
    }
    let colon = line.iter().position(|&byte| byte == b':').ok_or(Flaw::FieldName)?;
    let (name, rest) = line.split_at(colon);
    let value = rest.get(1..).unwrap_or_default();
    if name.is_empty() || !name.iter().copied().all(is_token) {
        return Err(Flaw::FieldName);
    }
    if is_lookalike(name) {
        return Err(Flaw::Lookalike);
    }
    if !value.iter().all(|&byte| byte == b'\t' || (byte >= b' ' && byte != 0x7f)) {
        return Err(Flaw::FieldValue);
    }
    Ok((name, value.trim_ascii()))
}

/// `tchar` of RFC 9110, section 5.6.2.
fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}
