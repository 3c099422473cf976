//! The process of a guest is killed, alone or with the daemon, wherever it is on its way: what was whole goes on,
//! what was not has failed and says so, and nothing is left of it.

use std::path::Path;
use std::process::Command;

use fault::Point;
use serde_json::Value;
use world::poll::eventually;
use world::{Site, allow};

use crate::asleep::{PATIENCE, Sleeper};
use crate::death::traces;

/// What is left of a sandbox once its guest was killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    /// It sleeps, and goes on when it is woken.
    Sleeps,
    /// Its memory is gone.
    Fails,
}

/// Ends the guest's process as the out-of-memory killer would.
fn kill(pid: &Value) {
    let pid = pid.as_i64().expect("a process").to_string();
    assert!(Command::new("kill").args(["-9", &pid]).status().expect("kill").success());
    eventually("it is dead", PATIENCE, || {
        let status = std::fs::read_to_string(Path::new("/proc").join(&pid).join("status"));
        let lives = status.is_ok_and(|status| !status.contains("State:\tZ"));
        (!lives).then_some(())
    });
}

/// The process of a sandbox that is on its way, as the host sees it.
fn process(sleeper: &Sleeper) -> Value {
    let found = Command::new("pgrep").args(["-f", "--", &sleeper.pattern()]).output();
    let found = String::from_utf8_lossy(&found.expect("pgrep").stdout).trim().to_owned();
    found.parse::<i64>().expect("one process").into()
}

impl Sleeper {
    /// It has failed and says why; no process, tap, control group or memory is left.
    fn has_failed(&self, what: &str) {
        self.until(&["failed"], what);
        let shown = self.shown();
        assert!(shown["reason"].as_str().is_some_and(|why| !why.is_empty()), "{what}: {shown}");
        eventually(&format!("{what}: nothing is left but its files"), PATIENCE, || {
            let left = traces(&self.world, &self.name);
            let folder = self.world.dir().join("state/sandboxes").join(&self.name);
            let memory = folder.join("memory").exists();
            (!memory && left.iter().all(|it| it.starts_with('/') && !it.contains("cgroup")))
                .then_some(())
        });
        assert_eq!(self.processes(), 0, "{what}");
    }

    /// Another guest in its place.
    fn begin_again(&self) {
        self.world.cli(&["rm", &self.name]).ok();
        self.world.cli(&["create", &self.name]).ok();
        self.counts();
    }

    /// Whoever asks for it gets the guest that there was.
    fn goes_on(&self, counter: u64, what: &str) {
        assert_eq!(self.count().0, counter, "{what}: the same process in it");
        assert_eq!(self.processes(), 1, "{what}");
    }
}

/// Promise 63.
#[test]
fn a_guest_that_is_killed_on_its_way_sleeps_or_has_failed_and_leaves_nothing() {
    let sleeper = Sleeper::turn().taken();
    let cases = [
        // Its state is not whole until it has its name.
        ("standby", Point::QemuStateNamed, Then::Sleeps),
        ("resume", Point::GuestLoaded, Then::Sleeps),
        ("resume", Point::ConnectionsRebuilt, Then::Sleeps),
        ("resume", Point::QemuStateConsumed, Then::Fails),
        ("standby", Point::ConnectionsKept, Then::Fails),
        ("standby", Point::QemuStateBegun, Then::Fails),
    ];
    for (verb, point, then) in cases {
        for daemon_too in [false, true] {
            let what = format!("{}, the daemon too: {daemon_too}", point.name());
            if sleeper.state() == "failed" {
                sleeper.begin_again();
            }
            let (counter, _) = sleeper.count();
            if verb == "resume" {
                sleeper.world.cli(&["standby", &sleeper.name]).ok();
            }
            sleeper.world.daemon().arm(point, "stall");
            let asked = sleeper.asking(verb);
            std::thread::scope(|scope| {
                let asked = scope.spawn(|| asked.attempt());
                sleeper.world.daemon().stalls(point);
                kill(&process(&sleeper));
                if daemon_too {
                    sleeper.world.daemon().kill();
                    sleeper.world.daemon().start(&sleeper.world.host);
                } else {
                    sleeper.world.daemon().release();
                }
                asked.join().expect("no panic");
            });
            match then {
                Then::Sleeps => sleeper.goes_on(counter, &what),
                Then::Fails => sleeper.has_failed(&what),
            }
        }
    }
}

/// Promise 63. Attack P56. The daemon dies between a policy write and the sleep, and during it.
#[test]
fn a_policy_that_was_put_before_daemons_died_is_in_force_after_sleep_and_wake() {
    let sleeper = Sleeper::turn().taken();
    let world = &sleeper.world;
    let (first, put) = (world.site("first"), world.site("put"));
    let path = format!("/v1/sandboxes/{}/policy", sleeper.name);
    let write = |site| {
        let toml = allow(&[site]);
        let toml = ["-H", "content-type: application/toml", "--data-binary", &toml];
        assert_eq!(world.api("PUT", &path, &toml).status, 200);
    };
    let reaches = |site: &Site| {
        let line =
            format!("curl -s -o /dev/null -m 20 -w %{{http_code}} http://{}/ || :", site.name);
        sleeper.sh(&line).ends_with("200")
    };
    let restart = || {
        world.daemon().kill();
        world.daemon().start(&world.host);
    };
    write(&first);
    assert!(reaches(&first) && !reaches(&put), "control");
    write(&put);
    let written = sleeper.shown()["revision"].as_u64().expect("a revision");
    let (counter, _) = sleeper.count();
    restart();
    world.cli(&["standby", &sleeper.name]).ok();
    // Asleep there is no process, and the daemon is not missed.
    restart();
    assert_eq!((sleeper.processes(), &*sleeper.state()), (0, "standby"));
    world.cli(&["resume", &sleeper.name]).ok();
    assert_eq!(sleeper.shown()["revision"], written);
    assert!(reaches(&put) && !reaches(&first), "what was put is in force");
    sleeper.goes_on(counter, "after all that");

    // It ends together with its daemon, awake.
    world.daemon().kill();
    kill(&process(&sleeper));
    world.daemon().start(&world.host);
    sleeper.has_failed("running");
    world.cli(&["rm", &sleeper.name]).ok();
    assert_eq!(traces(world, &sleeper.name), [""; 0]);
}
