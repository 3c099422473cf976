//! The ways to sleep and back, from what was saved and from the disk alone, and whose turn a wake has.

use super::*;

fn found(state: State, process: bool, saved: bool) -> Machine {
    Machine::found(state, There { process, saved, ..There::default() })
}

#[test]
fn a_sandbox_falls_asleep_and_wakes_in_this_order_and_keeps_what_it_was() {
    let mut machine = running();
    machine.sleep();
    assert_eq!(machine.state(), State::Saving);
    let acts = names(run(&mut machine, &[]));
    assert_eq!(acts, [Act::Hold, Act::Pause, Act::Checkpoint, Act::Save]);
    assert_eq!(machine.state(), State::Standby);
    machine.wake();
    assert_eq!(machine.state(), State::Resuming);
    let acts = names(run(&mut machine, &[]));
    let expected = [
        Act::OpenTap,
        Act::CheckFence,
        Act::Prepare,
        Act::Rebuild,
        Act::Unpause,
        Act::Release,
        Act::Refresh,
    ];
    assert_eq!((&acts[..], machine.state()), (&expected[..], State::Running));
    machine.sleep();
    assert_eq!(names(run(&mut machine, &[])).len(), 4, "and again");
}

/// Promise 62.
#[test]
fn a_wake_has_its_turn_until_its_guest_runs_and_no_longer_than_it_is_one() {
    let turns = |machine: &mut Machine| {
        let mut turns = Vec::new();
        while let Some(act) = machine.next() {
            turns.push((act, machine.takes_a_turn()));
            machine.done(act);
        }
        turns
    };
    let mut machine = running();
    machine.sleep();
    assert!(turns(&mut machine).iter().all(|(_, turn)| !turn), "it falls asleep");
    assert!(!machine.takes_a_turn());
    machine.wake();
    let mut hung = machine.clone();
    let woken = turns(&mut machine);
    // What follows needs the guest, which may never answer.
    let after = [Act::Release, Act::Refresh];
    assert!(woken.len() > after.len());
    assert!(woken.iter().all(|(act, turn)| *turn != after.contains(act)), "{woken:?}");
    while hung.next() != Some(Act::Unpause) {
        hung.done(hung.next().unwrap());
    }
    let (mut failed, mut ended) = (hung.clone(), hung.clone());
    hung.remove();
    failed.lost();
    ended.process_gone();
    for machine in [&mut hung, &mut failed, &mut ended] {
        let turns = turns(machine);
        assert!(!turns.is_empty() && turns.iter().all(|(_, turn)| !turn), "{turns:?}");
    }
    let mut machine = Machine::cold(false);
    machine.wake();
    let booted = turns(&mut machine);
    assert!(booted.iter().all(|(act, turn)| *turn == (*act != Act::GreetAgent)), "{booted:?}");
}

/// Promise 41.
#[test]
fn a_guest_hears_before_it_runs_what_has_ended_with_an_earlier_daemon() {
    let before = |acts: &[Act], first, second| {
        let at = |act| acts.iter().position(|one| *one == act);
        at(first).is_some_and(|first| at(second).is_some_and(|second| first < second))
    };
    for (state, process, saved) in
        [(State::Standby, false, true), (State::Resuming, true, true), (State::Saving, true, false)]
    {
        for owed in [true, false] {
            let mut machine = found(state, process, saved).owing(owed);
            run(&mut machine, &[]);
            machine.wake();
            let mut woken = machine.clone();
            let mut acts = names(run(&mut woken, &[]));
            if state == State::Saving {
                // It was up already.
                acts = names(run(&mut found(state, process, saved).owing(owed), &[]));
            }
            assert_eq!(before(&acts, Act::TellEnds, Act::Unpause), owed, "{state:?}: {acts:?}");
            assert!(!owed || before(&acts, Act::RaiseFence, Act::TellEnds), "{acts:?}");
        }
    }
    // What was said to a process that never ran is said again.
    let mut machine = found(State::Standby, false, true).owing(true);
    machine.wake();
    while machine.next() != Some(Act::Unpause) {
        machine.done(machine.next().unwrap());
    }
    machine.process_gone();
    run(&mut machine, &[]);
    assert_eq!(machine.state(), State::Standby);
    machine.wake();
    assert!(names(run(&mut machine, &[])).contains(&Act::TellEnds));
    machine.sleep();
    run(&mut machine, &[]);
    machine.wake();
    assert!(!names(run(&mut machine, &[])).contains(&Act::TellEnds), "it has heard");
}

