//! Who is speaking, and to where: the listeners of one slot.
//!
//! Identity is the device a listener is bound to, never an address. One listener a slot, so that a
//! full accept queue is one guest's own. Must be made inside the guests' world.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::time::Duration;

use policy::Slot;
use policy::net::GATEWAY_IP;
use socket2::{Protocol, Socket, Type};
use tokio::net::{TcpListener, TcpStream};

use crate::facing;
use crate::refuse;
use crate::room;

/// Connections that wait to be accepted; further ones are retried by the guest's kernel.
const BACKLOG: i32 = 1024;
/// Pause after a connection could not be accepted.
const PAUSE: Duration = Duration::from_millis(20);

/// A connection of a guest.
#[derive(Debug)]
pub(crate) struct Incoming {
    /// It.
    pub(crate) stream: TcpStream,
    /// Where the guest aimed: the address it connected to, which is not ours.
    pub(crate) destination: SocketAddr,
}

/// The TCP listener to which the fence diverts the connections of one slot.
///
/// # Errors
/// Those of the socket calls; `ENODEV` when the tap does not exist in the calling thread's world.
pub(crate) fn listener(slot: Slot, port: u16) -> io::Result<std::net::TcpListener> {
    let socket = facing::socket(slot, Type::STREAM, Protocol::TCP)?;
    socket.set_reuse_address(true)?;
    // What is accepted has it from here (tcp(7)).
    socket.set_tcp_nodelay(true)?;
    socket.bind(&SocketAddrV4::new(Ipv4Addr::LOCALHOST, port).into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// A socket from which a port of the guest in this slot can be connected to. Transparent, because
/// the divert rule only leaves a connection alone whose socket is.
pub(crate) fn caller(slot: Slot) -> io::Result<Socket> {
    let socket = facing::socket(slot, Type::STREAM, Protocol::TCP)?;
    socket.bind(&SocketAddrV4::new(GATEWAY_IP, 0).into())?;
    Ok(socket)
}

/// The next connection, or where the next one wanted to go that had to be turned away: reset,
/// because what the process has left is not for guests. Accept fails for one connection, or for a
/// process that has nothing left at all (accept(2)); both are waited out, and only the latter is
/// worth a line in the log.
pub(crate) async fn next(listener: &TcpListener) -> Result<Incoming, SocketAddr> {
    loop {
        let error = match listener.accept().await {
            Ok((stream, _)) => match stream.local_addr() {
                Ok(destination) if room::is_reserved(&stream) => {
                    refuse::reset(stream);
                    return Err(destination);
                }
                Ok(destination) => return Ok(Incoming { stream, destination }),
                Err(error) => error,
            },
            Err(error) => error,
        };
        if room::is_exhausted(&error) {
            tracing::warn!(%error, "accept");
        }
        tokio::time::sleep(PAUSE).await;
    }
}
