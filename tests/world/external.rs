//! A machine that somebody else runs: its tap by name in the namespace (every guest of this suite
//! takes it so), and as an open descriptor.

use world::World;

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
