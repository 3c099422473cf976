//! One task per sandbox, the only writer of its state: it asks the machine what comes next, notes it
//! in the journal, does it, and publishes. Verbs are queued, and heard between two acts; a caller that goes
//! away changes nothing, and a panic is the failure of what was being done.

mod handle;
mod heed;
mod rest;
mod settled;
mod rewound;
mod copied;
mod stored;

use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use fault::Point;
use futures_util::FutureExt;
use policy::audit::{Kind, Outcome};
use policy::{AuditRecord, SnapshotName, Trail};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use vault::Vault;

use crate::acts::Acts;
use crate::cold::Cold;
use crate::error::{Error, chain};
use crate::machine::{Act, Left, Machine};
use crate::night::{Alarm, Night};
use crate::policies::Policies;
use crate::reason::Reason;
use crate::snapshot::Snapshot;
use crate::state::State;
use crate::store::{Record, Store};
use crate::stuck::Stuck;
use crate::turns::Turns;
use crate::usage::Tab;

pub(crate) use crate::driver::copied::Wanted;
pub(crate) use crate::driver::handle::{End, Handle};
pub(crate) use crate::driver::heed::LONGEST_LEASE;
pub use crate::driver::rest::Call;
pub(crate) use crate::driver::rest::{Calls, Reply, Rest, Shown};
pub(crate) use crate::driver::rewound::Moment;
pub(crate) use crate::driver::stored::release;

/// How often a running process is looked at.
const LOOK: Duration = Duration::from_millis(500);
/// The pause before one thing is tried again, and the longest to which it grows where it is tried often.
const RETRY: Duration = Duration::from_millis(200);
const LONGEST_RETRY: Duration = Duration::from_secs(5);

/// What others see of a sandbox's driver.
#[derive(Clone, Debug)]
pub(crate) struct Published {
    pub(crate) state: State,
    pub(crate) reason: Option<Reason>,
    pub(crate) pid: Option<u32>,
    /// Which incarnation it is now.
    pub(crate) incarnation: u64,
    pub(crate) cold: Cold,
    /// What is being done, and since when.
    pub(crate) doing: Option<Act>,
    /// The first act that failed, for the caller who waits for the creation.
    pub(crate) error: Option<Arc<Error>>,
    /// Whether it is removed by force, and what was given up then, in words.
    pub(crate) forced: bool,
    pub(crate) left: Option<String>,
}

/// Something is wanted of a sandbox, other than its end.
#[derive(Debug)]
pub(crate) enum Verb {
    /// It is to run, for whoever wants something of its guest.
    Wake(Reply),
    /// One that has failed is to be as good as asleep, with its disk alone.
    Revive(Reply),
    /// It is to sleep, until then if nobody wakes it.
    Standby(Option<Alarm>, Reply),
    /// The same, and into the store.
    Suspend(Reply),
    /// A snapshot of it is to be taken, of this name.
    Snapshot(SnapshotName, Reply),
    /// It is to go back to this snapshot, and run.
    RollBack(Box<Snapshot>, Reply),
    /// It is to be awake for so long.
    KeepAwake(Duration, Reply),
    /// It is to live so long from now, or as long as it was given.
    Renew(Option<Duration>, Reply),
}

/// Everything one driver uses.
#[derive(Debug)]
pub(crate) struct Task {
    pub(crate) record: Record,
    pub(crate) machine: Machine,
    pub(crate) acts: Acts,
    pub(crate) store: Store,
    pub(crate) vault: Vault,
    /// Turns of those that are put into it.
    pub(crate) puts: Turns,
    pub(crate) policies: Arc<Policies>,
    pub(crate) trail: Trail,
    pub(crate) verbs: mpsc::Receiver<Verb>,
    /// Changed by who wants it removed.
    pub(crate) end: watch::Receiver<End>,
    pub(crate) published: watch::Sender<Published>,
    pub(crate) rest: Rest,
    /// Snapshots of it that are wanted.
    pub(crate) copies: VecDeque<Wanted>,
    pub(crate) stuck: Stuck,
    /// Moments that it is to go back to.
    pub(crate) rewinds: VecDeque<Moment>,
    pub(crate) tab: Tab,
    /// Where it rested last.
    pub(crate) arrived: Option<State>,
    /// How often it had booted from its disk alone then.
    pub(crate) booted: u64,
    /// What the journal has of its night, as far as this daemon has written it.
    pub(crate) noted: Option<Night>,
}

