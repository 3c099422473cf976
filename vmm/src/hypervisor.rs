//! The seam between the life of a sandbox and whatever runs its machine.
//!
//! A driver starts, recognises and stops, and turns a machine into files and back; it keeps nothing in
//! memory that it could not find again from a [`Process`] or a [`Saved`].

use std::fs;
use std::future::Future;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use policy::{SandboxName, Slot, TenantName};
use serde::{Deserialize, Serialize};

use crate::error::Error;

/// Runs machines.
pub trait Hypervisor: Send + Sync {
    /// Starts the machine on its tap and returns when its process runs; the guest is still booting.
    /// What was made before a failure is unmade. Await it to its end: dropped half way it may leave a
    /// process that nobody was told of.
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

    /// Whether its machines can be paused, saved and resumed at all.
    fn can_sleep(&self) -> bool;

    /// Stops the guest between two instructions; its process and its devices stay. Pausing twice is no
    /// error.
    fn pause(&self, process: &Process) -> impl Future<Output = Result<(), Error>> + Send;

    /// Lets the guest go on where it stopped: after a pause, a save that failed, or [`Self::prepare`].
    /// What was saved of it is consumed first, since its memory stops matching that with the next
    /// instruction. Good for one that runs.
    fn unpause(
        &self,
        process: &Process,
        machine: &Machine,
    ) -> impl Future<Output = Result<(), Error>> + Send;

    /// Turns a paused machine into files and ends its process, as [`Self::stop`] does. After an error
    /// there is no [`Saved`], and the process, if it is still alive, can be unpaused or stopped. Await
    /// it to its end.
    fn save(
        &self,
        process: &Process,
        machine: &Machine,
    ) -> impl Future<Output = Result<Saved, Error>> + Send;

    /// The process of a machine that was saved, on its tap, paused before its next instruction;
    /// [`Self::unpause`] is what begins it. What was made before a failure is unmade, and the files stay
    /// as they were. Await it to its end.
    fn prepare(
        &self,
        machine: &Machine,
        tap: OwnedFd,
        saved: &Saved,
    ) -> impl Future<Output = Result<Process, Error>> + Send;
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
    /// The folder of the image that it is made from: `kernel`, `initrd` and `base` by their names, where
    /// they are not there yet. It may hold another image later.
    pub image: PathBuf,
    /// Where images are copied to that cannot be linked; shared by all machines.
    pub copies: PathBuf,
    /// The kernel, a bzImage; like the next two its own link to the image's, which a later image leaves as
    /// it is.
    pub kernel: PathBuf,
    /// The initial ram disk with the guest's process 1.
    pub initrd: PathBuf,
    /// Words added to the kernel's command line.
    pub cmdline: String,
    /// The disk every guest of this image shares, raw, never written.
    pub base: PathBuf,
    /// The guest's own overlay over `base`; made when absent, kept at stop.
    pub disk: PathBuf,
    /// The guest's memory as a file of [`Machine::memory_bytes`]; made anew at start, kept when the
    /// machine is saved.
    pub memory: PathBuf,
    /// Where [`Hypervisor::save`] writes what is not memory nor disk.
    pub state: PathBuf,
    /// A directory of this machine alone, for sockets and the console's log; made when absent.
    pub run_dir: PathBuf,
    /// User and group id its process runs as; nobody else's.
    pub uid: u32,
}

impl Machine {
    /// Bytes of the guest's memory.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        u64::from(self.memory_mib) << 20
    }
}

