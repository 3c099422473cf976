//! Connections that are held and not used, in every half state: their places are their guest's own,
//! what they hold is bounded, and whoever lets go of them is served again.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};
use world::client::{self, End, PATIENT};
use world::netns::{Netns, run};
use world::origin::port;
use world::poll::eventually;
use world::segment::{Answer, ByHand, FIRST_PORT, Odd, hush};
use world::{Guest, Site, World, allow};

use crate::many::memory;

/// A policy for one site by name and another by address, on the echo's port.
fn with_echo(api: &Site, echo: &Site) -> String {
    format!("{}[[rule]]\nallow = [\"{}\"]\nports = [{}]\n", allow(&[api]), echo.ip, port::ECHO)
}

/// Begins handshakes and never ends them: from so many ports of a guest that is hushed.
fn begin(guest: &Guest<'_>, to: &Site, count: u16) {
    for source in FIRST_PORT..FIRST_PORT + count {
        let mut frame = Vec::new();
        etherparse::PacketBuilder::ethernet2(policy::net::GUEST_MAC, policy::net::GATEWAY_MAC)
            .ipv4(policy::net::GUEST_IP.octets(), to.ip.octets(), 64)
            .tcp(source, 443, 1, 64_000)
            .syn()
            .write(&mut frame, &[])
            .expect("a frame");
        guest.cable.inject(&frame).expect("the tap takes it");
    }
}

fn half_open(world: &World) -> Vec<String> {
    sockets(&world.taps, &["state", "syn-recv"])
}

/// Lines of `ss` in a namespace.
fn sockets(netns: &Netns, words: &[&str]) -> Vec<String> {
    let out = netns.command("ss").arg("-Htn").args(words).output().expect("run ss");
    String::from_utf8_lossy(&out.stdout).lines().map(str::to_owned).collect()
}

fn pid(world: &World) -> u32 {
    world.daemon().pid().expect("it runs")
}

