//! What a sandbox leaves behind: nothing but its audit.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use world::client::{self, End};
use world::{World, allow};

/// All there is in the guests' namespace and in the daemon's folders and descriptors.
fn inventory(world: &World) -> BTreeSet<String> {
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
        .arg(world.dir().join("state"))
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
    let mut open = guest.run(|| client::connect(api.at(7), client::PATIENT).expect("connect"));
    let during = inventory(&world);
    assert!(during.len() > before.len(), "control: it is there while it lives");
    let tap = guest.created["tap"].as_str().expect("a tap").to_owned();
    assert!(during.iter().any(|line| line.contains(&tap)), "{during:?}");
    let path = format!("/v1/sandboxes/{}", guest.name);
    // The hypervisor still holds the tap: it goes all the same.
    let removed = world.api("DELETE", &path, &[]);
    assert_eq!(removed.status, 204, "{}", removed.text);
    assert_eq!(world.api("GET", &path, &[]).status, 404);
    guest.cable.unplug();
    let left: Vec<_> = inventory(&world).difference(&before).cloned().collect();
    assert!(left.is_empty(), "{left:#?}");
    let end = client::read_to_end(&mut open, &mut Vec::new(), client::AT_ONCE);
    assert_ne!(end, End::Closed, "an open flow does not end as if it were complete");
    world::poll::eventually("the far side is told", client::PATIENT, || {
        let resets =
            world.sent(|seen| seen.is_to(api.ip) && seen.ports.is_some_and(|(_, to)| to == 7));
        (resets.len() > 2).then_some(())
    });
    assert_eq!(world.api("DELETE", &path, &[]).status, 404, "once");
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
