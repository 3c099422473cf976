//! `standby` and `resume`: how soon an idle guest holds nothing, and how soon its answer is there again,
//! by driver; `asleep`: what the daemon holds for a thousand that sleep. Needs the guest image.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::json;
use world::machine;

use crate::gauge;
use crate::report::{Better, Goal, Row, keep, quantile};
use crate::stage::Stage;

/// How long a guest may take where KVM cannot be used.
const PATIENCE: Duration = Duration::from_secs(120);
/// What stands for a hypervisor that takes no time.
const HOOKS: &str = "[external]\non_standby = [\"/bin/true\"]\non_resume = [\"/bin/true\"]\n";
/// In the guest: a server that gives back what it gets.
const ECHO: &str = "cat >/root/echo.py <<'E'\n\
    import socket\n\
    server = socket.create_server(('0.0.0.0', 7000))\n\
    while True:\n\
    \x20   peer, _ = server.accept()\n\
    \x20   while said := peer.recv(100): peer.sendall(said)\n\
    E\n\
    setsid python3 /root/echo.py >/dev/null 2>&1 </dev/null &\n\
    until grep -q :1B58 /proc/net/tcp; do sleep 0.1; done";

const STANDBY: &str = "From the request to its answer, when the guest is saved and its process is gone. \
    `external`: hooks that do nothing, so that what is left is ours. What the process had held was a file already: the kernel can have those pages once they are written, which begins at once.";
const RESUME: &str = "From a byte on a connection that was open before the guest slept to the answer of the guest on it; beside it the same guest started anew, to the same answer, the command that starts its server included (once, not in each round). \
    `external`: from the request to wake to its answer, with hooks that do nothing.";

/// A stage with one guest that has a connection open, and does not sleep by itself.
pub(crate) struct Sleeper {
    stage: Stage,
    line: UnixStream,
    /// Milliseconds from its creation to its first answer.
    booted: f64,
}

impl Sleeper {
    /// What a stage's daemon must be told for it.
    pub(crate) fn config() -> String {
        let image = machine::image().display().to_string();
        format!("{HOOKS}[sleep]\non_idle = \"never\"\n[qemu]\nimage = {image:?}\n")
    }

    /// Boots it on such a stage; a connection to its server, which gives back what it gets.
    pub(crate) fn start(stage: &Stage) -> UnixStream {
        let name = stage.machine_name();
        let wanted = json!({ "name": name, "driver": "qemu" }).to_string();
        let made = stage.api("POST", "/v1/sandboxes", "application/json", &wanted);
        assert_eq!(made.status, 201, "{}", made.json);
        let words = ["exec", &name, "--", "sh", "-c", ECHO];
        let echo = stage.command(&words).output().expect("exec");
        assert!(echo.status.success(), "{}", String::from_utf8_lossy(&echo.stderr));
        let line = stage.connect(&name, 7000);
        line.set_read_timeout(Some(PATIENCE)).expect("a time limit");
        line
    }

    fn boot() -> Self {
        let stage = Stage::new(2, &Self::config());
        let began = Instant::now();
        let line = Self::start(&stage);
        let mut sleeper = Self { stage, line, booted: 0.0 };
        sleeper.answer();
        sleeper.booted = millis(began.elapsed());
        sleeper
    }

    /// Milliseconds from a byte to the guest's answer.
    fn answer(&mut self) -> f64 {
        let began = Instant::now();
        self.line.write_all(b"x").expect("said");
        let mut heard = [0];
        self.line.read_exact(&mut heard).expect("an answer");
        millis(began.elapsed())
    }

    fn verb(&self, name: &str, verb: &str) -> f64 {
        let began = Instant::now();
        let path = format!("/v1/sandboxes/{name}/{verb}");
        let done = self.stage.api("POST", &path, "application/json", "{}");
        assert_eq!(done.status, 200, "{verb} {name}: {}", done.json);
        millis(began.elapsed())
    }

