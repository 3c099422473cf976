//! A real guest sleeps and wakes: its process is gone and comes back, its memory goes on, and whenever the
//! daemon dies in between, nothing is lost and nothing runs twice.

use std::io::{Read, Write};
use std::ops::Deref;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use fault::{On, Point};
use serde_json::Value;
use world::World;
use world::daemon::Request;
use world::poll::eventually;

use crate::machine::Machine;

/// How long a guest may take to fall asleep or wake on a busy machine without KVM.
pub(crate) const PATIENCE: Duration = Duration::from_secs(90);

/// Counts in the memory of one process, half a second a step, and tells it when its file is read.
const COUNTER: &str = "cat >/root/count.py <<'E'\n\
    import os, time\n\
    n = 0\n\
    while True:\n\
    \x20   n += 1\n\
    \x20   with open('/run/count.new', 'w') as f: f.write(f'{os.getpid()} {n}')\n\
    \x20   os.rename('/run/count.new', '/run/count')\n\
    \x20   time.sleep(0.5)\n\
    E\n\
    setsid python3 /root/count.py >/dev/null 2>&1 </dev/null &\n\
    until test -s /run/count; do sleep 0.2; done";

/// A guest that is told by what it counts from another one.
pub(crate) struct Sleeper {
    pub(crate) world: World,
    pub(crate) name: String,
}

/// Guests that nobody has at the moment: they run and count.
static FREE: Mutex<Vec<Sleeper>> = Mutex::new(Vec::new());

/// The guest of one test, which leaves it for the next as it was; who fails, or ends it, does not.
pub(crate) struct Turn(Option<Sleeper>);

impl Deref for Turn {
    type Target = Sleeper;

    fn deref(&self) -> &Sleeper {
        self.0.as_ref().expect("it is not taken")
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            FREE.lock().expect("no panic under it").extend(self.0.take());
        }
    }
}

impl Turn {
    /// For who ends it.
    pub(crate) fn taken(mut self) -> Sleeper {
        self.0.take().expect("it is not taken")
    }
}

impl Sleeper {
    /// One that an earlier test has left, or another one.
    pub(crate) fn turn() -> Turn {
        let free = FREE.lock().expect("no panic under it").pop();
        Turn(Some(free.unwrap_or_else(|| Self::boot(&[]))))
    }

    /// A guest that counts in its memory.
    pub(crate) fn boot(words: &[&str]) -> Self {
        Self::boot_in(Machine::world(), words)
    }

    /// The same in this world.
    pub(crate) fn boot_in(world: World, words: &[&str]) -> Self {
        let name = world.machine_name();
        world.cli(&[&["create", &name], words].concat()).ok();
        let sleeper = Self { world, name };
        sleeper.counts();
        sleeper
    }

    /// It begins to count.
    pub(crate) fn counts(&self) {
        self.sh(COUNTER);
    }

    pub(crate) fn sh(&self, line: &str) -> String {
        let ran = self.world.cli(&["exec", &self.name, "--", "sh", "-c", line]);
        assert_eq!(ran.code, 0, "{ran:?}\n{}", self.world.daemon().log_end());
        ran.stdout.trim().to_owned()
    }

    pub(crate) fn shown(&self) -> Value {
        self.world.api("GET", &format!("/v1/sandboxes/{}", self.name), &[]).json
    }

    pub(crate) fn state(&self) -> String {
        let shown = self.shown();
        shown.get("state").and_then(Value::as_str).unwrap_or_default().to_owned()
    }

    pub(crate) fn until(&self, states: &[&str], what: &str) -> String {
        eventually(&format!("{what}: {states:?}"), PATIENCE, || {
            Some(self.state()).filter(|state| states.contains(&&**state))
        })
    }

    /// A verb of the API, not asked yet.
    pub(crate) fn asking(&self, verb: &str) -> Request {
        let path = format!("/v1/sandboxes/{}/{verb}", self.name);
        self.world.daemon().request("POST", &path, &[])
    }

    pub(crate) fn ask(&self, verb: &str) -> String {
        self.asking(verb).attempt()
    }

    /// Which process counts, and how far it is.
    pub(crate) fn count(&self) -> (u64, u64) {
        let told = self.sh("cat /run/count");
        let mut numbers = told.split(' ').map(|word| word.parse().expect("a number"));
        (numbers.next().expect("a process"), numbers.next().expect("a count"))
    }

