//! The order of a sandbox's journey, as a value: what is made, what is wanted, what comes next.
//!
//! ```text
//!  create --> creating --> running <------- resuming <--+
//!                 |         |  ^  ^             |       | wake
//!                 |         v  |  | error       v       |
//!                 |       saving -+-------> standby ----+
//!                 +-- error, end of its process: failed; remove, from everywhere: deleting --> gone
//! ```
//! One that sleeps may be put into a store, `suspended`, and is woken from there.
//! One of which nothing is left but its disk sleeps, too, and is woken as another incarnation: cold.
//!
//! Pure: no clock, no I/O. What exists is a set of facts, and what comes next follows from them and from
//! what is wanted: a save that fails goes back the way a wake comes. The fence stands before anything can
//! speak, what was saved is used up before the first instruction, and what is undone is undone in reverse.

mod act;
mod found;
mod made;

use crate::machine::made::Made;
use crate::state::State;

pub(crate) use act::Act;
pub(crate) use found::There;
pub(crate) use made::Left;

/// What is wanted of a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Goal {
    Run,
    Sleep,
    Suspend,
    Fail,
    Remove,
}

/// One sandbox's journey.
#[derive(Clone, Debug)]
pub(crate) struct Machine {
    goal: Goal,
    made: Made,
    /// Since it fell asleep it has not run undisturbed.
    woken: bool,
    tries: u8,
    left: Left,
    forced: bool,
}

/// How often undoing one thing is tried before it is left behind.
const TRIES: u8 = 3;
/// How often the fence of a sandbox that is taken over is tried before the sandbox is given up.
const TAKEOVER_TRIES: u8 = 60;

impl Machine {
    const fn new(goal: Goal, made: Made) -> Self {
        Self { goal, made, woken: false, tries: 0, left: Left::Nothing, forced: false }
    }

    /// Its state. One that is adopted runs all the while: were it noted as anything else until its
    /// fence stands anew, a daemon that dies before that would have the next one remove it.
    pub(crate) const fn state(&self) -> State {
        let made = &self.made;
        match self.goal {
            Goal::Run if !made.greeted => State::Creating,
            Goal::Run if self.woken => State::Resuming,
            Goal::Run if made.held || made.paused || made.kept => State::Saving,
            Goal::Run => State::Running,
            Goal::Sleep | Goal::Suspend if !self.is_asleep() => State::Saving,
            Goal::Sleep | Goal::Suspend if made.process || matches!(self.left, Left::Process) => {
                State::Resuming
            }
            Goal::Sleep => State::Standby,
            Goal::Suspend if self.next().is_some() => State::Suspending,
            Goal::Suspend => State::Suspended,
            Goal::Fail => State::Failed,
            Goal::Remove if self.next().is_none() => State::Gone,
            Goal::Remove => State::Deleting,
        }
    }

    /// What to do next; none when it has arrived.
    pub(crate) const fn next(&self) -> Option<Act> {
        let made = &self.made;
        let stuck = matches!(self.left, Left::Process);
        match self.goal {
            Goal::Run | Goal::Sleep | Goal::Suspend
                if made.stored && (made.process || made.open || stuck) =>
            {
                Some(Act::Discard)
            }
            Goal::Run if made.stored => Some(Act::Fetch),
            Goal::Run if made.cold => Some(self.next_to_boot(stuck)),
            Goal::Run if self.is_asleep() && !made.process => Some(self.next_to_load()),
            Goal::Run if !made.tap => Some(Act::MakeTap),
            Goal::Run if !made.fence => Some(Act::RaiseFence),
            Goal::Run if !made.process => Some(Act::StartProcess),
            Goal::Run if !made.greeted => Some(Act::GreetAgent),
            Goal::Run if made.kept => Some(Act::Rebuild),
            Goal::Run if made.owed && !made.told => Some(Act::TellEnds),
            Goal::Run if made.paused => Some(Act::Unpause),
            Goal::Run if made.held => Some(Act::Release),
            Goal::Run if made.stale => Some(Act::Refresh),
            Goal::Run => None,
            // What it was made from counts, not a process that has not run, and there are never two.
            Goal::Sleep | Goal::Suspend
                if self.is_asleep() && (made.process || made.open || stuck) =>
            {
                Some(Act::Discard)
            }
            Goal::Suspend if made.saved => Some(Act::Store),
            Goal::Suspend if made.stored && made.strewn => Some(Act::DropLocal),
            // For a process that has not run they may have been put back.
            Goal::Sleep if made.saved && made.fence && !made.kept => Some(Act::Checkpoint),
            Goal::Sleep | Goal::Suspend if self.is_asleep() => None,
            Goal::Sleep | Goal::Suspend if !made.held => Some(Act::Hold),
            Goal::Sleep | Goal::Suspend if !made.paused => Some(Act::Pause),
            Goal::Sleep | Goal::Suspend if !made.kept => Some(Act::Checkpoint),
            Goal::Sleep | Goal::Suspend => Some(Act::Save),
            Goal::Fail | Goal::Remove if made.process => Some(Act::StopProcess),
            Goal::Fail | Goal::Remove if made.fence => Some(Act::LowerFence),
            Goal::Fail | Goal::Remove if made.tap => Some(Act::DeleteTap),
            // It has the slot's user, and may have the tap open: nobody forgets it while it is there.
            Goal::Remove if stuck && !self.forced => Some(Act::StopProcess),
            Goal::Fail | Goal::Remove if made.memory && (!stuck || self.forced) => {
                Some(Act::DropMemory)
            }
            // A failed sandbox keeps its console log for a person to read.
            Goal::Remove if made.files => Some(Act::RemoveFiles),
            Goal::Fail | Goal::Remove => None,
        }
    }

