//! A guest that becomes files and goes on: memory, files, an open connection; whatever dies between.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use agent::{Exec, FromGuest, FromHost};
use fault::{On, Point};
use nix::mount::{MsFlags, mount, umount};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use vmm::{Error, Hypervisor, Machine, Process, Qemu, Saved, tap};

use crate::world::{Agent, BOOT, UID, World, qemu, slot};

/// Counts in memory, in an open file, and by a clock that must not jump.
const COUNTER: &str = "
import time
out, n = open('/tmp/count', 'w'), 0
while True:
    n += 1
    out.seek(0)
    out.write('%d %.3f\\n' % (n, time.monotonic()))
    out.flush()
    time.sleep(0.02)
";

/// A guest that counts, and a command in it that sends back what it gets.
struct Counting {
    world: World,
    qemu: Qemu,
    machine: Machine,
    process: Process,
    echo: Agent,
}

impl Counting {
    async fn boot(name: &str) -> Self {
        let (world, qemu) = (World::new(), qemu().with_grace(Duration::ZERO));
        let machine = world.machine(name);
        let process = world.start(&qemu, &machine).await.expect("started");
        let counter = format!("setsid python3 -c \"{COUNTER}\" >/dev/null 2>&1 &");
        world.run(&["sh", "-c", &counter]).ended(agent::Status::Code(0));
        let mut echo = world.greet();
        let cat = vec!["cat".to_owned()];
        echo.say(&FromHost::Exec(Exec { argv: cat, ..Exec::default() }));
        let mut guest = Self { world, qemu, machine, process, echo };
        guest.answers("booted");
        guest.count();
        guest
    }

    /// The connection that was opened before any sleep carries this there and back.
    fn answers(&mut self, word: &str) {
        self.echo.say(&FromHost::Stdin(word.as_bytes().to_vec()));
        let heard = self.echo.hear();
        assert_eq!(heard, Some(FromGuest::Stdout(word.as_bytes().to_vec())), "{word}");
    }

    /// How far the counter is, and what its clock said.
    fn count(&self) -> (u64, f64) {
        let deadline = Instant::now() + BOOT;
        loop {
            let seen = self.world.run(&["cat", "/tmp/count"]);
            if let Some((n, at)) = seen.text().split_once(' ') {
                return (n.parse().expect("a number"), at.parse().expect("a time"));
            }
            assert!(Instant::now() < deadline, "it counts");
        }
    }

    async fn sleep(&self) -> Saved {
        self.qemu.pause(&self.process).await.expect("paused");
        self.qemu.save(&self.process, &self.machine).await.expect("saved")
    }

    async fn prepare(&self, machine: &Machine, saved: &Saved) -> Result<Process, Error> {
        let tap = self.world.within(|| tap::attach(slot()).expect("free"));
        self.qemu.prepare(machine, tap, saved).await
    }

    async fn wake(&mut self, saved: &Saved) {
        self.process = self.prepare(&self.machine, saved).await.expect("prepared");
        self.qemu.unpause(&self.process, &self.machine).await.expect("goes on");
    }

    /// It counts on from there, as one that was never stopped.
    fn goes_on_from(&mut self, before: (u64, f64), word: &str) {
        self.answers(word);
        let after = self.count();
        assert!(after.0 > before.0 && after.1 > before.1, "{before:?} {after:?}");
        // Fifty a second at most, by its own clock.
        let (counted, took) = (after.0 - before.0, after.1 - before.1);
        assert!((counted as f64) < took * 51.0 + 2.0, "{counted} in {took}");
    }
}

fn is_readable_by_nobody_else(path: &Path, uid: u32) {
    let found = fs::metadata(path).expect("there");
    assert_eq!((found.mode() & 0o777, found.uid()), (0o600, uid), "{}", path.display());
}

/// What of a file is in memory, in bytes.
fn resident(path: &Path) -> u64 {
    let output = Command::new("fincore").args(["-b", "-n", "-o", "RES"]).arg(path).output();
    let output = output.expect("fincore runs");
    String::from_utf8_lossy(&output.stdout).trim().parse().expect("a number")
}

/// How many pages of a file have to be written before they can be taken; none before Linux 6.5, which
/// does not tell.
fn unwritten(path: &Path) -> Option<u64> {
    const UNWRITTEN: &str = "
import ctypes, os, sys
file, whole, seen = os.open(sys.argv[1], os.O_RDONLY), (ctypes.c_uint64 * 2)(), (ctypes.c_uint64 * 5)()
told = ctypes.CDLL(None).syscall(451, file, whole, seen, 0)  # cachestat(2)
print(seen[1] + seen[2] if told == 0 else '')
";
    let output = Command::new("python3").args(["-c", UNWRITTEN]).arg(path).output();
    String::from_utf8(output.expect("python3").stdout).expect("text").trim().parse().ok()
}

