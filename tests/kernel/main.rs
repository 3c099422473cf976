//! The tests of the fence and of the router once more, inside a guest of ours and so on the kernel
//! that Debian 12 ships, whatever this machine runs. Some of what newer kernels can, that one cannot.
//!
//! Needs root, a built `postern`, the two test programs built, and `POSTERN_IMAGE`: a guest image with
//! nftables and all modules of its kernel. `make test-kernel` does all that.
#![expect(clippy::expect_used, reason = "tests: what does not hold ends the test")]

use std::path::{Path, PathBuf};
use std::process::Command;

use world::World;

/// Tests that do not run here: how requests are read is no matter of the kernel, and a load that must
/// pass within a time is none for an emulated machine.
const ELSEWHERE: &[&str] = &[
    "desync::",
    "endings::",
    "exchanges::",
    "heads::",
    "leftover::",
    "requests::",
    "responses::",
    "upgrades::",
    "a_thousand_half_closed_connections",
    "what_cannot_be_kept",
    "without_a_free_port_towards_a_far_side",
    "a_slot_that_is_slow_to_end",
];

/// Promise 34.
#[test]
fn the_fence_and_the_router_hold_on_the_kernel_of_debian_12() {
    let image = std::env::var_os("POSTERN_IMAGE").expect("POSTERN_IMAGE: see the Makefile");
    let image = std::fs::canonicalize(image).expect("the image");
    let world = World::of_machines(&image, "");
    let lab = world.machine_name();
    world.cli(&["create", &lab, "--memory", "1024M", "--vcpus", "2"]).ok();
    let shell = |line: &str| world.cli(&["exec", &lab, "--", "sh", "-c", line]);
    let release = shell("uname -r").ok().stdout;
    assert!(release.starts_with("6.1."), "{release}");
    shell("mount -t tmpfs none /tmp && mkdir -p /run/netns && modprobe -a tun veth nf_tables").ok();
    for (name, skipped) in [("fence_world", &[][..]), ("router_world", ELSEWHERE)] {
        let program = stripped(&newest(name), world.dir());
        let bytes = std::fs::read(&program).expect("the program");
        let put = format!("cat > /opt/{name} && chmod +x /opt/{name}");
        let words = ["exec", &lab, "--", "sh", "-c", &put];
        world.daemon().cli_with_input(&words, &bytes).ok();
        let skipped: String = skipped.iter().map(|part| format!(" --skip {part}")).collect();
        let ran = shell(&format!("cd /opt && ./{name} --test-threads=2{skipped}"));
        assert_eq!(ran.code, 0, "{name} on {release}{}\n{}", ran.stdout, ran.stderr);
        let told = ran.stdout.lines().rfind(|line| line.starts_with("test result: ok."));
        let passed = told.and_then(|line| line.split_whitespace().nth(3)?.parse::<u32>().ok());
        assert!(passed.is_some_and(|passed| passed >= 10), "{name}: {told:?}");
    }
    world.cli(&["rm", &lab]).ok();
}

/// The test program of this name that was built last, beside this one.
fn newest(name: &str) -> PathBuf {
    let own = std::env::current_exe().expect("our own path");
    let beside = std::fs::read_dir(own.parent().expect("a folder")).expect("the folder");
    let programs = beside.map(|entry| entry.expect("an entry").path()).filter(|path| {
        let stem = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let hash = stem.strip_prefix(name).and_then(|rest| rest.strip_prefix('-'));
        hash.is_some_and(|hash| hash.bytes().all(|byte| byte.is_ascii_hexdigit()))
    });
    let made = |path: &PathBuf| path.metadata().and_then(|file| file.modified()).expect("its time");
    programs.max_by_key(made).expect("build the tests of egress first: see the Makefile")
}

/// A copy without what only a debugger reads: the guest gets it over its network.
fn stripped(program: &Path, dir: &Path) -> PathBuf {
    let copy = dir.join("program");
    let done = Command::new("strip").arg("-o").arg(&copy).arg(program).status();
    assert!(done.expect("run strip").success(), "strip {}", program.display());
    copy
}
