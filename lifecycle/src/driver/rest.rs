//! What a driver knows beside the journey: who waits for what, whether its sandbox is idle, how long it
//! lives, and what of that others are shown. Decides by pure parts; does nothing itself.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use egress::Wanted;
use policy::TenantName;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::error::Error;
use crate::fetches::Fetches;
use crate::idle::{Budget, Hold, Idleness, Sample, Why};
use crate::night::Alarm;
use crate::state::State;
use crate::terms::{OnIdle, Terms, Uptime};
use crate::threads::locked;
use crate::turns::{Place, Turn, Turns};

/// Until one that could not be woken is tried again for those who do not ask themselves, and the longest to
/// which it grows.
const AGAIN: Duration = Duration::from_secs(10);
const LONGEST_AGAIN: Duration = Duration::from_secs(600);
/// And one that was idle, until it is tried again to put it into the store.
const STORE_AGAIN: Duration = Duration::from_secs(600);

/// What came of a wish.
pub(crate) type Reply = oneshot::Sender<Result<(), Arc<Error>>>;

/// Calls of the control API that are under way in a sandbox. As long as there is one it is not idle.
#[derive(Clone, Debug, Default)]
pub(crate) struct Calls(Arc<AtomicUsize>);

/// One such call, over when this is dropped.
#[derive(Debug)]
pub struct Call(Arc<AtomicUsize>);

impl Calls {
    pub(crate) fn begin(&self) -> Call {
        self.0.fetch_add(1, SeqCst);
        Call(Arc::clone(&self.0))
    }

    pub(crate) fn count(&self) -> usize {
        self.0.load(SeqCst)
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

/// What others are shown of a sandbox's rest.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shown {
    pub(crate) on_idle: OnIdle,
    pub(crate) idle_after: Option<Duration>,
    /// What keeps it awake.
    pub(crate) holds: Vec<Hold>,
    /// When it is woken, and why then; and when by the clock on the wall, where that was asked for.
    pub(crate) wakes_at: Option<Instant>,
    pub(crate) wakes_because: Option<&'static str>,
    pub(crate) alarm: Option<SystemTime>,
    pub(crate) ends_at: Option<Instant>,
    pub(crate) wakes: u64,
}

/// What follows from a look at a sandbox that runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Due {
    Nothing,
    Sleep,
    /// Into the store.
    Suspend,
    /// For this reason.
    Remove(&'static str),
}

/// All that.
#[derive(Debug)]
pub(crate) struct Rest {
    pub(crate) terms: Terms,
    pub(crate) calls: Calls,
    pub(crate) shown: Arc<Mutex<Shown>>,
    idleness: Idleness,
    budget: Budget,
    wakes: u64,
    end: Option<Instant>,
    /// Who waits until it runs, and until it sleeps.
    wakers: Vec<Reply>,
    sleepers: Vec<Reply>,
    /// And until it is in the store.
    suspenders: Vec<Reply>,
    /// It is to be put there once it sleeps, and then; and it was tried.
    store_at: Option<Instant>,
    stores: bool,
    /// Somebody has asked for its sleep, which idleness and calls do not keep it from then.
    asked_to_sleep: bool,
    /// When the last byte had passed that it was looked at with.
    bytes: Instant,
    /// Something came in for it, for which it is woken then, and from whom.
    wanted: Option<(Instant, Wanted)>,
    /// When it is to be woken, by this clock and by that on the wall.
    alarm: Option<(Instant, SystemTime)>,
    /// It could not be woken, and is not again before then for those who do not ask themselves.
    again: Option<Instant>,
    pause: Duration,
    /// Its place among all that are to be woken; it is kept while other things are seen to.
    place: Option<Place>,
    turn: Option<Turn>,
    turns: Turns,
    pub(crate) fetches: Fetches,
    tenant: TenantName,
}

impl Rest {
    pub(crate) fn new(terms: Terms, tenant: TenantName, turns: Turns, fetches: Fetches) -> Self {
        let (now, uptime) = (Instant::now(), Uptime::now());
        let mut idleness = Idleness::new(terms.idle_after(), now);
        if let Some(until) = terms.awake_until(&uptime) {
            idleness.keep(until);
        }
        let rest = Self {
            end: terms.end(&uptime),
            terms,
            calls: Calls::default(),
            shown: Arc::default(),
            idleness,
            budget: Budget::new(now),
            wakes: 0,
            wakers: Vec::new(),
            sleepers: Vec::new(),
            suspenders: Vec::new(),
            store_at: None,
            stores: false,
            asked_to_sleep: false,
            bytes: now,
            wanted: None,
            alarm: None,
            again: None,
            pause: AGAIN,
            place: None,
            turn: None,
            turns,
            fetches,
            tenant,
        };
        rest.show(Vec::new());
        rest
    }

