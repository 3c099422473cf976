//! A TCP connection as a value: taken from the kernel without a segment to its far side, and put back
//! later, on another socket, as if nothing had been.
//!
//! By TCP_REPAIR (`tcp(7)`; what CRIU does for processes). The far side must not run between the two:
//! what it sends meanwhile meets no socket. Our own end, if it was said, is said again; an end of the
//! far side is kept as a mark, because no option gives it to a new socket. Never sends while it takes.

mod option;
mod remains;

use std::io;
use std::net::{Shutdown, SocketAddrV4, TcpStream};
use std::os::fd::AsFd;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, getsockopt, recv, setsockopt, sockopt};
use policy::Slot;
use socket2::{Protocol, SockFilter, SockRef, Socket, Type};

use crate::facing;
use crate::repair::option::*;
pub use crate::repair::remains::Remains;
pub(crate) use crate::repair::remains::Untold;
use crate::room;

/// What any connection may hold each way, in bytes: as much as the guests' world lets a socket grow, and
/// what the kernel keeps twice over.
const MOST: usize = 8 << 20;
/// The room for a first look at a queue.
const LOOK: usize = 64 << 10;
/// What is put back at once. The kernel takes as much as it has a buffer for.
const PIECE: usize = 16 << 10;

/// States of RFC 9293, as `linux/tcp_states.h` numbers them.
const ESTABLISHED: u8 = 1;
const FIN_WAIT_1: u8 = 4;
const FIN_WAIT_2: u8 = 5;
const CLOSE: u8 = 7;
const CLOSE_WAIT: u8 = 8;
const LAST_ACK: u8 = 9;
const CLOSING: u8 = 11;

/// A connection that no socket holds. Its bytes are the payload of a guest.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Checkpoint {
    local: SocketAddrV4,
    remote: SocketAddrV4,
    /// The number of the next byte that comes (RCV.NXT); `unread` ends there.
    next_in: u32,
    /// The number of the byte after the last one that was queued; `queued` ends there.
    next_out: u32,
    /// Came and was not read.
    unread: Vec<u8>,
    /// Was written and not acknowledged.
    queued: Vec<u8>,
    /// How much of it has been sent, from its beginning.
    sent: usize,
    /// The far side has said that it is done, in order, and was told that we know.
    far_done: bool,
    /// We have said, or queued, that we are done.
    done: bool,
    window: Window,
    segment: u32,
    scales: Option<(u8, u8)>,
    sack: bool,
    timestamp: Option<u32>,
    /// Sizes that the kernel counts by, and whether it may not grow them.
    buffers: [usize; 2],
    locked: u32,
    nodelay: bool,
}

/// Whether nothing that was sent is unacknowledged, and nothing waits to be sent.
pub(crate) fn is_settled(socket: &impl AsFd) -> bool {
    getsockopt(socket, TcpInfo).map_or(true, |info| info.unacked == 0 && info.unsent == 0)
}

/// Whether our end has been acknowledged, or the connection is over.
pub(crate) fn is_ended(socket: &impl AsFd) -> bool {
    getsockopt(socket, TcpInfo).map_or(true, |info| matches!(info.state, FIN_WAIT_2 | CLOSE))
}

/// Makes closing a connection send nothing.
pub(crate) fn silence(socket: &impl AsFd) {
    // Fails only on a socket that is dead.
    let _ = setsockopt(socket, sockopt::TcpRepair, &ON);
}

/// Resets a connection at once, whoever else holds its socket. What is queued either way is gone.
pub(crate) fn reset(socket: &impl AsFd) -> io::Result<()> {
    Ok(rustix::net::connect_unspec(socket)?)
}

/// Puts a connection with the guest in this slot back. Must be called in the guests' world.
pub(crate) fn on_tap(slot: Slot, checkpoint: &Checkpoint) -> io::Result<TcpStream> {
    let socket = facing::socket(slot, Type::STREAM, Protocol::TCP)?;
    room::check(&socket)?;
    checkpoint.rebuild(socket).map(TcpStream::from)
}

/// Ends a connection with the guest in this slot: with a reset, or after all that it holds is sent.
pub(crate) fn end(slot: Slot, checkpoint: Checkpoint, by_reset: bool) -> io::Result<()> {
    let stream = on_tap(slot, &checkpoint)?;
    if by_reset {
        SockRef::from(&stream).set_linger(Some(Duration::ZERO))?;
    }
    Ok(())
}

