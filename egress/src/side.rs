//! A connection of ours to a guest. The guest may fall asleep under it: its socket is a value then, and
//! what is asked of it waits. To whoever uses it, it is one connection from beginning to end.
//!
//! Its bytes are taken and given under a lock, so that a byte is either in the value or has been used.
//! While the guest sleeps nothing is read from it, nothing is given to it, and no time passes.

mod kept;
mod gate;
mod state;
mod store;

use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::net::Shutdown;
use std::pin::Pin;
use std::sync::{Arc, MutexGuard};
use std::task::{Context, Poll};
use std::time::Duration;

use nix::libc;
use rustix::net::RecvFlags;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;

use crate::closing;
use crate::repair;
pub(crate) use crate::side::gate::Gate;
pub use crate::side::gate::Wanted;
pub(crate) use crate::side::kept::Kept;
use crate::side::state::{Held, Shared, State, Who};
pub(crate) use crate::side::store::Store;

/// What the audit says of a connection that could not be kept.
pub(crate) const LOST: &str = "it could not be kept while the sandbox slept";

/// A connection to a guest. Closed when it is dropped, or when the guest wakes.
#[derive(Debug)]
pub struct GuestSide {
    shared: Arc<Shared>,
}

/// Sees a connection end, and does not keep it open.
#[derive(Debug)]
pub(crate) struct Watcher(Arc<Shared>);

impl GuestSide {
    /// A connection of the guest behind this gate with a far side, by the number of its audit records.
    pub(crate) fn new(stream: TcpStream, gate: &Arc<Gate>, id: u64) -> Self {
        Self::with(Wanted::Data, stream, gate, id)
    }

    /// A connection with whoever is at its other end.
    pub(crate) fn with(by: Wanted, stream: TcpStream, gate: &Arc<Gate>, id: u64) -> Self {
        let shared = gate.admit(id, |delivering| {
            Arc::new(Shared::new(id, Arc::clone(gate), by, State::new(stream, delivering)))
        });
        Self { shared }
    }

    pub(crate) fn gate(&self) -> &Arc<Gate> {
        &self.shared.gate
    }

    pub(crate) fn watcher(&self) -> Watcher {
        Watcher(Arc::clone(&self.shared))
    }

    /// To be called by who has room for what the guest says.
    pub(crate) fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut state = self.shared.lock();
        match state.poll_readable(cx) {
            Poll::Pending => self.silent(state),
            ready => ready,
        }
    }

    /// Somebody has room for what the guest says. What it said before it fell asleep wakes it: no socket
    /// gives that away, and the guest may wait for its room.
    fn silent<T>(&self, state: MutexGuard<'_, State>) -> Poll<T> {
        let is_left = state.has_unread() && !state.unwoken;
        drop(state);
        if is_left {
            self.shared.gate.want(self.shared.by);
        }
        Poll::Pending
    }

    /// To be called by who has bytes for the guest.
    pub(crate) fn poll_writable(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = self.shared.lock().poll_writable(cx);
        if polled.is_pending() {
            self.bytes_came();
        }
        polled
    }

    /// Does something to the bytes that have come; `WouldBlock` if there are none. It must not ask
    /// the runtime whether there are.
    pub(crate) fn take_in(
        &self,
        act: impl FnMut(&TcpStream) -> io::Result<usize>,
    ) -> io::Result<usize> {
        self.shared.lock().take_in(act)
    }

    /// Gives bytes to the guest; `WouldBlock` if it takes none now.
    pub(crate) fn give(
        &self,
        act: impl FnMut(&TcpStream) -> io::Result<usize>,
    ) -> io::Result<usize> {
        self.shared.lock().give(act)
    }

    /// Reads what there is; nothing at the end. A short read does not mean that no more is there: the
    /// kernel stops at an urgent byte.
    pub(crate) async fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            poll_fn(|cx| self.poll_readable(cx)).await?;
            match self.take_in(|stream| receive(stream, buffer, RecvFlags::empty())) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => return done,
            }
        }
    }

    /// Returns once there is a byte to read, or there will be none.
    pub(crate) async fn spoken(&self) {
        loop {
            let ready = poll_fn(|cx| self.poll_readable(cx)).await;
            let mut state = self.shared.lock();
            let asked = state.asked;
            let peeked = state.take_in(|stream| receive(stream, &mut [0], RecvFlags::PEEK));
            state.asked = asked;
            match peeked {
                Err(error) if ready.is_ok() && error.kind() == io::ErrorKind::WouldBlock => {}
                _ => return,
            }
        }
    }

    /// Whether the guest may be given bytes now.
    pub(crate) fn takes(&self) -> bool {
        let state = self.shared.lock();
        state.delivering || matches!(state.held, Held::Lost)
    }

    /// Returns once something about it may have changed.
    pub(crate) async fn turned(&self) {
        let mut waited = false;
        poll_fn(|cx| match std::mem::replace(&mut waited, true) {
            true => Poll::Ready(()),
            false => self.shared.lock().wait(Who::Writer, cx),
        })
        .await;
    }

    /// Bytes have come for the guest. One that has no room for them is not woken by them, and none by
    /// those of a far side that a rule does not let wake it.
    pub(crate) fn bytes_came(&self) {
        let state = self.shared.lock();
        if state.delivering || state.unwoken {
            return;
        }
        let has_room = match &state.held {
            Held::Open(stream) => repair::is_settled(stream),
            Held::Kept(checkpoint) => checkpoint.has_room(),
            Held::Lost | Held::Closed => false,
        };
        drop(state);
        if has_room {
            self.shared.gate.want(self.shared.by);
        }
    }

    /// A far side has ended, and the guest cannot be told now. Wakes it only if it waits for an answer.
    pub(crate) fn end_came(&self) {
        let state = self.shared.lock();
        let wakes = state.asked && !state.unwoken;
        drop(state);
        if wakes {
            self.shared.gate.want(self.shared.by);
        }
    }

    /// Says that we are done.
    pub(crate) fn end(&self) {
        match &mut self.shared.lock().held {
            // Fails only on a connection that is gone, which its reader sees.
            Held::Open(stream) => _ = SockRef::from(&**stream).shutdown(Shutdown::Write),
            Held::Kept(checkpoint) => checkpoint.end(),
            Held::Lost | Held::Closed => {}
        }
    }

    /// Makes closing it a reset that forgets what is queued.
    pub(crate) fn reset_on_close(&self) {
        self.shared.lock().reset = true;
    }

    /// Ends it with a reset, and throws away what is still queued on it.
    pub(crate) fn reset(self) {
        self.reset_on_close();
    }

    /// Whether it is over because it could not be kept.
    pub(crate) fn is_lost(&self) -> bool {
        matches!(self.shared.lock().held, Held::Lost)
    }

    /// Returns once the guest has reset it, or is lost.
    pub(crate) async fn failed(&self) {
        let _ = self.shared.ready(Interest::ERROR).await;
    }

    /// Returns once the guest has acknowledged all that was sent, our end included, or has reset the
    /// connection; see `closing`. Both sides must have said that they are done.
    pub(crate) async fn acknowledged(&self) {
        while let Some(stream) = self.shared.opened().await {
            let guest_done = self.shared.lock().guest_done;
            if !guest_done {
                closing::acknowledged(&stream).await;
            } else if repair::is_ended(&stream) {
                // Its socket waits for an end that has come long ago.
                repair::silence(&stream);
                return;
            } else {
                tokio::time::sleep(closing::PAUSE).await;
                continue;
            }
            if self.shared.is_current(&stream) {
                return;
            }
        }
    }
}