/// Promise 37. Attacks B06, B10. Handshakes that are begun and never ended wait in their own guest's queue; nothing is
/// tracked, neither here nor on the host, and new connections of everybody are answered.
#[test]
fn half_open_connections_are_held_by_their_own_guests_listener_and_nothing_tracks_them() {
    let world = World::new();
    let (api, sink) = (world.site("api"), world.attacker());
    let (flooding, other) = (world.guest(&allow(&[&api])), world.guest(&allow(&[&api])));
    hush(&flooding);
    begin(&flooding, &sink, 400);
    let half_open = || half_open(&world);
    eventually("they wait", PATIENT, || (half_open().len() > 200).then_some(()));
    let ours = flooding.internal().to_string();
    assert!(half_open().iter().all(|line| line.contains(&ours)), "{:?}", half_open());
    other.reaches(&api);
    flooding.reaches(&api);
    for netns in [&world.taps, &world.host] {
        let count = netns
            .run(|| std::fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_count").ok());
        // A kernel without connection tracking has no such file.
        assert!(count.is_none_or(|count| count.trim() == "0"));
    }
    assert_eq!(world.sent_to(sink.ip), []);
}

/// Promise 37. Attack A14. Who has filled its queue of handshakes is given no cookie in place of one: an
/// acknowledgement with it would open the same connection again and again, past the rate of new ones.
#[test]
fn a_full_queue_of_handshakes_gives_no_cookie_that_opens_connections_at_any_rate() {
    const QUEUE: u16 = 16;
    const AGAIN: usize = 10;
    let world = World::new();
    world.taps.run(|| {
        let write = |name: &str, value: u16| std::fs::write(name, value.to_string());
        write("/proc/sys/net/core/somaxconn", QUEUE).expect("a short queue");
        write("/proc/sys/net/ipv4/tcp_synack_retries", 1).expect("a short wait");
    });
    let (api, sink) = (world.site("api"), world.attacker());
    let (flooding, other) = (world.guest(&allow(&[&api])), world.guest(&allow(&[&api])));
    hush(&flooding);
    flooding.reaches(&api);
    begin(&flooding, &sink, 4 * QUEUE);
    eventually("the queue is full", PATIENT, || {
        (half_open(&world).len() >= usize::from(QUEUE)).then_some(())
    });
    let (from, to) = (FIRST_PORT + 5 * QUEUE, (sink.ip, port::HTTPS));
    let limit = Duration::from_millis(500);
    let given = ByHand::try_open(&flooding, from, to, Odd::default(), limit);
    let opened = given.map(|mut connection| {
        for _ in 0..AGAIN {
            connection.put(0, &[0; 4], Odd::default());
            assert_eq!(connection.answer(4, PATIENT), Answer::Reset, "it carries no name");
        }
        let nameless = |record: &serde_json::Value| record["code"] == "no-name";
        let count = |record: &serde_json::Value| record["count"].as_u64().unwrap_or(1);
        let refused =
            || world.events(&flooding.name).iter().filter(|r| nameless(r)).map(count).sum::<u64>();
        eventually("each is recorded", PATIENT, || Some(refused()).filter(|count| *count > 1))
    });
    assert_eq!(opened, None, "connections, opened by one handshake beyond the queue");
    other.reaches(&api);
    eventually("the queue is empty again", PATIENT, || half_open(&world).is_empty().then_some(()));
    flooding.reaches(&api);
}

/// Promise 37. Attack B10. Guests that ask for much and take nothing hold what the kernel lets one socket hold, and
/// the daemon itself hardly anything; their end frees it.
#[test]
fn connections_with_a_shut_window_hold_a_bounded_memory_and_others_go_on() {
    const HELD: usize = 48;
    const SENT: usize = 2 << 20;
    let world = World::new();
    let (api, echo) = (world.site("api"), world.site("echo"));
    let rules = with_echo(&api, &echo);
    let (hoarding, other) = (world.guest(&rules), world.guest(&rules));
    hoarding.reaches(&api);
    let before = memory(&world);
    let held: Vec<TcpStream> = hoarding.run(|| {
        let hoard = |_| {
            let mut stream = client::connect(echo.at(port::ECHO), PATIENT).expect("connect");
            stream.set_write_timeout(Some(Duration::from_millis(100))).expect("a limit");
            let mut sent = 0;
            // All of it comes back, and none of it is read.
            while let Ok(n) = stream.write(&[7; 1 << 16])
                && sent < SENT
            {
                sent += n;
            }
            stream
        };
        (0..HELD).map(hoard).collect()
    });
    let grown = memory(&world).saturating_sub(before);
    assert!(grown < 16 << 10, "{grown} KiB more for {HELD} connections");
    let queued = |netns: &Netns, words: &[&str]| -> u64 {
        let number = |line: &String, n| line.split_whitespace().nth(n)?.parse::<u64>().ok();
        sockets(netns, words)
            .iter()
            .map(|line| number(line, 1).unwrap_or(0) + number(line, 2).unwrap_or(0))
            .sum()
    };
    let towards = hoarding.internal().to_string();
    let here = queued(&world.taps, &["state", "established", "dst", &towards]);
    assert!(here > 1 << 20, "the control: they do hold something, {here} bytes");
    assert!(here < u64::try_from(HELD).expect("few") * (10 << 20), "{here} bytes");
    other.reaches(&api);
    hoarding.reaches(&api);
    drop(held);
    eventually("what they held is free", PATIENT, || {
        sockets(&world.taps, &["dst", &towards, "sport", "=", ":7"]).is_empty().then_some(())
    });
}

/// Bytes that TCP holds in a namespace, as the kernel accounts for it: received and not read, queued to
/// be sent, and set aside for both.
fn tcp_memory(netns: &Netns) -> u64 {
    let out = netns.command("ss").args(["-Htnm"]).output().expect("run ss");
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let sizes = text.split("skmem:(").skip(1).filter_map(|rest| rest.split(')').next());
    let held = |size: &str| {
        let field =
            |name| size.split(',').find_map(|word| word.strip_prefix(name)?.parse::<u64>().ok());
        ["r", "w", "f"].into_iter().filter_map(field).sum::<u64>()
    };
    sizes.map(held).sum()
}

/// Promise 37. Attack B10. However far the windows of a guest's connections have grown, what they hold of the kernel's
/// memory for TCP, which all guests and the host share, grows no further with their number than a
/// guest's share; its neighbour goes on.
#[test]
fn connections_with_grown_windows_hold_no_more_of_the_memory_of_tcp_than_a_guests_share() {
    const HELD: usize = 48;
    const SHARE: u64 = 256 << 20;
    /// What its windows grow by, in blocks there and back.
    const GROWN: usize = 6;
    let world = World::new();
    let (api, echo) = (world.site("api"), world.site("echo"));
    let rules = with_echo(&api, &echo);
    let (hoarding, other) = (world.guest(&rules), world.guest(&rules));
    // The machine of the test holds what both ends do, too: they are to hold less.
    for netns in [&hoarding.netns, &world.internet] {
        netns.run(|| {
            std::fs::write("/proc/sys/net/ipv4/tcp_rmem", "4096 131072 1048576").expect("set");
            std::fs::write("/proc/sys/net/ipv4/tcp_wmem", "4096 131072 1048576").expect("set");
        });
    }
    let towards = echo.at(port::ECHO);
    let hold = || {
        let mut stream = client::connect(towards, PATIENT).expect("connect");
        let mut block = vec![7; 1 << 18];
        for _ in 0..GROWN {
            stream.write_all(&block).expect("sent");
            stream.read_exact(&mut block).expect("comes back");
        }
        stream.set_write_timeout(Some(Duration::from_millis(100))).expect("a limit");
        // All of it comes back, and none of it is read.
        while stream.write(&block).is_ok() {}
        stream
    };
    let (mut held, mut most) = (Vec::new(), 0);
    while held.len() < HELD {
        held.extend(hoarding.run(|| {
            std::thread::scope(|scope| {
                let holds = [(); 8].map(|()| scope.spawn(hold));
                holds.map(|hold| hold.join().expect("held"))
            })
        }));
        most = tcp_memory(&world.taps) + tcp_memory(&world.host);
        // Before it harms the machine.
        assert!(most < SHARE, "{} connections hold {most} bytes", held.len());
    }
    assert!(most > 32 << 20, "the control: they do hold something, {most} bytes");
    other.reaches(&api);
    hoarding.reaches(&api);
    drop(held);
    eventually("what they held is free", PATIENT, || {
        (tcp_memory(&world.taps) + tcp_memory(&world.host) < most / 8).then_some(())
    });
}

/// Promise 37. A queue that is full is one guest's: while nobody accepts, its neighbour's handshakes still end, and
/// then both are served.
#[test]
fn a_full_accept_queue_is_its_own_guests() {
    const QUEUE: usize = 16;
    let world = World::new();
    world.taps.run(|| {
        let queue = QUEUE.to_string();
        std::fs::write("/proc/sys/net/core/somaxconn", queue).expect("a short queue");
    });
    let api = world.site("api");
    let (greedy, other) = (world.guest(&allow(&[&api])), world.guest(&allow(&[&api])));
    greedy.reaches(&api);
    let text = format!("GET / HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", api.name);
    world.daemon().stop();
    let begun: Vec<Socket> = greedy.run(|| {
        let begin = |_| {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP));
            let socket = socket.expect("a socket");
            socket.set_nonblocking(true).expect("a socket");
            let _ = socket.connect(&api.at(port::HTTP).into());
            socket
        };
        (0..4 * QUEUE).map(begin).collect()
    });
    let waiting = || {
        let listeners = sockets(&world.taps, &["-l"]);
        let queue = |line: &String| line.split_whitespace().nth(1)?.parse::<usize>().ok();
        listeners.iter().filter_map(queue).max().unwrap_or(0)
    };
    eventually("its queue is full", PATIENT, || (waiting() >= QUEUE).then_some(()));
    let connected = other.run(|| client::connect(api.at(port::HTTP), PATIENT));
    world.daemon().go_on();
    let mut connected = connected.expect("the neighbour's queue is its own");
    connected.write_all(text.as_bytes()).expect("sent");
    let mut answer = Vec::new();
    assert_eq!(client::read_to_end(&mut connected, &mut answer, PATIENT), End::Closed);
    assert!(answer.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&answer));
    drop(begun);
    greedy.reaches(&api);
}

