//! A real guest that is in the object store: nothing of it is here, and it comes back as it was, whenever the
//! daemon died on the way, or not at all.

use std::fs;
use std::path::PathBuf;

use fault::{On, Point};
use serde_json::Value;
use world::poll::eventually;

use crate::asleep::{PATIENCE, Sleeper};

impl Sleeper {
    /// What the store has, by key.
    fn keys(&self) -> Vec<PathBuf> {
        let below = |folder: PathBuf| {
            let found = fs::read_dir(folder).into_iter().flatten().flatten();
            found.map(|entry| entry.path()).collect::<Vec<_>>()
        };
        let installations = below(self.world.dir().join("state/store"));
        let keys = installations.into_iter().flat_map(below);
        keys.filter(|key| fs::read_dir(key).is_ok_and(|mut files| files.next().is_some())).collect()
    }

    /// Its files that are here, and not in the store.
    fn files(&self) -> Vec<String> {
        let folder = self.world.dir().join("state/sandboxes").join(&self.name);
        let there = |name: &&str| folder.join(name).exists();
        let names = ["state", "state.fetched", "memory", "disk.qcow2"];
        names.iter().filter(|name| there(name)).map(|name| (*name).to_owned()).collect()
    }

    fn suspend(&self) -> PathBuf {
        self.world.cli(&["suspend", &self.name]).ok();
        assert_eq!((&*self.state(), self.processes()), ("suspended", 0));
        assert_eq!(self.files(), Vec::<String>::new(), "nothing of it is here");
        let keys = self.keys();
        let [key] = &keys[..] else { panic!("one key: {keys:?}") };
        key.clone()
    }

    fn reason(&self) -> String {
        let shown = self.shown();
        shown.get("reason").and_then(Value::as_str).unwrap_or_default().to_owned()
    }
}

/// Promise 69. Attack K01.
#[test]
fn a_guest_in_the_store_comes_back_as_it_was_whenever_the_daemon_died_on_the_way() {
    let sleeper = Sleeper::turn().taken();
    sleeper.sh("echo written >/root/kept");
    let boot = sleeper.sh("cat /proc/sys/kernel/random/boot_id");
    let (counter, mut at) = sleeper.count();
    let key = sleeper.suspend();
    let size = |name: &str| fs::metadata(key.join(name)).expect("there").len();
    let (memory, disk) = (size("memory"), size("disk"));
    println!("in the store: memory {memory} bytes, disk {disk}, state {}", size("state"));
    assert!(memory > 1 << 20 && memory < 200 << 20, "packed, without its holes: {memory}");
    let back = |what: &str, at: &mut u64| {
        let (same, now) = sleeper.count();
        assert_eq!(same, counter, "{what}: the same process");
        assert!(now >= *at, "{what}: {now} after {at}");
        *at = now;
        assert_eq!(sleeper.processes(), 1, "{what}");
    };
    back("once", &mut at);
    assert_eq!(
        sleeper.sh("cat /root/kept; cat /proc/sys/kernel/random/boot_id"),
        format!("written\n{boot}")
    );
    eventually("the store has it for nobody", PATIENCE, || sleeper.keys().is_empty().then_some(()));

    // Another daemon finds it there.
    sleeper.suspend();
    sleeper.world.daemon().kill();
    sleeper.world.daemon().start(&sleeper.world.host);
    assert_eq!(sleeper.state(), "suspended");
    back("by the next daemon", &mut at);

    for point in Point::ALL.iter().copied() {
        let (from, way, verb) = match point.on() {
            On::Suspend => ("running", "resume", "suspend"),
            On::Fetch => ("suspended", "suspend", "resume"),
            _ => continue,
        };
        let name = point.name();
        sleeper.ask(way);
        sleeper.until(&[from], &format!("before {name}"));
        sleeper.world.daemon().arm(point, "die");
        let answer = sleeper.ask(verb);
        sleeper.world.daemon().dies(point);
        sleeper.world.daemon().start(&sleeper.world.host);
        let rests = ["running", "standby", "suspended"];
        let state = sleeper.until(&rests, &format!("after {name}, {answer}"));
        println!("{name}: {state}");
        back(name, &mut at);
    }
    sleeper.world.daemon().kill();
    sleeper.world.daemon().start(&sleeper.world.host);
    eventually("nothing is left of all that", PATIENCE, || sleeper.keys().is_empty().then_some(()));

    // What is damaged there says so, and is as good as it is made again.
    let memory = sleeper.suspend().join("memory");
    let whole = fs::read(&memory).expect("there");
    let mut damaged = whole.clone();
    let middle = damaged.len() / 2;
    *damaged.get_mut(middle).expect("in it") ^= 1;
    fs::write(&memory, damaged).expect("written");
    let ran = sleeper.world.cli(&["exec", &sleeper.name, "--", "true"]);
    assert!(ran.code != 0 && ran.stderr.contains("damaged"), "{ran:?}");
    let reason = sleeper.reason();
    assert!(sleeper.state() == "suspended" && reason.contains("damaged"), "{reason}");
    assert_eq!(sleeper.files(), Vec::<String>::new());
    fs::write(&memory, whole).expect("written");
    back("mended", &mut at);

    // What is gone there is gone.
    let key = sleeper.suspend();
    fs::rename(&key, sleeper.world.dir().join("elsewhere")).expect("moved");
    let ran = sleeper.world.cli(&["exec", &sleeper.name, "--", "true"]);
    assert_ne!(ran.code, 0, "{ran:?}");
    let reason = sleeper.reason();
    assert!(sleeper.state() == "failed" && reason.contains("not in the object store"), "{reason}");
    sleeper.world.cli(&["rm", &sleeper.name]).ok();
}

/// Promise 69.
#[test]
fn an_idle_guest_goes_to_the_store_by_itself_and_is_gone_there_with_its_sandbox() {
    let words = ["--on-idle", "suspend", "--idle-after", "4s"];
    let sleeper = Sleeper::boot(&words);
    let (counter, _) = sleeper.count();
    sleeper.until(&["suspended"], "it is idle");
    assert_eq!(sleeper.count().0, counter, "a command wakes it");
    sleeper.until(&["suspended"], "and it is idle again");
    assert_eq!(sleeper.keys().len(), 1, "control");
    sleeper.world.cli(&["rm", &sleeper.name]).ok();
    eventually("the store has it for nobody", PATIENCE, || sleeper.keys().is_empty().then_some(()));
}
