//! What the operator decided about this node, as this room needs it. Values only.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::terms::DefaultTerms;

/// What the room needs to know about this node.
#[derive(Clone, Debug)]
pub struct Config {
    /// The journal and the private disks; survives a reboot.
    pub state_dir: PathBuf,
    /// The memory of the guests, as files; of this installation alone.
    pub memory_dir: PathBuf,
    /// Sockets, consoles; gone after a reboot.
    pub run_dir: PathBuf,
    /// The guest image: `vmlinuz`, `initrd.img`, `root.ext4`.
    pub image_dir: PathBuf,
    /// The program `qemu-system-x86_64`.
    pub qemu: PathBuf,
    /// The guests' network namespace, as `ip netns` names it.
    pub netns: String,
    /// The addresses guests' traffic leaves from, at most one per family.
    pub egress: Vec<IpAddr>,
    /// The highest slot: how many sandboxes this node can hold.
    pub slots: u16,
    /// What one tenant may take of the node.
    pub quota: Quota,
    /// Bytes that are to be free on the disk of `state_dir` where a sandbox is made.
    pub state_reserve: u64,
    /// How long a slot is kept from others after use.
    pub hold_down: Duration,
    /// How long a guest may take from its first instruction to its agent's first word.
    pub boot_deadline: Duration,
    /// The first of the user ids that microVM processes run as; slot `n` runs as this plus `n`.
    pub uid_base: u32,
    /// How long sandboxes live and what becomes of idle ones, where nothing else is asked for.
    pub terms: DefaultTerms,
    /// How the accounts are bounded.
    pub usage: UsageBounds,
    /// How many sandboxes are woken at once; others wait their turn.
    pub wakes: usize,
    /// How long whoever wants something of a sandbox that sleeps waits for it.
    pub wake_deadline: Duration,
    /// Where sandboxes are put that sleep for long.
    pub store: vault::Location,
    /// The operator's hooks for sandboxes of the driver `external`.
    pub hooks: vmm::external::Hooks,
}

/// What one tenant may take of the node, over all its sandboxes; the largest number where there is no
/// bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    /// Sandboxes, in whatever state.
    pub sandboxes: u16,
    /// Guest memory in MiB, of those that have not failed.
    pub memory_mib: u64,
    /// Virtual CPUs, likewise.
    pub vcpus: u64,
    /// Bytes that the disks of microVMs of ours can grow to.
    pub disk: u64,
    /// Bytes that its snapshots have in the object store.
    pub snapshots: u64,
}

/// How the accounts are bounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UsageBounds {
    /// How long the hours of the past are kept.
    pub keep: Duration,
    /// Rows that tell sandboxes and destinations apart; with more, those of whoever has most are joined, the
    /// oldest first.
    pub rows: u64,
}
