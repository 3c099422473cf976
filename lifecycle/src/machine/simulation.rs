//! A sandbox's life under a schedule made from a seed: wishes come at any time, acts fail before or after
//! they took effect, processes end, and the daemon dies at any of them. What there is, is played by a few
//! facts; the machine, and what takes its sandbox up again, are the real ones.

mod world;

use std::collections::BTreeMap;

use crate::machine::simulation::world::{Process, World};
use crate::machine::*;

/// xorshift64*: the same seed, the same life.
struct Chance(u64);

impl Chance {
    fn of(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % n
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    None,
    Before,
    After,
    DiesBefore,
    DiesAfter,
    ProcessEnds,
    /// What was saved is of no use.
    Unusable,
    /// The host is started anew.
    HostDies,
}

/// Lives one life; gives how it met which act.
fn live(seed: u64, met: &mut BTreeMap<(String, Fault), u64>) {
    let mut chance = Chance(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut world = World {
        noted: Some(State::Creating),
        incarnation: 1,
        allowed: chance.of(2) == 0,
        ..World::default()
    };
    let mut machine = Machine::create();
    let faulty = chance.of(4);
    for step in 0..120 {
        world.shut = machine.left() == Left::Process;
        world.check(&machine);
        if machine.state() == State::Gone {
            break;
        }
        match chance.of(24) {
            0..=3 => machine.sleep(),
            4..=7 => machine.wake(),
            9..=11 => machine.suspend(),
            12 => machine.stay(),
            15 if world.snapshot.is_some() => machine.rewind(),
            13..=14 => {
                machine.copy();
                world.copying |= machine.copies;
            }
            8 if step > 60 => machine.remove(),
            _ => {}
        }
        world.over &= world.runs();
        if world.runs() && !world.over && chance.of(2) == 0 {
            world.memory += 1;
            assert_eq!(world.state_of, None);
        }
        // Given up with whatever it could not fall asleep for: its caller is told.
        world.copying &= machine.copies;
        let Some(act) = machine.next() else {
            world.remembered &= machine.state() != State::Running;
            world.note(&machine);
            if faulty > 0 && chance.of(24) == 0 {
                *met.entry((format!("{:?}", machine.state()), Fault::HostDies)).or_default() += 1;
                machine = world.die(true);
                continue;
            }
            if machine.is_up() && chance.of(16) == 0 {
                world.processes.clear();
                machine.process_gone();
            }
            continue;
        };
        // A note may fail on a full disk; a sandbox does not fall asleep on that.
        if chance.of(16) > 0 || !machine.greeted() {
            world.note(&machine);
        } else if act.puts_to_sleep() && !machine.is_asleep() {
            machine.failed(act);
            continue;
        }
        let fault = match chance.of(24) {
            _ if act == Act::Prepare && world.unusable => Fault::Unusable,
            _ if faulty == 0 => Fault::None,
            0 => Fault::Before,
            1 => Fault::After,
            2 => Fault::DiesBefore,
            3 => Fault::DiesAfter,
            4 => Fault::ProcessEnds,
            5 => Fault::HostDies,
            6 if act == Act::Prepare => Fault::Unusable,
            _ => Fault::None,
        };
        *met.entry((format!("{act:?}"), fault)).or_default() += 1;
        match fault {
            Fault::None => {
                world.perform(act);
                machine.done(act);
            }
            Fault::Before => {
                machine.failed(act);
                // Given up: those connections are lost, and nobody waits for them.
                match act {
                    Act::Rebuild if machine.next() != Some(act) => {
                        (world.kept, world.values) = (false, false);
                    }
                    Act::TellEnds if machine.next() != Some(act) => world.unheard = false,
                    Act::Checkpoint if machine.is_asleep() && machine.next() != Some(act) => {
                        world.facing = false;
                    }
                    Act::Release if machine.next() != Some(act) => world.held = false,
                    Act::LowerFence | Act::DeleteTap | Act::DropMemory | Act::RemoveFiles => {
                        world.left |= machine.next() != Some(act);
                    }
                    _ => {}
                }
            }
            Fault::After if act == Act::Unpause && chance.of(2) == 0 => {
                world.state_of = None;
                machine.used_up();
                machine.failed(act);
            }
            // It is one step in the journal, and failed before that.
            Fault::After if act == Act::Rewind => machine.failed(act),
            Fault::After => {
                let stored = world.stored;
                world.perform(act);
                if matches!(act, Act::Store | Act::Fetch) {
                    // All was done but the note in the journal, which is part of it.
                    world.stored = stored;
                }
                if act == Act::Unpause {
                    machine.used_up();
                }
                if act == Act::Save {
                    // What was written may be whole, and the process is there still.
                    world.processes.push(Process { paused: true, told: false });
                }
                machine.failed(act);
            }
            Fault::DiesBefore => machine = world.die(false),
            Fault::HostDies => machine = world.die(true),
            Fault::Unusable => {
                machine.failed(act);
                if world.allowed {
                    machine.cool();
                } else {
                    machine.lost();
                }
            }
            Fault::DiesAfter => {
                world.perform(act);
                machine = world.die(false);
            }
            Fault::ProcessEnds => {
                let there = !world.processes.is_empty();
                world.processes.clear();
                machine.failed(act);
                let undoes = matches!(
                    act,
                    Act::LowerFence | Act::DeleteTap | Act::DropMemory | Act::RemoveFiles
                );
                world.left |= undoes && machine.next() != Some(act);
                if there && !matches!(act, Act::Discard | Act::StopProcess) {
                    machine.process_gone();
                }
            }
        }
    }
    // Whatever happened, it arrives, and can be removed from there.
    arrive(&mut world, &mut machine);
    let rests = [State::Running, State::Standby, State::Suspended, State::Failed, State::Gone];
    assert!(rests.contains(&machine.state()), "{:?}", machine.state());
    let may_run = matches!(machine.state(), State::Running | State::Standby);
    assert!(world.backing || !may_run, "without its memory");
    let failed = machine.state() == State::Failed && machine.left() != Left::Process;
    assert!(world.left || !failed || !world.backing, "failed, with memory: {world:?}");
    machine.remove();
    arrive(&mut world, &mut machine);
    assert_eq!(machine.state(), State::Gone);
    assert!(world.processes.is_empty());
    assert!(world.left || !world.tap && !world.fence && !world.files, "{world:?}");
}

fn arrive(world: &mut World, machine: &mut Machine) {
    for _ in 0..32 {
        world.shut = machine.left() == Left::Process;
        world.check(machine);
        let Some(act) = machine.next() else { return };
        if act == Act::Prepare && world.unusable {
            machine.failed(act);
            if world.allowed {
                machine.cool()
            } else {
                machine.lost()
            }
            continue;
        }
        world.perform(act);
        machine.done(act);
    }
    panic!("a state without an exit: {machine:?}");
}

/// Promises 63, 65, 69, 70, 72.
#[test]
fn no_schedule_of_wishes_faults_and_deaths_breaks_what_holds_at_any_time() {
    let mut met = BTreeMap::new();
    for seed in 1..=30_000 {
        let lived = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| live(seed, &mut met)));
        if let Err(broken) = lived {
            eprintln!("seed {seed}");
            std::panic::resume_unwind(broken);
        }
    }
    // Nothing is shown of what never came.
    for act in [
        Act::MakeTap,
        Act::RaiseFence,
        Act::StartProcess,
        Act::GreetAgent,
        Act::Hold,
        Act::Pause,
        Act::Checkpoint,
        Act::Save,
        Act::OpenTap,
        Act::CheckFence,
        Act::Prepare,
        Act::Rebuild,
        Act::TellEnds,
        Act::Unpause,
        Act::Refresh,
        Act::Release,
        Act::BeginAnew,
        Act::Copy,
        Act::Rewind,
        Act::Store,
        Act::DropLocal,
        Act::Fetch,
        Act::Discard,
        Act::StopProcess,
        Act::LowerFence,
        Act::DeleteTap,
        Act::DropMemory,
        Act::RemoveFiles,
    ] {
        for fault in [Fault::None, Fault::Before, Fault::After, Fault::DiesBefore, Fault::DiesAfter]
        {
            let times = met.get(&(format!("{act:?}"), fault)).copied().unwrap_or_default();
            assert!(times >= 20, "{act:?} met {fault:?} {times} times");
        }
    }
    for state in [State::Running, State::Standby, State::Suspended] {
        let times = met.get(&(format!("{state:?}"), Fault::HostDies)).copied().unwrap_or_default();
        assert!(times >= 20, "the host died {times} times under one that is {state:?}");
    }
    assert!(met.get(&("Prepare".to_owned(), Fault::Unusable)).is_some_and(|times| *times >= 20));
}
