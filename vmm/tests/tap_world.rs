//! Taps in a namespace of the test's own. Needs root.
#![expect(
    clippy::disallowed_methods,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "tests: what does not hold ends the test"
)]

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::Command;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl};
use nix::net::if_::if_nametoindex;
use nix::sched::{CloneFlags, unshare};
use policy::Slot;
use vmm::{Error, tap};

/// Runs `act` on a thread in a new network namespace.
fn in_a_new_world(act: fn(Slot)) {
    let world = move || {
        unshare(CloneFlags::CLONE_NEWNET).expect("root");
        act(Slot::new(7).expect("in range"));
    };
    thread::spawn(world).join().expect("the claim holds");
}

fn ip(arguments: &[&str]) -> String {
    let output = Command::new("ip").args(arguments).output().expect("ip runs");
    assert!(
        output.status.success(),
        "ip {arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn a_tap_outlives_its_descriptor_and_is_opened_again() {
    in_a_new_world(|slot| {
        drop(tap::create(slot, None).expect("made"));
        assert!(if_nametoindex("pt7").is_ok(), "persistent");
        drop(tap::attach(slot).expect("opened again"));
        ip(&["link", "delete", "pt7"]);
        assert!(tap::attach(slot).is_err(), "gone");
    });
}

/// As a guest's that sleeps: what its kernel and the host's know of each other is true again.
#[test]
fn a_tap_that_is_opened_again_has_its_carrier_address_and_neighbour() {
    in_a_new_world(|slot| {
        let held = tap::create(slot, None).expect("made");
        ip(&["link", "set", "pt7", "up", "address", "02:00:00:00:00:01"]);
        let neighbour = ["lladdr", "02:00:00:00:00:02", "dev", "pt7", "nud", "permanent"];
        ip(&[&["neighbour", "add", "169.254.100.2"][..], &neighbour].concat());
        let neighbours = || ip(&["neighbour", "show", "dev", "pt7"]);
        let link = || ip(&["link", "show", "pt7"]);
        assert!(!link().contains("NO-CARRIER"), "control: {}", link());
        drop(held);
        let deadline = Instant::now() + Duration::from_secs(5);
        while !link().contains("NO-CARRIER") {
            assert!(Instant::now() < deadline, "nobody has it: {}", link());
        }
        let held = tap::attach(slot).expect("opened again");
        while link().contains("NO-CARRIER") {
            assert!(Instant::now() < deadline, "it is open: {}", link());
        }
        assert!(link().contains("02:00:00:00:00:01"), "{}", link());
        assert!(neighbours().contains("02:00:00:00:00:02 PERMANENT"), "{}", neighbours());
        drop(held);
    });
}

#[test]
fn a_tap_that_a_starting_process_still_holds_is_waited_for() {
    in_a_new_world(|slot| {
        let held = tap::create(slot, None).expect("made");
        let lets_go = thread::spawn(move || {
            thread::sleep(Duration::from_millis(50));
            drop(held);
        });
        tap::attach(slot).expect("free after a moment");
        lets_go.join().expect("done");
    });
}

#[test]
fn a_tap_is_made_as_the_router_and_the_hypervisor_expect_it() {
    in_a_new_world(|slot| {
        let fd = tap::create(slot, Some(64_007)).expect("made");
        let details = ip(&["-d", "link", "show", "pt7"]);
        for word in ["type tap", "pi off", "vnet_hdr on", "persist on", "user 64007", "state DOWN"]
        {
            assert!(details.contains(word), "{word} in {details}");
        }
        let flags = OFlag::from_bits_retain(fcntl(&fd, FcntlArg::F_GETFL).expect("open"));
        assert!(flags.contains(OFlag::O_NONBLOCK));
        let flags = FdFlag::from_bits_retain(fcntl(&fd, FcntlArg::F_GETFD).expect("open"));
        assert!(flags.contains(FdFlag::FD_CLOEXEC));
        let info =
            fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd())).expect("open");
        assert!(info.contains("iff:\tpt7"), "{info}");
    });
}

