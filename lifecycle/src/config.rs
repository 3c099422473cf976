//! What the operator decided about this node, as this room needs it. Values only.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

/// What the room needs to know about this node.
#[derive(Clone, Debug)]
pub struct Config {
    /// The journal and the private disks; survives a reboot.
    pub state_dir: PathBuf,
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
    /// How many of them one tenant may take.
    pub tenant_slots: u16,
    /// How long a slot is kept from others after use.
    pub hold_down: Duration,
    /// How long a guest may take from its first instruction to its agent's first word.
    pub boot_deadline: Duration,
    /// The first of the user ids that microVM processes run as; slot `n` runs as this plus `n`.
    pub uid_base: u32,
    /// The operator's hooks for sandboxes of the driver `external`.
    pub hooks: vmm::external::Hooks,
}
