//! A daemon ends while a guest sleeps, and its connections with it: the next one says so, to the audit once
//! and to the guest before it runs.

use std::process::Stdio;
use std::time::Duration;

use fault::Point;
use serde_json::Value;
use world::Site;
use world::origin::port;
use world::poll::eventually;

use crate::asleep::Sleeper;

/// How long a guest may take to say what it heard.
const PATIENCE: Duration = Duration::from_secs(60);

/// Opens three connections, takes a fourth one, and says how each ended. It sends nothing meanwhile: who is
/// not told would wait for ever.
const PEERS: &str = "cat >/root/peers.py <<'E'\n\
    import socket, sys, threading\n\
    name, address = sys.argv[1:]\n\
    ended = open(f'/run/ended.{name}', 'a', buffering=1)\n\
    def wait(peer):\n\
    \x20   try: end = peer.recv(1)\n\
    \x20   except OSError as error: end = error.errno\n\
    \x20   ended.write(f'{end}\\n')\n\
    def echoed():\n\
    \x20   peer = socket.create_connection((address, 7))\n\
    \x20   peer.sendall(b'ping\\r\\n')\n\
    \x20   peer.recv(6, socket.MSG_WAITALL)\n\
    \x20   return peer\n\
    peers = [echoed() for _ in range(3)]\n\
    with socket.create_server(('0.0.0.0', 7001)) as server:\n\
    \x20   open(f'/run/listens.{name}', 'w').close()\n\
    \x20   peers.append(server.accept()[0])\n\
    for peer in peers: threading.Thread(target=wait, args=(peer,)).start()\n\
    open(f'/run/waits.{name}', 'w').close()\n\
    E";
/// ECONNRESET, four times.
const RESETS: &str = "104\n104\n104\n104";

/// Connections of a guest, all of which wait.
fn wait(sleeper: &Sleeper, site: &Site, round: &str) {
    let until = |file: &str| {
        format!("for i in $(seq 300); do test -e {file} && exit 0; sleep 0.1; done; exit 1")
    };
    sleeper.sh(&format!(
        "setsid python3 /root/peers.py {round} {} >/run/peers 2>&1 </dev/null &
        {}",
        site.ip,
        until(&format!("/run/listens.{round}"))
    ));
    let mut connect = sleeper.world.daemon().command(&["connect", &sleeper.name, "7001"]);
    connect.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    // It ends with its daemon.
    let mut connect = connect.spawn().expect("run postern");
    sleeper.sh(&until(&format!("/run/waits.{round}")));
    let open = connect.stdin.take();
    std::thread::spawn(move || {
        let ended = connect.wait();
        drop(open);
        ended
    });
}

/// Records of ends, and those among them that say that the daemon ended.
fn ends(sleeper: &Sleeper, site: &Site) -> (usize, usize) {
    let to = format!("{}:{}", site.ip, port::ECHO);
    let closed = sleeper.world.events(&sleeper.name).into_iter();
    let closed = closed.filter(|one| one["outcome"] == "closed" && one["destination"] == to);
    let with_daemon = |one: &Value| {
        one["detail"].as_str().is_some_and(|detail| detail.contains("ended with the daemon"))
    };
    let closed: Vec<Value> = closed.collect();
    (closed.len(), closed.iter().filter(|one| with_daemon(one)).count())
}

fn heard(sleeper: &Sleeper, round: &str) {
    let said = eventually(&format!("{round}: the guest hears each end"), PATIENCE, || {
        let said = sleeper.sh(&format!("cat /run/ended.{round}"));
        (said.lines().count() == RESETS.lines().count()).then_some(said)
    });
    assert_eq!(said, RESETS, "{round}");
}

/// Promise 41. Attack K01.
#[test]
fn a_guest_that_slept_while_its_daemon_ended_hears_what_ended_with_it_and_the_audit_says_so_once() {
    let sleeper = Sleeper::turn();
    let site = sleeper.world.site("echo");
    let rule = format!("[[rule]]\nallow = [\"{}\"]\nports = [{}]\n", site.ip, port::ECHO);
    let rule = ["-H", "content-type: application/toml", "--data-binary", &rule];
    let path = format!("/v1/sandboxes/{}/policy", sleeper.name);
    assert_eq!(sleeper.world.api("PUT", &path, &rule).status, 200);
    sleeper.sh(PEERS);
    let restart = || sleeper.world.daemon().start(&sleeper.world.host);

    // Killed in its sleep, and again at each step at which the next one tells the guest.
    wait(&sleeper, &site, "killed");
    sleeper.world.cli(&["standby", &sleeper.name]).ok();
    assert_eq!(ends(&sleeper, &site), (0, 0), "control: they are kept");
    sleeper.world.daemon().kill();
    restart();
    eventually("the audit has each end", PATIENCE, || {
        (ends(&sleeper, &site) == (3, 3)).then_some(())
    });
    for point in [Point::EndsToTell, Point::EndsTold] {
        sleeper.world.daemon().arm(point, "die");
        sleeper.ask("resume");
        sleeper.world.daemon().dies(point);
        restart();
        sleeper.until(&["standby"], point.name());
    }
    sleeper.world.cli(&["resume", &sleeper.name]).ok();
    heard(&sleeper, "killed");
    assert_eq!(ends(&sleeper, &site), (3, 3), "once each");

    // Stopped in order, it has said so itself.
    wait(&sleeper, &site, "stopped");
    sleeper.world.cli(&["standby", &sleeper.name]).ok();
    assert_eq!(sleeper.world.daemon().terminate(), Some(0));
    restart();
    sleeper.until(&["standby"], "it was stopped");
    sleeper.world.cli(&["resume", &sleeper.name]).ok();
    heard(&sleeper, "stopped");
    assert_eq!(ends(&sleeper, &site), (6, 3), "once each");
    let journal = sleeper.world.dir().join("state/postern.db");
    let journal = rusqlite::Connection::open(journal).expect("the journal");
    let nights: i64 =
        journal.query_row("SELECT count(*) FROM night", [], |row| row.get(0)).expect("a count");
    assert_eq!(nights, 0, "what was used is forgotten");
}
