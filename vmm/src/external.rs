//! A machine that somebody else runs: we own the tap and the fence, they get hooks.
//!
//! Hooks come from the operator's configuration only, never from a request. No shell: a hook is a
//! program and its arguments, run with a small environment and a bound on its time.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::pin::pin;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use policy::net::{AGENT_PORT, GATEWAY_IP, GUEST_IP, GUEST_MAC, GUEST_PREFIX};
use tokio::io::AsyncReadExt;
use tokio::process::{Child, Command};
use tokio::time::timeout;

use crate::error::{Error, said};
use crate::hypervisor::{DriverName, Hypervisor, Machine, Process, Saved};

/// How long the error output of a hook that has ended is read on.
const LAST_WORDS: Duration = Duration::from_millis(100);

/// What the operator wants run, program and arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hooks {
    /// Run when the tap is ready and may be opened; empty for none.
    pub on_create: Vec<String>,
    /// Run when the machine must let go of the tap; empty for none.
    pub on_remove: Vec<String>,
    /// Run when the guest must stop and let go of the tap, to be resumed later; empty: it cannot sleep.
    pub on_standby: Vec<String>,
    /// Run when the tap may be opened again and the guest is to go on; empty: it cannot sleep.
    pub on_resume: Vec<String>,
    /// How long a hook may take.
    pub limit: Duration,
}

impl Default for Hooks {
    /// None, and 10 seconds for one that is added.
    fn default() -> Self {
        Self {
            on_create: Vec::new(),
            on_remove: Vec::new(),
            on_standby: Vec::new(),
            on_resume: Vec::new(),
            limit: Duration::from_secs(10),
        }
    }
}

/// The driver for other hypervisors and orchestrators.
#[derive(Clone, Debug)]
pub struct External {
    /// The network namespace the taps are in.
    pub netns: String,
    /// The operator's hooks.
    pub hooks: Hooks,
}

impl Hypervisor for External {
    /// Closes `tap`, so that the other hypervisor can open it, and runs `on_create`.
    async fn start(&self, machine: &Machine, tap: OwnedFd) -> Result<Process, Error> {
        drop(tap);
        let process = Process::new(DriverName::External, machine, None);
        self.run(&self.hooks.on_create, &process).await?;
        Ok(process)
    }

    async fn adopt(&self, process: &Process) -> bool {
        self.is_running(process)
    }

    /// Always: only its owner knows better.
    fn is_running(&self, process: &Process) -> bool {
        process.driver == DriverName::External
    }

    async fn stop(&self, process: &Process) -> Result<(), Error> {
        self.run(&self.hooks.on_remove, process).await
    }

    fn can_sleep(&self) -> bool {
        !self.hooks.on_standby.is_empty() && !self.hooks.on_resume.is_empty()
    }

    /// Runs `on_standby`, which stops the guest and keeps it in one: nobody may see it run after this.
    async fn pause(&self, process: &Process) -> Result<(), Error> {
        if !self.can_sleep() {
            return Err(Error::Sleepless(
                "no `external.on_standby` and `on_resume` are configured",
            ));
        }
        self.run(&self.hooks.on_standby, process).await
    }

    /// Runs `on_resume`.
    async fn unpause(&self, process: &Process, _machine: &Machine) -> Result<(), Error> {
        self.run(&self.hooks.on_resume, process).await
    }

    /// Nothing is left to do: its owner has it since the pause.
    async fn save(&self, process: &Process, _machine: &Machine) -> Result<Saved, Error> {
        let driver = process.driver;
        Ok(Saved { driver, state: None, state_bytes: 0, digest: String::new() })
    }

    /// Closes `tap`, so that the other hypervisor can open it when the guest is to go on.
    async fn prepare(
        &self,
        machine: &Machine,
        tap: OwnedFd,
        _saved: &Saved,
    ) -> Result<Process, Error> {
        drop(tap);
        Ok(Process::new(DriverName::External, machine, None))
    }
}

