//! Datagrams of one slot that an address rule may let out, start to end: the only file that knows
//! the order.
//!
//! The first of a (source port, destination) opens a session: register, judge, make room, dial, judge
//! again if the policy moved, record, carry. Before it is judged nothing of it leaves; what is
//! refused is refused at once, by ICMP. Everything a guest can make us hold has a cap.

mod refusals;
mod session;
mod socket;
mod table;
mod unreachable;

use std::net::{SocketAddr, SocketAddrV4};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use policy::audit::{Kind, Outcome};
use policy::{Code, Slot};
use tokio::net::UdpSocket;
use tokio::time::{Instant, sleep_until, timeout};

use crate::account::Account;
use crate::flows::{Basis, Cut};
use crate::guest::Guest;
use crate::questions;
use crate::refuse::Refusal;
use crate::relay::refusals::Refusals;
use crate::relay::session::{End, Session};
use crate::relay::table::Table;
use crate::relay::unreachable::Why;
use crate::world::World;

pub(crate) use crate::relay::socket::Sockets;

/// How long the making of one session's socket in the guests' world may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// Datagrams of a guest that are looked at before others have a turn.
const TURN: usize = 32;
/// Pause after a receive that failed; the next datagram is another one.
const PAUSE: Duration = Duration::from_millis(1);

/// What all sessions of a slot share.
#[derive(Debug)]
struct Desk {
    guest: Arc<Guest>,
    slot: Slot,
    world: World,
    /// Tells the guest why, in ICMP.
    teller: std::net::UdpSocket,
    table: Mutex<Table>,
    refusals: Mutex<Refusals>,
}

/// What tells the sessions of one guest apart: its own port, and where it sends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    source: u16,
    to: SocketAddrV4,
}

