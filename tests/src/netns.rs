//! Named network namespaces that end with the test process, however it ends.
//!
//! A name carries the process id, `pw-<pid>-<n>-<role>`. Three things remove it: its `Drop`, a
//! janitor process that waits for the end of ours, and the next run, which reaps the dead.

use std::fs::File;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;

use nix::sched::{CloneFlags, setns};

/// Where files of a world lie: `<this>-<pid>-...`.
pub const DIRECTORY_PREFIX: &str = "/tmp/postern-world";

/// How the sandboxes of microVMs are called: `<this>-<pid>-...`. A microVM has no namespace of ours
/// and outlives its daemon, so it is found by its name.
pub const MACHINE_PREFIX: &str = "vm";

/// Removes all that belongs to the test process `$1`: processes in its namespaces and microVMs (by
/// id), the namespaces, control groups and files.
const REAP: &str = r#"
for ns in /run/netns/pw-"$1"-*; do
    [ -e "$ns" ] || continue
    name=${ns##*/}
    pids=$(ip netns pids "$name" 2>/dev/null)
    [ -z "$pids" ] || kill -9 $pids 2>/dev/null
    ip netns del "$name" 2>/dev/null || { umount "$ns"; rm -f "$ns"; } 2>/dev/null
done
pids=$(pgrep -f -- "-name postern-vm-$1-")
[ -z "$pids" ] || { kill -9 $pids; sleep 0.5; } 2>/dev/null
for full in /tmp/postern-world-"$1"-*/*; do
    ! mountpoint -q "$full" || umount -l "$full"
done 2>/dev/null
rmdir /sys/fs/cgroup/postern/vm-"$1"-* /sys/fs/cgroup/*/postern/vm-"$1"-* 2>/dev/null
rm -rf /etc/netns/pw-"$1"-* /tmp/postern-world-"$1"-*
"#;

static COUNT: AtomicUsize = AtomicUsize::new(0);

/// One network namespace, deleted with everything that runs in it on drop.
#[derive(Debug)]
pub struct Netns {
    name: String,
}

impl Netns {
    /// Makes one, with loopback up. `role` is part of its name.
    ///
    /// # Panics
    /// Without the right to make one.
    #[must_use]
    pub fn new(role: &str) -> Self {
        let namespace = Self::to_be(role);
        run(Command::new("ip").args(["netns", "add", &namespace.name]));
        namespace.ip("link set lo up");
        namespace
    }

    /// A name that someone else (the daemon) will make; removed with this value.
    #[must_use]
    pub fn to_be(role: &str) -> Self {
        janitor();
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        Self { name: format!("pw-{}-{n}-{role}", std::process::id()) }
    }

    /// Its name, as `ip netns` knows it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its name without the prefix: `<pid>-<n>-<role>`, unique on the machine.
    #[must_use]
    pub fn number(&self) -> &str {
        self.name.trim_start_matches("pw-")
    }

    fn path(&self) -> PathBuf {
        Path::new("/run/netns").join(&self.name)
    }

    /// Runs `ip -n <this> <words>`.
    ///
    /// # Panics
    /// When it fails.
    pub fn ip(&self, words: &str) {
        run(Command::new("ip").args(["-n", &self.name]).args(words.split_whitespace()));
    }

    /// A command that will run inside, with the files of `/etc/netns/<this>` in `/etc`.
    #[must_use]
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name, program]).stdin(Stdio::null());
        command
    }

    /// The same with the file system as it is outside: namespaces made there are seen here.
    #[must_use]
    pub fn bare_command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.path().display())).arg("--").arg(program);
        command.stdin(Stdio::null());
        command
    }

    /// Runs `act` on a thread inside and waits for it. Sockets made there stay there.
    ///
    /// # Panics
    /// As `act` does; and when the namespace cannot be entered.
    pub fn run<T: Send>(&self, act: impl FnOnce() -> T + Send) -> T {
        let done = std::thread::scope(|scope| {
            scope
                .spawn(|| {
                    enter(&self.path());
                    act()
                })
                .join()
        });
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// Runs `act` on a thread of its own inside.
    pub fn spawn<T: Send + 'static>(
        &self,
        act: impl FnOnce() -> T + Send + 'static,
    ) -> JoinHandle<T> {
        let path = self.path();
        std::thread::spawn(move || {
            enter(&path);
            act()
        })
    }

    /// Whether it exists.
    #[must_use]
    pub fn exists(&self) -> bool {
        self.path().exists()
    }

    /// The processes inside, by id.
    #[must_use]
    pub fn processes(&self) -> Vec<u32> {
        let out = Command::new("ip").args(["netns", "pids", &self.name]).output();
        let out = out.map(|out| String::from_utf8_lossy(&out.stdout).into_owned());
        out.unwrap_or_default().split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
    }
}

impl Drop for Netns {
    fn drop(&mut self) {
        for pid in self.processes() {
            // Ours alone: nobody else knows the name of this namespace.
            if let Ok(pid) = i32::try_from(pid) {
                let pid = nix::unistd::Pid::from_raw(pid);
                let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
            }
        }
        let _ =
            Command::new("ip").args(["netns", "del", &self.name]).stderr(Stdio::null()).status();
        let _ = std::fs::remove_dir_all(Path::new("/etc/netns").join(&self.name));
    }
}

fn enter(path: &Path) {
    let file = File::open(path).unwrap_or_else(|e| panic!("open {}: {e}", path.display()));
    setns(file, CloneFlags::CLONE_NEWNET).unwrap_or_else(|e| panic!("setns: {e}"));
}

/// Runs a set-up command to its end.
///
/// # Panics
/// With its words and what it said, when it fails.
pub fn run(command: &mut Command) {
    let out = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(out.status.success(), "{command:?}: {}", String::from_utf8_lossy(&out.stderr));
}

/// Reaps dead runs and starts the process that will reap this one, once.
fn janitor() {
    static JANITOR: OnceLock<Child> = OnceLock::new();
    JANITOR.get_or_init(|| {
        for pid in dead_runs().unwrap_or_default() {
            let _ = Command::new("sh").args(["-c", REAP, "reap", &pid.to_string()]).status();
        }
        // Its standard input ends when our process does, by whatever death.
        Command::new("sh")
            .args(["-c", &format!("cat >/dev/null\n{REAP}"), "janitor"])
            .arg(std::process::id().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .unwrap_or_else(|e| panic!("start the janitor: {e}"))
    });
}

fn dead_runs() -> io::Result<Vec<u32>> {
    let mut dead = Vec::new();
    for entry in std::fs::read_dir("/run/netns")? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let pid = name.strip_prefix("pw-").and_then(|rest| rest.split('-').next()?.parse().ok());
        let Some(pid) = pid else { continue };
        if !Path::new(&format!("/proc/{pid}")).exists() && !dead.contains(&pid) {
            dead.push(pid);
        }
    }
    Ok(dead)
}
