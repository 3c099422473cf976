//! Others' rules and settings beside ours, sets at the edge of the address space, batches that fail:
//! what is refused stays refused.

use std::collections::BTreeMap;

use egress::Error;
use egress::fence::{self, Reason, SlotFence};
use socket2::Type;

use crate::wire::{Netns, Wire, guest, transparent, world};
use crate::{BRIEF, GROUP, attach, counted, counted_until, frames, listener, slot};

/// Rules that let everything in, before and after ours in every hook that a frame passes.
const OPEN_WIDE: &str = "
table netdev alien {
    chain before { type filter hook ingress device \"pt1\" priority -400; policy accept; accept; }
    chain after { type filter hook ingress device \"pt1\" priority 400; policy accept; accept; }
    chain out { type filter hook egress device \"pt1\" priority -400; policy accept; accept; }
}
table inet alien {
    chain raw { type filter hook prerouting priority -400; policy accept; accept; }
    chain late { type filter hook prerouting priority 100; policy accept; accept; }
    chain in { type filter hook input priority -400; policy accept; accept; }
    chain in_late { type filter hook input priority 400; policy accept; accept; }
    chain forward { type filter hook forward priority -400; policy accept; accept; }
    chain out { type filter hook output priority -400; policy accept; accept; }
}
";

fn load(netns: &Netns, rules: &str) {
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(&file, rules).expect("written");
    netns.exec(&format!("nft -f {}", file.path().display()));
}

/// Attack B16. An alien `accept` ends its own chain and not ours; bridges' frames sent through the
/// IP hooks, and forwarding turned on, change nothing either.
#[tokio::test]
async fn alien_rules_and_settings_let_nothing_in_that_we_refuse() {
    let (world, netns) = world().await;
    let (_listener, port) = listener(&world).await;
    let dns = world.run(|| transparent(Type::DGRAM, 53)).await.expect("the world");
    fence::install_base(&world, port).await.expect("the base");
    let (guest, other) = (guest(&netns, slot(1)), guest(&netns, slot(2)));
    attach(&world, slot(1), &SlotFence::new(GROUP), &guest).await;
    attach(&world, slot(2), &SlotFence::new(GROUP), &other).await;
    load(&netns, OPEN_WIDE);
    netns.exec("sysctl -qw net.ipv4.ip_forward=1");
    netns.within(|| {
        for what in ["iptables", "ip6tables", "arptables"] {
            let path = format!("/proc/sys/net/bridge/bridge-nf-call-{what}");
            // Only where the kernel's bridge code has it, and then for every namespace its own.
            if std::path::Path::new(&path).exists() {
                std::fs::write(path, "1").expect("set");
            }
        }
    });
    let mut wire = Wire::of(&guest);
    let mut neighbour = Wire::of(&other);
    for (reason, sent) in frames::refused() {
        let before = counted(&world, slot(1)).await[reason.as_str()];
        let meant = before + u64::try_from(sent.len()).expect("few");
        for (_, frame) in &sent {
            wire.send(frame);
        }
        let all = |found: &BTreeMap<_, _>| found[reason.as_str()] >= meant;
        let found = counted_until(&world, slot(1), all).await;
        assert_eq!(found[reason.as_str()], meant, "{reason}");
    }
    let foreign = |frame: &[u8]| (frame[6..12] != crate::wire::GUEST).then(|| frame.to_vec());
    let leaked = neighbour.find(BRIEF, foreign);
    assert_eq!(leaked, None, "the neighbour's wire is silent");
    // The control: what we let in still comes, with its slot's address.
    wire.send(&frames::dns_question());
    let mut question = [std::mem::MaybeUninit::uninit(); 64];
    let (_, peer) = dns.recv_from(&mut question).expect("the control passes");
    assert_eq!(peer.as_socket().map(|peer| peer.ip()), Some(slot(1).address().into()));
    fence::verify(&world, slot(1), &SlotFence::new(GROUP)).await.expect("ours are whole");
}

/// Attack B14. A range up to the last address there is: it holds to its end, is read back, and what
/// someone takes out of it is noticed and put back.
#[tokio::test]
async fn a_set_holds_to_the_last_address_and_a_hole_in_it_is_noticed() {
    let (world, netns) = world().await;
    fence::install_base(&world, 3128).await.expect("the base");
    let guest = guest(&netns, slot(1));
    let meant = SlotFence::new(GROUP);
    attach(&world, slot(1), &meant, &guest).await;
    let listed = netns.exec("nft list set netdev postern_0 nowhere");
    assert!(
        listed.contains("224.0.0.0/3") || listed.contains("224.0.0.0-255.255.255.255"),
        "{listed}"
    );
    let mut wire = Wire::of(&guest);
    for last in [[255, 255, 255, 254], [255; 4], [223, 255, 255, 255]] {
        let before = counted(&world, slot(1)).await["destination"];
        wire.send(&frames::udp_to(last, 53));
        // The address before the range is the control, and is not counted before one that is.
        wire.send(&frames::udp_to([255; 4], 53));
        let meant = before + 1 + u64::from(last[0] == 255);
        let all = |found: &BTreeMap<_, _>| found["destination"] >= meant;
        assert_eq!(counted_until(&world, slot(1), all).await["destination"], meant, "{last:?}");
    }
    netns.exec("nft delete element netdev postern_0 nowhere { 224.0.0.0/3 }");
    let found = fence::verify(&world, slot(1), &meant).await.expect_err("a hole");
    assert!(matches!(found, Error::Differs { .. }), "{found}");
    fence::attach(&world, slot(1), &meant).await.expect("repaired");
    fence::verify(&world, slot(1), &meant).await.expect("whole again");
    netns.exec("nft delete element netdev postern_0 nowhere { 198.18.0.0/16 }");
    netns.exec("nft add element netdev postern_0 nowhere { 198.18.0.0/17 }");
    fence::verify(&world, slot(1), &meant).await.expect_err("a shorter range");
    fence::attach(&world, slot(1), &meant).await.expect("repaired");
    wire.send(&frames::udp_to([198, 18, 255, 1], 53));
    let reason = Reason::Destination.as_str();
    assert!(counted_until(&world, slot(1), |found| found[reason] > 0).await[reason] > 0);
}

/// Attack B15. The batch of a slot fails in its middle: nothing of it is done, no other slot is
/// touched, and the next one over the same world succeeds.
#[tokio::test]
async fn a_batch_that_fails_half_way_leaves_nothing_and_the_next_succeeds() {
    let (world, netns) = world().await;
    fence::install_base(&world, 3128).await.expect("the base");
    let meant = SlotFence::new(GROUP);
    for n in [1, 2] {
        netns.exec(&format!("ip tuntap add pt{n} mode tap"));
        fence::attach(&world, slot(n), &meant).await.expect("the fence");
    }
    // The first chain can be replaced; the second cannot, since somebody's rule leads to it.
    netns.exec("nft add chain netdev postern_0 alien");
    netns.exec("nft add rule netdev postern_0 alien jump guest_pt2");
    let before = netns.exec("nft list ruleset");
    let changed = SlotFence { syn_rate: 7, ..meant.clone() };
    for _ in 0..2 {
        let refused = fence::attach(&world, slot(2), &changed).await.expect_err("in use");
        assert!(refused.to_string().contains("delete the chain guest_pt2"), "{refused}");
        fence::detach(&world, slot(2)).await.expect_err("in use");
        assert_eq!(netns.exec("nft list ruleset"), before);
    }
    for n in [1, 2] {
        fence::verify(&world, slot(n), &meant).await.expect("whole");
    }
    netns.exec("nft delete chain netdev postern_0 alien");
    fence::attach(&world, slot(2), &changed).await.expect("the fence");
    fence::verify(&world, slot(2), &changed).await.expect("as meant");
    fence::detach(&world, slot(2)).await.expect("gone");
    assert_eq!(fence::present(&world).await.expect("slots"), [slot(1)]);
}

/// The last chain takes the table along, with the set that all slots of it shared; not what is somebody
/// else's in there.
#[tokio::test]
async fn a_table_goes_with_its_last_chain() {
    let (world, netns) = world().await;
    let tables = || netns.exec("nft list tables netdev");
    for n in [1, 2, 200] {
        netns.exec(&format!("ip tuntap add pt{n} mode tap"));
        fence::attach(&world, slot(n), &SlotFence::new(GROUP)).await.expect("the fence");
    }
    fence::detach(&world, slot(200)).await.expect("gone");
    assert_eq!(tables().trim(), "table netdev postern_0");
    netns.exec("nft add chain netdev postern_0 alien");
    fence::detach(&world, slot(1)).await.expect("gone");
    fence::detach(&world, slot(2)).await.expect("gone");
    assert!(netns.exec("nft list ruleset").contains("chain alien"), "somebody else's");
    netns.exec("nft delete chain netdev postern_0 alien");
    fence::detach(&world, slot(2)).await.expect("nothing of it is left");
    assert_eq!(tables().trim(), "");
    fence::attach(&world, slot(1), &SlotFence::new(GROUP)).await.expect("with its table");
    fence::verify(&world, slot(1), &SlotFence::new(GROUP)).await.expect("whole");
}

/// Attack B16. A table that is dormant has all its chains and filters nothing: the chains alone do
/// not say that it stands.
#[tokio::test]
async fn a_table_that_somebody_made_dormant_is_noticed_and_woken() {
    let (world, netns) = world().await;
    fence::install_base(&world, 3128).await.expect("the base");
    let guests = [1, 2].map(|n| guest(&netns, slot(n)));
    let meant = SlotFence::new(GROUP);
    for (n, guest) in (1..).zip(&guests) {
        attach(&world, slot(n), &meant, guest).await;
    }
    let whole = netns.exec("nft -s list ruleset");
    netns.exec("nft add table netdev postern_0 { flags dormant; }");
    let spoofed = frames::refused().remove(0).1.remove(0).1;
    let refused = async || counted(&world, slot(1)).await.values().sum::<u64>();
    let mut wire = Wire::of(&guests[0]);
    wire.send(&spoofed);
    assert_eq!(refused().await, 0, "control: it filters nothing");
    for n in [1, 2] {
        let found = fence::verify(&world, slot(n), &meant).await.expect_err("dormant");
        assert!(matches!(found, Error::Differs { .. }), "{found}");
    }
    fence::attach(&world, slot(1), &meant).await.expect("woken");
    for n in [1, 2] {
        fence::verify(&world, slot(n), &meant).await.expect("the table is for both");
    }
    wire.send(&spoofed);
    let any = |found: &BTreeMap<_, u64>| found.values().sum::<u64>() > 0;
    assert_eq!(counted_until(&world, slot(1), any).await.values().sum::<u64>(), 1);

    netns.exec("nft add table inet postern { flags dormant; }");
    let found = fence::verify_base(&world, 3128).await.expect_err("dormant");
    assert!(matches!(found, Error::Differs { .. }), "{found}");
    fence::install_base(&world, 3128).await.expect("woken");
    fence::verify_base(&world, 3128).await.expect("as meant");
    let sorted = |text: &str| {
        let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
        lines.sort_unstable();
        lines
    };
    assert_eq!(sorted(&netns.exec("nft -s list ruleset")), sorted(&whole));
}

/// What others change while we change a slot is told apart by counting what is ours: a change that finds
/// nothing to do must not be counted, or it hides one of theirs.
#[tokio::test]
async fn only_changes_of_others_move_what_is_watched() {
    let (world, netns) = world().await;
    netns.exec("ip tuntap add pt1 mode tap");
    let (meant, at) = (SlotFence::new(GROUP), slot(1));
    let udp = vec!["192.0.2.0/24".parse().map(|net| policy::Reach { net, ports: None })];
    let udp = udp.into_iter().collect::<Result<_, _>>().expect("a network");
    let other = SlotFence { udp, ..meant.clone() };
    let moved = async || fence::moved_by_others(&world).await.expect("asked").expect("a number");
    let begun = moved().await;
    fence::install_base(&world, 3128).await.expect("the base");
    fence::detach(&world, at).await.expect("nothing there");
    fence::attach(&world, at, &meant).await.expect("the fence");
    fence::attach(&world, at, &meant).await.expect("again");
    fence::refill(&world, at, &other).await.expect("filled");
    fence::refill(&world, at, &meant).await.expect("emptied");
    fence::refill(&world, at, &meant).await.expect("as empty as before");
    assert_eq!(moved().await, begun, "ours are not those of others");
    netns.exec("nft add table netdev postern_0 { flags dormant; }");
    assert_eq!(moved().await, begun + 1);
    fence::attach(&world, at, &other).await.expect("woken");
    netns.exec("nft add chain inet postern theirs");
    fence::detach(&world, at).await.expect("gone");
    netns.exec("nft delete chain inet postern theirs");
    fence::detach(&world, at).await.expect("already gone");
    assert_eq!(moved().await, begun + 3, "nor is one of theirs hidden by ours");
    fence::flush(&world).await.expect("flushed");
    fence::flush(&world).await.expect("nothing is left");
    assert_eq!(moved().await, begun + 3);
}
