//! A connection of ours to a guest's port, which ends when the guest's slot is detached.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_util::sync::WaitForCancellationFutureOwned;

use crate::flows::Flow;
use crate::side::{Gate, GuestSide, Wanted};

/// A connection to a guest's port. Ends with `ConnectionReset` when the slot is detached; what is
/// still queued on it then is thrown away, so that the slot's next guest does not get it.
#[derive(Debug)]
pub struct GuestStream {
    stream: GuestSide,
    /// One wait for the reading and one for the writing task, which may be two.
    cut: [Pin<Box<WaitForCancellationFutureOwned>>; 2],
    flow: Flow,
}

#[derive(Clone, Copy)]
enum Direction {
    Reading,
    Writing,
}

impl GuestStream {
    pub(crate) fn new(stream: TcpStream, flow: Flow, gate: &Arc<Gate>) -> Self {
        // Fails only on a socket that is already dead, which its first use then reports.
        let _ = stream.set_nodelay(true);
        let cut = [Box::pin(flow.signal()), Box::pin(flow.signal())];
        Self { stream: GuestSide::with(Wanted::Caller, stream, gate, flow.id()), cut, flow }
    }

    /// The error once it is cut; until then the task of this direction is woken by that too.
    fn check(&mut self, direction: Direction, cx: &mut Context<'_>) -> io::Result<()> {
        let [reading, writing] = &mut self.cut;
        let wait = match direction {
            Direction::Reading => reading,
            Direction::Writing => writing,
        };
        if self.flow.was_cut().is_none() && wait.as_mut().poll(cx).is_pending() {
            return Ok(());
        }
        self.stream.reset_on_close();
        Err(io::ErrorKind::ConnectionReset.into())
    }
}

impl AsyncRead for GuestStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check(Direction::Reading, cx)?;
        let before = buf.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(cx, buf);
        if buf.filled().len() > before {
            self.flow.touch();
        }
        polled
    }
}

impl AsyncWrite for GuestStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check(Direction::Writing, cx)?;
        let polled = Pin::new(&mut self.stream).poll_write(cx, buf);
        if matches!(polled, Poll::Ready(Ok(1..))) {
            self.flow.touch();
        }
        polled
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check(Direction::Writing, cx)?;
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check(Direction::Writing, cx)?;
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
