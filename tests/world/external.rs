//! A machine that somebody else runs: its tap by name in the namespace (every guest of this suite
//! takes it so), and as an open descriptor.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use world::client::PATIENT;
use world::poll::eventually;
use world::{Guest, World, allow};

use crate::crash::taps;

#[test]
fn a_program_gets_the_tap_of_an_external_sandbox_as_a_descriptor() {
    let world = World::shared();
    let name = world.fresh_name();
    let created = world.cli(&["create", &name, "--driver", "external", "--json"]).ok();
    let created = created.json_lines().pop().expect("a result");
    let see = "readlink /proc/self/fd/5; cat /proc/self/fdinfo/5";
    let ran = world.cli(&["tap", &name, "--fd", "5", "--", "sh", "-c", see]).ok();
    assert!(ran.stdout.contains("/dev/net/tun"), "{}", ran.stdout);
    let tap = created["tap"].as_str().expect("its tap");
    let attached = ran.stdout.lines().any(|line| line.replace('\t', " ") == format!("iff: {tap}"));
    assert!(attached, "{}", ran.stdout);
    world.cli(&["rm", &name]).ok();
    let gone = world.cli(&["tap", &name, "--", "true"]);
    assert_eq!(gone.code, 3, "{}", gone.stderr);
}

#[test]
fn a_program_that_is_not_there_is_an_error_that_names_it() {
    let world = World::shared();
    let name = world.fresh_name();
    world.cli(&["create", &name, "--driver", "external"]).ok();
    let ran = world.cli(&["tap", &name, "--", "/no/such/program"]);
    assert_eq!(ran.code, 1);
    assert!(ran.stderr.contains("/no/such/program"), "{}", ran.stderr);
    world.cli(&["rm", &name]).ok();
}

/// As a hook for removal: fails until the guest is said to have ended.
const FAILS: &str = "test -e ENDED || { echo it still runs >&2; exit 1; }";

/// A world whose daemon runs this line of shell when a sandbox is removed.
fn world_that_removes_by(line: &str, timeout: &str, more: &str) -> World {
    let world = World::without_daemon(more);
    let config = world.dir().join("postern.toml");
    let whole = std::fs::read_to_string(&config).expect("the configuration");
    let line = line.replace("ENDED", &ended(&world).display().to_string());
    let hook = format!("on_remove = ['/bin/sh', '-c', '{line}']");
    std::fs::write(&config, format!("{whole}\n[external]\n{hook}\ntimeout = \"{timeout}\"\n"))
        .expect("write");
    world.daemon().start(&world.host);
    world
}

/// What such a line may look for: `ENDED`.
fn ended(world: &World) -> PathBuf {
    world.dir().join("ended")
}

/// Promises 21, 58. A hook that hangs keeps its own sandbox, and not the daemon from anybody.
#[test]
fn a_daemon_that_starts_waits_for_no_hook() {
    const HANGS: &str = "for i in $(seq 300); do test -e ENDED && exit 0; sleep 0.2; done; exit 1";
    let world = world_that_removes_by(HANGS, "15s", "");
    let api = world.site("api");
    let (guest, other) = (world.guest(&allow(&[&api])), world.guest(&allow(&[&api])));
    guest.reaches(&api);
    let path = format!("/v1/sandboxes/{}", guest.name);
    let removal = world.daemon().request("DELETE", &path, &[]);
    let state = || world.api("GET", &path, &[]).json["state"].clone();
    let took = std::thread::scope(|scope| {
        scope.spawn(|| removal.attempt());
        eventually("it is being removed", PATIENT, || (state() == "deleting").then_some(()));
        world.daemon().kill();
        let begun = Instant::now();
        world.daemon().start(&world.host);
        begun.elapsed()
    });
    assert!(took < Duration::from_secs(15), "it answers after {took:?}");
    other.reaches(&api);
    assert_eq!(state(), "deleting", "control: its hook hangs");
    let sent = world.requests(&api.name).len();
    let asked = guest.curl(&["--connect-timeout", "1", &format!("https://{}/", api.name)]);
    assert_ne!(asked.code, 0, "{}", asked.head);
    assert_eq!(world.requests(&api.name).len(), sent, "it is shut in meanwhile");
    std::fs::write(ended(&world), "").expect("it ends");
    world.undone();
    assert_eq!(world.api("GET", &path, &[]).status, 404);
}