    /// Its terms have changed.
    pub(crate) fn agreed(&mut self, terms: Terms) {
        let uptime = Uptime::now();
        self.end = terms.end(&uptime);
        if let Some(until) = terms.awake_until(&uptime) {
            self.idleness.keep(until);
        }
        self.terms = terms;
    }

    /// Takes a look at one that runs.
    pub(crate) fn look(&mut self, bytes: Instant, processor: Option<Duration>) -> Due {
        let (now, calls) = (Instant::now(), self.calls.count());
        self.bytes = bytes;
        self.idleness.look(now, Sample { bytes, processor, calls });
        let holds = self.idleness.holds(now);
        let is_idle = holds.is_empty();
        self.show(holds);
        match (self.over(now), self.terms.on_idle) {
            (Some(why), _) => Due::Remove(why),
            (None, OnIdle::Standby | OnIdle::Suspend) if is_idle => Due::Sleep,
            (None, OnIdle::Delete) if is_idle => Due::Remove("it was idle"),
            _ => Due::Nothing,
        }
    }

    /// It is idle, and its driver cannot be put to sleep.
    pub(crate) fn cannot_sleep(&self) {
        self.show(vec![(Why::Driver, None)]);
    }

    /// Whether its processors stand still, as far as is known.
    pub(crate) const fn is_still(&self) -> bool {
        self.idleness.is_still()
    }

    /// It is stopped in the middle of what it does, or goes on.
    pub(crate) const fn stuck(&mut self, stuck: bool) {
        self.idleness.stuck(stuck);
    }

    /// Takes a look at one that does not run. `here` says whether it sleeps, and is in no store.
    pub(crate) fn glance(&mut self, here: bool) -> Due {
        self.show(Vec::new());
        let now = Instant::now();
        let store = self.store_at.is_some_and(|at| at <= now);
        match self.over(now) {
            Some(why) => Due::Remove(why),
            None if here && store && !self.is_to_wake(now) => Due::Suspend,
            None => Due::Nothing,
        }
    }

    /// Somebody wants it in the store.
    pub(crate) fn suspend(&mut self, reply: Reply) {
        self.asked_to_sleep = true;
        self.store_at = Some(Instant::now());
        wait(&mut self.suspenders, reply);
    }

    /// It is being put there.
    pub(crate) fn stores(&mut self) {
        // Its place is in another line from there.
        (self.stores, self.store_at, self.place) = (true, None, None);
    }

    /// Whether it was, since this was asked last.
    pub(crate) const fn was_to_be_stored(&mut self) -> bool {
        std::mem::replace(&mut self.stores, false)
    }

    fn over(&self, now: Instant) -> Option<&'static str> {
        self.end.filter(|end| *end <= now).map(|_| "its time is over")
    }

    fn show(&self, holds: Vec<Hold>) {
        let wakes = match &self.place {
            Some(_) => Some((Instant::now(), "it waits for its turn")),
            None => self.next_wake().map(|(at, by_alarm)| match by_alarm {
                true => (at, "it was asked for"),
                false => (at, "bytes came for it"),
            }),
        };
        *locked(&self.shown) = Shown {
            on_idle: self.terms.on_idle,
            idle_after: self.terms.idle_after(),
            holds,
            wakes_at: wakes.map(|(at, _)| at),
            wakes_because: wakes.map(|(_, why)| why),
            alarm: self.alarm.map(|(_, wall)| wall),
            ends_at: self.end,
            wakes: self.wakes,
        };
    }

