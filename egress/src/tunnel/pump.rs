//! One direction of a tunnel: copied while it is small, spliced in the kernel once it is not.
//!
//! Holds a buffer or a pipe only while bytes are on their way, and takes no byte from the source
//! before the sink has taken the ones before it: back-pressure is the kernel's, end to end.

use std::future::poll_fn;
use std::io;

use bytes::Bytes;
use rustix::net::RecvFlags;
use tokio::task::coop::consume_budget;

use crate::side::{receive, send};
use crate::tunnel::end::End;
pub(super) use crate::tunnel::end::Passed;
use crate::tunnel::frames::Duplex;
use crate::tunnel::pool::{Buffer, Pipe, Pool, Width};

/// A direction that has carried this much is worth a pipe.
const SPLICE_FROM: u64 = 64 * 1024;
/// A direction that has carried this much is worth a wide one.
const WIDE_FROM: u64 = 1024 * 1024;

/// Which end failed.
#[derive(Clone, Copy, Debug)]
pub(super) enum Broken {
    Source,
    Sink,
}

/// Carries `first`, then what `from` sends, to `to`, and then its end. `count` hears of every byte
/// that `to` has taken. Of a WebSocket nothing is spliced.
pub(super) async fn pump(
    from: &impl End,
    to: &impl End,
    first: Bytes,
    (pool, frames): (&Pool, Option<&Duplex>),
    count: &(impl Fn(Passed<'_>) + Sync),
) -> Result<(), Broken> {
    let way = Way { from, to, count };
    way.write(&first).await?;
    let mut moved = first.len() as u64;
    drop(first);
    loop {
        poll_fn(|cx| from.poll_readable(cx)).await.map_err(|_| Broken::Source)?;
        if !to.takes() {
            to.taking(from, frames, count).await.map_err(|_| Broken::Source)?;
            if let Some(frames) = frames {
                way.write(&frames.kept()).await?;
            }
            continue;
        }
        let pipe = match moved {
            // Its frames are looked at.
            _ if frames.is_some() => None,
            ..SPLICE_FROM => None,
            SPLICE_FROM..WIDE_FROM => pool.pipe(Width::Narrow),
            _ => pool.pipe(Width::Wide).or_else(|| pool.pipe(Width::Narrow)),
        };
        let burst = match pipe {
            Some(pipe) => way.splice(pipe).await?,
            None => way.copy(pool.buffer()).await?,
        };
        moved = moved.saturating_add(burst.bytes);
        if burst.is_last {
            to.end();
            return Ok(());
        }
    }
}

/// What was moved with one loan.
struct Burst {
    bytes: u64,
    is_last: bool,
}

struct Way<'a, F, T, C> {
    from: &'a F,
    to: &'a T,
    count: &'a C,
}

impl<F: End, T: End, C: Fn(Passed<'_>) + Sync> Way<'_, F, T, C> {
    /// Copies until the source is dry, or enough to ask for a pipe again.
    async fn copy(&self, mut buffer: Buffer) -> Result<Burst, Broken> {
        let mut bytes = 0;
        while bytes < SPLICE_FROM && self.to.takes() {
            match self.from.take_in(|from| receive(from, &mut buffer, RecvFlags::empty())) {
                Ok(0) => return Ok(Burst { bytes, is_last: true }),
                Ok(read) => {
                    self.write(buffer.get(..read).unwrap_or_default()).await?;
                    bytes += read as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => return Err(Broken::Source),
            }
            consume_budget().await;
        }
        Ok(Burst { bytes, is_last: false })
    }

    async fn write(&self, mut bytes: &[u8]) -> Result<(), Broken> {
        while !bytes.is_empty() {
            match self.to.give(|to| send(to, bytes)) {
                Ok(written) => {
                    let (taken, rest) = bytes.split_at_checked(written).unwrap_or((bytes, &[]));
                    (self.count)(Passed::Seen(taken));
                    bytes = rest;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    poll_fn(|cx| self.to.poll_writable(cx)).await.map_err(|_| Broken::Sink)?;
                }
                Err(_) => return Err(Broken::Sink),
            }
        }
        Ok(())
    }

    /// Splices until the source is dry, or enough to ask for a wider pipe.
    async fn splice(&self, mut pipe: Pipe) -> Result<Burst, Broken> {
        let mut bytes = 0;
        while bytes < WIDE_FROM && self.to.takes() {
            // The pipe is empty here, so that "would block" speaks of the source alone.
            match self.from.take_in(|from| pipe.fill(from)) {
                Ok(0) => return Ok(Burst { bytes, is_last: true }),
                Ok(read) => bytes += read as u64,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => return Err(Broken::Source),
            }
            while !pipe.is_empty() {
                match self.to.give(|to| pipe.drain(to)) {
                    Ok(written) => (self.count)(Passed::Spliced(written as u64)),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        poll_fn(|cx| self.to.poll_writable(cx)).await.map_err(|_| Broken::Sink)?;
                    }
                    Err(_) => return Err(Broken::Sink),
                }
            }
            consume_budget().await;
        }
        Ok(Burst { bytes, is_last: false })
    }
}