/// Promise 37. Attack B19. With its descriptors all but taken the daemon turns connections away, with a reset and
/// a record each, and can still be commanded: whoever hoards is found and removed. It never stops to
/// accept, and serves again as soon as there is room.
#[test]
fn without_descriptors_connections_are_reset_and_recorded_and_the_daemon_can_be_commanded() {
    let world = World::new();
    let api = world.site("api");
    let (greedy, other) = (world.guest(&allow(&[&api])), world.guest(&allow(&[&api])));
    greedy.reaches(&api);
    other.reaches(&api);
    let entries = std::fs::read_dir(format!("/proc/{}/fd", pid(&world)));
    let most = 4 * entries.expect("descriptors").count();
    let mut prlimit = Command::new("prlimit");
    run(prlimit.arg(format!("--pid={}", pid(&world))).arg(format!("--nofile={most}:")));
    let to = api.at(port::HTTPS);
    // Each takes a descriptor until it has said what it wants.
    let mut silent: Vec<TcpStream> = greedy.run(|| {
        let silent = |_| client::connect(to, PATIENT).ok();
        (0..most).filter_map(silent).collect()
    });
    eventually("those beyond its descriptors are turned away", PATIENT, || {
        silent.retain_mut(|stream| {
            stream.set_read_timeout(Some(Duration::from_millis(1))).expect("a limit");
            stream.read(&mut [0]).is_err_and(|e| e.kind() == std::io::ErrorKind::WouldBlock)
        });
        (silent.len() < most * 3 / 4).then_some(())
    });
    assert!(silent.len() > most / 4, "the control: {} of {most} are held", silent.len());
    let hello = client::client_hello(&world.authority, &api.name);
    eventually("others are told, too, and not left waiting", PATIENT, || {
        let enough = |bytes: &[u8]| !bytes.is_empty();
        let reply = other.run(|| client::exchange_until(to, &[&hello], PATIENT, enough));
        // What the daemon has let go of meanwhile is taken again.
        silent.extend(greedy.run(|| client::connect(to, PATIENT)));
        (reply.end == End::Reset).then_some(())
    });
    let health = world.api("GET", "/v1/health", &[]);
    assert_eq!(health.status, 200, "{}", health.text);
    let turned_away = |record: &serde_json::Value| {
        let detail = record["detail"].as_str().unwrap_or_default();
        record["code"] == "limit" && detail.contains("descriptors")
    };
    world.event_that(&greedy.name, "turned away", turned_away);
    world.event_that(&other.name, "turned away", turned_away);
    let removed = world.api("DELETE", &format!("/v1/sandboxes/{}", greedy.name), &[]);
    assert_eq!(removed.status, 204, "{}", removed.text);
    other.reaches(&api);
}

