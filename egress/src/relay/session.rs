//! One session: datagrams both ways between one port of a guest and one port outside, until it is
//! cut, makes room for another, or is silent for too long. Never more of them in hand than one.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use policy::AuditRecord;
use tokio::io::Interest;
use tokio::net::UdpSocket;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::flows::{Cut, Flow};
use crate::meter::Meter;
use crate::ports::Port;
use crate::relay::socket::{self, Moved};
use crate::relay::unreachable::Why;

/// Datagrams that are moved one way before others have a turn.
const BATCH: u64 = 32;
/// Errors from outside that are passed on in one turn.
const ERRORS: usize = 8;

/// A session.
#[derive(Debug)]
pub(crate) struct Session {
    near: UdpSocket,
    far: UdpSocket,
    begun: Instant,
    /// Milliseconds from its beginning to its last datagram.
    last: AtomicU64,
    outward: Tally,
    inward: Tally,
    evicted: CancellationToken,
    meter: Meter,
    /// That of the far socket.
    _port: Port,
    /// After the sockets, which are closed first: a cut is over when nobody holds this.
    flow: Arc<Flow>,
}

/// What went one way.
#[derive(Debug, Default)]
struct Tally {
    datagrams: AtomicU64,
    bytes: AtomicU64,
    unsent: AtomicU64,
    missed: AtomicU32,
}

/// Why a session ended.
#[derive(Clone, Debug)]
pub(crate) enum End {
    /// It was cut from our side.
    Cut(Cut),
    /// It made room for another.
    Evicted,
    /// Nothing passed for too long.
    Idle,
}

impl Session {
    /// From the socket towards the guest and the one towards the outside, whose bytes the meter counts.
    pub(crate) fn new(
        (near, far): (UdpSocket, UdpSocket),
        port: Port,
        flow: Arc<Flow>,
        meter: Meter,
    ) -> Self {
        Self {
            near,
            far,
            begun: Instant::now(),
            last: AtomicU64::new(0),
            outward: Tally::default(),
            inward: Tally::default(),
            evicted: CancellationToken::new(),
            meter,
            _port: port,
            flow,
        }
    }

    /// Sends one datagram of the guest out, unless the session was cut.
    pub(crate) fn send(&self, payload: &[u8]) {
        let sent = self.may() && socket::push(&self.far, payload);
        let bytes = u64::try_from(payload.len()).unwrap_or_default();
        let moved = match sent {
            true => Moved { datagrams: 1, bytes, ..Moved::default() },
            false => Moved { unsent: 1, ..Moved::default() },
        };
        self.sent(moved);
    }

    /// When its last datagram passed.
    pub(crate) fn last(&self) -> Instant {
        self.begun + Duration::from_millis(self.last.load(Relaxed))
    }

    /// Ends it, since another needs its place.
    pub(crate) fn evict(&self) {
        self.evicted.cancel();
    }

    /// Whether it had to make room.
    #[cfg(test)]
    pub(crate) fn is_evicted(&self) -> bool {
        self.evicted.is_cancelled()
    }

    /// Carries datagrams until it ends. `tell` hears of what outside says about those of the guest.
    pub(crate) async fn carry(&self, patience: Duration, tell: impl Fn(Why)) -> End {
        let mut silence = std::pin::pin!(sleep_until(self.begun + patience));
        loop {
            let busy = tokio::select! {
                biased;
                cut = self.flow.cut() => return End::Cut(cut),
                () = self.evicted.cancelled() => return End::Evicted,
                busy = self.turn(&tell) => busy,
                () = &mut silence => {
                    let over = self.last() + patience;
                    if over <= Instant::now() {
                        return End::Idle;
                    }
                    silence.as_mut().reset(over);
                    false
                }
            };
            if busy {
                tokio::task::yield_now().await;
            }
        }
    }

    /// Waits until there is something to move, and moves a batch of it; says whether there is more.
    async fn turn(&self, tell: &impl Fn(Why)) -> bool {
        tokio::select! {
            _ = self.near.ready(Interest::READABLE) => {
                let moved = socket::relay(&self.near, &self.far, BATCH, || self.may());
                self.sent(moved);
                !moved.drained
            }
            ready = self.far.ready(Interest::READABLE | Interest::ERROR) => {
                if ready.is_ok_and(|ready| ready.is_error()) {
                    let errors = std::iter::from_fn(|| socket::error(&self.far)).take(ERRORS);
                    errors.filter_map(|(kind, code)| Why::from_outside(kind, code)).for_each(tell);
                }
                let moved = socket::relay(&self.far, &self.near, BATCH, || self.may());
                self.inward.add(moved);
                if moved.datagrams > 0 {
                    self.meter.received(moved.bytes);
                    self.touch();
                }
                !moved.drained
            }
        }
    }

    fn may(&self) -> bool {
        self.flow.was_cut().is_none()
    }

    fn sent(&self, moved: Moved) {
        self.outward.add(moved);
        if moved.datagrams > 0 {
            self.meter.sent(moved.bytes);
            self.touch();
        }
    }

    fn touch(&self) {
        let millis = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.fetch_max(millis, Relaxed);
    }

    /// Writes what it came to into the record of its end.
    pub(crate) fn conclude(&self, record: &mut AuditRecord, ended: &End) {
        let (out, inward) = (&self.outward, &self.inward);
        record.bytes_out = Some(out.bytes.load(Relaxed));
        record.bytes_in = Some(inward.bytes.load(Relaxed));
        let mut told = match ended {
            End::Cut(_) => String::new(),
            End::Evicted => "made room for another; ".to_owned(),
            End::Idle => "idle; ".to_owned(),
        };
        let (sent, received) = (out.datagrams.load(Relaxed), inward.datagrams.load(Relaxed));
        told.push_str(&format!("{sent} datagrams out, {received} in"));
        let lost = (out.lost(), inward.lost());
        if lost != (0, 0) {
            told.push_str(&format!("; lost {} out, {} in", lost.0, lost.1));
        }
        record.detail = Some(told);
    }
}

impl Tally {
    fn add(&self, moved: Moved) {
        self.datagrams.fetch_add(moved.datagrams, Relaxed);
        self.bytes.fetch_add(moved.bytes, Relaxed);
        self.unsent.fetch_add(moved.unsent, Relaxed);
        self.missed.fetch_max(moved.missed, Relaxed);
    }

    /// Datagrams that came and were not sent on.
    fn lost(&self) -> u64 {
        self.unsent.load(Relaxed).saturating_add(self.missed.load(Relaxed).into())
    }
}
