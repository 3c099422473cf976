//! What stands between the guest's bytes and the library that reads its requests: nothing passes
//! that `framing` cannot read in exactly one way, and not a byte behind a flaw.
//!
//! A flaw in a head becomes the last request of the connection, in its turn, to be answered as any
//! other. What each request was read as waits here to be compared with what the library made of it.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};

use bytes::{Bytes, BytesMut};
use http::request::Parts;
use http::{StatusCode, Version};
use hyper::body::Body as _;
use hyper::body::Incoming;
use policy::Code;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::framing::{Body, Flaw, Head, HeadReader, Length};
use crate::http::head::Fault;
use crate::http::wire::{Traffic, Wire};
use crate::side::GuestSide;

/// What the library reads in place of a head with a flaw. Never sent, never judged.
const STAND_IN: &[u8] = b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n";

/// The guest's side of a connection.
#[derive(Debug)]
pub(super) struct Screen {
    wire: Wire<GuestSide>,
    /// The longest head, in bytes.
    most: usize,
    state: State,
    /// Read, and not looked at to the end.
    held: BytesMut,
    /// Looked at, and not taken yet.
    passed: Bytes,
    notes: Arc<Notes>,
}

#[derive(Debug)]
enum State {
    Head(HeadReader),
    Body(Body, Head),
    /// What comes next is of another protocol, or a request: it waits for the answer.
    Waiting,
    /// Nothing more is let in.
    Over,
}

/// What was read of the requests that have not been served yet.
#[derive(Debug, Default)]
pub(super) struct Notes(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    read: VecDeque<Result<Head, Flaw>>,
    /// The answer to an upgrade is out, and was no.
    resumed: bool,
    waker: Option<Waker>,
}

impl Screen {
    pub(super) fn new(wire: Wire<GuestSide>, most: usize) -> Self {
        Self {
            wire,
            most,
            state: State::Head(HeadReader::bounded(most)),
            held: BytesMut::new(),
            passed: Bytes::new(),
            notes: Arc::default(),
        }
    }

    pub(super) fn notes(&self) -> Arc<Notes> {
        Arc::clone(&self.notes)
    }

    pub(super) fn traffic(&self) -> Arc<Traffic> {
        self.wire.traffic()
    }

    /// The connection, and what was read of it and not let in.
    pub(super) fn into_parts(self) -> (GuestSide, Bytes) {
        (self.wire.into_stream(), self.held.freeze())
    }

    /// Goes on after a message: with the next, or not.
    fn after(&mut self, head: Head) {
        self.state = match head {
            Head { last: true, .. } => State::Over,
            Head { upgrade: true, .. } => State::Waiting,
            _ => State::Head(HeadReader::bounded(self.most)),
        };
    }

    fn spoil(&mut self, flaw: Flaw) {
        self.notes.lock().read.push_back(Err(flaw));
        self.held = BytesMut::new();
        self.passed = Bytes::from_static(STAND_IN);
        self.state = State::Over;
    }

    /// Looks at what is held. Whether that settled anything.
    fn look(&mut self) -> io::Result<bool> {
        match &mut self.state {
            State::Head(reader) if !self.held.is_empty() => match reader.read(&self.held) {
                Ok(None) => return Ok(false),
                Ok(Some(head)) => {
                    self.notes.read(head);
                    let mut whole = self.held.split_to(head.end.min(self.held.len()));
                    self.passed = whole.split_off(head.blank.min(whole.len())).freeze();
                    match Body::new(head.length) {
                        Some(body) => self.state = State::Body(body, head),
                        None => self.after(head),
                    }
                }
                Err(flaw) => self.spoil(flaw),
            },
            State::Body(body, head) if !self.held.is_empty() => {
                let head = *head;
                let used = body.read(&self.held).map_err(unreadable)?;
                let over = body.is_over();
                self.passed = self.held.split_to(used.min(self.held.len())).freeze();
                if over {
                    self.after(head);
                }
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Reads into the caller's room, and leaves there what is of the body that is being read.
    fn poll_fill(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<bool>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.wire).poll_read(cx, buf))?;
        let read = buf.filled().get(before..).unwrap_or_default();
        if read.is_empty() {
            if matches!(&self.state, State::Head(reader) if reader.has_begun()) {
                self.spoil(Flaw::Incomplete);
                return Poll::Ready(Ok(false));
            }
            return Poll::Ready(Ok(true));
        }
        let State::Body(body, head) = &mut self.state else {
            self.held.extend_from_slice(read);
            buf.set_filled(before);
            return Poll::Ready(Ok(false));
        };
        let (head, used) = (*head, body.read(read).map_err(unreadable)?);
        let over = body.is_over();
        self.held.extend_from_slice(read.get(used..).unwrap_or_default());
        buf.set_filled(before + used);
        if over {
            self.after(head);
        }
        Poll::Ready(Ok(true))
    }
}

fn unreadable(flaw: Flaw) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, flaw)
}

impl Notes {
    fn read(&self, head: Head) {
        let mut inner = self.lock();
        inner.read.push_back(Ok(head));
        // What was answered before it is not the answer to it.
        inner.resumed = false;
    }

    /// How the next request is to be taken: what the library made of it must be what was read.
    pub(super) fn compare(&self, head: &Parts, body: &Incoming) -> Result<(), Fault> {
        let read = match self.lock().read.pop_front() {
            Some(Ok(read)) => read,
            Some(Err(flaw)) => return Err(flaw.into()),
            None => return Err(DIFFERS),
        };
        let length = match read.length {
            Length::Known(length) => body.size_hint().exact() == Some(length),
            Length::Chunked => body.size_hint().exact().is_none(),
        };
        match length && read.last == (head.version == Version::HTTP_10) {
            true => Ok(()),
            false => Err(DIFFERS),
        }
    }

