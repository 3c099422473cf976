//! What only keeps a connection open, where it passes in clear: ping and pong frames of a WebSocket (RFC
//! 6455, section 5.5), comments of an event stream (the HTML standard, section 9.2).
//!
//! Pure, and fed with bytes however they are cut. Decides nothing about what passes and changes nothing of
//! it: it tells whether somebody meant something by it. What it cannot read was meant.

/// The opcodes of ping and pong, in a frame that is whole and bears no extension's bits.
const PING: u8 = 0x89;
const PONG: u8 = 0x8a;
/// Bytes of payload that such a frame has at most.
const CONTROL: u64 = 125;

/// One direction of a WebSocket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Frames {
    at: At,
    /// The bytes of the frame's head so far, of at most 14.
    head: [u8; 14],
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum At {
    /// Before a frame.
    #[default]
    Boundary,
    /// So many bytes of its head have come.
    Head(usize),
    /// So many bytes of its payload have not.
    Payload { left: u64, meant: bool },
    /// It is no WebSocket any more.
    Lost,
}

impl Frames {
    /// Before the first frame.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether a frame has ended with the last byte, or none has begun.
    #[must_use]
    pub fn is_between(&self) -> bool {
        self.at == At::Boundary
    }

    /// Takes the next bytes; says whether any of them is more than a ping or pong.
    pub fn feed(&mut self, mut bytes: &[u8]) -> bool {
        let mut meant = false;
        while !bytes.is_empty() {
            let (part, taken) = self.step(bytes);
            meant |= part;
            bytes = bytes.get(taken..).unwrap_or_default();
        }
        meant
    }

    /// Takes some of these bytes, at least one; says whether they were meant, and how many they were.
    fn step(&mut self, bytes: &[u8]) -> (bool, usize) {
        match self.at {
            At::Lost => (true, bytes.len()),
            At::Payload { left, meant } => {
                let taken = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
                self.pass(left - taken as u64, meant);
                (meant, taken)
            }
            At::Boundary => self.head_byte(0, bytes),
            At::Head(have) => self.head_byte(have, bytes),
        }
    }

    fn head_byte(&mut self, have: usize, bytes: &[u8]) -> (bool, usize) {
        let (Some(room), Some(byte)) = (self.head.get_mut(have), bytes.first()) else {
            self.at = At::Lost;
            return (true, bytes.len());
        };
        *room = *byte;
        self.at = At::Head(have + 1);
        let [first, second, ..] = self.head;
        let mut meant = !matches!(first, PING | PONG);
        if have == 0 {
            return (meant, 1);
        }
        let length = match second & 0x7f {
            126 => 2,
            127 => 8,
            _ => 0,
        };
        if !meant && length > 0 {
            // Control frames are short (section 5.5).
            self.at = At::Lost;
            return (true, bytes.len());
        }
        let mask = if second & 0x80 == 0 { 0 } else { 4 };
        if have + 1 < 2 + length + mask {
            return (meant, 1);
        }
        let long = self.head.get(2..2 + length).unwrap_or_default();
        let long = long.iter().fold(0, |long: u64, byte| long << 8 | u64::from(*byte));
        let left = if length == 0 { u64::from(second & 0x7f) } else { long };
        if left > u64::MAX >> 1 {
            self.at = At::Lost;
            meant = true;
        } else {
            self.pass(left, meant);
        }
        (meant, 1)
    }

    fn pass(&mut self, left: u64, meant: bool) {
        debug_assert!(meant || left <= CONTROL, "checked with its head");
        self.at = if left == 0 { At::Boundary } else { At::Payload { left, meant } };
    }
}

/// What keeps a WebSocket open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keepalive {
    /// It is to be answered.
    Ping,
    /// An answer, asked for or not.
    Pong,
}

/// A whole frame of a server that keeps its WebSocket open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    /// Which.
    pub kind: Keepalive,
    /// Its payload, of at most 125 bytes.
    pub payload: &'a [u8],
    /// Its length with its head, in bytes.
    pub length: usize,
}

impl<'a> Frame<'a> {
    /// The one that these bytes begin with; none if they do not, or it is not there whole. What a server sends
    /// is not masked (section 5.1).
    #[must_use]
    pub fn read(bytes: &'a [u8]) -> Option<Self> {
        let (&[first, length], rest) = bytes.split_first_chunk()?;
        let kind = match first {
            PING => Keepalive::Ping,
            PONG => Keepalive::Pong,
            _ => return None,
        };
        let payload = rest.get(..usize::from(length)).filter(|_| u64::from(length) <= CONTROL)?;
        Some(Self { kind, payload, length: 2 + payload.len() })
    }
}

/// An event stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Events {
    line: Line,
    /// The last byte was a carriage return, whose line feed may follow.
    returned: bool,
    /// Lines of an event have come, and not the empty one that ends it.
    pending: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Line {
    #[default]
    Begins,
    Comment,
    Field,
}

