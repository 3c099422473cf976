//! Where a journey begins: with nothing, or with what an earlier daemon left of a sandbox. Says what there
//! is, and what that is meant to become; not how.

use crate::machine::made::Made;
use crate::machine::{Goal, Machine};
use crate::state::State;

/// What there is of a sandbox of an earlier daemon.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct There {
    pub(crate) process: bool,
    /// A whole saved state: where it is, nothing has run since it was written, whatever was noted.
    pub(crate) saved: bool,
    /// Its disk is to be enough.
    pub(crate) cold: bool,
    /// The store has all of it.
    pub(crate) stored: bool,
}

impl Machine {
    /// A sandbox of which nothing exists yet.
    pub(crate) const fn create() -> Self {
        Self::new(Goal::Run, Made::NOTHING)
    }

    /// A sandbox that ran before this daemon did: all is there but the fence, which is raised anew.
    pub(crate) const fn adopt() -> Self {
        Self::new(Goal::Run, Made { fence: false, ..Made::RUNNING })
    }

    /// A sandbox that was on its way to sleep, or to wake, when its daemon died, and whose process is the
    /// truth about it: it is to run, but may stand still, and its connections are gone.
    pub(crate) const fn interrupted() -> Self {
        let made = Made { fence: false, paused: true, stale: true, ..Made::RUNNING };
        Self::new(Goal::Run, made)
    }

    /// A sandbox that sleeps: nothing of it runs, and its fence is raised when it is woken. A process
    /// that was made from what it is, and has not run, is ended.
    pub(crate) const fn asleep(process: bool) -> Self {
        let made = Made { fence: false, process, saved: true, ..Made::RUNNING };
        Self { woken: true, ..Self::new(Goal::Sleep, made) }
    }

    /// A sandbox that the store has. What there is of it here is none of it.
    pub(crate) const fn suspended(process: bool) -> Self {
        let made = Made { fence: false, process, stored: true, strewn: true, ..Made::RUNNING };
        Self { woken: true, ..Self::new(Goal::Suspend, made) }
    }

    /// A sandbox of which nothing is left but its disk. A process that was booting from that is ended, and
    /// what there is of its fence is lowered before it boots again.
    pub(crate) const fn cold(process: bool) -> Self {
        let made = Made { process, cold: true, ..Made::RUNNING };
        Self { woken: true, ..Self::new(Goal::Sleep, made) }
    }

    /// The same, whose guest may be owed the ends of connections; not one that boots anew, which had none.
    pub(crate) const fn owing(mut self, owed: bool) -> Self {
        self.made.owed = owed && !self.made.cold;
        self
    }

    /// A sandbox that an earlier daemon left half made, half removed or failed.
    pub(crate) const fn leftover(state: State) -> Self {
        let goal = if state.has_run() { Goal::Fail } else { Goal::Remove };
        Self::new(goal, Made::ANYTHING)
    }

    /// A sandbox of an earlier daemon, by what the journal says and by what there is. Where there is neither
    /// a process nor a saved state, its disk may be enough; so it is for one that was booting from that.
    pub(crate) const fn found(state: State, there: There) -> Self {
        let There { process, saved, cold, stored } = there;
        match state {
            State::Saving | State::Standby | State::Resuming if stored => Self::suspended(process),
            State::Suspending | State::Suspended if stored => Self::suspended(process),
            State::Suspending | State::Suspended => Self::found(State::Standby, there),
            State::Standby | State::Resuming if cold && !saved => Self::cold(process),
            State::Running if process => Self::adopt(),
            State::Saving if process => Self::interrupted(),
            State::Standby | State::Resuming if process && !saved => Self::interrupted(),
            State::Running | State::Saving | State::Standby | State::Resuming if saved => {
                Self::asleep(process)
            }
            State::Running | State::Saving if cold => Self::cold(process),
            state => Self::leftover(state),
        }
    }
}
