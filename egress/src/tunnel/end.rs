//! The two ends of a tunnel, as its pumps see them: the far side, which is always there, and the guest,
//! which may sleep. Whatever is done to their bytes is done here or not at all.

use std::io;
use std::net::Shutdown;
use std::task::{Context, Poll};

use rustix::net::RecvFlags;
use socket2::SockRef;
use tokio::io::Interest;
use tokio::net::TcpStream;

use crate::side::{GuestSide, receive};
use crate::tunnel::frames::Duplex;

/// What a sink has taken.
pub(super) enum Passed<'a> {
    Seen(&'a [u8]),
    /// In the kernel.
    Spliced(u64),
    /// Bytes of the source that were answered in the place of the sink, and those of the answer.
    Answered {
        taken: u64,
        said: u64,
    },
}

impl Passed<'_> {
    /// How many bytes of the source.
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::Seen(bytes) => bytes.len() as u64,
            Self::Spliced(bytes) | Self::Answered { taken: bytes, .. } => *bytes,
        }
    }

    /// The bytes themselves, where they passed through our hands.
    pub(super) fn seen(&self) -> Option<&[u8]> {
        match self {
            Self::Seen(bytes) => Some(bytes),
            Self::Spliced(_) | Self::Answered { .. } => None,
        }
    }
}

/// One end. What is done to its socket must not ask the runtime whether it is ready.
pub(super) trait End: Sync {
    fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>>;
    fn poll_writable(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>>;
    /// Does something to the bytes that have come from it; `WouldBlock` if there are none.
    fn take_in(&self, act: impl FnMut(&TcpStream) -> io::Result<usize>) -> io::Result<usize>;
    /// Gives it bytes; `WouldBlock` if it takes none now.
    fn give(&self, act: impl FnMut(&TcpStream) -> io::Result<usize>) -> io::Result<usize>;
    /// Says that there is no more for it.
    fn end(&self);

    /// Whether bytes may be taken in for it.
    fn takes(&self) -> bool {
        true
    }

    /// Returns once they may, or `from` turns out to have nothing for it; the error that `from` came to
    /// meanwhile, which is told once.
    async fn taking(
        &self,
        _from: &impl End,
        _frames: Option<&Duplex>,
        _count: &(impl Fn(Passed<'_>) + Sync),
    ) -> io::Result<()> {
        Ok(())
    }
}

impl End for TcpStream {
    fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_read_ready(cx)
    }

    fn poll_writable(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_write_ready(cx)
    }

    fn take_in(&self, mut act: impl FnMut(&Self) -> io::Result<usize>) -> io::Result<usize> {
        self.try_io(Interest::READABLE, || act(self))
    }

    fn give(&self, mut act: impl FnMut(&Self) -> io::Result<usize>) -> io::Result<usize> {
        self.try_io(Interest::WRITABLE, || act(self))
    }

    fn end(&self) {
        // Fails only when it is already gone, which the other direction reports.
        let _ = SockRef::from(self).shutdown(Shutdown::Write);
    }
}

impl End for GuestSide {
    fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Self::poll_readable(self, cx)
    }

    fn poll_writable(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Self::poll_writable(self, cx)
    }

    fn take_in(&self, act: impl FnMut(&TcpStream) -> io::Result<usize>) -> io::Result<usize> {
        Self::take_in(self, act)
    }

    fn give(&self, act: impl FnMut(&TcpStream) -> io::Result<usize>) -> io::Result<usize> {
        Self::give(self, act)
    }

    fn end(&self) {
        Self::end(self);
    }

    fn takes(&self) -> bool {
        Self::takes(self)
    }

    /// What has come stays where it is: the far side's window is its bound.
    async fn taking(
        &self,
        from: &impl End,
        frames: Option<&Duplex>,
        count: &(impl Fn(Passed<'_>) + Sync),
    ) -> io::Result<()> {
        if let Some(frames) = frames {
            return frames.asleep(self, from, count).await;
        }
        let mut came = Ok(());
        while !Self::takes(self) {
            if came.is_ok() {
                match from.take_in(|stream| receive(stream, &mut [0], RecvFlags::PEEK)) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                    Ok(1..) => self.bytes_came(),
                    Ok(0) => self.end_came(),
                    Err(error) => came = Err(error),
                }
            }
            if came.is_err() {
                // Each time: the policy may have come to say otherwise.
                self.end_came();
            }
            self.turned().await;
        }
        came
    }
}