/// Promise 37. Attack B19. Nor do requests that are begun on connections taken before take what is left: with a
/// second descriptor for each of them.
#[test]
fn requests_begun_on_all_connections_there_are_leave_the_api_its_descriptors() {
    let world = World::new();
    let api = world.site("api");
    let greedy = world.guest(&allow(&[&api]));
    greedy.reaches(&api);
    let descriptors =
        || std::fs::read_dir(format!("/proc/{}/fd", pid(&world))).expect("descriptors").count();
    let most = 4 * descriptors();
    let mut prlimit = Command::new("prlimit");
    run(prlimit.arg(format!("--pid={}", pid(&world))).arg(format!("--nofile={most}:")));
    let mut held: Vec<TcpStream> = greedy.run(|| {
        let connect = |_| client::connect(api.at(port::HTTP), PATIENT).ok();
        (0..most).filter_map(connect).collect()
    });
    eventually("all that guests may take are taken", PATIENT, || {
        (descriptors() >= most * 3 / 4).then_some(())
    });
    let begun = held.iter_mut().filter_map(|stream| stream.write_all(b"GET / HTTP/1.1\r\n").ok());
    assert!(begun.count() > most / 4, "the control: they are begun");
    let health = world.api("GET", "/v1/health", &[]);
    assert_eq!(health.status, 200, "{}", health.text);
    let removed = world.api("DELETE", &format!("/v1/sandboxes/{}", greedy.name), &[]);
    assert_eq!(removed.status, 204, "{}", removed.text);
}

/// Promise 37. Attack B07. Who asks two hosts by turns, on one connection, wears out no port of the egress address
/// that all share: what was kept for a host and is not wanted any more leaves its port free.
#[test]
fn requests_to_two_hosts_by_turns_leave_the_neighbours_their_ports() {
    const PORTS: u16 = 64;
    let world = World::new();
    let (one, two) = (world.site("one"), world.site("two"));
    let rules = allow(&[&one, &two]);
    let (greedy, other) = (world.guest(&rules), world.guest(&rules));
    world.host.run(|| {
        let range = format!("{FIRST_PORT} {}", FIRST_PORT + PORTS - 1);
        std::fs::write("/proc/sys/net/ipv4/ip_local_port_range", range).expect("the host's ports");
    });
    let text = |site: &Site| format!("GET / HTTP/1.1\r\nHost: {}\r\n\r\n", site.name);
    greedy.run(|| {
        let mut stream = client::connect(one.at(port::HTTP), PATIENT).expect("connect");
        for site in [&one, &two].repeat(2 * usize::from(PORTS)) {
            stream.write_all(text(site).as_bytes()).expect("sent");
            let mut head = [0; 4096];
            assert!(stream.read(&mut head).expect("an answer") > 0);
        }
    });
    let ask = || {
        client::exchange_until(
            one.at(port::HTTP),
            &[text(&one).as_bytes()],
            PATIENT,
            client::has_head,
        )
    };
    let answer = other.run(ask).text();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let connections = world.origin.connections(one.ip).len();
    assert!(connections > usize::from(PORTS), "the control: {connections} connections");
}

