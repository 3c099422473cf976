//! A guest with connections that carry something sleeps and wakes, again and again, and neither it nor its
//! far sides see more of that than a pause. One guest for all: each test leaves it running and quiet.

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use fault::Point;
use serde_json::Value;
use world::machine::{Machine, image};
use world::netns::DIRECTORY_PREFIX;
use world::poll::{eventually, throughout};
use world::room::Room;
use world::{Site, World};

use crate::blocks::{Far, Fars, PROGRAM, port};

/// How long anything may take on a busy machine without KVM.
const PATIENCE: Duration = Duration::from_secs(90);
/// When it is idle, as the command line has it.
const IDLE: &str = "4s";
/// Those who want something of a sleeper at once.
const CROWD: usize = 1000;

/// A guest with four connections.
struct Night {
    machine: Machine,
    far: Fars,
    /// What the guest's program said at first: its process, its ports.
    began: Value,
    /// Where the far sides saw it come from.
    peers: [Option<SocketAddr>; 4],
    /// The disk of the journal, the guests' disks and what is saved of them; their memory has another.
    disk: Room,
}

impl Night {
    /// The guest, for one test at a time.
    fn turn() -> (MutexGuard<'static, ()>, &'static Self) {
        static TURN: Mutex<()> = Mutex::new(());
        static NIGHT: OnceLock<Night> = OnceLock::new();
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        (turn, NIGHT.get_or_init(Self::begin))
    }

    fn begin() -> Self {
        let world = World::without_daemon(&format!(
            "memory_dir = \"{DIRECTORY_PREFIX}-{}-memory\"\n\
             [api]\nconnections = {}\n[limits]\nstate_reserve = \"0\"\n\
             [sleep]\non_idle = \"never\"\n[qemu]\nboot_timeout = \"3m\"\nimage = \"{}\"\n",
            std::process::id(),
            CROWD + 100,
            image().display(),
        ));
        let disk = Room::small(&world.dir().join("state"), 256 << 10);
        world.daemon().start(&world.host);
        let site: Site = world.site("far");
        let far = Fars::listen(&world, &site);
        let ports = [port::RAW, port::TLS, port::HTTP, port::INWARD].map(|port| port.to_string());
        let [raw, tls, http, _] = &ports;
        let policy =
            format!("[[rule]]\nallow = [{:?}]\nports = [{raw}, {tls}, {http}]\n", site.name);
        let idle = ["--on-idle", "standby", "--idle-after", IDLE];
        let machine = Machine::boot_with(world, &policy, &idle);
        let line = format!(
            "cat >/root/blocks.py; setsid python3 /root/blocks.py {} {} >/dev/null 2>&1 </dev/null &\n\
             until grep -q :{:04X} /proc/net/tcp; do sleep 0.2; done",
            site.name,
            ports.join(" "),
            port::INWARD
        );
        machine.feed(&line, PROGRAM.as_bytes()).ok();
        far.call(&machine.world, &machine.name);
        far.flow(true);
        let mut night = Self { machine, far, began: Value::Null, peers: [None; 4], disk };
        night.all_go_on("at first");
        night.began = night.told();
        night.peers = night.far.all().map(Far::peer);
        night.quiet();
        night
    }

    fn until(&self, far: &Far, what: &str, mut holds: impl FnMut() -> bool) {
        let what =
            format!("{what} of {}, {} sent and {} got by then", far.name, far.sent(), far.got());
        eventually(&what, PATIENCE, || {
            self.is_right(far);
            holds().then_some(())
        });
    }

    /// Whatever has come to a far side was right.
    fn is_right(&self, far: &Far) {
        if let Some(wrong) = far.wrong() {
            let guest = self.machine.sh("cat /run/blocks").stdout;
            let failed = self.machine.world.records("outcome=fail");
            let (name, sent, got) = (far.name, far.sent(), far.got());
            panic!("{name}, {sent} sent, {got} got: {wrong}; {guest}; {failed:?}");
        }
    }

