//! The ways into the store and back.

use super::*;

/// A sandbox that the store has, and this node has not.
fn suspended() -> Machine {
    let mut machine = running();
    machine.sleep();
    run(&mut machine, &[]);
    machine.suspend();
    assert_eq!(machine.state(), State::Suspending);
    assert_eq!(names(run(&mut machine, &[])), [Act::Store, Act::DropLocal]);
    assert_eq!(machine.state(), State::Suspended);
    machine
}

/// Promise 69.
#[test]
fn a_sandbox_is_given_up_here_when_the_store_has_it_and_runs_only_when_it_is_back() {
    let mut machine = suspended();
    machine.wake();
    assert_eq!(machine.state(), State::Resuming);
    let acts = names(run(&mut machine, &[]));
    assert_eq!(acts[..3], [Act::Fetch, Act::OpenTap, Act::CheckFence]);
    assert_eq!((machine.state(), machine.made.stored), (State::Running, false));
    machine.suspend();
    assert!(machine.is_up(), "only what sleeps");
    // What could not be got back is there as it was, and what is here of it is none.
    let mut machine = suspended();
    machine.wake();
    assert_eq!(names(run(&mut machine, &[true])), [Act::Fetch, Act::DropLocal]);
    assert_eq!(machine.state(), State::Suspended);
    machine.wake();
    run(&mut machine, &[]);
    assert_eq!(machine.state(), State::Running, "the next one may do better");
    // What could not be put there sleeps here.
    let asleep = || {
        let mut machine = running();
        machine.sleep();
        run(&mut machine, &[]);
        machine.suspend();
        machine
    };
    let mut machine = asleep();
    assert_eq!(names(run(&mut machine, &[true])), [Act::Store]);
    assert_eq!(machine.state(), State::Standby);
    // Who wants it while it is under way has it stay, and then wakes it.
    let mut machine = asleep();
    machine.stay();
    assert_eq!((machine.next(), machine.state()), (None, State::Standby));
    let mut machine = asleep();
    machine.done(Act::Store);
    machine.stay();
    assert_eq!(machine.next(), Some(Act::DropLocal), "the store has it by now");
    // However an earlier daemon ended.
    for state in [State::Standby, State::Suspending, State::Suspended, State::Resuming] {
        for saved in [false, true] {
            let there = There { saved, stored: true, ..There::default() };
            let mut machine = Machine::found(state, there);
            assert_eq!(names(run(&mut machine, &[])), [Act::DropLocal], "{state:?}");
            assert_eq!(machine.state(), State::Suspended, "{state:?}");
        }
        let there = There { saved: true, ..There::default() };
        assert_eq!(Machine::found(state, there).state(), State::Standby, "{state:?}");
    }
    let mut machine = suspended();
    machine.remove();
    let acts = names(run(&mut machine, &[]));
    assert!(acts.contains(&Act::RemoveFiles), "{acts:?}");
}