/// Promise 37. Attack B07. Guests that open connections to one host and end them first, which keeps their ports for a
/// minute, and guests that hold theirs, leave some of the ports that all share to the next guest.
#[test]
fn guests_that_open_and_end_connections_to_one_host_leave_their_neighbours_ports() {
    const PORTS: u16 = 64;
    let world = World::new();
    let (api, echo) = (world.site("api"), world.attacker());
    let rules = with_echo(&api, &echo);
    let greedy: Vec<Guest<'_>> = (0..3).map(|_| world.guest(&rules)).collect();
    let other = world.guest(&rules);
    world.host.run(|| {
        let range = format!("{FIRST_PORT} {}", FIRST_PORT + PORTS - 1);
        std::fs::write("/proc/sys/net/ipv4/ip_local_port_range", range).expect("the host's ports");
    });
    // A connection that was served, and not ended yet.
    let open = || {
        let mut stream = client::connect(echo.at(port::ECHO), PATIENT).ok()?;
        stream.write_all(b"\0").ok()?;
        stream.read_exact(&mut [0]).ok().map(|()| stream)
    };
    let mut opened = 0;
    let mut held = Vec::new();
    for (guest, ends) in greedy.iter().zip([true, true, false]) {
        guest.run(|| {
            for mut stream in std::iter::from_fn(open).take(usize::from(PORTS)) {
                opened += 1;
                if ends {
                    stream.shutdown(std::net::Shutdown::Write).expect("the guest's end");
                    let end = client::read_to_end(&mut stream, &mut Vec::new(), PATIENT);
                    assert_eq!(end, End::Closed);
                } else {
                    held.push(stream);
                }
            }
        });
    }
    assert!(opened > PORTS / 2, "the control: {opened} of them were taken");
    let refused = world.event(&greedy[1].name, &[("outcome", "deny"), ("code", "limit")]);
    assert!(refused["detail"].as_str().is_some_and(|why| why.contains("port")), "{refused}");
    assert!(other.run(open).is_some(), "the neighbour is refused");
    drop(held);
}

/// Promise 37. What a guest's connections hold of the daemon's own memory is bounded, and is used again
/// by those that come after them.
#[test]
fn a_thousand_unfinished_heads_and_hellos_of_one_guest_hold_little_of_the_daemon() {
    const MANY: usize = 1000;
    let world = World::new();
    let api = world.site("api");
    let guest = world.guest(&allow(&[&api]));
    guest.reaches(&api);
    let held = || memory(&world) >> 10;
    let before = held();
    let host = &api.name;
    let head = format!("GET / HTTP/1.1\r\nHost: {host}\r\nX: {}", "a".repeat(64_000));
    let upload = format!(
        "POST /bytes/3000000 HTTP/1.1\r\nHost: {host}\r\nX: {}\r\nContent-Length: 900000\r\n\r\n{}",
        "a".repeat(7_000),
        "x".repeat(300_000)
    );
    let hello = [b"\x16\x03\x01\x40\x00\x01\x00\xf0\x00".as_slice(), &[0; 16_000]].concat();
    let kinds = [
        ("heads", 80, head.as_bytes()),
        ("uploads", 80, upload.as_bytes()),
        ("hellos", 443, &hello),
    ];
    for (what, port, bytes) in kinds.iter().chain(&kinds).copied() {
        let mut open = Vec::new();
        for _ in 0..MANY {
            // A guest may have little more than that open, and what it sent before may still be on its way.
            let stream = eventually("there is room for one more", PATIENT * 3, || {
                guest.run(|| client::connect(api.at(port), PATIENT)).ok()
            });
            stream.set_nonblocking(true).expect("set");
            let _ = Write::write(&mut &stream, bytes);
            open.push(stream);
        }
        for _ in 0..3 {
            for stream in &open {
                let _ = Write::write(&mut &*stream, bytes);
            }
        }
        let most = held();
        assert!(most < before + 160, "{MANY} {what}: {most} MiB, and {before} before");
        drop(open);
    }
    guest.reaches(&api);
}
