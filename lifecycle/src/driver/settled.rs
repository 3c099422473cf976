//! A sandbox that has arrived: what is looked at while it runs or sleeps, what wakes it and what puts it to
//! sleep, and what is shown of it then.

use std::sync::Arc;

use egress::Wanted;
use fault::Point;
use policy::audit::Outcome;
use tokio::time::Instant;

use crate::driver::rest::Due;
use crate::driver::{LOOK, Task};
use crate::error::chain;
use crate::machine::Left;
use crate::night::Night;
use crate::reason::Reason;
use crate::sandbox::Driver;
use crate::state::State;
use crate::stuck::Stuck;

/// Why a guest does nothing that is stopped.
const NO_ROOM: &str =
    "its disk finds no room on the node: its guest stands still until there is some";

impl Task {
    /// Rests until something is wanted or happens; gives whether the journey goes on.
    pub(super) async fn rest_in(&mut self, state: State) -> bool {
        let mut noted = true;
        if state == State::Running {
            // One that was to be put to sleep before it had arrived sleeps until then.
            let alarm = self.record.night.alarm.take();
            let asked = self.rest.is_asked_to_sleep() && self.arrived != Some(State::Running);
            self.record.night = Night { alarm: alarm.filter(|_| asked), ..Night::default() };
            self.rest.set_alarm(self.record.night.alarm.as_ref());
        }
        if let Err(error) = self.note().await {
            self.unnoted(&error);
            if state == State::Running && self.record.state == State::Creating {
                // The next daemon would take it for half made, and remove what runs.
                self.blame(error);
                self.machine.remove();
                return true;
            }
            noted = false;
        }
        if state == State::Running {
            fault::at(Point::RunningNoted);
        }
        // From here on it is no creation any more.
        self.record.state = state;
        let before = self.arrived.replace(state);
        let error = self.published.borrow().error.clone();
        self.arrive(state, before, error.is_some());
        self.publish(None);
        // Last: whoever is told sees it as it is now.
        let lost = || Arc::new(self.not_now("its guest is lost"));
        let error = error.or_else(|| (state == State::Failed).then(lost));
        self.rest.answer(state, error.as_ref());
        if state == State::Running && self.rest.is_asked_to_sleep() {
            self.begin_to_sleep();
        }
        if self.machine.next().is_none() {
            let stayed = state == State::Running && before == Some(State::Running);
            self.begin_to_copy(error.as_ref().filter(|_| stayed));
        }
        if self.machine.next().is_none() {
            self.begin_to_rewind();
        }
        // Dropped with this: nobody lets a guest go on that is being paused.
        let mut looking = None;
        let mut look = tokio::time::interval(LOOK);
        // One that had failed may be as good as asleep by now.
        while self.machine.next().is_none() && self.machine.state() == state {
            let heeds = self.rest.heeds();
            tokio::select! {
                Ok(()) = self.end.changed() => self.heed_end(),
                verb = self.verbs.recv() => {
                    let Some(verb) = verb else { return false };
                    self.heed_queued(Some(verb)).await;
                    if self.machine.next().is_none() {
                        self.begin_to_copy(None);
                    }
                    if self.machine.next().is_none() {
                        self.begin_to_rewind();
                    }
                }
                _ = look.tick() => {
                    if state.is_rest() {
                        self.acts.count_ends(&mut self.record);
                        noted &= self.noted.as_ref() == Some(&self.record.night);
                    }
                    noted = noted || self.note().await.is_ok();
                    if state == State::Running && self.ended() {
                        return true;
                    }
                    self.look(state);
                    if state == State::Running && looking.is_none() {
                        looking = self.look_whether_stuck().map(Box::pin);
                    }
                }
                found = async { Some(looking.as_mut()?.await) }, if looking.is_some() => {
                    looking = None;
                    self.heed_stuck(found);
                }
                by = self.acts.wanted(&self.record, heeds.unwrap_or(Wanted::Caller)),
                    if state.is_rest() && heeds.is_some() =>
                {
                    self.rest.want(by);
                }
                () = self.rest.wake_due(state == State::Suspended), if state.is_rest() => self.begin_to_wake(),
            }
        }
        true
    }

    /// It has arrived, from where it rested before: what follows for its rest, and for the audit.
    fn arrive(&mut self, state: State, before: Option<State>, failed: bool) {
        let boots = std::mem::replace(&mut self.booted, self.record.cold.boots);
        match (state, before) {
            (State::Running, Some(State::Running)) if failed => self.rest.stayed_awake(),
            (State::Running, _) => self.rest.runs(before.is_some_and(State::is_rest)),
            (State::Standby | State::Suspended, _) => self.rest.sleeps(failed),
            _ => {}
        }
        let stored = self.rest.was_to_be_stored();
        self.look_again();
        if let Some(why) = self.record.cold.why.clone().filter(|_| boots != self.booted) {
            let told = "booted cold, from its disk alone; its connections are ended";
            return self.audit_why(Outcome::Fail, told, Some(why));
        }
        let (outcome, what) = match (state, before) {
            // It went nowhere, and was not meant to: a snapshot was taken of it, or was not.
            (_, Some(before)) if before == state && !failed => return,
            (State::Running, Some(State::Running)) => (Outcome::Fail, "not put to sleep"),
            (State::Standby, Some(State::Standby)) if stored => (Outcome::Fail, "not suspended"),
            (State::Standby | State::Suspended, Some(State::Suspended)) => {
                (Outcome::Fail, "not woken")
            }
            (State::Standby, Some(State::Standby)) => (Outcome::Fail, "not woken"),
            (State::Running, Some(State::Standby | State::Suspended)) => (Outcome::Allow, "woken"),
            (State::Standby, _) if self.machine.is_cold() => {
                let told = "lost its memory, and boots from its disk when it is woken";
                return self.audit_why(Outcome::Fail, told, self.record.cold.why.clone());
            }
            (State::Standby, _) => (Outcome::Allow, "asleep"),
            (State::Failed, _) => (Outcome::Fail, "failed"),
            _ => (Outcome::Allow, state.as_str()),
        };
        self.audit(outcome, what);
    }

