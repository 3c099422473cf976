//! Connections of ours to the ports of a guest. One that sleeps is waited for; it is not woken here.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use policy::Slot;
use socket2::{SockFilter, SockRef, Socket};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::accept;
use crate::buffers;
use crate::error::Error;
use crate::flows::Flow;
use crate::link;
use crate::router::{Router, Seat, Shared};
use crate::side::Wanted;
use crate::stream::GuestStream;

/// How long a sleeping guest that is called may take to wake.
const WAKE: Duration = Duration::from_secs(60);
/// A filter of one instruction: every packet is dropped (the kernel's `networking/filter.rst`, `ret #0`).
const TAKE_NOTHING: SockFilter = SockFilter::new(0x06, 0, 0, 0);
/// How long a SYN may be unanswered before it is sent anew: the first may be lost while a tap comes
/// up, and the kernel would only repeat it after a second.
const CALL_AGAIN: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(50)];

impl Router {
    /// Connects to a port of the guest in a slot, from its gateway's address. A guest that sleeps is
    /// [`Router::wanted`] by that, and has a minute to wake.
    ///
    /// # Errors
    /// When the slot is not attached, has too many such connections, or its guest does not answer.
    pub async fn connect(&self, slot: Slot, port: u16) -> Result<GuestStream, Error> {
        let shared = &self.shared;
        let seat = |seat: &Seat| (Arc::clone(&seat.calls), Arc::clone(&seat.guest.gate));
        let (calls, gate) = shared.seats().get(&slot).map(seat).ok_or(Error::Vacant(slot))?;
        let call = calls.register().ok_or(Error::Busy(slot))?;
        let failed = |source| Error::Connect { slot, port, source };
        loop {
            gate.want(Wanted::Caller);
            let awake = tokio::select! {
                biased;
                _ = call.cut() => return Err(Error::Vacant(slot)),
                awake = timeout(WAKE, gate.awake()) => awake,
            };
            let awake = awake.map_err(|_| failed(io::ErrorKind::TimedOut.into()))?;
            match shared.call(slot, port, &call).await? {
                Ok(stream) => return Ok(GuestStream::new(stream, call, &gate)),
                Err(error) if gate.runs_since(awake) => return Err(failed(error)),
                // What was under way when the guest fell asleep says nothing about it.
                Err(_) => {}
            }
        }
    }
}

impl Shared {
    /// Calls a port of a guest that is awake: the outer failure is ours, the inner one the guest's.
    async fn call(
        &self,
        slot: Slot,
        port: u16,
        call: &Flow,
    ) -> Result<io::Result<TcpStream>, Error> {
        link::carrier(&self.world, slot, link::CARRIER_WAIT).await?;
        for patience in CALL_AGAIN.into_iter().chain([self.config.limits.connect]) {
            let socket = match self.world.run(move || accept::caller(slot)).await? {
                Ok(socket) => socket,
                Err(error) => return Ok(Err(error)),
            };
            buffers::bound(&socket, call.rank());
            let to = SocketAddr::from((slot.address(), port));
            if let Some(connected) = once(socket, to, patience).await.transpose() {
                return Ok(connected);
            }
        }
        Ok(Err(io::ErrorKind::TimedOut.into()))
    }
}

/// One SYN, and the connection that came of it; none when the guest has not answered in time.
async fn once(socket: Socket, to: SocketAddr, patience: Duration) -> io::Result<Option<TcpStream>> {
    match socket.connect(&to.into()) {
        Err(error) if error.raw_os_error() != Some(Errno::EINPROGRESS as i32) => return Err(error),
        _ => {}
    }
    let stream = TcpStream::from_std(socket.into())?;
    if timeout(patience, stream.writable()).await.is_err() && !has_answered(&stream)? {
        return Ok(None);
    }
    match stream.take_error()? {
        Some(error) => Err(error),
        None => Ok(Some(stream)),
    }
}

/// Whether the guest has answered after all. If not, its answer is not taken any more, but refused when the
/// socket is closed: to the guest, one that is closed after it would be a caller who says nothing.
fn has_answered(stream: &TcpStream) -> io::Result<bool> {
    let socket = SockRef::from(stream);
    socket.attach_filter(&[TAKE_NOTHING])?;
    match socket.peer_addr() {
        Ok(_) => socket.detach_filter().map(|()| true),
        Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests;