#[test]
fn a_frame_carries_a_header_of_twelve_bytes() {
    in_a_new_world(|slot| {
        let fd = tap::create(slot, None).expect("made");
        ip(&["link", "set", "pt7", "up", "address", "02:00:00:00:00:01"]);
        // An ARP request, broadcast by the kernel when it looks for a neighbour.
        ip(&["address", "add", "169.254.100.1/30", "dev", "pt7"]);
        let ping = Command::new("ping").args(["-c1", "-W1", "169.254.100.2"]).output();
        ping.expect("ping runs");
        let mut frames = Vec::new();
        let mut buffer = [0; 2048];
        while let Ok(length) = nix::unistd::read(&fd, &mut buffer) {
            frames.push(buffer[..length].to_vec());
        }
        let ethernet = tap::VNET_HEADER;
        let arp = |frame: &Vec<u8>| frame[ethernet..][12..14] == [0x08, 0x06];
        let arp = frames.iter().find(|frame| arp(frame)).expect("an ARP request");
        assert_eq!(arp[ethernet..][..6], [0xff; 6]);
        assert_eq!(arp[ethernet + 6..][..6], [2, 0, 0, 0, 0, 1]);
    });
}

#[test]
fn a_tap_is_never_made_twice_nor_opened_twice() {
    in_a_new_world(|slot| {
        let refused = |outcome: Result<_, Error>, wanted| {
            assert!(matches!(outcome, Err(Error::Tap { act, .. }) if act == wanted), "{wanted}");
        };
        assert!(tap::attach(slot).is_err(), "attaching makes nothing");
        assert!(if_nametoindex("pt7").is_err());
        let held = tap::create(slot, None).expect("made");
        refused(tap::create(slot, None), "create");
        refused(tap::attach(slot), "attach");
        drop(held);
        refused(tap::create(slot, None), "create");
        tap::attach(slot).expect("free now");
    });
}

/// The longest frame that a full stream of TCP between two taps is made of, each of which has a kernel
/// of its own behind it and hands its frames to the other.
fn longest_frame_of_a_stream(offloaded: bool) -> usize {
    const BYTES: usize = 4 << 20;
    let (done, ended) = mpsc::channel::<()>();
    let (to_pump, ends) = mpsc::channel::<OwnedFd>();
    let (listening, ready) = mpsc::channel::<()>();
    let open = move |n: u8, to_pump: &mpsc::Sender<OwnedFd>| {
        unshare(CloneFlags::CLONE_NEWNET).expect("root");
        let fd = tap::create(Slot::new(7).expect("in range"), None).expect("made");
        if offloaded {
            tap::offload(&fd).expect("offloaded");
        }
        ip(&["address", "add", &format!("192.0.2.{n}/24"), "dev", "pt7"]);
        ip(&["link", "set", "pt7", "up"]);
        to_pump.send(fd).expect("the pump runs");
    };
    let sink = to_pump.clone();
    let server = thread::spawn(move || {
        open(1, &sink);
        let listener = TcpListener::bind("192.0.2.1:7").expect("bind");
        listening.send(()).expect("the client waits");
        let mut heard = Vec::new();
        listener.accept().expect("a client").0.read_to_end(&mut heard).expect("to its end");
        assert!(heard.len() == BYTES && heard.iter().all(|byte| *byte == 0x5a), "whole");
        drop(done);
    });
    let client = thread::spawn(move || {
        open(2, &to_pump);
        ready.recv().expect("the server listens");
        let mut stream = TcpStream::connect("192.0.2.1:7").expect("connect");
        stream.write_all(&vec![0x5a; BYTES]).expect("sent");
    });
    let taps: Vec<OwnedFd> = ends.iter().take(2).collect();
    let deadline = Instant::now() + Duration::from_secs(30);
    let (mut buffer, mut longest) = (vec![0; 1 << 17], 0);
    while ended.try_recv() == Err(mpsc::TryRecvError::Empty) {
        assert!(Instant::now() < deadline, "the stream ends");
        for (from, to) in [(&taps[0], &taps[1]), (&taps[1], &taps[0])] {
            while let Ok(length) = nix::unistd::read(from, &mut buffer) {
                longest = longest.max(length - tap::VNET_HEADER);
                let _ = nix::unistd::write(to, &buffer[..length]);
            }
        }
    }
    server.join().expect("all of it arrived");
    client.join().expect("all of it was sent");
    longest
}

#[test]
fn an_offloaded_tap_hands_over_segments_longer_than_a_frame_and_they_arrive_whole() {
    const ETHERNET: usize = 14 + 1500;
    assert!(longest_frame_of_a_stream(false) <= ETHERNET, "control: none until somebody asks");
    assert!(longest_frame_of_a_stream(true) > 4 * ETHERNET);
}

#[test]
fn only_a_tap_is_offloaded() {
    let refused = tap::offload(&File::open("/dev/null").expect("there").into());
    assert!(matches!(refused, Err(Error::Tap { act: "offload", .. })));
}
