//! The fence in a real kernel: what it lets in, what it refuses and counts, and what is left when
//! it is edited or gone. Needs root; every namespace is made for one test and removed after it.
#![expect(
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a test ends where the world is not as it must be"
)]

mod alien;
mod budget;
mod frames;
mod wire;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use egress::fence::{self, Reason, SlotFence};
use egress::world::World;
use egress::{Error, drops, link};
use policy::{Reach, Slot};
use socket2::{Socket, Type};
use wire::{Netns, PATIENCE, Wire, connect, guest, run, transparent, unique, world};

const GROUP: u16 = 5;
/// How long it is waited for what must not come.
const BRIEF: Duration = Duration::from_millis(400);

fn slot(n: u16) -> Slot {
    Slot::new(n).expect("in range")
}

fn outside(port: u16) -> SocketAddr {
    SocketAddr::from(([192, 0, 2, 80], port))
}

/// The router's TCP listener, and its port.
async fn listener(world: &World) -> (Socket, u16) {
    world
        .run(|| {
            let socket = transparent(Type::STREAM, 0);
            let bound = socket.local_addr().expect("bound").as_socket().expect("an address");
            (socket, bound.port())
        })
        .await
        .expect("the world")
}

/// Everything the router does to attach a slot, in its order; then the guest notices, too.
async fn attach(world: &World, at: Slot, with: &SlotFence, guest: &Netns) {
    fence::attach(world, at, with).await.expect("the fence");
    link::prepare(world, at).await.expect("the tap");
    link::up(world, at).await.expect("the tap");
    assert!(link::carrier(world, at, PATIENCE).await.expect("the tap"));
    wire::wait_for_carrier(guest);
}

async fn counted(world: &World, at: Slot) -> BTreeMap<&'static str, u64> {
    let counters = fence::counters(world, at).await.expect("counters");
    counters.into_iter().map(|(reason, packets, _)| (reason.as_str(), packets)).collect()
}