    /// Lets in what waited for the answer to an upgrade: it was no. Not for the answer to a request
    /// before it, which may come after the upgrade was read.
    pub(super) fn resume(&self) {
        let mut inner = self.lock();
        if !inner.read.is_empty() {
            return;
        }
        inner.resumed = true;
        if let Some(waker) = inner.waker.take() {
            waker.wake();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn poll_resumed(&self, cx: &Context<'_>) -> Poll<()> {
        let mut inner = self.lock();
        if std::mem::take(&mut inner.resumed) {
            return Poll::Ready(());
        }
        inner.waker = Some(cx.waker().clone());
        Poll::Pending
    }
}

/// A request that two readers understand differently, both of them ours.
const DIFFERS: Fault = Fault {
    code: Code::Undecidable,
    status: StatusCode::BAD_REQUEST,
    detail: "the request was framed in two ways",
};

impl From<Flaw> for Fault {
    fn from(flaw: Flaw) -> Self {
        let (code, status) = match flaw {
            Flaw::Version => (Code::Protocol, StatusCode::HTTP_VERSION_NOT_SUPPORTED),
            Flaw::TooLarge => (Code::Undecidable, StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE),
            _ => (Code::Undecidable, StatusCode::BAD_REQUEST),
        };
        Self { code, status, detail: flaw.text() }
    }
}

impl AsyncRead for Screen {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let screen = &mut *self;
        loop {
            if !screen.passed.is_empty() {
                let length = screen.passed.len().min(buf.remaining());
                buf.put_slice(&screen.passed.split_to(length));
                return Poll::Ready(Ok(()));
            }
            if matches!(screen.state, State::Over) {
                return Poll::Ready(Ok(()));
            }
            if matches!(screen.state, State::Waiting) {
                ready!(screen.notes.poll_resumed(cx));
                screen.state = State::Head(HeadReader::bounded(screen.most));
            }
            if !screen.look()? && ready!(screen.poll_fill(cx, buf))? {
                return Poll::Ready(Ok(()));
            }
        }
    }
}

impl AsyncWrite for Screen {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.wire).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.wire).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.wire.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.wire).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.wire).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::poll;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    #[expect(clippy::disallowed_methods, reason = "to a listener of this test's own")]
    async fn connected(address: std::net::SocketAddr) -> TcpStream {
        TcpStream::connect(address).await.expect("connected")
    }

    const UPGRADE: &[u8] = b"GET / HTTP/1.1\r\nUpgrade: websocket\r\n\r\n";
    const PLAIN: &[u8] = b"GET / HTTP/1.1\r\n\r\n";

    async fn reading(bytes: &[u8]) -> (TcpStream, Screen) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
        let address = listener.local_addr().expect("bound");
        let mut guest = connected(address).await;
        let (stream, _) = listener.accept().await.expect("accepted");
        guest.write_all(bytes).await.expect("sent");
        (guest, Screen::new(Wire::new(stream.into(), Bytes::new()), crate::framing::MAX_HEAD))
    }

    async fn next(screen: &mut Screen) -> Vec<u8> {
        let mut buffer = [0; 1024];
        let length = screen.read(&mut buffer).await.expect("read");
        buffer.get(..length).expect("in range").to_vec()
    }

    fn answered(screen: &Screen) {
        screen.notes().lock().read.pop_front().expect("a request").expect("no flaw");
        screen.notes().resume();
    }

    #[tokio::test]
    async fn bytes_behind_an_upgrade_are_let_in_only_after_its_answer() {
        let (_guest, mut screen) = reading(&[UPGRADE, PLAIN].concat()).await;
        assert_eq!(next(&mut screen).await, UPGRADE);
        assert!(poll!(Box::pin(next(&mut screen))).is_pending());
        answered(&screen);
        assert_eq!(next(&mut screen).await, PLAIN);

        let (_guest, mut screen) = reading(&[UPGRADE, b"\x81\x00"].concat()).await;
        assert_eq!(next(&mut screen).await, UPGRADE);
        assert_eq!(screen.into_parts().1, &b"\x81\x00"[..], "the tunnel's");
    }

    #[tokio::test]
    async fn bytes_behind_an_upgrade_wait_for_its_answer_and_not_for_one_before_it() {
        let (_guest, mut screen) = reading(&[PLAIN, UPGRADE, PLAIN].concat()).await;
        assert_eq!(next(&mut screen).await, PLAIN);
        answered(&screen);
        assert_eq!(next(&mut screen).await, UPGRADE);
        assert!(poll!(Box::pin(next(&mut screen))).is_pending(), "the answer is not out");
        screen.notes().resume();
        assert!(poll!(Box::pin(next(&mut screen))).is_pending(), "it has not even been asked");
        answered(&screen);
        assert_eq!(next(&mut screen).await, PLAIN);
    }

    #[tokio::test]
    async fn behind_a_flaw_nothing_is_let_in() {
        let (mut guest, mut screen) =
            reading(&[PLAIN, b"GET / HTTP/1.1\n\r\n", PLAIN].concat()).await;
        assert_eq!(next(&mut screen).await, PLAIN);
        assert_eq!(next(&mut screen).await, STAND_IN);
        guest.write_all(PLAIN).await.expect("sent");
        assert_eq!(next(&mut screen).await, b"");
        let read: Vec<bool> = screen.notes().lock().read.iter().map(Result::is_ok).collect();
        assert_eq!(read, [true, false]);
    }
}
