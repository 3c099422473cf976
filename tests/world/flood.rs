//! One guest at full rate, and what its neighbour notices of it.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use etherparse::PacketBuilder;
use policy::net::{GATEWAY_MAC, GUEST_IP, GUEST_MAC};
use world::client::{self, End, PATIENT};
use world::origin::port;
use world::poll::eventually;
use world::{Guest, Site, World, allow};

/// A segment with one byte, of no connection.
fn tiny(to: &Site) -> Vec<u8> {
    let mut frame = Vec::new();
    PacketBuilder::ethernet2(GUEST_MAC, GATEWAY_MAC)
        .ipv4(GUEST_IP.octets(), to.ip.octets(), 64)
        .tcp(40_000, 443, 1, 64_000)
        .ack(1)
        .write(&mut frame, b"x")
        .expect("a frame");
    frame
}

/// A question that is none, of the least length.
fn question(to: &Site) -> Vec<u8> {
    let mut frame = Vec::new();
    PacketBuilder::ethernet2(GUEST_MAC, GATEWAY_MAC)
        .ipv4(GUEST_IP.octets(), to.ip.octets(), 64)
        .udp(40_000, 53)
        .write(&mut frame, b"x")
        .expect("a frame");
    frame
}

/// How long each of these requests of a guest takes, in order of length.
fn requests(guest: &Guest<'_>, to: &Site, count: usize) -> Vec<Duration> {
    let text = format!("GET / HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", to.name);
    let mut took: Vec<_> = guest.run(|| {
        let request = |_| {
            let reply = client::exchange(to.at(port::HTTP), &[text.as_bytes()], PATIENT);
            assert_eq!(reply.end, End::Closed, "{reply:?}");
            assert!(reply.text().starts_with("HTTP/1.1 200"), "{}", reply.text());
            reply.took
        };
        (0..count).map(request).collect()
    });
    took.sort();
    took
}

/// The same while another guest sends tiny frames as fast as it can; and how many it sent.
fn requests_in_a_flood(
    (flooding, frame): (&Guest<'_>, &[u8]),
    (guest, to): (&Guest<'_>, &Site),
    count: usize,
) -> (Vec<Duration>, usize) {
    let (sent, done) = (AtomicUsize::new(0), AtomicBool::new(false));
    let took = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Relaxed) {
                // A tap whose queue is full refuses it, as it would a hypervisor.
                let _ = flooding.cable.inject(frame);
                sent.fetch_add(1, Relaxed);
            }
        });
        eventually("the flood is under way", PATIENT, || {
            (sent.load(Relaxed) > 20_000).then_some(())
        });
        let took = requests(guest, to, count);
        done.store(true, Relaxed);
        took
    });
    (took, sent.load(Relaxed))
}

/// Promise 37. Attacks A14, K10. A flood of the smallest frames ends at the tap of its guest: it is counted, and
/// the neighbour's requests go on.
#[test]
fn a_flood_of_tiny_frames_is_dropped_at_the_tap_and_a_neighbour_goes_on() {
    let world = World::with("[guests]\npackets = 2000\n");
    let (api, sink) = (world.site("api"), world.attacker());
    let (flooding, other) = (world.guest(&allow(&[&api])), world.guest(&allow(&[&api])));
    for frame in [tiny(&sink), question(&sink)] {
        let (took, _) = requests_in_a_flood((&flooding, &frame), (&other, &api), 50);
        assert!(took.last().is_some_and(|longest| *longest < PATIENT), "{took:?}");
    }
    world.event_that(&flooding.name, "of its rate", |record| {
        record["detail"].as_str().is_some_and(|detail| detail.starts_with("rate"))
    });
    assert_eq!(world.sent_to(sink.ip), []);
    // The bucket fills again, and the guest is let on.
    flooding.reaches(&api);
}

/// Not a claim but a measurement: `cargo test -p postern-tests --test world -- --ignored --nocapture
/// what_a_flood`, with the daemon and the tests built with `--release`.
#[test]
#[ignore = "a measurement, not a claim"]
fn what_a_flood_of_tiny_frames_costs_a_neighbour() {
    for packets in [10_000_000, 100_000, 20_000, 2_000] {
        let world = World::with(&format!("[guests]\npackets = {packets}\n"));
        let (api, sink) = (world.site("api"), world.attacker());
        let (flooding, other) = (world.guest(&allow(&[&api])), world.guest(&allow(&[&api])));
        let at = |took: &[Duration], share: usize| took[(took.len() - 1) * share / 100];
        let alone = requests(&other, &api, 300);
        let figures = |took: &[Duration]| (at(took, 50), at(took, 99));
        println!("{packets} frames a second: alone p50, p99 {:?}", figures(&alone));
        for (what, frame) in [("segments", tiny(&sink)), ("questions", question(&sink))] {
            let before = processor_time(&world);
            let (took, sent) = requests_in_a_flood((&flooding, &frame), (&other, &api), 300);
            let used = processor_time(&world) - before;
            println!("  {sent} {what}: {:?}, the daemon {used} ticks", figures(&took));
        }
    }
}

/// What the daemon has used of the processors, in ticks (proc(5)).
fn processor_time(world: &World) -> u64 {
    let pid = world.daemon().pid().expect("it runs");
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("its figures");
    stat.split_whitespace().skip(13).take(2).filter_map(|n| n.parse::<u64>().ok()).sum()
}