    fn pid(&self) -> u32 {
        let shown =
            self.stage.api("GET", &format!("/v1/sandboxes/{}", self.stage.machine_name()), "", "");
        let pid = shown.json["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok());
        pid.expect("its process")
    }
}

pub(crate) fn standby(rounds: usize) {
    let mut sleeper = Sleeper::boot();
    let (mut asleep, mut held) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        sleeper.answer();
        let pid = sleeper.pid();
        held.push(gauge::memory(pid) as f64 / 1048576.0);
        asleep.push(sleeper.verb(&sleeper.stage.machine_name(), "standby"));
        assert!(!Path::new(&format!("/proc/{pid}")).exists(), "its process is gone");
    }
    let external = by_hooks(&sleeper, rounds, "standby");
    let row = |name: &str, unit, better, figures: &[f64]| {
        Row::new(name, unit, better, figures).under(STANDBY)
    };
    keep(
        "standby",
        &[
            row("asleep, qemu, p50", "ms", Better::Lower, &asleep).goal(Goal::AtMost(120.0)),
            row("asleep, external, p50", "ms", Better::Lower, &external),
            row("asleep, external, p99", "ms", Better::Lower, &[quantile(&external, 0.99)]),
            row("what its process had held", "MiB", Better::Lower, &held),
        ],
    );
}

pub(crate) fn resume(rounds: usize) {
    let mut sleeper = Sleeper::boot();
    let (mut awake, mut woken) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        sleeper.verb(&sleeper.stage.machine_name(), "standby");
        woken.push(sleeper.answer());
        awake.push(sleeper.answer());
    }
    let external = by_hooks(&sleeper, rounds, "resume");
    let row =
        |name: &str, figures: &[f64]| Row::new(name, "ms", Better::Lower, figures).under(RESUME);
    let booted = [sleeper.booted];
    keep(
        "resume",
        &[
            row("answer of a guest asleep, qemu, p50", &woken).peer("started anew", &booted),
            row("answer of a guest asleep, qemu, p99", &[quantile(&woken, 0.99)]),
            row("answer of the same guest awake, p50", &awake),
            row("awake, external, p50", &external).goal(Goal::AtMost(5.0)),
            row("awake, external, p99", &[quantile(&external, 0.99)]),
        ],
    );
}

/// Milliseconds that a verb takes for a sandbox whose hypervisor takes none.
fn by_hooks(sleeper: &Sleeper, rounds: usize, verb: &str) -> Vec<f64> {
    assert_eq!(sleeper.stage.create("hooks", "").status, 201);
    let mut took = Vec::new();
    for _ in 0..rounds * 5 {
        for each in ["standby", "resume"] {
            let one = sleeper.verb("hooks", each);
            if each == verb {
                took.push(one);
            }
        }
    }
    took
}

/// `asleep`: what the daemon holds for a sandbox that sleeps, with a thousand of them.
pub(crate) fn density(_: usize) {
    const SANDBOXES: u32 = 1_000;
    let stage = Stage::new(2, HOOKS);
    let settled = || {
        std::thread::sleep(Duration::from_secs(2));
        gauge::memory(stage.pid()) as f64
    };
    let sleep = |name: &str| {
        assert_eq!(stage.create(name, "").status, 201, "{name}");
        let path = format!("/v1/sandboxes/{name}/standby");
        let asleep = stage.api("POST", &path, "application/json", "{}");
        assert_eq!(asleep.status, 200, "{name}: {}", asleep.json);
    };
    // What grows once grows before it is measured.
    (0..20).for_each(|n| sleep(&format!("w{n}")));
    let (before, files) = (settled(), gauge::descriptors(stage.pid()));
    (0..SANDBOXES).for_each(|n| sleep(&format!("s{n}")));
    let (with, open) = (settled(), gauge::descriptors(stage.pid()));
    let each = (with - before) / f64::from(SANDBOXES) / 1024.0;
    let files = (open.saturating_sub(files)) as f64 / f64::from(SANDBOXES);
    let began = Instant::now();
    let woken = stage.api("POST", "/v1/sandboxes/s500/resume", "application/json", "{}");
    assert_eq!(woken.status, 200, "{}", woken.json);
    let wake = millis(began.elapsed());
    let row = |name: &str, unit, figure: f64| {
        Row::new(name, unit, Better::Lower, &[figure]).under(
            "Growth of the daemon's resident memory and descriptors, divided by 1,000 sandboxes of the driver `external` that sleep, and one of them woken.",
        )
    };
    keep(
        "asleep",
        &[
            row("a sandbox asleep", "KiB", each).goal(Goal::AtMost(32.0)),
            row("descriptors for it", "", files),
            row("one of a thousand awake again", "ms", wake),
        ],
    );
}

fn millis(of: Duration) -> f64 {
    of.as_secs_f64() * 1e3
}
