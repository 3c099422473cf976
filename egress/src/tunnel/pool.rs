//! Pipes and buffers lent to tunnels while bytes are on their way.
//!
//! The number of pipes is bounded; without one, a tunnel copies. A pipe that comes back with bytes in
//! it is closed, never lent again: one connection's bytes cannot reach another.

use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::fcntl::{FcntlArg, OFlag, SpliceFFlags, fcntl, splice};
use nix::unistd::pipe2;
use tokio::net::TcpStream;

const BUFFER: usize = 16 * 1024;
/// Buffers and pipes kept for the next who asks; more are freed when they come back.
const KEPT: usize = 64;
/// The kernel's own size of a pipe, and ours for a direction that carries much.
const NARROW: usize = 64 * 1024;
const WIDE: usize = 256 * 1024;

const FLAGS: SpliceFFlags = SpliceFFlags::SPLICE_F_NONBLOCK.union(SpliceFFlags::SPLICE_F_MOVE);

/// Pipes and buffers shared by all tunnels. Clones share.
#[derive(Clone, Debug)]
pub struct Pool(Arc<Mutex<Shelves>>);

#[derive(Debug)]
struct Shelves {
    pipes: Vec<Ends>,
    /// How many more pipes may be lent.
    left: usize,
    buffers: Vec<Box<[u8]>>,
}

#[derive(Debug)]
struct Ends {
    out: OwnedFd,
    into: OwnedFd,
    size: usize,
}

impl Pool {
    /// At most `pipes` pipes lent at once, of two descriptors each.
    #[must_use]
    pub fn new(pipes: usize) -> Self {
        Self(Arc::new(Mutex::new(Shelves { pipes: Vec::new(), left: pipes, buffers: Vec::new() })))
    }

    /// An empty pipe, or none when all are lent or the kernel gives no more.
    pub(super) fn pipe(&self) -> Option<Pipe> {
        let kept = {
            let mut shelves = self.shelves();
            shelves.left = shelves.left.checked_sub(1)?;
            shelves.pipes.pop()
        };
        let mut pipe = Pipe { ends: kept, held: 0, pool: self.clone() };
        if pipe.ends.is_none() {
            let (out, into) = pipe2(OFlag::O_NONBLOCK | OFlag::O_CLOEXEC).ok()?;
            pipe.ends = Some(Ends { out, into, size: NARROW });
        }
        Some(pipe)
    }

    pub(super) fn buffer(&self) -> Buffer {
        let kept = self.shelves().buffers.pop();
        Buffer { bytes: kept.unwrap_or_else(|| vec![0; BUFFER].into()), pool: self.clone() }
    }

    fn shelves(&self) -> MutexGuard<'_, Shelves> {
        // Every change under the lock is whole, so a panic elsewhere spoils nothing.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A lent pipe.
#[derive(Debug)]
pub(super) struct Pipe {
    /// There until the pipe is dropped.
    ends: Option<Ends>,
    held: usize,
    pool: Pool,
}

impl Pipe {
    pub(super) fn is_empty(&self) -> bool {
        self.held == 0
    }

    /// Moves what `source` has into the pipe; 0 at its end.
    pub(super) fn fill(&mut self, source: &TcpStream) -> io::Result<usize> {
        let ends = self.ends.as_ref().ok_or(io::ErrorKind::BrokenPipe)?;
        let moved = splice(source, None, &ends.into, None, ends.size - self.held, FLAGS)?;
        self.held += moved;
        Ok(moved)
    }

    /// Moves what the pipe has into `sink`.
    pub(super) fn drain(&mut self, sink: &TcpStream) -> io::Result<usize> {
        let ends = self.ends.as_ref().ok_or(io::ErrorKind::BrokenPipe)?;
        let moved = splice(&ends.out, None, sink, None, self.held, FLAGS)?;
        if moved == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        self.held -= moved;
        Ok(moved)
    }

    /// Makes room for more at once, if the kernel lets us. Best effort.
    pub(super) fn widen(&mut self) {
        let Some(ends) = self.ends.as_mut().filter(|ends| ends.size == NARROW) else { return };
        let wide = i32::try_from(WIDE).unwrap_or(i32::MAX);
        if let Ok(size) = fcntl(&ends.into, FcntlArg::F_SETPIPE_SZ(wide)) {
            ends.size = usize::try_from(size).unwrap_or(NARROW);
        }
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        let ends = self.ends.take().filter(|_| self.held == 0);
        let mut shelves = self.pool.shelves();
        shelves.left += 1;
        if shelves.pipes.len() < KEPT {
            shelves.pipes.extend(ends);
        }
    }
}

/// A lent buffer of 16 KiB.
#[derive(Debug)]
pub(super) struct Buffer {
    bytes: Box<[u8]>,
    pool: Pool,
}

impl Deref for Buffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut shelves = self.pool.shelves();
        if shelves.buffers.len() < KEPT {
            shelves.buffers.push(std::mem::take(&mut self.bytes));
        }
    }
}
