//! The order of a sandbox's journey, as a value: what is made, what is wanted, what comes next.
//!
//! ```text
//!  create --> creating --> running --process gone--> failed
//!                 |           |                        |
//!                 +-- error --+------- remove ---------+--> deleting --> gone
//! ```
//! Pure: no clock, no I/O. Things are made in the order of [`Act`] and undone in reverse; the fence
//! stands before anything can speak; an error while undoing is counted and the undoing goes on.

use fault::Point;

use crate::state::State;

/// One thing to do. Every one that undoes may be asked for when there is nothing to undo.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    MakeTap,
    RaiseFence,
    StartProcess,
    GreetAgent,
    StopProcess,
    LowerFence,
    DeleteTap,
    RemoveFiles,
}

impl Act {
    /// What is being done, for progress and errors.
    pub(crate) const fn doing(self) -> &'static str {
        match self {
            Self::MakeTap => "making the tap of",
            Self::RaiseFence => "raising the fence around",
            Self::StartProcess => "starting the microVM of",
            Self::GreetAgent => "waiting for the guest of",
            Self::StopProcess => "stopping the microVM of",
            Self::LowerFence => "lowering the fence around",
            Self::DeleteTap => "deleting the tap of",
            Self::RemoveFiles => "removing the files of",
        }
    }

    /// Where a test can end the daemon before it is done, and after.
    pub(crate) const fn points(self) -> (Point, Point) {
        match self {
            Self::MakeTap => (Point::TapToMake, Point::TapMade),
            Self::RaiseFence => (Point::FenceToRaise, Point::FenceRaised),
            Self::StartProcess => (Point::ProcessToStart, Point::ProcessStarted),
            Self::GreetAgent => (Point::AgentToGreet, Point::AgentGreeted),
            Self::StopProcess => (Point::ProcessToStop, Point::ProcessStopped),
            Self::LowerFence => (Point::FenceToLower, Point::FenceLowered),
            Self::DeleteTap => (Point::TapToDelete, Point::TapDeleted),
            Self::RemoveFiles => (Point::FilesToRemove, Point::FilesRemoved),
        }
    }

    /// Whether it makes something; all others undo.
    pub(crate) const fn makes(self) -> bool {
        matches!(self, Self::MakeTap | Self::RaiseFence | Self::StartProcess | Self::GreetAgent)
    }
}

/// What is wanted of a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Goal {
    Run,
    Fail,
    Remove,
}

/// Which things of a sandbox exist, or may exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Made {
    pub(crate) tap: bool,
    pub(crate) fence: bool,
    pub(crate) process: bool,
    pub(crate) files: bool,
    pub(crate) greeted: bool,
}

impl Made {
    const NOTHING: Self =
        Self { tap: false, fence: false, process: false, files: false, greeted: false };
    const ANYTHING: Self =
        Self { tap: true, fence: true, process: true, files: true, greeted: false };
}

/// One sandbox's journey.
#[derive(Clone, Debug)]
pub(crate) struct Machine {
    goal: Goal,
    made: Made,
    tries: u8,
    left: Left,
    forced: bool,
}

/// What of a sandbox could not be undone and is left behind; more, the further down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Left {
    Nothing,
    /// Its tap or parts of its fence, which need nothing of the sandbox to be taken away later.
    Network,
    /// Perhaps its process: while it is, the sandbox is not gone.
    Process,
}

/// How often undoing one thing is tried before it is left behind.
const TRIES: u8 = 3;
/// How often the fence of a sandbox that is taken over is tried before the sandbox is given up.
const TAKEOVER_TRIES: u8 = 60;

impl Machine {
    /// A sandbox of which nothing exists yet.
    pub(crate) const fn create() -> Self {
        Self { goal: Goal::Run, made: Made::NOTHING, tries: 0, left: Left::Nothing, forced: false }
    }

