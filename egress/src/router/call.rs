//! Connections of ours to the ports of a guest. One that sleeps is waited for; it is not woken here.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use policy::Slot;
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;

use crate::accept;
use crate::buffers;
use crate::error::Error;
use crate::flows::Flow;
use crate::link;
use crate::router::{Router, Seat, Shared};
use crate::stream::GuestStream;

/// How long a sleeping guest that is called may take to wake.
const WAKE: Duration = Duration::from_secs(60);
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
            gate.want();
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
                Ok(socket) => TcpSocket::from_std_stream(socket),
                Err(error) => return Ok(Err(error)),
            };
            buffers::bound(&socket, call.rank());
            let to = SocketAddr::from((slot.address(), port));
            if let Ok(connected) = timeout(patience, socket.connect(to)).await {
                return Ok(connected);
            }
        }
        Ok(Err(io::ErrorKind::TimedOut.into()))
    }
}