/// The same as soon as it holds; as it is in the end, if it never does. Frames are counted a moment after
/// they were sent.
async fn counted_until(
    world: &World,
    at: Slot,
    holds: impl Fn(&BTreeMap<&'static str, u64>) -> bool,
) -> BTreeMap<&'static str, u64> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let found = counted(world, at).await;
        if holds(&found) || Instant::now() > deadline {
            return found;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// The text without what nftables leaves out because something else implies it.
fn implied_left_out(text: &str) -> String {
    let text = ["meta nfproto ipv4 ", "meta l4proto icmp ", "meta l4proto udp "]
        .iter()
        .fold(text.to_owned(), |text, implied| text.replace(implied, ""));
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[tokio::test]
async fn entering_a_world_twice_finds_it_as_it_is() {
    let (first, netns) = world().await;
    let second = World::enter(&netns.0).await.expect("again");
    let rules = netns.exec("ip rule show");
    assert_eq!(rules.matches("fwmark 0x1 lookup 100").count(), 1, "{rules}");
    assert_eq!(
        netns.exec("ip route show table 100").trim(),
        "local default dev lo proto static scope host"
    );
    assert_eq!(netns.exec("cat /proc/sys/net/ipv4/ip_forward").trim(), "0");
    let own = || std::fs::read_link("/proc/thread-self/ns/net").expect("a namespace");
    let (a, b) = (first.run(own).await.expect("alive"), second.run(own).await.expect("alive"));
    assert_eq!(a, b);
    assert_ne!(a, own(), "never the namespace of who asks");
}

#[tokio::test]
async fn a_world_with_an_uplink_is_refused() {
    let (_, netns) = world().await;
    netns.exec("ip link add pt3 type veth peer name pt4");
    World::enter(&netns.0).await.expect("taps are no uplink");
    netns.exec("ip link add uplink0 type veth peer name pt5");
    let refused = World::enter(&netns.0).await.expect_err("an uplink");
    assert!(matches!(&refused, Error::Uplink { link, .. } if link == "uplink0"), "{refused}");
}

#[tokio::test]
async fn a_name_that_leaves_the_directory_is_refused() {
    for name in ["", "..", "a/b", "../../tmp/x"] {
        World::enter(name).await.expect_err(name);
    }
}

#[tokio::test]
async fn nft_lists_the_base_as_it_is_printed() {
    let (world, netns) = world().await;
    fence::install_base(&world, 3128).await.expect("the base");
    fence::install_base(&world, 3128).await.expect("again");
    let listed = netns.exec("nft list ruleset");
    let printed = fence::base(3128).to_string();
    assert_eq!(implied_left_out(&listed), implied_left_out(&printed));
}

#[tokio::test]
async fn nft_makes_the_same_rules_of_the_text_as_the_encoder() {
    let (ours, netns) = world().await;
    netns.exec("ip tuntap add pt7 mode tap");
    fence::install_base(&ours, 3128).await.expect("the base");
    let reach = |net: &str, ports| Reach { net: net.parse().expect("a network"), ports };
    let udp = vec![
        reach("0.0.0.0/0", Some((3478, 3478))),
        reach("10.128.0.0/9", None),
        reach("192.0.2.0/24", Some((5000, 5010))),
        reach("192.0.2.7/32", None),
    ];
    let fence = SlotFence { udp, ..SlotFence::new(GROUP) };
    fence::attach(&ours, slot(7), &fence).await.expect("the fence");

    let other = Netns(unique("text"));
    run(&format!("ip netns add {}", other.0));
    other.exec("ip tuntap add pt7 mode tap");
    let ruleset = fence::ruleset(3128, &[(slot(7), fence)]);
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(&file, ruleset.to_string()).expect("written");
    other.exec(&format!("nft -f {}", file.path().display()));

    assert_eq!(netns.exec("nft list ruleset"), other.exec("nft list ruleset"));
}

/// Promise 27. Attack B15.
#[tokio::test]
async fn a_batch_with_a_bad_rule_changes_nothing_and_names_the_rule() {
    let (world, netns) = world().await;
    netns.exec("ip tuntap add pt1 mode tap");
    fence::install_base(&world, 3128).await.expect("the base");
    let good = SlotFence::new(GROUP);
    fence::attach(&world, slot(1), &good).await.expect("the fence");
    let before = netns.exec("nft list ruleset");
    let bad = SlotFence { syn_rate: 0, ..good.clone() };
    let refused = fence::attach(&world, slot(1), &bad).await.expect_err("a rate of nothing");
    assert!(refused.to_string().contains("limit rate 0/second"), "{refused}");
    assert_eq!(netns.exec("nft list ruleset"), before);
    fence::verify(&world, slot(1), &good).await.expect("still whole");
}

/// Promise 27.
#[tokio::test]
async fn reading_back_finds_every_kind_of_foreign_edit_and_attach_repairs_it() {
    let (world, netns) = world().await;
    netns.exec("ip tuntap add pt1 mode tap");
    fence::install_base(&world, 3128).await.expect("the base");
    let meant = SlotFence::new(GROUP);
    fence::attach(&world, slot(1), &meant).await.expect("the fence");
    for edit in [
        "nft insert rule netdev postern_0 guest_pt1 accept",
        "nft add rule netdev postern_0 out_pt1 accept",
        "nft flush chain netdev postern_0 in_pt1",
        "nft add rule netdev postern_0 udp_pt1 accept",
        "nft chain netdev postern_0 in_pt1 { policy accept; }",
    ] {
        fence::verify(&world, slot(1), &meant).await.expect("whole before the edit");
        netns.exec(edit);
        let found = fence::verify(&world, slot(1), &meant).await.expect_err(edit);
        assert!(matches!(found, Error::Differs { .. }), "{edit}: {found}");
        fence::attach(&world, slot(1), &meant).await.expect("repaired");
    }
    let other = SlotFence { syn_rate: 199, ..meant.clone() };
    fence::verify(&world, slot(1), &other).await.expect_err("another rate");
}

#[tokio::test]
async fn a_slot_is_present_until_it_is_detached_even_when_its_tap_went_first() {
    let (world, netns) = world().await;
    fence::install_base(&world, 3128).await.expect("the base");
    for n in [1, 2] {
        netns.exec(&format!("ip tuntap add pt{n} mode tap"));
        fence::attach(&world, slot(n), &SlotFence::new(GROUP)).await.expect("the fence");
    }
    assert_eq!(fence::present(&world).await.expect("slots"), [slot(1), slot(2)]);
    assert_eq!(link::list(&world).await.expect("taps"), [slot(1), slot(2)]);
    link::delete(&world, slot(1)).await.expect("the tap");
    link::delete(&world, slot(1)).await.expect("already gone");
    fence::detach(&world, slot(1)).await.expect("detached");
    fence::detach(&world, slot(1)).await.expect("already gone");
    assert_eq!(fence::present(&world).await.expect("slots"), [slot(2)]);
    let rules = netns.exec("nft list ruleset");
    assert!(!rules.contains("pt1") && rules.contains("in_pt2"), "{rules}");
    fence::detach(&world, slot(2)).await.expect("detached");
    link::down(&world, slot(2)).await.expect("down");
    fence::flush(&world).await.expect("flushed");
    fence::flush(&world).await.expect("nothing to flush");
    assert_eq!(netns.exec("nft list ruleset"), "");
}

#[tokio::test]
async fn equal_guests_are_told_apart_by_their_taps() {
    let (world, netns) = world().await;
    let (listener, port) = listener(&world).await;
    fence::install_base(&world, port).await.expect("the base");
    let guests = [1, 2].map(|n| guest(&netns, slot(n)));
    for (n, guest) in (1..).zip(&guests) {
        attach(&world, slot(n), &SlotFence::new(GROUP), guest).await;
    }
    let streams: Vec<Socket> = guests
        .iter()
        .map(|guest| guest.within(|| connect(40_000, outside(443), PATIENCE)).expect("diverted"))
        .collect();
    let mut peers: Vec<String> = streams
        .iter()
        .map(|_| {
            let (mut stream, peer) = listener.accept().expect("a connection");
            let asked = stream.local_addr().expect("bound").as_socket();
            assert_eq!(asked, Some(outside(443)), "the guest's own destination");
            stream.write_all(b"hello").expect("written");
            peer.as_socket().expect("an address").to_string()
        })
        .collect();
    peers.sort();
    assert_eq!(peers, ["198.18.0.1:40000", "198.18.0.2:40000"]);
    for mut stream in streams {
        let mut said = [0; 5];
        stream.read_exact(&mut said).expect("the answer reaches its own guest");
        assert_eq!(&said, b"hello");
    }
}

#[tokio::test]
async fn with_the_rules_flushed_nothing_of_a_guest_arrives_anywhere() {
    let (world, netns) = world().await;
    let (listener, port) = listener(&world).await;
    listener.set_nonblocking(true).expect("a listener");
    fence::install_base(&world, port).await.expect("the base");
    let guests = [1, 2].map(|n| guest(&netns, slot(n)));
    for (n, guest) in (1..).zip(&guests) {
        attach(&world, slot(n), &SlotFence::new(GROUP), guest).await;
    }
    let gateway = SocketAddr::from(([169, 254, 100, 1], port));
    let targets = [outside(443), gateway, SocketAddr::from(([198, 18, 0, 2], port))];
    let arrives = |target, patience| {
        let connected = guests[0].within(move || connect(0, target, patience).is_ok());
        connected || listener.accept().is_ok()
    };
    assert!(arrives(outside(443), PATIENCE), "the control: it arrives while the rules are there");

    let mut neighbour = Wire::of(&guests[1]);
    netns.exec("nft flush ruleset");
    while listener.accept().is_ok() {}
    for target in targets {
        assert!(!arrives(target, BRIEF), "{target}");
    }
    let leaked = neighbour.find(BRIEF, |frame| Some(frame.to_vec()));
    assert_eq!(leaked, None, "the neighbour's wire is silent");
}

/// Attacks A01, A02, A11, B01.
#[tokio::test]
async fn every_refusal_is_counted_exactly_under_its_reason() {
    let (world, netns) = world().await;
    let (_listener, port) = listener(&world).await;
    let dns = world.run(|| transparent(Type::DGRAM, 53)).await.expect("the world");
    fence::install_base(&world, port).await.expect("the base");
    let guest = guest(&netns, slot(1));
    attach(&world, slot(1), &SlotFence::new(GROUP), &guest).await;
    let mut wire = Wire::of(&guest);
    let control = |wire: &mut Wire| {
        wire.send(&frames::dns_question());
        let mut question = [std::mem::MaybeUninit::uninit(); 64];
        let (_, peer) = dns.recv_from(&mut question).expect("the control passes");
        assert_eq!(peer.as_socket(), Some(SocketAddr::from(([198, 18, 0, 1], 5000))));
    };
    control(&mut wire);
    let before = counted(&world, slot(1)).await;
    assert_eq!(before.values().sum::<u64>(), 0, "{before:?}");
    let mut expected = before;
    for (reason, sent) in frames::refused() {
        for (what, frame) in sent {
            wire.send(&frame);
            *expected.entry(reason.as_str()).or_default() += 1;
            let found = counted_until(&world, slot(1), |found| *found == expected).await;
            assert_eq!(found, expected, "{reason}: {what}");
        }
    }
    control(&mut wire);
    let untried: Vec<_> = expected.iter().filter(|(_, count)| **count == 0).collect();
    assert_eq!(
        untried,
        [(&"rate", &0), (&"stray", &0), (&"syn-rate", &0)].into_iter().collect::<Vec<_>>()
    );
}

#[tokio::test]
async fn new_connections_above_the_rate_are_dropped_and_counted() {
    let (world, netns) = world().await;
    let (_listener, port) = listener(&world).await;
    fence::install_base(&world, port).await.expect("the base");
    let guest = guest(&netns, slot(1));
    let slow = SlotFence { syn_rate: 1, syn_burst: 5, ..SlotFence::new(GROUP) };
    attach(&world, slot(1), &slow, &guest).await;
    let mut wire = Wire::of(&guest);
    let started = Instant::now();
    for n in 0..20 {
        wire.send(&frames::syn(6000 + n));
    }
    // One more may pass with every second until they are counted.
    let least = || 15_u64.saturating_sub(started.elapsed().as_secs());
    let found = counted_until(&world, slot(1), |found| found["syn-rate"] >= least()).await;
    let (found, least) = (found["syn-rate"], least());
    assert!(found <= 15 && found >= least, "{found} of 20, {least} at least");
}

#[tokio::test]
async fn quic_and_udp_are_refused_at_once_by_an_error_the_guest_believes() {
    let (world, netns) = world().await;
    fence::install_base(&world, 3128).await.expect("the base");
    let guest = guest(&netns, slot(1));
    attach(&world, slot(1), &SlotFence::new(GROUP), &guest).await;
    for port in [443, 853, 4500] {
        let error = guest.within(move || {
            let socket = Socket::new(socket2::Domain::IPV4, Type::DGRAM, None).expect("a socket");
            socket.set_read_timeout(Some(PATIENCE)).expect("a timeout");
            socket.connect(&outside(port).into()).expect("connected");
            // Once: nothing is sent again that a later error could answer.
            socket.send(b"initial").expect("sent");
            let mut answer = [std::mem::MaybeUninit::uninit(); 8];
            socket.recv(&mut answer).expect_err("refused")
        });
        let refused = nix::errno::Errno::EHOSTUNREACH as i32;
        assert_eq!(error.raw_os_error(), Some(refused), "{port}: {error}");
    }
}

#[tokio::test]
async fn another_guest_is_refused_at_once_by_a_reset() {
    let (world, netns) = world().await;
    fence::install_base(&world, 3128).await.expect("the base");
    let guest = guest(&netns, slot(1));
    attach(&world, slot(1), &SlotFence::new(GROUP), &guest).await;
    let neighbour = SocketAddr::from(([198, 18, 0, 2], 22));
    let error = guest.within(move || connect(0, neighbour, PATIENCE)).expect_err("refused");
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused, "{error}");
}

#[tokio::test]
async fn an_error_of_the_host_quotes_the_guests_own_packet() {
    let (world, netns) = world().await;
    fence::install_base(&world, 3128).await.expect("the base");
    let guest = guest(&netns, slot(1));
    attach(&world, slot(1), &SlotFence::new(GROUP), &guest).await;
    let mut wire = Wire::of(&guest);
    for icmp_type in [3, 11, 12] {
        let error = frames::icmp_error(icmp_type, slot(1).address());
        let sent = world.run(move || {
            let raw =
                Socket::new(socket2::Domain::IPV4, Type::RAW, Some(socket2::Protocol::ICMPV4))
                    .expect("root");
            raw.send_to(&error, &SocketAddr::from((slot(1).address(), 0)).into())
        });
        sent.await.expect("the world").expect("sent");
        let arrived = wire
            .find(PATIENCE, |frame| frames::icmp_of_type(frame, icmp_type))
            .expect("the guest gets the error");
        frames::assert_quotes_guest(&arrived);
    }
}

#[tokio::test]
async fn what_is_dropped_is_sampled_with_who_and_where() {
    let (world, netns) = world().await;
    fence::install_base(&world, 3128).await.expect("the base");
    let guest = guest(&netns, slot(1));
    attach(&world, slot(1), &SlotFence::new(GROUP), &guest).await;
    let mut drops = drops::listen(&world, GROUP).await.expect("the group is free");
    let taken = drops::listen(&world, GROUP).await.expect_err("one listener only");
    assert!(matches!(taken, Error::Netfilter(..)), "{taken}");
    let mut wire = Wire::of(&guest);
    for _ in 0..3 {
        wire.send(&frames::udp_to([192, 0, 2, 80], 443));
    }
    let mut seen = 0;
    while seen < 3 {
        let dropped = tokio::time::timeout(PATIENCE, drops.recv());
        let dropped = dropped.await.expect("in time").expect("listening");
        assert_eq!((dropped.slot, dropped.reason), (slot(1), Reason::Quic));
        assert_eq!(dropped.destination, Some(outside(443)));
        assert_eq!(dropped.protocol, "udp");
        seen += dropped.count;
    }
    assert_eq!(seen, 3);
}

/// What the calling thread has used of a processor: other builds on the machine do not change it.
fn cpu_time() -> Duration {
    let clock = nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID;
    nix::time::clock_gettime(clock).expect("a clock").into()
}

/// Not a claim but a measurement: `cargo test --release -p egress --test fence_world -- --ignored
/// --nocapture`. The goal for one sandbox at 1,000 is p50 <= 2 ms, p99 <= 10 ms, tap included.
#[tokio::test]
#[ignore = "a measurement of the release build, not a claim"]
async fn what_attach_and_detach_cost_at_1_100_and_1000_slots() {
    let (world, netns) = world().await;
    fence::install_base(&world, 3128).await.expect("the base");
    let with = SlotFence::new(GROUP);
    let tried = slot(5000);
    netns.exec(&format!("ip tuntap add {} mode tap", tried.tap()));
    let mut present = 0;
    for goal in [1, 100, 1000] {
        while present + 1 < goal {
            present += 1;
            netns.exec(&format!("ip tuntap add pt{present} mode tap"));
            fence::attach(&world, slot(present), &with).await.expect("the fence");
        }
        let mut took: [Vec<Duration>; 5] = Default::default();
        let mut spent = Duration::ZERO;
        for _ in 0..200 {
            let before = world.run(cpu_time).await.expect("alive");
            let mut last = Instant::now();
            let mut lap = || std::mem::replace(&mut last, Instant::now()).elapsed();
            fence::attach(&world, tried, &with).await.expect("the fence");
            took[0].push(lap());
            spent += world.run(cpu_time).await.expect("alive").saturating_sub(before);
            lap();
            link::prepare(&world, tried).await.expect("the tap");
            took[1].push(lap());
            fence::verify(&world, tried, &with).await.expect("the fence");
            took[2].push(lap());
            fence::detach(&world, tried).await.expect("detached");
            took[3].push(lap());
            link::down(&world, tried).await.expect("down");
            took[4].push(lap());
        }
        for (what, took) in ["attach", "prepare", "verify", "detach", "down"].iter().zip(&mut took)
        {
            took.sort();
            println!("{goal} present: {what} p50 {:?} p99 {:?}", took[100], took[198]);
        }
        println!("{goal} present: attach, processor time: mean {:?}", spent / 200);
    }
    let started = Instant::now();
    netns.exec("nft list ruleset");
    println!("nft list ruleset: {:?}", started.elapsed());
}
