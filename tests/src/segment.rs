//! TCP by hand, segment by segment: what no honest kernel sends. The guest's own kernel is kept from
//! answering for it.

use std::io::Read;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use etherparse::{NetSlice, PacketBuilder, SlicedPacket, TransportSlice};
use nix::sys::socket::{setsockopt, sockopt};
use policy::net::{GATEWAY_MAC, GUEST_IP, GUEST_MAC};
use socket2::{Domain, Protocol, Socket, Type};

use crate::guest::Guest;

/// Ports from here on belong to connections by hand.
pub const FIRST_PORT: u16 = 50_000;

/// `ETH_P_IP` in network byte order.
const IPV4: i32 = 0x0008;
/// The number before our first byte.
const START: u32 = u32::MAX - 500;

/// How one segment differs from a plain one.
#[derive(Clone, Copy, Debug, Default)]
pub struct Odd<'a> {
    /// Its options, as they stand in the header: at most 40 bytes, a multiple of four.
    pub options: &'a [u8],
    /// The urgent pointer.
    pub urgent: Option<u16>,
    /// The window, in place of a wide one.
    pub window: Option<u16>,
}

/// What came back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// These bytes came first, in segments of at most this length.
    Bytes(Vec<u8>, usize),
    /// A reset.
    Reset,
    /// An orderly end.
    End,
    /// Nothing in time.
    Silence,
}

/// A connection by hand.
#[derive(Debug)]
pub struct ByHand<'g, 'w> {
    guest: &'g Guest<'w>,
    heard: Socket,
    from: u16,
    to: (Ipv4Addr, u16),
    acknowledged: u32,
}

