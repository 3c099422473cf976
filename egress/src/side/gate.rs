//! Whether a guest runs, and every socket that faces it: what is closed when it falls asleep and put back
//! before it wakes. One for each attached slot.
//!
//! Time that a guest sleeps counts for nothing that waits for it. Never locks a connection while it is
//! locked itself; who has locked a connection may ask it for room, and give it what is left.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use policy::{Permit, Revision, Slot};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use crate::repair::{self, Checkpoint, Remains};
use crate::side::state::Shared;
use crate::side::store::Share;

/// How far a guest is from running.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// It runs, and has since then.
    Awake(Instant),
    /// It runs, and is given nothing more.
    Holding,
    /// It does not run, and no socket faces it.
    Asleep,
    /// It does not run yet, and its sockets are back.
    Waking,
}

/// For whom a guest that is held, or sleeps, is to run again; the later one counts more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Wanted {
    /// A far side, which has sent something or ended: nobody here has asked for that.
    Data,
    /// Whoever was let to a port of it, and says something there or takes what it had said.
    Caller,
}

/// One guest's.
#[derive(Debug)]
pub(crate) struct Gate {
    phase: watch::Sender<Phase>,
    wanted: watch::Sender<Option<Wanted>>,
    sides: Mutex<Sides>,
}

#[derive(Debug)]
struct Sides {
    known: HashMap<u64, Weak<Shared>>,
    /// Connections whose owner has ended them while the guest slept, and whether by a reset.
    remains: Vec<(Checkpoint, bool)>,
    /// Bytes that its connections hold.
    share: Share,
}

impl Gate {
    /// Of a guest that runs, and that holds nothing of its share.
    pub(crate) fn new(share: Share) -> Arc<Self> {
        Arc::new(Self {
            phase: watch::Sender::new(Phase::Awake(Instant::now())),
            wanted: watch::Sender::new(None),
            sides: Mutex::new(Sides { known: HashMap::new(), remains: Vec::new(), share }),
        })
    }

    fn phase(&self) -> Phase {
        *self.phase.borrow()
    }

    /// Whether the guest runs and is given what is for it.
    pub(crate) fn is_delivering(&self) -> bool {
        matches!(self.phase(), Phase::Awake(_))
    }

    /// Whether the guest has run all the time since then.
    pub(crate) fn runs_since(&self, awake: Instant) -> bool {
        self.phase() == Phase::Awake(awake)
    }

    /// Since when the guest runs; waits until it does.
    pub(crate) async fn awake(&self) -> Instant {
        if let Phase::Awake(since) = self.phase() {
            return since;
        }
        // Boxed: seldom, and everything that waits would be larger for it.
        Box::pin(self.waking()).await
    }

