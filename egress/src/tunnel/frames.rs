//! A tunnel that carries a WebSocket in clear: which of its bytes only keep it open, and what becomes of
//! those while the guest sleeps.
//!
//! A far side that pings a sleeping guest is answered in its place, so that the connection lives and the
//! guest sleeps on. Nothing but an answer to a ping is ever said for a guest, and only between two frames of
//! its own; whatever cannot be read, answered or kept wakes it.

use std::future::poll_fn;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::net::RecvFlags;
use tokio::task::coop::consume_budget;
use tokio::time::sleep;

use crate::keepalive::{Frame, Frames, Keepalive};
use crate::side::{Gate, GuestSide, Kept, receive, send};
use crate::tunnel::end::{End, Passed};

/// Bytes that are looked at once: a frame that keeps a connection open has at most 129.
const LOOK: usize = 256;
/// What is kept for the guest, in bytes: answers to its own pings, and pings once it has said that it is done.
const KEPT: usize = 4096;
/// The pause before a frame that has not come whole is looked at again, and how often it is.
const PAUSE: Duration = Duration::from_millis(20);
const LOOKS: usize = 50;

/// Both directions of a WebSocket.
#[derive(Debug)]
pub(crate) struct Duplex {
    /// From the guest.
    out: Mutex<Frames>,
    /// To the guest.
    back: Mutex<Frames>,
    kept: Mutex<Kept>,
    /// The guest has said that it is done, and the far side has been told.
    done: AtomicBool,
}

/// What came of bytes for a guest that is not given any.
enum Came {
    Nothing,
    End,
    /// The first of it is dealt with.
    Kept,
    /// A part of a frame that may be a keepalive.
    Partial,
    /// The guest has to see it.
    Meant,
}

impl Duplex {
    /// Of a connection that is one from here on, of the guest behind this gate; these bytes have been handed
    /// to it.
    pub(crate) fn new(early: &[u8], gate: &Arc<Gate>) -> Self {
        let mut back = Frames::new();
        back.feed(early);
        Self {
            out: Mutex::default(),
            back: Mutex::new(back),
            kept: Kept::new(gate, KEPT).into(),
            done: AtomicBool::new(false),
        }
    }

    /// Nothing can be said for the guest any more.
    pub(super) fn is_done(&self) {
        self.done.store(true, Relaxed);
    }

    /// What was kept for the guest, which is to be given before anything else.
    pub(super) fn kept(&self) -> Vec<u8> {
        locked(&self.kept).take()
    }

    /// Whether what passed from the guest is more than keeps it open.
    pub(super) fn is_meant_out(&self, passed: &Passed<'_>) -> bool {
        passed.seen().is_none_or(|bytes| locked(&self.out).feed(bytes))
    }

    /// The same, to the guest.
    pub(super) fn is_meant_back(&self, passed: &Passed<'_>) -> bool {
        passed.seen().is_none_or(|bytes| locked(&self.back).feed(bytes))
    }

    /// Sees to what the far side sends as long as the guest takes nothing; the error to which it comes, which
    /// is told once. `count` hears of what was answered.
    pub(super) async fn asleep(
        &self,
        guest: &GuestSide,
        far: &impl End,
        count: &(impl Fn(Passed<'_>) + Sync),
    ) -> io::Result<()> {
        let mut looks = 0;
        while !guest.takes() {
            // A far side that says nothing else, without end, takes no more than its turn.
            consume_budget().await;
            let came = match self.look(far, count) {
                Err(error) => {
                    while !guest.takes() {
                        guest.end_came();
                        guest.turned().await;
                    }
                    return Err(error);
                }
                Ok(came) => came,
            };
            looks = if matches!(came, Came::Partial) { looks + 1 } else { 0 };
            match came {
                Came::Kept => {}
                Came::Nothing => tokio::select! {
                    _ = poll_fn(|cx| far.poll_readable(cx)) => {}
                    () = guest.turned() => {}
                },
                Came::End => {
                    guest.end_came();
                    guest.turned().await;
                }
                Came::Partial if looks < LOOKS => sleep(PAUSE).await,
                Came::Partial | Came::Meant => {
                    guest.bytes_came();
                    guest.turned().await;
                }
            }
        }
        Ok(())
    }

    fn look(&self, far: &impl End, count: &impl Fn(Passed<'_>)) -> io::Result<Came> {
        let mut seen = [0; LOOK];
        match far.take_in(|stream| receive(stream, &mut seen, RecvFlags::PEEK)) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Came::Nothing),
            Err(error) => Err(error),
            Ok(0) => Ok(Came::End),
            Ok(length) => self.take(far, seen.get(..length).unwrap_or_default(), count),
        }
    }

    /// Takes what has come off the connection if it is nothing but whole frames that keep it open.
    fn take(&self, far: &impl End, seen: &[u8], count: &impl Fn(Passed<'_>)) -> io::Result<Came> {
        if !locked(&self.back).is_between() {
            return Ok(Came::Meant);
        }
        let Some(Frame { kind, payload, length }) = Frame::read(seen) else {
            let meant = Frames::new().feed(seen);
            return Ok(if meant { Came::Meant } else { Came::Partial });
        };
        let frame = seen.get(..length).unwrap_or_default();
        let keeps = kind == Keepalive::Pong || self.done.load(Relaxed);
        let mut answer = Vec::new();
        if keeps {
            if !locked(&self.kept).push(frame) {
                return Ok(Came::Meant);
            }
        } else {
            // A frame of its own may be half sent.
            let between = locked(&self.out).is_between();
            let Some(key) = getrandom::u32().ok().filter(|_| between) else {
                return Ok(Came::Meant);
            };
            answer = pong(payload, key.to_ne_bytes());
            match far.give(|stream| send(stream, &answer)) {
                Ok(sent) if sent == answer.len() => {}
                // The far side takes nothing; half an answer would be the end of it.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Came::Meant),
                Err(error) => return Err(error),
                Ok(_) => return Err(io::ErrorKind::WriteZero.into()),
            }
        }
        let consumed =
            far.take_in(|stream| receive(stream, &mut vec![0; length], RecvFlags::empty()))?;
        if consumed != length {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if keeps {
            // Counted when the guest gets it.
            return Ok(Came::Kept);
        }
        count(Passed::Answered { taken: consumed as u64, said: answer.len() as u64 });
        Ok(Came::Kept)
    }
}

/// The answer of a client to a ping (RFC 6455, section 5.5.3), masked as each of its frames is, by a key that
/// nobody foresees (section 10.3).
fn pong(payload: &[u8], key: [u8; 4]) -> Vec<u8> {
    let length = u8::try_from(payload.len()).unwrap_or(u8::MAX);
    let mut frame = vec![0x8a, 0x80 | length];
    frame.extend(key);
    frame.extend(payload.iter().zip(key.iter().cycle()).map(|(byte, key)| byte ^ key));
    frame
}

/// Never held over an await; each change under it is whole.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
