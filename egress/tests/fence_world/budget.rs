//! What one guest may send in a second, and that its neighbour's budget is its own.

use std::time::Instant;

use egress::fence::{self, SlotFence};
use socket2::Type;

use crate::frames;
use crate::wire::{Netns, Wire, guest, run, transparent, unique, world};
use crate::{GROUP, attach, counted, counted_until, listener, slot};

/// Attack A14. A flood ends at its own tap: counted, and the neighbour's frames pass.
#[tokio::test]
async fn frames_above_the_budget_of_a_slot_are_dropped_counted_and_no_neighbours_are() {
    const SENT: u64 = 200;
    let (world, netns) = world().await;
    let (_listener, port) = listener(&world).await;
    let dns = world.run(|| transparent(Type::DGRAM, 53)).await.expect("the world");
    fence::install_base(&world, port).await.expect("the base");
    let (flooding, other) = (guest(&netns, slot(1)), guest(&netns, slot(2)));
    let meant = SlotFence { packets: 10, ..SlotFence::new(GROUP) };
    attach(&world, slot(1), &meant, &flooding).await;
    attach(&world, slot(2), &meant, &other).await;
    let (mut wire, mut neighbour) = (Wire::of(&flooding), Wire::of(&other));
    let started = Instant::now();
    for _ in 0..SENT {
        wire.send(&frames::dns_question());
    }
    neighbour.send(&frames::dns_question());
    // The guest's kernel may have asked for its gateway out of the same budget.
    let least = || (SENT - 10).saturating_sub(10 * (started.elapsed().as_secs() + 1));
    let found = counted_until(&world, slot(1), |found| found["rate"] >= least()).await;
    let (found, least) = (found["rate"], least());
    assert!(found >= least && found <= SENT, "{found} of {SENT}, {least} at least");
    assert_eq!(counted(&world, slot(2)).await["rate"], 0);
    let mut question = [std::mem::MaybeUninit::uninit(); 64];
    let mut from = std::iter::from_fn(|| {
        let (_, peer) = dns.recv_from(&mut question).ok()?;
        peer.as_socket()
    });
    assert!(from.any(|peer| peer.ip() == slot(2).address()), "the neighbour's question arrives");
}

#[tokio::test]
async fn bytes_above_the_budget_of_a_slot_are_dropped_and_counted() {
    let (world, netns) = world().await;
    fence::install_base(&world, 3128).await.expect("the base");
    let guest = guest(&netns, slot(1));
    let meant = SlotFence { bytes: Some(1000), ..SlotFence::new(GROUP) };
    attach(&world, slot(1), &meant, &guest).await;
    let mut wire = Wire::of(&guest);
    let mut frame = frames::dns_question();
    frame.resize(1400, 0);
    // 256 KiB at once is the least there is.
    for _ in 0..400 {
        wire.send(&frame);
    }
    let found = counted_until(&world, slot(1), |found| found["rate"] >= 150).await["rate"];
    assert!((150..250).contains(&found), "{found} of 400");
}

/// Attack A14. Questions cost who answers them: those that would not be answered anyhow end here.
#[tokio::test]
async fn questions_above_what_is_answered_are_dropped_and_counted() {
    const SENT: u64 = 6000;
    let (world, netns) = world().await;
    fence::install_base(&world, 3128).await.expect("the base");
    let guest = guest(&netns, slot(1));
    attach(&world, slot(1), &SlotFence::new(GROUP), &guest).await;
    let mut wire = Wire::of(&guest);
    let started = Instant::now();
    for _ in 0..SENT {
        wire.send(&frames::dns_question());
    }
    let least = || SENT.saturating_sub(2000 + 1000 * (started.elapsed().as_secs() + 1));
    let found = counted_until(&world, slot(1), |found| found["rate"] >= least()).await;
    let (found, least) = (found["rate"], least());
    assert!(found <= SENT - 2000 && found >= least, "{found} of {SENT}, {least} at least");
}

#[tokio::test]
async fn nft_reads_a_budget_as_it_is_printed() {
    let (ours, netns) = world().await;
    netns.exec("ip tuntap add pt7 mode tap");
    let meant = SlotFence { packets: 2000, bytes: Some(125_000_000), ..SlotFence::new(GROUP) };
    fence::install_base(&ours, 3128).await.expect("the base");
    fence::attach(&ours, slot(7), &meant).await.expect("the fence");
    let other = Netns(unique("budget"));
    run(&format!("ip netns add {}", other.0));
    other.exec("ip tuntap add pt7 mode tap");
    let file = tempfile::NamedTempFile::new().expect("a file");
    let text = fence::ruleset(3128, &[(slot(7), meant)]).to_string();
    std::fs::write(&file, text).expect("written");
    other.exec(&format!("nft -f {}", file.path().display()));
    assert_eq!(netns.exec("nft list ruleset"), other.exec("nft list ruleset"));
}