    async fn waking(&self) -> Instant {
        let mut phase = self.phase.subscribe();
        loop {
            if let Phase::Awake(since) = *phase.borrow_and_update() {
                return since;
            }
            if phase.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// Returns once nothing has happened for as long as that, while the guest was awake.
    pub(crate) async fn quiet(&self, patience: Duration, last: impl Fn() -> Instant) {
        loop {
            let until = self.awake().await.max(last()) + patience;
            if Instant::now() >= until {
                return;
            }
            sleep_until(until).await;
        }
    }

    /// The outcome of a future, or none when it takes longer than this, while the guest was awake.
    pub(crate) async fn within<T>(
        &self,
        patience: Duration,
        future: impl Future<Output = T>,
    ) -> Option<T> {
        let begun = Instant::now();
        tokio::select! {
            biased;
            outcome = future => Some(outcome),
            () = self.quiet(patience, || begun) => None,
        }
    }

    /// Something has come for the guest. It may not run.
    pub(crate) fn want(&self, by: Wanted) {
        if !self.is_delivering() {
            self.wanted.send_if_modified(|wanted| {
                let more = *wanted < Some(by);
                *wanted = (*wanted).max(Some(by));
                more
            });
        }
    }

    /// Returns once something has come for a guest that is held, or has already, that counts for as much as
    /// this; for whom.
    pub(crate) async fn wanted(&self, least: Wanted) -> Wanted {
        let mut wanted = self.wanted.subscribe();
        let found = wanted.wait_for(|wanted| *wanted >= Some(least)).await.ok().and_then(|by| *by);
        match found {
            Some(by) => by,
            None => std::future::pending().await,
        }
    }

    /// Gives the guest nothing more. False if that was so already.
    pub(crate) fn hold(&self) -> bool {
        let begun = {
            // With the lock, so that a connection that begins now knows.
            let _sides = self.lock();
            let begun = self.is_delivering();
            if begun {
                self.wanted.send_replace(None);
                self.phase.send_replace(Phase::Holding);
            }
            begun
        };
        for side in self.known() {
            side.deliver(false);
        }
        begun
    }

    /// Whether the guest has acknowledged all that it was sent.
    pub(crate) fn is_settled(&self) -> bool {
        self.known().iter().all(|side| side.is_settled())
    }

    /// Turns every connection into a value. How many are kept, and how many could not be.
    pub(crate) fn keep(&self) -> (usize, usize) {
        {
            let _sides = self.lock();
            if self.is_delivering() {
                self.wanted.send_replace(None);
            }
            self.phase.send_replace(Phase::Asleep);
        }
        let (mut kept, mut lost) = (0, 0);
        for side in self.known() {
            match side.keep(self) {
                Some(true) => kept += 1,
                Some(false) => lost += 1,
                None => {}
            }
        }
        (kept, lost)
    }

    /// What is kept is to be put back from now on: how much there is to [`Gate::rebuild`].
    pub(crate) fn rouse(&self) -> usize {
        {
            let _sides = self.lock();
            if self.phase() == Phase::Asleep {
                self.phase.send_replace(Phase::Waking);
            }
        }
        let kept = self.known().iter().filter(|side| side.is_kept()).count();
        kept + self.lock().remains.len()
    }

    /// Puts this many connections back on sockets; gives the guest nothing yet. To be called in the
    /// guests' world, inside the runtime whose tasks use the sockets. How many are back, and how many
    /// are not.
    pub(crate) fn rebuild(&self, slot: Slot, most: usize) -> (usize, usize) {
        let (mut back, mut lost) = (0, 0);
        let known = self.known();
        for side in known.iter().filter(|side| side.is_kept()).take(most) {
            match side.put_back(slot, self) {
                Some(true) => back += 1,
                Some(false) => lost += 1,
                None => {}
            }
        }
        let mut remains = std::mem::take(&mut self.lock().remains);
        let rest = remains.split_off(remains.len().min(most.saturating_sub(back + lost)));
        for (checkpoint, by_reset) in remains {
            self.free(checkpoint.bytes());
            if let Err(error) = repair::end(slot, checkpoint, by_reset) {
                tracing::debug!(%slot, %error, "end of a connection not told");
            }
        }
        self.lock().remains.extend(rest);
        (back, lost)
    }

    /// Gives the guest what is for it.
    pub(crate) fn release(&self) {
        {
            let _sides = self.lock();
            if self.is_delivering() || self.phase() == Phase::Asleep {
                return;
            }
            self.phase.send_replace(Phase::Awake(Instant::now()));
        }
        for side in self.known() {
            side.deliver(true);
        }
    }

    /// Keeps this much of a guest's payload, if there is room.
    pub(super) fn room(&self, bytes: usize) -> bool {
        self.lock().share.take(bytes)
    }

    pub(super) fn free(&self, bytes: usize) {
        self.lock().share.free(bytes);
    }

    /// What is left of every connection that is kept, without its bytes, and of those whose owner has
    /// ended them while the guest slept.
    pub(crate) fn remains(&self) -> Vec<Remains> {
        let kept = self.known();
        let mut remains: Vec<_> = kept.iter().filter_map(|side| side.remains()).collect();
        let sides = self.lock();
        remains.extend(sides.remains.iter().map(|(checkpoint, _)| Remains::of(checkpoint, 0)));
        remains
    }

    /// How many have been ended by their owners while the guest slept.
    pub(crate) fn ended(&self) -> usize {
        self.lock().remains.len()
    }

    /// Takes a connection without an owner, to be ended when the guest wakes.
    pub(crate) fn bury(&self, checkpoint: Checkpoint, by_reset: bool) {
        self.lock().remains.push((checkpoint, by_reset));
    }

    /// Makes a connection known. One of a guest that sleeps is kept at once.
    pub(super) fn admit(&self, id: u64, make: impl FnOnce(bool) -> Arc<Shared>) -> Arc<Shared> {
        let shared = {
            let mut sides = self.lock();
            let shared = make(self.is_delivering());
            sides.known.insert(id, Arc::downgrade(&shared));
            shared
        };
        if self.phase() == Phase::Asleep {
            shared.keep(self);
            if self.phase() != Phase::Asleep {
                // Too late for those who put it back: it is ended.
                shared.lose();
            }
        }
        shared
    }

    /// Forgets a connection whose owner has ended it; what is left of one that was kept is ended when the
    /// guest wakes. In one step, so that whoever puts connections back misses none.
    pub(super) fn forget(&self, id: u64, left: Option<(Checkpoint, bool)>) {
        let mut sides = self.lock();
        sides.known.remove(&id);
        sides.remains.extend(left);
    }

    /// The connection of this number is let through by that, and wakes the guest or not as its rules say. Of
    /// two policies the later one counts, whichever is heeded last.
    pub(crate) fn heed(&self, id: u64, permit: &Permit) {
        if let Some(side) = self.one(id) {
            side.heed(permit.revision(), permit.wakes());
        }
    }

    /// What its guest hears on the connection of this number is from us now, and wakes it.
    pub(crate) fn answer(&self, id: u64, revision: Revision) {
        if let Some(side) = self.one(id) {
            side.heed(revision, true);
        }
    }

    fn one(&self, id: u64) -> Option<Arc<Shared>> {
        self.lock().known.get(&id).and_then(Weak::upgrade)
    }

    fn known(&self) -> Vec<Arc<Shared>> {
        self.lock().known.values().filter_map(Weak::upgrade).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Sides> {
        self.sides.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use socket2::SockRef;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};
    use tokio::time::timeout;

    use super::*;
    use crate::side::state::Held;
    use crate::side::{GuestSide, Store};

    const HOUR: Duration = Duration::from_secs(3600);
    const SOON: Duration = Duration::from_secs(5);

    fn gate() -> Arc<Gate> {
        Gate::new(Store::new(1).share(None))
    }

    #[tokio::test(start_paused = true)]
    async fn an_hour_asleep_counts_for_nothing() {
        let gate = gate();
        let patience = Duration::from_secs(10);
        let begun = Instant::now();
        let waiting = tokio::spawn({
            let gate = Arc::clone(&gate);
            async move {
                gate.quiet(patience, || begun).await;
                Instant::now()
            }
        });
        tokio::time::sleep(patience / 2).await;
        assert!(gate.hold());
        gate.keep();
        tokio::time::sleep(HOUR).await;
        assert!(!waiting.is_finished());
        assert_eq!(gate.rouse(), 0);
        gate.release();
        let woken = Instant::now();
        assert_eq!(waiting.await.expect("no panic"), woken + patience);
    }

    #[tokio::test(start_paused = true)]
    async fn what_comes_while_a_guest_is_held_is_remembered_and_no_longer() {
        let gate = gate();
        gate.want(Wanted::Data);
        gate.hold();
        let wanted = || timeout(HOUR, gate.wanted(Wanted::Data));
        assert!(wanted().await.is_err(), "it was awake");
        gate.want(Wanted::Data);
        gate.keep();
        assert_eq!(wanted().await, Ok(Wanted::Data));
        let caller = || timeout(HOUR, gate.wanted(Wanted::Caller));
        assert!(caller().await.is_err(), "nobody has asked");
        gate.want(Wanted::Caller);
        gate.want(Wanted::Data);
        assert_eq!((caller().await, wanted().await), (Ok(Wanted::Caller), Ok(Wanted::Caller)));
        gate.rouse();
        gate.release();
        gate.hold();
        assert!(wanted().await.is_err(), "of another night");
    }

    /// Promise 41. Whoever puts connections back at that moment finds it, or what is left of it.
    #[tokio::test]
    async fn a_connection_that_its_owner_ends_while_the_guest_sleeps_is_known_until_it_is_buried() {
        let remains = serde_json::json!({
            "flow": 1, "local": "127.0.0.1:1", "remote": "127.0.0.1:2", "next_in": 1, "next_out": 1,
            "window": [0, 0, 0, 0, 0], "segment": 536, "scales": null, "sack": true, "timestamp": null,
        });
        let remains: Remains = serde_json::from_value(remains).expect("remains");
        let (stream, _guest) = connected().await;
        let gate = gate();
        let side = GuestSide::new(stream, &gate, 1);
        let shared = Arc::clone(&side.shared);
        let mut held = shared.lock();
        held.held = Held::Kept(Box::new(remains.into()));
        let owner = std::thread::spawn(move || drop(side));
        let found = |sides: &Sides| (sides.known.len(), sides.remains.len());
        // It cannot come further than here.
        for _ in 0..50 {
            std::thread::sleep(Duration::from_millis(1));
            assert_eq!(found(&gate.lock()), (1, 0));
        }
        drop(held);
        owner.join().expect("no panic");
        assert_eq!(found(&gate.lock()), (0, 1));
    }

    /// Promise 41. The far side takes nothing, so that nobody looks after it but who waits for its errors.
    #[tokio::test]
    async fn a_connection_that_cannot_be_kept_is_reset_whoever_waits_for_it() {
        for urgent in [false, true] {
            let (stream, mut guest) = connected().await;
            let gate = gate();
            let side = GuestSide::new(stream, &gate, 1);
            let watched = side.watcher();
            let waiting = tokio::spawn(async move { watched.failed().await });
            tokio::task::yield_now().await;
            guest.write_all(b"before").await.expect("sent");
            if urgent {
                SockRef::from(&guest).send_out_of_band(b"!").expect("sent");
                guest.write_all(b"after").await.expect("sent");
            }
            assert_eq!(gate.keep(), if urgent { (0, 1) } else { (1, 0) });
            if urgent {
                let ended = timeout(SOON, guest.read(&mut [0])).await.expect("told");
                let error = ended.expect_err("reset");
                assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
                timeout(SOON, waiting).await.expect("told").expect("no panic");
                assert!(side.is_lost());
            }
        }
    }

    /// Ours, and the guest's.
    #[expect(clippy::disallowed_methods, reason = "to a listener of this test's own")]
    async fn connected() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
        let guest = TcpStream::connect(listener.local_addr().expect("bound")).await;
        let (ours, _) = listener.accept().await.expect("accepted");
        (ours, guest.expect("connected"))
    }
}