    /// Each far side sends and hears more.
    fn all_go_on(&self, what: &str) {
        self.far.flow(true);
        for far in self.far.all() {
            let (sent, got) = (far.sent() + 20, far.got() + 20);
            let answered = far.name != "http";
            self.until(far, what, || far.sent() > sent && (!answered || far.got() > got));
        }
    }

    /// What the guest's program has written down.
    fn told(&self) -> Value {
        eventually("the guest has told of all four", PATIENCE, || {
            let told = self.machine.sh("cat /run/blocks").ok().json();
            let all = self.far.all().iter().all(|far| told[far.name]["port"].is_u64());
            all.then_some(told)
        })
    }

    /// Nobody sends, and all that was sent was answered.
    fn quiet(&self) {
        self.far.flow(false);
        for far in self.far.answered() {
            self.until(far, "the last answer", || far.got() == far.sent());
        }
    }

    fn is_woken(&self, wakes: u64, what: &str) {
        eventually(what, PATIENCE, || {
            let shown = self.machine.shown();
            (shown["wakes"] == wakes && shown["state"] == "running").then_some(())
        });
    }

    fn falls_asleep(&self, what: &str) {
        self.machine.until("standby", what);
        assert_eq!(self.machine.processes(), "", "{what}");
    }

    fn resume(&self) {
        self.machine.world.cli(&["resume", &self.machine.name]).ok();
    }

    /// The records of its wakes.
    fn woken(&self) -> usize {
        let records = self.machine.world.records(&format!("sandbox={}", self.machine.name));
        records.iter().filter(|record| record["detail"] == "sandbox woken").count()
    }

    /// Every connection is the one that it was at first, at both ends, and nothing of it was lost.
    fn is_whole(&self) {
        self.quiet();
        eventually("the streamed answer is read", PATIENCE, || {
            (self.told()["http"]["blocks"] == self.far.http.sent()).then_some(())
        });
        let told = self.told();
        assert_eq!(told["pid"], self.began["pid"], "the same program");
        for (far, peer) in self.far.all().into_iter().zip(self.peers) {
            self.is_right(far);
            assert_eq!((far.connections(), far.peer()), (1, peer), "{}", far.name);
            let (said, first) = (&told[far.name], &self.began[far.name]);
            assert_eq!(said["wrong"], Value::Null, "{}: {said}", far.name);
            assert_eq!(said["port"], first["port"], "{}: the same connection", far.name);
        }
        let name = &self.machine.name;
        let ended = self.machine.world.records(&format!("sandbox={name}&outcome=closed"));
        assert_eq!(ended, Vec::<Value>::new(), "no connection has ended");
    }
}

/// Promises 31, 41.
#[test]
fn streams_go_on_over_many_nights_byte_for_byte_on_the_same_connections() {
    let (_turn, night) = Night::turn();
    let (machine, far) = (&night.machine, &night.far);
    let before = machine.wakes();
    let mut wakes = before;
    // In the middle of it all: bytes are on their way both ways, and those of the far sides wake it.
    for round in 0..4 {
        night.all_go_on("before it sleeps");
        machine.standby();
        wakes += 1;
        night.is_woken(wakes, &format!("its far sides wake it, round {round}"));
        night.all_go_on("after it slept");
    }
    // With nothing under way, woken by whoever asks.
    for round in 0..2 {
        night.quiet();
        machine.standby();
        assert_eq!(machine.processes(), "", "round {round}");
        night.resume();
        wakes += 1;
        assert_eq!(machine.wakes(), wakes);
        night.all_go_on("after it slept");
    }
    // By itself, and the first byte of each in turn wakes it.
    for speaks in far.all() {
        night.quiet();
        night.falls_asleep("nothing passes");
        let (sent, got) = (speaks.sent(), speaks.got());
        speaks.flow(true);
        wakes += 1;
        night.is_woken(wakes, &format!("{} wakes it", speaks.name));
        night.until(speaks, "more", || speaks.sent() > sent + 5);
        night.until(speaks, "an answer", || speaks.name == "http" || speaks.got() > got + 5);
    }
    assert!(wakes - before >= 10, "{wakes} nights");
    night.is_whole();
}

