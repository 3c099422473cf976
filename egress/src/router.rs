//! The public verbs: start, attach a sandbox, detach it, reach one of its ports, judge it again, close.
//!
//! A slot's fence is applied and read back before its link is up, and removed after its sockets are
//! gone. Set-up undoes itself in reverse; teardown goes on whatever fails.

mod call;
mod close;
mod refence;
mod rejudge;
mod rest;

pub use crate::router::rest::{Activity, Held};
use std::collections::{BTreeSet, HashMap};
use std::io;
use std::net::IpAddr;
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use dns::{Asker, Pins, Resolver};
use fault::Point;
use policy::audit::{AuditRecord, Kind, Outcome};
use policy::{Code, OwnAddresses, PolicyHandle, Slot, Subject, Trail};
use tokio::net::{TcpListener, UdpSocket};
use tokio::sync::mpsc::Receiver;
use tokio::sync::{Mutex as Turn, OwnedMutexGuard};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::accept;
use crate::conn;
use crate::dial::Dialer;
use crate::drops::{self, Dropped};
use crate::error::Error;
use crate::fence::{self, SlotFence};
use crate::flows::Flows;
use crate::guest::Guest;
use crate::limits::Limits;
use crate::link;
use crate::meter::Meter;
use crate::ports::Ports;
use crate::questions;
use crate::refuse::Refusal;
use crate::relay::{self, Sockets};
use crate::sever::{STATES, sever};
use crate::side::{Gate, Store};
use crate::tunnel::Pool;
use crate::watch::Watch;
use crate::world::{World, claim};

/// Addresses a sandbox was told that are remembered.
const PINS: usize = 4096;
/// Pipes lent to tunnels at once, over all guests.
const PIPES: usize = 4096;
/// Connections of ours to the ports of one guest.
const CALLS: usize = 256;
/// How long connections that were cut are waited for.
const DRAIN: Duration = Duration::from_secs(2);

/// How the router is set up.
#[derive(Clone, Debug)]
pub struct Config {
    /// Name of the guests' network namespace, e.g. `postern`.
    pub netns: String,
    /// TCP port inside that namespace to which guests' connections are diverted.
    pub divert_port: u16,
    /// The nflog group on which dropped frames are sampled.
    pub nflog_group: u16,
    /// How often it is looked whether somebody else changed the fence.
    pub look: Duration,
    /// The highest slot that a sandbox is attached in: among so many the ports of the egress addresses
    /// are shared.
    pub slots: u16,
    /// Bounds of each sandbox's connections.
    pub limits: Limits,
    /// Bytes of names that each sandbox may have asked upstream, where it chose them itself.
    pub names: dns::Names,
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

/// The way out of every guest of this node. Clones are the same router.
#[derive(Clone, Debug)]
pub struct Router {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    config: Config,
    world: World,
    resolver: Resolver,
    own: OwnAddresses,
    trail: Trail,
    pool: Pool,
    ports: Ports,
    store: Store,
    seats: Mutex<HashMap<Slot, Seat>>,
    /// One change of a slot at a time. No slot waits for another: an end waits for the connections
    /// that it cuts, and some take their time.
    turns: Mutex<HashMap<Slot, Arc<Turn<()>>>>,
    watch: Watch,
    _claim: UnixListener,
}

/// An attached slot.
#[derive(Debug)]
struct Seat {
    guest: Arc<Guest>,
    /// What its fence is meant to be, and whether the kernel holds that.
    fence: SlotFence,
    held: bool,
    /// A repair of it has begun and not ended well: its link may be down.
    shut: bool,
    /// Connections of ours to its ports.
    calls: Arc<Flows>,
    /// What listens to it; ends when this is dropped.
    listening: JoinSet<()>,
}

impl Router {
    /// Enters the guests' world, puts up the base fence and the policy route, and begins to read
    /// which frames the fence drops. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// When the world or its fence cannot be set up; this needs root.
    pub async fn start(
        config: Config,
        resolver: Resolver,
        own: OwnAddresses,
        trail: Trail,
    ) -> Result<Self, Error> {
        let world = World::enter(&config.netns).await?;
        let claim = world.run(claim).await?;
        let claim = claim.map_err(|source| match source.kind() {
            io::ErrorKind::AddrInUse => Error::Taken(config.netns.clone()),
            _ => Error::Claim { netns: config.netns.clone(), source },
        })?;
        fence::install_base(&world, config.divert_port).await?;
        let drops = drops::listen(&world, config.nflog_group).await?;
        let (ports, store) = (Ports::new(config.slots), Store::new(config.slots));
        let shared = Arc::new(Shared {
            config,
            world,
            resolver,
            own,
            trail,
            pool: Pool::new(PIPES),
            ports,
            store,
            seats: Mutex::default(),
            turns: Mutex::default(),
            watch: Watch::default(),
            _claim: claim,
        });
        tokio::spawn(account(Arc::downgrade(&shared), drops));
        tokio::spawn(look(Arc::downgrade(&shared), shared.config.look));
        Ok(Self { shared })
    }

