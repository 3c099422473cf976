//! The resolvers of programs: a name that is refused fails in each of them, at once, and as a name that
//! is not there.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use policy::net::GATEWAY_IP;
use world::netns::run;
use world::{Guest, World, allow};

/// How long a stub that does not fail closed waits before it asks again, in seconds; musl, half as long.
const AGAIN: u64 = 30;
/// Less than that on a busy machine, too.
const FAST: Duration = Duration::from_secs(AGAIN / 2 - 3);

const GETADDRINFO: &str = r#"
#include <netdb.h>
#include <stdio.h>
int main(int argc, char **argv) {
    struct addrinfo *found = 0;
    int error = argc == 2 ? getaddrinfo(argv[1], "443", 0, &found) : -100;
    puts(error ? gai_strerror(error) : "found");
    return error ? 1 : 0;
}
"#;

const PYTHON: &str = "import socket, sys\n\
                      try: print(socket.getaddrinfo(sys.argv[1], 443)[0][4][0])\n\
                      except socket.gaierror as error: sys.exit(f'gaierror {error.errno}')\n";

/// The program above, with that compiler's C library.
fn program(world: &World, compiler: &str) -> PathBuf {
    let source = world.dir().join("getaddrinfo.c");
    std::fs::write(&source, GETADDRINFO).expect("write the source");
    let made = world.dir().join(format!("getaddrinfo-{compiler}"));
    run(Command::new(compiler).arg("-o").arg(&made).arg(&source));
    made
}

fn timed(guest: &Guest<'_>, words: &[&str]) -> (Output, Duration) {
    let (program, words) = words.split_first().expect("a program");
    let start = Instant::now();
    let out = guest.command(program).args(words).output();
    (out.expect("run the stub"), start.elapsed())
}

/// Attack C10. NXDOMAIN for a name that nothing allowed is below, and no records for one above an allowed
/// name: glibc, musl, Python and dig take both for the end of it.
#[test]
fn every_stub_takes_a_refused_name_for_one_that_is_not_there() {
    let world = World::shared();
    let (api, sink) = (world.site("api"), world.attacker());
    let guest = world.guest(&allow(&[&api]));
    let told = format!("nameserver {GATEWAY_IP}\noptions timeout:{AGAIN}\n");
    let resolver = Path::new("/etc/netns").join(guest.netns.name()).join("resolv.conf");
    std::fs::write(resolver, told).expect("the guest's resolv.conf");
    let musl = program(world, "musl-gcc");
    let glibc = program(world, "gcc");
    let (musl, glibc) = (musl.to_string_lossy(), glibc.to_string_lossy());
    let python = PYTHON.to_owned();
    let stubs: [(&str, Vec<&str>); 4] = [
        ("glibc", vec![&glibc]),
        ("musl", vec![&musl]),
        ("getent", vec!["getent", "ahosts"]),
        ("python", vec!["/usr/bin/python3", "-c", &python]),
    ];
    for (stub, words) in &stubs {
        let ask = |name| timed(&guest, &[&words[..], &[name]].concat());
        let (out, _) = ask(&api.name);
        assert!(out.status.success(), "control, {stub}: {out:?}");
        for refused in [&*sink.name, "example.com", "com"] {
            let (out, took) = ask(refused);
            assert!(!out.status.success(), "{stub} {refused}: {out:?}");
            let said = [out.stdout, out.stderr].concat();
            let said = String::from_utf8_lossy(&said);
            for later in ["again", "emporary", "gaierror -3"] {
                assert!(!said.contains(later), "{stub} {refused} would try again: {said}");
            }
            assert!(took < FAST, "{stub} {refused}: {took:?}");
        }
    }
    for (name, status) in [(&*sink.name, "NXDOMAIN"), ("example.com", "NOERROR")] {
        let (out, took) = timed(&guest, &["dig", "+tries=1", "+time=30", name]);
        let said = String::from_utf8_lossy(&out.stdout).into_owned();
        assert!(said.contains(&format!("status: {status}")), "{said}");
        assert!(said.contains("postern:no-rule"), "{said}");
        assert!(took < FAST, "{took:?}");
    }
    assert_eq!(world.names.asked("attacker.net"), []);
    assert!(world.names.asked("com").iter().all(|asked| asked.name != "example.com"));
}
