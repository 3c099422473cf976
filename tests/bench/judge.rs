//! `judge`: how long one decision takes with 1, 100 and 10,000 rules.

use std::hint::black_box;
use std::time::Instant;

use policy::{Compiled, Evidence, Flow, Host, Layer, Policy, Protocol, Revision};

use crate::report::{Better, Goal, Row, keep};

const DECISIONS: u32 = 200_000;

pub(crate) fn run(rounds: usize) {
    let sizes = [1, 100, 10_000];
    let policies = sizes.map(compiled);
    let hosts = ["exact.example.com", "api.eu.example.com", "api.eu.example.invalid"]
        .map(|host| Host::parse(host).expect("a host"));
    let [exact, below, unknown] = &hosts;
    let flows = [("hit", exact), ("wildcard", below), ("miss", unknown)];
    let mut samples = vec![Vec::new(); flows.len() * sizes.len()];
    for _ in 0..rounds.max(5) {
        let cases = policies.iter().flat_map(|policy| flows.map(|(_, host)| (policy, host)));
        for ((policy, host), samples) in cases.zip(&mut samples) {
            samples.push(nanos(policy, host));
        }
    }
    let names =
        sizes.iter().flat_map(|size| flows.map(|(what, _)| format!("{what}, {size} rules")));
    let rows: Vec<Row> = names
        .zip(&samples)
        .map(|(name, samples)| {
            Row::new(name, "ns", Better::Lower, samples).goal(Goal::AtMost(200.0)).under(
                "The verdict on a TLS flow by its server name, one thread, a policy of as many rules: hosts, wildcards and networks.",
            )
        })
        .collect();
    keep("judge", &rows);
}

fn nanos(policy: &Compiled, sni: &Host) -> f64 {
    let destination = Some("93.184.216.34".parse().expect("an address"));
    let evidence = Evidence::Tls { sni, ech: false };
    let flow = Flow { protocol: Protocol::Tcp, port: 443, destination, evidence };
    let start = Instant::now();
    for _ in 0..DECISIONS {
        black_box(policy.judge(black_box(&flow)));
    }
    start.elapsed().as_nanos() as f64 / f64::from(DECISIONS)
}

/// The last rule is the one that matters; the host it allows exactly and the wildcard share it.
fn compiled(rules: usize) -> Compiled {
    let filler: String = (2..rules)
        .map(|i| match i % 3 {
            0 => format!("[[rule]]\nallow = [\"*.h{i}.example.net\"]\n"),
            1 => format!("[[rule]]\ndeny = [\"h{i}.example.org\"]\n"),
            _ => format!("[[rule]]\nallow = [\"10.{}.{}.0/24\"]\n", i / 256, i % 256),
        })
        .collect();
    let last = "[[rule]]\nallow = [\"exact.example.com\", \"*.example.com\"]\n";
    let policy = Policy::from_toml(&format!("{filler}{last}")).expect("a policy");
    Compiled::new(&[(Layer::Sandbox, &policy)], Revision(1))
}