impl Events {
    /// Before the first line.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the next bytes; says whether any of them is more than a comment, or an empty line that ends
    /// nothing.
    pub fn feed(&mut self, bytes: &[u8]) -> bool {
        let mut meant = false;
        for byte in bytes {
            let after_return = std::mem::replace(&mut self.returned, *byte == b'\r');
            match (byte, self.line) {
                (b'\n', _) if after_return => {}
                (b'\r' | b'\n', Line::Begins) => meant |= std::mem::take(&mut self.pending),
                (b'\r' | b'\n', line) => {
                    meant |= line == Line::Field;
                    self.line = Line::Begins;
                }
                (b':', Line::Begins) => self.line = Line::Comment,
                (_, Line::Comment) => {}
                (_, Line::Begins | Line::Field) => {
                    (self.line, self.pending, meant) = (Line::Field, true, true);
                }
            }
        }
        meant
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A frame as the standard has it, by its opcode.
    fn frame(first: u8, masked: bool, payload: usize) -> Vec<u8> {
        let bit = if masked { 0x80 } else { 0 };
        let mut bytes = vec![first];
        match payload {
            0..=125 => bytes.push(bit | u8::try_from(payload).expect("short")),
            126..=0xffff => {
                bytes.push(bit | 126);
                bytes.extend(u16::try_from(payload).expect("fits").to_be_bytes());
            }
            _ => {
                bytes.push(bit | 127);
                bytes.extend((payload as u64).to_be_bytes());
            }
        }
        if masked {
            bytes.extend([0x89, 0, 0x8a, 0x81]);
        }
        bytes.extend((0..payload).map(|n| [0x89, 0x81, b':', b'\n'][n % 4]));
        bytes
    }

    #[test]
    fn what_is_no_keepalive_is_meant_and_so_is_what_cannot_be_read() {
        for (bytes, meant) in [
            (frame(PING, false, 0), false),
            (frame(PONG, true, 125), false),
            (frame(0x81, false, 0), true),
            (frame(0x88, true, 2), true),
            (vec![PING | 0x40, 0], true),
            (vec![0x09, 0], true),
            (vec![PING, 126, 0, 1, 0], true),
            (vec![0x82, 127, 0x80, 0, 0, 0, 0, 0, 0, 0], true),
            (b"HTTP/1.1 200".to_vec(), true),
        ] {
            assert_eq!(Frames::new().feed(&bytes), meant, "{bytes:02x?}");
        }
        let mut lost = Frames::new();
        lost.feed(&[PING, 126]);
        assert!(lost.feed(&frame(PING, false, 0)) && !lost.is_between(), "for good");
    }

    #[test]
    fn comments_of_an_event_stream_and_the_lines_that_end_them_are_not_meant() {
        for (text, meant) in [
            (": ping\n\n", false),
            (":\r\n\r\n", false),
            (":\r\r: x\n\n\n", false),
            ("data: x\n\n", true),
            ("data", true),
            (" : no comment\n", true),
            (":c\nevent: ping\n\n", true),
        ] {
            assert_eq!(Events::new().feed(text.as_bytes()), meant, "{text:?}");
        }
        let mut events = Events::new();
        assert!(events.feed(b"data: a\r\n"));
        assert!(!events.feed(b": within an event\r\n"));
        assert!(events.feed(b"\r\n"), "which ends now");
        assert!(!events.feed(b"\r\n"));
    }

    proptest! {
        /// Attack P41. However the frames of a direction are cut, a byte is meant exactly if it is of a frame that is.
        #[test]
        fn frames_are_told_apart_however_they_are_cut(
            frames in proptest::collection::vec(
                (prop_oneof![Just(PING), Just(PONG), Just(0x81_u8), Just(0x02), Just(0x88)],
                 any::<bool>(), prop_oneof![0_usize..126, 126_usize..400, Just(70_000)]), 1..12),
            cuts in proptest::collection::vec(1_usize..300, 1..40),
        ) {
            let (mut bytes, mut expected) = (Vec::new(), Vec::new());
            let mut ends = vec![0];
            for (first, masked, payload) in frames {
                let keeps = matches!(first, PING | PONG);
                let one = frame(first, masked, if keeps { payload.min(125) } else { payload });
                expected.extend(one.iter().map(|_| !keeps));
                bytes.extend(one);
                ends.push(bytes.len());
            }
            let (mut reader, mut at) = (Frames::new(), 0);
            for cut in cuts.iter().cycle() {
                let end = (at + cut).min(bytes.len());
                prop_assert_eq!(reader.feed(&bytes[at..end]), expected[at..end].contains(&true));
                prop_assert_eq!(reader.is_between(), ends.contains(&end));
                at = end;
                if at == bytes.len() {
                    break;
                }
            }
        }

        /// Attack P41. The same of an event stream, whichever line ends it has.
        #[test]
        fn an_event_stream_is_read_the_same_however_it_is_cut(
            text in "[:a\r\n ]{0,80}", at in 0_usize..80,
        ) {
            let bytes = text.as_bytes();
            let (one, other) = bytes.split_at(at.min(bytes.len()));
            let (mut whole, mut cut) = (Events::new(), Events::new());
            let meant = whole.feed(bytes);
            let first = cut.feed(one);
            prop_assert_eq!(meant, cut.feed(other) | first);
            prop_assert_eq!(whole, cut);
        }
    }
}
