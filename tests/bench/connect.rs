//! `egress-connect`: what a new allowed TLS connection costs, and how much later its first byte comes
//! than without anybody in between.

use std::time::{Duration, Instant};

use policy::Slot;
use world::ca::Authority;
use world::client::client_hello;

use crate::gauge;
use crate::load;
use crate::machine::Machine;
use crate::peers::{self, Way};
use crate::report::{Better, Goal, Row, keep, quantile};
use crate::stage::{NAME, Stage};

const GUESTS: u16 = 4;
/// Below the 200 a second that the fence lets one guest open for long.
const PACE: Duration = Duration::from_micros(6_250);
const SPAN: Duration = Duration::from_secs(4);

const CONDITIONS: &str = "Four guests open 160 connections a second each, one after the other: connect, a true ClientHello, the far side's first byte, close. \
    One worker thread each; the peers know the far side by address and write no log; we resolve the name (from the cache) and write two audit records a connection. \
    CPU time is that of the process.";

#[derive(Default)]
struct Samples {
    per_second: Vec<f64>,
    p50: Vec<f64>,
    p99: Vec<f64>,
}

pub(crate) fn run(rounds: usize) {
    let stage = Stage::new(1, "");
    let policy = format!("[[rule]]\nallow = [\"{NAME}\"]\n");
    let slots: Vec<Slot> = (1..=GUESTS).filter_map(Slot::new).collect();
    let ours: Vec<Machine> =
        slots.iter().map(|slot| stage.guest(&format!("g{}", slot.number()), &policy)).collect();
    let theirs: Vec<Machine> =
        slots.iter().map(|slot| Machine::behind_gateway(&stage.yard, *slot)).collect();
    let hello = client_hello(&Authority::new(), NAME);
    let probe = theirs.first().expect("a guest");
    let ways = peers::all(&stage, probe, *slots.first().expect("a slot"), &hello);
    let mut samples: Vec<Samples> = ways.iter().map(|_| Samples::default()).collect();
    for round in 0..=rounds {
        for (way, samples) in ways.iter().zip(&mut samples) {
            let machines = if way.ours { &ours } else { &theirs };
            let cpu = || way.pid.map(gauge::cpu).unwrap_or_default();
            let before = cpu();
            let span = if round == 0 { SPAN / 8 } else { SPAN };
            let took = load_all(way, machines, &slots, &hello, span);
            let cpu = (cpu() - before).as_secs_f64();
            // The first is to warm up.
            if round > 0 {
                samples.per_second.push(if cpu > 0.0 { took.len() as f64 / cpu } else { f64::NAN });
                samples.p50.push(quantile(&took, 0.5));
                samples.p99.push(quantile(&took, 0.99));
            }
        }
    }
    keep("egress-connect", &figures(&ways, &samples));
}

/// Microseconds to the first byte of each connection.
fn load_all(
    way: &Way,
    machines: &[Machine],
    slots: &[Slot],
    hello: &[u8],
    span: Duration,
) -> Vec<f64> {
    load::everywhere(machines, slots, |slot| load_one(way, slot, hello, span))
}

fn load_one(way: &Way, slot: Slot, hello: &[u8], span: Duration) -> Vec<f64> {
    let (start, mut took) = (Instant::now(), Vec::new());
    let mut next = start;
    while next < start + span {
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
        let (_, first) = load::open(way.target(slot), hello)
            .unwrap_or_else(|e| panic!("{} after {}: {e}", way.name, took.len()));
        took.push(first.as_secs_f64() * 1e6);
        next = (next + PACE).max(Instant::now());
    }
    took
}

fn figures(ways: &[Way], samples: &[Samples]) -> Vec<Row> {
    let (Some(ours), Some(direct)) = (samples.first(), samples.last()) else { return Vec::new() };
    let added = |of: &[f64], base: &[f64]| -> Vec<f64> {
        of.iter().zip(base).map(|(of, base)| of - base).collect()
    };
    let new = |name, unit, better, figures: &[f64]| {
        Row::new(name, unit, better, figures).under(CONDITIONS)
    };
    let mut rate = new("connections", "per CPU s", Better::Higher, &ours.per_second)
        .goal(Goal::RatioAtLeast(1.2));
    let p50 = added(&ours.p50, &direct.p50);
    let mut p50 =
        new("added to the first byte, p50", "us", Better::Lower, &p50).goal(Goal::AtMost(150.0));
    let p99 = added(&ours.p99, &direct.p99);
    let mut p99 = new("added to the first byte, p99", "us", Better::Lower, &p99);
    let plain = new("first byte without anybody, p50", "us", Better::Lower, &direct.p50);
    for (way, samples) in ways.iter().zip(samples).skip(1).filter(|(way, _)| way.pid.is_some()) {
        rate = rate.peer(way.name, &samples.per_second);
        p50 = p50.peer(way.name, &added(&samples.p50, &direct.p50));
        p99 = p99.peer(way.name, &added(&samples.p99, &direct.p99));
    }
    vec![rate, p50, p99, plain]
}
