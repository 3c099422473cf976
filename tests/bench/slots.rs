//! `slots`: attach and detach of one sandbox, tap included, with 10, 100 and 1,000 present; beside it
//! the same rules, address and route by the `ip` and `nft` programs.

use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dns::{Names, Resolver, ResolverConfig};
use egress::fence::{self, SlotFence, Table, TableId};
use egress::{Attachment, Config, Limits, Router};
use policy::{Compiled, Layer, OwnAddresses, Policy, PolicyHandle, Revision, Slot, Subject, Trail};
use tokio::runtime::Runtime;
use world::netns::Netns;

use crate::report::{Better, Goal, Row, keep, quantile};

const EACH: usize = 10;
/// Longer than the router takes to see that others changed rules, and to look through a thousand slots.
const SETTLE: Duration = Duration::from_secs(3);
const NFLOG_GROUP: u16 = 1_007;
const PEER: &str = "peer";

const CONDITIONS: &str = "Ours: tap, fence with read-back, listener, resolver socket, address, route, neighbour, link up; and back, tap deleted. \
    The least there is: the tap alone, made and deleted. Peer: `ip tuntap`, `addr`, `route`, `neigh`, one `nft -f` for the slot's own chains, and back, in the namespace with as many slots of ours.";

pub(crate) fn run(rounds: usize) {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    let taps = Netns::to_be("taps");
    let router = runtime.block_on(start(taps.name()));
    let mut present = 0;
    let mut rows = Vec::new();
    for size in [10, 100, 1_000] {
        while present < size {
            present += 1;
            let attached = runtime.block_on(attach(&router, slot(present)));
            attached.unwrap_or_else(|e| panic!("attach {present}: {e}"));
        }
        let (mut up, mut down) = (Vec::new(), Vec::new());
        let (mut binaries, mut bare) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            for _ in 0..EACH {
                let (attached, detached) = ours(&runtime, &router, slot(size + 1));
                up.push(attached);
                down.push(detached);
                bare.push(runtime.block_on(tap_alone(&router, slot(size + 1))));
            }
            binaries.push(theirs(&taps, slot(size + 2)));
            // Rules of others make the router look through all of its own, which is not asked here.
            std::thread::sleep(SETTLE);
        }
        let both: Vec<f64> = up.iter().zip(&down).map(|(up, down)| up + down).collect();
        let row = |what: &str, figures: &[f64]| {
            let name = format!("{what}, {size} present");
            Row::new(name, "ms", Better::Lower, figures).under(CONDITIONS)
        };
        rows.push(row("attach and detach, p50", &both).peer("ip and nft", &binaries));
        let least = row("attach and detach, p50, against the least", &both);
        rows.push(least.peer("tap alone", &bare).goal(Goal::RatioAtMost(2.0)));
        rows.push(row("attach and detach, p99", &[quantile(&both, 0.99)]));
        rows.push(row("attach, p50", &up));
        rows.push(row("detach, p50", &down));
    }
    keep("slots", &rows);
    runtime.shutdown_timeout(Duration::from_secs(5));
}

fn slot(n: u16) -> Slot {
    Slot::new(n).expect("a slot")
}

async fn start(netns: &str) -> Router {
    let upstream: SocketAddr = "127.0.0.1:53".parse().expect("an address");
    let config = ResolverConfig { upstreams: vec![upstream], ..ResolverConfig::default() };
    let resolver = Resolver::new(config).expect("a resolver");
    let (trail, records) = Trail::bounded(1 << 16);
    std::thread::spawn(move || {
        loop {
            let _ = records.take_within(Duration::from_secs(1));
        }
    });
    let config = Config {
        netns: netns.to_owned(),
        divert_port: 15_000,
        nflog_group: NFLOG_GROUP,
        slots: Slot::MAX,
        limits: Limits::default(),
        names: Names::default(),
        look: Duration::from_secs(1),
    };
    Router::start(config, resolver, OwnAddresses::default(), trail).await.expect("a router")
}

async fn attach(router: &Router, slot: Slot) -> Result<(), egress::Error> {
    let tap = router.within(move || vmm::tap::create(slot, None)).await?;
    drop(tap.expect("a tap"));
    let policy = Policy::from_toml("[[rule]]\nallow = [\"api.example.com\"]").expect("a policy");
    let policy = PolicyHandle::new(Compiled::new(&[(Layer::Sandbox, &policy)], Revision(1)));
    let subject = Subject {
        sandbox: format!("s{}", slot.number()).parse().expect("a name"),
        tenant: "bench".parse().expect("a name"),
        incarnation: 1,
        slot,
    };
    let egress: Vec<IpAddr> = Vec::new();
    router.attach(Attachment { subject: Arc::new(subject), policy, egress }).await
}

/// Milliseconds of an attach and of a detach.
fn ours(runtime: &Runtime, router: &Router, slot: Slot) -> (f64, f64) {
    runtime.block_on(async {
        let start = Instant::now();
        attach(router, slot).await.expect("attach");
        let up = start.elapsed();
        router.detach(slot).await.expect("detach");
        router.delete_tap(slot).await.expect("delete the tap");
        (up.as_secs_f64() * 1e3, (start.elapsed() - up).as_secs_f64() * 1e3)
    })
}

/// Milliseconds that the kernel takes to make and to delete a tap with nothing to it: the least there is.
async fn tap_alone(router: &Router, slot: Slot) -> f64 {
    let start = Instant::now();
    let tap = router.within(move || vmm::tap::create(slot, None)).await.expect("the world");
    drop(tap.expect("a tap"));
    router.delete_tap(slot).await.expect("delete the tap");
    start.elapsed().as_secs_f64() * 1e3
}

/// Milliseconds that the programs take for the same and back.
fn theirs(taps: &Netns, at: Slot) -> f64 {
    let (tap, address) = (at.tap(), at.address());
    let table = table(at);
    let start = Instant::now();
    taps.ip(&format!("tuntap add dev {tap} mode tap vnet_hdr"));
    taps.ip(&format!("addr add 169.254.100.1/32 dev {tap} noprefixroute"));
    nft(taps, &table);
    taps.ip(&format!("link set {tap} up"));
    taps.ip(&format!(
        "neigh replace 169.254.100.2 lladdr 02:00:00:00:00:02 nud permanent dev {tap}"
    ));
    taps.ip(&format!("route add {address}/32 via 169.254.100.2 dev {tap} onlink"));
    nft(taps, &format!("delete table netdev {PEER}\n"));
    taps.ip(&format!("tuntap del dev {tap} mode tap"));
    start.elapsed().as_secs_f64() * 1e3
}

/// What we put around this slot, as a table of the peer's own.
fn table(at: Slot) -> String {
    let meant = fence::slot(at, &SlotFence::new(NFLOG_GROUP));
    let peer = TableId { name: PEER.to_owned(), ..meant.id };
    Table { id: peer, ..meant }.to_string()
}

fn nft(taps: &Netns, text: &str) {
    let mut nft = taps.bare_command("nft");
    nft.args(["-f", "-"]).stdin(Stdio::piped()).stderr(Stdio::piped());
    let mut nft = nft.spawn().expect("nft");
    nft.stdin.take().expect("a pipe").write_all(text.as_bytes()).expect("rules for nft");
    let ended = nft.wait_with_output().expect("nft ends");
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success(), "nft: {said}\n{text}");
}
