//! What an operator does to a node: configure it, check it, run it, hook another hypervisor to it.

use std::path::Path;

use crate::crash::taps;
use fault::Point;
use world::World;
use world::daemon::{Ran, program};
use world::netns::DIRECTORY_PREFIX;
use world::world::EGRESS;

/// `postern <words> --config <file>` on the host.
fn on_host(world: &World, words: &[&str], config: &Path) -> Ran {
    let mut command = world.host.bare_command(&program().to_string_lossy());
    Ran::of(&command.args(words).arg("--config").arg(config).output().expect("run postern"))
}

/// Two daemons on one state would each undo what the other does.
#[test]
fn a_second_daemon_on_the_same_state_is_refused() {
    let world = World::shared();
    let ran = on_host(world, &["serve"], &world.dir().join("postern.toml"));
    assert_ne!(ran.code, 0, "{ran:?}");
    assert_eq!(world.api("GET", "/v1/health", &[]).status, 200, "the first one goes on");
}

/// Promise 19. A configuration with a mistake starts nothing.
#[test]
fn a_bad_configuration_starts_nothing_and_names_line_and_fix() {
    let world = World::shared();
    let file = world.dir().join("bad-config.toml");
    std::fs::write(&file, "[egress]\nadresses = [\"1.2.3.4\"]\n").expect("write");
    let ran = on_host(world, &["serve"], &file);
    assert_ne!(ran.code, 0);
    assert!(ran.stderr.contains("adresses") && ran.stderr.contains("addresses"), "{ran:?}");
}

/// What `serve` would stumble over is found before, with what to do about it; and `serve` does not
/// start over it.
#[test]
fn doctor_finds_an_egress_address_that_the_host_does_not_have() {
    let world = World::without_daemon("");
    let config = world.dir().join("postern.toml");
    let fit = on_host(&world, &["doctor", "--json"], &config);
    let check = |ran: &Ran, name: &str| {
        let report = ran.json();
        let mut checks = report["checks"].as_array().expect("checks").iter();
        checks.find(|check| check["name"] == name).cloned().unwrap_or_else(|| panic!("{report}"))
    };
    for name in ["privileges", "kernel", "tap devices", "fence", "egress", "state", "resolver"] {
        assert_eq!(check(&fit, name)["status"], "ok", "{name}: {}", fit.stdout);
    }
    let text = std::fs::read_to_string(&config).expect("read");
    let foreign = text.replace(&EGRESS.to_string(), "93.184.216.99");
    std::fs::write(&config, foreign).expect("write");
    let unfit = on_host(&world, &["doctor", "--json"], &config);
    assert_eq!(unfit.code, 1, "{unfit:?}");
    let egress = check(&unfit, "egress");
    assert_eq!(egress["status"], "fail", "{egress}");
    assert!(egress["remedy"].as_str().is_some_and(|remedy| !remedy.is_empty()), "{egress}");
    let serve = on_host(&world, &["serve"], &config);
    assert_ne!(serve.code, 0, "{serve:?}");
    assert!(serve.stderr.contains("93.184.216.99"), "{serve:?}");
}

/// Another hypervisor is told where its tap is, and when to let go of it.
#[test]
fn the_operators_hooks_learn_the_tap_the_namespace_and_the_guests_address() {
    let told = format!("{DIRECTORY_PREFIX}-{}-hooks", std::process::id());
    let hook = |on: &str| format!("on_{on} = [\"/bin/sh\", \"-c\", \"env > {told}.{on}\"]\n");
    let world = World::with(&format!("[external]\n{}{}", hook("create"), hook("remove")));
    let made = world.create("hooked", "acme", "");
    assert_eq!(made.status, 201, "{}", made.text);
    assert_eq!(world.api("DELETE", "/v1/sandboxes/hooked", &[]).status, 204);
    for on in ["create", "remove"] {
        let environment = std::fs::read_to_string(format!("{told}.{on}")).expect("it ran");
        for line in [
            "POSTERN_SANDBOX=hooked".to_owned(),
            "POSTERN_TENANT=acme".to_owned(),
            format!("POSTERN_TAP={}", made.json["tap"].as_str().expect("a tap")),
            format!("POSTERN_NETNS={}", world.taps.name()),
            format!("POSTERN_GUEST_IP={}", policy::net::GUEST_IP),
        ] {
            assert!(environment.lines().any(|had| had == line), "{on}: {line} in {environment}");
        }
    }
}

