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
//! A copy of what it is, a snapshot, is taken while it sleeps.
//!
//! Pure: no clock, no I/O. What exists is a set of facts, and what comes next follows from them and from
//! what is wanted: a save that fails goes back the way a wake comes. The fence stands before anything can
//! speak, what was saved is used up before the first instruction, and what is undone is undone in reverse.

mod outcome;
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
    /// What it is, is to be copied once it sleeps; until then nobody wakes it.
    copies: bool,
    /// It is to go back to what the store has of an earlier moment.
    rewinds: bool,
}

/// How often undoing one thing is tried before it is left behind.
const TRIES: u8 = 3;
/// How often the fence of a sandbox that is taken over is tried before the sandbox is given up.
const TAKEOVER_TRIES: u8 = 60;

impl Machine {
    const fn new(goal: Goal, made: Made) -> Self {
        Self {
            goal,
            made,
            woken: false,
            tries: 0,
            left: Left::Nothing,
            forced: false,
            copies: false,
            rewinds: false,
        }
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
            Goal::Run | Goal::Sleep | Goal::Suspend if self.rewinds => Some(Act::Rewind),
            Goal::Run | Goal::Sleep | Goal::Suspend
                if made.stored && (made.process || made.open || stuck) =>
            {
                Some(Act::Discard)
            }
            Goal::Run if made.over => Some(Act::LowerFence),
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
            Goal::Sleep if made.saved && self.copies => Some(Act::Copy),
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
            && !self.copies
            && (!self.is_asleep() || self.next().is_none())
        {
            self.turn(Goal::Run);
        }
    }

    /// A copy of what it is, is wanted: of one that runs undisturbed, which falls asleep for it, or of one that
    /// sleeps here with nothing left to do.
    pub(crate) const fn copy(&mut self) {
        let sleeps = matches!(self.goal, Goal::Sleep) && self.made.saved && self.next().is_none();
        if self.is_up() || sleeps {
            self.turn(Goal::Sleep);
            self.copies = true;
        }
    }

    /// It is to go back to an earlier moment: one that runs undisturbed, or rests asleep, wherever that is.
    pub(crate) const fn rewind(&mut self) {
        let sleeps = matches!(self.goal, Goal::Sleep | Goal::Suspend)
            && self.is_asleep()
            && self.next().is_none();
        self.rewinds = self.is_up() || sleeps;
    }

    /// It does not go back: it is what it was.
    pub(crate) const fn stay_as_it_is(&mut self) {
        self.rewinds = false;
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
        (made.owed, made.told, made.over) = (false, false, false);
        self.turn(Goal::Run);
    }

    /// One that has failed, with nothing left to undo, is as good as asleep: nothing is left but its disk. False
    /// if there may be more.
    pub(crate) const fn revive(&mut self) -> bool {
        let is = matches!(self.goal, Goal::Fail)
            && self.next().is_none()
            && !matches!(self.left, Left::Process);
        if is {
            *self = Self::cold(false);
        }
        is
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
        self.made.fence |= self.made.cold || self.made.over;
        self.turn(if self.made.stored { Goal::Suspend } else { Goal::Sleep });
    }

    /// Whether it is on its way to be another incarnation.
    const fn begins_anew(&self) -> bool {
        (self.made.cold || self.made.over) && matches!(self.goal, Goal::Run)
    }

    const fn turn(&mut self, goal: Goal) {
        self.goal = goal;
        self.copies &= matches!(goal, Goal::Sleep);
        self.rewinds = false;
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

    /// Whether it is being woken, and nothing of it runs yet: so long it has its turn among those that are, or
    /// among those that are got back from the store.
    pub(crate) const fn takes_a_turn(&self) -> bool {
        let made = &self.made;
        matches!(self.goal, Goal::Run)
            && (made.saved || made.stored || made.cold && !(made.fresh && made.process))
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
