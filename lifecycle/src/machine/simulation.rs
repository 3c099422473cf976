//! A sandbox's life under a schedule made from a seed: wishes come at any time, acts fail before or after
//! they took effect, processes end, and the daemon dies at any of them. What there is, is played by a few
//! facts; the machine, and what takes its sandbox up again, are the real ones.

use std::collections::BTreeMap;

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

/// What the kernel, the disk, the router and the journal have of one sandbox.
#[derive(Debug, Default)]
struct World {
    tap: bool,
    open: bool,
    /// In the kernel: it outlives the daemon.
    fence: bool,
    processes: Vec<Process>,
    /// How often the guest's memory has moved on.
    memory: u64,
    /// The memory that the saved state belongs to, if it is whole.
    state_of: Option<u64>,
    files: bool,
    /// The file of its memory.
    backing: bool,
    held: bool,
    kept: bool,
    /// It has connections, which are sockets, or values.
    facing: bool,
    values: bool,
    /// What is left of connections is known, and is in the journal.
    remembered: bool,
    written: bool,
    /// Connections have ended with a daemon, and neither it nor the kernel has told the guest.
    unheard: bool,
    noted: Option<State>,
    /// Something would not go, and is left behind.
    left: bool,
    /// What was saved is of another boot of the host.
    unusable: bool,
    /// The memory that the store has, if it has all of it, and whether the journal says so.
    store: Option<u64>,
    stored: bool,
    /// Its disk is enough to boot from, where that is allowed.
    allowed: bool,
    /// The journal has it as one that is to boot from that.
    cold: bool,
    /// Its guest has not answered since it booted, as far as the journal knows.
    booting: bool,
    incarnation: u64,
    /// The last one that ran.
    booted: u64,
    /// Its process would not end: its link goes down with its fence, and it reaches nothing.
    shut: bool,
}

#[derive(Debug)]
struct Process {
    paused: bool,
    /// What it has not heard has been sent to it.
    told: bool,
}

impl World {
    fn runs(&self) -> bool {
        self.processes.iter().any(|process| !process.paused)
    }

    fn perform(&mut self, act: Act) {
        match act {
            Act::MakeTap => (self.tap, self.open) = (true, true),
            Act::RaiseFence => {
                assert!(self.tap, "a fence around nothing");
                self.fence = true;
            }
            Act::StartProcess => {
                assert!(self.fence && self.open, "started without its fence");
                assert!(self.processes.is_empty(), "two processes");
                assert!(!self.held && !self.kept, "with connections of another");
                assert!(!self.stored, "the journal has it as one that has not run");
                assert!(self.incarnation > self.booted, "two boots of one incarnation");
                self.booted = self.incarnation;
                self.processes.push(Process { paused: false, told: false });
                // Another guest, which had no connections.
                self.unheard = false;
                (self.booting, self.state_of, self.unusable) = (true, None, false);
                self.memory += 1;
                (self.files, self.backing, self.open) = (true, true, false);
            }
            Act::BeginAnew => {
                assert!(self.allowed, "its memory is given up");
                assert!(self.processes.is_empty() && !self.fence, "what it was may be heard");
                self.incarnation += 1;
                self.cold = true;
            }
            Act::GreetAgent => {
                assert!(self.runs(), "nobody to greet");
                self.facing = true;
            }
            Act::Hold => self.held = true,
            Act::Pause => self.processes.iter_mut().for_each(|process| process.paused = true),
            Act::Checkpoint => {
                assert!(!self.runs(), "its connections move while they are read");
                self.remembered |= self.facing;
                self.values |= self.facing;
                (self.kept, self.facing) = (true, false);
            }
            Act::Save => {
                assert!(self.processes.len() == 1 && !self.runs(), "saved while it runs");
                self.state_of = Some(self.memory);
                self.processes.clear();
            }
            Act::Store => {
                assert!(self.processes.is_empty(), "stored while it may run");
                assert_eq!(self.state_of, Some(self.memory), "another memory is stored");
                (self.store, self.stored) = (self.state_of, true);
            }
            Act::DropLocal => {
                assert!(self.stored && self.store == Some(self.memory), "nobody else has it");
                assert!(self.processes.is_empty(), "its files are in use");
                (self.state_of, self.unusable, self.backing) = (None, false, false);
            }
            Act::Fetch => {
                assert_eq!(self.store, Some(self.memory), "another memory comes back");
                (self.state_of, self.backing) = (self.store, true);
                (self.unusable, self.stored) = (false, false);
            }
            Act::OpenTap => (self.tap, self.open) = (true, true),
            Act::CheckFence => assert!(self.fence, "its fence is gone"),
            Act::Prepare => {
                assert!(self.fence && self.open, "loaded without its fence");
                assert!(self.processes.is_empty(), "two processes for one memory");
                assert_eq!(self.state_of, Some(self.memory), "a state of another memory");
                assert!(!self.unusable, "a state of another boot");
                self.processes.push(Process { paused: true, told: false });
                self.open = false;
            }
            Act::Rebuild => {
                assert!(!self.runs(), "rebuilt after the first instruction");
                (self.kept, self.facing, self.values) = (false, self.values, false);
            }
            Act::TellEnds => {
                assert!(!self.kept && !self.processes.is_empty(), "told to nobody");
                self.processes.iter_mut().for_each(|process| process.told = true);
            }
            Act::Unpause => {
                assert!(self.fence, "runs without its fence");
                assert_eq!(self.processes.len(), 1, "one process runs");
                // The journal has it before the save begins.
                let known = self.remembered || self.state_of.is_some();
                let told = self.processes[0].told;
                assert!(told || !self.unheard || !known, "it waits for connections that are gone");
                // It hears the rest at its next word.
                self.unheard = false;
                assert!(!self.stored, "the journal has it as one that has not run");
                self.state_of = None;
                self.processes[0].paused = false;
            }
            Act::Refresh => assert!(self.runs(), "nobody to tell the time"),
            Act::Release => {
                assert!(self.runs() && !self.kept, "delivered to nobody");
                (self.held, self.facing) = (false, true);
            }
            Act::Discard | Act::StopProcess => {
                assert!(act != Act::Discard || !self.runs() || self.booting, "the guest itself");
                self.processes.clear();
                self.open = false;
            }
            Act::LowerFence => {
                assert!(self.shut || !self.runs(), "let out");
                (self.fence, self.held) = (false, false);
                (self.kept, self.facing, self.values) = (false, false, false);
            }
            Act::DeleteTap => (self.tap, self.open) = (false, false),
            Act::DropMemory => {
                assert!(self.processes.is_empty(), "its memory is in use");
                (self.backing, self.state_of) = (false, None);
            }
            Act::RemoveFiles => {
                assert!(self.processes.is_empty(), "its files are in use");
                (self.files, self.backing, self.state_of) = (false, false, None);
                (self.store, self.stored) = (None, false);
            }
        }
    }

