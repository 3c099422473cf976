//! The open connections of one sandbox: what they were judged by, and how they are cut.
//!
//! A connection is registered before it is judged, so that a revocation in between cannot miss it.
//! A cut is over when nobody holds the connection any more: its sockets are closed then.
//! Never more than the cap: registering over it fails.

use std::collections::HashMap;
use std::convert::Infallible;
use std::hash::{BuildHasher, RandomState};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use dns::Pinned;
use policy::audit::Kind;
use policy::judge::Target;
use policy::{Compiled, Denial, Evidence, Flow as Judgeable, Host, OwnAddresses, Permit};
use policy::{Protocol, Verdict};
use tokio::sync::{Notify, mpsc};
use tokio::time::timeout;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use crate::meter::Meter;

/// What judging the open connections again did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rejudged {
    /// Connections that were judged again.
    pub checked: usize,
    /// Of these, those that were cut.
    pub cut: usize,
    /// Connections that were cut, now or before, and are not over in spite of it.
    pub closing: usize,
}

/// Why a connection was cut from our side.
#[derive(Clone, Debug)]
pub(crate) enum Cut {
    /// Its slot was detached.
    Detached,
    /// The policy in force now denies it.
    Denied(Denial),
}

/// What a connection is judged by, owned, so that it can be judged again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Basis {
    /// A ClientHello.
    Tls { sni: Host, ech: bool },
    /// A request in clear.
    Request { authority: Host, method: String, path: String },
    /// A request that was let through and asks for another protocol.
    Upgrade { authority: Host },
    /// The names this sandbox was told for the address.
    Pinned(Pinned),
    /// Datagrams, and the names this sandbox was told for the address: only address rules let them
    /// through, and a name that is denied keeps them in.
    Datagrams(Pinned),
}

impl Basis {
    /// What it is called in the audit.
    pub(crate) fn protocol(&self) -> &'static str {
        match self {
            Self::Tls { .. } => "tls",
            Self::Request { .. } | Self::Upgrade { .. } => "http",
            Self::Pinned(_) => "tcp",
            Self::Datagrams(_) => "udp",
        }
    }

    /// What kind of record the audit has of it.
    pub(crate) fn kind(&self) -> Kind {
        match self {
            Self::Request { .. } | Self::Upgrade { .. } => Kind::Request,
            Self::Tls { .. } | Self::Pinned(_) | Self::Datagrams(_) => Kind::Connection,
        }
    }

    /// Judges it by a policy, towards where the guest aimed.
    pub(crate) fn judge(&self, policy: &Compiled, destination: SocketAddr) -> Verdict {
        policy.judge(&Judgeable {
            protocol: match self {
                Self::Datagrams(_) => Protocol::Udp,
                _ => Protocol::Tcp,
            },
            port: destination.port(),
            destination: Some(destination.ip()),
            evidence: match self {
                Self::Tls { sni, ech } => Evidence::Tls { sni, ech: *ech },
                Self::Request { authority, method, path } => {
                    Evidence::Request { authority, method, path }
                }
                Self::Upgrade { authority } => Evidence::Upgrade(authority),
                Self::Pinned(Pinned { names, all }) | Self::Datagrams(Pinned { names, all }) => {
                    Evidence::Pinned { names, all: *all }
                }
            },
        })
    }
}

/// What an open connection was let through by.
#[derive(Clone, Debug)]
pub(crate) struct Judged {
    /// What was judged.
    pub(crate) basis: Basis,
    /// Where the guest aimed.
    pub(crate) destination: SocketAddr,
    /// Whom it was let through to.
    pub(crate) target: Target,
    /// Where is being dialled, until one of them has answered.
    pub(crate) candidates: Vec<SocketAddr>,
    /// Where we dialled, once we have.
    pub(crate) dialed: Option<SocketAddr>,
}

impl Judged {
    /// The name it goes by, if it has one.
    pub(crate) fn name(&self) -> Option<String> {
        match (&self.target, &self.basis) {
            (Target::Name(host), _)
            | (
                _,
                Basis::Tls { sni: host, .. }
                | Basis::Request { authority: host, .. }
                | Basis::Upgrade { authority: host },
            ) => Some(host.as_str().to_owned()),
            _ => None,
        }
    }

    /// What its bytes are counted under: the name that it was let through to, or else the address. A name
    /// that the guest only claims is none.
    pub(crate) fn place(&self, dialed: SocketAddr) -> String {
        match &self.target {
            Target::Name(host) => host.as_str().to_owned(),
            Target::Address(_) => dialed.ip().to_string(),
        }
    }

