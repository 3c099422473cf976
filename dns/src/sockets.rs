//! The sockets by which upstreams are asked: ordinary ones, but never one of the last descriptors that
//! the process has.
//!
//! Guests decide how many names are looked up at once. What their connections leave alone is kept for
//! their questions, too, so lookups may take half of it; the other half is not for guests at all.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hickory_resolver::net::runtime::{RuntimeProvider, TokioRuntimeProvider};
use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit};
use tokio::net::TcpSocket;

/// What lookups leave to everything else, or an eighth of all there are if that is less.
const RESERVE: u64 = 256;

type Made<T> = Pin<Box<dyn Future<Output = io::Result<T>> + Send>>;

/// Makes sockets in the world that the calling runtime lives in. Clones share what they remember.
#[derive(Clone, Default)]
pub(crate) struct Sockets {
    tokio: TokioRuntimeProvider,
    refused: Arc<Mutex<Option<Instant>>>,
}

impl Sockets {
    /// Whether one was refused since then for want of a descriptor or of memory. The client tells no
    /// such error of its sockets when it has another.
    pub(crate) fn were_refused(&self, since: Instant) -> bool {
        let refused = *self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        refused.is_some_and(|at| at >= since)
    }

    /// Remembers a refusal.
    fn noted<T>(&self, made: io::Result<T>) -> io::Result<T> {
        made.inspect_err(|error| {
            if is_exhausted(error) {
                let mut refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
                *refused = Some(Instant::now());
            }
        })
    }
}

impl RuntimeProvider for Sockets {
    type Handle = <TokioRuntimeProvider as RuntimeProvider>::Handle;
    type Timer = <TokioRuntimeProvider as RuntimeProvider>::Timer;
    type Udp = <TokioRuntimeProvider as RuntimeProvider>::Udp;
    type Tcp = <TokioRuntimeProvider as RuntimeProvider>::Tcp;

    fn create_handle(&self) -> Self::Handle {
        self.tokio.create_handle()
    }

    fn connect_tcp(
        &self,
        server: SocketAddr,
        local: Option<SocketAddr>,
        patience: Option<Duration>,
    ) -> Made<Self::Tcp> {
        let connect = self.tokio.connect_tcp(server, local, patience);
        let sockets = self.clone();
        Box::pin(async move {
            // The next one gets the same number, and would keep it while it connects.
            drop(sockets.noted(TcpSocket::new_v4().and_then(spared))?);
            sockets.noted(connect.await)
        })
    }

    fn bind_udp(&self, local: SocketAddr, server: SocketAddr) -> Made<Self::Udp> {
        let bind = self.tokio.bind_udp(local, server);
        let sockets = self.clone();
        Box::pin(async move { sockets.noted(bind.await.and_then(spared)) })
    }
}

/// Whether this says that there is no descriptor, or no memory, left for a socket (socket(2)).
fn is_exhausted(error: &io::Error) -> bool {
    let exhausted = [Errno::EMFILE, Errno::ENFILE, Errno::ENOBUFS, Errno::ENOMEM];
    exhausted.iter().any(|errno| error.raw_os_error() == Some(*errno as i32))
}

/// The same, unless it is one of the last: the kernel gives the lowest number that is free (open(2)).
fn spared<S: AsFd>(socket: S) -> io::Result<S> {
    let limit = getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(soft, _)| soft);
    let number = u64::try_from(socket.as_fd().as_raw_fd()).unwrap_or(u64::MAX);
    if number < limit - RESERVE.min(limit / 8) { Ok(socket) } else { Err(Errno::EMFILE.into()) }
}