/// Promise 21. What a hook refuses is undone.
#[test]
fn a_sandbox_whose_hook_fails_is_not_made_and_leaves_nothing() {
    let world = World::with("[external]\non_create = [\"/bin/false\"]\n");
    let made = world.create("unwanted", "default", "");
    assert_eq!(made.status, 500, "{}", made.text);
    assert!(made.json["error"]["message"].is_string(), "{}", made.text);
    assert_eq!(world.api("GET", "/v1/sandboxes/unwanted", &[]).status, 404);
    assert_eq!(taps(&world), [""; 0]);
}

/// Promise 21. Only the operator's own hook can end what the other one started, so it is run even if
/// nobody saw that one end.
#[test]
fn what_a_hook_may_have_started_is_handed_to_the_other_hook() {
    let world = World::without_daemon("");
    let told = world.dir().join("hooks");
    let hook = |on: &str, then: &str| {
        let script =
            format!("echo {on} $POSTERN_SANDBOX $POSTERN_TAP >> {}; {then}", told.display());
        format!("on_{on} = [\"/bin/sh\", \"-c\", \"{script}\"]\n")
    };
    let hooks = hook("create", "case $POSTERN_SANDBOX in slow) sleep 60;; failing) exit 1;; esac")
        + &hook("remove", "true");
    let config = world.dir().join("postern.toml");
    let whole = std::fs::read_to_string(&config).expect("the configuration");
    std::fs::write(&config, format!("{whole}\n[external]\n{hooks}timeout = \"2s\"\n"))
        .expect("write");
    world.daemon().start(&world.host);
    for name in ["dying", "slow", "failing", "fine"] {
        let _ = std::fs::remove_file(&told);
        if name == "dying" {
            world.daemon().arm(Point::ProcessStarted, "die");
            let wanted = format!("{{\"name\":\"{name}\",\"driver\":\"external\"}}");
            let request = world.daemon().request("POST", "/v1/sandboxes", &["--json", &wanted]);
            request.attempt();
            world.daemon().dies(Point::ProcessStarted);
            world.daemon().start(&world.host);
            world.undone();
        } else {
            let made = world.create(name, "default", "");
            assert_eq!(made.status == 201, name == "fine", "{name}: {}", made.text);
        }
        let ran = || std::fs::read_to_string(&told).expect("hooks ran");
        if name == "fine" {
            assert!(!ran().contains("remove"), "control: it runs");
            let path = format!("/v1/sandboxes/{name}");
            assert_eq!(world.api("DELETE", &path, &[]).status, 204);
        }
        let ran = ran();
        let lines: Vec<Vec<&str>> = ran.lines().map(|line| line.split(' ').collect()).collect();
        let [created, removed] = &lines[..] else { panic!("{name}: {lines:?}") };
        assert_eq!((created[0], removed[0]), ("create", "remove"), "{name}");
        assert_eq!((created[1], removed[1]), (name, name));
        assert_eq!(created[2], removed[2], "{name}: its tap");
    }
    assert_eq!(taps(&world), [""; 0]);
}

/// A hypervisor that does not enter namespaces gets its tap as an open descriptor.
#[test]
fn a_program_that_is_handed_the_tap_speaks_to_the_gateway() {
    const ASK_FOR_THE_GATEWAY: &str = "
import os, select
guest, gateway = bytes.fromhex('020000000002'), bytes([169, 254, 100, 1])
question = bytes([0, 1, 8, 0, 6, 4, 0, 1]) + guest + bytes([169, 254, 100, 2]) + bytes(6) + gateway
frame = bytes([255] * 6) + guest + bytes([8, 6]) + question
os.write(5, bytes(12) + frame)
while select.select([5], [], [], 10)[0]:
    answer = os.read(5, 2000)[12:]
    if answer[12:14] == bytes([8, 6]) and answer[28:32] == gateway:
        print(answer[22:28].hex())
        break
";
    let world = World::shared();
    let name = world.fresh_name();
    assert_eq!(world.create(&name, "default", "").status, 201);
    let words = ["tap", &name, "--fd", "5", "--", "python3", "-c", ASK_FOR_THE_GATEWAY];
    let ran = world.cli(&words).ok();
    let gateway = policy::net::GATEWAY_MAC.map(|byte| format!("{byte:02x}")).concat();
    assert_eq!(ran.stdout.trim(), gateway, "{ran:?}");
    assert_eq!(world.cli(&["rm", &name]).code, 0);
}

