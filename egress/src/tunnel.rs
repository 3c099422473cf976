//! Bytes both ways between a guest and the far side that was judged for it.
//!
//! Never reads what it carries and never holds more than one buffer or pipe a direction. A half-close
//! passes as a half-close, a reset as a reset. It can be revoked at any time, and then nothing that is
//! still queued is delivered.

mod pump;
mod end;
mod frames;
mod pool;

use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use socket2::SockRef;
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::time::Instant;

use crate::closing;
use crate::limits::Limits;
use crate::meter::Meter;
use crate::side::{GuestSide, LOST};
pub(crate) use crate::tunnel::frames::Duplex;
pub use crate::tunnel::pool::Pool;
use crate::tunnel::pump::{Broken, Passed, pump};

/// What a tunnel carried, and what ended it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Bytes from the guest that the far socket took, the first flight included.
    pub bytes_out: u64,
    /// Bytes from the far side that the guest's socket took.
    pub bytes_in: u64,
    /// Why it is over.
    pub why: Why,
}

/// What ends a tunnel. All but `Closed` leave both sockets reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Why {
    /// Both sides said they were done, and have acknowledged all bytes that were for them.
    Closed,
    /// The guest reset the connection, or was lost.
    GuestReset,
    /// The far side reset the connection, or was lost.
    FarReset,
    /// No byte either way for [`Limits::idle`], or for [`Limits::half_closed`] once a side was done;
    /// or a side did not take the last bytes within that time once both were.
    Idle,
    /// `revoked` came true.
    Revoked,
    /// The guest slept, and its side could not be kept or put back.
    Unkept,
}

impl Why {
    /// What the audit says of it, where that is more than that it is over.
    pub(crate) fn detail(self) -> Option<&'static str> {
        match self {
            Self::Closed | Self::Revoked => None,
            Self::GuestReset => Some("reset by the guest"),
            Self::FarReset => Some("reset by the far side"),
            Self::Idle => Some("idle"),
            Self::Unkept => Some(LOST),
        }
    }
}

/// Carries bytes between `guest` and `far` until the connection ends. `first_flight` is what was read
/// from the guest before it was judged; it goes out first. Both sockets are closed on return.
///
/// Dropping the future closes both sockets in the ordinary way; use `revoked` to cut.
pub async fn tunnel(
    guest: impl Into<GuestSide>,
    far: TcpStream,
    first_flight: Bytes,
    limits: &Limits,
    meter: &Meter,
    pool: &Pool,
    revoked: impl Future<Output = ()>,
) -> Ended {
    carry(guest.into(), far, first_flight, limits, (meter, pool, None), revoked).await
}

/// The same for a WebSocket in clear: its pings and pongs pass as all its bytes do, but nobody is busy for
/// their sake, and they wake nobody.
pub(crate) async fn websocket(
    guest: GuestSide,
    far: TcpStream,
    first_flight: Bytes,
    limits: &Limits,
    (meter, pool, frames): (&Meter, &Pool, &Duplex),
    revoked: impl Future<Output = ()>,
) -> Ended {
    carry(guest, far, first_flight, limits, (meter, pool, Some(frames)), revoked).await
}

async fn carry(
    guest: GuestSide,
    far: TcpStream,
    first_flight: Bytes,
    limits: &Limits,
    (meter, pool, frames): (&Meter, &Pool, Option<&Duplex>),
    revoked: impl Future<Output = ()>,
) -> Ended {
    let clock = Clock::new();
    let (sent, received) = (AtomicU64::new(0), AtomicU64::new(0));
    let count_out = |passed: Passed<'_>| {
        let bytes = passed.bytes();
        sent.fetch_add(bytes, Relaxed);
        match frames {
            Some(frames) if !frames.is_meant_out(&passed) => meter.kept_open(bytes, 0),
            _ => meter.sent(bytes),
        }
        clock.touch();
    };
    let count_in = |passed: Passed<'_>| {
        let bytes = passed.bytes();
        received.fetch_add(bytes, Relaxed);
        match (frames, passed) {
            (_, Passed::Answered { said, .. }) => {
                sent.fetch_add(said, Relaxed);
                meter.kept_open(said, bytes);
            }
            (Some(frames), passed) if !frames.is_meant_back(&passed) => meter.kept_open(0, bytes),
            _ => meter.received(bytes),
        }
        clock.touch();
    };
    let mut revoked = pin!(revoked);
    let mut why = {
        let mut out = pin!(pump(&guest, &far, first_flight, (pool, frames), &count_out));
        let mut back = pin!(pump(&far, &guest, Bytes::new(), (pool, frames), &count_in));
        let (mut out_done, mut back_done) = (false, false);
        let (mut guest_lost, mut far_lost) = (false, false);
        loop {
            if out_done && back_done {
                break Why::Closed;
            }
            // What a lost side had sent is still handed on; once there is no more, it is over.
            if guest_lost && out_done {
                break Why::GuestReset;
            }
            if far_lost && back_done {
                break Why::FarReset;
            }
            let ending = out_done || back_done || guest_lost || far_lost;
            let patience = if ending { limits.idle.min(limits.half_closed) } else { limits.idle };
            tokio::select! {
                biased;
                () = &mut revoked => break Why::Revoked,
                ended = &mut out, if !out_done => match ended {
                    Ok(()) => {
                        out_done = true;
                        frames.inspect(|frames| frames.is_done());
                    }
                    Err(Broken::Source) => break Why::GuestReset,
                    Err(Broken::Sink) => break Why::FarReset,
                },
                ended = &mut back, if !back_done => match ended {
                    Ok(()) => back_done = true,
                    Err(Broken::Source) => break Why::FarReset,
                    Err(Broken::Sink) => break Why::GuestReset,
                },
                () = guest.failed(), if !guest_lost => guest_lost = true,
                _ = far.ready(Interest::ERROR), if !far_lost => far_lost = true,
                () = guest.gate().quiet(patience, || clock.last()) => break Why::Idle,
            }
            clock.touch();
        }
    };
    if why == Why::Closed {
        // What is still queued is the tunnel's, too: it may be revoked.
        let delivered = async {
            closing::acknowledged(&far).await;
            guest.acknowledged().await;
        };
        let patience = limits.idle.min(limits.half_closed);
        // Boxed, so that an open connection does not keep the room for its end.
        let delivered = Box::pin(guest.gate().within(patience, delivered));
        why = tokio::select! {
            biased;
            () = &mut revoked => Why::Revoked,
            delivered = delivered => if delivered.is_some() { Why::Closed } else { Why::Idle },
        };
    }
    if why == Why::FarReset {
        guest.end_came();
    }
    if matches!(why, Why::GuestReset | Why::Idle) && guest.is_lost() {
        why = Why::Unkept;
    }
    if why != Why::Closed {
        // Closing then sends a reset and forgets what is queued. Fails only on a dead socket.
        guest.reset_on_close();
        let _ = SockRef::from(&far).set_linger(Some(Duration::ZERO));
    }
    Ended { bytes_out: sent.load(Relaxed), bytes_in: received.load(Relaxed), why }
}

/// The time of the last event, without a timer to reset for each.
struct Clock {
    start: Instant,
    /// Milliseconds from `start` to the last event.
    last: AtomicU64,
}

impl Clock {
    fn new() -> Self {
        Self { start: Instant::now(), last: AtomicU64::new(0) }
    }

    fn touch(&self) {
        let millis = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.store(millis, Relaxed);
    }

    fn last(&self) -> Instant {
        self.start + Duration::from_millis(self.last.load(Relaxed))
    }
}