    /// Judges it again: the permit by which it may stay open.
    pub(crate) fn again(&self, policy: &Compiled, own: &OwnAddresses) -> Result<Permit, Denial> {
        let permit = match self.basis.judge(policy, self.destination) {
            Verdict::Pass(permit) => permit,
            Verdict::Deny(denial) | Verdict::Undecidable(denial) => return Err(denial),
        };
        if *permit.target() != self.target {
            return Err(Denial::because(policy::Code::PolicyChanged, policy.revision()));
        }
        for address in self.candidates.iter().chain(&self.dialed) {
            policy.judge_address(&permit, address.ip(), own)?;
        }
        Ok(permit)
    }
}

/// The connections of one attached slot.
#[derive(Debug)]
pub(crate) struct Flows {
    cap: usize,
    meter: Meter,
    /// The number of the next one. The first is random: no two on this node are the same, restarts or
    /// not, and those of one guest say nothing of how many others have.
    next: AtomicU64,
    table: Mutex<Table>,
    emptied: Notify,
}

#[derive(Debug, Default)]
struct Table {
    open: HashMap<u64, Arc<Entry>>,
    shut: bool,
}

/// Connections of one slot that are still to be judged again.
#[derive(Debug)]
pub(crate) struct Again {
    open: std::vec::IntoIter<(u64, Weak<Entry>)>,
}

#[derive(Debug, Default)]
struct Entry {
    noted: Mutex<Option<Note>>,
    cut: OnceLock<Cut>,
    signal: CancellationToken,
    /// Dropped with the entry, which tells those who wait for its end.
    watched: Mutex<Vec<Watched>>,
}

/// What a connection was let through by last.
#[derive(Debug)]
struct Note {
    judged: Arc<Judged>,
    /// Nothing of it is under way: it is kept for the next request.
    resting: bool,
}

/// The part of a connection that must end for a cut to be over.
type Watched = mpsc::Sender<Infallible>;

/// Waits for the end of connections that were cut.
#[derive(Debug)]
pub(crate) struct Ending {
    watched: Watched,
    over: mpsc::Receiver<Infallible>,
}

/// One registered connection; forgotten when dropped. Shared by the tasks that have a socket of it.
#[derive(Debug)]
pub(crate) struct Flow {
    id: u64,
    rank: usize,
    entry: Arc<Entry>,
    flows: Arc<Flows>,
}

impl Flows {
    /// An empty register that takes `cap` connections.
    pub(crate) fn new(cap: usize, meter: Meter) -> Arc<Self> {
        // Twelve bits less than there are: exact in a JSON number, however many follow.
        let next = AtomicU64::new(RandomState::new().hash_one(cap) >> 12);
        Arc::new(Self { cap, meter, next, table: Mutex::default(), emptied: Notify::new() })
    }

    /// Registers a connection; none over the cap, or once the register is shut.
    pub(crate) fn register(self: &Arc<Self>) -> Option<Flow> {
        let mut table = lock(&self.table);
        if table.shut || table.open.len() >= self.cap {
            return None;
        }
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let entry = Arc::<Entry>::default();
        table.open.insert(id, Arc::clone(&entry));
        self.meter.opened();
        let rank = table.open.len();
        Some(Flow { id, rank, entry, flows: Arc::clone(self) })
    }

    /// Those that are registered now, to be judged again one by one. None of them is kept by it, and
    /// others come and go meanwhile: judging may take long.
    pub(crate) fn again(&self) -> Again {
        let table = lock(&self.table);
        let open = table.open.iter().map(|(id, entry)| (*id, Arc::downgrade(entry)));
        Again { open: open.collect::<Vec<_>>().into_iter() }
    }

    /// What the connection of this number is let through by, as long as that is under way.
    pub(crate) fn under_way(&self, id: u64) -> Option<Arc<Judged>> {
        let entry = lock(&self.table).open.get(&id).map(Arc::clone)?;
        let noted = lock(&entry.noted);
        let note = noted.as_ref().filter(|note| !note.resting && note.judged.dialed.is_some());
        note.map(|note| Arc::clone(&note.judged))
    }

    /// Takes no more connections and cuts those that are open; says how many.
    pub(crate) fn shut(&self) -> usize {
        let mut table = lock(&self.table);
        table.shut = true;
        table.open.values().filter(|entry| entry.cut(Cut::Detached)).count()
    }

    /// Returns once no connection is registered.
    pub(crate) async fn empty(&self) {
        loop {
            let emptied = self.emptied.notified();
            if lock(&self.table).open.is_empty() {
                return;
            }
            emptied.await;
        }
    }
}

