//! The seam between the life of a sandbox and whatever runs its machine.
//!
//! A driver starts, recognises and stops; it keeps nothing in memory that it could not find again
//! from a [`Process`]. Pausing and saving will join this trait with the first driver that can.

use std::fs;
use std::future::Future;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use policy::{SandboxName, Slot, TenantName};
use serde::{Deserialize, Serialize};

use crate::error::Error;

/// Runs machines.
pub trait Hypervisor: Send + Sync {
    /// Starts the machine on its tap and returns when its process runs; the guest is still booting.
    /// What was made before a failure is unmade.
    fn start(
        &self,
        machine: &Machine,
        tap: OwnedFd,
    ) -> impl Future<Output = Result<Process, Error>> + Send;

    /// Takes up a process that an earlier daemon started (its console is read again, its end is
    /// noticed). False when it is gone.
    fn adopt(&self, process: &Process) -> impl Future<Output = bool> + Send;

    /// Whether this very process is alive: a recycled process id does not count.
    fn is_running(&self, process: &Process) -> bool;

    /// Asks the guest to power off, waits a bounded time, kills what is left, and returns when the
    /// process is gone with its control group and sockets. The disk stays. Stopping twice is no
    /// error.
    fn stop(&self, process: &Process) -> impl Future<Output = Result<(), Error>> + Send;
}

/// A machine to start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// The sandbox it is for; also its host name.
    pub name: SandboxName,
    /// Whose it is.
    pub tenant: TenantName,
    /// The slot whose tap it hangs on.
    pub slot: Slot,
    /// Memory of the guest, in MiB.
    pub memory_mib: u32,
    /// Number of virtual CPUs.
    pub vcpus: u8,
    /// The kernel, a bzImage.
    pub kernel: PathBuf,
    /// The initial ram disk with the guest's process 1.
    pub initrd: PathBuf,
    /// Words added to the kernel's command line.
    pub cmdline: String,
    /// The disk every guest of this image shares, raw, never written.
    pub base: PathBuf,
    /// The guest's own overlay over `base`; made when absent, kept at stop.
    pub disk: PathBuf,
    /// A directory of this machine alone, for sockets and the console's log; made when absent.
    pub run_dir: PathBuf,
    /// User and group id its process runs as; nobody else's.
    pub uid: u32,
}

/// Which driver a process belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DriverName {
    /// Somebody else's hypervisor.
    External,
    /// QEMU.
    Qemu,
}

impl DriverName {
    /// As in configuration.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::External => "external",
            Self::Qemu => "qemu",
        }
    }
}

/// A started machine, as written to the journal: enough for a later daemon to find and stop it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Who started it.
    pub driver: DriverName,
    /// Its sandbox.
    pub name: SandboxName,
    /// Its tenant.
    pub tenant: TenantName,
    /// Its slot.
    pub slot: Slot,
    /// Where its sockets and its console's log are.
    pub run_dir: PathBuf,
    /// The process on this host; none when somebody else runs it.
    pub host: Option<HostProcess>,
}

impl Process {
    pub(crate) fn new(driver: DriverName, machine: &Machine, host: Option<HostProcess>) -> Self {
        Self {
            driver,
            name: machine.name.clone(),
            tenant: machine.tenant.clone(),
            slot: machine.slot,
            run_dir: machine.run_dir.clone(),
            host,
        }
    }

    /// The log of the guest's console; the part before it is in `console.log.1`.
    #[must_use]
    pub fn console_log(&self) -> PathBuf {
        self.run_dir.join("console.log")
    }

    /// The hypervisor's control socket (QMP).
    #[must_use]
    pub fn control_socket(&self) -> PathBuf {
        self.run_dir.join("qmp.sock")
    }

    /// The socket its console is read from.
    #[must_use]
    pub fn console_socket(&self) -> PathBuf {
        self.run_dir.join("console.sock")
    }
}

/// A process of this host that cannot be confused with another one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostProcess {
    /// Its id.
    pub pid: u32,
    /// When it started, in clock ticks since the host's boot (proc(5), `stat` field 22).
    pub start_time: u64,
    /// A UUID on its command line that no other process carries.
    pub marker: String,
    /// The control groups made for it.
    pub groups: Vec<PathBuf>,
}

impl HostProcess {
    /// Whether it is alive: same id, same start, our marker, and not a zombie.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        let Some((state, start_time)) = stat(self.pid) else { return false };
        if start_time != self.start_time || matches!(state, 'Z' | 'X') {
            return false;
        }
        let words = fs::read(format!("/proc/{}/cmdline", self.pid)).unwrap_or_default();
        words.split(|byte| *byte == 0).any(|word| word == self.marker.as_bytes())
    }
}

/// State and start time of a process, from `/proc/<pid>/stat`.
pub(crate) fn stat(pid: u32) -> Option<(char, u64)> {
    parse_stat(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// The command's name, in parentheses, may hold anything: fields count from the last `)`.
fn parse_stat(text: &str) -> Option<(char, u64)> {
    let (_, fields) = text.rsplit_once(')')?;
    let mut fields = fields.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    // `state` is field 3 and `starttime` field 22.
    let start_time = fields.nth(18)?.parse().ok()?;
    Some((state, start_time))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_named_like_fields_does_not_move_them() {
        let rest = "1 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 4711 9 9";
        assert_eq!(parse_stat(&format!("12 (a) S 3) R {rest}")), Some(('R', 4711)));
        assert_eq!(parse_stat("12 (qemu) S 1 2"), None);
    }

    #[test]
    fn a_process_is_itself_only_with_its_start_time_and_marker() {
        let pid = std::process::id();
        let (_, start_time) = stat(pid).expect("we run");
        let marker = std::env::args().next().expect("a name");
        let me = HostProcess { pid, start_time, marker, groups: Vec::new() };
        assert!(me.is_alive());
        assert!(!HostProcess { start_time: start_time + 1, ..me.clone() }.is_alive());
        assert!(!HostProcess { marker: "another".into(), ..me.clone() }.is_alive());
        assert!(!HostProcess { pid: u32::MAX, ..me }.is_alive());
    }
}