/// Promises 31, 41. All queues are full both ways while it sleeps, and who takes what is in them wakes it.
#[test]
fn a_guest_that_waits_for_room_sleeps_and_wakes_when_its_far_side_listens_again() {
    let (_turn, night) = Night::turn();
    let far = &night.far.raw;
    far.be_deaf(true);
    far.flow(true);
    let mut last = 0;
    night.falls_asleep("nothing passes any more");
    night.until(far, "no more", || std::mem::replace(&mut last, far.sent()) == far.sent());
    assert!(far.sent() > far.got() + 48, "more than is on its way elsewhere");
    let wakes = night.machine.wakes();
    far.flow(false);
    assert_eq!(night.machine.shown()["state"], "standby", "control: nobody listens");
    far.be_deaf(false);
    night.is_woken(wakes + 1, "its far side listens");
    night.is_whole();
}

/// Promise 31. Attack P40. Nobody calls it, and nothing but a slow answer passes.
#[test]
fn a_guest_is_awake_while_an_answer_is_streamed_to_it() {
    let (_turn, night) = Night::turn();
    let (machine, http) = (&night.machine, &night.far.http);
    http.flow(true);
    let before = http.sent();
    night.until(http, "an answer", || http.sent() > before);
    let wakes = machine.wakes();
    throughout("it runs", 3 * Duration::from_secs(4), || {
        std::thread::sleep(Duration::from_millis(200));
        machine.shown()["state"] == "running"
    });
    assert_eq!(machine.wakes(), wakes, "it has not slept");
    // Control: without the answer it sleeps.
    http.flow(false);
    night.falls_asleep("the answer pauses");
    http.flow(true);
    night.is_woken(wakes + 1, "the answer goes on");
    night.is_whole();
}

/// Promise 31. It is with the guest, and nobody would come back to wake it for its answer.
#[test]
fn what_comes_just_before_a_guest_is_held_keeps_it_awake_for_its_answer() {
    let (_turn, night) = Night::turn();
    let (machine, raw) = (&night.machine, &night.far.raw);
    night.quiet();
    // It takes its time over the answer.
    let signal = |name: &str| machine.sh(&format!("kill -{name} {}", night.began["pid"])).ok();
    signal("STOP");
    let (wakes, before) = (machine.wakes(), raw.sent());
    let came = |shown: &Value| shown["traffic"]["bytes_in"].as_u64().expect("bytes");
    machine.world.daemon().arm(Point::GuestToHold, "stall");
    machine.world.daemon().stalls(Point::GuestToHold);
    let had = came(&machine.shown());
    raw.flow(true);
    night.until(raw, "a question", || raw.sent() > before);
    raw.flow(false);
    eventually("it is with the guest", PATIENCE, || (came(&machine.shown()) > had).then_some(()));
    machine.world.daemon().release();
    machine.until("running", "it is not put to sleep");
    signal("CONT");
    night.until(raw, "an answer", || raw.got() > before);
    assert_eq!(machine.wakes(), wakes, "it has not slept over it");
    night.is_whole();
}

/// Promise 63. And all of them are answered.
#[test]
fn a_thousand_who_want_a_sleeper_at_once_wake_it_once() {
    let (_turn, night) = Night::turn();
    let machine = &night.machine;
    night.quiet();
    machine.standby();
    let (wakes, woken) = (machine.wakes(), night.woken());
    let socket = machine.world.daemon().socket();
    machine.world.daemon().arm(Point::GuestToLoad, "stall");
    let mut crowd: Vec<UnixStream> = (0..CROWD)
        .map(|number| {
            let (verb, upgrade, body) = match number % 4 {
                0 => ("connect", "upgrade", format!("{{\"port\":{}}}", port::INWARD)),
                1 => ("keep-awake", "close", "{\"for\":\"1s\"}".to_owned()),
                _ => ("resume", "close", String::new()),
            };
            let head = format!(
                "POST /v1/sandboxes/{}/{verb} HTTP/1.1\r\nhost: localhost\r\nconnection: {upgrade}\r\n\
                 upgrade: postern-connect\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
                machine.name,
                body.len()
            );
            let mut one = UnixStream::connect(&socket).expect("connected");
            one.set_read_timeout(Some(PATIENCE)).expect("set");
            one.write_all(format!("{head}{body}").as_bytes()).expect("asked");
            one
        })
        .collect();
    machine.world.daemon().stalls(Point::GuestToLoad);
    machine.world.daemon().release();
    let answers: Vec<[u8; 3]> = crowd
        .iter_mut()
        .map(|one| {
            let (mut version, mut status) = ([0; 9], [0; 3]);
            one.read_exact(&mut version).expect("answered");
            one.read_exact(&mut status).expect("answered");
            status
        })
        .collect();
    let count = |status: &[u8; 3]| answers.iter().filter(|it| *it == status).count();
    assert_eq!((count(b"101"), count(b"200")), (CROWD / 4, 3 * CROWD / 4), "opened, woken");
    drop(crowd);
    assert_eq!((machine.wakes(), night.woken()), (wakes + 1, woken + 1));
    night.all_go_on("after the crowd");
    night.is_whole();
}