    /// The way from files to a process that stands still, behind its fence.
    const fn next_to_load(&self) -> Act {
        let made = &self.made;
        if !made.open {
            Act::OpenTap
        } else if !made.fence {
            Act::RaiseFence
        } else if !made.checked {
            Act::CheckFence
        } else {
            Act::Prepare
        }
    }

    /// The way from its disk alone to a guest that answers. What it was is ended first, with its connections.
    const fn next_to_boot(&self, stuck: bool) -> Act {
        let made = &self.made;
        if !made.fresh && (made.process || made.open || stuck) {
            Act::Discard
        } else if !made.fresh && made.fence {
            Act::LowerFence
        } else if !made.fresh {
            Act::BeginAnew
        } else if !made.process && !made.open {
            Act::OpenTap
        } else if !made.fence {
            Act::RaiseFence
        } else if !made.process {
            Act::StartProcess
        } else {
            Act::GreetAgent
        }
    }

    /// The act was done.
    pub(crate) const fn done(&mut self, act: Act) {
        self.tries = 0;
        let made = &mut self.made;
        match act {
            Act::MakeTap => made.tap = true,
            Act::RaiseFence => made.fence = true,
            Act::StartProcess => {
                made.process = true;
                made.files = true;
                made.memory = true;
                made.open = false;
            }
            Act::GreetAgent => {
                made.greeted = true;
                made.cold = false;
                made.fresh = false;
            }
            Act::BeginAnew => made.fresh = true,
            Act::Hold => made.held = true,
            Act::Pause => made.paused = true,
            Act::Checkpoint => {
                made.kept = true;
                made.held = true;
                // What was to be told with them was told to nobody.
                made.owed |= made.saved;
            }
            Act::Save => {
                made.process = false;
                made.paused = false;
                made.saved = true;
                made.open = false;
                made.checked = false;
                self.woken = true;
            }
            Act::Store => {
                made.saved = false;
                made.stored = true;
                made.strewn = true;
            }
            Act::DropLocal => made.strewn = false,
            Act::Fetch => {
                made.saved = true;
                made.stored = false;
                made.strewn = false;
            }
            Act::OpenTap => made.open = true,
            Act::CheckFence => made.checked = true,
            Act::Prepare => {
                made.process = true;
                made.paused = true;
                made.open = false;
            }
            Act::Rebuild => made.kept = false,
            Act::Unpause => {
                made.saved = false;
                made.paused = false;
                made.stale |= self.woken;
                (made.owed, made.told) = (false, false);
            }
            Act::TellEnds => made.told = true,
            Act::Refresh => made.stale = false,
            Act::Release => made.held = false,
            Act::Discard => {
                made.process = false;
                made.paused = false;
                made.open = false;
                made.told = false;
                // Some may have been put back, whatever came of it.
                made.kept = false;
                self.left = Left::Nothing;
            }
            Act::StopProcess => {
                made.process = false;
                made.greeted = false;
                if matches!(self.left, Left::Process) {
                    self.left = Left::Network;
                }
            }
            Act::LowerFence => made.fence = false,
            Act::DeleteTap => made.tap = false,
            Act::DropMemory => made.memory = false,
            Act::RemoveFiles => made.files = false,
        }
        if matches!(self.goal, Goal::Run) && self.next().is_none() {
            self.woken = false;
        }
    }