    /// Runs something short on a thread in the guests' world: a socket or tap made there stays there.
    ///
    /// # Errors
    /// When that thread has ended, or the closure panicked.
    pub async fn within<T: Send + 'static>(
        &self,
        act: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Error> {
        self.shared.world.run(act).await
    }

    /// Lets a sandbox speak: its tap exists, and afterwards it is up, behind its fence. The change is
    /// completed even if the future is dropped.
    ///
    /// # Errors
    /// When the slot is taken, has no tap, or a step fails; nothing is left behind then.
    pub async fn attach(&self, attachment: Attachment) -> Result<(), Error> {
        let (shared, slot) = (Arc::clone(&self.shared), attachment.subject.slot);
        let attached = tokio::spawn(async move { shared.attach(&attachment).await });
        attached.await.map_err(|_| Error::Interrupted(slot))?
    }

    /// Cuts every connection of a slot and takes its sockets, routes and fence away. The tap stays:
    /// it is its owner's. A slot that is not attached is cleaned all the same. The change is
    /// completed even if the future is dropped.
    ///
    /// # Errors
    /// When the kernel refuses a step; the others are done all the same, and it may be called again.
    pub async fn detach(&self, slot: Slot) -> Result<Detached, Error> {
        let shared = Arc::clone(&self.shared);
        let detached = tokio::spawn(async move { shared.detach(slot).await });
        detached.await.map_err(|_| Error::Interrupted(slot))?
    }

    /// The counters of an attached slot.
    #[must_use]
    pub fn meter(&self, slot: Slot) -> Option<Meter> {
        self.shared.seats().get(&slot).map(|seat| seat.guest.meter.clone())
    }

    /// Deletes the tap of a detached slot, whoever holds it open; one that is gone is as good.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub async fn delete_tap(&self, slot: Slot) -> Result<(), Error> {
        link::delete(&self.shared.world, slot).await
    }

    /// The addresses of this host, which no guest is let to.
    #[must_use]
    pub fn own(&self) -> &OwnAddresses {
        &self.shared.own
    }

    /// The slots of which the kernel has a tap or any part of a fence, attached or not.
    ///
    /// # Errors
    /// When the kernel cannot be asked.
    pub async fn present(&self) -> Result<BTreeSet<Slot>, Error> {
        let world = &self.shared.world;
        let (taps, fences) = (link::list(world).await?, fence::present(world).await?);
        Ok(taps.into_iter().chain(fences).collect())
    }

    /// The fence as text, in nft syntax: what is meant to be in the kernel.
    #[must_use]
    pub fn ruleset(&self) -> String {
        let seats = self.shared.seats();
        let mut slots: Vec<_> = seats.iter().map(|(at, seat)| (*at, seat.fence.clone())).collect();
        slots.sort_unstable_by_key(|(at, _)| *at);
        fence::ruleset(self.shared.config.divert_port, &slots).to_string()
    }
}

