//! The sockets of the relay, and single calls on them. Guests' sockets must be made in their world;
//! none ever blocks: what cannot be sent at once is lost, as datagrams are.

use std::cell::RefCell;
use std::io::{self, IoSliceMut};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::AsRawFd;

use nix::cmsg_space;
use nix::errno::Errno;
use nix::libc;
use nix::sys::socket::{
    ControlMessageOwned, MsgFlags, SockaddrIn, recvmsg, send, sendto, setsockopt, sockopt,
};
use policy::Slot;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::Interest;
use tokio::net::UdpSocket;

use crate::facing;
use crate::relay::Key;
use crate::room;

/// The largest datagram that IPv4 has room for, and a byte more.
const LARGEST: usize = 1 << 16;
/// What may wait in one socket, in bytes of payload; the kernel counts its own overhead in as much
/// again. A socket that is empty takes any datagram.
const QUEUE: usize = 64 << 10;
/// A protocol whose sockets only send, and whole packets (raw(7)).
const IPPROTO_RAW: i32 = 255;

/// What a slot has as long as it is attached.
#[derive(Debug)]
pub(crate) struct Sockets {
    /// Gets the datagrams that belong to no session yet.
    pub(crate) first: UdpSocket,
    /// Sends ICMP to the guest.
    pub(crate) teller: std::net::UdpSocket,
}

/// The same before they are in a runtime.
#[derive(Debug)]
pub(crate) struct Made(std::net::UdpSocket, std::net::UdpSocket);

impl Sockets {
    /// Makes them. Must be called in the guests' world.
    pub(crate) fn make(slot: Slot, port: u16) -> io::Result<Made> {
        let first = facing::socket(slot, Type::DGRAM, Protocol::UDP)?;
        setsockopt(&first, sockopt::Ipv4OrigDstAddr, &true)?;
        setsockopt(&first, sockopt::RxqOvfl, &1)?;
        first.set_recv_buffer_size(QUEUE)?;
        first.bind(&SocketAddrV4::new(Ipv4Addr::LOCALHOST, port).into())?;
        let teller = Socket::new(Domain::IPV4, Type::RAW, Some(IPPROTO_RAW.into()))?;
        teller.set_nonblocking(true)?;
        teller.bind_device(Some(slot.tap().as_bytes()))?;
        Ok(Made(first.into(), teller.into()))
    }
}

impl TryFrom<Made> for Sockets {
    type Error = io::Error;

    fn try_from(Made(first, teller): Made) -> io::Result<Self> {
        Ok(Self { first: UdpSocket::from_std(first)?, teller })
    }
}

/// A session's socket towards the guest: it has the address that the guest sends to, and hears that
/// guest's one port only. The fence hands it what comes from there. Must be made in the guests' world.
pub(crate) fn near(slot: Slot, key: Key) -> io::Result<std::net::UdpSocket> {
    let socket = facing::socket(slot, Type::DGRAM, Protocol::UDP)?;
    room::check(&socket)?;
    // Each port of a guest that sends to the same place has its own.
    socket.set_reuse_address(true)?;
    setsockopt(&socket, sockopt::RxqOvfl, &1)?;
    socket.set_recv_buffer_size(QUEUE)?;
    socket.bind(&key.to.into())?;
    socket.connect(&SocketAddrV4::new(slot.address(), key.source).into())?;
    Ok(socket.into())
}

/// A datagram that no session's socket took.
#[derive(Debug)]
pub(crate) struct Received {
    pub(crate) key: Key,
    pub(crate) payload: Vec<u8>,
    /// How many were lost on this socket before it, in all.
    pub(crate) lost: u32,
}

/// The next datagram of a slot that belongs to no session's own socket.
pub(crate) async fn receive(first: &UdpSocket) -> io::Result<Received> {
    first
        .async_io(Interest::READABLE, || {
            with_buffer(|buffer| {
                let mut control = cmsg_space!(libc::sockaddr_in, u32);
                let mut parts = [IoSliceMut::new(buffer)];
                let message = recvmsg::<SockaddrIn>(
                    first.as_raw_fd(),
                    &mut parts,
                    Some(&mut control),
                    MsgFlags::MSG_DONTWAIT,
                )?;
                let (mut to, mut lost) = (None, 0);
                for control in message.cmsgs()? {
                    match control {
                        ControlMessageOwned::Ipv4OrigDstAddr(at) => to = Some(SockaddrIn::from(at)),
                        ControlMessageOwned::RxqOvfl(count) => lost = count,
                        _ => {}
                    }
                }
                let (Some(from), Some(to)) = (message.address, to) else {
                    return Err(io::ErrorKind::InvalidData.into());
                };
                let to = SocketAddrV4::new(to.ip(), to.port());
                let length = message.bytes;
                let payload = buffer.get(..length).unwrap_or_default().to_vec();
                Ok(Received { key: Key { source: from.port(), to }, payload, lost })
            })
        })
        .await
}