    /// A sandbox that ran before this daemon did: all is there but the fence, which is raised anew.
    pub(crate) const fn adopt() -> Self {
        let made = Made { fence: false, greeted: true, ..Made::ANYTHING };
        Self { goal: Goal::Run, made, tries: 0, left: Left::Nothing, forced: false }
    }

    /// A sandbox that an earlier daemon left half made, half removed or failed.
    pub(crate) const fn leftover(state: State) -> Self {
        let goal = match state {
            State::Running | State::Failed => Goal::Fail,
            State::Creating | State::Deleting | State::Gone => Goal::Remove,
        };
        Self { goal, made: Made::ANYTHING, tries: 0, left: Left::Nothing, forced: false }
    }

    /// Its state. One that is adopted runs all the while: were it noted as anything else until its
    /// fence stands anew, a daemon that dies before that would have the next one remove it.
    pub(crate) const fn state(&self) -> State {
        match self.goal {
            Goal::Run if self.made.greeted => State::Running,
            Goal::Run => State::Creating,
            Goal::Fail => State::Failed,
            Goal::Remove if self.next().is_none() => State::Gone,
            Goal::Remove => State::Deleting,
        }
    }

    /// What to do next; none when it has arrived.
    pub(crate) const fn next(&self) -> Option<Act> {
        let made = &self.made;
        match self.goal {
            Goal::Run if !made.tap => Some(Act::MakeTap),
            Goal::Run if !made.fence => Some(Act::RaiseFence),
            Goal::Run if !made.process => Some(Act::StartProcess),
            Goal::Run if !made.greeted => Some(Act::GreetAgent),
            Goal::Run => None,
            Goal::Fail | Goal::Remove if made.process => Some(Act::StopProcess),
            Goal::Fail | Goal::Remove if made.fence => Some(Act::LowerFence),
            Goal::Fail | Goal::Remove if made.tap => Some(Act::DeleteTap),
            // It has the slot's user, and may have the tap open: nobody forgets it while it is there.
            Goal::Remove if matches!(self.left, Left::Process) && !self.forced => {
                Some(Act::StopProcess)
            }
            // A failed sandbox keeps its console log for a person to read.
            Goal::Remove if made.files => Some(Act::RemoveFiles),
            Goal::Fail | Goal::Remove => None,
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
            }
            Act::GreetAgent => made.greeted = true,
            Act::StopProcess => {
                made.process = false;
                made.greeted = false;
                if matches!(self.left, Left::Process) {
                    self.left = Left::Network;
                }
            }
            Act::LowerFence => made.fence = false,
            Act::DeleteTap => made.tap = false,
            Act::RemoveFiles => made.files = false,
        }
    }

    /// The act failed. Making turns round and undoes; undoing is tried again, then left behind. The
    /// fence of a sandbox that ran before is tried for longer: it is shut in meanwhile.
    pub(crate) fn failed(&mut self, act: Act) {
        match act {
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
                    }
                }
                self.tries = 0;
            }
            Act::StopProcess | Act::LowerFence | Act::DeleteTap | Act::RemoveFiles => {
                self.tries += 1;
                let given_up = self.forced && matches!(act, Act::StopProcess);
                if self.tries >= TRIES || given_up {
                    self.done(act);
                    self.left = self.left.max(match act {
                        Act::StopProcess => Left::Process,
                        Act::LowerFence | Act::DeleteTap => Left::Network,
                        _ => Left::Nothing,
                    });
                }
            }
        }
    }

    /// The act failed, and would again.
    pub(crate) fn failed_for_good(&mut self, act: Act) {
        self.tries = u8::MAX - 1;
        self.failed(act);
    }

    /// Somebody wants it removed.
    pub(crate) const fn remove(&mut self) {
        self.turn(Goal::Remove);
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

    /// Its process ended by itself.
    pub(crate) const fn process_gone(&mut self) {
        if matches!(self.goal, Goal::Run) {
            self.turn(if self.made.greeted { Goal::Fail } else { Goal::Remove });
        }
    }

    const fn turn(&mut self, goal: Goal) {
        self.goal = goal;
        // What ran before this daemon did has the fence of an earlier one, until it is raised anew.
        self.made.fence |= self.made.process;
        self.tries = 0;
    }

    /// Whether its guest has answered, in this journey or for an earlier daemon.
    pub(crate) const fn greeted(&self) -> bool {
        self.made.greeted
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
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Runs until it rests, failing the acts whose number is in `fails`; gives what was done.
    fn run(machine: &mut Machine, fails: &[bool]) -> Vec<(Act, bool)> {
        let mut done = Vec::new();
        while let Some(act) = machine.next() {
            assert!(done.len() < 64, "no end: {done:?}");
            let ok = !fails.get(done.len()).copied().unwrap_or(false);
            if ok {
                machine.done(act)
            } else {
                machine.failed(act)
            }
            done.push((act, ok));
        }
        done
    }

    #[test]
    fn the_fence_stands_before_anything_can_speak() {
        let mut machine = Machine::create();
        let acts: Vec<_> = run(&mut machine, &[]).into_iter().map(|(act, _)| act).collect();
        assert_eq!(acts, [Act::MakeTap, Act::RaiseFence, Act::StartProcess, Act::GreetAgent]);
        assert_eq!(machine.state(), State::Running);
    }

    /// Promise 21.
    #[test]
    fn a_sandbox_that_is_adopted_is_noted_as_running_at_every_step() {
        let mut machine = Machine::adopt();
        assert_eq!(machine.state(), State::Running);
        while let Some(act) = machine.next() {
            machine.done(act);
            assert_eq!(machine.state(), State::Running);
        }
    }

    #[test]
    fn what_was_made_is_undone_in_reverse() {
        let mut machine = Machine::create();
        let acts = run(&mut machine, &[false, false, false, true]);
        let undone: Vec<_> = acts.iter().skip(4).map(|(act, _)| *act).collect();
        assert_eq!(
            undone,
            [Act::StopProcess, Act::LowerFence, Act::DeleteTap, Act::RemoveFiles],
            "a guest that never answers leaves nothing"
        );
        assert_eq!(machine.state(), State::Gone);
    }

    #[test]
    fn a_process_that_ends_by_itself_leaves_a_failed_sandbox_with_its_log() {
        let mut machine = Machine::create();
        run(&mut machine, &[]);
        machine.process_gone();
        let acts = run(&mut machine, &[]);
        assert!(acts.iter().all(|(act, _)| *act != Act::RemoveFiles));
        assert_eq!(machine.state(), State::Failed);
        machine.remove();
        run(&mut machine, &[]);
        assert_eq!(machine.state(), State::Gone);
    }

    /// Promise 28.
    #[test]
    fn what_would_not_go_is_known_when_the_sandbox_is_gone() {
        for (fails, left) in [
            (&[false; 5], Left::Nothing),
            (&[false, false, true, true, true], Left::Network),
            (&[true, true, true, false, false], Left::Network),
            (&[true; 5], Left::Network),
        ] {
            let mut machine = Machine::leftover(State::Deleting);
            run(&mut machine, fails);
            assert_eq!(machine.state(), State::Gone);
            assert_eq!(machine.left(), left);
        }
    }

    /// Promise 28.
    #[test]
    fn a_sandbox_is_not_gone_while_its_process_may_be_there() {
        let mut machine = Machine::leftover(State::Deleting);
        for _ in 0..1000 {
            match machine.next() {
                Some(Act::StopProcess) => machine.failed(Act::StopProcess),
                Some(act) => machine.done(act),
                None => break,
            }
        }
        assert_eq!((machine.state(), machine.left()), (State::Deleting, Left::Process));
        run(&mut machine, &[]);
        assert_eq!((machine.state(), machine.left()), (State::Gone, Left::Network));
    }

    /// Promises 28, 59.
    #[test]
    fn a_removal_by_force_gives_up_the_process_and_nothing_else() {
        for tried in [0, 1, 3, 9] {
            let mut machine = Machine::leftover(State::Deleting);
            run_while(&mut machine, tried);
            machine.force();
            let mut more = 0;
            while let Some(act) = machine.next() {
                if act == Act::StopProcess {
                    more += 1;
                    machine.failed(act);
                } else {
                    machine.done(act);
                }
            }
            assert!(more <= 1, "{tried}: {more} more tries");
            assert_eq!((machine.state(), machine.left()), (State::Gone, Left::Process));
            assert_eq!(machine.made, Made::NOTHING, "{tried}");
        }
        let mut machine = Machine::leftover(State::Deleting);
        machine.force();
        run(&mut machine, &[]);
        assert_eq!(machine.left(), Left::Nothing, "what ends is not given up");
    }

    /// Fails to stop the process so many times, and does all else.
    fn run_while(machine: &mut Machine, mut fails: usize) {
        while let Some(act) = machine.next().filter(|_| fails > 0) {
            if act == Act::StopProcess {
                fails -= 1;
                machine.failed(act);
            } else {
                machine.done(act);
            }
        }
    }

    /// Promise 16.
    #[test]
    fn the_fence_of_a_sandbox_that_is_taken_over_is_tried_long_and_not_for_ever() {
        let mut machine = Machine::adopt();
        for _ in 0..TAKEOVER_TRIES {
            assert_eq!((machine.next(), machine.state()), (Some(Act::RaiseFence), State::Running));
            machine.failed(Act::RaiseFence);
        }
        let mut late = machine.clone();
        late.done(Act::RaiseFence);
        assert_eq!((late.next(), late.state()), (None, State::Running));
        machine.failed(Act::RaiseFence);
        assert_eq!((machine.next(), machine.state()), (Some(Act::StopProcess), State::Failed));
    }

    #[test]
    fn what_an_earlier_daemon_fenced_is_lowered_though_the_fence_was_never_raised_anew() {
        for give_up in [Machine::remove, Machine::process_gone] {
            let mut machine = Machine::adopt();
            machine.failed(Act::RaiseFence);
            give_up(&mut machine);
            let acts = run(&mut machine, &[]);
            assert!(acts.contains(&(Act::LowerFence, true)), "{acts:?}");
        }
    }

    proptest! {
        #[test]
        fn every_journey_ends_and_leaves_nothing_running_unfenced(
            fails in proptest::collection::vec(any::<bool>(), 0..24),
            start in 0..5_u8,
            remove in any::<bool>(),
        ) {
            let mut machine = match start {
                0 => Machine::create(),
                1 => Machine::adopt(),
                2 => Machine::leftover(State::Creating),
                3 => Machine::leftover(State::Running),
                _ => Machine::leftover(State::Deleting),
            };
            let mut fence = start != 0 && start != 1;
            let mut journey = |machine: &mut Machine, fails: &[bool]| {
                for (act, ok) in run(machine, fails) {
                    match act {
                        Act::RaiseFence => fence = ok,
                        Act::StartProcess => assert!(fence, "started without its fence"),
                        Act::LowerFence if ok => fence = false,
                        _ => {}
                    }
                }
            };
            journey(&mut machine, &fails);
            if remove {
                machine.remove();
                journey(&mut machine, &[]);
                prop_assert_eq!(machine.state(), State::Gone);
            }
            match machine.state() {
                State::Running => prop_assert!(machine.made.process && machine.made.fence),
                State::Failed | State::Gone => prop_assert!(
                    !machine.made.process && !machine.made.tap && !machine.made.fence
                ),
                State::Creating | State::Deleting => prop_assert!(false, "no rest here"),
            }
        }
    }
}
