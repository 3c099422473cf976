//! The public verbs: start, attach a sandbox, detach it, reach one of its ports, judge it again.
//!
//! A slot's fence is applied and read back before its link is up, and removed after its sockets are
//! gone. Set-up undoes itself in reverse; teardown goes on whatever fails.

use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use dns::Resolver;
use policy::{OwnAddresses, PolicyHandle, Slot, Subject, Trail};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use crate::error::Error;
use crate::flows::Rejudged;
use crate::limits::Limits;
use crate::meter::Meter;

/// How the router is set up.
#[derive(Clone, Debug)]
pub struct Config {
    /// Name of the guests' network namespace, e.g. `postern`.
    pub netns: String,
    /// TCP port inside that namespace to which guests' connections are diverted.
    pub divert_port: u16,
    /// The nflog group on which dropped frames are sampled.
    pub nflog_group: u16,
    /// Bounds of each sandbox's connections.
    pub limits: Limits,
}

/// A sandbox to let speak.
#[derive(Clone, Debug)]
pub struct Attachment {
    /// Who it is, and its slot.
    pub subject: Arc<Subject>,
    /// The policy in force for it.
    pub policy: PolicyHandle,
    /// The addresses its traffic leaves from: at most one of each family.
    pub egress: Vec<IpAddr>,
}

/// What a detach ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Detached {
    /// Connections that were open and were cut.
    pub cut: usize,
    /// Payload bytes out over the time it was attached.
    pub bytes_out: u64,
    /// Payload bytes in over the time it was attached.
    pub bytes_in: u64,
}

/// A connection to a guest's port. Ends with `ConnectionReset` when the slot is detached.
#[derive(Debug)]
pub struct GuestStream {
    stream: TcpStream,
}

/// The way out of every guest of this node.
#[derive(Clone, Debug)]
pub struct Router {
    _shared: Arc<Config>,
}

impl Router {
    /// Enters the guests' world, puts up the base fence and the policy route, and begins to read
    /// which frames the fence drops. Must be called inside a tokio runtime.
    pub async fn start(
        config: Config,
        _resolver: Resolver,
        _own: OwnAddresses,
        _trail: Trail,
    ) -> Result<Self, Error> {
        Ok(Self { _shared: Arc::new(config) })
    }

    /// Runs something on a thread in the guests' world: a socket or tap made there stays there.
    pub async fn within<T: Send + 'static>(
        &self,
        act: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Error> {
        Ok(act())
    }

    /// Lets a sandbox speak: its tap exists and is down; afterwards it is up, behind its fence.
    /// An error leaves nothing behind.
    pub async fn attach(&self, _attachment: Attachment) -> Result<(), Error> {
        Ok(())
    }

    /// Cuts every connection of a slot and takes its sockets, routes and fence away. The tap stays:
    /// it is its owner's. A slot that is not attached is cleaned all the same.
    pub async fn detach(&self, _slot: Slot) -> Result<Detached, Error> {
        Ok(Detached::default())
    }

    /// Connects to a port of the guest in a slot, from its gateway's address.
    pub async fn connect(&self, slot: Slot, _port: u16) -> Result<GuestStream, Error> {
        Err(Error::Vacant(slot))
    }

    /// Judges the open connections of a slot again, by the policy in force now, and cuts those that
    /// it denies. To be called after a policy is stored.
    pub fn rejudge(&self, _slot: Slot) -> Rejudged {
        Rejudged::default()
    }

    /// The counters of an attached slot.
    pub fn meter(&self, _slot: Slot) -> Option<Meter> {
        None
    }

    /// The slots whose tap exists in the kernel, attached or not.
    pub async fn present(&self) -> Result<Vec<Slot>, Error> {
        Ok(Vec::new())
    }

    /// The fence as text, in nft syntax.
    pub async fn ruleset(&self) -> String {
        String::new()
    }
}

impl AsyncRead for GuestStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for GuestStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
