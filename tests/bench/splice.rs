//! `egress-splice`: what a relayed GiB costs, and how fast it is, through us, the peers and nothing.

use world::ca::Authority;
use world::client::client_hello;

use policy::Slot;

use crate::gauge;
use crate::load;
use crate::machine::Machine;
use crate::peers;
use crate::report::{Better, Goal, Row, keep};
use crate::stage::{NAME, Stage};

const GIB: f64 = (1_u64 << 30) as f64;

const CONDITIONS: &str = "One TCP connection at a time with a true ClientHello, then bytes; the guest's cable passes frames of up to 64 KiB as virtio-net does. \
    One worker thread each. The guest speaks to the peers' own port, without a rule that diverts it; they write no log, we write the audit. \
    CPU time is that of the process; time of the kernel outside of any process is not in it. `whole path` is that of the process, the guest, its cable and the far side together.";

#[derive(Default)]
struct Samples {
    cpu: Vec<f64>,
    path: Vec<f64>,
    rate: Vec<f64>,
}

pub(crate) fn run(rounds: usize) {
    let stage = Stage::new(1, "");
    let slot = Slot::new(1).expect("a slot");
    let ours = stage.guest("g1", &format!("[[rule]]\nallow = [\"{NAME}\"]\n"));
    let theirs = Machine::behind_gateway(&stage.yard, slot);
    let hello = client_hello(&Authority::new(), NAME);
    let ways = peers::all(&stage, &theirs, slot, &hello);
    let bytes: u64 = 1 << 30;
    let mut rows = Vec::new();
    for (direction, transfer) in [
        ("to the guest", load::download as fn(_, &[u8], u64) -> _),
        ("from the guest", load::upload),
    ] {
        let mut samples: Vec<Samples> = ways.iter().map(|_| Samples::default()).collect();
        for round in 0..=rounds {
            for (way, samples) in ways.iter().zip(&mut samples) {
                let machine = if way.ours { &ours } else { &theirs };
                let bytes = if round == 0 { bytes / 16 } else { bytes };
                let cpu = || way.pid.map(gauge::cpu).unwrap_or_default();
                let (before, all) = (cpu(), gauge::own_cpu());
                let took = machine.netns.run(|| transfer(way.target(slot), &hello, bytes));
                let took = took.unwrap_or_else(|e| panic!("{}: {e}", way.name));
                let (cpu, all) = (cpu() - before, gauge::own_cpu() - all);
                // The first is to warm up.
                if round > 0 {
                    let gib = bytes as f64 / GIB;
                    samples.cpu.push(cpu.as_secs_f64() / gib);
                    samples.path.push((cpu + all).as_secs_f64() / gib);
                    samples.rate.push(8.0 * bytes as f64 / 1e9 / took.as_secs_f64());
                }
            }
        }
        rows.extend(figures(direction, &ways, &samples));
    }
    keep("egress-splice", &rows);
}

fn figures(direction: &str, ways: &[peers::Way], samples: &[Samples]) -> Vec<Row> {
    let (Some(ours), Some(direct)) = (samples.first(), samples.last()) else { return Vec::new() };
    let name = |what: &str| format!("{what}, {direction}");
    let mut cpu = Row::new(name("CPU"), "s/GiB", Better::Lower, &ours.cpu)
        .goal(Goal::RatioAtMost(0.65))
        .under(CONDITIONS);
    let path = Row::new(name("CPU of the whole path"), "s/GiB", Better::Lower, &ours.path)
        .peer("direct", &direct.path)
        .goal(Goal::RatioAtMost(1.5))
        .under(CONDITIONS);
    let mut rate = Row::new(name("rate"), "Gbit/s", Better::Higher, &ours.rate).under(CONDITIONS);
    for (way, samples) in ways.iter().zip(samples).skip(1) {
        if way.pid.is_some() {
            cpu = cpu.peer(way.name, &samples.cpu);
        }
        rate = rate.peer(way.name, &samples.rate);
    }
    vec![cpu, path, rate]
}
