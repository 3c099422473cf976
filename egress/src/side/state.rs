//! What a connection to a guest is at a time: a socket, a value, or over. All changes are under one lock,
//! and each says so to those who wait.

use std::future::poll_fn;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use policy::{Revision, Slot};
use tokio::io::{Interest, Ready};
use tokio::net::TcpStream;

use crate::repair::{self, Checkpoint, Remains};
use crate::side::{Gate, Wanted};

/// What those who use a connection share with those who take its socket away.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(super) id: u64,
    pub(super) gate: Arc<Gate>,
    /// Whoever is at its other end.
    pub(super) by: Wanted,
    state: Mutex<State>,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) held: Held,
    /// The guest has said that it is done, before it slept: its socket does not know.
    pub(super) guest_done: bool,
    /// Bytes may be given to the guest.
    pub(super) delivering: bool,
    /// The last byte was the guest's: it waits for an answer.
    pub(super) asked: bool,
    /// What the far side does wakes no guest that sleeps: a rule says so, of the policy of this revision.
    pub(super) unwoken: bool,
    heeded: Revision,
    /// It is to be reset when it is closed.
    pub(super) reset: bool,
    /// Those who read, write and watch: woken when the socket is another.
    wakers: [Option<Waker>; 3],
}

#[derive(Debug)]
pub(super) enum Held {
    Open(Arc<TcpStream>),
    Kept(Box<Checkpoint>),
    /// It could not be kept, or put back.
    Lost,
    Closed,
}

/// Whom a change of the socket wakes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Who {
    Reader,
    Writer,
    Watcher,
}

impl Shared {
    pub(super) fn new(id: u64, gate: Arc<Gate>, by: Wanted, state: State) -> Self {
        Self { id, gate, by, state: Mutex::new(state) }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on bytes are given to the guest, or not.
    pub(crate) fn deliver(&self, deliver: bool) {
        let mut state = self.lock();
        state.delivering = deliver;
        if deliver {
            state.wake();
        }
    }

    /// Whether the far side may wake the guest, by a policy of this revision.
    pub(super) fn heed(&self, revision: Revision, wakes: bool) {
        let mut state = self.lock();
        if revision < state.heeded {
            return;
        }
        state.heeded = revision;
        if std::mem::replace(&mut state.unwoken, !wakes) && wakes {
            // Those who have something for the guest tell it now.
            state.wake();
        }
    }

    /// Whether the guest has acknowledged all that it was sent.
    pub(crate) fn is_settled(&self) -> bool {
        match &self.lock().held {
            Held::Open(stream) => repair::is_settled(stream),
            _ => true,
        }
    }

    pub(super) fn remains(&self) -> Option<Remains> {
        match &self.lock().held {
            Held::Kept(checkpoint) => Some(Remains::of(checkpoint, self.id)),
            _ => None,
        }
    }

    pub(crate) fn is_kept(&self) -> bool {
        matches!(self.lock().held, Held::Kept(_))
    }

    /// Takes the socket away. Whether it is kept; none if there is nothing that needs to be.
    pub(crate) fn keep(&self, gate: &Gate) -> Option<bool> {
        let mut state = self.lock();
        state.delivering = false;
        let Held::Open(stream) = &state.held else { return None };
        let kept = match repair::take(stream) {
            Ok(checkpoint) if gate.room(checkpoint.bytes()) => Some(checkpoint),
            Ok(checkpoint) => {
                gate.bury(checkpoint.emptied(), true);
                None
            }
            // It is over: those who use it see that by themselves, and no timer runs.
            Err(error) if error.kind() == io::ErrorKind::NotConnected => return None,
            Err(error) => {
                tracing::debug!(%error, "a connection is not kept");
                // Not by closing it alone: who waits for its errors holds it, too, and is told by that.
                if let Err(error) = repair::reset(stream) {
                    tracing::debug!(%error, "a connection is not reset");
                }
                None
            }
        };
        let is_kept = kept.is_some();
        state.held = kept.map_or(Held::Lost, |checkpoint| Held::Kept(Box::new(checkpoint)));
        // Those who have bytes for the guest look again whether it has room.
        state.wake();
        Some(is_kept)
    }

    /// Puts it on a new socket. Whether that worked; none if it was not kept.
    pub(crate) fn put_back(&self, slot: Slot, gate: &Gate) -> Option<bool> {
        let mut state = self.lock();
        let Held::Kept(checkpoint) = &state.held else { return None };
        let bytes = checkpoint.bytes();
        let back = repair::on_tap(slot, checkpoint).and_then(TcpStream::from_std);
        let guest_done = checkpoint.far_is_done();
        state.held = match back {
            Ok(stream) => {
                // A socket of an earlier night does not know.
                state.guest_done |= guest_done;
                Held::Open(Arc::new(stream))
            }
            Err(error) => {
                tracing::warn!(%slot, %error, "a connection is not put back");
                Held::Lost
            }
        };
        state.wake();
        let is_back = matches!(state.held, Held::Open(_));
        drop(state);
        gate.free(bytes);
        Some(is_back)
    }

    /// Gives up one that is kept.
    pub(crate) fn lose(&self) {
        let mut state = self.lock();
        if let Held::Kept(checkpoint) = &state.held {
            self.gate.free(checkpoint.bytes());
            state.held = Held::Lost;
            state.wake();
        }
    }

    /// The socket, once there is one; none if there will not be.
    pub(super) async fn opened(&self) -> Option<Arc<TcpStream>> {
        poll_fn(|cx| {
            let mut state = self.lock();
            match &state.held {
                Held::Open(stream) => Poll::Ready(Some(Arc::clone(stream))),
                Held::Kept(_) => state.wait(Who::Watcher, cx),
                Held::Lost | Held::Closed => Poll::Ready(None),
            }
        })
        .await
    }

    pub(super) fn is_current(&self, stream: &Arc<TcpStream>) -> bool {
        matches!(&self.lock().held, Held::Open(current) if Arc::ptr_eq(current, stream))
    }

    /// Returns once the socket is ready in this way, whichever it is by then.
    pub(super) async fn ready(&self, interest: Interest) -> io::Result<Ready> {
        loop {
            let Some(stream) = self.opened().await else { return Ok(Ready::ERROR) };
            let ready = stream.ready(interest).await;
            // The end of a socket that was taken away is none of the connection.
            if self.is_current(&stream) {
                return ready;
            }
        }
    }
}

impl State {
    pub(super) fn new(stream: TcpStream, delivering: bool) -> Self {
        Self {
            held: Held::Open(Arc::new(stream)),
            guest_done: false,
            delivering,
            asked: false,
            unwoken: false,
            heeded: Revision::default(),
            reset: false,
            wakers: Default::default(),
        }
    }

