//! A real guest that is in the object store: nothing of it is here, and it comes back as it was, whenever the
//! daemon died on the way, or not at all.

use std::fs;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use fault::{On, Point};
use serde_json::{Value, json};
use world::World;
use world::machine::image;
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

    fn post(&self, verb: &str, body: &Value) {
        let path = format!("/v1/sandboxes/{}/{verb}", self.name);
        let answer = self.world.api("POST", &path, &["--json", &body.to_string()]);
        assert_eq!(answer.status, 200, "{verb}: {}", answer.text);
    }

    /// What the audit says became of it, in order.
    fn became(&self) -> Vec<String> {
        let events = self.world.events(&self.name);
        let detail = events.iter().filter_map(|event| event.get("detail")?.as_str());
        detail.filter(|detail| detail.starts_with("sandbox ")).map(str::to_owned).collect()
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
    let keys = sleeper.keys();
    let [key] = &keys[..] else { panic!("one key: {keys:?}") };

    // Promise 64. It comes back no further than its time goes, and may be given more meanwhile: whoever opens
    // this waits until somebody writes.
    let memory = key.join("memory");
    fs::remove_file(&memory).expect("it was there");
    assert!(Command::new("mkfifo").arg(&memory).status().expect("mkfifo").success());
    sleeper.post("renew", &json!({ "ttl": "10m" }));
    let mut wakes = sleeper.world.daemon().command(&["resume", &sleeper.name]);
    let mut wakes = wakes.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it runs");
    sleeper.until(&["resuming"], "it is being got back");
    sleeper.post("renew", &json!({ "ttl": "2s" }));
    sleeper.until(&[""], "its time is over");
    let became = sleeper.became();
    assert!(became.iter().any(|what| what.contains("its time is over")), "{became:?}");
    assert!(!wakes.wait().expect("it ended").success());
    // Who waited there gives up.
    fs::File::options().read(true).write(true).open(&memory).expect("opened");
    fs::remove_file(&memory).expect("it was there");
    eventually("the store has it for nobody", PATIENCE, || sleeper.keys().is_empty().then_some(()));
}

/// Promise 64. However long the store takes, and whoever else has things taken by it.
#[test]
fn one_that_the_store_has_not_taken_yet_hears_its_alarm_its_renewal_and_its_end() {
    let credentials = std::env::temp_dir().join(format!("postern-store-{}", std::process::id()));
    let image = image().display().to_string();
    let world = World::without_daemon(&format!(
        "[sleep]\non_idle = \"never\"\nwake_timeout = \"90s\"\n[qemu]\nimage = {image:?}\n\
         [store]\nurl = \"s3://bucket/prefix\"\ncredentials = {credentials:?}\n"
    ));
    // Takes whoever comes and never answers.
    let silent = world.host.run(|| TcpListener::bind("127.0.0.1:0").expect("a port"));
    let port = silent.local_addr().expect("its address").port();
    std::thread::spawn(move || {
        let held: Vec<_> = silent.incoming().collect();
        drop(held);
    });
    let told = format!(
        "AWS_ACCESS_KEY_ID=a\nAWS_SECRET_ACCESS_KEY=b\nAWS_REGION=us-east-1\n\
         AWS_ENDPOINT=http://127.0.0.1:{port}\nAWS_ALLOW_HTTP=true\n"
    );
    fs::write(&credentials, told).expect("written");
    world.daemon().start(&world.host);
    fs::remove_file(&credentials).expect("it was read");
    let sleeper = Sleeper::boot_in(world, &["--on-idle", "suspend", "--idle-after", "600s"]);
    let (counter, at) = sleeper.count();
    // What it may not have waited for: the store's failure.
    let never_failed = || {
        let became = sleeper.became();
        assert!(!became.iter().any(|what| what.contains("not suspended")), "{became:?}");
        became
    };
    sleeper.post("standby", &json!({ "wake_in": "30s" }));
    sleeper.until(&["suspending"], "the store does not answer");
    sleeper.until(&["running"], "its alarm");
    let became = never_failed();
    assert!(became.iter().any(|what| what.starts_with("sandbox woken")), "{became:?}");
    let (same, now) = sleeper.count();
    assert!(same == counter && now >= at, "{same} {now} after {counter} {at}");

    sleeper.post("standby", &json!({}));
    sleeper.until(&["suspending"], "and again");
    sleeper.post("renew", &json!({ "ttl": "2s" }));
    sleeper.until(&[""], "its time is over");
    let became = never_failed();
    assert!(became.iter().any(|what| what.contains("its time is over")), "{became:?}");
    assert_eq!(sleeper.processes(), 0);
}