/// Promise 41.
#[test]
fn connections_that_were_put_back_for_a_process_that_never_ran_are_values_again() {
    let mut machine = running();
    machine.sleep();
    run(&mut machine, &[]);
    machine.wake();
    while machine.next() != Some(Act::Unpause) {
        machine.done(machine.next().unwrap());
    }
    machine.process_gone();
    let acts = names(run(&mut machine, &[]));
    assert_eq!(acts, [Act::Discard, Act::Checkpoint]);
    assert_eq!(machine.state(), State::Standby);
    machine.wake();
    assert!(names(run(&mut machine, &[])).contains(&Act::Rebuild));
    // Nor does it wake because that fails.
    machine.sleep();
    run(&mut machine, &[]);
    machine.wake();
    while machine.next() != Some(Act::Unpause) {
        machine.done(machine.next().unwrap());
    }
    machine.process_gone();
    run(&mut machine, &[false, true, true, true]);
    assert_eq!(machine.state(), State::Standby);
}

#[test]
fn what_fails_while_it_falls_asleep_turns_it_round_and_its_connections_go_on() {
    let back = [Act::Rebuild, Act::Unpause, Act::Release];
    for (failing, way_back) in [(0, &back[2..]), (1, &back[1..]), (2, &back[..]), (3, &back[..])] {
        let mut machine = running();
        machine.sleep();
        let mut fails = vec![false; failing];
        fails.push(true);
        let acts = names(run(&mut machine, &fails));
        assert_eq!(&acts[failing + 1..], way_back, "after act {failing}");
        assert_eq!(machine.state(), State::Running);
    }
}

/// Attack P42.
#[test]
fn a_wake_while_it_falls_asleep_turns_it_round_as_long_as_it_has_not_arrived() {
    for done in 0..=4 {
        let mut machine = running();
        machine.sleep();
        for _ in 0..done {
            let act = machine.next().unwrap();
            machine.done(act);
        }
        machine.wake();
        let acts = names(run(&mut machine, &[]));
        assert_eq!(acts.contains(&Act::Prepare), done == 4, "after {done} acts: {acts:?}");
        assert_eq!(machine.state(), State::Running);
    }
}

#[test]
fn a_wake_that_fails_before_anything_has_run_leaves_it_asleep_and_no_process() {
    let asleep = || {
        let mut machine = running();
        machine.sleep();
        run(&mut machine, &[]);
        machine
    };
    for failing in 0..3 {
        let mut machine = asleep();
        machine.wake();
        let mut fails = vec![false; failing];
        fails.extend([true; TRIES as usize].iter().take(if failing == 2 { 1 } else { 3 }));
        let acts = names(run(&mut machine, &fails));
        let last = if failing > 0 { Act::Checkpoint } else { Act::OpenTap };
        assert_eq!(acts.contains(&Act::Discard), failing > 0);
        assert_eq!(acts.last(), Some(&last));
        assert_eq!(machine.state(), State::Standby, "{acts:?}");
        assert!(!machine.made.process && !machine.made.open);
        machine.wake();
        run(&mut machine, &[]);
        assert_eq!(machine.state(), State::Running, "the next one may do better");
    }
    let mut machine = asleep();
    machine.wake();
    while machine.next() != Some(Act::Unpause) {
        let act = machine.next().unwrap();
        machine.done(act);
    }
    machine.process_gone();
    run(&mut machine, &[]);
    assert_eq!(machine.state(), State::Standby, "what it was made from is as it was");
    machine.wake();
    while machine.next() != Some(Act::Unpause) {
        let act = machine.next().unwrap();
        machine.done(act);
    }
    machine.used_up();
    machine.process_gone();
    run(&mut machine, &[]);
    assert_eq!(machine.state(), State::Failed, "used up");
}

#[test]
fn while_a_process_made_from_it_may_be_there_it_is_not_woken_again() {
    let mut machine = Machine::asleep(true);
    for _ in 0..100 {
        assert_eq!((machine.next(), machine.state()), (Some(Act::Discard), State::Resuming));
        machine.failed(Act::Discard);
        if machine.left() == Left::Process {
            machine.wake();
        }
    }
    machine.done(Act::Discard);
    assert_eq!((machine.next(), machine.state()), (None, State::Standby));
    machine.wake();
    assert_eq!(machine.state(), State::Resuming);
}