/// A machine that was saved, as written to the journal: what [`Hypervisor::prepare`] takes, once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Saved {
    /// Who saved it.
    pub driver: DriverName,
    /// The file of its state; none when somebody else keeps it.
    pub state: Option<PathBuf>,
    /// Its length, in bytes.
    pub state_bytes: u64,
    /// SHA-256 of what the hypervisor wrote, in hexadecimal digits; empty when somebody else keeps it.
    pub digest: String,
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

    /// The log of the guest's console; the part before it is in `console.log.1`. Raw bytes of the
    /// guest: escape them before showing them on a terminal.
    #[must_use]
    pub fn console_log(&self) -> PathBuf {
        self.run_dir.join("console.log")
    }

    /// The log of what the hypervisor itself said; the part before it is in `qemu.log.1`.
    #[must_use]
    pub fn words_log(&self) -> PathBuf {
        self.run_dir.join("qemu.log")
    }

    /// The pipe in which it says it: a file would grow as much as a guest can have it complain.
    #[must_use]
    pub fn words_fifo(&self) -> PathBuf {
        self.run_dir.join("qemu.fifo")
    }

    /// The last lines on the guest's console, or those from a kernel's panic on: at most a few hundred
    /// characters, fit to be shown; empty when there are none.
    #[must_use]
    pub fn console_end(&self) -> String {
        const LINES: usize = 5;
        const CHARACTERS: usize = 120;
        let log = fs::read(self.console_log()).unwrap_or_default();
        let end = log.get(log.len().saturating_sub(4096)..).unwrap_or_default();
        let end = String::from_utf8_lossy(end);
        let plain = |line: &str| -> String {
            line.trim().chars().filter(|c| !c.is_control()).take(CHARACTERS).collect()
        };
        let lines: Vec<String> = end.lines().map(plain).filter(|line| !line.is_empty()).collect();
        let panic = lines.iter().rposition(|line| line.contains("Kernel panic"));
        let from = panic.unwrap_or(lines.len().saturating_sub(LINES));
        lines.iter().skip(from).take(LINES).map(String::as_str).collect::<Vec<_>>().join(" | ")
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

/// A process of this host that cannot be confused with another one. All of it is the kernel's word:
/// a process that a guest broke out into can rewrite its command line, and must not pass for dead.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostProcess {
    /// Its id.
    pub pid: u32,
    /// When it started, in clock ticks since the host's boot (proc(5), `stat` field 22).
    pub start_time: u64,
    /// Which boot of the host that was.
    pub boot_id: String,
    /// The control groups made for it.
    pub groups: Vec<PathBuf>,
}

impl HostProcess {
    /// The process with this id now.
    pub(crate) fn identify(pid: u32, groups: Vec<PathBuf>) -> Option<Self> {
        let Stat { start_time, .. } = stat(pid)?;
        Some(Self { pid, start_time, boot_id: boot_id()?, groups })
    }

    /// Whether it is alive: same id, same start, same boot, and not a zombie.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        let same = |seen: Stat| seen.start_time == self.start_time && !seen.has_ended();
        stat(self.pid).is_some_and(same) && boot_id().as_ref() == Some(&self.boot_id)
    }

    /// What it has had of processors so far, all its threads together, in hundredths of a second; none when
    /// it is gone.
    #[must_use]
    pub fn processor(&self) -> Option<Duration> {
        let seen = stat(self.pid).filter(|seen| seen.start_time == self.start_time)?;
        Some(Duration::from_millis(seen.ticks.saturating_mul(1000 / TICKS)))
    }

    /// Bytes of memory that it holds now, its guest's among them, whoever else holds them too; none when it
    /// is gone.
    #[must_use]
    pub fn resident(&self) -> Option<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid)).ok()?;
        // Asked afterwards: what was read is this one's then.
        stat(self.pid).filter(|seen| seen.start_time == self.start_time)?;
        let held = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
        let kib: u64 = held.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(kib.saturating_mul(1024))
    }
}

/// Which boot of the host this is; none where the kernel does not say.
#[must_use]
pub fn boot_id() -> Option<String> {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(text.trim().to_owned())
}

/// Whether a process runs as this user, by the kernel's word: the owner of its folder in `/proc` says
/// less, since a process can have it be root. Where nobody can tell, one does.
#[must_use]
pub fn has_processes(uid: u32) -> bool {
    let Ok(processes) = fs::read_dir("/proc") else { return true };
    let names = processes.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let pids = names.filter(|name| name.bytes().all(|byte| byte.is_ascii_digit()));
    // One that ends meanwhile has none.
    let said = pids.filter_map(|pid| fs::read_to_string(format!("/proc/{pid}/status")).ok());
    let mut alive = said.filter(|said| {
        let ended = |line: &str| line.starts_with("State:\tZ") || line.starts_with("State:\tX");
        !said.lines().any(ended) || said.lines().any(|line| is_more_than_one("Threads:", line))
    });
    alive.any(|said| {
        let users = said.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap_or_default();
        users.split_ascii_whitespace().any(|user| user.parse() == Ok(uid))
    })
}

fn is_more_than_one(field: &str, line: &str) -> bool {
    let count = line.strip_prefix(field).and_then(|count| count.trim().parse().ok());
    count.is_some_and(|count: u64| count > 1)
}

/// What `/proc/<pid>/stat` says of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stat {
    /// Of the thread that it began with.
    state: char,
    threads: u64,
    start_time: u64,
    /// Time in user and kernel mode.
    ticks: u64,
}

/// Ticks of a second in proc(5): USER_HZ, which is part of the kernel's interface.
const TICKS: u64 = 100;