    /// The act failed. Making turns round and undoes; undoing is tried again, then left behind. The
    /// fence of a sandbox that ran before is tried for longer: it is shut in meanwhile. Falling asleep
    /// turns round, too, and so does waking as long as nothing has run.
    pub(crate) fn failed(&mut self, act: Act) {
        match act {
            Act::RaiseFence if self.is_asleep() => self.again_or(Self::back_to_sleep),
            Act::LowerFence | Act::BeginAnew if self.begins_anew() => {
                self.again_or(Self::back_to_sleep);
            }
            Act::StartProcess | Act::GreetAgent if self.made.cold => {
                self.made.process = true;
                self.back_to_sleep();
            }
            Act::RaiseFence if self.made.greeted && self.tries < TAKEOVER_TRIES => self.tries += 1,
            Act::MakeTap | Act::RaiseFence | Act::StartProcess | Act::GreetAgent => {
                // It may have got half way, so it is undone too.
                self.goal = if self.made.greeted { Goal::Fail } else { Goal::Remove };
                match act {
                    Act::MakeTap => self.made.tap = true,
                    Act::RaiseFence => self.made.fence = true,
                    _ => {
                        self.made.process = true;
                        self.made.files = true;
                        self.made.memory = true;
                    }
                }
                self.tries = 0;
            }
            Act::Checkpoint if self.is_asleep() => self.again_or(|it| it.done(act)),
            Act::Hold | Act::Pause | Act::Checkpoint | Act::Save => {
                match act {
                    Act::Hold => self.made.held = true,
                    Act::Pause => self.made.paused = true,
                    Act::Checkpoint => self.made.kept = true,
                    _ => {}
                }
                self.goal = Goal::Run;
                self.tries = 0;
            }
            Act::OpenTap | Act::CheckFence => self.again_or(Self::back_to_sleep),
            // It is here as it was.
            Act::Store => self.turn(Goal::Sleep),
            Act::DropLocal => self.again_or(|it| it.done(act)),
            Act::Fetch => {
                self.made.strewn = true;
                self.back_to_sleep();
            }
            Act::Prepare => {
                // There may be a process, which ends first.
                self.made.process = true;
                self.back_to_sleep();
            }
            Act::Unpause if self.is_asleep() => self.again_or(Self::back_to_sleep),
            Act::Unpause => self.again_or(Self::lost),
            Act::BeginAnew => self.back_to_sleep(),
            // Its guest runs, and is worth more than what it misses.
            Act::Rebuild | Act::TellEnds | Act::Release => self.again_or(|it| it.done(act)),
            Act::Refresh => self.done(act),
            Act::Discard
            | Act::StopProcess
            | Act::LowerFence
            | Act::DeleteTap
            | Act::DropMemory
            | Act::RemoveFiles => {
                if self.forced && matches!(act, Act::StopProcess) {
                    self.tries = TRIES;
                }
                self.again_or(|it| {
                    it.done(act);
                    it.left = it.left.max(match act {
                        Act::Discard | Act::StopProcess => Left::Process,
                        Act::LowerFence | Act::DeleteTap => Left::Network,
                        _ => Left::Nothing,
                    });
                    if it.begins_anew() {
                        it.back_to_sleep();
                    }
                });
            }
        }
    }

    /// The act is tried again, a few times.
    fn again_or(&mut self, give_up: impl FnOnce(&mut Self)) {
        self.tries += 1;
        if self.tries >= TRIES {
            give_up(self);
        }
    }

    /// The act failed, and would again.
    pub(crate) fn failed_for_good(&mut self, act: Act) {
        self.tries = u8::MAX - 1;
        self.failed(act);
    }

    /// Somebody wants it removed.
    pub(crate) const fn remove(&mut self) {
        // Who wants it again begins no count of tries anew.
        if !matches!(self.goal, Goal::Remove) {
            self.turn(Goal::Remove);
        }
    }

    /// Somebody wants it removed although its process may stay: that is tried to be ended once more at
    /// most, and everything else goes.
    pub(crate) const fn force(&mut self) {
        self.forced = true;
    }

    /// Whether it is removed by force.
    pub(crate) const fn is_forced(&self) -> bool {
        self.forced
    }

    /// It is idle, or somebody wants it asleep; only what runs undisturbed can.
    pub(crate) const fn sleep(&mut self) {
        if self.is_up() {
            self.turn(Goal::Sleep);
        }
    }

