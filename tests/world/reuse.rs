//! A slot's next guest gets nothing of the last one, and the last one's far sides nothing of the next.

use std::collections::BTreeSet;
use std::io::Write;
use std::net::{Ipv4Addr, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use hickory_proto::rr::RecordType;
use nix::errno::Errno;
use nix::unistd::{read, write};
use policy::Slot;
use policy::net::{GATEWAY_MAC, GUEST_IP, GUEST_MAC};
use socket2::{Domain, Protocol, Socket, Type};
use world::client::{self, PATIENT};
use world::origin::port;
use world::poll::eventually;
use world::wire::Seen;
use world::{Guest, Site, World, allow};

/// One slot, which does not rest: the next guest comes at once.
const ONE_SLOT: &str = "[guests]\nsandboxes = 1\nslot_rest = \"0ms\"\n";
/// How long the new tap is listened to.
const LISTEN: Duration = Duration::from_secs(3);

/// A new sandbox's tap, held as a hypervisor holds it, so that no frame to it is missed.
struct Bare {
    name: String,
    slot: Slot,
    tap: OwnedFd,
}

impl Bare {
    fn new(world: &World, policy: &str) -> Self {
        let name = world.fresh_name();
        let created = world.create(&name, "next", policy);
        assert_eq!(created.status, 201, "{}", created.text);
        let slot = created.json["tap"].as_str().and_then(Slot::of_tap).expect("a tap");
        let tap = world.taps.run(|| vmm::tap::attach(slot).expect("its tap"));
        Self { name, slot, tap }
    }

    /// What the tap has for its guest now.
    fn frames(&self) -> Vec<Seen> {
        let mut frame = vec![0; 1 << 17];
        let mut seen = Vec::new();
        loop {
            match read(&self.tap, &mut frame) {
                Ok(length) => seen.extend(Seen::of(&frame[vmm::tap::VNET_HEADER..length])),
                Err(Errno::EAGAIN) => return seen,
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn send(&self, frame: &[u8]) {
        let whole = [&[0; vmm::tap::VNET_HEADER], frame].concat();
        write(&self.tap, &whole).expect("the tap takes it");
    }
}

/// A question in a frame.
fn question(name: &str, from: u16) -> Vec<u8> {
    let query = client::query(name, RecordType::A).to_vec().expect("a query");
    let mut frame = Vec::new();
    etherparse::PacketBuilder::ethernet2(GUEST_MAC, GATEWAY_MAC)
        .ipv4(GUEST_IP.octets(), Ipv4Addr::new(8, 8, 8, 8).octets(), 64)
        .udp(from, 53)
        .write(&mut frame, &query)
        .expect("a frame");
    frame
}

/// A connection from a port of the caller's choice.
fn connect_from(from: u16, to: std::net::SocketAddr) -> TcpStream {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP)).expect("a socket");
    socket.set_reuse_address(true).expect("a socket");
    socket.bind(&std::net::SocketAddr::from(([0, 0, 0, 0], from)).into()).expect("a port");
    socket.connect_timeout(&to.into(), PATIENT).expect("connect");
    socket.into()
}

/// Fills every queue of a guest: towards it, from it, and beyond.
fn clog(guest: &Guest<'_>, echo: &Site) -> Vec<TcpStream> {
    guest.run(|| {
        let clog = |n: u16| {
            let mut stream = connect_from(40_000 + n, echo.at(port::ECHO));
            stream.set_write_timeout(Some(Duration::from_secs(1))).expect("a limit");
            let mut sent = 0;
            // The machine may stand still for a second with little sent.
            eventually("all queues are full", PATIENT, || {
                while sent < 24 << 20
                    && let Ok(n) = stream.write(&[7; 1 << 16])
                {
                    sent += n;
                }
                (sent > 1 << 20).then_some(())
            });
            stream
        };
        (0..8).map(clog).collect()
    })
}

/// Asks for much and reads nothing of it, so that what is queued is for the guest alone.
fn fetch_unread(guest: &Guest<'_>, site: &Site) -> Vec<TcpStream> {
    let text = format!("GET /bytes/12000000 HTTP/1.1\r\nHost: {}\r\n\r\n", site.name);
    guest.run(|| {
        let fetch = |n: u16| {
            let mut stream = connect_from(42_000 + n, site.at(port::HTTP));
            stream.write_all(text.as_bytes()).expect("sent");
            // Its window is shut once this much has come.
            eventually("much has come", PATIENT, || {
                let come = stream.peek(&mut [0; 1 << 16]).expect("the answer");
                (come > 1 << 15).then_some(())
            });
            stream
        };
        (0..4).map(fetch).collect()
    })
}

/// Promise 38. Attacks B12, P36. Removed with everything in flight: bytes queued towards the guest,
/// from it and at the far side, which goes on sending, questions that are still open. The next guest
/// gets the same slot at once, and on its tap there is silence.
#[test]
fn nothing_of_a_removed_guest_reaches_the_next_one_of_its_slot_nor_the_other_way() {
    let world = World::with(ONE_SLOT);
    let (api, echo, slow) = (world.site("api"), world.site("echo"), world.site("slow"));
    let rules = format!(
        "{}[[rule]]\nallow = [\"{}\"]\nports = [{}]\n",
        allow(&[&api, &slow]),
        echo.ip,
        port::ECHO
    );
    let mut old = world.guest(&rules);
    old.reaches(&api);
    let held = clog(&old, &echo);
    // One may have been sent again.
    let ours: BTreeSet<u16> = world
        .sent(|seen| seen.is_to(echo.ip) && seen.opens)
        .iter()
        .filter_map(|seen| seen.ports.map(|(from, _)| from))
        .collect();
    assert_eq!(ours.len(), held.len());
    let fetched = fetch_unread(&old, &api);
    // Half a hello, and questions nobody has answered yet.
    let half = old.run(|| connect_from(41_000, api.at(443)));
    (&half).write_all(&client::client_hello(&world.authority, &api.name)[..40]).expect("sent");
    world.names.silence(&slow.name);
    for n in 0..20 {
        old.cable.inject(&question(&slow.name, 30_000 + n)).expect("sent");
    }
    eventually("the question is under way", PATIENT, || {
        (!world.names.asked(&slow.name).is_empty()).then_some(())
    });
    let slot = old.slot;
    old.cable.unplug();
    let removed = world.api("DELETE", &format!("/v1/sandboxes/{}", old.name), &[]);
    assert_eq!(removed.status, 204, "{}", removed.text);
    let sent_by_now = world.sent(|seen| seen.is_to(echo.ip)).len();

    let next = Bare::new(&world, &rules);
    assert_eq!(next.slot, slot, "the same slot");
    let stop = AtomicBool::new(false);
    let heard = std::thread::scope(|scope| {
        // What the far side may still send, and what is not of a connection any more.
        scope.spawn(|| {
            world.internet.run(|| {
                let socket = UdpSocket::bind((world::world::UPSTREAM, 0)).expect("bind");
                while !stop.load(Relaxed) {
                    for port in &ours {
                        let _ = socket.send_to(b"late", (world::world::EGRESS, *port));
                    }
                    std::thread::sleep(Duration::from_millis(5));
                }
            });
        });
        let end = Instant::now() + LISTEN;
        let mut heard = Vec::new();
        while Instant::now() < end {
            heard.extend(next.frames());
            std::thread::sleep(Duration::from_millis(1));
        }
        stop.store(true, Relaxed);
        heard
    });
    assert_eq!(heard, [], "the new tap is silent");
    let later = world.sent(|seen| seen.is_to(echo.ip));
    let after: Vec<_> = later[sent_by_now.min(later.len())..].iter().filter(|s| !s.reset).collect();
    assert!(after.is_empty(), "the old guest's far side is sent nothing more: {after:?}");

    // The control: on the same tap an answer of the new guest's own is heard.
    next.send(&question(&api.name, 31_000));
    eventually("its own answer", PATIENT, || {
        let answered = |seen: &Seen| seen.ports == Some((53, 31_000));
        next.frames().iter().any(answered).then_some(())
    });
    drop((held, fetched, half));
    let Bare { name, tap, .. } = next;
    drop(tap);
    assert_eq!(world.api("DELETE", &format!("/v1/sandboxes/{name}"), &[]).status, 204);

    // And with the same address, port and destination as a connection of the first one.
    let third = world.guest(&rules);
    assert_eq!(third.slot, slot);
    let echoed = third.run(|| {
        let mut stream = connect_from(40_000, echo.at(port::ECHO));
        stream.write_all(b"mine\r\n").expect("sent");
        stream.shutdown(std::net::Shutdown::Write).expect("half-closed");
        let mut bytes = Vec::new();
        client::read_to_end(&mut stream, &mut bytes, PATIENT);
        bytes
    });
    assert_eq!(echoed, b"mine\r\n");
    third.reaches(&api);
}

/// Promise 38. Attack P36. What one guest was told by DNS means nothing for the next: a name is pinned
/// to an address for who asked.
#[test]
fn what_a_guest_was_told_is_forgotten_with_it() {
    let world = World::with(ONE_SLOT);
    let db = world.site("db");
    let rules = format!("[[rule]]\nallow = [{:?}]\nports = [{}]\n", db.name, port::SERVER_FIRST);
    let greeted = |guest: &Guest<'_>| {
        guest.run(|| {
            let enough = |bytes: &[u8]| bytes == world::origin::GREETING;
            client::exchange_until(db.at(port::SERVER_FIRST), &[], PATIENT, enough)
        })
    };
    let query = client::query(&db.name, RecordType::A);
    let resolver = (policy::net::GATEWAY_IP, 53).into();
    let first = world.guest(&rules);
    first.run(|| client::ask_udp(resolver, &query)).expect("an answer");
    assert_eq!(greeted(&first).bytes, world::origin::GREETING, "the control");
    let slot = first.slot;
    drop(first);
    let second = world.guest(&rules);
    assert_eq!(second.slot, slot);
    assert_eq!(greeted(&second).end, client::End::Reset, "it was told nothing");
    second.run(|| client::ask_udp(resolver, &query)).expect("an answer");
    assert_eq!(greeted(&second).bytes, world::origin::GREETING);
}

/// Attack A16. A guest that claims to be the gateway, another guest or a server of addresses, from
/// its first frame on, changes nothing: neighbours are set and not learnt.
#[test]
fn a_guest_that_claims_other_addresses_changes_no_neighbour() {
    let world = World::shared();
    let api = world.site("api");
    let (guest, other) = (world.guest(&allow(&[&api])), world.guest(&allow(&[&api])));
    let neighbours = || {
        let out = world.taps.command("ip").args(["-o", "neigh"]).output().expect("ip neigh");
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        let of = [guest.slot.tap(), other.slot.tap()];
        let mut lines: Vec<String> = text
            .lines()
            .filter(|line| line.split(' ').any(|word| of.iter().any(|tap| tap == word)))
            .map(str::to_owned)
            .collect();
        lines.sort();
        lines
    };
    let before = neighbours();
    assert_eq!(before.len(), 2, "{before:?}");
    assert!(before.iter().all(|line| line.contains("PERMANENT")), "{before:?}");
    for mac in [GUEST_MAC, GATEWAY_MAC, [2, 0, 0, 0, 0, 9]] {
        for claimed in [GUEST_IP, policy::net::GATEWAY_IP, other.internal(), guest.internal()] {
            for (operation, to) in [(1, [0xff; 6]), (2, [0xff; 6]), (2, GATEWAY_MAC)] {
                let mut frame = [&to[..], &mac, &[8, 6, 0, 1, 8, 0, 6, 4, 0, operation]].concat();
                frame.extend([&mac[..], &claimed.octets(), &[0; 6], &claimed.octets()].concat());
                guest.cable.inject(&frame).expect("the tap takes it");
            }
        }
    }
    guest.reaches(&api);
    other.reaches(&api);
    assert_eq!(neighbours(), before);
}