    /// Promise 67: what it is charged for, of one that sleeps and has run.
    fn costs_less_asleep(&self) {
        let used = || {
            let told = self.world.api("GET", &format!("/v1/usage?sandbox={}", self.name), &[]);
            let row = told.json.pointer("/rows/0").cloned().unwrap_or_default();
            let number = |field: &str| row.get(field).and_then(Value::as_f64).expect("a number");
            [
                "running_seconds",
                "cpu_seconds",
                "resident_mib_seconds",
                "standby_seconds",
                "saved_mib_seconds",
            ]
            .map(number)
        };
        let [running, cpu, resident, standby, saved] = used();
        assert!(running > 0.0 && cpu > 0.0 && resident > 0.0 && standby > 0.0);
        std::thread::sleep(Duration::from_secs(3));
        let later = used();
        assert_eq!(later[..3], [running, cpu, resident], "of its process there is nothing to pay");
        assert!(later[3] >= standby + 3.0 && later[4] > saved, "its files are: {later:?}");
    }

    /// Processes that bear its name.
    pub(crate) fn processes(&self) -> usize {
        let found = Command::new("pgrep").args(["-f", "--", &self.pattern()]).output();
        String::from_utf8_lossy(&found.expect("pgrep").stdout).lines().count()
    }

    /// What `pgrep -f` finds them by.
    pub(crate) fn pattern(&self) -> String {
        format!("-name postern-{}( |$)", self.name)
    }
}

/// Promises 62, 67.
#[test]
fn an_idle_guest_sleeps_and_a_command_wakes_it_with_its_memory_as_it_was() {
    let sleeper = Sleeper::boot(&["--on-idle", "standby", "--idle-after", "4s"]);
    let boot = sleeper.sh("cat /proc/sys/kernel/random/boot_id");
    let pid = sleeper.shown()["pid"].as_i64().expect("a process");
    assert!(Path::new(&format!("/proc/{pid}")).exists(), "control");
    let before = sleeper.count();
    sleeper.until(&["standby"], "it is idle");
    assert!(!Path::new(&format!("/proc/{pid}")).exists());
    assert_eq!((sleeper.processes(), &sleeper.shown()["pid"]), (0, &Value::Null));
    // Asleep for longer than it counted: it must not notice but by its clock.
    std::thread::sleep(Duration::from_secs(6));
    let began = Instant::now();
    let (counter, at) = sleeper.count();
    assert!(began.elapsed() < PATIENCE);
    assert_eq!(counter, before.0, "the same process");
    assert!(at >= before.1, "{at} after {before:?}");
    assert_eq!(sleeper.sh("cat /proc/sys/kernel/random/boot_id"), boot);
    let host = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
    let guest: u64 = sleeper.sh("date +%s").parse().expect("seconds");
    assert!(guest.abs_diff(host) <= 2, "its clock is set: {guest}, {host}");
    assert_eq!(sleeper.shown()["wakes"], 1);
    for round in 2..4 {
        sleeper.world.cli(&["standby", &sleeper.name]).ok();
        assert_eq!((sleeper.processes(), &*sleeper.state()), (0, "standby"), "round {round}");
        let (same, now) = sleeper.count();
        assert!(same == counter && now >= at, "round {round}");
        assert_eq!(sleeper.processes(), 1);
    }
    sleeper.world.cli(&["standby", &sleeper.name]).ok();
    sleeper.costs_less_asleep();
    sleeper.world.cli(&["rm", &sleeper.name]).ok();
    let left = sleeper.world.dir().join("state/sandboxes").join(&sleeper.name);
    assert!(!left.exists(), "what it was is gone");
}

/// Promise 60. What a sandbox that has failed does not count for is not there.
#[test]
fn a_guest_that_ended_by_itself_leaves_no_memory_behind() {
    let sleeper = Sleeper::turn().taken();
    let memory = sleeper.world.dir().join("state/sandboxes").join(&sleeper.name).join("memory");
    assert!(memory.exists(), "control");
    let pid = sleeper.shown()["pid"].to_string();
    assert!(Command::new("kill").args(["-9", &pid]).status().expect("kill").success());
    sleeper.until(&["failed"], "its process was killed");
    eventually("its memory is gone", PATIENCE, || (!memory.exists()).then_some(()));
}