/// Promise 28. The guest may be there as long as the hook that ends it fails: its sandbox is not forgotten,
/// by the next daemon either, reaches nothing, and keeps its slot.
#[test]
fn a_sandbox_whose_guest_would_not_end_is_gone_once_it_has() {
    let world = world_that_removes_by(FAILS, "10s", "");
    let api = world.site("api");
    let (guest, other) = (world.guest(&allow(&[&api])), world.guest(&allow(&[&api])));
    guest.reaches(&api);
    let path = format!("/v1/sandboxes/{}", guest.name);
    let told = world.api("DELETE", &path, &[]);
    assert_eq!(told.status, 500, "{}", told.text);
    assert!(told.text.contains("it still runs"), "{}", told.text);
    let sent = world.requests(&api.name).len();
    let asked = guest.curl(&["--connect-timeout", "1", &format!("https://{}/", api.name)]);
    assert_ne!(asked.code, 0, "{}", asked.head);
    other.reaches(&api);
    assert_eq!(world.requests(&api.name).len(), sent + 1, "the neighbour's only");
    let deleting = || {
        let seen = world.api("GET", &path, &[]);
        assert_eq!((seen.status, &seen.json["state"]), (200, &"deleting".into()), "{}", seen.text);
    };
    deleting();
    world.daemon().kill();
    world.daemon().start(&world.host);
    deleting();
    std::fs::write(ended(&world), "").expect("it ends");
    eventually("it is gone", PATIENT, || {
        (world.api("GET", &path, &[]).status == 404).then_some(())
    });
    other.reaches(&api);
}

/// Promises 28, 59. The operator gives the hook up: everything of ours goes, and the slot is nobody's, by the
/// next daemon either.
#[test]
fn a_removal_by_force_gives_up_a_hook_and_keeps_the_slot_of_its_guest() {
    let world =
        world_that_removes_by(FAILS, "10s", "[guests]\nsandboxes = 2\nslot_rest = \"0s\"\n");
    let api = world.site("api");
    let (guest, other) = (world.guest(&allow(&[&api])), world.guest(&allow(&[&api])));
    guest.reaches(&api);
    let path = format!("/v1/sandboxes/{}", guest.name);
    let told = world.api("DELETE", &path, &[]);
    assert_eq!(told.status, 500, "{}", told.text);
    assert_eq!(world.api("GET", &path, &[]).json["state"], "deleting", "control");
    let gone = world.cli(&["rm", "--force", &guest.name, "--json"]).ok().json();
    let left = gone["left"].as_str().expect("what is left").to_owned();
    assert!(left.contains("guest") && left.contains(&format!("slot {}", guest.slot)), "{left}");
    assert_eq!(world.api("GET", &path, &[]).status, 404);
    assert_eq!(taps(&world), [other.slot.tap()], "everything else is gone");
    world.event_that(&guest.name, "of its end", |record| {
        let detail = record["detail"].as_str().unwrap_or_default();
        detail.contains("removed by force") && detail.contains(&left)
    });
    for restarted in [false, true] {
        if restarted {
            world.daemon().kill();
            world.daemon().start(&world.host);
        }
        let health = world.api("GET", "/v1/health", &[]).json;
        assert_eq!(health["stuck_slots"], 1, "{restarted}: {health}");
        let early = world.create(&guest.name, "default", "");
        assert_eq!(early.status, 503, "{restarted}: {}", early.text);
        other.reaches(&api);
    }
    // What ends is no more kept than without force.
    std::fs::write(ended(&world), "").expect("it ends");
    let gone = world.api("DELETE", &format!("/v1/sandboxes/{}?force=true", other.name), &[]);
    assert_eq!((gone.status, &gone.json["left"]), (200, &serde_json::Value::Null), "{}", gone.text);
    let next = world.create(&guest.name, "default", &allow(&[&api]));
    assert_eq!((next.status, &next.json["slot"]), (201, &other.created["slot"]), "{}", next.text);
    Guest::behind(&world, &guest.name, next.json).reaches(&api);
}
