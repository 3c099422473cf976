//! Disks that are full, and guests that try to fill them.

use std::net::UdpSocket;
use std::path::Path;
use std::time::Instant;

use hickory_proto::rr::RecordType;
use policy::net::GATEWAY_IP;
use serde_json::Value;
use world::client::{self, PATIENT};
use world::poll::eventually;
use world::room::Room;
use world::{Guest, Site, World, allow};

use crate::crash::taps;

fn refused_in_words(world: &World, answer: &world::daemon::Answer) {
    assert_eq!(answer.status, 503, "{}", answer.text);
    let error = &answer.json["error"];
    assert_eq!(error["code"], "unavailable", "{}", answer.text);
    assert!(error["message"].as_str().is_some_and(|it| it.contains("full")), "{}", answer.text);
    assert!(error["fix"].is_string(), "{}", answer.text);
    assert_eq!(world.api("GET", "/v1/health", &[]).status, 200);
}

fn denied(world: &World, guest: &Guest<'_>, site: &Site) {
    let hello = client::client_hello(&world.authority, &site.name);
    let reply = guest.run(|| client::exchange(site.at(443), &[&hello], PATIENT));
    assert_eq!(reply.alert(), Some(client::ACCESS_DENIED), "{reply:?}");
}

/// Promise 53. Attack K02. What cannot be journalled is refused and changes nothing; what is taken away is shut
/// at once and forgotten when there is room.
#[test]
fn on_a_full_state_disk_nothing_is_half_done_and_it_goes_on_when_there_is_room() {
    let world = World::without_daemon("[limits]\nstate_reserve = \"0\"\n");
    let room = Room::small(&world.dir().join("state"), 2048);
    world.daemon().start(&world.host);
    let (api, other) = (world.site("api"), world.site("other"));
    let (guest, doomed) = (world.guest(&allow(&[&api])), world.guest(&allow(&[&api])));
    guest.reaches(&api);
    doomed.reaches(&api);
    let before = taps(&world);
    room.fill();
    let name = world.fresh_name();
    refused_in_words(&world, &world.create(&name, "default", ""));
    assert_eq!(world.api("GET", &format!("/v1/sandboxes/{name}"), &[]).status, 404);
    assert_eq!(taps(&world), before);
    refused_in_words(&world, &guest.set_policy(&allow(&[&other])));
    let shown = world.api("GET", &format!("/v1/sandboxes/{}/policy", guest.name), &[]);
    assert!(shown.text.contains(&api.name) && !shown.text.contains(&other.name), "{}", shown.text);
    guest.reaches(&api);
    denied(&world, &guest, &other);
    let path = format!("/v1/sandboxes/{}", doomed.name);
    refused_in_words(&world, &world.api("DELETE", &path, &[]));
    let opened = world.origin.connections(api.ip).len();
    assert!(doomed.run(|| client::connect(api.at(443), client::AT_ONCE / 4)).is_err());
    assert_eq!(world.origin.connections(api.ip).len(), opened, "it is shut all the same");
    assert_eq!(world.api("GET", &path, &[]).json["state"], "deleting");
    room.free();
    eventually("what was begun is finished", PATIENT, || {
        (world.api("GET", &path, &[]).status == 404).then_some(())
    });
    assert_eq!(world.create(&name, "default", "").status, 201);
    assert_eq!(guest.set_policy(&allow(&[&other])).status, 200);
    guest.reaches(&other);
    denied(&world, &guest, &api);
    assert_eq!(taps(&world).len(), 2);
    // And when the daemon dies over it, the next one finds no room, says so and does not start.
    room.fill();
    let path = format!("/v1/sandboxes/{name}");
    refused_in_words(&world, &world.api("DELETE", &path, &[]));
    world.daemon().kill();
    let config = world.dir().join("postern.toml");
    let program = world::daemon::program();
    let mut serve = world.host.bare_command(&program.to_string_lossy());
    let ran = serve.args(["serve", "--config"]).arg(config).output().expect("run postern");
    let said = String::from_utf8_lossy(&ran.stderr).into_owned();
    assert!(!ran.status.success() && said.contains("state") && said.contains("space"), "{said}");
    assert!(guest.run(|| client::connect(other.at(443), client::AT_ONCE / 4)).is_err());
    room.free();
    world.daemon().start(&world.host);
    guest.reaches(&other);
    // The journal never heard of the removal, so the next one says what is left of it.
    assert_eq!(world.api("GET", &path, &[]).json["state"], "failed");
    assert_eq!(world.api("DELETE", &path, &[]).status, 204);
    assert_eq!(taps(&world), [guest.slot.tap()]);
    drop((guest, doomed));
    world.daemon().kill();
}