impl Watcher {
    /// Returns once the guest has sent its last byte, or has reset the connection: whether the latter.
    pub(crate) async fn ended(&self) -> bool {
        if self.0.lock().guest_done {
            return false;
        }
        // The end of what the guest sends shows here too, what it sends does not.
        let ended = self.0.ready(Interest::PRIORITY | Interest::ERROR).await;
        !ended.is_ok_and(|ready| !ready.is_error() && !ready.is_write_closed())
    }

    /// Returns once the guest has reset the connection.
    pub(crate) async fn failed(&self) {
        let _ = self.0.ready(Interest::ERROR).await;
    }
}

/// Receives without asking the runtime.
pub(crate) fn receive(
    stream: &TcpStream,
    buffer: &mut [u8],
    flags: RecvFlags,
) -> io::Result<usize> {
    Ok(rustix::net::recv(stream, buffer, flags)?.0)
}

/// Sends without asking the runtime.
pub(crate) fn send(stream: &TcpStream, bytes: &[u8]) -> io::Result<usize> {
    SockRef::from(stream).send_with_flags(bytes, libc::MSG_NOSIGNAL)
}

/// A connection of no slot, whose far side never sleeps.
impl From<TcpStream> for GuestSide {
    fn from(stream: TcpStream) -> Self {
        Self::new(stream, &Gate::new(Store::new(1).share(None)), 0)
    }
}

impl Drop for GuestSide {
    fn drop(&mut self) {
        let gate = &self.shared.gate;
        let mut state = self.shared.lock();
        let left = match std::mem::replace(&mut state.held, Held::Closed) {
            Held::Open(stream) if state.reset => {
                let _ = SockRef::from(&*stream).set_linger(Some(Duration::ZERO));
                None
            }
            Held::Kept(checkpoint) if state.reset => {
                gate.free(checkpoint.bytes());
                Some((checkpoint.emptied(), true))
            }
            Held::Kept(checkpoint) => Some((*checkpoint, false)),
            _ => None,
        };
        gate.forget(self.shared.id, left);
    }
}

impl AsyncRead for GuestSide {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut state = self.shared.lock();
        loop {
            if state.poll_readable(cx)?.is_pending() {
                return self.silent(state);
            }
            let (room, before) = (buf.remaining(), buf.filled().len());
            let taken = if state.guest_done {
                let fresh = buf.initialize_unfilled();
                let taken = state.take_in(|stream| receive(stream, fresh, RecvFlags::empty()));
                taken.inspect(|&length| buf.advance(length))
            } else {
                state.take_in(|stream| {
                    let length = stream.try_read_buf(buf)?;
                    // There is no more for now, as far as a short read says: the next need not ask.
                    let is_short = (1..room).contains(&length);
                    if is_short { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(length) }
                })
            };
            state.asked |= buf.filled().len() > before;
            match taken {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if buf.filled().len() > before {
                        return Poll::Ready(Ok(()));
                    }
                }
                taken => return Poll::Ready(taken.map(drop)),
            }
        }
    }
}

impl GuestSide {
    fn poll_give(
        &self,
        cx: &mut Context<'_>,
        mut act: impl FnMut(&TcpStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        let mut state = self.shared.lock();
        loop {
            if state.poll_writable(cx)?.is_pending() {
                drop(state);
                self.bytes_came();
                return Poll::Pending;
            }
            match state.give(&mut act) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                given => return Poll::Ready(given),
            }
        }
    }
}

impl AsyncWrite for GuestSide {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_give(cx, |stream| stream.try_write(buf))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_give(cx, |stream| stream.try_write_vectored(bufs))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.end();
        Poll::Ready(Ok(()))
    }
}
