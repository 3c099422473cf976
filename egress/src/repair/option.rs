//! The socket options by which the kernel gives out the state of a TCP connection and takes it back
//! (`tcp(7)` names TCP_REPAIR only; the others are those of `linux/tcp.h` and `asm-generic/socket.h`).
//! They act on a socket of the caller's, and need CAP_NET_ADMIN.
#![expect(
    unreachable_pub,
    reason = "the macro makes options that are `pub`, and so are their values"
)]

use nix::libc;
use nix::{getsockopt_impl, setsockopt_impl, sockopt_impl};

/// What TCP_REPAIR is set to: on, off with a probe of the far side's window, off without.
pub(super) const ON: u32 = 1;
pub(super) const OFF: u32 = 0;
pub(super) const OFF_UNSAID: u32 = u32::MAX;

/// Which queue TCP_REPAIR_QUEUE makes the calls that follow about.
pub(super) const RECEIVED: u32 = 1;
pub(super) const SENT: u32 = 2;

/// Lock of buffers that were set by hand (`SO_BUF_LOCK`).
const SO_BUF_LOCK: i32 = 72;

/// Options of a SYN, as TCP_REPAIR_OPTIONS takes them (RFC 9293, 7323 and 2018).
pub(super) const MSS: u32 = 2;
pub(super) const WINDOW_SCALE: u32 = 3;
pub(super) const SACK_PERMITTED: u32 = 4;
pub(super) const TIMESTAMPS: u32 = 8;

/// Bits of [`Info::options`].
pub(super) const HAS_TIMESTAMPS: u8 = 1;
pub(super) const HAS_SACK: u8 = 2;
pub(super) const HAS_WINDOW_SCALE: u8 = 4;

/// `struct tcp_repair_opt`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Negotiated {
    pub(super) code: u32,
    pub(super) value: u32,
}

/// `struct tcp_repair_window`: sequence numbers and bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Window {
    pub(super) snd_wl1: u32,
    pub(super) snd_wnd: u32,
    pub(super) max_window: u32,
    pub(super) rcv_wnd: u32,
    pub(super) rcv_wup: u32,
}

/// The first part of `struct tcp_info`, as far as it is of use here.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Info {
    /// A state of RFC 9293, as `TCP_ESTABLISHED` and the like number them.
    pub(super) state: u8,
    _until_options: [u8; 4],
    /// Which options are in use.
    pub(super) options: u8,
    /// Two of four bits: the shift of the windows that the far side says, and of those that we do.
    pub(super) scales: u8,
    _flags: u8,
    _timeouts: [u32; 2],
    /// Bytes of payload that a segment of ours carries at most.
    pub(super) segment: u32,
    _their_segment: u32,
    /// Segments that are sent and not acknowledged, our end included.
    pub(super) unacked: u32,
    _until_pacing: [u32; 19],
    _pacing_to_bytes_received: [u64; 4],
    _segments: [u32; 2],
    /// Bytes that are queued and have not been sent.
    pub(super) unsent: u32,
}

// To set none makes the kernel reckon its segments anew: those of a socket in repair are what hosts without
// the option of RFC 9293 would take, 536 bytes, and stay that.
sockopt_impl!(IpOptions, SetOnly, libc::IPPROTO_IP, libc::IP_OPTIONS, [u8; 0]);
sockopt_impl!(RepairQueue, SetOnly, libc::IPPROTO_TCP, libc::TCP_REPAIR_QUEUE, u32);
sockopt_impl!(QueueSeq, Both, libc::IPPROTO_TCP, libc::TCP_QUEUE_SEQ, u32);
sockopt_impl!(RepairOptions, SetOnly, libc::IPPROTO_TCP, libc::TCP_REPAIR_OPTIONS, Negotiated);
sockopt_impl!(RepairWindow, Both, libc::IPPROTO_TCP, libc::TCP_REPAIR_WINDOW, Window);
sockopt_impl!(Timestamp, Both, libc::IPPROTO_TCP, libc::TCP_TIMESTAMP, u32);
sockopt_impl!(TcpInfo, GetOnly, libc::IPPROTO_TCP, libc::TCP_INFO, Info);
sockopt_impl!(SegmentSize, GetOnly, libc::IPPROTO_TCP, libc::TCP_MAXSEG, u32);
sockopt_impl!(BufferLock, Both, libc::SOL_SOCKET, SO_BUF_LOCK, u32);