/// Promises 53, 60. Attack K02. What fills up with the disks of guests takes no more of them, before the journal
/// has no room; what is there goes on, and goes.
#[test]
fn a_sandbox_is_not_made_on_a_state_disk_that_has_less_free_than_is_kept() {
    let world = World::without_daemon("[limits]\nstate_reserve = \"2M\"\n");
    let _room = Room::small(&world.dir().join("state"), 4096);
    world.daemon().start(&world.host);
    let (api, other) = (world.site("api"), world.site("other"));
    let (guest, doomed) = (world.guest(&allow(&[&api])), world.guest(&allow(&[&api])));
    let disk = world.dir().join("state/grown");
    std::fs::write(&disk, vec![0; 2 << 20]).expect("there is room");
    let name = world.fresh_name();
    let refused = world.create(&name, "default", "");
    assert_eq!(refused.status, 507, "{}", refused.text);
    let error = &refused.json["error"];
    assert_eq!(
        (&error["code"], &error["field"]),
        (&"storage".into(), &"limits.state_reserve".into())
    );
    assert!(error["fix"].as_str().is_some_and(|fix| fix.contains("state_reserve")), "{error}");
    assert_eq!(world.api("GET", &format!("/v1/sandboxes/{name}"), &[]).status, 404);
    guest.reaches(&api);
    assert_eq!(guest.set_policy(&allow(&[&other])).status, 200);
    guest.reaches(&other);
    let removed = world.api("DELETE", &format!("/v1/sandboxes/{}", doomed.name), &[]);
    assert_eq!(removed.status, 204, "{}", removed.text);
    std::fs::remove_file(&disk).expect("it goes");
    assert_eq!(world.create(&name, "default", "").status, 201, "there is room again");
    drop((guest, doomed));
    world.daemon().kill();
}

/// The journal, as it stands on disk.
fn journal(world: &World) -> rusqlite::Connection {
    let path = world.dir().join("state/postern.db");
    let journal = rusqlite::Connection::open(path).expect("the journal");
    journal.busy_timeout(PATIENT).expect("a timeout");
    journal
}

/// From now on the journal takes no state of a sandbox for which `when` holds.
fn refuse_states(world: &World, when: &str) {
    let trigger = format!(
        "CREATE TRIGGER full BEFORE UPDATE ON sandbox WHEN {when} \
         BEGIN SELECT RAISE(ABORT, 'database or disk is full'); END"
    );
    journal(world).execute_batch(&trigger).expect("a journal that refuses");
}

fn accept_states(world: &World) {
    journal(world).execute_batch("DROP TRIGGER full").expect("a journal that takes all");
}

fn noted(world: &World, name: &str) -> String {
    let state = "SELECT state FROM sandbox WHERE name = ?1";
    journal(world).query_row(state, [name], |row| row.get(0)).expect("a sandbox")
}

fn state(world: &World, name: &str) -> (u16, Option<String>) {
    let shown = world.api("GET", &format!("/v1/sandboxes/{name}"), &[]);
    (shown.status, shown.json["state"].as_str().map(str::to_owned))
}

/// Promises 21, 53. A takeover has nothing to write that the journal does not know: sandboxes that run go on.
#[test]
fn a_takeover_that_cannot_be_journalled_stops_no_running_sandbox() {
    let world = World::new();
    let api = world.site("api");
    let guest = world.guest(&allow(&[&api]));
    guest.reaches(&api);
    world.daemon().kill();
    refuse_states(&world, "true");
    world.daemon().start(&world.host);
    assert_eq!(state(&world, &guest.name), (200, Some("running".to_owned())));
    guest.reaches(&api);
    accept_states(&world);
    world.daemon().kill();
    world.daemon().start(&world.host);
    assert_eq!(state(&world, &guest.name), (200, Some("running".to_owned())));
    guest.reaches(&api);
}

/// Promises 21, 53. What runs without being journalled, the next daemon would take for half made and remove.
#[test]
fn a_creation_that_cannot_be_journalled_as_running_is_refused_and_undone() {
    let world = World::new();
    let api = world.site("api");
    let before = taps(&world);
    refuse_states(&world, "NEW.state = 'running'");
    let name = world.fresh_name();
    let made = world.create(&name, "default", "");
    assert!((500..=599).contains(&made.status), "{} {}", made.status, made.text);
    assert_eq!(state(&world, &name).0, 404);
    assert_eq!(taps(&world), before);
    accept_states(&world);
    let guest = world.guest(&allow(&[&api]));
    guest.reaches(&api);
    world.daemon().kill();
    world.daemon().start(&world.host);
    assert_eq!(state(&world, &guest.name), (200, Some("running".to_owned())));
    guest.reaches(&api);
}