/// Takes a connection out of its socket, which is of no use any more: closed, without a word to the far
/// side. What cannot be taken is left as it was, and the caller's to end.
///
/// # Errors
/// `NotConnected` for a connection that is over, or has not begun; `InvalidData` for one with urgent
/// data on its way in, or more of it than the bounds of sockets allow.
pub(crate) fn take(socket: &impl AsFd) -> io::Result<Checkpoint> {
    // What comes from here on would be acknowledged and then forgotten.
    SockRef::from(socket).attach_filter(&[SockFilter::new(DROP_ALL, 0, 0, 0)])?;
    setsockopt(socket, sockopt::TcpRepair, &ON)?;
    match read(socket) {
        Ok(checkpoint) => {
            rustix::net::connect_unspec(socket)?;
            Ok(checkpoint)
        }
        Err(error) => {
            setsockopt(socket, sockopt::TcpRepair, &OFF_UNSAID)?;
            SockRef::from(socket).detach_filter()?;
            Err(error)
        }
    }
}

/// `BPF_RET | BPF_K`: a packet is cut to as many bytes as its operand says; none of it is left by 0.
const DROP_ALL: u16 = 0x06;

fn read(socket: &impl AsFd) -> io::Result<Checkpoint> {
    let info = getsockopt(socket, TcpInfo)?;
    if !matches!(
        info.state,
        ESTABLISHED | FIN_WAIT_1 | FIN_WAIT_2 | CLOSE_WAIT | LAST_ACK | CLOSING
    ) {
        return Err(io::ErrorKind::NotConnected.into());
    }
    let known = SockRef::from(socket);
    let (Ok(Some(local)), Ok(Some(remote))) = (
        known.local_addr().map(|address| address.as_socket_ipv4()),
        known.peer_addr().map(|address| address.as_socket_ipv4()),
    ) else {
        return Err(io::ErrorKind::NotConnected.into());
    };
    // So that an urgent byte counts like any other, and shows where it is.
    known.set_out_of_band_inline(true)?;
    let done = matches!(info.state, FIN_WAIT_1 | FIN_WAIT_2 | LAST_ACK | CLOSING);
    let mut end = queue(socket, SENT)?;
    // Our own end has a number, too.
    end = end.wrapping_sub(u32::from(done));
    let queued = peek(socket)?;
    let next_in = queue(socket, RECEIVED)?;
    let waiting = rustix::io::ioctl_fionread(socket)?;
    let unread = peek(socket)?;
    if usize::try_from(waiting) != Ok(unread.len()) {
        return Err(io::ErrorKind::InvalidData.into());
    }
    // The end of ours is counted with what is unsent until it is.
    let unsent = usize::try_from(info.unsent).unwrap_or(usize::MAX);
    let sent = queued.len().saturating_sub(unsent.saturating_sub(usize::from(done && unsent > 0)));
    let has = |option| info.options & option != 0;
    let timestamp = has(HAS_TIMESTAMPS).then(|| getsockopt(socket, Timestamp)).transpose()?;
    Ok(Checkpoint {
        local,
        remote,
        next_in,
        next_out: end,
        unread,
        queued,
        sent,
        far_done: matches!(info.state, CLOSE_WAIT | LAST_ACK | CLOSING),
        done,
        window: getsockopt(socket, RepairWindow)?,
        segment: getsockopt(socket, SegmentSize)?,
        scales: has(HAS_WINDOW_SCALE).then_some((info.scales & 0x0f, info.scales >> 4)),
        sack: has(HAS_SACK),
        timestamp,
        buffers: [known.recv_buffer_size()?, known.send_buffer_size()?],
        locked: getsockopt(socket, BufferLock)?,
        nodelay: known.tcp_nodelay()?,
    })
}

/// Turns to one of the queues: the number after its last byte.
fn queue(socket: &impl AsFd, which: u32) -> io::Result<u32> {
    setsockopt(socket, RepairQueue, &which)?;
    Ok(getsockopt(socket, QueueSeq)?)
}

/// All bytes of the queue that was turned to, which stay there.
fn peek(socket: &impl AsFd) -> io::Result<Vec<u8>> {
    let fd = std::os::fd::AsRawFd::as_raw_fd(&socket.as_fd());
    let mut room = LOOK;
    while room <= MOST {
        let mut bytes = vec![0; room];
        match recv(fd, &mut bytes, MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT) {
            Ok(length) if length < room => {
                bytes.truncate(length);
                bytes.shrink_to_fit();
                return Ok(bytes);
            }
            Err(Errno::EAGAIN) => return Ok(Vec::new()),
            // No room for one of its segments.
            Ok(_) | Err(Errno::EFAULT) => room *= 4,
            Err(error) => return Err(error.into()),
        }
    }
    Err(io::ErrorKind::InvalidData.into())
}

impl Checkpoint {
    /// The guest's bytes that it holds.
    pub(crate) fn bytes(&self) -> usize {
        self.unread.len() + self.queued.len()
    }

