//! The program under test, seen from outside: its process, its command line, its HTTP API.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use fault::Point;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::netns::Netns;
use crate::poll::eventually;

/// How long the daemon may take to be ready or to end on a busy machine.
const START: Duration = Duration::from_secs(30);

/// Where the program is: `POSTERN_BIN`, or beside the folder of the test's own executable.
///
/// # Panics
/// When there is none: it must be built first.
#[must_use]
pub fn program() -> PathBuf {
    let path = std::env::var_os("POSTERN_BIN").map_or_else(
        || {
            let own = std::env::current_exe().expect("our own path");
            own.ancestors().nth(2).expect("a target folder").join("postern")
        },
        PathBuf::from,
    );
    assert!(path.exists(), "{} is missing: `cargo build` it, or set POSTERN_BIN", path.display());
    path
}

/// What a run of the command line left behind.
#[derive(Clone, Debug)]
pub struct Ran {
    /// The exit code; -1 after a signal.
    pub code: i32,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Ran {
    /// Of a finished process.
    #[must_use]
    pub fn of(output: &Output) -> Self {
        Self {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// This, if it succeeded.
    ///
    /// # Panics
    /// With both outputs, if it did not.
    pub fn ok(self) -> Self {
        assert_eq!(self.code, 0, "{}\n{}", self.stdout, self.stderr);
        self
    }

    /// Its output as JSON.
    ///
    /// # Panics
    /// If it is not.
    #[must_use]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout)
            .unwrap_or_else(|e| panic!("{e}: {}\n{}", self.stdout, self.stderr))
    }

    /// Its output as one JSON value a line.
    ///
    /// # Panics
    /// If it is not.
    #[must_use]
    pub fn json_lines(&self) -> Vec<Value> {
        let lines = self.stdout.lines().filter(|line| !line.trim().is_empty());
        lines
            .map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}")))
            .collect()
    }
}

/// An answer of the API.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The HTTP status.
    pub status: u16,
    /// The body; null when it is not JSON.
    pub json: Value,
    /// The body as text.
    pub text: String,
}

/// One daemon: its folder, its configuration and, while it runs, its process.
#[derive(Debug)]
pub struct Daemon {
    dir: PathBuf,
    child: Option<Child>,
}

impl Daemon {
    /// A daemon that keeps everything below `dir`, with this configuration. Not started.
    ///
    /// # Panics
    /// When the configuration cannot be written.
    #[must_use]
    pub fn new(dir: &Path, config: &str) -> Self {
        std::fs::write(dir.join("postern.toml"), config).expect("write the configuration");
        Self { dir: dir.to_owned(), child: None }
    }