impl Shared {
    async fn attach(&self, attachment: &Attachment) -> Result<(), Error> {
        let slot = attachment.subject.slot;
        let _turn = self.turn(slot).await;
        if self.seats().contains_key(&slot) {
            return Err(Error::Occupied(slot));
        }
        if attachment.egress.iter().filter(|ip| ip.is_ipv4()).count() > 1
            || attachment.egress.iter().filter(|ip| ip.is_ipv6()).count() > 1
        {
            return Err(Error::EgressAddresses(slot));
        }
        let raised = match self.prepare(attachment).await {
            Ok(seat) => {
                // Before it can speak: a policy write misses nothing of it.
                self.seats().insert(slot, seat);
                let up = link::up(&self.world, slot).await;
                up.inspect(|_| fault::at(Point::LinkRaised)).map(drop)
            }
            Err(error) => Err(error),
        };
        if raised.is_err() {
            let seat = self.seats().remove(&slot);
            seat.inspect(|seat| _ = seat.guest.flows.shut());
            if let Err(undo) = self.lower(slot).await {
                tracing::warn!(%slot, error = &undo as &dyn std::error::Error, "undo attach");
            }
        }
        raised
    }

    /// The fence is in place before the link is up, and so are the sockets that it diverts to.
    async fn prepare(&self, attachment: &Attachment) -> Result<Seat, Error> {
        let slot = attachment.subject.slot;
        link::prepare(&self.world, slot).await?;
        fault::at(Point::LinkPrepared);
        let fence = self.fence(&attachment.policy);
        fence::attach(&self.world, slot, &fence).await?;
        fault::at(Point::RulesLoaded);
        let port = self.config.divert_port;
        let made = move || {
            (accept::listener(slot, port), questions::socket(slot), Sockets::make(slot, port))
        };
        let (listener, socket, relayed) = self.world.run(made).await?;
        let listener = listener
            .and_then(TcpListener::from_std)
            .map_err(|source| Error::Socket { what: "listener", slot, source })?;
        let socket = socket.and_then(UdpSocket::from_std).map_err(|source| Error::Socket {
            what: "resolver socket",
            slot,
            source,
        })?;
        let relayed = relayed.and_then(Sockets::try_from).map_err(|source| Error::Socket {
            what: "relay socket",
            slot,
            source,
        })?;
        let guest = Arc::new(self.guest(attachment));
        let mut listening = JoinSet::new();
        listening.spawn(questions::serve(socket, Arc::clone(&guest.dns)));
        listening.spawn(listen(listener, Arc::clone(&guest)));
        listening.spawn(relay::serve(relayed, Arc::clone(&guest), self.world.clone()));
        fault::at(Point::SocketsOpened);
        Ok(Seat {
            calls: Flows::new(CALLS, guest.meter.clone()),
            guest,
            fence,
            held: true,
            shut: false,
            listening,
        })
    }

    fn guest(&self, attachment: &Attachment) -> Guest {
        let Attachment { subject, policy, egress } = attachment;
        let limits = self.config.limits;
        let meter = Meter::new();
        let pins = Arc::new(Pins::new(PINS));
        let asker = Asker::new(self.resolver.clone(), self.config.names);
        Guest {
            subject: Arc::clone(subject),
            policy: policy.clone(),
            own: self.own.clone(),
            dns: Arc::new(dns::Guest::new(
                Arc::clone(subject),
                policy.clone(),
                Arc::clone(&pins),
                self.own.clone(),
                asker.clone(),
                egress.iter().any(IpAddr::is_ipv6),
                self.trail.clone(),
            )),
            pins,
            dialer: Dialer::new(
                subject.slot,
                asker,
                self.own.clone(),
                egress,
                self.ports.clone(),
                &limits,
            ),
            flows: Flows::new(limits.flows, meter.clone()),
            meter,
            gate: Gate::new(self.store.share(Some(&subject.tenant))),
            limits,
            pool: self.pool.clone(),
            trail: self.trail.clone(),
        }
    }

