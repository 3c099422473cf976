//! `revoke`: from the moment a policy write is sent to the last byte of the last open connection that it
//! denies, as the far side sees it, with 10, 100 and 1,000 of them.

use std::io::Write;
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use policy::Slot;
use world::ca::Authority;
use world::client::client_hello;
use world::poll::eventually;

use crate::load;
use crate::machine::Machine;
use crate::report::{Better, Goal, Row, keep, quantile};
use crate::stage::{NAME, SITE, Stage};

const CONDITIONS: &str = "One guest, every connection speaks ten times a second. Time runs from before the write is sent; \
    the end is the reset that the far side reads, after which no byte can come, on a machine that also runs the guest and the far side.";

#[derive(Default)]
struct Samples {
    p50: Vec<f64>,
    p99: Vec<f64>,
    last_byte: Vec<f64>,
    answer: Vec<f64>,
}

pub(crate) fn run(rounds: usize) {
    let stage = Stage::new(2, "");
    let open = format!("[[rule]]\nallow = [\"{NAME}\"]\n");
    let guest = stage.guest("g1", &open);
    let hello = client_hello(&Authority::new(), NAME);
    let mut rows = Vec::new();
    for flows in [10, 100, 1_000] {
        let mut samples = Samples::default();
        for _ in 0..rounds {
            one(&stage, &guest, &hello, &open, flows, &mut samples);
        }
        let row = |what: &str, figures: &[f64]| {
            let name = format!("{what}, {flows} open");
            Row::new(name, "ms", Better::Lower, figures).under(CONDITIONS)
        };
        rows.push(row("cut, p50", &samples.p50));
        rows.push(row("cut, p99", &samples.p99));
        rows.push(row("last byte of any", &samples.last_byte).goal(Goal::AtMost(10.0)));
        rows.push(row("answer of the write, which counts them", &samples.answer));
    }
    keep("revoke", &rows);
}

fn one(
    stage: &Stage,
    guest: &Machine,
    hello: &[u8],
    open: &str,
    flows: u64,
    samples: &mut Samples,
) {
    assert_eq!(stage.set_policy("g1", open).status, 200);
    stage.held.forget();
    let mut streams = guest.netns.run(|| connect(hello, flows));
    let done = AtomicBool::new(false);
    let (start, answered, answer) = std::thread::scope(|scope| {
        let speaking = scope.spawn(|| speak(&mut streams, &done));
        eventually("every connection is heard", Duration::from_secs(30), || {
            (stage.held.all().len() as u64 == flows).then_some(())
        });
        let start = Instant::now();
        let answer = stage.set_policy("g1", "");
        let answered = start.elapsed();
        done.store(true, Ordering::Relaxed);
        speaking.join().expect("the guest speaks");
        (start, answered, answer)
    });
    assert_eq!(answer.json["cut"].as_u64(), Some(flows), "the answer counts them: {}", answer.json);
    let ended = eventually("every connection is cut", Duration::from_secs(10), || {
        let stays = stage.held.all();
        let ended: Vec<Duration> = stays
            .values()
            .filter_map(|stay| stay.ended.map(|ended| ended.saturating_duration_since(start)))
            .collect();
        (ended.len() == stays.len()).then_some(ended)
    });
    let stays = stage.held.all();
    let last = stays.values().map(|stay| stay.heard.saturating_duration_since(start)).max();
    let millis = |of: Duration| of.as_secs_f64() * 1e3;
    let ended: Vec<f64> = ended.into_iter().map(millis).collect();
    samples.p50.push(quantile(&ended, 0.5));
    samples.p99.push(quantile(&ended, 0.99));
    samples.last_byte.push(millis(last.unwrap_or_default()));
    samples.answer.push(millis(answered));
}

/// As fast as the fence lets one guest, which is 200 a second for long.
pub(crate) fn connect(hello: &[u8], flows: u64) -> Vec<TcpStream> {
    let mut next = Instant::now();
    (0..flows)
        .map(|number| {
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
            next += Duration::from_micros(5_500);
            let held = load::hold((SITE, 443).into(), hello, number);
            held.unwrap_or_else(|e| panic!("connection {number}: {e}"))
        })
        .collect()
}

/// A few bytes on each connection, ten times a second, until it is over; those that are cut stay so.
fn speak(streams: &mut [TcpStream], done: &AtomicBool) {
    let each = Duration::from_millis(100) / u32::try_from(streams.len().max(1)).unwrap_or(1);
    let mut next = Instant::now();
    while !done.load(Ordering::Relaxed) {
        for stream in &mut *streams {
            let _ = stream.write_all(b"still here");
            next += each;
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
            if done.load(Ordering::Relaxed) {
                return;
            }
        }
    }
}

/// `density`: what the daemon holds for a sandbox that does nothing, and for an open connection that
/// carries nothing.
pub(crate) fn density(_: usize) {
    let stage = Stage::new(2, "");
    let open = format!("[[rule]]\nallow = [\"{NAME}\"]\n");
    let guest = stage.guest("g1", &open);
    let hello = client_hello(&Authority::new(), NAME);
    let settled = || {
        std::thread::sleep(Duration::from_secs(2));
        crate::gauge::memory(stage.pid()) as f64
    };
    // What grows once grows before it is measured.
    drop(guest.netns.run(|| connect(&hello, 50)));
    let before = settled();
    let flows = 1_000;
    let streams = guest.netns.run(|| connect(&hello, flows));
    let with = settled();
    drop(streams);
    let sandboxes = 200_u16;
    let empty = settled();
    for n in 2..sandboxes + 2 {
        assert_eq!(stage.create(&format!("g{n}"), &open).status, 201);
        assert!(Slot::new(n).is_some());
    }
    let full = settled();
    let row = |name: &str, bytes: f64, goal| {
        Row::new(name, "KiB", Better::Lower, &[bytes / 1024.0])
            .goal(Goal::AtMost(goal))
            .under("Growth of the daemon's resident memory, divided by 1,000 connections that carry nothing, and by 200 sandboxes without traffic. What the kernel holds for sockets is not in it.")
    };
    keep(
        "density",
        &[
            row("an idle relayed connection", (with - before) / flows as f64, 8.0),
            row("an idle sandbox", (full - empty) / f64::from(sandboxes), 128.0),
        ],
    );
}