#[test]
fn what_an_earlier_daemon_left_is_taken_up_by_what_there_is() {
    use State::{Failed, Resuming, Running, Saving, Standby};
    for (state, process, saved, cold, first, end) in [
        (Running, true, false, false, Some(Act::RaiseFence), Running),
        (Running, false, false, false, Some(Act::StopProcess), Failed),
        (Running, false, false, true, None, Standby),
        (Saving, true, false, false, Some(Act::RaiseFence), Running),
        (Saving, true, true, false, Some(Act::RaiseFence), Running),
        (Saving, false, true, false, None, Standby),
        (Saving, false, false, false, Some(Act::StopProcess), Failed),
        (Saving, false, false, true, None, Standby),
        (Standby, false, true, false, None, Standby),
        (Standby, false, false, false, Some(Act::StopProcess), Failed),
        (Standby, false, false, true, None, Standby),
        (Resuming, true, true, false, Some(Act::Discard), Standby),
        (Resuming, true, false, false, Some(Act::RaiseFence), Running),
        (Resuming, true, false, true, Some(Act::Discard), Standby),
        (Resuming, false, true, false, None, Standby),
        (Resuming, false, false, false, Some(Act::StopProcess), Failed),
        (Resuming, false, false, true, None, Standby),
    ] {
        let mut machine = Machine::found(state, There { process, saved, cold, stored: false });
        let at = format!("{state:?}, process {process}, saved {saved}, cold {cold}");
        assert_eq!(machine.next(), first, "{at}");
        run(&mut machine, &[]);
        assert_eq!(machine.state(), end, "{at}");
        machine.remove();
        let acts = names(run(&mut machine, &[]));
        assert_eq!(machine.state(), State::Gone, "{at}");
        assert!(end == Failed || acts.contains(&Act::LowerFence), "{at}: {acts:?}");
    }
}

const BOOTS: [Act; 6] = [
    Act::LowerFence,
    Act::BeginAnew,
    Act::OpenTap,
    Act::RaiseFence,
    Act::StartProcess,
    Act::GreetAgent,
];

/// Promise 65.
#[test]
fn what_is_left_of_an_incarnation_is_ended_before_the_next_one_boots_from_the_disk() {
    let mut machine = Machine::cold(false);
    assert_eq!((machine.next(), machine.state()), (None, State::Standby), "until it is wanted");
    machine.wake();
    assert_eq!(machine.state(), State::Resuming);
    assert_eq!(names(run(&mut machine, &[])), BOOTS);
    assert_eq!((machine.state(), machine.is_cold()), (State::Running, false));
    machine.sleep();
    run(&mut machine, &[]);
    machine.wake();
    while machine.next() != Some(Act::Prepare) {
        let act = machine.next().unwrap();
        machine.done(act);
    }
    machine.failed(Act::Prepare);
    machine.cool();
    assert_eq!(machine.state(), State::Resuming, "whoever wanted it still does");
    let acts = names(run(&mut machine, &[]));
    assert_eq!((acts[0], &acts[1..]), (Act::Discard, &BOOTS[..]));
    assert_eq!(machine.state(), State::Running);
}

/// Promise 65.
#[test]
fn a_boot_from_the_disk_that_fails_leaves_it_asleep_and_the_next_one_is_another_incarnation() {
    for (at, failing) in BOOTS.into_iter().enumerate() {
        let mut machine = Machine::cold(false);
        machine.wake();
        let mut fails = vec![false; at];
        fails.extend([true; TRIES as usize].iter().take(if at > 3 { 1 } else { 3 }));
        let acts = names(run(&mut machine, &fails));
        assert_eq!(machine.state(), State::Standby, "{failing:?}: {acts:?}");
        assert!(machine.is_cold() && !machine.made.process && !machine.made.open, "{failing:?}");
        machine.wake();
        let acts = names(run(&mut machine, &[]));
        assert!(acts.contains(&Act::BeginAnew), "{failing:?}: {acts:?}");
        assert_eq!(machine.state(), State::Running, "{failing:?}");
    }
    for remove in [Machine::remove, Machine::lost] {
        let mut machine = Machine::cold(false);
        remove(&mut machine);
        let acts = names(run(&mut machine, &[]));
        assert_eq!(acts.first(), Some(&Act::StopProcess));
        assert!(acts.contains(&Act::LowerFence));
    }
}

