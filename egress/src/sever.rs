//! Ends what the kernel still holds of a slot's connections after all of ours are closed.
//!
//! A connection that was closed with bytes queued lives on without an owner until they are
//! acknowledged, and the slot's next guest would be sent them. Found and destroyed through the
//! kernel's socket diagnosis (`sock_diag(7)`), by the slot's address, in the guests' world only.

use std::io;

use netlink_sys::protocols::NETLINK_SOCK_DIAG;
use netlink_sys::{Socket, SocketAddr};
use nix::errno::Errno;
use nix::libc::{
    AF_INET, IPPROTO_TCP, NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR,
};
use policy::Slot;

use crate::error::Error;
use crate::world::World;

/// Message types of `linux/sock_diag.h`.
const BY_FAMILY: u16 = 20;
const DESTROY: u16 = 21;
/// Attribute and operation of `linux/inet_diag.h`: a filter program; compare the far address.
const BYTECODE: u16 = 1;
const FAR_ADDRESS: u8 = 8;
/// Every TCP state, by the bits of `linux/tcp_states.h`.
pub(crate) const STATES: u32 = 0x1fff;
/// Those of connections that have not begun, or that have an end and may have no owner any more.
pub(crate) const ENDING: u32 = STATES & !(1 << 1 | 1 << 7 | 1 << 8 | 1 << 10);
/// Those of connections with an end of ours that the guest has not acknowledged.
pub(crate) const UNSAID: u32 = 1 << 4 | 1 << 9 | 1 << 11;
/// Length of a message header, and of the identity of a socket: ports, addresses, device, cookie.
const HEADER: usize = 16;
pub(crate) const IDENTITY: usize = 48;

/// Destroys every TCP socket in one of these states whose far side is the guest in this slot; says
/// how many.
///
/// # Errors
/// When the kernel cannot be asked.
pub(crate) async fn sever(world: &World, slot: Slot, states: u32) -> Result<usize, Error> {
    let severed = world.run(move || destroy_all(slot, states)).await?;
    severed.map_err(|source| Error::Socket { what: "end of the connections", slot, source })
}

/// How many TCP sockets in one of these states there are whose far side is the guest in this slot.
///
/// # Errors
/// When the kernel cannot be asked.
pub(crate) async fn count(world: &World, slot: Slot, states: u32) -> Result<usize, Error> {
    let counted = world.run(move || {
        let socket = Socket::new(NETLINK_SOCK_DIAG)?;
        socket.connect(&SocketAddr::new(0, 0))?;
        list(&socket, slot, states).map(|found| found.len())
    });
    counted.await?.map_err(|source| Error::Socket { what: "list of connections", slot, source })
}

fn destroy_all(slot: Slot, states: u32) -> io::Result<usize> {
    let socket = Socket::new(NETLINK_SOCK_DIAG)?;
    socket.connect(&SocketAddr::new(0, 0))?;
    let mut severed = 0;
    for identity in list(&socket, slot, states)? {
        let request = request(DESTROY, NLM_F_ACK, AF_INET, STATES, &identity, &[]);
        socket.send(&request, 0)?;
        match answers(&socket)?.first().map(|(_, body)| errno(body)) {
            Some(0) => severed += 1,
            // It ended by itself meanwhile.
            Some(gone) if gone == Errno::ENOENT as i32 => {}
            Some(errno) => return Err(io::Error::from_raw_os_error(errno)),
            None => return Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
    Ok(severed)
}

/// The identities of the slot's sockets.
fn list(socket: &Socket, slot: Slot, states: u32) -> io::Result<Vec<[u8; IDENTITY]>> {
    let filter = filter(slot);
    let request = request(BY_FAMILY, NLM_F_DUMP, AF_INET, states, &[0; IDENTITY], &filter);
    socket.send(&request, 0)?;
    let mut found = Vec::new();
    loop {
        for (kind, body) in answers(socket)? {
            match i32::from(kind) {
                NLMSG_DONE => return Ok(found),
                NLMSG_ERROR => return Err(io::Error::from_raw_os_error(errno(&body))),
                _ => found.extend(body.get(4..).and_then(|body| body.first_chunk().copied())),
            }
        }
    }
}

/// A question about one socket, whatever its state.
pub(crate) fn about(family: i32, identity: &[u8; IDENTITY]) -> Vec<u8> {
    request(BY_FAMILY, 0, family, STATES, identity, &[])
}

/// `struct inet_diag_req_v2` behind a netlink header, and one attribute.
fn request(
    kind: u16,
    flags: i32,
    family: i32,
    states: u32,
    identity: &[u8; IDENTITY],
    attribute: &[u8],
) -> Vec<u8> {
    let length = HEADER + 8 + IDENTITY + attribute.len();
    let flags = u16::try_from(NLM_F_REQUEST | flags).unwrap_or_default();
    let mut out = Vec::with_capacity(length);
    out.extend(u32::try_from(length).unwrap_or_default().to_ne_bytes());
    out.extend(kind.to_ne_bytes());
    out.extend(flags.to_ne_bytes());
    out.extend([0; 8]);
    out.extend([family, IPPROTO_TCP, 0, 0].map(|n| u8::try_from(n).unwrap_or_default()));
    out.extend(states.to_ne_bytes());
    out.extend(identity);
    out.extend(attribute);
    out
}

/// One operation with its operand: on a match the program ends exactly (16 bytes on), which accepts
/// the socket; otherwise it jumps past its end, which does not.
fn filter(slot: Slot) -> Vec<u8> {
    let mut out = Vec::with_capacity(20);
    out.extend(20u16.to_ne_bytes());
    out.extend(BYTECODE.to_ne_bytes());
    out.extend([FAR_ADDRESS, 16]);
    out.extend(20u16.to_ne_bytes());
    out.extend([u8::try_from(AF_INET).unwrap_or_default(), 32, 0, 0]);
    out.extend((-1i32).to_ne_bytes());
    out.extend(slot.address().octets());
    out
}

/// The messages of one datagram: type and body.
pub(crate) fn answers(socket: &Socket) -> io::Result<Vec<(u16, Vec<u8>)>> {
    let mut datagram = Vec::with_capacity(64 * 1024);
    socket.recv(&mut datagram, 0)?;
    let mut rest = datagram.as_slice();
    let mut found = Vec::new();
    while let Some((length, kind)) = head(rest) {
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let Some(body) = rest.get(HEADER..length) else { break };
        found.push((kind, body.to_vec()));
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(found)
}

fn head(message: &[u8]) -> Option<(u32, u16)> {
    let length = message.first_chunk().copied().map(u32::from_ne_bytes)?;
    let kind = message.get(4..)?.first_chunk().copied().map(u16::from_ne_bytes)?;
    Some((length, kind))
}

/// The error number of an acknowledgement, 0 for success.
pub(crate) fn errno(body: &[u8]) -> i32 {
    body.first_chunk().copied().map_or(0, i32::from_ne_bytes).saturating_neg()
}