/// Promise 53. What the journal missed while it had no room is written when it has.
#[test]
fn a_state_that_could_not_be_journalled_is_journalled_when_there_is_room() {
    let world = World::new();
    let name = world.fresh_name();
    let made = world.create(&name, "default", "");
    assert_eq!(made.status, 201, "{}", made.text);
    world.daemon().kill();
    let tap = made.json["tap"].as_str().expect("a tap");
    let gone = world.taps.command("ip").args(["link", "delete", tap]).status().expect("ip");
    assert!(gone.success());
    refuse_states(&world, "true");
    world.daemon().start(&world.host);
    assert_eq!(state(&world, &name), (200, Some("failed".to_owned())));
    assert_eq!(noted(&world, &name), "running", "control: it could not be written");
    accept_states(&world);
    eventually("it is written", PATIENT, || (noted(&world, &name) == "failed").then_some(()));
}

/// The gaps that the audit tells of.
fn gaps(world: &World) -> Vec<Value> {
    world.records("kind=gap")
}

/// How many records they say are missing.
fn counted(gaps: &[Value]) -> u64 {
    gaps.iter().map(|gap| gap["count"].as_u64().expect("each counts")).sum()
}

fn audit_lost(world: &World) -> u64 {
    world.api("GET", "/v1/health", &[]).json["audit_lost"].as_u64().expect("a count")
}

/// Promise 54. A full audit disk holds up nothing, and what is missing is told in its place.
#[test]
fn on_a_full_audit_disk_traffic_goes_on_and_a_gap_is_told_when_there_is_room() {
    let world = World::without_daemon("[audit]\nfile_size = \"64K\"\ntotal_size = \"10M\"\n");
    let room = Room::small(&world.dir().join("audit"), 256);
    world.daemon().start(&world.host);
    let (api, sink) = (world.site("api"), world.attacker());
    let guest = world.guest_of("acme", &allow(&[&api]));
    denied(&world, &guest, &sink);
    let lost = || audit_lost(&world);
    for restarted in [false, true] {
        if restarted {
            world.daemon().kill();
        }
        room.fill();
        if restarted {
            world.daemon().start(&world.host);
        }
        let before = gaps(&world).len();
        // What is left of a block may still take a record or two.
        eventually("records are lost", PATIENT, || {
            denied(&world, &guest, &sink);
            (lost() > 0).then_some(())
        });
        guest.reaches(&api);
        denied(&world, &guest, &sink);
        room.free();
        let told = eventually("the gap is told", PATIENT, || {
            let told = gaps(&world);
            let of_tenant = |gap: &&Value| gap["tenant"] == "acme";
            (told.len() > before).then(|| told.iter().rfind(of_tenant).cloned())?
        });
        assert!(told["micros"].is_u64(), "{told}");
        eventually("the gaps count all that was lost", PATIENT, || {
            (counted(&gaps(&world)[before..]) == lost()).then_some(())
        });
        let detail = told["detail"].as_str().expect("why");
        assert!(detail.contains("could not be written") && detail.contains(" deny"), "{told}");
        denied(&world, &guest, &sink);
        guest.event(&[("outcome", "deny"), ("name", &sink.name)]);
    }
    assert_eq!(world.sent_to(sink.ip), []);
    drop(guest);
    world.daemon().kill();
}

/// Promise 54. What a daemon could not tell before it ended, the next one tells: once, of whom, and when.
#[test]
fn what_a_full_audit_disk_kept_from_being_told_the_next_daemon_tells() {
    let world = World::without_daemon("[audit]\nfile_size = \"64K\"\ntotal_size = \"10M\"\n");
    let room = Room::small(&world.dir().join("audit"), 256);
    world.daemon().start(&world.host);
    let sink = world.attacker();
    let guest = world.guest_of("acme", "");
    for killed in [false, true] {
        let all = gaps(&world).len();
        room.fill();
        // What is left of a block may still take a record or two, and then that of a gap.
        let (before, lost) = eventually("what is lost cannot be told", PATIENT * 6, || {
            denied(&world, &guest, &sink);
            let before = gaps(&world).len();
            // What is joined is written a second later, and what is lost is kept once a second.
            std::thread::sleep(std::time::Duration::from_secs(4));
            let told = gaps(&world);
            let lost = audit_lost(&world) - counted(&told[all..]);
            (lost > 0 && told.len() == before).then_some((before, lost))
        });
        match killed {
            true => world.daemon().kill(),
            false => assert_eq!(world.daemon().terminate(), Some(0)),
        }
        room.free();
        world.daemon().start(&world.host);
        let told = eventually("the gap is told", PATIENT, || {
            let told = gaps(&world).split_off(before);
            (counted(&told) >= lost).then_some(told)
        });
        assert_eq!(counted(&told), lost, "{told:?}");
        let [of_tenant] = &told[..] else { panic!("one gap: {told:?}") };
        assert_eq!(of_tenant["tenant"], "acme", "{of_tenant}");
        assert_eq!(of_tenant["sandbox"], *guest.name, "{of_tenant}");
        assert_eq!(audit_lost(&world), 0, "this daemon lost nothing");
        world.daemon().terminate();
        world.daemon().start(&world.host);
        denied(&world, &guest, &sink);
        guest.event(&[("outcome", "deny"), ("name", &sink.name)]);
        assert_eq!(counted(&gaps(&world)[before..]), lost, "once");
    }
    drop(guest);
    world.daemon().kill();
}

