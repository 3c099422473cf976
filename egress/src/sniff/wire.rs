//! A reader over bytes of the TLS presentation language (RFC 8446, section 3).
//!
//! Never reads past the end and never leaves anything unread unnoticed.

use crate::sniff::Flaw;

/// What is left to read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub(super) fn is_empty(self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn take(&mut self, count: usize) -> Result<&'a [u8], Flaw> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(Flaw::Malformed)?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Flaw> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(Flaw::Malformed)?;
        self.0 = rest;
        Ok(*taken)
    }

    pub(super) fn u8(&mut self) -> Result<u8, Flaw> {
        self.array().map(u8::from_be_bytes)
    }

    pub(super) fn u16(&mut self) -> Result<u16, Flaw> {
        self.array().map(u16::from_be_bytes)
    }

    /// A vector with a length of one byte.
    pub(super) fn short(&mut self) -> Result<&'a [u8], Flaw> {
        let length = self.u8()?;
        self.take(length.into())
    }

    /// A vector with a length of two bytes.
    pub(super) fn long(&mut self) -> Result<&'a [u8], Flaw> {
        let length = self.u16()?;
        self.take(length.into())
    }

    /// Nothing may be left.
    pub(super) fn end(self) -> Result<(), Flaw> {
        if self.0.is_empty() { Ok(()) } else { Err(Flaw::Malformed) }
    }
}
