//! Taps in a namespace of the test's own. Needs root.
#![expect(clippy::expect_used, reason = "tests: what does not hold ends the test")]

use std::fs;
use std::os::fd::AsRawFd;
use std::process::Command;
use std::thread;
use std::time::Duration;

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
