//! Connections on which numbered blocks pass both ways and every byte is checked at both ends: the guest
//! answers each block with the same number of its own, so that a lost, doubled or changed byte shows.
//!
//! Here are the far sides. Each takes one connection and no second one.

use std::io;
use std::net::SocketAddr;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sha2::{Digest, Sha256};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::sleep;
use tokio_rustls::TlsAcceptor;
use world::{Site, World};

/// Ports of the far sides.
pub(crate) mod port {
    pub(crate) const RAW: u16 = 9001;
    pub(crate) const TLS: u16 = 9002;
    pub(crate) const HTTP: u16 = 9003;
    /// Of the guest.
    pub(crate) const INWARD: u16 = 9004;
}

/// The guest's program: opens the three to its first word, listens for the fourth, and writes down how far it is,
/// from which port it speaks, and what was wrong.
pub(crate) const PROGRAM: &str = include_str!("blocks.py");

/// Bytes of a block.
const SIZE: usize = 16 << 10;
/// Blocks that are on their way at most; without a bound where the far side does not listen.
const WINDOW: u64 = 48;
/// A streamed answer is slow.
const SLOW: Duration = Duration::from_millis(25);

/// The block of this number, one way of one stream; the same as the guest's program makes.
fn block(stream: &str, way: &str, number: u64) -> Vec<u8> {
    Sha256::digest(format!("{stream}-{way}-{number}")).repeat(SIZE / 32)
}

/// One far side.
#[derive(Debug, Default)]
pub(crate) struct Far {
    pub(crate) name: &'static str,
    /// Blocks that were given to its connection, and those that came of it, whole and right.
    sent: AtomicU64,
    got: AtomicU64,
    flowing: AtomicBool,
    deaf: AtomicBool,
    connections: AtomicUsize,
    peer: Mutex<Option<SocketAddr>>,
    wrong: Mutex<Option<String>>,
}

impl Far {
    fn new(name: &'static str) -> Arc<Self> {
        Arc::new(Self { name, ..Self::default() })
    }

    /// It sends, or does not.
    pub(crate) fn flow(&self, flow: bool) {
        self.flowing.store(flow, SeqCst);
    }

    /// It does not listen, and sends as much as it can; or listens again.
    pub(crate) fn be_deaf(&self, deaf: bool) {
        self.deaf.store(deaf, SeqCst);
    }

    pub(crate) fn sent(&self) -> u64 {
        self.sent.load(SeqCst)
    }

    pub(crate) fn got(&self) -> u64 {
        self.got.load(SeqCst)
    }

    /// Where its one connection comes from.
    pub(crate) fn peer(&self) -> Option<SocketAddr> {
        *self.peer.lock().expect("peer")
    }

    /// What was wrong with what has come, or with its connection.
    pub(crate) fn wrong(&self) -> Option<String> {
        self.wrong.lock().expect("wrong").clone()
    }

    /// How many connections it was asked for.
    pub(crate) fn connections(&self) -> usize {
        self.connections.load(SeqCst)
    }

    async fn take(&self, listener: TcpListener) -> TcpStream {
        let mut first = None;
        while first.is_none() {
            first = listener.accept().await.ok();
        }
        let (stream, peer) = first.expect("just accepted");
        self.connections.fetch_add(1, SeqCst);
        *self.peer.lock().expect("peer") = Some(peer);
        stream.set_nodelay(true).expect("set");
        stream
    }

    /// Counts those who come again.
    async fn count(&self, listener: TcpListener) {
        while let Ok((_again, _)) = listener.accept().await {
            self.connections.fetch_add(1, SeqCst);
        }
    }

    fn fail(&self, what: impl ToString) {
        self.wrong.lock().expect("wrong").get_or_insert(what.to_string());
    }

    /// Both ways at once, until something is wrong.
    async fn speak(&self, stream: impl AsyncRead + AsyncWrite) {
        let (from, to) = tokio::io::split(stream);
        let ended = tokio::try_join!(self.send(to), self.hear(from));
        self.fail(ended.map_or_else(|error| error.to_string(), |_| "it ended".to_owned()));
    }

    async fn send(&self, mut to: impl AsyncWrite + Unpin) -> io::Result<()> {
        loop {
            let number = self.sent();
            let full = number >= self.got() + WINDOW && !self.deaf.load(SeqCst);
            if !self.flowing.load(SeqCst) || full {
                sleep(Duration::from_millis(2)).await;
                continue;
            }
            to.write_all(&block(self.name, "down", number)).await?;
            to.flush().await?;
            self.sent.fetch_add(1, SeqCst);
        }
    }