    /// Looks whether its time to sleep or to end has come.
    pub(super) fn look(&mut self, state: State) {
        let due = match state {
            State::Running => self.look_at_work(),
            _ => self.rest.glance(state == State::Standby && !self.machine.is_cold()),
        };
        match due {
            Due::Nothing => {}
            // Its hooks may be gone from the configuration.
            Due::Sleep if !self.acts.hypervisors().can_sleep(self.record.driver) => {
                self.rest.cannot_sleep();
            }
            Due::Sleep => self.begin_to_sleep(),
            Due::Suspend => self.begin_to_suspend(),
            Due::Remove(why) => {
                self.audit(Outcome::Allow, &format!("remove, since {why}"));
                self.machine.remove();
            }
        }
    }

    /// Looks whether one that runs is stopped, where it may be.
    fn look_whether_stuck(
        &mut self,
    ) -> Option<impl Future<Output = Result<(bool, bool), vmm::Error>> + Send + use<>> {
        let ask = self.stuck.due(Instant::now(), self.rest.is_still())?;
        self.acts.hypervisors().look_at(&self.record, ask)
    }

    /// What came of that look; who is shown the sandbox sees why it does nothing.
    fn heed_stuck(&mut self, found: Option<Result<(bool, bool), vmm::Error>>) {
        let (is, let_go) = match found {
            Some(Ok(found)) => found,
            Some(Err(error)) => {
                let error = chain(&error);
                tracing::debug!(sandbox = %self.record.name, error, "guest not looked at");
                return;
            }
            None => return,
        };
        let Some(is) = self.stuck.found(Instant::now(), is, let_go) else { return };
        self.rest.stuck(is);
        if is {
            self.record.reason = Some(Reason::new(NO_ROOM));
            self.audit(Outcome::Fail, "stands still");
        } else {
            self.record.reason = None;
            self.audit(Outcome::Allow, "goes on: its disk has room again");
        }
        self.look_again();
        self.publish(None);
    }

    /// What one that runs is at.
    fn look_at_work(&mut self) -> Due {
        let processor = self.acts.hypervisors().processor(&self.record);
        let bytes = self.acts.last_byte(&self.record).unwrap_or_else(Instant::now);
        self.rest.look(bytes, processor)
    }

    pub(super) fn begin_to_sleep(&mut self) {
        self.forget_error();
        self.machine.sleep();
        self.stuck = Stuck::new(Instant::now());
        // Whoever calls from here on sees that it is not running, and asks for it; whoever called before is
        // counted.
        self.publish(self.machine.next());
        self.turn_round();
        if self.machine.is_up() {
            self.publish(None);
        }
    }

    fn begin_to_suspend(&mut self) {
        self.forget_error();
        self.rest.stores();
        self.machine.suspend();
        self.publish(self.machine.next());
    }

    fn begin_to_wake(&mut self) {
        self.forget_error();
        self.machine.wake();
        self.publish(self.machine.next());
    }

    /// One that is falling asleep goes on running where somebody wants something of it, as long as it can; one
    /// that sleeps waits for its turn.
    pub(super) fn turn_round(&mut self) {
        if self.machine.state() == State::Saving
            && !self.machine.is_asleep()
            && self.rest.is_disturbed(self.acts.last_byte(&self.record))
        {
            self.machine.wake();
        }
    }

    /// What a journey failed of before is not what this one does.
    pub(super) fn forget_error(&mut self) {
        self.record.reason = None;
        self.published.send_modify(|seen| seen.error = None);
    }

    /// What is shown follows what was agreed at once.
    pub(super) fn look_again(&mut self) {
        if self.machine.is_up() {
            self.look_at_work();
        } else {
            self.rest.glance(false);
        }
    }

    /// What of it is given up, for who removes it by force.
    pub(super) fn left(&self) -> Option<String> {
        let slot = self.record.slot;
        match self.machine.left() {
            _ if !self.machine.is_forced() => None,
            Left::Nothing => None,
            Left::Network => Some(format!(
                "its tap or parts of its fence; slot {slot} is kept from use until they are gone"
            )),
            Left::Process if self.record.driver == Driver::External => Some(format!(
                "its guest, which no hook has ended; slot {slot} is kept from use until this host \
                 boots anew"
            )),
            Left::Process => Some(format!(
                "its process, which would not end; slot {slot} is kept from use until it has"
            )),
        }
    }
}
