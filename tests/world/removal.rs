//! What a sandbox leaves behind: nothing but its audit.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::path::Path;
use std::process::Command;

use policy::Slot;
use world::client::{self, PATIENT};
use world::poll::eventually;
use world::wire::Seen;
use world::{World, allow};

use crate::crash::taps;

/// All there is in the guests' namespace and in the daemon's folders and descriptors.
pub(crate) fn inventory(world: &World) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for words in [
        "ip -o link",
        "ip -o addr",
        "ip route show table all",
        "ip -6 route show table all",
        "ip rule",
        "ip neigh",
        "nft -s list ruleset",
        "ss -Hantup",
    ] {
        let mut words = words.split(' ');
        let mut command = world.taps.command(words.next().expect("a program"));
        let out = command.args(words).output().expect("run it");
        assert!(out.status.success(), "{command:?}");
        all.extend(String::from_utf8_lossy(&out.stdout).lines().map(|line| {
            // Interface numbers and descriptors go up; they are not what is left.
            let line = line
                .split_once(": ")
                .filter(|(n, _)| n.parse::<u32>().is_ok())
                .map_or(line, |(_, rest)| rest);
            line.split(" users:").next().unwrap_or(line).trim().to_owned()
        }));
    }
    let found = Command::new("find")
        .args([world.dir().join("state"), world.dir().join("run")])
        .args(["-not", "-name", "*.db*"])
        .output();
    all.extend(String::from_utf8_lossy(&found.expect("find").stdout).lines().map(str::to_owned));
    let pid = world.daemon().pid().expect("it runs");
    for entry in
        std::fs::read_dir(Path::new("/proc").join(pid.to_string()).join("fd")).expect("descriptors")
    {
        let target = std::fs::read_link(entry.expect("a descriptor").path());
        let target = target.map(|target| target.display().to_string()).unwrap_or_default();
        if !target.starts_with("socket:") && !target.starts_with("pipe:") {
            all.insert(format!("fd {target}"));
        }
    }
    all.extend(world.host.processes().iter().map(|pid| format!("process {pid}")));
    all.extend(world.taps.processes().iter().map(|pid| format!("process {pid}")));
    all
}

/// Promise 20.
#[test]
fn a_removed_sandbox_leaves_nothing() {
    let world = World::new();
    let api = world.site("api");
    // The first one may make what is made once.
    drop(world.guest(&allow(&[&api])));
    let before = inventory(&world);
    let mut guest = world.guest(&format!("{}[[rule]]\nallow = [\"{}\"]\n", allow(&[&api]), api.ip));
    guest.reaches(&api);
    let mut open = guest.run(|| client::connect(api.at(7), PATIENT).expect("connect"));
    open.write_all(b"x\r\n").and_then(|()| open.read_exact(&mut [0; 3])).expect("an echo");
    let during = inventory(&world);
    let tap = guest.created["tap"].as_str().expect("a tap").to_owned();
    assert!(during.iter().any(|line| line.contains(&tap)), "control: {during:?}");
    guest.cable.unplug();
    let path = format!("/v1/sandboxes/{}", guest.name);
    let removed = world.api("DELETE", &path, &[]);
    assert_eq!(removed.status, 204, "{}", removed.text);
    assert_eq!(world.api("GET", &path, &[]).status, 404);
    assert_eq!(world.api("DELETE", &path, &[]).status, 404, "once");
    let left: Vec<_> = inventory(&world).difference(&before).cloned().collect();
    assert!(left.is_empty(), "{left:#?}");
    let echo = |seen: &Seen| seen.ports.is_some_and(|(from, to)| from == 7 || to == 7);
    eventually("the far side of the open flow is reset", PATIENT, || {
        world
            .sent(|seen| seen.is_to(api.ip) && echo(seen))
            .iter()
            .any(|seen| seen.reset)
            .then_some(())
    });
}

/// Promises 20 and 28. A hypervisor that does not let go of its tap loses it.
#[test]
fn a_tap_that_a_hypervisor_still_holds_is_taken_from_it() {
    let world = World::shared();
    let (api, sink) = (world.site("api"), world.attacker());
    let policy = format!("{}[[rule]]\nallow = [\"{}\"]\n", allow(&[&api]), sink.ip);
    let guest = world.guest(&policy);
    guest.reaches(&api);
    let link = format!("ip -o link show {}", guest.slot.tap());
    let taps = || world.taps.command("sh").args(["-c", &link]).output().expect("run ip");
    assert!(taps().status.success());
    let opened = world.origin.connections(api.ip).len();
    let removed = world.api("DELETE", &format!("/v1/sandboxes/{}", guest.name), &[]);
    assert_eq!(removed.status, 204, "{}", removed.text);
    assert!(!taps().status.success());
    for site in [&api, &sink] {
        let limit = std::time::Duration::from_millis(300);
        assert!(guest.run(|| client::connect(site.at(443), limit)).is_err());
    }
    assert_eq!(world.sent_to(sink.ip), []);
    assert_eq!(world.origin.connections(api.ip).len(), opened);
    let next = world.guest(&policy);
    assert_ne!(next.slot, guest.slot, "it rests");
    next.reaches(&api);
}

/// Promise 28. What a daemon knew of a slot that rests, the next one knows.
#[test]
fn a_slot_rests_although_the_daemon_died() {
    let world = World::with("[guests]\nsandboxes = 1\nslot_rest = \"12s\"\n");
    let removed = world.create("rested", "default", "");
    assert_eq!(removed.status, 201, "{}", removed.text);
    assert_eq!(world.api("DELETE", "/v1/sandboxes/rested", &[]).status, 204);
    world.daemon().kill();
    world.daemon().start(&world.host);
    let early = world.create("next", "default", "");
    assert_eq!(early.status, 503, "{}", early.text);
    let next = eventually("the slot has rested", PATIENT, || {
        let next = world.create("next", "default", "");
        (next.status != 503).then_some(next)
    });
    assert_eq!((next.status, &next.json["slot"]), (201, &removed.json["slot"]), "{}", next.text);
}

/// Promise 28. When its guest ended, nobody knows.
#[test]
fn a_slot_in_which_a_tap_of_nobody_was_found_rests() {
    let world = World::with("[guests]\nsandboxes = 1\nslot_rest = \"12s\"\n");
    world.daemon().kill();
    let slot = Slot::new(1).expect("the only one");
    drop(world.taps.run(|| vmm::tap::create(slot, None).expect("a tap nobody owns")));
    world.daemon().start(&world.host);
    assert_eq!(taps(&world), [""; 0], "control: it was found");
    let early = world.create("next", "default", "");
    assert_eq!(early.status, 503, "{}", early.text);
    let next = eventually("the slot has rested", PATIENT, || {
        let next = world.create("next", "default", "");
        (next.status != 503).then_some(next)
    });
    assert_eq!((next.status, &next.json["slot"]), (201, &1.into()), "{}", next.text);
}

/// Promise 20. A name is free again, and the new sandbox is another one.
#[test]
fn a_name_used_again_is_another_sandbox() {
    let world = World::shared();
    let name = world.fresh_name();
    let mut incarnations = BTreeSet::new();
    for _ in 0..3 {
        let made = world.create(&name, "default", "");
        assert_eq!(made.status, 201, "{}", made.text);
        assert_eq!(world.create(&name, "default", "").status, 409, "while it lives");
        incarnations.insert(made.json["incarnation"].as_u64().expect("a number"));
        assert_eq!(world.api("DELETE", &format!("/v1/sandboxes/{name}"), &[]).status, 204);
    }
    assert_eq!(incarnations.len(), 3);
}
