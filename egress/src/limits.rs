//! The bounds of one guest's connections. Everything a guest can make us hold has one.

use std::time::Duration;

/// Bounds of one sandbox's connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Open connections a sandbox may have; over it they are reset with code `limit`.
    pub flows: usize,
    /// Frames a second that a guest may send; more are dropped at its tap. A tenth of it at once.
    pub packets: u32,
    /// Bytes a second that a guest may send, in frames with their headers; none: as many as it can.
    pub bytes: Option<u64>,
    /// UDP sessions a sandbox may have, each one of its `flows`; over it one that is silent ends, and
    /// where none is, a datagram that needs a new one is refused with code `limit`.
    pub udp_sessions: usize,
    /// Without a datagram either way, a UDP session ends.
    pub udp_idle: Duration,
    /// From accept to the last byte that is needed to judge; from the first byte on, where a server may
    /// speak first.
    pub first_flight: Duration,
    /// For one address to answer our SYN.
    pub connect: Duration,
    /// How long a far side may acknowledge nothing of what is sent to it, or take nothing of it, our
    /// probes of a quiet connection included (RFC 5482: the user timeout). Whoever is idle is not
    /// ended by it, and one that cannot be reached any more is, a vanished egress address included.
    pub user_timeout: Duration,
    /// Without a byte either way, an open connection is closed.
    pub idle: Duration,
    /// How long a connection may be silent after one side has said it is done.
    pub half_closed: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            flows: 1024,
            packets: 100_000,
            bytes: None,
            udp_sessions: 256,
            udp_idle: Duration::from_secs(60),
            first_flight: Duration::from_secs(10),
            connect: Duration::from_secs(10),
            user_timeout: Duration::from_secs(300),
            idle: Duration::from_secs(3600),
            half_closed: Duration::from_secs(300),
        }
    }
}