impl Task {
    /// Runs until the sandbox is gone, and then gives the task for the last word; or until the
    /// daemon stops listening to it.
    pub(crate) async fn run(mut self) -> Option<Self> {
        self.tell_ends();
        // The machine and the record say what may be there whenever a panic strikes: they move on only
        // after what they tell of.
        while AssertUnwindSafe(self.travel()).catch_unwind().await.is_err() {
            if !self.broke().await {
                break;
            }
        }
        (self.machine.state() == State::Gone).then_some(self)
    }

    async fn travel(&mut self) {
        let began = Instant::now();
        loop {
            if self.is_to_end() {
                self.heed_end();
            }
            self.heed_queued(None).await;
            self.turn_round();
            let Some(act) = self.machine.next() else {
                if self.settle().await {
                    continue;
                }
                return;
            };
            if !self.machine.takes_a_turn() {
                self.rest.leave();
            }
            if self.rest.is_in_line() {
                if !self.wait_in_line().await {
                    return;
                }
                continue;
            }
            self.publish(Some(act));
            tracing::debug!(sandbox = %self.record.name, doing = act.doing(), ms = began.elapsed().as_millis(), "act");
            // In the journal before the act: a daemon that dies now knows what may exist. Undoing
            // needs no note: the next daemon would only undo again. Nor does what ran before: the journal
            // has it as running.
            match self.note().await {
                Err(error)
                    if act.puts_to_sleep() && !self.machine.is_asleep()
                        || act.makes() && !self.machine.greeted() =>
                {
                    if !self.refused(act, error).await {
                        return;
                    }
                    continue;
                }
                Err(error) => self.unnoted(&error),
                Ok(()) => {}
            }
            if act == Act::RaiseFence {
                // It may have been shut in until now.
                self.record.reason = None;
            }
            let (before, after) = act.points();
            fault::at(before);
            let done = match act {
                Act::BeginAnew => Some(self.begin_anew().await),
                Act::Copy => self.copy_away().await,
                Act::Rewind => self.rewind().await,
                Act::Store => self.store_away().await,
                Act::Fetch => self.fetch().await,
                _ => self.perform(act).await,
            };
            let Some(done) = done else { continue };
            fault::at(after);
            match done {
                Ok(()) => {
                    if act == Act::GreetAgent && self.machine.is_cold() {
                        self.record.cold.done();
                    }
                    if let (Act::RemoveFiles, Some(stored)) = (act, &self.record.stored) {
                        self.release_key(stored.key.clone());
                    }
                    self.machine.done(act);
                }
                Err(error) => {
                    if !self.refused(act, error).await {
                        return;
                    }
                }
            }
        }
    }

    /// It is another incarnation from here on, and the journal has it before anybody else.
    async fn begin_anew(&mut self) -> Result<(), Error> {
        self.record.incarnation = self.store.begin_anew(&self.record).await?;
        self.record.process = None;
        // Its fence was lowered: what it had has ended, and that is in the audit. Where what was saved turns
        // out to be of use after all, its guest has yet to hear it.
        self.record.night.told();
        Ok(())
    }

    /// What was saved of it is of no use. Where its disk is, and that is allowed, it boots from that.
    async fn cool(&mut self, error: &Error) -> bool {
        if !self.acts.hypervisors().may_boot(&self.record).await {
            return false;
        }
        self.record.saved = None;
        self.record.cold.begin(Reason::of(error));
        self.machine.cool();
        true
    }

    /// Does it; none when somebody wanted the sandbox removed meanwhile.
    async fn perform(&mut self, act: Act) -> Option<Result<(), Error>> {
        let hears = self.machine.hears();
        let done = {
            let performing = self.acts.perform(act, &mut self.record, hears);
            tokio::pin!(performing);
            tokio::select! {
                biased;
                done = &mut performing => Some(done),
                // Only waiting for the guest is worth interrupting; all else is short and whole.
                Ok(()) = self.end.changed(), if act == Act::GreetAgent => None,
            }
        };
        if done.is_none() {
            self.heed_end();
        }
        done
    }

