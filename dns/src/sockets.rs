//! The sockets by which upstreams are asked: ordinary ones, but never one of the last descriptors that
//! the process has.
//!
//! Guests decide how many names are looked up at once. What their connections leave alone is kept for
//! their questions, too, so lookups may take half of it; the other half is not for guests at all.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::pin::Pin;
use std::time::Duration;

use hickory_resolver::net::runtime::{RuntimeProvider, TokioRuntimeProvider};
use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit};
use tokio::net::TcpSocket;

/// What lookups leave to everything else, or an eighth of all there are if that is less.
const RESERVE: u64 = 256;

type Made<T> = Pin<Box<dyn Future<Output = io::Result<T>> + Send>>;

/// Makes sockets in the world that the calling runtime lives in.
#[derive(Clone, Default)]
pub(crate) struct Sockets(TokioRuntimeProvider);

impl RuntimeProvider for Sockets {
    type Handle = <TokioRuntimeProvider as RuntimeProvider>::Handle;
    type Timer = <TokioRuntimeProvider as RuntimeProvider>::Timer;
    type Udp = <TokioRuntimeProvider as RuntimeProvider>::Udp;
    type Tcp = <TokioRuntimeProvider as RuntimeProvider>::Tcp;

    fn create_handle(&self) -> Self::Handle {
        self.0.create_handle()
    }

    fn connect_tcp(
        &self,
        server: SocketAddr,
        local: Option<SocketAddr>,
        patience: Option<Duration>,
    ) -> Made<Self::Tcp> {
        let connect = self.0.connect_tcp(server, local, patience);
        Box::pin(async move {
            // The next one gets the same number, and would keep it while it connects.
            drop(spared(TcpSocket::new_v4()?)?);
            connect.await
        })
    }

    fn bind_udp(&self, local: SocketAddr, server: SocketAddr) -> Made<Self::Udp> {
        let bind = self.0.bind_udp(local, server);
        Box::pin(async move { spared(bind.await?) })
    }
}

/// The same, unless it is one of the last: the kernel gives the lowest number that is free (open(2)).
fn spared<S: AsFd>(socket: S) -> io::Result<S> {
    let limit = getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(soft, _)| soft);
    let number = u64::try_from(socket.as_fd().as_raw_fd()).unwrap_or(u64::MAX);
    if number < limit - RESERVE.min(limit / 8) { Ok(socket) } else { Err(Errno::EMFILE.into()) }
}
