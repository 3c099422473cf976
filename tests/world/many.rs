//! Many sandboxes: come and gone in a hurry, and alive while the daemon dies.

use std::collections::BTreeSet;
use std::io::Write;
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use world::client::{self, End, PATIENT};
use world::origin::port;
use world::poll::eventually;
use world::{Guest, World, allow};

use crate::removal::inventory;

/// Descriptors of any kind that the daemon has.
fn descriptors(world: &World) -> usize {
    let pid = world.daemon().pid().expect("it runs");
    std::fs::read_dir(format!("/proc/{pid}/fd")).expect("descriptors").count()
}

/// What the daemon has in memory, in KiB.
pub(crate) fn memory(world: &World) -> u64 {
    let pid = world.daemon().pid().expect("it runs");
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("its status");
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("its memory");
    line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).expect("a number")
}

/// Promise 20. Two hundred in a hurry, several at once, each with its own policy: no tap, rule, route,
/// file, descriptor, socket or memory is left of them.
#[test]
fn two_hundred_sandboxes_come_and_go_and_leave_nothing() {
    const EACH: usize = 50;
    let world = World::with("[guests]\nslot_rest = \"0ms\"\nsandboxes = 16\n");
    let api = world.site("api");
    let churn = |rounds: usize| {
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..rounds {
                        let name = world.fresh_name();
                        let created = world.create(&name, "default", &allow(&[&api]));
                        assert_eq!(created.status, 201, "{}", created.text);
                        let path = format!("/v1/sandboxes/{name}");
                        let removed = world.api("DELETE", &path, &[]);
                        assert_eq!(removed.status, 204, "{}", removed.text);
                    }
                });
            }
        });
    };
    // The first ones make what is made once: threads, tables, connections of the API.
    churn(4);
    let (before, open, held) = (inventory(&world), descriptors(&world), memory(&world));
    churn(EACH);
    let left: Vec<_> = inventory(&world).difference(&before).cloned().collect();
    assert!(left.is_empty(), "{left:#?}");
    eventually("no descriptor is left", PATIENT, || {
        (descriptors(&world) <= open + 4).then_some(())
    });
    // Two hundred of anything that a sandbox has, e.g. of its pins, would be more.
    let grown = memory(&world).saturating_sub(held);
    assert!(grown < 16 << 10, "{grown} KiB more after {} sandboxes", 4 * EACH);
    world.guest(&allow(&[&api])).reaches(&api);
}

/// Promise 16. Attack P35. Fifty guests at once while the daemon is killed: what was open ends cleanly,
/// nothing leaves before the next daemon has them all again, and then all get out as before.
#[test]
fn fifty_guests_are_taken_over_by_the_next_daemon_with_no_gap() {
    const GUESTS: usize = 50;
    let world = World::new();
    let (api, echo, sink) = (world.site("api"), world.site("echo"), world.attacker());
    let rules = format!(
        "{}[[rule]]\nallow = [\"{}\"]\nports = [{}]\n",
        allow(&[&api]),
        echo.ip,
        port::ECHO
    );
    let guests: Vec<Guest<'_>> = (0..GUESTS).map(|_| world.guest(&rules)).collect();
    let mut held: Vec<TcpStream> = guests
        .iter()
        .map(|guest| {
            guest.run(|| {
                let mut stream = client::connect(echo.at(port::ECHO), PATIENT).expect("connect");
                stream.write_all(b"x\r\n").expect("sent");
                std::io::Read::read_exact(&mut stream, &mut [0; 3]).expect("an echo");
                stream
            })
        })
        .collect();
    let before = taps(&world);
    assert_eq!(before.len(), GUESTS);
    let opened = world.sent(|seen| seen.opens).len();

    world.daemon().kill();
    let (stop, tries) = (AtomicBool::new(false), AtomicUsize::new(0));
    let took = std::thread::scope(|scope| {
        // A few of them try all the time, whatever they try for must not get through.
        for guest in guests.iter().take(4) {
            let (stop, tries, sink) = (&stop, &tries, &sink);
            scope.spawn(move || {
                guest.run(|| {
                    while !stop.load(Relaxed) {
                        let limit = Duration::from_millis(100);
                        if let Ok(mut stream) = client::connect(sink.at(80), limit) {
                            let text = format!("GET / HTTP/1.1\r\nHost: {}\r\n\r\n", sink.name);
                            let _ = stream.write_all(text.as_bytes());
                            client::read_to_end(&mut stream, &mut Vec::new(), limit);
                        }
                        tries.fetch_add(1, Relaxed);
                    }
                });
            });
        }
        for stream in &mut held {
            let end = client::read_to_end(stream, &mut Vec::new(), PATIENT);
            assert_ne!(end, End::Open, "told at once that it is over");
        }
        eventually("they try", PATIENT, || (tries.load(Relaxed) > 8).then_some(()));
        assert_eq!(world.sent(|seen| seen.opens).len(), opened, "no daemon, no way out");
        let start = Instant::now();
        world.daemon().start(&world.host);
        let took = start.elapsed();
        stop.store(true, Relaxed);
        took
    });
    assert!(took < Duration::from_secs(20), "{took:?} until {GUESTS} are taken over");
    println!("{GUESTS} guests taken over in {took:?}");
    assert_eq!(world.sent_to(sink.ip), []);
    assert_eq!(taps(&world), before, "the same taps");
    for guest in &guests {
        guest.reaches(&api);
    }
    assert_eq!(world.sent_to(sink.ip), []);
}

/// The taps there are, with their interface numbers: one that was made again has another.
fn taps(world: &World) -> BTreeSet<String> {
    let out = world.taps.command("ip").args(["-o", "link"]).output().expect("ip link");
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let named = text.lines().filter(|line| line.contains(": pt"));
    named.map(|line| line.split(": ").take(2).collect::<Vec<_>>().join(" ")).collect()
}
