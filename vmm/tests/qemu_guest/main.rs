//! The real Debian guest under QEMU, on a real tap in a namespace of the test's own.
//!
//! Needs root, QEMU and the guest image (`POSTERN_IMAGE`, else `target/image`); takes a few boots.
#![expect(
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "tests: what does not hold ends the test"
)]

mod asleep;
mod world;

use std::collections::BTreeSet;
use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use agent::{FromGuest, Status};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use vmm::{Error, Hypervisor, Machine, Process, Qemu, tap};

use crate::world::{BOOT, UID, World, assert_nothing_is_left, image, qemu, slot};

#[tokio::test(flavor = "multi_thread")]
async fn a_debian_guest_boots_runs_commands_and_powers_off() {
    let (world, qemu) = (World::new(), qemu().with_grace(Duration::from_secs(20)));
    qemu.accel().await;
    let begin = Instant::now();
    let process = world.start(&qemu, &world.machine("vmm-commands")).await.expect("started");
    let spawned = begin.elapsed();
    drop(world.greet());
    let pid = process.host.as_ref().expect("a process").pid;
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let memory = status.lines().find(|line| line.starts_with("VmRSS")).expect("resident memory");
    println!("start {spawned:?}, greeting after {:?}, {memory}", begin.elapsed());

    let uname = world.run(&["uname", "-a"]);
    uname.ended(Status::Code(0));
    assert!(uname.text().starts_with("Linux vmm-commands 6.1."), "{}", uname.text());
    assert!(world.run(&["curl", "--version"]).text().starts_with("curl "));
    assert_eq!(world.run(&["cat", "/proc/1/comm"]).text(), "init");
    world.run(&["sh", "-c", "exit 3"]).ended(Status::Code(3));
    world.run(&["sh", "-c", "kill -TERM $$"]).ended(Status::Signal(15));
    let missing = world.run(&["/no/such/program"]);
    assert!(matches!(missing.end, Some(FromGuest::Failed(_))), "{missing:?}");

    let route = world.run(&["ip", "-o", "route"]).text().to_owned();
    assert!(route.contains("default via 169.254.100.1 dev eth0"), "{route}");
    let resolver = world.run(&["cat", "/etc/resolv.conf"]).text().to_owned();
    assert!(resolver.starts_with("nameserver 169.254.100.1"), "{resolver}");
    let theirs: u64 = world.run(&["date", "+%s"]).text().parse().expect("a number");
    let ours = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
    assert!(ours.abs_diff(theirs) <= 3, "{ours} here, {theirs} there");

    let big = "head -c 10485760 /dev/urandom | tee /tmp/big; sha256sum /tmp/big >&2";
    let big = world.run(&["sh", "-c", big]);
    assert_eq!(big.stdout.len(), 10 << 20);
    let theirs = String::from_utf8_lossy(&big.stderr).into_owned();
    let back = world.run_with(&["sha256sum"], big.stdout);
    assert_eq!(back.text().split(' ').next(), theirs.split(' ').next(), "both ways unharmed");

    let begin = Instant::now();
    qemu.stop(&process).await.expect("stopped");
    println!("stop {:?}", begin.elapsed());
    assert!(world.console().contains("Power down"), "powered off by itself:\n{}", world.console());
    assert_nothing_is_left(&world, &process);
    assert!(!qemu.is_running(&process));
    qemu.stop(&process).await.expect("stopping twice is no error");
}

