//! The order of each journey, step by step and by chance.

mod asleep;
mod elsewhere;

use proptest::prelude::*;

use super::*;

/// Runs until it rests, failing the acts whose number is in `fails`; gives what was done.
fn run(machine: &mut Machine, fails: &[bool]) -> Vec<(Act, bool)> {
    let mut done = Vec::new();
    while let Some(act) = machine.next() {
        assert!(done.len() < 64, "no end: {done:?}");
        let ok = !fails.get(done.len()).copied().unwrap_or(false);
        if ok {
            machine.done(act);
        } else {
            machine.failed(act);
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
        [Act::StopProcess, Act::LowerFence, Act::DeleteTap, Act::DropMemory, Act::RemoveFiles],
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
    assert!(acts.contains(&(Act::DropMemory, true)), "which no quota counts any more");
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

/// A sandbox that runs, with nothing left to do.
fn running() -> Machine {
    let mut machine = Machine::create();
    run(&mut machine, &[]);
    machine
}

fn names(done: Vec<(Act, bool)>) -> Vec<Act> {
    done.into_iter().map(|(act, _)| act).collect()
}

/// Promises 28, 59.
#[test]
fn who_wants_it_removed_again_and_again_keeps_no_try_from_being_the_last() {
    let mut machine = Machine::leftover(State::Deleting);
    machine.done(Act::StopProcess);
    for _ in 0..TRIES {
        assert_eq!(machine.next(), Some(Act::LowerFence));
        machine.failed(Act::LowerFence);
        machine.remove();
    }
    assert_eq!((machine.next(), machine.left()), (Some(Act::DeleteTap), Left::Network));
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
            state => prop_assert!(false, "no rest in {state:?}"),
        }
    }
}
