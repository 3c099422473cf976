//! Pipes and buffers lent to tunnels while bytes are on their way.
//!
//! The number of pipes is bounded; without one, a tunnel copies. A pipe that comes back with bytes in
//! it is closed, never lent again: one connection's bytes cannot reach another.

use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, SpliceFFlags, fcntl, splice};
use nix::unistd::pipe2;
use tokio::net::TcpStream;

use crate::room;

const BUFFER: usize = 16 * 1024;
/// Buffers and pipes kept for the next who asks; more are freed when they come back.
const KEPT: usize = 64;
/// For a direction that carries much: a quarter less CPU time than 256 KiB (`benches/splice.rs`).
const WIDE: usize = 1024 * 1024;
/// Few, because a reader that stops leaves its pipe full.
const WIDE_PIPES: usize = 64;

const FLAGS: SpliceFFlags = SpliceFFlags::SPLICE_F_NONBLOCK.union(SpliceFFlags::SPLICE_F_MOVE);

/// Pipes and buffers shared by all tunnels. Clones share.
#[derive(Clone, Debug)]
pub struct Pool(Arc<Mutex<Shelves>>);

#[derive(Debug)]
struct Shelves {
    narrow: Shelf,
    wide: Shelf,
    buffers: Vec<Box<[u8]>>,
}

#[derive(Debug)]
struct Shelf {
    kept: Vec<Ends>,
    /// How many more may be lent.
    left: usize,
}

#[derive(Debug)]
struct Ends {
    out: OwnedFd,
    into: OwnedFd,
}

/// How much a pipe holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Width {
    /// The kernel's own 64 KiB.
    Narrow,
    /// 1 MiB.
    Wide,
}

impl Pool {
    /// At most `pipes` pipes of 64 KiB lent at once, and as many of 1 MiB but no more than 64. A pipe
    /// is two descriptors.
    #[must_use]
    pub fn new(pipes: usize) -> Self {
        let shelf = |left| Shelf { kept: Vec::new(), left };
        let (narrow, wide) = (shelf(pipes), shelf(pipes.min(WIDE_PIPES)));
        Self(Arc::new(Mutex::new(Shelves { narrow, wide, buffers: Vec::new() })))
    }

    /// An empty pipe, or none when all of its width are lent or the kernel gives no more.
    pub(super) fn pipe(&self, width: Width) -> Option<Pipe> {
        let kept = {
            let mut shelves = self.shelves();
            let shelf = shelves.shelf(width);
            shelf.left = shelf.left.checked_sub(1)?;
            shelf.kept.pop()
        };
        let mut pipe = Pipe { ends: kept, held: 0, width, pool: self.clone() };
        if pipe.ends.is_none() {
            pipe.ends = Some(Ends::new(width).ok()?);
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

impl Shelves {
    fn shelf(&mut self, width: Width) -> &mut Shelf {
        match width {
            Width::Narrow => &mut self.narrow,
            Width::Wide => &mut self.wide,
        }
    }
}

impl Ends {
    fn new(width: Width) -> nix::Result<Self> {
        let (out, into) = pipe2(OFlag::O_NONBLOCK | OFlag::O_CLOEXEC)?;
        if room::is_reserved(&into) {
            return Err(Errno::EMFILE);
        }
        if width == Width::Wide {
            fcntl(&into, FcntlArg::F_SETPIPE_SZ(i32::try_from(WIDE).unwrap_or(i32::MAX)))?;
        }
        Ok(Self { out, into })
    }
}

/// A lent pipe.
#[derive(Debug)]
pub(super) struct Pipe {
    /// There until the pipe is dropped.
    ends: Option<Ends>,
    held: usize,
    width: Width,
    pool: Pool,
}

impl Pipe {
    pub(super) fn is_empty(&self) -> bool {
        self.held == 0
    }

    /// Moves what `source` has into the pipe, as much as it can hold; 0 at its end.
    pub(super) fn fill(&mut self, source: &TcpStream) -> io::Result<usize> {
        let ends = self.ends.as_ref().ok_or(io::ErrorKind::BrokenPipe)?;
        let moved = splice(source, None, &ends.into, None, WIDE, FLAGS)?;
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
        self.held = self.held.saturating_sub(moved);
        Ok(moved)
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        let ends = self.ends.take().filter(|_| self.held == 0);
        let mut shelves = self.pool.shelves();
        let shelf = shelves.shelf(self.width);
        shelf.left += 1;
        if shelf.kept.len() < KEPT {
            shelf.kept.extend(ends);
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