/// Promise 63. Nothing is lost, not even a connection.
#[test]
fn a_guest_whose_state_finds_no_room_goes_on_and_sleeps_once_there_is_some() {
    let (_turn, night) = Night::turn();
    let machine = &night.machine;
    night.all_go_on("before");
    let wakes = machine.wakes();
    let path = format!("/v1/sandboxes/{}/standby", machine.name);
    machine.world.daemon().arm(Point::GuestToSave, "stall");
    let asked = machine.world.daemon().request("POST", &path, &[]);
    let refused = std::thread::scope(|scope| {
        let asked = scope.spawn(|| asked.answer());
        machine.world.daemon().stalls(Point::GuestToSave);
        night.disk.fill();
        machine.world.daemon().release();
        asked.join().expect("no panic")
    });
    // Nobody is told that it has gone on until there is room; it may need none meanwhile.
    night.disk.free();
    assert!(refused.status >= 500 && refused.text.contains("space"), "{}", refused.text);
    machine.until("running", "there is no room");
    let reason = machine.shown()["reason"].to_string();
    assert!(reason.contains("space"), "{reason}");
    night.all_go_on("after it was not saved");
    night.quiet();
    machine.standby();
    assert_eq!((machine.processes(), machine.wakes()), (String::new(), wakes), "it slept not once");
    night.resume();
    night.all_go_on("after it slept at last");
    night.is_whole();
}

/// Promise 76. QEMU stops a guest whose own disk finds no room, and does not let it go on by itself.
#[test]
fn a_guest_whose_disk_finds_no_room_stands_still_until_there_is_some_and_sleeps_meanwhile() {
    let (_turn, night) = Night::turn();
    let machine = &night.machine;
    night.all_go_on("before");
    let begin = "dd if=/dev/urandom of=/written bs=1M count=8 && sync && sha256sum /written >/sum; \
                 echo done >/run/wrote";
    for asleep in [false, true] {
        machine.sh("rm -f /written /sum /run/wrote; sync").ok();
        night.disk.fill();
        machine.sh(&format!("( {begin} ) >/dev/null 2>&1 </dev/null &")).ok();
        eventually("it is told why it stands still", PATIENCE, || {
            machine.shown()["reason"].as_str().filter(|why| why.contains("no room")).map(drop)
        });
        assert_eq!(machine.shown()["state"], "running");
        // No verb waits for it: its state finds no room, either, until some is made.
        let path = format!("/v1/sandboxes/{}/standby", machine.name);
        let refused = machine.world.api("POST", &path, &[]);
        assert!(refused.status >= 500, "{}", refused.text);
        night.disk.free();
        if asleep {
            machine.standby();
            assert_eq!(machine.processes(), "", "it sleeps");
            night.resume();
        }
        eventually("it goes on", PATIENCE, || {
            (machine.sh("cat /run/wrote").stdout.trim() == "done").then_some(())
        });
        machine.sh("sha256sum -c /sum").ok();
        eventually("and nothing is said of it", PATIENCE, || {
            machine.shown()["reason"].is_null().then_some(())
        });
        night.all_go_on("after it had no room");
    }
    night.is_whole();
}