/// Promise 70.
#[test]
fn a_snapshot_is_taken_of_one_that_sleeps_and_nobody_wakes_it_before() {
    let mut machine = running();
    machine.copy();
    let mut acts = Vec::new();
    while let Some(act) = machine.next() {
        machine.wake();
        assert_eq!(machine.next(), Some(act), "who wants it waits");
        machine.done(act);
        acts.push(act);
    }
    assert_eq!(acts, [Act::Hold, Act::Pause, Act::Checkpoint, Act::Save, Act::Copy]);
    assert_eq!(machine.state(), State::Standby);
    machine.copy();
    assert_eq!(names(run(&mut machine, &[])), [Act::Copy], "of one that sleeps");
    machine.copy();
    machine.failed(Act::Copy);
    assert_eq!((machine.next(), machine.state()), (None, State::Standby), "it sleeps on");
    machine.wake();
    run(&mut machine, &[]);
    machine.copy();
    run(&mut machine, &[false, false, false, true]);
    assert_eq!(machine.state(), State::Running, "what cannot be saved is not copied");
    for mut other in [Machine::suspended(false), Machine::cold(false), Machine::create()] {
        let before = other.next();
        other.copy();
        assert_eq!(other.next(), before);
    }
}

/// Promise 72.
#[test]
fn going_back_ends_what_it_was_before_anything_of_then_is_got_and_failing_changes_nothing() {
    let back = [
        Act::Rewind,
        Act::Discard,
        Act::LowerFence,
        Act::Fetch,
        Act::OpenTap,
        Act::RaiseFence,
        Act::CheckFence,
        Act::Prepare,
        Act::TellEnds,
        Act::Unpause,
        Act::Refresh,
    ];
    let mut machine = running();
    machine.rewind();
    assert_eq!(machine.state(), State::Running, "until it is");
    assert_eq!(names(run(&mut machine, &[])), back);
    assert_eq!(machine.state(), State::Running);
    machine.sleep();
    run(&mut machine, &[]);
    machine.rewind();
    let acts = names(run(&mut machine, &[]));
    assert!(acts.len() == back.len() - 1 && !acts.contains(&Act::Discard), "of one that sleeps");
    machine.rewind();
    machine.failed(Act::Rewind);
    assert!(machine.is_up(), "it is what it was");
    machine.rewind();
    machine.remove();
    assert_ne!(machine.next(), Some(Act::Rewind), "whoever removes it is heard first");
    // What fails after that leaves it in the store, as it was then.
    let mut machine = running();
    machine.rewind();
    run(&mut machine, &[false, false, false, true]);
    assert_eq!(machine.state(), State::Suspended);
    let mut machine = running();
    machine.rewind();
    machine.done(Act::Rewind);
    machine.done(Act::Discard);
    (0..3).for_each(|_| machine.failed(Act::LowerFence));
    assert_eq!(run(&mut machine, &[]).last(), Some(&(Act::DropLocal, true)));
    machine.wake();
    assert_eq!(machine.next(), Some(Act::LowerFence), "nor is its past let go on");
}

/// Promise 78. It is another incarnation, behind a fence of its own, and boots when it is woken and not before.
#[test]
fn one_that_has_failed_and_is_asked_for_is_as_good_as_asleep() {
    let mut machine = Machine::adopt();
    assert!(!machine.revive(), "control: it runs");
    machine.done(Act::RaiseFence);
    assert!(machine.is_up());
    machine.process_gone();
    while let Some(act) = machine.next() {
        assert!(!machine.revive(), "it is not undone yet");
        machine.done(act);
    }
    assert_eq!(machine.state(), State::Failed);
    let mut survived = machine.clone();
    assert!(machine.revive() && !machine.revive());
    assert_eq!((machine.state(), machine.next(), machine.is_cold()), (State::Standby, None, true));
    machine.wake();
    for act in [
        Act::LowerFence,
        Act::BeginAnew,
        Act::OpenTap,
        Act::RaiseFence,
        Act::StartProcess,
        Act::GreetAgent,
    ] {
        assert_eq!((machine.next(), machine.state()), (Some(act), State::Resuming));
        machine.done(act);
    }
    assert_eq!((machine.state(), machine.is_up()), (State::Running, true));

    survived.left = Left::Process;
    assert!(!survived.revive(), "there are never two processes for one disk");
}