    pub(super) fn wait<T>(&mut self, who: Who, cx: &Context<'_>) -> Poll<T> {
        let [reader, writer, watcher] = &mut self.wakers;
        let place = match who {
            Who::Reader => reader,
            Who::Writer => writer,
            Who::Watcher => watcher,
        };
        match place {
            Some(waker) if waker.will_wake(cx.waker()) => {}
            _ => *place = Some(cx.waker().clone()),
        }
        Poll::Pending
    }

    pub(super) fn wake(&mut self) {
        self.wakers.iter_mut().filter_map(Option::take).for_each(Waker::wake);
    }

    pub(super) fn poll_readable(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &self.held {
            // There is a byte, or there will be none.
            Held::Open(_) if self.guest_done => Poll::Ready(Ok(())),
            Held::Open(stream) => match stream.poll_read_ready(cx) {
                Poll::Pending => self.wait(Who::Reader, cx),
                ready => ready,
            },
            Held::Kept(_) => self.wait(Who::Reader, cx),
            Held::Lost | Held::Closed => Poll::Ready(Ok(())),
        }
    }

    /// Whether the guest sleeps and has said what nobody has read.
    pub(super) fn has_unread(&self) -> bool {
        matches!(&self.held, Held::Kept(checkpoint) if checkpoint.has_unread())
    }

    pub(super) fn poll_writable(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &self.held {
            Held::Open(_) | Held::Kept(_) if !self.delivering => self.wait(Who::Writer, cx),
            Held::Open(stream) => match stream.poll_write_ready(cx) {
                Poll::Pending => self.wait(Who::Writer, cx),
                ready => ready,
            },
            Held::Kept(_) => self.wait(Who::Writer, cx),
            Held::Lost | Held::Closed => Poll::Ready(Ok(())),
        }
    }

    /// Does something to the bytes that have come; `WouldBlock` if there are none.
    pub(super) fn take_in(
        &mut self,
        mut act: impl FnMut(&TcpStream) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let taken = match &self.held {
            Held::Open(stream) if self.guest_done => match act(stream) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
                taken => taken,
            },
            Held::Open(stream) => stream.try_io(Interest::READABLE, || act(stream)),
            Held::Kept(_) => Err(io::ErrorKind::WouldBlock.into()),
            Held::Lost | Held::Closed => Err(io::ErrorKind::ConnectionReset.into()),
        };
        self.asked |= taken.as_ref().is_ok_and(|&bytes| bytes > 0);
        taken
    }

    /// Gives bytes to the guest; `WouldBlock` if it takes none.
    pub(super) fn give(
        &mut self,
        mut act: impl FnMut(&TcpStream) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let given = match &self.held {
            Held::Open(_) | Held::Kept(_) if !self.delivering => {
                Err(io::ErrorKind::WouldBlock.into())
            }
            Held::Open(stream) => stream.try_io(Interest::WRITABLE, || act(stream)),
            Held::Kept(_) => Err(io::ErrorKind::WouldBlock.into()),
            Held::Lost | Held::Closed => Err(io::ErrorKind::ConnectionReset.into()),
        };
        self.asked &= given.as_ref().is_err();
        given
    }
}
