//! The daemon dies at every step it has, and the next one finds a world that is whole: each sandbox
//! wholly there, with its policy, or wholly gone, and the journal, the kernel and the disk agree.

use std::collections::BTreeSet;

use fault::{On, Point};
use policy::Slot;
use serde_json::json;
use world::client::{self, AT_ONCE, PATIENT};
use world::poll::eventually;
use world::{Guest, Site, World, allow};

use crate::crash::taps;
use crate::removal::inventory;

fn points(on: On) -> impl Iterator<Item = Point> {
    let mut points = Point::ALL.iter().copied().filter(move |point| point.on() == on).peekable();
    assert!(points.peek().is_some(), "no point on {on:?}");
    points
}

/// What the journal has: sandboxes, and policies of sandboxes.
fn journal(world: &World) -> (BTreeSet<String>, BTreeSet<String>) {
    let path = world.dir().join("state/postern.db");
    let flags = rusqlite::OpenFlags::SQLITE_OPEN_READ_ONLY;
    let store = rusqlite::Connection::open_with_flags(path, flags).expect("the journal");
    let column = |query: &str| {
        let mut rows = store.prepare(query).expect("a table");
        let names = rows.query_map([], |row| row.get(0)).expect("rows");
        names.collect::<Result<BTreeSet<String>, _>>().expect("names")
    };
    let of_sandboxes = "SELECT substr(scope, 9) FROM policy WHERE scope LIKE 'sandbox/%'";
    (column("SELECT name FROM sandbox"), column(of_sandboxes))
}

/// Asserts that the journal, the kernel and the disk know the same sandboxes, all running; gives
/// their names.
fn agreed(world: &World, at: &str) -> BTreeSet<String> {
    let listed = world.api("GET", "/v1/sandboxes", &[]).json;
    let listed = listed["sandboxes"].as_array().expect("sandboxes");
    let text = |key: &str| -> BTreeSet<String> {
        listed.iter().map(|one| one[key].as_str().expect("text").to_owned()).collect()
    };
    let (names, their_taps) = (text("name"), text("tap"));
    assert!(listed.iter().all(|one| one["state"] == "running"), "{at}: {listed:?}");
    assert_eq!(journal(world), (names.clone(), names.clone()), "{at}: the journal");
    assert_eq!(taps(world).into_iter().collect::<BTreeSet<_>>(), their_taps, "{at}: the taps");
    let said = |program: &str, words: &str| {
        let out = world.taps.command(program).args(words.split(' ')).output().expect("run it");
        String::from_utf8_lossy(&out.stdout).into_owned()
    };
    // Every word that names a tap, wherever the kernel has one.
    for (program, words) in [
        ("nft", "list ruleset"),
        ("ip", "route show table all"),
        ("ip", "neigh show nud all"),
        ("ip", "addr show"),
        ("ss", "-Hlntu"),
    ] {
        let found = said(program, words);
        let found = found.split(|c: char| !c.is_ascii_alphanumeric());
        let found: BTreeSet<String> =
            found.filter(|word| Slot::of_tap(word).is_some()).map(str::to_owned).collect();
        assert_eq!(found, their_taps, "{at}: {program} {words}");
    }
    let folder = world.dir().join("state/sandboxes");
    let kept = std::fs::read_dir(folder).into_iter().flatten();
    let kept = kept.map(|entry| entry.expect("an entry").file_name().into_string().expect("text"));
    assert!(kept.collect::<BTreeSet<_>>().is_subset(&names), "{at}: the files");
    let daemon = world.daemon().pid().expect("it runs");
    assert_eq!(world.host.processes(), [daemon], "{at}: the processes");
    names
}