/// Promise 25.
/// Whatever a guest makes QEMU complain about, however often.
#[tokio::test(flavor = "multi_thread")]
async fn what_qemu_says_is_kept_and_fills_no_more_than_two_small_files() {
    let (world, qemu) = (World::new(), qemu().with_grace(Duration::ZERO));
    let process = world.start(&qemu, &world.machine("vmm-words")).await.expect("started");
    let pid = process.host.as_ref().expect("a process").pid;
    let stderr = fs::OpenOptions::new().append(true).open(format!("/proc/{pid}/fd/2"));
    let mut stderr = stderr.expect("its own");
    let complaint = [b'!'; 4096];
    for _ in 0..4096 {
        stderr.write_all(&complaint).expect("taken");
    }
    stderr.write_all(b"the end").expect("taken");
    let log = process.run_dir.join("qemu.log");
    let deadline = Instant::now() + BOOT;
    while !fs::read(&log).unwrap_or_default().ends_with(b"the end") {
        assert!(Instant::now() < deadline, "the newest words are kept");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let files = fs::read_dir(&process.run_dir).expect("listed");
    let sizes = files.map(|file| file.expect("there").metadata().expect("known").len());
    let all: u64 = sizes.sum();
    assert!(all < 4 << 20, "{all}");
    qemu.stop(&process).await.expect("stopped");
    assert_nothing_is_left(&world, &process);
}

#[tokio::test(flavor = "multi_thread")]
async fn its_process_owns_nothing_but_what_it_was_given() {
    let (world, qemu) = (World::new(), qemu().with_grace(Duration::ZERO));
    let machine = world.machine("vmm-confined");
    let process = world.start(&qemu, &machine).await.expect("started");
    let host = process.host.as_ref().expect("a process");
    let proc = PathBuf::from(format!("/proc/{}", host.pid));
    let status = fs::read_to_string(proc.join("status")).expect("it runs");
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.expect("a field").split_ascii_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(field("Uid"), format!("{UID} {UID} {UID} {UID}"));
    assert_eq!(field("Gid"), format!("{UID} {UID} {UID} {UID}"));
    assert_eq!(field("Groups"), "");
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(field(set), "0000000000000000", "{set}");
    }
    assert_eq!((field("NoNewPrivs").as_str(), field("Seccomp").as_str()), ("1", "2"));
    let (own, words) = (image(), process.words_fifo());
    let given_base = machine.base.clone();
    let given =
        [machine.kernel, machine.initrd, machine.base, machine.disk, machine.memory, words, own];
    let mut given: BTreeSet<PathBuf> =
        given.iter().map(|path| fs::canonicalize(path).expect("there")).collect();
    given.extend(["/dev/null".into(), "/dev/net/tun".into()]);
    let (mut sockets, mut found) = (0, BTreeSet::new());
    for entry in fs::read_dir(proc.join("fd")).expect("it runs") {
        let target = match fs::read_link(entry.expect("an entry").path()) {
            // Closed since it was listed.
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            target => target.expect("readable"),
        };
        match target.to_string_lossy().as_ref() {
            text if text.starts_with("anon_inode:") => {}
            text if text.starts_with("socket:") => sockets += 1,
            text if text.starts_with("/memfd:") => panic!("{text}"),
            _ => drop(found.insert(target)),
        }
    }
    assert!(found.is_subset(&given), "{:?}", found.difference(&given));
    assert!(sockets <= 4, "two listeners and a peer of each: {sockets}");
    assert_eq!(fs::read_to_string(proc.join("oom_score_adj")).expect("it runs").trim(), "800");
    let session: Vec<_> = fs::read_to_string(proc.join("stat"))
        .expect("it runs")
        .rsplit(')')
        .next()
        .expect("fields")
        .split(' ')
        .map(str::to_owned)
        .collect();
    assert_eq!(session[4], host.pid.to_string(), "leads a session of its own");
    let links = fs::read_to_string(proc.join("net/dev")).expect("it runs");
    assert_eq!(links.lines().skip(2).count(), 1, "no link but its own lo:\n{links}");
    assert!(!host.groups.is_empty());
    for group in &host.groups {
        let members = fs::read_to_string(group.join("cgroup.procs")).expect("made");
        assert_eq!(members.trim(), host.pid.to_string(), "{}", group.display());
    }
    let limits = fs::read_to_string(proc.join("limits")).expect("it runs");
    let core = limits.lines().find(|line| line.starts_with("Max core file size")).expect("a limit");
    assert_eq!(core.split_ascii_whitespace().nth(4), Some("0"));
    // Its disk may grow to the size of the image's and a little more: no guest fills the host's.
    let size = limits.lines().find(|line| line.starts_with("Max file size")).expect("a limit");
    let most: u64 = size.split_ascii_whitespace().nth(3).expect("soft").parse().expect("a bound");
    let base = fs::metadata(&given_base).expect("there").len();
    assert!((base..=base + base / 64 + (64 << 20)).contains(&most), "{size}");
    qemu.stop(&process).await.expect("stopped");
    assert_nothing_is_left(&world, &process);
}

