//! Snapshots of a real guest: it goes on as it was, and sandboxes that are made of one go on from there, each as
//! another one.

use std::path::PathBuf;
use std::thread;

use fault::Point;
use serde_json::Value;
use world::World;
use world::machine::image;
use world::poll::eventually;

use crate::asleep::{Caller, PATIENCE, Sleeper};

fn world() -> World {
    let image = image().display().to_string();
    World::with(&format!(
        "[sleep]\non_idle = \"never\"\nwake_timeout = \"90s\"\n[qemu]\nimage = {image:?}\n"
    ))
}

/// Connections to port 7000 that a guest believes in.
const OPEN: &str = "awk '$2 ~ /:1B58$/ && $4 == \"01\"' /proc/net/tcp | wc -l";

impl Sleeper {
    /// The same in a sandbox of this name.
    fn sh_in(&self, name: &str, line: &str) -> String {
        let ran = self.world.cli(&["exec", name, "--", "sh", "-c", line]);
        assert_eq!(ran.code, 0, "{name}: {ran:?}\n{}", self.world.daemon().log_end());
        ran.stdout.trim().to_owned()
    }

    fn snapshots(&self) -> Vec<Value> {
        let listed = self.world.cli(&["snapshots", &self.name, "--json"]).ok().json();
        listed["snapshots"].as_array().expect("a list").clone()
    }

    /// What is kept of snapshots: in the store, and of their images.
    fn kept(&self) -> Vec<PathBuf> {
        let below = |folder: PathBuf| {
            let found = std::fs::read_dir(folder).into_iter().flatten().flatten();
            found.map(|entry| entry.path()).collect::<Vec<_>>()
        };
        let state = self.world.dir().join("state");
        let keys = below(state.join("store")).into_iter().flat_map(below);
        let full = |key: &PathBuf| !below(key.clone()).is_empty();
        keys.chain(below(state.join("snapshots"))).filter(full).collect()
    }
}