/// Keeps the guest's kernel from answering for connections it knows nothing of, and from using their
/// ports itself.
///
/// # Panics
/// When it cannot be kept.
pub fn hush(guest: &Guest<'_>) {
    let rules = format!(
        "add table inet hush; add chain inet hush in {{ type filter hook input priority 0; }}; \
         add rule inet hush in tcp dport >= {FIRST_PORT} drop"
    );
    guest.run(|| {
        let ports = format!("32768 {}", FIRST_PORT - 1);
        std::fs::write("/proc/sys/net/ipv4/ip_local_port_range", ports).expect("the guest's ports");
    });
    let done = guest.command("nft").arg(rules).output().expect("run nft");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

impl<'g, 'w> ByHand<'g, 'w> {
    /// Opens one from this port of a guest that is hushed, with a first segment that is this odd.
    ///
    /// # Panics
    /// When it is not answered.
    #[must_use]
    pub fn open(guest: &'g Guest<'w>, from: u16, to: (Ipv4Addr, u16), odd: Odd<'_>) -> Self {
        let opened = Self::try_open(guest, from, to, odd, crate::client::PATIENT);
        opened.expect("the handshake is answered")
    }

    /// The same; none where it is not answered within this time.
    ///
    /// # Panics
    /// When it is answered otherwise.
    #[must_use]
    pub fn try_open(
        guest: &'g Guest<'w>,
        from: u16,
        to: (Ipv4Addr, u16),
        odd: Odd<'_>,
        limit: Duration,
    ) -> Option<Self> {
        let heard = guest.run(|| {
            Socket::new(Domain::PACKET, Type::RAW, Some(Protocol::from(IPV4))).expect("packets")
        });
        heard.set_read_timeout(Some(Duration::from_millis(50))).expect("a limit");
        // An acknowledgement for each of a thousand segments must not push out the answer.
        setsockopt(&heard, sockopt::RcvBufForce, &(16 << 20)).expect("room");
        let mut this = Self { guest, heard, from, to, acknowledged: 0 };
        this.guest.cable.inject(&this.frame(START, Kind::Syn, &[], odd)).expect("sent");
        let deadline = Instant::now() + limit;
        let first = std::iter::from_fn(|| Some(this.hear()))
            .take_while(|_| Instant::now() < deadline)
            .flatten()
            .next()?;
        assert!(first.opens && !first.ends && !first.resets, "{first:?}");
        this.acknowledged = first.number.wrapping_add(1);
        this.put(0, &[], Odd::default());
        Some(this)
    }

    /// Sends bytes as those at `at` of the stream.
    ///
    /// # Panics
    /// When the tap does not take the frame.
    pub fn put(&self, at: u32, bytes: &[u8], odd: Odd<'_>) {
        let number = START.wrapping_add(1).wrapping_add(at);
        self.guest.cable.inject(&self.frame(number, Kind::Plain, bytes, odd)).expect("sent");
    }

    /// Acknowledges what comes, until it has come to something: a few bytes, or an end.
    pub fn answer(&mut self, sent: u32, limit: Duration) -> Answer {
        let deadline = Instant::now() + limit;
        let (mut bytes, mut longest) = (Vec::new(), 0);
        while Instant::now() < deadline {
            let Some(Heard { number, payload, ends, resets, .. }) = self.hear() else { continue };
            if resets {
                return if bytes.is_empty() {
                    Answer::Reset
                } else {
                    Answer::Bytes(bytes, longest)
                };
            }
            if number == self.acknowledged && !payload.is_empty() {
                longest = longest.max(payload.len());
                self.acknowledged = number.wrapping_add(len(&payload));
                bytes.extend(&payload);
                self.put(sent, &[], Odd::default());
            }
            let ended = ends && number.wrapping_add(len(&payload)) == self.acknowledged;
            match bytes.len() {
                0 if ended => return Answer::End,
                1.. if ended => return Answer::Bytes(bytes, longest),
                200.. => return Answer::Bytes(bytes, longest),
                _ => {}
            }
        }
        if bytes.is_empty() { Answer::Silence } else { Answer::Bytes(bytes, longest) }
    }

    /// The next segment to us, if one comes soon.
    fn hear(&mut self) -> Option<Heard> {
        let mut frame = vec![0; 1 << 16];
        let length = self.heard.read(&mut frame).ok()?;
        let packet = SlicedPacket::from_ethernet(&frame[..length]).ok()?;
        let (Some(NetSlice::Ipv4(ip)), Some(TransportSlice::Tcp(tcp))) =
            (&packet.net, &packet.transport)
        else {
            return None;
        };
        let ours = ip.header().source_addr() == self.to.0
            && (tcp.source_port(), tcp.destination_port()) == (self.to.1, self.from);
        ours.then(|| Heard {
            number: tcp.sequence_number(),
            payload: tcp.payload().to_vec(),
            opens: tcp.syn(),
            ends: tcp.fin(),
            resets: tcp.rst(),
        })
    }

    fn frame(&self, number: u32, kind: Kind, bytes: &[u8], odd: Odd<'_>) -> Vec<u8> {
        let window = odd.window.unwrap_or(60_000);
        let builder = PacketBuilder::ethernet2(GUEST_MAC, GATEWAY_MAC)
            .ipv4(GUEST_IP.octets(), self.to.0.octets(), 64)
            .tcp(self.from, self.to.1, number, window);
        let builder = match kind {
            Kind::Syn => builder.syn(),
            Kind::Plain => builder.ack(self.acknowledged),
        };
        let builder = match odd.urgent {
            Some(pointer) => builder.urg(pointer),
            None => builder,
        };
        let builder = builder.options_raw(odd.options).expect("options");
        let mut frame = Vec::new();
        builder.write(&mut frame, bytes).expect("a frame");
        frame
    }
}

/// A segment that came.
#[derive(Debug)]
struct Heard {
    number: u32,
    payload: Vec<u8>,
    opens: bool,
    ends: bool,
    resets: bool,
}

fn len(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.len()).expect("one segment")
}

#[derive(Clone, Copy)]
enum Kind {
    Syn,
    Plain,
}