/// Relays until it is dropped; sessions end when they are cut.
pub(crate) async fn serve(sockets: Sockets, guest: Arc<Guest>, world: World) {
    let Sockets { first, teller } = sockets;
    let table = Mutex::new(Table::new(guest.limits.udp_sessions));
    let (slot, refusals) = (guest.subject.slot, Mutex::default());
    let desk = Arc::new(Desk { guest, slot, world, teller, table, refusals });
    let mut lost = 0;
    loop {
        for _ in 0..TURN {
            let due = locked(&desk.refusals).due();
            let received = tokio::select! {
                biased;
                received = socket::receive(&first) => received,
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                    desk.sum_up();
                    continue;
                }
            };
            match received {
                Ok(received) => {
                    if let Some(more) = received.lost.checked_sub(lost).filter(|more| *more > 0) {
                        desk.overrun(more);
                    }
                    lost = received.lost;
                    desk.take(received.key, &received.payload).await;
                }
                Err(error) => {
                    tracing::debug!(%slot, %error, "datagram");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
        tokio::task::yield_now().await;
    }
}

impl Desk {
    /// One datagram that no session's own socket took.
    async fn take(self: &Arc<Self>, key: Key, payload: &[u8]) {
        let known = locked(&self.table).find(key);
        // It came before its session's socket was there.
        if let Some(session) = known {
            return session.send(payload);
        }
        if let Err(refusal) = self.open(key, payload).await {
            self.tell(key, Why::of(&refusal));
            self.refused(key, &refusal);
        }
    }

    /// Opens a session and lets its first datagram out.
    async fn open(self: &Arc<Self>, key: Key, payload: &[u8]) -> Result<(), Refusal> {
        let guest = &self.guest;
        let because = |code| Refusal::because(code, guest.policy.load().revision());
        let to = SocketAddr::V4(key.to);
        // Questions are the resolver's, whatever a rule says; the fence never sends one here.
        if to.port() == questions::PORT {
            return Err(because(Code::Protocol));
        }
        // A socket that is connected to port 0 hears every port.
        if key.source == 0 || to.port() == 0 {
            return Err(because(Code::Protocol).detailed("port 0"));
        }
        let flow = Arc::new(guest.flows.register().ok_or_else(|| because(Code::Limit))?);
        let told = guest.told(to.ip());
        let mut passed = guest.judge(&flow, Basis::Datagrams(told), to)?;
        if !locked(&self.table).make_room(Instant::now()) {
            return Err(because(Code::Limit).detailed("too many UDP sessions"));
        }
        let far = guest.dialer.datagrams(&passed.policy, &passed.permit)?;
        let slot = self.slot;
        let near = timeout(PATIENCE, self.world.run(move || socket::near(slot, key)));
        let near = tokio::select! {
            biased;
            cut = flow.cut() => match cut {
                Cut::Denied(denial) => return Err(Refusal::changed(denial)),
                // Whoever serves this slot's datagrams ends now, too.
                Cut::Detached => std::future::pending().await,
            },
            near = near => near,
        };
        let near = match near {
            Ok(Ok(made)) => made.and_then(UdpSocket::from_std).map_err(|error| error.to_string()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(late) => Err(late.to_string()),
        };
        let near = near.map_err(|error| because(Code::Limit).detailed(error))?;
        guest.confirm(&flow, &mut passed, far.remote)?;
        let account = Account::open(guest, &flow, Kind::Connection, &passed, far.egress, |_| ());
        let meter = guest.meter.towards(&passed.judged.place(far.remote));
        let session = Arc::new(Session::new((near, far.socket), far.port, flow, meter));
        locked(&self.table).insert(key, &session);
        session.send(payload);
        tokio::spawn(Arc::clone(self).carry(key, session, account));
        Ok(())
    }

    /// Carries datagrams until the session ends, and records what it came to.
    async fn carry(self: Arc<Self>, key: Key, session: Arc<Session>, mut account: Account) {
        let guest = &self.guest;
        let tell = |why| self.tell(key, why);
        let ended = session.carry(guest.limits.udp_idle, tell).await;
        locked(&self.table).remove(key, &session);
        if let End::Cut(Cut::Denied(_)) = ended {
            self.tell(key, Why::Prohibited);
        }
        session.conclude(&mut account.record, &ended);
        // The sockets go first: when the account is closed, nothing of the session is left.
        drop(session);
        drop(account);
    }

    /// The guest's kernel hears that datagrams of this session do not arrive, and why.
    fn tell(&self, key: Key, why: Why) {
        let message = unreachable::message(self.slot, key, why);
        if let Err(error) = socket::tell(&self.teller, self.slot, &message) {
            tracing::debug!(slot = %self.slot, %error, "icmp");
        }
    }

    /// Records a refusal; beyond a rate only their number.
    fn refused(&self, key: Key, refusal: &Refusal) {
        if locked(&self.refusals).add(1) {
            let mut record = self.guest.refused(Kind::Connection, refusal, SocketAddr::V4(key.to));
            record.protocol = Some("udp".to_owned());
            self.guest.trail.record(record);
        }
    }

    /// Datagrams that the kernel threw away, because the guest sent them faster than we judge.
    fn overrun(&self, lost: u32) {
        locked(&self.refusals).hold(lost.into());
    }

    /// Records how many were not recorded one by one.
    fn sum_up(&self) {
        let Some(count) = locked(&self.refusals).take() else { return };
        let nowhere = SocketAddr::from(([0, 0, 0, 0], 0));
        let mut record = self.guest.record(Kind::Connection, Outcome::Deny, nowhere);
        record.destination = None;
        record.protocol = Some("udp".to_owned());
        record.code = Some(Code::Limit);
        record.revision = Some(self.guest.policy.load().revision());
        record.count = (count > 1).then_some(count);
        record.detail = Some("datagrams refused that are not told one by one".to_owned());
        self.guest.trail.record(record);
    }
}

impl Drop for Desk {
    /// The slot ends: what is counted and not told yet is told now.
    fn drop(&mut self) {
        self.sum_up();
    }
}

/// A panic elsewhere does not make these unreadable: their values are whole at every step.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