    /// What is true at any time.
    fn check(&self, machine: &Machine) {
        assert!(self.fence || self.shut || !self.runs(), "unfenced");
        assert!(self.processes.len() <= 1, "two processes");
        assert!(self.state_of.is_none_or(|of| of == self.memory), "a state of another memory");
        if machine.is_up() {
            let up = self.runs() && self.fence && !self.held && !self.kept;
            assert!(up, "up, and yet not: {self:?}, {machine:?}");
        }
        if machine.next().is_none() && machine.state() == State::Standby {
            let whole = self.state_of.is_some() || machine.is_cold() && self.allowed;
            assert!(self.processes.is_empty() && whole, "asleep, and yet not");
            // Those of one that did not answer from its disk end by themselves, or with its fence.
            assert!(!self.facing || machine.is_cold(), "a socket faces a guest that sleeps");
        }
        if machine.next().is_none() && machine.state() == State::Suspended {
            let whole = self.stored && self.store == Some(self.memory);
            assert!(self.processes.is_empty() && whole, "in the store, and yet not");
        }
    }

    /// The journal has what there is.
    fn note(&mut self, machine: &Machine) {
        (self.noted, self.cold) = (Some(machine.state()), machine.is_cold());
        self.written = self.remembered;
        self.booting &= self.cold || !machine.greeted();
    }

    fn die(&mut self, host: bool) -> Machine {
        // The router's part goes with the daemon; the rules in the kernel stay. It says the ends of sockets
        // to a process that has the tap open, and one that was loaded is not the one that will run.
        let nobody = self.processes.is_empty() || self.state_of.is_some();
        self.unheard |= self.values || self.facing && nobody;
        (self.held, self.kept, self.open) = (false, false, false);
        (self.facing, self.values) = (false, false);
        if host {
            self.processes.clear();
            (self.tap, self.fence, self.unusable) = (false, false, self.state_of.is_some());
        }
        let state = self.noted.unwrap_or(State::Gone);
        let (process, saved) = (!self.processes.is_empty(), self.state_of.is_some());
        let slept = matches!(state, State::Standby | State::Suspending | State::Suspended);
        let lost = !process && !saved && !self.stored && self.allowed && (host || slept);
        self.remembered =
            self.written && (slept || matches!(state, State::Saving | State::Resuming));
        let there = There { process, saved, cold: self.cold || lost, stored: self.stored };
        Machine::found(state, there).owing(self.remembered)
    }
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
            8 if step > 60 => machine.remove(),
            _ => {}
        }
        if world.runs() && chance.of(2) == 0 {
            world.memory += 1;
            assert_eq!(world.state_of, None);
        }
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

/// Promises 63, 65, 69.
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