    async fn detach(&self, slot: Slot) -> Result<Detached, Error> {
        let _turn = self.turn(slot).await;
        let seat = self.seats().remove(&slot);
        let mut detached = Detached::default();
        if let Some(Seat { guest, calls, mut listening, .. }) = seat {
            detached.cut = guest.flows.shut() + calls.shut();
            listening.shutdown().await;
            let gone = async {
                guest.flows.empty().await;
                calls.empty().await;
            };
            if timeout(DRAIN, gone).await.is_err() {
                tracing::warn!(%slot, open = guest.meter.open(), "connections outlive their slot");
            }
            detached.bytes_out = guest.meter.bytes_out();
            detached.bytes_in = guest.meter.bytes_in();
        }
        self.lower(slot).await.map(|()| detached)
    }

    /// Ends what is left of a slot's connections, takes its link down and then its fence, whatever
    /// there is of them.
    async fn lower(&self, slot: Slot) -> Result<(), Error> {
        let severed = sever(&self.world, slot, STATES).await;
        fault::at(Point::ConnectionsSevered);
        let link = link::down(&self.world, slot).await;
        fault::at(Point::LinkLowered);
        let fence = fence::detach(&self.world, slot).await;
        fault::at(Point::RulesRemoved);
        severed.and(link).and(fence)
    }

    /// Waits until nobody else changes this slot. There is one lock for each slot that was ever used.
    async fn turn(&self, slot: Slot) -> OwnedMutexGuard<()> {
        let turn = {
            let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(turns.entry(slot).or_default())
        };
        turn.lock_owned().await
    }

    fn seats(&self) -> MutexGuard<'_, HashMap<Slot, Seat>> {
        self.seats.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Records what the fence dropped of attached slots, for as long as there is a router.
async fn account(shared: Weak<Shared>, mut drops: Receiver<Dropped>) {
    while let Some(dropped) = drops.recv().await {
        let Some(shared) = shared.upgrade() else { return };
        let guest = shared.seats().get(&dropped.slot).map(|seat| Arc::clone(&seat.guest));
        let Some(guest) = guest else { continue };
        let mut record = AuditRecord::new(fault::wall_clock(), Kind::Frame, Outcome::Deny);
        record.protocol = Some(dropped.protocol.into_owned());
        record.destination = dropped.destination;
        record.code = Some(dropped.reason.code());
        record.count = (dropped.count > 1).then_some(dropped.count);
        record.detail = Some(match dropped.source {
            Some(source) => format!("{} from {source}", dropped.reason),
            None => dropped.reason.to_string(),
        });
        guest.trail.record(record.about(&guest.subject));
    }
}

/// Looks after the fence for as long as there is a router.
async fn look(shared: Weak<Shared>, every: Duration) {
    let mut look = tokio::time::interval(every);
    look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        look.tick().await;
        let Some(shared) = shared.upgrade() else { return };
        if let Err(error) = shared.look_after().await {
            tracing::error!(error = &error as &dyn std::error::Error, "fence not mended");
        }
    }
}

/// Takes the connections of one slot. Each is its own task: what it does to itself, the others do
/// not see. They end when they are cut, not with this.
async fn listen(listener: TcpListener, guest: Arc<Guest>) {
    loop {
        match accept::next(&listener).await {
            Ok(incoming) => drop(tokio::spawn(conn::serve(Arc::clone(&guest), incoming))),
            Err(destination) => {
                let refusal = Refusal::because(Code::Limit, guest.policy.load().revision())
                    .detailed("this node has no descriptors left for guests");
                let mut record = guest.refused(Kind::Connection, &refusal, destination);
                record.protocol = Some("tcp".to_owned());
                guest.trail.record(record);
            }
        }
    }
}