    /// An act failed; gives whether the journey goes on.
    async fn refused(&mut self, act: Act, error: Error) -> bool {
        tracing::warn!(sandbox = %self.record.name, doing = act.doing(), error = chain(&error), "act failed");
        if act == Act::Unpause && self.acts.hypervisors().is_used_up(&self.record).await {
            self.record.saved = None;
            self.machine.used_up();
        }
        let greeted = self.machine.greeted();
        if error.is_lasting() {
            self.machine.failed_for_good(act);
        } else {
            self.machine.failed(act);
        }
        if act == Act::Prepare && error.is_unusable() {
            if self.cool(&error).await {
                return true;
            }
            self.machine.lost();
        } else if act == Act::Fetch && error.is_missing() {
            // There is no way back: its disk was there, too.
            self.machine.lost();
        } else if greeted && act.needs_its_process() && !self.acts.is_running(&self.record) {
            self.machine.process_gone();
        }
        let again = self.machine.next() == Some(act);
        if again && act.makes() && !self.machine.is_asleep() {
            return self.shut_in(error).await;
        }
        self.blame(error);
        if again && self.machine.left() == Left::Process {
            // Who waits for the end is told that it may take long.
            self.publish(None);
            return self.pause(LONGEST_RETRY).await;
        }
        if again {
            tokio::time::sleep(RETRY).await;
        }
        true
    }

    /// Waits before the next try, less long where somebody wants it removed; gives whether the journey goes
    /// on.
    async fn pause(&mut self, pause: Duration) -> bool {
        let over = Instant::now() + pause;
        loop {
            tokio::select! {
                biased;
                Ok(()) = self.end.changed() => {
                    self.heed_end();
                    return true;
                }
                () = tokio::time::sleep_until(over) => return true,
                verb = self.verbs.recv() => {
                    let Some(verb) = verb else { return false };
                    self.heed_queued(Some(verb)).await;
                }
            }
        }
    }

    /// Waits for its turn on the way, hearing what is wanted; gives whether the journey goes on.
    async fn wait_in_line(&mut self) -> bool {
        loop {
            let ends = self.rest.ends();
            tokio::select! {
                biased;
                Ok(()) = self.end.changed() => {
                    self.heed_end();
                    return true;
                }
                () = ends => {
                    self.look(self.machine.state());
                    return true;
                }
                () = self.rest.turn_comes() => return true,
                verb = self.verbs.recv() => {
                    let Some(verb) = verb else { return false };
                    self.heed_queued(Some(verb)).await;
                }
            }
        }
    }

    /// The fence of a guest that ran before this daemon could not be raised. Shuts it in and says so, and
    /// waits for the next try or for whoever wants it removed; gives whether the journey goes on.
    async fn shut_in(&mut self, error: Error) -> bool {
        // However far the raising got: the link is down, and the slot free for the next try.
        if let Err(error) = self.acts.perform(Act::LowerFence, &mut self.record, true).await {
            tracing::warn!(sandbox = %self.record.name, error = chain(&error), "fence not lowered");
        }
        let tries = u32::from(self.machine.tries());
        self.record.reason = Some(Reason::of(&error).behind("shut in until its fence stands"));
        if tries == 1 {
            self.audit(Outcome::Fail, "taken over");
        }
        self.publish(None);
        let pause = RETRY.saturating_mul(1 << tries.min(5)).min(LONGEST_RETRY);
        let goes_on = self.pause(pause).await;
        // It may have ended meanwhile, which nobody else looks at now.
        self.ended();
        goes_on
    }

    /// Whether the process of a guest that runs has ended by itself; the machine knows it then.
    fn ended(&mut self) -> bool {
        let ended = !self.acts.is_running(&self.record);
        if ended {
            self.record.reason = Some(Reason::new("its microVM ended by itself"));
            self.machine.process_gone();
        }
        ended
    }