impl Again {
    /// Judges the next of them, if it was let through, and cuts it if it is denied now; it is over
    /// when `ending` says so, and so is one that was cut before; otherwise the permit by which it stays,
    /// and its number. None when there is no other.
    pub(crate) fn next(
        &mut self,
        policy: &Compiled,
        own: &OwnAddresses,
        ending: &Ending,
    ) -> Option<(Rejudged, Option<(u64, Permit)>)> {
        let mut done = Rejudged::default();
        let (id, entry) = self.open.next()?;
        let Some(entry) = entry.upgrade() else { return Some((done, None)) };
        if entry.cut.get().is_some() {
            ending.watch(&entry);
            return Some((done, None));
        }
        let judged = lock(&entry.noted).as_ref().map(|note| Arc::clone(&note.judged));
        let Some(judged) = judged else { return Some((done, None)) };
        done.checked = 1;
        match judged.again(policy, own) {
            Ok(permit) => Some((done, Some((id, permit)))),
            Err(denial) => {
                done.cut = usize::from(entry.cut(Cut::Denied(denial)));
                ending.watch(&entry);
                Some((done, None))
            }
        }
    }
}

impl Rejudged {
    /// Adds what judging others did.
    pub(crate) fn add(&mut self, more: Self) {
        self.checked += more.checked;
        self.cut += more.cut;
        self.closing += more.closing;
    }
}

impl Entry {
    /// Whether this call is the one that cut it.
    fn cut(&self, why: Cut) -> bool {
        let first = self.cut.set(why).is_ok();
        self.signal.cancel();
        first
    }
}

impl Ending {
    /// Nothing is waited for yet.
    pub(crate) fn new() -> Self {
        let (watched, over) = mpsc::channel(1);
        Self { watched, over }
    }

    fn watch(&self, entry: &Entry) {
        let mut watched = lock(&entry.watched);
        // Those who did not wait until the end.
        watched.retain(|one| !one.is_closed());
        watched.push(self.watched.clone());
    }

    /// Returns once nobody holds any of these connections, or when that takes longer than this; how
    /// many are held then.
    pub(crate) async fn over(self, patience: Duration) -> usize {
        let Self { watched, mut over } = self;
        drop(watched);
        // Nothing is ever sent: the end comes when the last sender is gone.
        match timeout(patience, over.recv()).await {
            Ok(_) => 0,
            Err(_) => over.sender_strong_count(),
        }
    }
}

impl Flow {
    /// The number that joins its audit records.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Notes that a payload byte of it has passed, which is no one's traffic but ours.
    pub(crate) fn touch(&self) {
        self.flows.meter.touch();
    }

    /// How many were open with it when it was registered, itself among them. Of those that are open at
    /// any time, the n-th oldest has a rank of n or more.
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// Notes what it is let through by from now on.
    pub(crate) fn note(&self, judged: &Arc<Judged>) {
        let judged = Arc::clone(judged);
        *lock(&self.entry.noted) = Some(Note { judged, resting: false });
    }

    /// Forgets what it was let through by, unless it has been let through by something else since.
    pub(crate) fn forget(&self, judged: &Arc<Judged>) {
        lock(&self.entry.noted).take_if(|note| Arc::ptr_eq(&note.judged, judged));
    }

    /// Notes that nothing is under way of what it was let through by, unless it has been let through
    /// by something else since. It is judged again all the same: its far side is kept open.
    pub(crate) fn rest(&self, judged: &Arc<Judged>) {
        if let Some(note) = lock(&self.entry.noted).as_mut()
            && Arc::ptr_eq(&note.judged, judged)
        {
            note.resting = true;
        }
    }

    /// What it was let through by last, if nothing of that is under way.
    pub(crate) fn resting(&self) -> Option<Arc<Judged>> {
        let noted = lock(&self.entry.noted);
        noted.as_ref().filter(|note| note.resting).map(|note| Arc::clone(&note.judged))
    }

    /// Waits until it is cut.
    pub(crate) async fn cut(&self) -> Cut {
        self.entry.signal.cancelled().await;
        self.was_cut().cloned().unwrap_or(Cut::Detached)
    }

    /// Why it was cut, if it was.
    pub(crate) fn was_cut(&self) -> Option<&Cut> {
        self.entry.cut.get()
    }

    /// The same wait as [`Flow::cut`], as a value that can be kept.
    pub(crate) fn signal(&self) -> WaitForCancellationFutureOwned {
        self.entry.signal.clone().cancelled_owned()
    }
}

impl Drop for Flow {
    fn drop(&mut self) {
        let mut table = lock(&self.flows.table);
        table.open.remove(&self.id);
        self.flows.meter.closed();
        if table.open.is_empty() {
            self.flows.emptied.notify_waiters();
        }
    }
}

/// A panic elsewhere does not make a register unreadable: its values are whole at every step.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