impl Stat {
    /// That the first thread is a zombie says nothing while there are others.
    fn has_ended(self) -> bool {
        matches!(self.state, 'Z' | 'X') && self.threads <= 1
    }
}

fn stat(pid: u32) -> Option<Stat> {
    parse_stat(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// The command's name, in parentheses, may hold anything: fields count from the last `)`.
fn parse_stat(text: &str) -> Option<Stat> {
    let (_, fields) = text.rsplit_once(')')?;
    let mut fields = fields.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    // `state` is field 3, `utime` 14, `stime` 15, `num_threads` 20 and `starttime` 22.
    let user: u64 = fields.nth(10)?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    let threads = fields.nth(4)?.parse().ok()?;
    let start_time = fields.nth(1)?.parse().ok()?;
    Some(Stat { state, threads, start_time, ticks: user.saturating_add(system) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_named_like_fields_does_not_move_them() {
        let rest = "1 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 4711 9 9";
        let stat = Stat { state: 'R', threads: 1, start_time: 4711, ticks: 5 + 6 };
        assert_eq!(parse_stat(&format!("12 (a) S 3) R {rest}")), Some(stat));
        assert_eq!(parse_stat("12 (qemu) S 1 2"), None);
    }

    #[test]
    fn a_process_is_itself_only_with_its_start_time_and_boot() {
        let me = HostProcess::identify(std::process::id(), Vec::new()).expect("we run");
        assert!(me.is_alive());
        assert!(!HostProcess { start_time: me.start_time + 1, ..me.clone() }.is_alive());
        assert!(!HostProcess { boot_id: "another".into(), ..me.clone() }.is_alive());
        assert!(!HostProcess { pid: u32::MAX, ..me }.is_alive());
    }

    /// Promise 25. A guest that broke out of QEMU may end the thread that its process began with: what
    /// the kernel shows is a zombie then, and the others go on.
    #[test]
    fn a_process_whose_first_thread_has_ended_is_alive_until_its_last_one_has() {
        const LEADERLESS: &str = "
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
ctypes.CDLL(None).syscall(60, 0)  # exit(2): of this thread alone
";
        let mut child = std::process::Command::new("python3");
        let mut child = child.args(["-c", LEADERLESS]).spawn().expect("python3");
        let process = HostProcess::identify(child.id(), Vec::new()).expect("it runs");
        let seen = || {
            std::thread::sleep(Duration::from_millis(10));
            stat(process.pid).is_some_and(|seen| seen.state == 'Z')
        };
        assert!((0..1000).any(|_| seen()), "control: its first thread ends");
        let alive = process.is_alive();
        child.kill().expect("killed");
        assert!(alive, "a thread of it runs");
        assert!((0..1000).any(|_| seen() && !process.is_alive()), "and then none does");
        child.wait().expect("reaped");
        assert!(!process.is_alive());
    }

    #[test]
    fn a_user_has_processes_until_the_last_one_has_ended() {
        use std::os::unix::process::CommandExt;
        const USER: u32 = 2_000_977;
        assert!(!has_processes(USER), "control");
        let mut child = std::process::Command::new("sleep");
        let mut child = child.arg("60").uid(USER).spawn().expect("root, and sleep");
        let there = has_processes(USER);
        child.kill().expect("killed");
        assert!(there, "it runs");
        child.wait().expect("reaped");
        assert!(!has_processes(USER));
    }

    #[test]
    fn the_end_of_a_console_is_short_and_cannot_break_a_line() {
        let dir = tempfile::tempdir().expect("a directory");
        let process = Process {
            driver: DriverName::Qemu,
            name: "a".parse().expect("a name"),
            tenant: "b".parse().expect("a name"),
            slot: Slot::new(1).expect("a slot"),
            run_dir: dir.path().to_owned(),
            host: None,
        };
        assert_eq!(process.console_end(), "");
        let said = "early\r\n".repeat(2000) + &"x".repeat(500) + "\n\n\x1b[31mpanic\x07\r\nlast";
        fs::write(process.console_log(), [said.as_bytes(), b"\xff"].concat()).expect("written");
        let end = process.console_end();
        assert!(end.ends_with(" | [31mpanic | last\u{fffd}"), "{end}");
        assert!(end.starts_with("early | early | x") && end.len() < 200, "{end}");
        let trace = "Kernel panic - not syncing: why\n".to_owned() + &"trace\n".repeat(9);
        fs::write(process.console_log(), trace).expect("written");
        let end = process.console_end();
        assert!(end.starts_with("Kernel panic - not syncing: why | trace"), "{end}");
    }
}