/// A listener at the guest's tap, and how its words begin. When its input ends it says the protocols of the
/// frames that came from the guest.
fn listen_at_the_tap(world: &World) -> (Child, BufReader<ChildStdout>) {
    const LISTEN: &str = "
import socket, sys
tap, seen = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)), set()
tap.bind((sys.argv[1], 0))
print('listening', flush=True)
sys.stdin.read()
tap.setblocking(False)
try:
    while True:
        frame, source = tap.recvfrom(65536)
        if source[2] != socket.PACKET_OUTGOING:
            seen.add(frame[12:14].hex())
except BlockingIOError:
    print(*sorted(seen))
";
    let tap = slot().tap();
    let mut listener = world.within(|| {
        let mut python = Command::new("python3");
        python.args(["-c", LISTEN, &tap]).stdin(Stdio::piped()).stdout(Stdio::piped());
        python.spawn().expect("python3")
    });
    let mut words = BufReader::new(listener.stdout.take().expect("piped"));
    words.read_line(&mut String::new()).expect("it listens");
    (listener, words)
}

/// Its fence would count them as an attack: Ethernet's reverse ARP, by which QEMU tells switches where a
/// machine has gone.
#[tokio::test(flavor = "multi_thread")]
async fn a_resumed_guest_announces_nothing() {
    let (world, qemu) = (World::new(), qemu().with_grace(Duration::ZERO));
    let machine = world.machine("vmm-quiet");
    let process = world.start(&qemu, &machine).await.expect("started");
    drop(world.greet());
    qemu.pause(&process).await.expect("paused");
    let saved = qemu.save(&process, &machine).await.expect("saved");
    let (mut listener, mut words) = listen_at_the_tap(&world);
    let tap = world.within(|| tap::attach(slot()).expect("free"));
    let process = qemu.prepare(&machine, tap, &saved).await.expect("prepared");
    qemu.unpause(&process, &machine).await.expect("goes on");
    drop(world.greet());
    // The five announcements of QEMU are said within a second.
    tokio::time::sleep(Duration::from_millis(1200)).await;
    drop(listener.stdin.take());
    let mut heard = String::new();
    words.read_line(&mut heard).expect("what it heard");
    listener.wait().expect("ended");
    assert!(heard.contains("0800"), "control: it hears the guest: {heard}");
    assert!(!heard.contains("8035"), "{heard}");
    qemu.stop(&process).await.expect("stopped");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_saved_guest_is_gone_and_goes_on_where_it_was_again_and_again() {
    let mut guest = Counting::boot("vmm-asleep").await;
    for cycle in 0..3 {
        let before = guest.count();
        let begin = Instant::now();
        let saved = guest.sleep().await;
        let slept = begin.elapsed();
        let host = guest.process.host.clone().expect("a process");
        assert!(!host.is_alive() && host.groups.iter().all(|group| !group.exists()));
        assert!(!guest.process.control_socket().exists(), "no channel is left");
        let state = saved.state.clone().expect("a file");
        is_readable_by_nobody_else(&state, 0);
        is_readable_by_nobody_else(&guest.machine.memory, UID);
        assert_eq!(fs::metadata(&state).expect("there").len(), saved.state_bytes);
        let found = guest.qemu.saved(&guest.machine).await.expect("whole");
        assert_eq!(found.as_ref(), Some(&saved), "it is found when nobody wrote it down");

        // The kernel has its memory back: whenever it needs it soon after, and at once when asked.
        assert!(resident(&guest.machine.memory) > 64 << 20, "control: it was in use");
        assert_ne!(unwritten(&guest.machine.memory), Some(0), "control: it wrote until it slept");
        guest.qemu.write_back(&guest.machine, false).await.expect("written");
        assert!(unwritten(&guest.machine.memory).is_none_or(|pages| pages == 0));
        guest.qemu.write_back(&guest.machine, true).await.expect("written");
        let kept = resident(&guest.machine.memory);
        assert!(kept < 4 << 20, "{kept}");

        tokio::time::sleep(Duration::from_secs(2)).await;
        let begin = Instant::now();
        let process = guest.prepare(&guest.machine, &saved).await.expect("prepared");
        let prepared = begin.elapsed();
        assert!(state.exists(), "not yet consumed: it has not run");
        guest.echo.say(&FromHost::Stdin(b"early".to_vec()));
        guest.echo.stream.set_read_timeout(Some(Duration::from_millis(300))).expect("set");
        let early = guest.echo.stream.read(&mut [0]);
        assert!(early.is_err(), "it has not run: {early:?}");
        guest.echo.stream.set_read_timeout(Some(BOOT)).expect("set");
        guest.process = process;
        let begin = Instant::now();
        guest.qemu.unpause(&guest.process, &guest.machine).await.expect("goes on");
        let unpaused = begin.elapsed();
        assert!(!state.exists(), "its memory stops matching it");
        assert_eq!(guest.echo.hear(), Some(FromGuest::Stdout(b"early".to_vec())));
        println!(
            "cycle {cycle}: saved in {slept:?}, {} bytes; prepared in {prepared:?}, let go on in \
             {unpaused:?}, first byte {:?} after",
            saved.state_bytes,
            begin.elapsed()
        );
        guest.goes_on_from(before, &format!("cycle {cycle}"));
    }
    guest.qemu.pause(&guest.process).await.expect("paused");
    guest.qemu.pause(&guest.process).await.expect("twice is no error");
    let begin = Instant::now();
    let stopping = qemu().with_grace(Duration::from_secs(60));
    stopping.stop(&guest.process).await.expect("stopped");
    assert!(begin.elapsed() < Duration::from_secs(30), "a paused guest heeds no power button");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_does_not_match_is_refused_and_what_does_goes_on() {
    let mut guest = Counting::boot("vmm-refused").await;
    let before = guest.count();
    let saved = guest.sleep().await;
    let state = saved.state.clone().expect("a file");
    let machine = guest.machine.clone();
    let refused = |error: Error, word: &str| {
        assert!(matches!(error, Error::Unusable { .. }), "{error}");
        assert!(error.to_string().contains(word), "{error}");
    };
    for (other, word) in [
        (Machine { memory_mib: 512, ..machine.clone() }, "memory"),
        (Machine { vcpus: 2, ..machine.clone() }, "`-smp 1` there, `-smp 2` here"),
        (Machine { name: "other".parse().expect("a name"), ..machine.clone() }, "postern-other"),
        (Machine { base: machine.kernel.clone(), ..machine.clone() }, "image "),
        (Machine { state: "/no/such".into(), ..machine.clone() }, "is gone"),
        (Machine { memory: machine.disk.clone(), ..machine.clone() }, "size of the guest's memory"),
        (Machine { memory: "/no/such".into(), ..machine.clone() }, "memory is gone"),
    ] {
        refused(guest.prepare(&other, &saved).await.expect_err(word), word);
    }
    let another = Saved { digest: "another".to_owned(), ..saved.clone() };
    refused(guest.prepare(&machine, &another).await.expect_err("not this"), "saved last");
    let bytes = fs::read(&state).expect("read");
    let damaged = File::options().write(true).open(&state).expect("open");
    damaged.write_all_at(b"?", bytes.len() as u64 / 2).expect("damaged");
    refused(guest.prepare(&machine, &saved).await.expect_err("damaged"), "damaged");
    fs::write(&state, &bytes[..bytes.len() / 2]).expect("cut");
    refused(guest.prepare(&machine, &saved).await.expect_err("torn"), "damaged");
    // The process of each that got as far as one is gone, with its tap.
    fs::write(&state, &bytes).expect("as it was");
    let target = guest.prepare(&machine, &saved).await.expect("as it was");
    // Killed before its first instruction: nothing of what was saved is used up.
    let pid = i32::try_from(target.host.as_ref().expect("a process").pid).expect("an id");
    kill(Pid::from_raw(pid), Signal::SIGKILL).expect("ours");
    while guest.qemu.is_running(&target) {
        tokio::task::yield_now().await;
    }
    guest.qemu.stop(&target).await.expect("cleared");
    guest.wake(&saved).await;
    guest.goes_on_from(before, "control");
    refused(
        guest
            .qemu
            .prepare(&machine, File::open("/dev/null").expect("there").into(), &saved)
            .await
            .expect_err("once"),
        "is gone",
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_save_that_fails_leaves_a_guest_that_goes_on_or_says_that_it_cannot() {
    let mut guest = Counting::boot("vmm-full").await;
    let before = guest.count();
    let small = guest.world.dir.path().join("small");
    fs::create_dir(&small).expect("made");
    mount(Some("none"), &small, Some("tmpfs"), MsFlags::empty(), Some("size=128k")).expect("root");
    let full = Machine { state: small.join("state"), ..guest.machine.clone() };
    guest.qemu.pause(&guest.process).await.expect("paused");
    let error = guest.qemu.save(&guest.process, &full).await.expect_err("no room");
    assert!(matches!(error, Error::Control { act: "save the guest", .. }), "{error}");
    let left = fs::read_dir(&small).expect("listed").count();
    umount(&small).expect("unmounted");
    assert_eq!(left, 0, "nothing half written is left");
    assert!(guest.qemu.is_running(&guest.process));
    guest.qemu.unpause(&guest.process, &guest.machine).await.expect("goes on");
    guest.goes_on_from(before, "after a full disk");

    // One that runs is not saved: it would write while we do.
    let error = guest.qemu.save(&guest.process, &guest.machine).await.expect_err("it runs");
    assert!(error.to_string().contains("save the guest"), "{error}");
    guest.answers("untouched");
    let saved = guest.sleep().await;
    guest.wake(&saved).await;
    guest.goes_on_from(before, "control");

    guest.qemu.pause(&guest.process).await.expect("paused");
    let pid = i32::try_from(guest.process.host.as_ref().expect("a process").pid).expect("an id");
    kill(Pid::from_raw(pid), Signal::SIGKILL).expect("ours");
    let error = guest.qemu.save(&guest.process, &guest.machine).await.expect_err("it is dead");
    assert!(matches!(error, Error::Control { .. }), "{error}");
    assert!(!guest.machine.state.with_extension("new").exists());
    assert!(guest.qemu.saved(&guest.machine).await.expect("no file is no error").is_none());
}

/// What the daemon tells the agent after a resume sets the clock, which stood still, and begins random
/// numbers anew: without it, two resumes from the same files draw the same ones.
#[tokio::test(flavor = "multi_thread")]
async fn after_a_resume_the_agent_sets_the_clock_and_begins_random_numbers_anew() {
    let (world, qemu) = (World::new(), qemu().with_grace(Duration::ZERO));
    let machine = world.machine("vmm-anew");
    let process = world.start(&qemu, &machine).await.expect("started");
    // While it is young its kernel begins random numbers anew by itself, after half of its age: not soon
    // after this.
    draw(&world, true);
    qemu.pause(&process).await.expect("paused");
    let saved = qemu.save(&process, &machine).await.expect("saved");
    let files = [&machine.memory, &machine.disk, &machine.state];
    let copied = |from: &Path, to: &Path| {
        let copy = Command::new("cp").arg("--sparse=always").args([from, to]).status();
        assert!(copy.expect("cp runs").success());
    };
    for file in files {
        copied(file, &file.with_extension("copy"));
    }
    tokio::time::sleep(Duration::from_secs(4)).await;
    // On a busy host two guests see their interrupts at moments so different that the kernel mixes them
    // in before the numbers are drawn.
    const TRIES: usize = 12;
    let (mut without, mut with) = (Vec::new(), Vec::new());
    let twice =
        |drawn: &[String]| drawn.iter().any(|a| drawn.iter().filter(|b| a == *b).count() > 1);
    while with.len() < 2 || !twice(&without) {
        let told = with.len() < without.len().min(2);
        assert!(without.len() < TRIES, "control: the same numbers: {without:?}");
        for file in files {
            copied(&file.with_extension("copy"), file);
        }
        let tap = world.within(|| tap::attach(slot()).expect("free"));
        let process = qemu.prepare(&machine, tap, &saved).await.expect("prepared");
        qemu.unpause(&process, &machine).await.expect("goes on");
        let (random, behind) = draw(&world, told);
        // Whole seconds on both sides.
        assert_eq!(behind < 3, told, "the clock stood still for {behind} s, unless it is told");
        if told {
            with.push(random)
        } else {
            without.push(random)
        }
        qemu.stop(&process).await.expect("stopped");
    }
    assert!(with[0] != with[1] && !without.contains(&with[0]), "{with:?} {without:?}");
}

/// What a program draws from the kernel's random numbers, and how many seconds its clock is behind; told
/// before what a daemon tells the agent, or not.
fn draw(world: &World, told: bool) -> (String, u64) {
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
    let mut agent = world.greet();
    if told {
        let nanos = u64::try_from(now().as_nanos()).expect("in range");
        agent.say(&FromHost::Clock(nanos));
        let mut fresh = vec![0; 32];
        File::open("/dev/urandom").expect("there").read_exact(&mut fresh).expect("read");
        agent.say(&FromHost::Entropy(fresh));
    }
    let draw = "head -c 16 /dev/urandom | od -An -tx1; date +%s";
    let argv = ["sh", "-c", draw].map(str::to_owned).to_vec();
    agent.say(&FromHost::Exec(Exec { argv, ..Exec::default() }));
    agent.say(&FromHost::StdinEnd);
    let mut said = Vec::new();
    while let Some(FromGuest::Stdout(bytes)) = agent.hear() {
        said.extend(bytes);
    }
    let said = String::from_utf8(said).expect("text");
    let (random, seconds) = said.trim().split_once('\n').expect("two lines");
    let seconds = seconds.trim().parse().expect("a number");
    (random.trim().to_owned(), now().as_secs().saturating_sub(seconds))
}

/// What a daemon that is about to be killed is to do.
#[derive(Serialize, Deserialize)]
struct Task {
    machine: Machine,
    process: Process,
    saved: Option<Saved>,
    fault: std::path::PathBuf,
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_step_a_daemon_dies_at_the_next_one_lets_the_guest_go_on() {
    let mut guest = Counting::boot("vmm-killed").await;
    let points = Point::ALL.iter().copied();
    let points = points.filter(|point| {
        matches!(point.on(), On::SaveQemu | On::ResumeQemu)
            || [Point::QemuKilled, Point::QemuSpawned, Point::QemuReady].contains(point)
    });
    for point in points {
        let before = guest.count();
        let resumes = matches!(point.on(), On::ResumeQemu | On::CreateQemu);
        let saved = if resumes { Some(guest.sleep().await) } else { None };
        let fault = guest.world.dir.path().join("fault");
        fs::write(&fault, format!("{} die", point.name())).expect("armed");
        let task = Task {
            machine: guest.machine.clone(),
            process: guest.process.clone(),
            saved,
            fault: fault.clone(),
        };
        let task = serde_json::to_string(&task).expect("plain data");
        let daemon = guest.world.within(|| {
            Command::new(std::env::current_exe().expect("this test"))
                .args(["--exact", "asleep::the_daemon_that_dies", "--ignored", "--nocapture"])
                .env("VMM_TEST_TASK", task)
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .status()
                .expect("run")
        });
        assert!(!daemon.success() && fault.with_extension("struck").exists(), "{}", point.name());
        fs::remove_file(fault.with_extension("struck")).expect("forgotten");
        // The next daemon knows the machine, and what stood in the journal before the step.
        let alive = guest.qemu.find(&guest.machine);
        let alive = alive.filter(|process| guest.qemu.is_running(process));
        let told = guest.qemu.saved(&guest.machine).await.expect("whole or not there");
        match (alive, told) {
            // Half made for a guest that is saved: ended, and made again.
            (Some(process), Some(saved)) if resumes => {
                guest.qemu.stop(&process).await.expect("ended");
                guest.wake(&saved).await;
            }
            (Some(process), _) => {
                assert!(guest.qemu.adopt(&process).await);
                guest.process = process;
                guest.qemu.unpause(&guest.process, &guest.machine).await.expect("goes on");
            }
            (None, Some(saved)) => {
                guest.qemu.clear(&guest.machine).await.expect("cleared");
                guest.wake(&saved).await;
            }
            (None, None) => panic!("{}: neither process nor state", point.name()),
        }
        guest.goes_on_from(before, point.name());
        let left = [guest.machine.state.clone(), guest.machine.state.with_extension("new")];
        assert!(left.iter().all(|path| !path.exists()), "{}: {left:?}", point.name());
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "started by whatever_step_a_daemon_dies_at_the_next_one_lets_the_guest_go_on"]
async fn the_daemon_that_dies() {
    let task = std::env::var_os("VMM_TEST_TASK").expect("run by another test");
    let task: Task = serde_json::from_str(&task.to_string_lossy()).expect("a task");
    let Task { machine, process, saved, fault } = task;
    fault::listen(fault);
    let qemu = qemu();
    match saved {
        None => {
            qemu.pause(&process).await.expect("paused");
            qemu.save(&process, &machine).await.expect("saved");
        }
        Some(saved) => {
            let tap = tap::attach(slot()).expect("we are in its world");
            let process = qemu.prepare(&machine, tap, &saved).await.expect("prepared");
            qemu.unpause(&process, &machine).await.expect("goes on");
        }
    }
}