/// Promises 16, 21. Attack K01. What is half made is undone or finished, whichever step was the last.
#[test]
fn a_daemon_that_dies_at_any_step_of_a_creation_leaves_a_sandbox_whole_or_nothing() {
    let world = World::new();
    let (api, sink) = (world.site("api"), world.attacker());
    drop(world.guest(&allow(&[&api])));
    let before = inventory(&world);
    for point in points(On::Create) {
        let (name, at) = (world.fresh_name(), point.name());
        let policy: serde_json::Value = toml::from_str(&allow(&[&api])).expect("TOML");
        let wanted = json!({ "name": name, "driver": "external", "policy": policy }).to_string();
        world.daemon().arm(point, "die");
        let request = world.daemon().request("POST", "/v1/sandboxes", &["--json", &wanted]);
        let answer = request.attempt();
        world.daemon().dies(point);
        world.daemon().start(&world.host);
        world.undone();
        let names = agreed(&world, &format!("{at}, after {answer}"));
        if names.contains(&name) {
            let created = world.api("GET", &format!("/v1/sandboxes/{name}"), &[]).json;
            let guest = Guest::behind(&world, &name, created);
            guest.reaches(&api);
            refused(&guest, &sink);
        } else {
            assert_eq!(names, BTreeSet::new(), "{at}");
            world.guest(&allow(&[&api])).reaches(&api);
        }
        assert_eq!(agreed(&world, at), BTreeSet::new(), "{at}: removed");
        // The daemon is another process.
        let is_process = |line: &&String| !line.starts_with("process ");
        let left: Vec<_> =
            inventory(&world).difference(&before).filter(is_process).cloned().collect();
        assert!(left.is_empty(), "{at}: {left:#?}");
    }
    assert_eq!(world.sent_to(sink.ip), []);
}

/// Promises 20, 21. The same for a removal, while its guest goes on trying to get out.
#[test]
fn a_daemon_that_dies_at_any_step_of_a_removal_leaves_a_sandbox_whole_or_nothing() {
    let world = World::new();
    let (api, sink) = (world.site("api"), world.attacker());
    drop(world.guest(&allow(&[&api])));
    let before = inventory(&world);
    for point in points(On::Remove) {
        let at = point.name();
        let guest = world.guest(&allow(&[&api]));
        guest.reaches(&api);
        world.daemon().arm(point, "die");
        let path = format!("/v1/sandboxes/{}", guest.name);
        let request = world.daemon().request("DELETE", &path, &[]);
        std::thread::scope(|scope| {
            let asked = scope.spawn(|| request.attempt());
            while !asked.is_finished() {
                refused(&guest, &sink);
            }
        });
        world.daemon().dies(point);
        refused(&guest, &sink);
        world.daemon().start(&world.host);
        refused(&guest, &sink);
        world.undone();
        let names = agreed(&world, at);
        if names.contains(&guest.name) {
            guest.reaches(&api);
            assert_eq!(world.api("DELETE", &path, &[]).status, 204, "{at}");
        }
        assert_eq!(agreed(&world, at), BTreeSet::new(), "{at}: removed");
        drop(guest);
        let is_process = |line: &&String| !line.starts_with("process ");
        let left: Vec<_> =
            inventory(&world).difference(&before).filter(is_process).cloned().collect();
        assert!(left.is_empty(), "{at}: {left:#?}");
    }
    world.guest(&allow(&[&api])).reaches(&api);
    assert_eq!(world.sent_to(sink.ip), []);
}

/// A connection to an address and name that no rule names comes to nothing.
fn refused(guest: &Guest<'_>, sink: &Site) {
    let reached = guest.run(|| {
        client::connect(sink.at(443), AT_ONCE / 20).is_ok_and(|mut stream| {
            let _ = std::io::Write::write_all(&mut stream, b"GET / HTTP/1.0\r\n\r\n");
            let mut heard = Vec::new();
            client::read_to_end(&mut stream, &mut heard, AT_ONCE / 20);
            heard.windows(4).any(|four| four == b"200 ")
        })
    });
    assert!(!reached, "it got out");
}