    /// A bug, but this sandbox's own: it ends like an act that failed, and can be removed. Gives whether
    /// the journey goes on.
    async fn broke(&mut self) -> bool {
        let act = self.machine.next();
        let error = Error::Step {
            doing: act.map_or("looking after", Act::doing),
            name: self.record.name.clone(),
            source: Error::Panicked.into(),
        };
        if let Some(act) = act {
            return self.refused(act, error).await;
        }
        self.blame(error);
        match self.published.borrow().doing {
            // Nobody was told that it rests, and a creation is whole or nothing.
            Some(_) if self.record.state == State::Creating => self.machine.remove(),
            _ => self.machine.process_gone(),
        }
        tokio::time::sleep(RETRY).await;
        true
    }

    /// The first error is the reason, and what the caller who waits is told.
    fn blame(&mut self, error: Error) {
        self.record.reason.get_or_insert_with(|| Reason::of(&error));
        let error = Arc::new(error);
        self.published.send_modify(|seen| {
            seen.error.get_or_insert(error);
        });
    }

    /// Rests where the machine has arrived; gives whether the journey goes on.
    async fn settle(&mut self) -> bool {
        let state = self.machine.state();
        if state == State::Gone {
            // Name and slot are taken as long as the journal has them.
            loop {
                let process = self.machine.left() == Left::Process;
                let forgotten = self.policies.forget(&self.record, process).await;
                let Err(error) = forgotten else { break };
                if self.is_to_end() {
                    self.heed_end();
                }
                self.unnoted(&error);
                self.published.send_modify(|seen| {
                    seen.state = State::Deleting;
                    seen.reason = Some(Reason::of(&error));
                    seen.doing = None;
                    seen.error = Some(Arc::new(error));
                });
                tokio::time::sleep(LOOK).await;
            }
            fault::at(Point::HandleToDrop);
            match self.left() {
                Some(left) => {
                    self.audit(Outcome::Allow, &format!("removed by force, left: {left}"))
                }
                None if self.machine.is_forced() => {
                    self.audit(Outcome::Allow, "removed by force, nothing left");
                }
                None => self.audit(Outcome::Allow, "removed"),
            }
            return false;
        }
        self.rest_in(state).await
    }

    async fn note(&mut self) -> Result<(), Error> {
        self.store.note(&self.record, self.machine.state(), self.noted.as_ref()).await?;
        if self.noted.as_ref() != Some(&self.record.night) {
            self.noted = Some(self.record.night.clone());
        }
        Ok(())
    }

    /// Records the ends of connections that an earlier daemon kept for a guest that slept. Noted after
    /// that: of a daemon that dies in between the next one records them again.
    fn tell_ends(&mut self) {
        let subject = self.record.subject();
        let remains = &mut self.record.night.remains;
        remains
            .iter_mut()
            .filter_map(|one| one.ended(&subject))
            .for_each(|end| self.trail.record(end));
    }

    fn unnoted(&self, error: &Error) {
        tracing::error!(sandbox = %self.record.name, error = chain(error), "journal not written");
    }

    pub(crate) fn publish(&self, doing: Option<Act>) {
        self.tab.see(self.machine.state(), &self.record);
        let pid = self.record.process.as_ref().and_then(|process| Some(process.host.as_ref()?.pid));
        let left = self.left();
        self.published.send_modify(|seen| {
            seen.state = self.machine.state();
            seen.reason.clone_from(&self.record.reason);
            seen.pid = pid;
            seen.incarnation = self.record.incarnation;
            seen.cold.clone_from(&self.record.cold);
            seen.doing = doing;
            seen.left = left;
        });
    }

    fn audit(&self, outcome: Outcome, what: &str) {
        self.audit_why(outcome, what, self.record.reason.clone());
    }

    /// The same, with another reason.
    fn audit_why(&self, outcome: Outcome, what: &str, reason: Option<Reason>) {
        let mut record = AuditRecord::new(fault::wall_clock(), Kind::Control, outcome);
        record.sandbox = Some(self.record.name.clone());
        record.tenant = Some(self.record.tenant.clone());
        record.incarnation = Some(self.record.incarnation);
        let done = format!("sandbox {what}");
        self.trail.record(match reason.map(|reason| reason.behind(&done)) {
            Some(said) => record.saying(said.full(), said.told()),
            None => record.saying(&done, &done),
        });
    }
}