fn size(dir: &Path) -> u64 {
    let files = std::fs::read_dir(dir).expect("the audit");
    files.map(|file| file.expect("a file").metadata().map_or(0, |found| found.len())).sum()
}

/// Kilobytes the daemon holds.
fn memory(world: &World) -> u64 {
    let pid = world.daemon().pid().expect("it runs");
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("its status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("its memory");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

/// Promise 50. Attack K06. A flood of denied names, no two alike, costs a bounded piece of memory and
/// disk, every one of them is counted, and another tenant's records stay.
#[test]
fn a_flood_of_denied_names_is_bounded_on_disk_and_in_memory_and_counted() {
    const NAMES: usize = 20_000;
    const HELLOS: usize = 300;
    /// Different ones of a sandbox that are told of by themselves, and what the others are joined to.
    const TOLD_A_SECOND: usize = 55;
    let world = World::with("[audit]\nfile_size = \"64K\"\ntotal_size = \"512K\"\n");
    let (api, sink) = (world.site("api"), world.attacker());
    let quiet = world.guest_of("quiet", &allow(&[&api]));
    let loud = world.guest_of("loud", "");
    denied(&world, &quiet, &sink);
    quiet.reaches(&api);
    quiet.event(&[("outcome", "deny"), ("name", &sink.name)]);
    let of_quiet = || world.records("tenant=quiet").len();
    eventually("the connection that was allowed has ended", PATIENT, || {
        let ended = |record: &Value| record["outcome"] == "closed";
        world.events(&quiet.name).iter().any(ended).then_some(())
    });
    let (kept, held, written) = (of_quiet(), memory(&world), size(&world.dir().join("audit")));
    let began = Instant::now();
    let answered = loud.run(|| {
        let socket = UdpSocket::bind("0.0.0.0:0").expect("bind");
        socket.set_read_timeout(Some(client::AT_ONCE)).expect("a limit");
        socket.connect((GATEWAY_IP, 53)).expect("connect");
        for n in 0..NAMES {
            let name = format!("{n}-{}.denied.example", "x".repeat(40));
            let query = client::query(&name, RecordType::A);
            socket.send(&query.to_vec().expect("a query")).expect("send");
            if n % 16 == 0 {
                // A socket whose buffer is full loses questions that nobody hears of.
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        }
        std::iter::from_fn(|| socket.recv(&mut [0; 1500]).ok()).count()
    });
    for n in 0..HELLOS {
        let hello = client::client_hello(&world.authority, &format!("h{n}.denied.example"));
        let reply = loud.run(|| client::exchange(sink.at(443), &[&hello], PATIENT));
        assert_eq!(reply.alert(), Some(client::ACCESS_DENIED), "{n}: {reply:?}");
    }
    let seconds = usize::try_from(began.elapsed().as_secs()).expect("few") + 2;
    let sum = |kind: &str| {
        let records = world.events(&loud.name);
        let denied: Vec<&Value> = records.iter().filter(|one| one["kind"] == kind).collect();
        let sum: u64 = denied.iter().map(|one| one["count"].as_u64().unwrap_or(1)).sum();
        (usize::try_from(sum).expect("few"), denied.len())
    };
    assert!(answered > 100, "control: {answered} were answered");
    let questions = eventually("all that were answered are counted", PATIENT, || {
        Some(sum("dns")).filter(|(sum, _)| *sum >= answered)
    });
    let hellos = eventually("each hello is counted", PATIENT, || {
        Some(sum("connection")).filter(|(sum, _)| *sum >= HELLOS)
    });
    assert!(questions.0 <= NAMES && hellos.0 == HELLOS, "once each: {questions:?} {hellos:?}");
    let told = questions.1 + hellos.1;
    assert!(told <= seconds * TOLD_A_SECOND, "{told} records in {seconds} s");
    let (grown, more) = (memory(&world).saturating_sub(held), size(&world.dir().join("audit")));
    assert!(grown < 64 << 10, "{grown} kB more in memory");
    assert!(more <= 512 << 10, "{more} bytes, {written} before");
    assert!(of_quiet() >= kept, "what was recorded of another tenant stays");
    println!("{questions:?} {hellos:?}: {grown} kB of memory, {written} bytes became {more}");
}
