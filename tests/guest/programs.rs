//! Ordinary programs of an ordinary Debian, unchanged, behind the router.

use crate::machine::Machine;
use world::origin::{pattern, sum};
use world::world::{EGRESS, METADATA};

/// A command's output, error output and exit code are its own; so is its input.
#[test]
fn a_command_in_the_guest_has_its_own_input_outputs_and_exit_code() {
    let machine = Machine::shared();
    let ran = machine.sh("echo out; echo err >&2; exit 7");
    assert_eq!((ran.code, &*ran.stdout), (7, "out\n"), "{ran:?}");
    assert!(ran.stderr.contains("err\n"), "{ran:?}");
    let sent = pattern(300_000);
    let counted = machine.feed("sha256sum", &sent).ok();
    assert!(counted.stdout.starts_with(&sum(&sent)), "{counted:?}");
    let os = machine.exec(&["cat", "/etc/os-release"]).ok().stdout;
    assert!(os.contains("Debian"), "{os}");
    assert_ne!(machine.exec(&["no-such-program"]).code, 0);
}

/// Promise 24. curl, with its own certificate store and resolver.
#[test]
fn curl_reaches_the_allowed_api_and_is_told_at_once_what_it_may_not_reach() {
    let machine = Machine::shared();
    let (world, api) = (&machine.world, &machine.api);
    let sink = world.attacker();
    machine.sh(&format!("curl -sSf -m 20 https://{}/from-curl", api.name)).ok();
    let seen = world.origin.requests(|request| request.target == "/from-curl");
    assert_eq!(seen[0].peer.ip(), EGRESS);
    let curl = |what: &str| {
        machine
            .sh(&format!("curl -sS -m 10 -o /dev/null -w '%{{http_code}} %{{time_total}}' {what}"))
    };
    let (name, ip) = (&sink.name, sink.ip);
    for (what, code, status) in [
        (format!("https://{name}/"), 6, "000"),
        (format!("--resolve {name}:443:{ip} https://{name}/"), 35, "000"),
        (format!("--resolve {name}:80:{ip} http://{name}/"), 0, "403"),
        (format!("http://{METADATA}/latest/meta-data/"), 0, "403"),
        (format!("--resolve {0}:443:{ip} https://{0}/", api.name), 0, "200"),
    ] {
        let ran = curl(&what);
        assert_eq!((ran.code, ran.stdout.get(..3)), (code, Some(status)), "{what}: {ran:?}");
        let took: f64 = ran.stdout.get(4..).and_then(|t| t.parse().ok()).expect("a time");
        assert!(took < 5.0, "{what}: {took} s");
    }
    assert_eq!(world.sent_to(ip), []);
    assert_eq!(world.sent_to(METADATA), []);
    assert_eq!(world.names.asked(&sink.name), []);
    let record = world.event(&machine.name, &[("outcome", "deny"), ("name", name)]);
    assert_eq!(record["code"], "no-rule", "{record}");
}

/// Promise 24. git, over HTTPS.
#[test]
fn git_clones_a_repository() {
    let machine = Machine::shared();
    let text = machine.serve_repository();
    let url = format!("https://{}/repository.git", machine.forge.name);
    let line =
        format!("rm -rf /root/clone && git clone -q {url} /root/clone && cat /root/clone/README");
    assert_eq!(machine.sh(&line).ok().stdout, text);
    let sink = machine.world.attacker();
    let denied = machine
        .sh(&format!("GIT_TERMINAL_PROMPT=0 git clone -q https://{}/x.git /root/x", sink.name));
    assert_ne!(denied.code, 0);
    assert_eq!(machine.world.sent_to(sink.ip), []);
}

/// Promise 24. Python's standard library.
#[test]
fn python_opens_an_allowed_url_and_gets_an_error_for_a_denied_one() {
    let machine = Machine::shared();
    let sink = machine.world.attacker();
    let script = format!(
        "import urllib.request, urllib.error\n\
         print(urllib.request.urlopen('https://{}/from-python', timeout=20).status)\n\
         try:\n    urllib.request.urlopen('https://{}/', timeout=20)\n\
         except urllib.error.URLError as e:\n    print('refused', e.reason)\n",
        machine.api.name, sink.name,
    );
    let ran = machine.feed("python3 -", script.as_bytes()).ok();
    assert!(ran.stdout.starts_with("200\nrefused"), "{ran:?}");
    assert_eq!(machine.world.sent_to(sink.ip), []);
}

/// Promise 24. openssl sees the origin's own certificate: nobody stands between.
#[test]
fn openssl_verifies_the_origins_own_certificate() {
    let machine = Machine::shared();
    let name = &machine.api.name;
    let line = format!(
        "openssl s_client -connect {name}:443 -servername {name} -verify_return_error </dev/null 2>&1"
    );
    let ran = machine.sh(&line);
    assert!(ran.stdout.contains("Verify return code: 0 (ok)"), "{}", ran.stdout);
    assert!(ran.stdout.contains("the world's authority"), "{}", ran.stdout);
}

/// Promise 24. What a package manager does: many megabytes, checked.
#[test]
fn a_large_download_arrives_unchanged() {
    const COUNT: usize = 20_000_000;
    let machine = Machine::shared();
    let url = format!("https://{}/bytes/{COUNT}", machine.api.name);
    let ran = machine.sh(&format!("curl -sSf -m 100 {url} | sha256sum")).ok();
    assert!(ran.stdout.starts_with(&sum(&pattern(COUNT))), "{ran:?}");
}

/// Promise 6. A QUIC client in a real guest gets the kernel's error, not silence.
#[test]
fn a_datagram_to_port_443_is_refused_in_the_guest_at_once() {
    let machine = Machine::shared();
    let sink = machine.world.attacker();
    let script = format!(
        "import socket, time\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n\
         s.settimeout(10)\ns.connect(('{}', 443))\nt = time.time()\ns.send(b'x' * 1200)\n\
         try:\n    s.recv(1)\nexcept TimeoutError:\n    print('silence')\n\
         except OSError as e:\n    print('refused', e.errno, time.time() - t < 2)\n",
        sink.ip,
    );
    let ran = machine.feed("python3 -", script.as_bytes()).ok();
    assert_eq!(ran.stdout.trim(), "refused 113 True", "EHOSTUNREACH: {ran:?}");
    assert_eq!(machine.world.sent_to(sink.ip), []);
    machine.world.event(&machine.name, &[("kind", "frame"), ("code", "quic")]);
}
