//! A connection under HTTP: gives back what was read before, counts bytes, knows when it was quiet
//! and what hyper has yet to write to it, and can be made to read no further.

use std::any::Any;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;

use crate::meter::Meter;
use crate::side::Gate;

/// A stream whose bytes are counted.
#[derive(Debug)]
pub(super) struct Wire<S> {
    stream: S,
    before: Bytes,
    meter: Option<Meter>,
    traffic: Arc<Traffic>,
}

/// What has passed on a wire.
#[derive(Debug)]
pub(super) struct Traffic {
    start: Instant,
    read: AtomicU64,
    written: AtomicU64,
    /// Milliseconds from `start` to the last byte.
    last: AtomicU64,
    stopped: AtomicBool,
    /// Whoever reads what is read here tells whether somebody is busy for its sake.
    looked_at: AtomicBool,
    owed: Mutex<Owed>,
}

/// What hyper has taken and not written yet.
#[derive(Debug, Default)]
struct Owed {
    some: bool,
    /// Nothing is written any more.
    over: bool,
    /// Dropped when it is written.
    until: Option<Arc<dyn Any + Send + Sync>>,
}

impl<S> Wire<S> {
    /// A wire to the guest, of which `before` was read already.
    pub(super) fn new(stream: S, before: Bytes) -> Self {
        let traffic = Traffic {
            start: Instant::now(),
            read: AtomicU64::new(0),
            written: AtomicU64::new(0),
            last: AtomicU64::new(0),
            stopped: AtomicBool::new(false),
            looked_at: AtomicBool::new(false),
            owed: Mutex::default(),
        };
        Self { stream, before, meter: None, traffic: Arc::new(traffic) }
    }

    /// A wire to a far side: what is written leaves the sandbox, what is read enters it.
    pub(super) fn metered(stream: S, meter: Meter) -> Self {
        Self { meter: Some(meter), ..Self::new(stream, Bytes::new()) }
    }

    pub(super) fn traffic(&self) -> Arc<Traffic> {
        Arc::clone(&self.traffic)
    }

    pub(super) fn into_stream(self) -> S {
        self.stream
    }

    fn count(&self, counter: &AtomicU64, bytes: usize) -> u64 {
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        if bytes > 0 {
            counter.fetch_add(bytes, Relaxed);
            let millis = self.traffic.start.elapsed().as_millis();
            self.traffic.last.store(u64::try_from(millis).unwrap_or(u64::MAX), Relaxed);
        }
        bytes
    }
}

impl Traffic {
    /// Bytes read and bytes written so far.
    pub(super) fn totals(&self) -> (u64, u64) {
        (self.read.load(Relaxed), self.written.load(Relaxed))
    }

    /// Adds what passed after the connection was no longer HTTP's.
    pub(super) fn add(&self, read: u64, written: u64) {
        self.read.fetch_add(read, Relaxed);
        self.written.fetch_add(written, Relaxed);
    }

    /// Notes that hyper takes bytes to write: of a body, or what the socket has no room for.
    pub(super) fn owe(&self) {
        let mut owed = self.owed();
        owed.some = !owed.over;
    }

    /// Whether hyper has written all it has taken. It writes a head before it reads the answer.
    pub(super) fn is_written(&self) -> bool {
        !self.owed().some
    }

    /// Keeps the account of an exchange open until all that hyper has taken is written.
    pub(super) fn keep_until_written(&self, ending: Arc<dyn Any + Send + Sync>) {
        let mut owed = self.owed();
        if owed.some {
            owed.until = Some(ending);
        }
    }

    /// Nothing is written any more.
    pub(super) fn end(&self) {
        self.written_all(true);
    }

    fn written_all(&self, over: bool) {
        let mut owed = self.owed();
        owed.some = false;
        owed.over |= over;
        let until = owed.until.take();
        drop(owed);
        // Records the end of an exchange.
        drop(until);
    }

    fn owed(&self) -> MutexGuard<'_, Owed> {
        self.owed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on what is read here says nothing of whether somebody is busy, or says it again.
    pub(super) fn look_at(&self, looked_at: bool) {
        self.looked_at.store(looked_at, Relaxed);
    }

    /// Makes the next read fail.
    pub(super) fn stop(&self) {
        self.stopped.store(true, Relaxed);
    }

    /// Returns once no byte has passed for `patience`, in which the guest was awake.
    pub(super) async fn quiet_for(&self, patience: Duration, gate: &Gate) {
        let last = || self.start + Duration::from_millis(self.last.load(Relaxed));
        gate.quiet(patience, last).await;
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Wire<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.traffic.stopped.load(Relaxed) {
            return Poll::Ready(Err(io::Error::other("it answers without end")));
        }
        let filled = buf.filled().len();
        if self.before.is_empty() {
            ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        } else {
            let length = self.before.len().min(buf.remaining());
            buf.put_slice(self.before.get(..length).unwrap_or_default());
            self.before.advance(length);
        }
        let bytes = self.count(&self.traffic.read, buf.filled().len() - filled);
        let looked_at = self.traffic.looked_at.load(Relaxed);
        self.meter.as_ref().inspect(|meter| match looked_at {
            true => meter.kept_open(0, bytes),
            false => meter.received(bytes),
        });
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Wire<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.wrote(polled)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.wrote(polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    /// Called by hyper only when it has written all it has.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.traffic.written_all(false);
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

impl<S> Wire<S> {
    fn wrote(&self, polled: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        match &polled {
            Poll::Ready(Ok(length)) => {
                let bytes = self.count(&self.traffic.written, *length);
                self.meter.as_ref().inspect(|meter| meter.sent(bytes));
            }
            Poll::Ready(Err(_)) => {}
            Poll::Pending => self.traffic.owe(),
        }
        polled
    }
}