impl External {
    /// What a start may have left of which nothing was written down: its hook failed, or the daemon died
    /// before it ended.
    #[must_use]
    pub fn find(&self, machine: &Machine) -> Process {
        Process::new(DriverName::External, machine, None)
    }

    async fn run(&self, hook: &[String], process: &Process) -> Result<(), Error> {
        let Some((program, arguments)) = hook.split_first() else { return Ok(()) };
        let [a, b, c, d, e, f] = GUEST_MAC;
        let mut child = Command::new(program)
            .args(arguments)
            .env_clear()
            .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
            .env("POSTERN_SANDBOX", process.name.as_str())
            .env("POSTERN_TENANT", process.tenant.as_str())
            .env("POSTERN_TAP", process.slot.tap())
            .env("POSTERN_NETNS", &self.netns)
            .env("POSTERN_RUN_DIR", &process.run_dir)
            .env("POSTERN_GUEST_IP", GUEST_IP.to_string())
            .env("POSTERN_GUEST_PREFIX", GUEST_PREFIX.to_string())
            .env("POSTERN_GUEST_MAC", format!("{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}"))
            .env("POSTERN_GATEWAY_IP", GATEWAY_IP.to_string())
            .env("POSTERN_AGENT_PORT", AGENT_PORT.to_string())
            .current_dir(Path::new("/"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(|source| Error::Program { program: program.clone(), source })?;
        let mut words = Vec::new();
        let status = timeout(self.hooks.limit, ended(&mut child, &mut words))
            .await
            .map_err(|_elapsed| Error::Slow { program: program.clone(), limit: self.hooks.limit })?
            .map_err(|source| Error::Program { program: program.clone(), source })?;
        if status.success() {
            return Ok(());
        }
        Err(Error::Failed { program: program.clone(), said: said(Some(status), &words) })
    }
}

/// Waits for the program's own end and collects its error output. What it started in the background,
/// a hypervisor perhaps, may keep that output open for ever.
async fn ended(child: &mut Child, words: &mut Vec<u8>) -> io::Result<ExitStatus> {
    let Some(mut stderr) = child.stderr.take() else { return child.wait().await };
    let mut listen = pin!(stderr.read_to_end(words));
    tokio::select! {
        _closed = &mut listen => child.wait().await,
        status = child.wait() => {
            // What it said last is in the pipe already.
            let _ = timeout(LAST_WORDS, listen).await;
            status
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::time::Instant;

    use policy::Slot;

    use super::*;

    fn machine(run_dir: &Path) -> Machine {
        let none = Path::new("/nonexistent");
        Machine {
            name: "demo".parse().expect("a name"),
            tenant: "acme".parse().expect("a name"),
            slot: Slot::new(3).expect("in range"),
            memory_mib: 256,
            vcpus: 1,
            image: none.into(),
            copies: none.into(),
            kernel: none.into(),
            initrd: none.into(),
            cmdline: String::new(),
            base: none.into(),
            disk: none.into(),
            memory: none.into(),
            state: none.into(),
            run_dir: run_dir.into(),
            uid: 64_003,
        }
    }

    fn external(on_create: &[&str], limit: Duration) -> External {
        let on_create = on_create.iter().map(|&word| word.to_owned()).collect();
        let hooks = Hooks { on_create, limit, ..Hooks::default() };
        External { netns: "postern".to_owned(), hooks }
    }

    fn tap() -> OwnedFd {
        File::open("/dev/null").expect("there").into()
    }

    #[tokio::test]
    async fn a_hook_learns_whose_tap_it_is_and_nothing_of_our_environment() {
        let dir = tempfile::tempdir().expect("a directory");
        let out = dir.path().join("env");
        let script = format!("env | sort >{}", out.display());
        let driver = external(&["sh", "-c", &script], Duration::from_secs(10));
        let process = driver.start(&machine(dir.path()), tap()).await.expect("the hook ran");
        assert!(process.host.is_none() && driver.is_running(&process));
        let text = fs::read_to_string(out).expect("written");
        for line in [
            "POSTERN_SANDBOX=demo",
            "POSTERN_TENANT=acme",
            "POSTERN_TAP=pt3",
            "POSTERN_NETNS=postern",
            "POSTERN_GUEST_IP=169.254.100.2",
            "POSTERN_GUEST_MAC=02:00:00:00:00:02",
        ] {
            assert!(text.lines().any(|it| it == line), "{line} in {text}");
        }
        let ours = |line: &str| line.starts_with("POSTERN_") || line.starts_with("PATH=");
        // The shell adds these two itself.
        let shell = |line: &str| line.starts_with("PWD=") || line.starts_with("_=");
        assert!(text.lines().all(|line| ours(line) || shell(line)), "{text}");
        driver.stop(&process).await.expect("no hook is no failure");
    }

    #[tokio::test]
    async fn a_machine_of_somebody_else_sleeps_if_both_hooks_are_there() {
        let dir = tempfile::tempdir().expect("a directory");
        let (machine, said) = (machine(dir.path()), dir.path().join("said"));
        let driver = external(&[], Duration::from_secs(10));
        let process = driver.start(&machine, tap()).await.expect("no hook is no failure");
        assert!(!driver.can_sleep());
        let error = driver.pause(&process).await.expect_err("nobody would stop it");
        assert!(error.to_string().contains("external.on_standby"), "{error}");
        let hook = |word: &str| {
            let script = format!("echo {word} $POSTERN_SANDBOX >>{}", said.display());
            ["sh", "-c", &script].map(str::to_owned).to_vec()
        };
        let half = Hooks { on_standby: hook("standby"), ..Hooks::default() };
        let half = External { hooks: half, ..driver.clone() };
        assert!(!half.can_sleep(), "nobody would wake it");
        let hooks = Hooks { on_resume: hook("resume"), ..half.hooks };
        let driver = External { hooks, ..driver };
        driver.pause(&process).await.expect("its hook ran");
        let saved = driver.save(&process, &machine).await.expect("with it");
        assert_eq!(fs::read_to_string(&said).expect("written"), "standby demo\n");
        let process = driver.prepare(&machine, tap(), &saved).await.expect("nothing to do");
        assert_eq!(fs::read_to_string(&said).expect("written"), "standby demo\n", "not yet");
        driver.unpause(&process, &machine).await.expect("its hook ran");
        assert_eq!(fs::read_to_string(&said).expect("written"), "standby demo\nresume demo\n");
    }

    #[tokio::test]
    async fn a_hook_that_fails_tells_its_last_words() {
        let dir = tempfile::tempdir().expect("a directory");
        let driver = external(&["sh", "-c", "echo no room >&2; exit 4"], Duration::from_secs(10));
        let error = driver.start(&machine(dir.path()), tap()).await.expect_err("it failed");
        assert!(error.to_string().contains("no room"), "{error}");
        let driver = external(&["/no/such/hook"], Duration::from_secs(10));
        let error = driver.start(&machine(dir.path()), tap()).await.expect_err("it is not there");
        assert!(matches!(error, Error::Program { .. }));
    }

    #[tokio::test]
    async fn a_hook_may_leave_a_program_running() {
        let dir = tempfile::tempdir().expect("a directory");
        let limit = Duration::from_secs(5);
        let driver = external(&["sh", "-c", "sleep 6 & exit 0"], limit);
        driver.start(&machine(dir.path()), tap()).await.expect("the hook itself has ended");
        let driver = external(&["sh", "-c", "sleep 6 & printf 'a\\nb\\033' >&2; exit 4"], limit);
        let error = driver.start(&machine(dir.path()), tap()).await.expect_err("it failed");
        assert!(error.to_string().contains("a\\nb\\u{1b}"), "{error}");
    }

    #[tokio::test]
    async fn a_hook_that_hangs_is_killed() {
        let dir = tempfile::tempdir().expect("a directory");
        let driver = external(&["sleep", "1000"], Duration::from_millis(100));
        let start = Instant::now();
        let error = driver.start(&machine(dir.path()), tap()).await.expect_err("it hangs");
        assert!(matches!(error, Error::Slow { .. }));
        assert!(start.elapsed() < Duration::from_secs(100));
    }
}
