//! Sockets that face one guest: made in the guests' world, bound to a tap, with whatever local address its
//! guest aims at. Nothing else reaches a guest, and nothing that they send goes elsewhere.

use std::io;

use policy::Slot;
use socket2::{Domain, Protocol, Socket, Type};

/// A non-blocking socket that sends and receives on this slot's tap only, with any local address.
pub(crate) fn socket(slot: Slot, kind: Type, protocol: Protocol) -> io::Result<Socket> {
    let socket = Socket::new(Domain::IPV4, kind, Some(protocol))?;
    socket.set_nonblocking(true)?;
    socket.set_ip_transparent_v4(true)?;
    socket.bind_device(Some(slot.tap().as_bytes()))?;
    Ok(socket)
}