/// Answers in capitals at port 7000, one caller after the other.
const ECHO: &str = "cat >/root/echo.py <<'E'\n\
    import socket\n\
    server = socket.create_server(('0.0.0.0', 7000))\n\
    while True:\n\
    \x20   peer, _ = server.accept()\n\
    \x20   while said := peer.recv(100): peer.sendall(said.upper())\n\
    \x20   peer.close()\n\
    E\n\
    setsid python3 /root/echo.py >/dev/null 2>&1 </dev/null &\n\
    until grep -q :1B58 /proc/net/tcp; do sleep 0.2; done";

/// Somebody outside who is connected to that port.
pub(crate) struct Caller {
    pub(crate) program: Child,
    to: ChildStdin,
    from: ChildStdout,
}

impl Caller {
    pub(crate) fn of(sleeper: &Sleeper) -> Self {
        sleeper.sh(ECHO);
        let mut connect = sleeper.world.daemon().command(&["connect", &sleeper.name, "7000"]);
        let piped = connect.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut program = piped.spawn().expect("run postern");
        let (to, from) = (program.stdin.take(), program.stdout.take());
        Self { program, to: to.expect("a pipe"), from: from.expect("a pipe") }
    }

    /// Says this; what it is answered.
    pub(crate) fn say(&mut self, what: &[u8]) -> String {
        self.to.write_all(what).expect("written");
        let mut answer = vec![0; what.len()];
        self.from.read_exact(&mut answer).expect("answered");
        String::from_utf8(answer).expect("text")
    }

    /// All that still comes, until the connection has ended.
    pub(crate) fn rest(mut self) -> Vec<u8> {
        eventually("the connection has ended", PATIENCE, || {
            self.program.try_wait().expect("its state")
        });
        let mut rest = Vec::new();
        self.from.read_to_end(&mut rest).expect("what it had said");
        rest
    }
}

/// Promises 62, 75. The caller's bytes wake the guest, and arrive, at the thirteenth time as at the first: far sides
/// would wait for the budget's next minute then.
#[test]
fn a_connection_to_a_guests_port_outlives_its_sleep_and_its_bytes_wake_it() {
    let sleeper = Sleeper::turn();
    let before = sleeper.shown()["wakes"].as_u64().expect("a number");
    let mut caller = Caller::of(&sleeper);
    assert_eq!(caller.say(b"before\n"), "BEFORE\n");
    for round in 1..14 {
        sleeper.world.cli(&["standby", &sleeper.name]).ok();
        assert_eq!((sleeper.processes(), &*sleeper.state()), (0, "standby"));
        let said = Instant::now();
        assert_eq!(caller.say(b"after\n"), "AFTER\n", "round {round}");
        assert!(
            said.elapsed() < Duration::from_secs(50),
            "round {round}: it waited for its budget"
        );
        // It answers before it was told the time.
        sleeper.until(&["running"], "it was woken");
        assert_eq!(sleeper.shown()["wakes"], before + round);
    }
    let Caller { mut program, to, .. } = caller;
    drop(to);
    assert!(program.wait().expect("it ends").success());
}

/// Promise 63. Attack K01.
#[test]
fn a_daemon_that_dies_at_any_step_of_sleep_or_wake_loses_no_guest() {
    let sleeper = Sleeper::turn();
    let (counter, mut at) = sleeper.count();
    for point in Point::ALL.iter().copied() {
        let (from, verb) = match point.on() {
            On::Standby | On::SaveQemu => ("running", "standby"),
            On::Resume | On::ResumeQemu => ("standby", "resume"),
            _ => continue,
        };
        let name = point.name();
        sleeper.ask(if from == "running" { "resume" } else { "standby" });
        sleeper.until(&[from], &format!("before {name}"));
        sleeper.world.daemon().arm(point, "die");
        let answer = sleeper.ask(verb);
        sleeper.world.daemon().dies(point);
        sleeper.world.daemon().start(&sleeper.world.host);
        let state = sleeper.until(&["running", "standby"], &format!("after {name}, {answer}"));
        assert_eq!(sleeper.processes(), usize::from(state == "running"), "{name}: {state}");
        let (same, now) = sleeper.count();
        assert_eq!(same, counter, "{name}: the same process");
        assert!(now >= at, "{name}: {now} after {at}");
        at = now;
        assert_eq!(sleeper.processes(), 1, "{name}");
    }
}