/// What one turn of moving datagrams did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Moved {
    /// Datagrams that were sent on.
    pub(crate) datagrams: u64,
    /// Their payload bytes.
    pub(crate) bytes: u64,
    /// Datagrams that could not be sent on.
    pub(crate) unsent: u64,
    /// Datagrams that were lost before they were read, over the life of the socket; 0: none new.
    pub(crate) missed: u32,
    /// Whether nothing is left to read.
    pub(crate) drained: bool,
}

/// Sends on what waits in `from`, at most so many datagrams, as long as `may`.
pub(crate) fn relay(from: &UdpSocket, to: &UdpSocket, most: u64, may: impl Fn() -> bool) -> Moved {
    let mut moved = Moved::default();
    with_buffer(|buffer| {
        let mut control = cmsg_space!(u32);
        while moved.datagrams + moved.unsent < most {
            let received = from.try_io(Interest::READABLE, || {
                let mut parts = [IoSliceMut::new(buffer)];
                let (fd, flags) = (from.as_raw_fd(), MsgFlags::MSG_DONTWAIT);
                let message = recvmsg::<()>(fd, &mut parts, Some(&mut control), flags)?;
                let missed = message.cmsgs()?.find_map(|control| match control {
                    ControlMessageOwned::RxqOvfl(count) => Some(count),
                    _ => None,
                });
                Ok((message.bytes, missed))
            });
            match received {
                Ok((length, missed)) => {
                    moved.missed = missed.unwrap_or(moved.missed);
                    match buffer.get(..length) {
                        Some(payload) if may() && push(to, payload) => {
                            moved.datagrams += 1;
                            moved.bytes += u64::try_from(length).unwrap_or_default();
                        }
                        _ => moved.unsent += 1,
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    moved.drained = true;
                    return;
                }
                // What was said about an earlier datagram; it is in the queue of errors, too.
                Err(_) => moved.unsent += 1,
            }
        }
    });
    moved
}

/// Sends one datagram, if there is room for it now. A socket first gives back what was said about an
/// earlier one; then it is tried again.
pub(crate) fn push(to: &UdpSocket, payload: &[u8]) -> bool {
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    let once = || send(to.as_raw_fd(), payload, flags);
    match once() {
        Ok(_) => true,
        Err(Errno::EAGAIN | Errno::ENOBUFS) => false,
        Err(_) => once().is_ok(),
    }
}

/// The type and code of the next ICMP error that came for this socket; an error of the host itself
/// is skipped as (0, 0). None where there is none left.
pub(crate) fn error(far: &UdpSocket) -> Option<(u8, u8)> {
    let read = far.try_io(Interest::ERROR, || {
        let mut buffer = [0; 64];
        let mut control = cmsg_space!(libc::sock_extended_err, libc::sockaddr_in, u32);
        let mut parts = [IoSliceMut::new(&mut buffer)];
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_ERRQUEUE;
        let message =
            recvmsg::<SockaddrIn>(far.as_raw_fd(), &mut parts, Some(&mut control), flags)?;
        Ok(message.cmsgs()?.find_map(|control| match control {
            ControlMessageOwned::Ipv4RecvErr(error, _)
                if error.ee_origin == libc::SO_EE_ORIGIN_ICMP =>
            {
                Some((error.ee_type, error.ee_code))
            }
            _ => None,
        }))
    });
    read.ok().map(Option::unwrap_or_default)
}

/// Sends a whole packet to the guest.
pub(crate) fn tell(teller: &std::net::UdpSocket, slot: Slot, packet: &[u8]) -> io::Result<()> {
    let guest = SockaddrIn::from(SocketAddrV4::new(slot.address(), 0));
    sendto(teller.as_raw_fd(), packet, &guest, MsgFlags::MSG_DONTWAIT)?;
    Ok(())
}

/// Lends the calling thread's buffer: a session has none of its own, however many there are.
fn with_buffer<T>(act: impl FnOnce(&mut [u8]) -> T) -> T {
    thread_local! {
        static BUFFER: RefCell<Box<[u8]>> = RefCell::new(vec![0; LARGEST].into_boxed_slice());
    }
    BUFFER.with_borrow_mut(|buffer| act(buffer))
}