/// Promise 18. A policy is in force as a whole or not at all: what the next daemon says is in force
/// is what every sandbox under it is judged by.
#[test]
fn a_daemon_that_dies_at_any_step_of_a_policy_write_has_the_old_policy_or_the_new_one() {
    let world = World::new();
    let (old, new) = (world.site("old"), world.site("new"));
    let guests = [
        world.guest_of("acme", "default = \"allow\"\n"),
        world.guest_of("acme", "default = \"allow\"\n"),
    ];
    let path = "/v1/tenants/acme/policy";
    let write = |policy: &str| {
        let words = ["-H", "content-type: application/toml", "--data-binary", policy];
        world.daemon().request("PUT", path, &words)
    };
    for point in points(On::Policy) {
        let at = point.name();
        let set = write(&allow(&[&old])).answer();
        assert_eq!(set.status, 200, "{at}: {}", set.text);
        guests.iter().for_each(|guest| guest.reaches(&old));
        world.daemon().arm(point, "die");
        let answer = write(&allow(&[&new])).attempt();
        assert!(!answer.ends_with("200"), "{at}: nobody was told that it is done: {answer}");
        world.daemon().dies(point);
        world.daemon().start(&world.host);
        let shown = world.api("GET", path, &[]).text;
        let written = !matches!(point, Point::PolicyCompiled | Point::PolicyToWrite);
        assert_eq!(shown.contains(&new.name), written, "{at}: {shown}");
        let (open, shut) = if written { (&new, &old) } else { (&old, &new) };
        let asked = world.origin.connections(shut.ip).len();
        for guest in &guests {
            guest.reaches(open);
            let url = format!("https://{}/", shut.name);
            assert_eq!(guest.curl(&[&url]).code, 6, "{at}: no such name");
        }
        assert_eq!(world.origin.connections(shut.ip).len(), asked, "{at}");
    }
}

/// Promise 21. Forgotten, but for a moment still there by name: what is written then would be kept for ever.
#[test]
fn a_policy_written_while_its_sandbox_is_forgotten_is_refused_and_leaves_nothing() {
    let world = World::new();
    let guest = world.guest("");
    let path = format!("/v1/sandboxes/{}", guest.name);
    let control = guest.set_policy("default = \"allow\"\n");
    assert_eq!(control.status, 200, "{}", control.text);
    world.daemon().arm(Point::HandleToDrop, "stall");
    let removal = world.daemon().request("DELETE", &path, &[]);
    let late = std::thread::scope(|scope| {
        let removed = scope.spawn(|| removal.answer());
        world.daemon().stalls(Point::HandleToDrop);
        let late = guest.set_policy("");
        world.daemon().release();
        assert_eq!(removed.join().expect("an answer").status, 204);
        late
    });
    assert_eq!(journal(&world), (BTreeSet::new(), BTreeSet::new()));
    assert_eq!(late.status, 404, "{}", late.text);
}

/// What a daemon comes to when it takes up a sandbox that runs: its fence is raised anew.
const OF_ADOPTION: [Point; 7] = [
    Point::FenceToRaise,
    Point::LinkPrepared,
    Point::RulesLoaded,
    Point::SocketsOpened,
    Point::LinkRaised,
    Point::FenceRaised,
    Point::RunningNoted,
];

/// Promise 21. And a daemon that dies while it puts right what the last one left.
#[test]
fn a_daemon_that_dies_while_it_takes_over_leaves_the_rest_to_the_next() {
    let world = World::new();
    let (api, sink) = (world.site("api"), world.attacker());
    let guests = [world.guest(&allow(&[&api])), world.guest(&allow(&[&api]))];
    for point in points(On::Start).chain(OF_ADOPTION) {
        let at = point.name();
        world.daemon().kill();
        let orphan = Slot::new(900).expect("a slot");
        drop(world.taps.run(|| vmm::tap::create(orphan, None).expect("a tap nobody owns")));
        world.daemon().arm(point, "die");
        world.daemon().spawn(&world.host);
        world.daemon().dies(point);
        guests.iter().for_each(|guest| refused(guest, &sink));
        world.daemon().start(&world.host);
        assert_eq!(agreed(&world, at).len(), guests.len(), "{at}");
        guests.iter().for_each(|guest| guest.reaches(&api));
    }
    assert_eq!(world.sent_to(sink.ip), []);
}