    /// Its control socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.dir.join("postern.sock")
    }

    /// What it logged so far.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.join("daemon.log")).unwrap_or_default()
    }

    /// The last of what it logged, for a person to read.
    #[must_use]
    pub fn log_end(&self) -> String {
        let log = self.log();
        log.get(log.len().saturating_sub(8000)..).unwrap_or(&log).to_owned()
    }

    /// Its process id, while it runs.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// Starts it inside `host` and waits until it answers.
    ///
    /// # Panics
    /// With its log, when it ends or does not answer in time.
    pub fn start(&mut self, host: &Netns) {
        self.spawn(host);
        eventually("the daemon answers", START, || {
            let child = self.child.as_mut().expect("just spawned");
            let ended = child.try_wait().expect("wait");
            assert!(ended.is_none(), "the daemon ended: {ended:?}\n{}", self.log());
            self.is_healthy().then_some(())
        });
    }

    fn is_healthy(&self) -> bool {
        let mut curl = Command::new("curl");
        curl.args(["-sf", "-m", "5", "-o", "/dev/null", "http://localhost/v1/health"]);
        curl.arg("--unix-socket").arg(self.socket()).stderr(Stdio::null());
        curl.status().is_ok_and(|status| status.success())
    }

    /// Stops all of it, as SIGSTOP does, and waits until none of its threads runs any more: each stops at its
    /// own next turn, and on a busy machine some work on until then. It goes on at [`Daemon::go_on`].
    ///
    /// # Panics
    /// When it does not run.
    pub fn stop(&self) {
        let pid = Pid::from_raw(i32::try_from(self.pid().expect("it runs")).expect("an id"));
        kill(pid, Signal::SIGSTOP).expect("SIGSTOP");
        let tasks = format!("/proc/{pid}/task");
        eventually("all its threads have stopped", START, || {
            let states = std::fs::read_dir(&tasks).expect("its threads").flatten().map(|task| {
                let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
                // Behind its name, which may have anything in it (proc(5)).
                stat.rsplit(')').next().unwrap_or_default().trim_start().chars().next()
            });
            states.into_iter().all(|state| state == Some('T')).then_some(())
        });
    }

    /// Ends what [`Daemon::stop`] began.
    ///
    /// # Panics
    /// When it does not run.
    pub fn go_on(&self) {
        let pid = Pid::from_raw(i32::try_from(self.pid().expect("it runs")).expect("an id"));
        kill(pid, Signal::SIGCONT).expect("SIGCONT");
    }

    /// Starts it inside `host` and waits for nothing.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn spawn(&mut self, host: &Netns) {
        let log = File::options().create(true).append(true).open(self.dir.join("daemon.log"));
        let log = log.expect("open the daemon's log");
        let mut command = host.bare_command(&program().to_string_lossy());
        command.arg("serve").arg("--config").arg(self.dir.join("postern.toml"));
        command.env("POSTERN_FAULT", self.fault());
        command.stdout(log.try_clone().expect("a second descriptor")).stderr(log);
        self.child = Some(command.spawn().expect("start the daemon"));
    }

    fn fault(&self) -> PathBuf {
        self.dir.join("fault")
    }

    /// From now on it will `die`, `panic` or `stall` when it comes to this point, once.
    ///
    /// # Panics
    /// When that cannot be written.
    pub fn arm(&self, point: Point, act: &str) {
        let _ = std::fs::remove_file(self.fault().with_extension("struck"));
        let armed = self.fault().with_extension("new");
        std::fs::write(&armed, format!("{} {act}", point.name())).expect("arm");
        std::fs::rename(armed, self.fault()).expect("arm");
    }

    /// From now on its clock on the wall is this many seconds ahead of the system's.
    ///
    /// # Panics
    /// When that cannot be written.
    pub fn set_clock(&self, ahead: i64) {
        std::fs::write(self.fault().with_extension("clock"), ahead.to_string()).expect("set");
    }

    /// Whether it came to the point that was armed last.
    #[must_use]
    pub fn was_struck(&self) -> bool {
        self.fault().with_extension("struck").exists()
    }

    /// Waits until it stalls at the point that was armed last. It goes on at [`Daemon::release`].
    ///
    /// # Panics
    /// When it does not come there in time.
    pub fn stalls(&self, point: Point) {
        eventually(&format!("it comes to {}", point.name()), START, || {
            self.was_struck().then_some(())
        });
    }

    /// Ends a stall.
    ///
    /// # Panics
    /// When there is none.
    pub fn release(&self) {
        std::fs::remove_file(self.fault().with_extension("struck")).expect("it stalls");
    }

    /// Waits until it has died at the point that was armed last.
    ///
    /// # Panics
    /// When it lives on, or ended in another way.
    pub fn dies(&mut self, point: Point) {
        let mut child = self.child.take().expect("it runs");
        let ended = eventually(&format!("it comes to {}", point.name()), START, || {
            child.try_wait().expect("wait")
        });
        let log = self.log_end();
        assert!(self.was_struck(), "{} was not come to: {ended}\n{log}", point.name());
        assert_eq!(ended.code(), None, "{}: it ended by a signal\n{log}", point.name());
    }

    /// Ends it as the out-of-memory killer would.
    ///
    /// # Panics
    /// When it does not run.
    pub fn kill(&mut self) {
        let mut child = self.child.take().expect("it runs");
        child.kill().expect("kill -9");
        child.wait().expect("wait");
    }

    /// Ends it as the service manager would; its exit code.
    ///
    /// # Panics
    /// When it does not run, or does not end in time.
    pub fn terminate(&mut self) -> Option<i32> {
        let mut child = self.child.take().expect("it runs");
        let pid = Pid::from_raw(i32::try_from(child.id()).expect("a process id"));
        kill(pid, Signal::SIGTERM).expect("SIGTERM");
        eventually("the daemon ends on SIGTERM", START, || child.try_wait().expect("wait")).code()
    }

    /// Runs `postern <words>` against it.
    ///
    /// # Panics
    /// When the program cannot be run.
    pub fn cli(&self, words: &[&str]) -> Ran {
        Ran::of(&self.command(words).stdin(Stdio::null()).output().expect("run postern"))
    }

    /// The same with something on standard input.
    ///
    /// # Panics
    /// When the program cannot be run.
    #[must_use]
    pub fn cli_with_input(&self, words: &[&str], input: &[u8]) -> Ran {
        let mut command = self.command(words);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("run postern");
        let mut stdin = child.stdin.take().expect("a pipe");
        std::thread::scope(|scope| {
            // A program that does not read its input to the end is no failure of ours.
            scope.spawn(move || stdin.write_all(input));
            Ran::of(&child.wait_with_output().expect("postern ends"))
        })
    }

    /// `postern <words>`, not yet started.
    #[must_use]
    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(program());
        command.args(words).env("POSTERN_SOCKET", self.socket());
        command
    }

    /// One request to the API by `curl`, e.g. `("POST", "/v1/sandboxes", &["--json", "{}"])`.
    #[must_use]
    pub fn request(&self, method: &str, path: &str, more: &[&str]) -> Request {
        let mut curl = Command::new("curl");
        curl.arg("--unix-socket").arg(self.socket()).args(more);
        Request::by(curl, method, &format!("http://localhost{path}"))
    }
}

/// A request that has not been made yet.
#[derive(Debug)]
pub struct Request(Command);

impl Request {
    /// By this `curl`, which may have options of its own.
    #[must_use]
    pub fn by(mut curl: Command, method: &str, url: &str) -> Self {
        curl.args(["-sS", "-m", "30", "-w", "\n%{http_code}", "-X", method, url]);
        Self(curl)
    }

    /// Makes it, whatever comes of it; gives what came, for a person to read.
    pub fn attempt(mut self) -> String {
        self.0.output().map_or_else(|e| e.to_string(), |output| Ran::of(&output).stdout)
    }

    /// Makes it and waits for the answer.
    ///
    /// # Panics
    /// When no HTTP answer comes back.
    #[must_use]
    pub fn answer(mut self) -> Answer {
        let ran = Ran::of(&self.0.output().expect("run curl"));
        let (text, status) = ran.stdout.rsplit_once('\n').unwrap_or(("", &ran.stdout));
        let status = status.parse().unwrap_or(0);
        assert_ne!(status, 0, "no answer to {:?}: {}", self.0, ran.stderr);
        let json = serde_json::from_str(text).unwrap_or_default();
        Answer { status, json, text: text.to_owned() }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
