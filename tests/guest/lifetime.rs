//! A microVM lives its own life: longer than the daemon, and not longer than its sandbox.

use std::path::PathBuf;
use std::process::Stdio;

use crate::machine::Machine;
use world::World;
use world::client::PATIENT;
use world::machine::image;
use world::poll::eventually;

fn process(pid: i64) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}"))
}

/// Promise 25. And when the sandbox is removed, nothing of it is left.
#[test]
fn a_guest_outlives_the_daemon_is_adopted_by_the_next_and_ends_with_its_sandbox() {
    let machine = Machine::boot();
    let boot_id = || machine.exec(&["cat", "/proc/sys/kernel/random/boot_id"]).ok().stdout;
    let before = boot_id();
    let fetch = format!("curl -sSf -m 20 https://{}/", machine.api.name);
    machine.sh(&fetch).ok();
    let pid = machine.pid();
    assert_eq!(machine.processes(), pid.to_string(), "control");
    let status = std::fs::read_to_string(process(pid).join("status")).expect("its status");
    let line = |key: &str| {
        let line = status.lines().find(|line| line.starts_with(key)).unwrap_or_default();
        line.split_whitespace().skip(1).map(str::to_owned).collect::<Vec<_>>()
    };
    assert!(
        line("Uid:").iter().all(|uid| uid.parse::<u32>().is_ok_and(|uid| uid > 1000)),
        "{status}"
    );
    for set in ["CapEff:", "CapPrm:", "CapInh:", "CapAmb:"] {
        assert_eq!(line(set), ["0000000000000000"], "{set}");
    }
    assert_eq!(line("NoNewPrivs:"), ["1"]);
    for graceful in [false, true] {
        let mut daemon = machine.world.daemon();
        if graceful {
            assert_eq!(daemon.terminate(), Some(0));
        } else {
            daemon.kill();
        }
        assert!(process(pid).exists());
        daemon.start(&machine.world.host);
        drop(daemon);
        assert_eq!(boot_id(), before, "the same boot of the same guest");
        machine.sh(&fetch).ok();
    }
    machine.world.cli(&["rm", &machine.name]).ok();
    eventually("the process is gone", PATIENT, || (!process(pid).exists()).then_some(()));
    assert_eq!(machine.processes(), "");
    let left = machine.world.host.processes();
    let daemon = machine.world.daemon().pid().expect("it runs");
    assert_eq!(left, [daemon], "only the daemon is left in the host's namespace");
    let links = machine.world.taps.command("ip").args(["-o", "link"]).output().expect("ip");
    let links = String::from_utf8_lossy(&links.stdout).into_owned();
    assert!(links.contains("lo:") && !links.contains("pt1"), "{links}");
}

/// Promise 20. A guest that still boots heeds no power button, so nobody waits for it: neither who
/// removes it nor the next daemon.
#[test]
fn a_guest_that_still_boots_is_gone_at_once() {
    let world = Machine::world();
    let name = world.machine_name();
    let path = format!("/v1/sandboxes/{name}");
    for killed in [false, true] {
        let mut create = world.daemon().command(&["create", &name]);
        create.stdout(Stdio::null()).stderr(Stdio::null());
        let mut creating = create.spawn().expect("run postern");
        let pid = eventually("its process runs", PATIENT, || {
            world.api("GET", &path, &[]).json["pid"].as_i64()
        });
        if killed {
            world.daemon().kill();
            world.daemon().start(&world.host);
            eventually("it is gone", PATIENT, || {
                (world.api("GET", &path, &[]).status == 404).then_some(())
            });
        } else {
            assert_eq!(world.api("DELETE", &path, &[]).status, 204);
        }
        eventually("the process is gone", PATIENT, || (!process(pid).exists()).then_some(()));
        assert_ne!(creating.wait().expect("it ends").code(), Some(0));
        let log = world.daemon().log();
        let mut ends = log.lines().filter(|line| line.contains("guest did not power off"));
        assert!(ends.all(|end| end.contains("grace=0ns")), "it was waited for: {log}");
    }
}

/// Promise 21. What its console said is in the error, since nothing else of it is left.
#[test]
fn a_guest_that_does_not_boot_in_time_is_undone_and_the_error_says_what_to_do() {
    let world = World::of_machines(&image(), "boot_timeout = \"1ms\"\n");
    let name = world.machine_name();
    let made = world.cli(&["create", &name]);
    assert_eq!(made.code, 1, "{made:?}");
    for said in ["did not answer within 1ms", "raise `qemu.boot_timeout`", "its console "] {
        assert!(made.stderr.contains(said), "{said}: {made:?}");
    }
    assert_eq!(world.cli(&["show", &name]).code, 3);
}
