//! Frames on the wire: kind (1 byte), payload length (4 bytes, big endian), payload.
//!
//! Knows nothing of what the kinds mean. A length
//! beyond the limit is refused before a byte of its payload is waited for.

use std::marker::PhantomData;

use crate::error::Error;

/// Longest payload, in bytes.
pub const MAX_PAYLOAD: usize = 64 * 1024;

const HEADER: usize = 5;

/// One side's vocabulary.
pub trait Message: Sized {
    /// The message of this kind and payload.
    ///
    /// # Errors
    /// A kind this vocabulary lacks, or a payload that is not of that kind.
    fn parse(kind: u8, payload: &[u8]) -> Result<Self, Error>;

    /// Its kind and payload. A payload over [`MAX_PAYLOAD`] is split or refused by the caller of
    /// [`encode`].
    fn parts(&self) -> (u8, std::borrow::Cow<'_, [u8]>);

    /// Appends the message to `out`.
    ///
    /// # Errors
    /// [`Error::TooLong`] when the payload is over [`MAX_PAYLOAD`].
    fn encode(&self, out: &mut Vec<u8>) -> Result<(), Error> {
        let (kind, payload) = self.parts();
        encode(kind, &payload, out)
    }
}

/// Appends one frame to `out`.
///
/// # Errors
/// [`Error::TooLong`] when the payload is over [`MAX_PAYLOAD`].
pub fn encode(kind: u8, payload: &[u8], out: &mut Vec<u8>) -> Result<(), Error> {
    let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
    if payload.len() > MAX_PAYLOAD {
        return Err(Error::TooLong { length });
    }
    out.push(kind);
    out.extend_from_slice(&length.to_be_bytes());
    out.extend_from_slice(payload);
    Ok(())
}

/// Bytes in any portions to messages. After an error the stream has no next message.
#[derive(Debug)]
pub struct Decoder<M> {
    buffer: Vec<u8>,
    /// Where the unread bytes start.
    start: usize,
    messages: PhantomData<fn() -> M>,
}

impl<M> Default for Decoder<M> {
    fn default() -> Self {
        Self { buffer: Vec::new(), start: 0, messages: PhantomData }
    }
}

impl<M: Message> Decoder<M> {
    /// Takes what was read. Call [`Decoder::message`] until it has none before pushing more: then
    /// at most one frame and one portion are held.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.drain(..self.start);
        self.start = 0;
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole message, `None` when more bytes are needed.
    ///
    /// # Errors
    /// The frame at the front is refused; so is every later call.
    pub fn message(&mut self) -> Result<Option<M>, Error> {
        let unread = self.buffer.get(self.start..).unwrap_or_default();
        let Some((&[kind, a, b, c, d], rest)) = unread.split_first_chunk::<HEADER>() else {
            return Ok(None);
        };
        let length = u32::from_be_bytes([a, b, c, d]);
        let size = usize::try_from(length).unwrap_or(usize::MAX);
        if size > MAX_PAYLOAD {
            return Err(Error::TooLong { length });
        }
        let Some(payload) = rest.get(..size) else { return Ok(None) };
        let message = M::parse(kind, payload)?;
        self.start += HEADER + size;
        Ok(Some(message))
    }
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug, PartialEq)]
    struct Raw(u8, Vec<u8>);

    impl Message for Raw {
        fn parse(kind: u8, payload: &[u8]) -> Result<Self, Error> {
            Ok(Self(kind, payload.to_vec()))
        }
        fn parts(&self) -> (u8, Cow<'_, [u8]>) {
            (self.0, Cow::Borrowed(&self.1))
        }
    }

    proptest! {
        #[test]
        fn frames_survive_any_cutting(
            frames in prop::collection::vec((any::<u8>(), prop::collection::vec(any::<u8>(), 0..300)), 0..12),
            cuts in prop::collection::vec(1_usize..200, 1..40),
        ) {
            let sent: Vec<Raw> = frames.into_iter().map(|(kind, payload)| Raw(kind, payload)).collect();
            let mut bytes = Vec::new();
            for frame in &sent {
                frame.encode(&mut bytes).expect("short");
            }
            let (mut decoder, mut got, mut rest) = (Decoder::<Raw>::default(), Vec::new(), &bytes[..]);
            for cut in cuts.iter().cycle() {
                if rest.is_empty() { break }
                let (portion, after) = rest.split_at((*cut).min(rest.len()));
                rest = after;
                decoder.push(portion);
                while let Some(frame) = decoder.message().expect("well formed") {
                    got.push(frame);
                }
            }
            prop_assert_eq!(got, sent);
        }

        #[test]
        fn any_bytes_are_read_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let mut decoder = Decoder::<Raw>::default();
            decoder.push(&bytes);
            let mut read = 0;
            while let Ok(Some(Raw(_, payload))) = decoder.message() {
                read += HEADER + payload.len();
            }
            prop_assert!(read <= bytes.len());
        }
    }

    #[test]
    fn a_length_beyond_the_limit_is_refused_before_its_payload_and_for_ever() {
        let mut decoder = Decoder::<Raw>::default();
        decoder.push(&[7, 0, 1, 0, 1]);
        for _ in 0..2 {
            assert!(matches!(decoder.message(), Err(Error::TooLong { length: 65_537 })));
        }
        let mut out = Vec::new();
        assert!(encode(1, &vec![0; MAX_PAYLOAD], &mut out).is_ok());
        assert!(encode(1, &vec![0; MAX_PAYLOAD + 1], &mut out).is_err());
        assert_eq!(out.len(), HEADER + MAX_PAYLOAD, "a refused frame leaves no byte behind");
    }
}