    /// Whether the far side has said that it is done. A socket that this is put back on never says so
    /// itself: what it has to read ends with `unread`.
    pub(crate) fn far_is_done(&self) -> bool {
        self.far_done
    }

    /// Whether the far side takes more than it has been sent.
    pub(crate) fn has_room(&self) -> bool {
        length(&self.queued) < self.window.snd_wnd
    }

    /// Whether the far side has sent what was not read.
    pub(crate) fn has_unread(&self) -> bool {
        !self.unread.is_empty()
    }

    /// Says that we are done, when it is put back.
    pub(crate) fn end(&mut self) {
        self.done = true;
    }

    /// The same without its bytes: enough to reset it when the far side runs again.
    pub(crate) fn emptied(self) -> Self {
        Self { unread: Vec::new(), queued: Vec::new(), sent: 0, done: false, ..self }
    }

    /// Puts the connection on a new socket, which faces the far side as the old one did. The far side
    /// is asked what it has; what is missing there is sent again.
    ///
    /// # Errors
    /// Those of the socket calls; nothing has been sent then unless the last of them failed.
    fn rebuild(&self, socket: Socket) -> io::Result<Socket> {
        setsockopt(&socket, sockopt::TcpRepair, &ON)?;
        let first_out = self.next_out.wrapping_sub(length(&self.queued));
        for (which, first) in
            [(RECEIVED, self.next_in.wrapping_sub(length(&self.unread))), (SENT, first_out)]
        {
            setsockopt(&socket, RepairQueue, &which)?;
            setsockopt(&socket, QueueSeq, &first)?;
        }
        socket.bind(&self.local.into())?;
        socket.connect(&self.remote.into())?;
        self.agree(&socket)?;
        let [received, written] = self.buffers;
        // For as long as they are filled; the kernel takes them twice (socket(7)).
        setsockopt(&socket, sockopt::RcvBufForce, &(received.max(4 * self.unread.len()) / 2))?;
        setsockopt(&socket, sockopt::SndBufForce, &(written.max(4 * self.queued.len()) / 2))?;
        setsockopt(&socket, RepairQueue, &RECEIVED)?;
        put(&socket, &self.unread)?;
        setsockopt(&socket, RepairQueue, &SENT)?;
        // The far side may have all of it, and what it acknowledges before it was sent counts for nothing.
        let (sent, unsent) = self.queued.split_at(self.sent.min(self.queued.len()));
        put(&socket, sent)?;
        setsockopt(&socket, RepairWindow, &self.window)?;
        setsockopt(&socket, sockopt::RcvBufForce, &(received / 2))?;
        setsockopt(&socket, BufferLock, &self.locked)?;
        socket.set_tcp_nodelay(self.nodelay)?;
        setsockopt(&socket, sockopt::TcpRepair, &OFF)?;
        put(&socket, unsent)?;
        if self.done {
            socket.shutdown(Shutdown::Write)?;
        }
        setsockopt(&socket, sockopt::SndBufForce, &(written / 2))?;
        setsockopt(&socket, BufferLock, &self.locked)?;
        Ok(socket)
    }

    /// What was negotiated when the connection began.
    fn agree(&self, socket: &Socket) -> io::Result<()> {
        let scales = self.scales.map(|(theirs, ours)| u32::from(theirs) | u32::from(ours) << 16);
        let agreed = [
            (MSS, Some(self.segment)),
            (WINDOW_SCALE, scales),
            (SACK_PERMITTED, self.sack.then_some(0)),
            (TIMESTAMPS, self.timestamp.map(|_| 0)),
        ];
        for (code, value) in agreed {
            if let Some(value) = value {
                setsockopt(socket, RepairOptions, &Negotiated { code, value })?;
            }
        }
        if let Some(timestamp) = self.timestamp {
            setsockopt(socket, Timestamp, &timestamp)?;
        }
        Ok(setsockopt(socket, IpOptions, &[])?)
    }
}

fn length(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.len()).unwrap_or(u32::MAX)
}

/// Gives bytes to a socket: in repair, to the queue that was turned to.
fn put(socket: &Socket, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        let piece = bytes.get(..PIECE).unwrap_or(bytes);
        match socket.send_with_flags(piece, nix::libc::MSG_NOSIGNAL) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(taken) => bytes = bytes.get(taken..).unwrap_or_default(),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Without its bytes, which are a guest's.
impl std::fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { local, remote, next_in, next_out, far_done, done, .. } = self;
        f.debug_struct("Checkpoint")
            .field("local", local)
            .field("remote", remote)
            .field("next_in", next_in)
            .field("next_out", next_out)
            .field("unread", &self.unread.len())
            .field("queued", &self.queued.len())
            .field("sent", &self.sent)
            .field("far_done", far_done)
            .field("done", done)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