/// Promise 18. A write that panicked half-way was journalled; its writer, who heard nothing, repeats it.
#[test]
fn a_policy_write_that_panicked_is_in_force_once_it_is_repeated() {
    let world = World::new();
    let (old, new) = (world.site("old"), world.site("new"));
    let guests = [
        world.guest_of("acme", "default = \"allow\"\n"),
        world.guest_of("acme", "default = \"allow\"\n"),
    ];
    let write = |policy: &str| {
        let words = ["-H", "content-type: application/toml", "--data-binary", policy];
        world.daemon().request("PUT", "/v1/tenants/acme/policy", &words)
    };
    assert_eq!(write(&allow(&[&old])).answer().status, 200);
    guests.iter().for_each(|guest| guest.reaches(&old));
    world.daemon().arm(Point::PolicySwapped, "panic");
    let broken = write(&allow(&[&new])).attempt();
    assert!(world.daemon().was_struck() && !broken.ends_with("200"), "{broken}");
    let again = write(&allow(&[&new])).answer();
    assert_eq!(again.status, 200, "{}", again.text);
    let asked = world.origin.connections(old.ip).len();
    for guest in &guests {
        guest.reaches(&new);
        let url = format!("https://{}/", old.name);
        assert_eq!(guest.curl(&[&url]).code, 6, "no such name");
    }
    assert_eq!(world.origin.connections(old.ip).len(), asked);
}

/// Promise 21. Attack K07. A panic in its driver is an act that failed: the caller is told, and name and
/// slot are free again.
#[test]
fn a_panic_at_any_step_of_a_creation_leaves_nothing_of_it() {
    // Fewer slots than steps.
    let world = World::with("[guests]\nsandboxes = 4\nslot_rest = \"0ms\"\n");
    let api = world.site("api");
    drop(world.guest(&allow(&[&api])));
    let before = inventory(&world);
    for point in points(On::Create) {
        let (name, at) = (world.fresh_name(), point.name());
        world.daemon().arm(point, "panic");
        let broken = world.create(&name, "default", &allow(&[&api]));
        assert!(world.daemon().was_struck(), "{at}: {}", broken.text);
        assert_eq!(broken.status, 500, "{at}: {}", broken.text);
        assert_eq!(agreed(&world, at), BTreeSet::new(), "{at}");
        let again = world.create(&name, "default", &allow(&[&api]));
        assert_eq!(again.status, 201, "{at}: {}", again.text);
        Guest::behind(&world, &name, again.json).reaches(&api);
        assert_eq!(agreed(&world, at), BTreeSet::new(), "{at}: removed");
    }
    let left: Vec<_> = inventory(&world).difference(&before).cloned().collect();
    assert!(left.is_empty(), "{left:#?}");
}

/// Promise 20. Attack K07. What was being undone is undone again.
#[test]
fn a_panic_at_any_step_of_a_removal_leaves_nothing_all_the_same() {
    let world = World::new();
    let api = world.site("api");
    let other = world.guest(&allow(&[&api]));
    for point in points(On::Remove) {
        let at = point.name();
        let guest = world.guest(&allow(&[&api]));
        world.daemon().arm(point, "panic");
        let path = format!("/v1/sandboxes/{}", guest.name);
        let removed = world.api("DELETE", &path, &[]);
        assert!(world.daemon().was_struck(), "{at}: {}", removed.text);
        // A journal that cannot be written is told at once, and written later.
        let told = if point == Point::SandboxToForget { 500 } else { 204 };
        assert_eq!(removed.status, told, "{at}: {}", removed.text);
        eventually(&format!("{at}: it is gone"), PATIENT, || {
            (world.api("GET", &path, &[]).status == 404).then_some(())
        });
        assert_eq!(agreed(&world, at), BTreeSet::from([other.name.clone()]), "{at}");
    }
    other.reaches(&api);
}