/// Promises 70, 71.
#[test]
fn a_snapshot_leaves_its_guest_as_it_was_and_clones_of_it_go_on_from_there_as_others() {
    let sleeper = Sleeper::boot_in(world(), &[]);
    let (world, name) = (&sleeper.world, sleeper.name.as_str());
    sleeper.sh("echo then >/root/kept; echo then >/run/kept");
    let (counter, at) = sleeper.count();
    let mut caller = Caller::of(&sleeper);
    assert_eq!(caller.say(b"before\n"), "BEFORE\n");
    let before = sleeper.shown();
    world.cli(&["snapshot", name, "then"]).ok();
    assert_eq!(caller.say(b"after\n"), "AFTER\n", "its connections go on");
    let (same, now) = sleeper.count();
    assert!(same == counter && now >= at, "and its processes");
    let shown = sleeper.shown();
    assert_eq!(
        (&shown["incarnation"], &shown["state"]),
        (&before["incarnation"], &"running".into())
    );
    let [snapshot] = &sleeper.snapshots()[..] else { panic!("one") };
    println!("{snapshot}");
    assert_eq!((&snapshot["name"], &snapshot["sandbox"]), (&"then".into(), &name.into()));
    assert_eq!(snapshot["incarnation"], before["incarnation"]);
    assert!(snapshot["bytes"].as_u64().is_some_and(|bytes| bytes > 1 << 20), "{snapshot}");
    let again = world.cli(&["snapshot", name, "then"]);
    assert!(again.code != 0 && again.stderr.contains("is taken"), "{again:?}");
    assert_eq!(sleeper.count().0, counter, "what is refused leaves it as it was, too");

    // Of one that sleeps, which sleeps on.
    world.cli(&["standby", name]).ok();
    world.cli(&["snapshot", name, "asleep"]).ok();
    assert_eq!((sleeper.processes(), &*sleeper.state()), (0, "standby"));
    let unwoken =
        |record: &Value| record["detail"].as_str().is_some_and(|it| it.contains("not woken"));
    assert!(!world.events(name).iter().any(unwoken), "and that is no failure");
    world.cli(&["snapshot", "rm", "asleep"]).ok();
    assert_eq!(caller.say(b"awake\n"), "AWAKE\n");

    sleeper.sh("echo now >/root/kept; echo now >/run/kept");
    // Two at once.
    let clones = ["one", "two"].map(|clone| format!("{name}-{clone}"));
    thread::scope(|scope| {
        for clone in &clones {
            scope.spawn(move || world.cli(&["clone", "then", clone]).ok());
        }
    });
    assert_eq!(sleeper.sh(OPEN), "1", "control: who is connected to the parent still is");
    const DRAWN: &str = "cat /proc/sys/kernel/random/uuid; head -c 16 /dev/urandom | od -An -tx1";
    let mut drawn = vec![sleeper.sh(DRAWN)];
    let mut incarnations = vec![before["incarnation"].clone()];
    for clone in &clones {
        assert_eq!(sleeper.sh_in(clone, "cat /root/kept /run/kept"), "then\nthen");
        let told = sleeper.sh_in(clone, "cat /run/count");
        assert_eq!(told.split(' ').next(), Some(&*counter.to_string()), "the same process goes on");
        assert_eq!(sleeper.sh_in(clone, OPEN), "0", "the parent's connections are not its own");
        drawn.push(sleeper.sh_in(clone, DRAWN));
        let shown = world.api("GET", &format!("/v1/sandboxes/{clone}"), &[]).json;
        incarnations.push(shown["incarnation"].clone());
        world.event_that(clone, "of its making", |record| {
            let detail = record["detail"].as_str().unwrap_or_default();
            detail.contains("cloned from snapshot then") && detail.contains(name)
        });
    }
    for (n, one) in drawn.iter().enumerate() {
        assert!(!drawn[..n].contains(one), "{drawn:?}");
        assert!(!incarnations[..n].contains(&incarnations[n]), "{incarnations:?}");
    }
    assert_eq!(caller.say(b"still\n"), "STILL\n");
    assert_eq!(sleeper.sh("cat /root/kept /run/kept"), "now\nnow", "nothing of theirs is its own");

    // A daemon that dies on the way leaves a snapshot or none, and the guest goes on by itself.
    world.cli(&["rm", &clones[1]]).ok();
    drop(caller);
    for (point, taken) in [(Point::SnapshotToNote, false), (Point::SnapshotNoted, true)] {
        let path = format!("/v1/sandboxes/{name}/snapshots");
        world.daemon().arm(point, "die");
        world.daemon().request("POST", &path, &["--json", "{\"name\":\"later\"}"]).attempt();
        world.daemon().dies(point);
        world.daemon().start(&world.host);
        sleeper.until(&["running"], point.name());
        assert_eq!(sleeper.count().0, counter, "{}", point.name());
        let names = sleeper.snapshots();
        assert_eq!(names.iter().any(|one| one["name"] == "later"), taken, "{}", point.name());
        let keys = if taken { 4 } else { 2 };
        let what = format!("what nobody has is forgotten after {}", point.name());
        eventually(&what, PATIENCE, || (sleeper.kept().len() == keys).then_some(()));
    }
    // And a clone that is one, or has never been heard of.
    world.cli(&["rm", name]).ok();
    for (point, made) in [(Point::CloneToInsert, false), (Point::CloneInserted, true)] {
        let asked = format!("{{\"name\":\"{}\"}}", clones[1]);
        world.daemon().arm(point, "die");
        world.daemon().request("POST", "/v1/snapshots/then/clone", &["--json", &asked]).attempt();
        world.daemon().dies(point);
        world.daemon().start(&world.host);
        let there = world.api("GET", &format!("/v1/sandboxes/{}", clones[1]), &[]).status == 200;
        assert_eq!(there, made, "{}", point.name());
    }
    // The snapshot goes; what goes on from it, asleep or not, does so.
    world.cli(&["snapshot", "rm", "then", "later"]).ok();
    let gone = world.cli(&["clone", "then", &format!("{name}-three")]);
    assert!(gone.code == 3 && gone.stderr.contains("no snapshot"), "{gone:?}");
    for clone in &clones {
        assert_eq!(sleeper.sh_in(clone, "cat /run/kept"), "then", "{clone}");
    }
    eventually("nobody has any of it", PATIENCE, || sleeper.kept().is_empty().then_some(()));
    for clone in &clones {
        world.cli(&["rm", clone]).ok();
    }
}

