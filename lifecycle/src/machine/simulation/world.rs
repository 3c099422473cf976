//! What there is of one sandbox, played by a few facts: what each act does to them, what must hold when it is
//! done and at any time, and what a daemon that dies leaves to the next one.

use crate::machine::*;

/// What the kernel, the disk, the router and the journal have of one sandbox.
#[derive(Debug, Default)]
pub(super) struct World {
    pub(super) tap: bool,
    pub(super) open: bool,
    /// In the kernel: it outlives the daemon.
    pub(super) fence: bool,
    pub(super) processes: Vec<Process>,
    /// How often the guest's memory has moved on.
    pub(super) memory: u64,
    /// The memory that the saved state belongs to, if it is whole.
    pub(super) state_of: Option<u64>,
    pub(super) files: bool,
    /// The file of its memory.
    pub(super) backing: bool,
    pub(super) held: bool,
    pub(super) kept: bool,
    /// It has connections, which are sockets, or values.
    pub(super) facing: bool,
    pub(super) values: bool,
    /// What is left of connections is known, and is in the journal.
    pub(super) remembered: bool,
    pub(super) written: bool,
    /// Connections have ended with a daemon, and neither it nor the kernel has told the guest.
    pub(super) unheard: bool,
    pub(super) noted: Option<State>,
    /// Something would not go, and is left behind.
    pub(super) left: bool,
    /// What was saved is of another boot of the host.
    pub(super) unusable: bool,
    /// The memory that the store has, if it has all of it, and whether the journal says so.
    pub(super) store: Option<u64>,
    pub(super) stored: bool,
    /// Its disk is enough to boot from, where that is allowed.
    pub(super) allowed: bool,
    /// The journal has it as one that is to boot from that.
    pub(super) cold: bool,
    /// Its guest has not answered since it booted, as far as the journal knows.
    pub(super) booting: bool,
    pub(super) incarnation: u64,
    /// The last one that ran.
    pub(super) booted: u64,
    /// A snapshot of it was wanted while it could be taken.
    pub(super) copying: bool,
    /// A snapshot: its memory, and whether it had connections.
    pub(super) snapshot: Option<(u64, bool)>,
    /// What runs is what it was before it went back.
    pub(super) over: bool,
    /// Its process would not end: its link goes down with its fence, and it reaches nothing.
    pub(super) shut: bool,
}

#[derive(Debug)]
pub(super) struct Process {
    pub(super) paused: bool,
    /// What it has not heard has been sent to it.
    pub(super) told: bool,
}

impl World {
    pub(super) fn runs(&self) -> bool {
        self.processes.iter().any(|process| !process.paused)
    }

    pub(super) fn perform(&mut self, act: Act) {
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
            Act::Copy => {
                assert!(self.processes.is_empty() && !self.stored, "copied while it may run");
                assert_eq!(self.state_of, Some(self.memory), "another memory is copied");
                assert!(self.copying, "nobody wants it");
                self.copying = false;
                self.snapshot = Some((self.memory, self.values || self.facing));
            }
            Act::Rewind => {
                let (memory, connected) = self.snapshot.expect("a snapshot");
                (self.store, self.stored, self.memory) = (Some(memory), true, memory);
                (self.state_of, self.cold, self.booting) = (None, false, false);
                self.incarnation += 1;
                // With what is left of the connections of then, in one step.
                (self.noted, self.written, self.remembered) = (Some(State::Suspended), true, true);
                self.unheard = connected;
                self.over = !self.processes.is_empty();
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
                assert!(!self.over && !self.facing, "what it was goes on");
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
                let given_up = self.booting || self.over;
                assert!(act != Act::Discard || !self.runs() || given_up, "the guest itself");
                self.over = false;
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
    pub(super) fn check(&self, machine: &Machine) {
        assert!(self.fence || self.shut || !self.runs(), "unfenced");
        assert!(self.processes.len() <= 1, "two processes");
        assert!(self.state_of.is_none_or(|of| of == self.memory), "a state of another memory");
        if machine.is_up() {
            let up = self.runs() && self.fence && !self.held && !self.kept;
            assert!(up, "up, and yet not: {self:?}, {machine:?}");
        }
        let forgotten = machine.copies && machine.next().is_none();
        assert!(!forgotten, "it rests, and its snapshot is waited for");
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
    pub(super) fn note(&mut self, machine: &Machine) {
        (self.noted, self.cold) = (Some(machine.state()), machine.is_cold());
        self.written = self.remembered;
        self.booting &= self.cold || !machine.greeted();
    }

    pub(super) fn die(&mut self, host: bool) -> Machine {
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
        // Who waited for it has gone with the daemon.
        self.copying = false;
        self.over &= !self.processes.is_empty();
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
