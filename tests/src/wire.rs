//! What really crossed an interface: a packet capture, the oracle of every refusal.
//!
//! It sees every ethertype and protocol, and remembers headers only.

use std::io::Read;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use etherparse::{LaxNetSlice, LaxSlicedPacket, TransportSlice};
use socket2::{Domain, Protocol, Socket, Type};

use crate::netns::Netns;

/// `ETH_P_ALL` in network byte order: every ethertype, both directions.
const EVERY_ETHERTYPE: i32 = 0x0300;

/// One frame that was seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// When.
    pub at: Instant,
    /// The sender's MAC address.
    pub mac: [u8; 6],
    /// The ethertype of the frame, as it was sent.
    pub ethertype: u16,
    /// Source and destination, of IPv4 and IPv6.
    pub addresses: Option<(IpAddr, IpAddr)>,
    /// The IP protocol number.
    pub protocol: Option<u8>,
    /// Source and destination port of TCP and UDP.
    pub ports: Option<(u16, u16)>,
    /// Whether it asks for a TCP connection: SYN without ACK.
    pub opens: bool,
    /// Whether it is a TCP reset.
    pub reset: bool,
    /// Bytes of payload of a TCP segment.
    pub payload: usize,
    /// Length of the frame in bytes.
    pub length: usize,
}

impl Seen {
    /// Reads the headers of an Ethernet frame; none when it is shorter than one.
    #[must_use]
    pub fn of(frame: &[u8]) -> Option<Self> {
        let mac = frame.get(6..12)?.try_into().ok()?;
        let ethertype = u16::from_be_bytes(frame.get(12..14)?.try_into().ok()?);
        let mut seen = Self {
            at: Instant::now(),
            mac,
            ethertype,
            addresses: None,
            protocol: None,
            ports: None,
            opens: false,
            reset: false,
            payload: 0,
            length: frame.len(),
        };
        let Ok(packet) = LaxSlicedPacket::from_ethernet(frame) else { return Some(seen) };
        match &packet.net {
            Some(LaxNetSlice::Ipv4(ip)) => {
                let header = ip.header();
                seen.protocol = Some(header.protocol().0);
                let addresses = (header.source_addr().into(), header.destination_addr().into());
                seen.addresses = Some(addresses);
            }
            Some(LaxNetSlice::Ipv6(ip)) => {
                let header = ip.header();
                seen.protocol = Some(ip.payload().ip_number.0);
                let addresses = (header.source_addr().into(), header.destination_addr().into());
                seen.addresses = Some(addresses);
            }
            _ => {}
        }
        match &packet.transport {
            Some(TransportSlice::Tcp(tcp)) => {
                seen.ports = Some((tcp.source_port(), tcp.destination_port()));
                seen.opens = tcp.syn() && !tcp.ack();
                seen.reset = tcp.rst();
                seen.payload = tcp.payload().len();
            }
            Some(TransportSlice::Udp(udp)) => {
                seen.ports = Some((udp.source_port(), udp.destination_port()));
            }
            _ => {}
        }
        Some(seen)
    }

    /// Whether it was sent to this address.
    #[must_use]
    pub fn is_to(&self, address: impl Into<IpAddr>) -> bool {
        let address = address.into();
        self.addresses.is_some_and(|(_, to)| to == address)
    }

    /// Whether it was sent from this address.
    #[must_use]
    pub fn is_from(&self, address: impl Into<IpAddr>) -> bool {
        let address = address.into();
        self.addresses.is_some_and(|(from, _)| from == address)
    }
}

/// A running capture of all interfaces of a namespace. It ends on drop.
#[derive(Debug)]
pub struct Wire {
    seen: Arc<Mutex<Vec<Seen>>>,
    ended: Arc<AtomicBool>,
}

impl Wire {
    /// Starts to listen; it is listening when this returns.
    ///
    /// # Panics
    /// Without the right to open a packet socket.
    #[must_use]
    pub fn tapped(namespace: &Netns) -> Self {
        let mut socket = namespace.run(|| {
            Socket::new(Domain::PACKET, Type::RAW, Some(Protocol::from(EVERY_ETHERTYPE)))
                .expect("packet socket")
        });
        // A burst of a bulk transfer must not push out the one frame that matters.
        socket.set_recv_buffer_size(64 << 20).expect("receive buffer");
        socket.set_read_timeout(Some(Duration::from_millis(50))).expect("read timeout");
        let (seen, ended) = (Arc::<Mutex<Vec<Seen>>>::default(), Arc::<AtomicBool>::default());
        let (sink, stop) = (seen.clone(), ended.clone());
        std::thread::spawn(move || {
            let mut frame = vec![0; 1 << 17];
            while !stop.load(Ordering::Relaxed) {
                if let Ok(length) = socket.read(&mut frame)
                    && let Some(one) = Seen::of(&frame[..length])
                {
                    sink.lock().expect("frames").push(one);
                }
            }
        });
        Self { seen, ended }
    }

    /// The frames so far that `wanted` picks.
    ///
    /// # Panics
    /// When the capture thread panicked.
    pub fn frames(&self, wanted: impl Fn(&Seen) -> bool) -> Vec<Seen> {
        self.seen.lock().expect("frames").iter().filter(|seen| wanted(seen)).cloned().collect()
    }

    /// How many frames were seen up to the first one that `wanted` picks, which is counted.
    ///
    /// # Panics
    /// When the capture thread panicked.
    pub fn position(&self, wanted: impl Fn(&Seen) -> bool) -> Option<usize> {
        let seen = self.seen.lock().expect("frames");
        seen.iter().position(wanted).map(|at| at + 1)
    }

    /// The frames among the first `count` that `wanted` picks.
    ///
    /// # Panics
    /// When the capture thread panicked.
    pub fn frames_until(&self, count: usize, wanted: impl Fn(&Seen) -> bool) -> Vec<Seen> {
        let seen = self.seen.lock().expect("frames");
        seen.iter().take(count).filter(|seen| wanted(seen)).cloned().collect()
    }

    /// The frames after the first `count` that `wanted` picks.
    ///
    /// # Panics
    /// When the capture thread panicked.
    pub fn frames_since(&self, count: usize, wanted: impl Fn(&Seen) -> bool) -> Vec<Seen> {
        let seen = self.seen.lock().expect("frames");
        seen.iter().skip(count).filter(|seen| wanted(seen)).cloned().collect()
    }

    /// Whether a frame so far is one that `wanted` picks.
    ///
    /// # Panics
    /// When the capture thread panicked.
    pub fn any(&self, wanted: impl Fn(&Seen) -> bool) -> bool {
        self.seen.lock().expect("frames").iter().any(wanted)
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
    }
}