    /// When it is to be woken by itself; none: whenever somebody asks.
    pub(crate) fn set_alarm(&mut self, alarm: Option<&Alarm>) {
        self.alarm = alarm.map(|alarm| (alarm.instant(&Uptime::now()), alarm.wall()));
    }

    /// When it is woken for somebody who does not wait for it, and whether its alarm is why.
    fn next_wake(&self) -> Option<(Instant, bool)> {
        let alarm = self.alarm.map(|(at, _)| (at.max(self.again.unwrap_or(at)), true));
        let wanted = self.wanted.map(|(at, _)| (at, false));
        [alarm, wanted].into_iter().flatten().min_by_key(|(at, _)| *at)
    }

    /// Somebody wants it to run; who wanted it to sleep is told that it does not.
    pub(crate) fn wake(&mut self, reply: Reply, instead: impl Fn() -> Error) {
        self.asked_to_sleep = false;
        self.store_at = None;
        let asleep = self.sleepers.drain(..).chain(self.suspenders.drain(..));
        asleep.for_each(|reply| _ = reply.send(Err(Arc::new(instead()))));
        wait(&mut self.wakers, reply);
    }

    /// Somebody wants it to sleep.
    pub(crate) fn sleep(&mut self, reply: Reply) {
        self.asked_to_sleep = true;
        wait(&mut self.sleepers, reply);
    }

    /// Whether somebody waits for it to run.
    pub(crate) fn is_awaited(&self) -> bool {
        self.wakers.iter().any(|reply| !reply.is_closed())
    }

    /// Whether somebody has asked for its sleep, and no call has come since.
    pub(crate) const fn is_asked_to_sleep(&self) -> bool {
        self.asked_to_sleep
    }

    /// Whether a call has come in since it was found idle, or a byte, of which the last passed then: one that
    /// its guest got before it was held is with nobody who would wake it for its answer.
    pub(crate) fn is_disturbed(&self, last_byte: Option<Instant>) -> bool {
        let bytes_came = || last_byte.is_some_and(|last| last > self.bytes);
        self.is_awaited() || (!self.asked_to_sleep && (self.calls.count() > 0 || bytes_came()))
    }

    /// Something came in for one that sleeps: it is woken when the budget allows, and whatever the budget for
    /// a caller of the control API.
    pub(crate) fn want(&mut self, by: Wanted) {
        let now = Instant::now();
        let at = self.again.unwrap_or(now).max(now);
        if self.wanted.is_none_or(|(_, before)| before < by) {
            self.wanted = Some((at, by));
        }
    }

    pub(crate) const fn is_wanted(&self) -> bool {
        self.wanted.is_some()
    }

    /// Who is not heeded yet, and would change when it is woken.
    pub(crate) fn heeds(&self) -> Option<Wanted> {
        match self.wanted {
            None => Some(Wanted::Data),
            Some((_, Wanted::Data)) => Some(Wanted::Caller),
            Some((_, Wanted::Caller)) => None,
        }
    }

    /// Whether it is to be woken by now, or as soon as it may be.
    fn is_to_wake(&self, now: Instant) -> bool {
        let due = self.alarm.is_some_and(|(at, _)| at <= now);
        self.is_awaited() || self.is_wanted() || due
    }

    /// Waits until it is to be woken for somebody who does not wait for it, whenever its turn comes then.
    pub(crate) async fn due(&self) {
        until(self.next_wake().map(|(at, _)| at)).await;
    }

    /// Waits until its time is over.
    pub(crate) fn ends(&self) -> impl Future<Output = ()> + use<> {
        until(self.end)
    }