/// Promise 19. What is wrong with a file is said with its name and line, also where only the layer that
/// it was written for forbids it.
#[test]
fn a_refused_policy_names_its_file_and_line() {
    let world = World::shared();
    let guest = world.guest("");
    let file = world.dir().join("layered.toml");
    let always = "[[rule]]\nallow = [\"a.example\"]\nalways = true\n";
    std::fs::write(&file, always).expect("write");
    let path = file.to_string_lossy().into_owned();
    let other = world.fresh_name();
    for words in [
        &["policy", "set", &guest.name, &path][..],
        &["create", &other, "--driver", "external", "--policy", &path],
    ] {
        let ran = world.cli(words);
        assert_eq!(ran.code, 2, "{ran:?}");
        for said in [&*path, "line 3", "rule[0].always", "leave it out"] {
            assert!(ran.stderr.contains(said), "{said}: {ran:?}");
        }
    }
    assert_eq!(world.cli(&["show", &other]).code, 3);
}

/// What stands for a policy that nobody wrote would deny everything if it were written.
#[test]
fn a_policy_that_was_never_set_is_not_shown_as_one() {
    let world = World::shared();
    let unset = world.cli(&["policy", "get", "tenant/nobody"]).ok();
    assert!(unset.stdout.starts_with("# none set"), "{unset:?}");
    assert!(!unset.stdout.contains("deny"), "{unset:?}");
    let guest = world.guest("");
    let set = world.cli(&["policy", "get", &guest.name]).ok();
    assert!(set.stdout.contains("default = \"deny\""), "{set:?}");
}

/// No rule opens this host, and who writes one is told.
#[test]
fn a_rule_for_this_host_is_noted_when_it_is_written() {
    let world = World::shared();
    let guest = world.guest("");
    for (at, peer) in ["127.0.0.1", &*EGRESS.to_string()].into_iter().enumerate() {
        let noted = world.cli(&["policy", "allow", &guest.name, peer]).ok();
        let note = format!("note: rule[{at}] allows {peer}, which stays closed");
        assert!(noted.stdout.contains(&note), "{noted:?}");
    }
    let name = world.fresh_name();
    let words = ["create", &name, "--driver", "external", "--mode", "observe"];
    let made = world.cli(&[&words[..], &["--allow", "127.0.0.1"]].concat()).ok();
    for note in
        ["note: rule[0] allows 127.0.0.1, which stays closed", "note: it is in mode observe"]
    {
        assert_eq!(made.stdout.matches(note).count(), 1, "{made:?}");
    }
    world.cli(&["rm", &name]).ok();
}

/// Attack K04. There is no way to serve with less: what is missing is named, and nothing is begun.
#[test]
fn a_daemon_that_lacks_what_it_needs_does_not_start_and_says_what() {
    let world = World::without_daemon("");
    let config = world.dir().join("postern.toml");
    let config = config.to_string_lossy();
    let serve = format!("exec {} serve --config {config}", program().display());
    let drop = |capability: &str| {
        format!(
            "exec setpriv --inh-caps=-{capability} --bounding-set=-{capability} sh -c '{serve}'"
        )
    };
    for (line, said) in [
        (drop("net_admin"), "CAP_NET_ADMIN"),
        (drop("sys_admin"), "CAP_SYS_ADMIN"),
        (drop("net_raw"), "CAP_NET_RAW"),
        (format!("exec unshare -m sh -c 'mount -t tmpfs none /dev/net && {serve}'"), "tun"),
        (format!("rm -rf {0}/audit; : > {0}/audit; {serve}", world.dir().display()), "audit"),
    ] {
        let mut command = world.host.bare_command("sh");
        let ran = Ran::of(&command.args(["-c", &line]).output().expect("run it"));
        assert!(ran.code > 0, "{line}: {ran:?}");
        assert!(ran.stderr.contains(said), "{line}: {}", ran.stderr);
        assert!(!world.taps.exists(), "{line}: it made the guests' namespace");
        assert!(!world.daemon().socket().exists(), "{line}: it listens");
    }
    std::fs::remove_file(world.dir().join("audit")).expect("the file in the way");
    world.daemon().start(&world.host);
    let api = world.site("api");
    world.guest(&world::allow(&[&api])).reaches(&api);
}