    async fn hear(&self, mut from: impl AsyncRead + Unpin) -> io::Result<()> {
        let mut came = vec![0; SIZE];
        loop {
            while self.deaf.load(SeqCst) {
                sleep(Duration::from_millis(2)).await;
            }
            from.read_exact(&mut came).await?;
            if came != block(self.name, "up", self.got()) {
                return Err(io::Error::other(format!("block {}", self.got())));
            }
            self.got.fetch_add(1, SeqCst);
        }
    }

    /// An answer that has no end, a block a chunk.
    async fn answer(&self, mut stream: TcpStream) -> io::Result<()> {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await?);
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n").await?;
        loop {
            sleep(SLOW).await;
            if self.flowing.load(SeqCst) {
                let number = self.sent();
                let chunk = [
                    format!("{SIZE:x}\r\n").as_bytes(),
                    &block(self.name, "down", number),
                    b"\r\n",
                ]
                .concat();
                stream.write_all(&chunk).await?;
                self.sent.fetch_add(1, SeqCst);
            }
        }
    }
}

/// The four far sides.
#[derive(Debug)]
pub(crate) struct Fars {
    pub(crate) raw: Arc<Far>,
    pub(crate) tls: Arc<Far>,
    pub(crate) http: Arc<Far>,
    pub(crate) inward: Arc<Far>,
}

impl Fars {
    /// Begins to listen at this site.
    pub(crate) fn listen(world: &World, site: &Site) -> Self {
        let fars = Self {
            raw: Far::new("raw"),
            tls: Far::new("tls"),
            http: Far::new("http"),
            inward: Far::new("inward"),
        };
        let listen = |far: &Arc<Far>, port| {
            let (far, at) = (Arc::clone(far), site.at(port));
            let listener = world.internet.run(|| std::net::TcpListener::bind(at)).expect("bind");
            listener.set_nonblocking(true).expect("set");
            (far, listener)
        };
        let (raw, tls) = (listen(&fars.raw, port::RAW), listen(&fars.tls, port::TLS));
        let http = listen(&fars.http, port::HTTP);
        let acceptor = TlsAcceptor::from(Arc::new(world.authority.server()));
        serve(raw, |far, stream| async move { far.speak(stream).await });
        serve(tls, move |far, stream| {
            let acceptor = acceptor.clone();
            async move {
                match acceptor.accept(stream).await {
                    Ok(stream) => far.speak(stream).await,
                    Err(error) => far.fail(error),
                }
            }
        });
        serve(http, |far, stream| async move {
            let answered = far.answer(stream).await;
            far.fail(answered.map_or_else(|error| error.to_string(), |()| "it ended".to_owned()));
        });
        fars
    }

    /// Opens the fourth: `postern connect` to the guest.
    pub(crate) fn call(&self, world: &World, name: &str) {
        let command = world.daemon().command(&["connect", name, &port::INWARD.to_string()]);
        let far = Arc::clone(&self.inward);
        std::thread::spawn(move || {
            runtime().block_on(async move {
                let mut connect = tokio::process::Command::from(command);
                connect.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
                let mut connect = connect.spawn().expect("run postern");
                let (to, from) = (connect.stdin.take(), connect.stdout.take());
                far.connections.fetch_add(1, SeqCst);
                far.speak(tokio::io::join(from.expect("a pipe"), to.expect("a pipe"))).await;
            });
        });
    }

    pub(crate) fn all(&self) -> [&Far; 4] {
        [&self.raw, &self.tls, &self.http, &self.inward]
    }

    /// Those whose guest answers.
    pub(crate) fn answered(&self) -> [&Far; 3] {
        [&self.raw, &self.tls, &self.inward]
    }

    pub(crate) fn flow(&self, flow: bool) {
        self.all().iter().for_each(|far| far.flow(flow));
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// Serves the one connection of a far side, on a thread that ends with the test.
fn serve<S: Future<Output = ()>>(
    (far, listener): (Arc<Far>, std::net::TcpListener),
    speak: impl FnOnce(Arc<Far>, TcpStream) -> S + Send + 'static,
) {
    std::thread::spawn(move || {
        runtime().block_on(async move {
            let again = listener.try_clone().and_then(TcpListener::from_std).expect("a listener");
            let listener = TcpListener::from_std(listener).expect("a listener");
            let stream = far.take(listener).await;
            tokio::join!(speak(Arc::clone(&far), stream), far.count(again));
        });
    });
}