/// Promises 20, 25. A guest that broke out of QEMU may have started programs beside it, and ended it.
#[tokio::test(flavor = "multi_thread")]
async fn whatever_is_in_its_groups_ends_with_it() {
    let (world, qemu) = (World::new(), qemu().with_grace(Duration::ZERO));
    for first_ends in [false, true] {
        let process = world.start(&qemu, &world.machine("vmm-brood")).await.expect("started");
        let host = process.host.as_ref().expect("a process");
        assert!(!host.groups.is_empty());
        let mut other = Command::new("sleep").arg("600").spawn().expect("sleep");
        for group in &host.groups {
            fs::write(group.join("cgroup.procs"), other.id().to_string()).expect("it enters");
        }
        if first_ends {
            kill(Pid::from_raw(host.pid.try_into().expect("a pid")), Signal::SIGKILL)
                .expect("sent");
            while host.is_alive() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
        assert_eq!(other.try_wait().expect("known"), None, "control: it runs");
        let stopped = qemu.stop(&process).await;
        let ended = other.try_wait().expect("known");
        other.kill().expect("it is our child");
        other.wait().expect("reaped");
        assert!(ended.is_some(), "it ended with its groups");
        stopped.expect("stopped");
        assert_nothing_is_left(&world, &process);
    }
}

/// Promise 25.
#[tokio::test(flavor = "multi_thread")]
async fn it_outlives_the_daemon_that_started_it_and_is_adopted_by_the_next() {
    let (world, qemu) = (World::new(), qemu().with_grace(Duration::from_secs(20)));
    let machine = serde_json::to_string(&world.machine("vmm-orphan")).expect("plain data");
    let mut daemon = world.within(|| {
        Command::new(std::env::current_exe().expect("this test"))
            .args(["--exact", "the_daemon_that_is_killed", "--ignored", "--nocapture"])
            .env("VMM_TEST_MACHINE", machine)
            .stdout(Stdio::piped())
            .spawn()
            .expect("spawned")
    });
    let mut said = std::io::BufReader::new(daemon.stdout.take().expect("piped"));
    let mut line = String::new();
    let process: Process = loop {
        line.clear();
        assert_ne!(
            std::io::BufRead::read_line(&mut said, &mut line).expect("readable"),
            0,
            "it died"
        );
        // The test harness writes its own words before ours on the line.
        if let Some(start) = line.find('{') {
            break serde_json::from_str(&line[start..]).expect("a process");
        }
    };
    daemon.kill().expect("SIGKILL");
    daemon.wait().expect("dead");
    assert!(qemu.adopt(&process).await, "still running");
    drop(world.greet());
    assert_eq!(world.run(&["hostname"]).text(), "vmm-orphan");
    qemu.stop(&process).await.expect("stopped");
    assert!(world.console().contains("Power down"), "the console was read again");
    assert!(!qemu.adopt(&process).await, "gone");
    assert_nothing_is_left(&world, &process);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "started and killed by it_outlives_the_daemon_that_started_it_and_is_adopted_by_the_next"]
async fn the_daemon_that_is_killed() {
    let machine = std::env::var_os("VMM_TEST_MACHINE").expect("run by another test");
    let machine: Machine = serde_json::from_str(&machine.to_string_lossy()).expect("a machine");
    let tap = tap::attach(slot()).expect("we are in its world");
    let process = qemu().start(&machine, tap).await.expect("started");
    println!("{}", serde_json::to_string(&process).expect("plain data"));
    std::future::pending::<()>().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_fails_says_why_and_leaves_nothing() {
    let (world, qemu) = (World::new(), qemu());
    let machine = world.machine("vmm-garbage");
    fs::write(&machine.disk, "not a disk").expect("written");
    let error = world.start(&qemu, &machine).await.expect_err("QEMU refuses it");
    assert!(matches!(&error, Error::Failed { said, .. } if said.contains("qcow2")), "{error}");
    for root in ["", "memory/", "cpu/", "pids/"] {
        assert!(!Path::new(&format!("/sys/fs/cgroup/{root}postern/vmm-garbage")).exists());
    }
    assert!(!machine.run_dir.join("qmp.sock").exists());
    drop(world.within(|| tap::attach(slot()).expect("the tap is free")));
    let missing = Machine { kernel: "/no/such/kernel".into(), ..machine };
    let error = world.start(&qemu, &missing).await.expect_err("no such file");
    assert!(matches!(error, Error::File { act: "open", .. }), "{error}");
    assert!(!missing.run_dir.join("qmp.sock").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_report_names_what_is_there_and_what_is_not() {
    let report = qemu().report(&image()).await;
    assert!(report.is_usable(), "{report:?}");
    assert!(report.version.as_ref().is_some_and(|it| it.starts_with("QEMU emulator version")));
    assert!(!report.accel.why.is_empty());
    println!("{report:?}");
    let report = Qemu::new("/no/such/qemu").report(Path::new("/no/such/image")).await;
    assert!(!report.is_usable());
    assert_eq!(report.image_missing.len(), 3);
}