/// Promise 16. Attack K07. One of two guests that are taken over goes on a little later, or has failed
/// with a reason and can be removed; the other does not notice.
#[test]
fn a_panic_over_a_guest_that_is_taken_over_is_that_guests_only() {
    let world = World::new();
    let api = world.site("api");
    let guests = [world.guest(&allow(&[&api])), world.guest(&allow(&[&api]))];
    let shown =
        |guest: &Guest<'_>| world.api("GET", &format!("/v1/sandboxes/{}", guest.name), &[]).json;
    for point in OF_ADOPTION {
        world.daemon().kill();
        world.daemon().arm(point, "panic");
        world.daemon().start(&world.host);
        assert!(world.daemon().was_struck(), "{}", point.name());
        if point == Point::RunningNoted {
            break;
        }
        eventually(&format!("{}: both work", point.name()), PATIENT, || {
            let url = format!("https://{}/", api.name);
            let works = |guest: &Guest<'_>| guest.curl(&["-m", "2", &url]).status == 200;
            guests.iter().all(works).then_some(())
        });
        for guest in &guests {
            assert_eq!(shown(guest)["reason"], serde_json::Value::Null, "{}", point.name());
        }
    }
    let (failed, works) = if shown(&guests[0])["state"] == "failed" {
        (&guests[0], &guests[1])
    } else {
        (&guests[1], &guests[0])
    };
    let state = shown(failed);
    assert_eq!(state["state"], "failed", "{state}");
    assert!(state["reason"].as_str().is_some_and(|it| it.contains("bug")), "{state}");
    works.reaches(&api);
    assert!(failed.run(|| client::connect(api.at(443), AT_ONCE)).is_err(), "it got out");
    let removed = world.api("DELETE", &format!("/v1/sandboxes/{}", failed.name), &[]);
    assert_eq!(removed.status, 204, "{}", removed.text);
    assert_eq!(agreed(&world, "removed"), BTreeSet::from([works.name.clone()]));
}

/// The audit loses at most the line it died in, and goes on behind it.
#[test]
fn a_daemon_that_dies_while_it_writes_the_audit_spoils_no_other_record() {
    let world = World::with("[audit]\nfile_size = \"64K\"\ntotal_size = \"128K\"\n");
    let mut half = false;
    for point in points(On::Audit) {
        let at = point.name();
        world.daemon().arm(point, "die");
        // Each write is a record; together they go on to another file and let an old one go.
        for _ in 0..10 {
            let words = ["--fail-early", "--json", "{\"default\":\"allow\"}"];
            world.daemon().request("PUT", "/v1/tenants/acme/policy#[1-200]", &words).attempt();
            if world.daemon().was_struck() {
                break;
            }
        }
        world.daemon().dies(point);
        world.daemon().start(&world.host);
        let name = world.fresh_name();
        // The next line in the file that it died in.
        assert_eq!(world.create(&name, "acme", "").status, 201, "{at}");
        world.event_that(&name, "of its creation", |record| {
            record["detail"].as_str().is_some_and(|detail| detail.starts_with("sandbox create"))
        });
        let mut torn = 0;
        for entry in std::fs::read_dir(world.dir().join("audit")).expect("the audit") {
            let text = std::fs::read_to_string(entry.expect("an entry").path()).expect("text");
            let torn_line = |line: &&str| serde_json::from_str::<serde_json::Value>(line).is_err();
            torn += text.lines().filter(torn_line).count();
        }
        half |= point == Point::AuditHalfAppended;
        // It may have gone with its file since.
        assert!(torn <= usize::from(half), "{at}: {torn}, not only the line it died in");
        assert!(torn == 1 || point != Point::AuditHalfAppended, "{at}: nothing was torn");
        assert_eq!(world.api("DELETE", &format!("/v1/sandboxes/{name}"), &[]).status, 204);
    }
}

/// Attack K07. A panic is one connection's: its places are given back, its neighbours do not notice,
/// and it is counted.
#[test]
fn a_panic_in_a_connection_ends_that_connection_only_and_is_counted() {
    const FLOWS: usize = 4;
    let world = World::with(&format!("[guests]\nflows = {FLOWS}\n"));
    let api = world.site("api");
    let (guest, other) = (world.guest(&allow(&[&api])), world.guest(&allow(&[&api])));
    guest.reaches(&api);
    let mut panics = 0;
    for point in points(On::Connect) {
        // More often than there are places.
        for _ in 0..=FLOWS {
            world.daemon().arm(point, "panic");
            let failed = guest.curl(&[&format!("https://{}/", api.name)]);
            assert_ne!(failed.status, 200, "{}", point.name());
            assert_ne!(failed.code, 28, "{}: it is told at once", point.name());
            assert!(world.daemon().was_struck(), "{}", point.name());
            panics += 1;
        }
        other.reaches(&api);
        guest.reaches(&api);
    }
    let health = world.api("GET", "/v1/health", &[]).json;
    assert_eq!(health["panics"], panics, "{health}");
}