    /// Waits until it is to be woken, and its turn has come among all that are; of one that is in the store,
    /// among those that are got back. May be dropped and called again.
    pub(crate) async fn wake_due(&mut self, stored: bool) {
        while self.place.is_none() {
            if !self.is_awaited() {
                let Some((at, by_alarm)) = self.next_wake() else {
                    return std::future::pending().await;
                };
                tokio::time::sleep_until(at).await;
                // Whoever set an alarm, or was let to a port, has asked by the control API.
                let by_far_side = !by_alarm && matches!(self.wanted, Some((_, Wanted::Data)));
                if by_far_side && let Err(then) = self.budget.take(Instant::now()) {
                    self.wanted = Some((then, Wanted::Data));
                    continue;
                }
            }
            self.place = Some(match stored {
                true => self.fetches.ask(&self.tenant),
                false => self.turns.ask(&self.tenant),
            });
        }
        self.turn_comes().await;
        self.wanted = None;
    }

    /// It has been got back from the store: the next one is, and this one waits for its turn to be woken.
    pub(crate) fn fetched(&mut self) {
        self.turn = None;
        self.place = Some(self.turns.ask(&self.tenant));
    }

    /// Whether it waits for its turn.
    pub(crate) const fn is_in_line(&self) -> bool {
        self.place.is_some()
    }

    /// Waits until its turn has come. May be dropped and called again.
    pub(crate) async fn turn_comes(&mut self) {
        if let Some(place) = &mut self.place {
            // Turns do not end before those who wait for them.
            self.turn = place.await.ok();
        }
        self.place = None;
    }

    /// It is not being woken, or its guest runs by now: others' turns come, wherever it gets to.
    pub(crate) fn leave(&mut self) {
        (self.place, self.turn) = (None, None);
    }

    /// It runs.
    pub(crate) fn runs(&mut self, woken: bool) {
        (self.turn, self.wanted, self.again, self.pause) = (None, None, None, AGAIN);
        if !self.asked_to_sleep {
            self.store_at = None;
        }
        self.wakes += u64::from(woken);
        self.idleness.woken(Instant::now());
    }

    /// It could not be put to sleep.
    pub(crate) fn stayed_awake(&mut self) {
        self.asked_to_sleep = false;
        self.idleness.failed(Instant::now());
    }

    /// It sleeps, or could not be woken.
    pub(crate) fn sleeps(&mut self, failed: bool) {
        self.turn = None;
        self.asked_to_sleep = false;
        self.idleness.slept();
        if self.terms.on_idle == OnIdle::Suspend {
            // Where it failed, and not for who asks.
            let then = Instant::now() + if failed { STORE_AGAIN } else { Duration::ZERO };
            self.store_at.get_or_insert(then);
        }
        self.again = failed.then(|| Instant::now() + self.pause);
        self.pause = if failed { (self.pause * 2).min(LONGEST_AGAIN) } else { AGAIN };
        self.show(Vec::new());
    }

    /// Tells whoever waits that it has arrived, and with which error if it did not get where it was wanted.
    pub(crate) fn answer(&mut self, state: State, error: Option<&Arc<Error>>) {
        let failed = |waiting: &mut Vec<Reply>| {
            let Some(error) = error else { return };
            waiting.drain(..).for_each(|reply| _ = reply.send(Err(Arc::clone(error))));
        };
        let done = |waiting: &mut Vec<Reply>| {
            waiting.drain(..).for_each(|reply| _ = reply.send(Ok(())));
        };
        match state {
            State::Running => {
                done(&mut self.wakers);
                failed(&mut self.sleepers);
                failed(&mut self.suspenders);
            }
            State::Standby | State::Suspended => {
                done(&mut self.sleepers);
                failed(&mut self.wakers);
                match state {
                    State::Suspended => done(&mut self.suspenders),
                    _ => failed(&mut self.suspenders),
                }
            }
            _ => {
                // Nobody wakes it any more, and nothing does.
                (self.turn, self.place, self.alarm, self.wanted) = (None, None, None, None);
                failed(&mut self.wakers);
                failed(&mut self.sleepers);
                failed(&mut self.suspenders);
            }
        }
    }
}

/// Another one waits, and those who gave up have left.
fn wait(waiting: &mut Vec<Reply>, reply: Reply) {
    waiting.retain(|reply| !reply.is_closed());
    waiting.push(reply);
}

/// Waits until then; for ever where there is no such instant.
async fn until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests;