/// Promise 72.
#[test]
fn a_guest_goes_back_to_a_snapshot_whole_and_nothing_of_what_it_was_goes_on() {
    let sleeper = Sleeper::boot_in(world(), &[]);
    let (world, name) = (&sleeper.world, sleeper.name.as_str());
    let incarnation = || sleeper.shown()["incarnation"].as_u64().expect("a number");
    let write =
        |what: &str| sleeper.sh(&format!("echo {what} >/root/kept; echo {what} >/run/kept"));
    let kept = || sleeper.sh("cat /root/kept /run/kept");
    const DRAWN: &str = "cat /proc/sys/kernel/random/uuid";
    write("then");
    let (counter, first) = (sleeper.count().0, incarnation());
    world.cli(&["snapshot", name, "then"]).ok();
    write("now");
    let mut caller = Caller::of(&sleeper);
    assert_eq!(caller.say(b"before\n"), "BEFORE\n");
    // What is damaged changes nothing.
    let [memory] = &sleeper
        .kept()
        .iter()
        .map(|key| key.join("memory"))
        .filter(|it| it.exists())
        .collect::<Vec<_>>()[..]
    else {
        panic!("one snapshot")
    };
    let whole = std::fs::read(memory).expect("there");
    let mut damaged = whole.clone();
    *damaged.last_mut().expect("not empty") ^= 1;
    std::fs::write(memory, damaged).expect("written");
    let refused = world.cli(&["rollback", name, "then"]);
    assert!(refused.code != 0 && refused.stderr.contains("damaged"), "{refused:?}");
    assert_eq!((kept().as_str(), incarnation()), ("now\nnow", first));
    assert_eq!(caller.say(b"after\n"), "AFTER\n", "it runs on as it was");
    std::fs::write(memory, whole).expect("mended");

    let mut drawn = Vec::new();
    let mut back = |what: &str| {
        assert_eq!((kept().as_str(), sleeper.count().0), ("then\nthen", counter), "{what}");
        let uuid = sleeper.sh(DRAWN);
        assert!(!drawn.contains(&uuid), "{what}: {uuid} in {drawn:?}");
        drawn.push(uuid);
        assert_eq!(sleeper.processes(), 1, "{what}");
    };
    world.cli(&["rollback", name, "then"]).ok();
    assert!(incarnation() > first);
    back("of one that runs");
    assert_eq!(caller.rest(), b"", "what was connected to the present has ended");
    world.event_that(name, "of going back", |record| {
        record["detail"].as_str().is_some_and(|it| it.contains("rolled back to snapshot then"))
    });
    write("now");
    world.cli(&["standby", name]).ok();
    world.cli(&["rollback", name, "then"]).ok();
    back("of one that sleeps");

    for (point, after) in [(Point::RewindToNote, false), (Point::RewindNoted, true)] {
        write("now");
        let (path, before) = (format!("/v1/sandboxes/{name}/rollback"), incarnation());
        world.daemon().arm(point, "die");
        world.daemon().request("POST", &path, &["--json", "{\"snapshot\":\"then\"}"]).attempt();
        world.daemon().dies(point);
        world.daemon().start(&world.host);
        assert_eq!(incarnation() > before, after, "{}", point.name());
        if after {
            back(point.name());
        } else {
            assert_eq!(kept(), "now\nnow", "{}", point.name());
        }
    }
    world.cli(&["rm", name]).ok();
    world.cli(&["snapshot", "rm", "then"]).ok();
    eventually("nobody has any of it", PATIENCE, || sleeper.kept().is_empty().then_some(()));
}