    /// Somebody wants it to run: one that sleeps is woken, one that is falling asleep turns round. Not before
    /// a process is gone that was made from what it is, by whom and how far nobody knows.
    pub(crate) const fn wake(&mut self) {
        if matches!(self.goal, Goal::Sleep | Goal::Suspend)
            && (!self.is_asleep() || self.next().is_none())
        {
            self.turn(Goal::Run);
        }
    }

    /// One that sleeps, with nothing left to do, is to be put into the store.
    pub(crate) const fn suspend(&mut self) {
        if matches!(self.goal, Goal::Sleep) && self.made.saved && self.next().is_none() {
            self.turn(Goal::Suspend);
        }
    }

    /// One that is being put into the store sleeps here, as long as the store has not all of it.
    pub(crate) const fn stay(&mut self) {
        if matches!(self.goal, Goal::Suspend) && self.made.saved {
            self.turn(Goal::Sleep);
        }
    }

    /// What was saved of it is of no use, or its process could not be brought to run.
    pub(crate) fn lost(&mut self) {
        self.turn(if self.made.greeted { Goal::Fail } else { Goal::Remove });
    }

    /// What was saved of it is of no use, but its disk is: it boots from that, as it was wanted to run. What
    /// may be there of its fence goes first.
    pub(crate) const fn cool(&mut self) {
        let made = &mut self.made;
        (made.saved, made.cold, made.fresh, made.fence) = (false, true, false, true);
        (made.paused, made.kept, made.held, made.stale) = (false, false, false, false);
        (made.owed, made.told) = (false, false);
        self.turn(Goal::Run);
    }

    /// What was saved of it is used up, whether its guest runs yet or not.
    pub(crate) const fn used_up(&mut self) {
        self.made.saved = false;
    }

    /// Its process ended by itself. One that had not run yet leaves what it was made from.
    pub(crate) fn process_gone(&mut self) {
        match self.goal {
            Goal::Run | Goal::Sleep | Goal::Suspend if self.is_asleep() => self.back_to_sleep(),
            Goal::Run | Goal::Sleep | Goal::Suspend => self.lost(),
            Goal::Fail | Goal::Remove => {}
        }
    }

    const fn back_to_sleep(&mut self) {
        // The next one who boots it is another incarnation again, behind a fence of its own.
        self.made.fresh = false;
        self.made.fence |= self.made.cold;
        self.turn(if self.made.stored { Goal::Suspend } else { Goal::Sleep });
    }

    /// Whether it is on its way from its disk alone.
    const fn begins_anew(&self) -> bool {
        self.made.cold && matches!(self.goal, Goal::Run)
    }

    const fn turn(&mut self, goal: Goal) {
        self.goal = goal;
        if matches!(goal, Goal::Fail | Goal::Remove) {
            // One that sleeps may be kept by somebody else, who is to hear of its end.
            self.made.process |= self.is_asleep();
            // What ran before this daemon did has the fence of an earlier one, until it is raised anew.
            self.made.fence |= self.made.process;
        }
        self.tries = 0;
    }

    /// Whether its guest has answered, in this journey or for an earlier daemon.
    pub(crate) const fn greeted(&self) -> bool {
        self.made.greeted
    }

    /// Whether its guest can hear a power button.
    pub(crate) const fn hears(&self) -> bool {
        self.made.greeted && !self.made.paused && !self.is_asleep()
    }

    /// Whether what it is, is in files: there is no process, or one that has not run or not booted yet.
    pub(crate) const fn is_asleep(&self) -> bool {
        self.made.saved || self.made.stored || self.made.cold
    }

    /// Whether nothing of it is left but its disk.
    pub(crate) const fn is_cold(&self) -> bool {
        self.made.cold
    }

    /// Whether it is being woken, and nothing of it runs yet: so long it has its turn among those that are.
    pub(crate) const fn takes_a_turn(&self) -> bool {
        let made = &self.made;
        matches!(self.goal, Goal::Run) && (made.saved || made.cold && !(made.fresh && made.process))
    }

    /// Whether it runs, and nothing is left to do.
    pub(crate) const fn is_up(&self) -> bool {
        matches!(self.goal, Goal::Run) && self.next().is_none()
    }

    /// How often what comes next has failed.
    pub(crate) const fn tries(&self) -> u8 {
        self.tries
    }

    /// What of it is left behind: its slot must be kept from others when it is gone.
    pub(crate) const fn left(&self) -> Left {
        self.left
    }
}

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
