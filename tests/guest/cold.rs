//! A real guest of which nothing is left but its disk: it boots from that as another incarnation, and what
//! ended by itself does not.

use std::path::PathBuf;
use std::process::Command;

use fault::Point;
use rusqlite::Connection;
use serde_json::Value;
use world::World;
use world::machine::image;

use crate::asleep::{Caller, PATIENCE, Sleeper};

/// A world whose image is a folder of its own, which a test may build anew.
fn world_of_its_own_image() -> (World, PathBuf) {
    let folder = std::env::temp_dir().join(format!("postern-image-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    for file in ["vmlinuz", "initrd.img", "root.ext4"] {
        let (from, to) = (image().join(file), folder.join(file));
        let words = ["--reflink=auto", "--sparse=always", "--"];
        let copied = Command::new("cp").args(words).arg(from).arg(to).status();
        assert!(copied.expect("cp").success());
    }
    let image = folder.display().to_string();
    // Room for two more of a gigabyte, but not beside this one.
    let world = World::with(&format!(
        "[tenants]\nmemory = \"2G\"\n[sleep]\non_idle = \"never\"\nwake_timeout = \"90s\"\n\
         [qemu]\nboot_timeout = \"3m\"\nimage = {image:?}\n"
    ));
    (world, folder)
}

impl Sleeper {
    fn incarnation(&self) -> u64 {
        self.shown().get("incarnation").and_then(Value::as_u64).expect("a number")
    }

    fn boot_id(&self) -> String {
        self.sh("cat /proc/sys/kernel/random/boot_id")
    }

    fn journal(&self) -> Connection {
        Connection::open(self.world.dir().join("state/postern.db")).expect("the journal")
    }

    /// What a boot of the host does to a guest, as far as a daemon can see it.
    fn host_starts_anew(&self, boot: &str) {
        self.world.daemon().kill();
        self.kill();
        let set = "UPDATE sandbox SET process = json_set(process, '$.host.boot_id', ?1)";
        assert_eq!(self.journal().execute(set, [boot]).expect("changed"), 1);
        self.world.daemon().start(&self.world.host);
    }

    fn kill(&self) {
        let name = format!("-name postern-{}( |$)", self.name);
        let killed = Command::new("pkill").args(["-9", "-f", "--", &name]).status();
        assert!(killed.expect("pkill").success(), "it runs");
        world::poll::eventually("it is gone", PATIENCE, || (self.processes() == 0).then_some(()));
    }
}

/// Promises 65, 66.
#[test]
fn a_guest_whose_memory_is_lost_boots_from_its_disk_as_another_incarnation() {
    let (world, folder) = world_of_its_own_image();
    let sleeper = Sleeper::boot_in(world, &[]);
    sleeper.sh("echo written >/root/kept; echo lost >/run/lost; sync");
    let (first, mut boot) = (sleeper.incarnation(), sleeper.boot_id());
    let (counter, _) = sleeper.count();
    let mut caller = Caller::of(&sleeper);
    assert_eq!(caller.say(b"before\n"), "BEFORE\n");
    sleeper.world.cli(&["standby", &sleeper.name]).ok();

    // Its image is built anew meanwhile: it is none of its business.
    for file in ["vmlinuz", "root.ext4"] {
        std::fs::write(folder.join("new"), "another image").expect("written");
        std::fs::rename(folder.join("new"), folder.join(file)).expect("built");
    }
    assert_eq!(sleeper.count().0, counter, "control: it wakes as it was");
    assert_eq!((sleeper.incarnation(), &sleeper.shown()["cold_boots"]), (first, &0.into()));

    assert_eq!(caller.say(b"after\n"), "AFTER\n", "control: and so does who is connected to it");

    // A byte of its state is changed while it sleeps.
    sleeper.world.cli(&["standby", &sleeper.name]).ok();
    let state = sleeper.world.dir().join("state/sandboxes").join(&sleeper.name).join("state");
    let mut bytes = std::fs::read(&state).expect("saved");
    *bytes.last_mut().expect("not empty") ^= 1;
    std::fs::write(&state, bytes).expect("damaged");
    assert_eq!(
        sleeper.sh("cat /root/kept; cat /run/lost 2>/dev/null || echo none"),
        "written\nnone"
    );
    assert_eq!(caller.rest(), b"", "what was connected to its memory has ended");
    let shown = sleeper.shown();
    let booted = std::mem::replace(&mut boot, sleeper.boot_id());
    assert_ne!(booted, boot, "its memory is new");
    assert!(sleeper.incarnation() > first, "{shown}");
    assert_eq!(shown["cold_boots"], 1, "{shown}");
    let why = shown["cold_reason"].as_str().unwrap_or_default();
    assert!(why.contains("damaged"), "{shown}");
    sleeper.world.event_that(&sleeper.name, "of its boot", |record| {
        let detail = record["detail"].as_str().unwrap_or_default();
        detail.contains("booted cold")
            && detail.contains("damaged")
            && record["incarnation"] == shown["incarnation"]
    });
    let told = sleeper.world.cli(&["show", &sleeper.name]).ok().stdout;
    assert!(told.contains("booted cold") && told.contains("1 times"), "{told}");

    // The host is started anew under one that runs.
    sleeper.host_starts_anew("another");
    assert_eq!(sleeper.shown()["state"], "standby", "until somebody wants it");
    assert_eq!(sleeper.sh("cat /root/kept"), "written");
    assert_eq!(sleeper.shown()["cold_boots"], 2);

    // The daemon dies on the way.
    for point in [Point::ToBeginAnew, Point::BegunAnew, Point::ProcessStarted, Point::AgentGreeted]
    {
        let (name, before) = (point.name(), sleeper.incarnation());
        sleeper.host_starts_anew("another");
        sleeper.world.daemon().arm(point, "die");
        sleeper.ask("resume");
        sleeper.world.daemon().dies(point);
        sleeper.world.daemon().start(&sleeper.world.host);
        sleeper.until(&["standby"], &format!("after {name}"));
        assert_eq!((sleeper.processes(), &*sleeper.sh("cat /root/kept")), (0, "written"), "{name}");
        assert!(sleeper.incarnation() > before, "{name}");
        assert_eq!(sleeper.processes(), 1, "{name}");
    }

    // What ends by itself is not booted again.
    sleeper.world.daemon().kill();
    sleeper.kill();
    sleeper.world.daemon().start(&sleeper.world.host);
    assert_eq!(sleeper.shown()["state"], "failed", "{}", sleeper.shown());

    // But for who asks for that, and only within what its tenant may have.
    let refused = sleeper.world.cli(&["resume", &sleeper.name]);
    assert!(refused.code != 0 && refused.stderr.contains("resume --cold"), "{refused:?}");
    let others = ["one", "two"].map(|_| sleeper.world.fresh_name());
    for other in &others {
        let words = ["create", other, "--driver", "external", "--memory", "1G"];
        sleeper.world.cli(&words).ok();
    }
    let cold = ["resume", &sleeper.name, "--cold"];
    let refused = sleeper.world.cli(&cold);
    assert!(refused.code != 0 && refused.stderr.contains("tenants.memory"), "{refused:?}");
    assert_eq!(sleeper.shown()["state"], "failed", "{}", sleeper.shown());
    for other in &others {
        sleeper.world.cli(&["rm", other]).ok();
    }
    let (before, boots) = (sleeper.incarnation(), sleeper.shown()["cold_boots"].clone());
    sleeper.world.cli(&cold).ok();
    assert_eq!((sleeper.processes(), &*sleeper.sh("cat /root/kept")), (1, "written"));
    let shown = sleeper.shown();
    assert!(sleeper.incarnation() > before && shown["cold_boots"] != boots, "{shown}");
    let why = shown["cold_reason"].as_str().unwrap_or_default();
    assert!(why.contains("asked for after it had failed"), "{shown}");
    let again = sleeper.incarnation();
    sleeper.world.cli(&cold).ok();
    assert_eq!(sleeper.incarnation(), again, "good for one that runs");
    let _ = std::fs::remove_dir_all(folder);
}

/// Promise 65.
#[test]
fn where_a_boot_from_the_disk_is_refused_a_guest_without_its_memory_has_failed() {
    let sleeper = Sleeper::boot(&["--cold-boot", "refused"]);
    sleeper.host_starts_anew("another");
    let shown = sleeper.shown();
    assert_eq!((&shown["state"], &shown["cold_boots"]), (&"failed".into(), &0.into()), "{shown}");
    let refused = sleeper.world.cli(&["resume", &sleeper.name, "--cold"]);
    assert!(refused.code != 0 && refused.stderr.contains("cold_boot"), "{refused:?}");
    assert_eq!(sleeper.shown()["state"], "failed");
}
