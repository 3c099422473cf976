//! How long one decision takes, with one rule and with ten thousand. The figures must be alike.
#![expect(clippy::expect_used, reason = "a bench whose own policy is wrong must stop")]

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use policy::{
    Compiled, Evidence, Flow, Host, Layer, OwnAddresses, Policy, Protocol, Revision, Verdict,
};

fn compiled(rules: usize) -> Compiled {
    let filler: String = (1..rules)
        .map(|i| match i % 3 {
            0 => format!("[[rule]]\nallow = [\"*.h{i}.example.net\"]\n"),
            1 => format!("[[rule]]\ndeny = [\"h{i}.example.org\"]\n"),
            _ => format!("[[rule]]\nallow = [\"10.{}.{}.0/24\"]\n", i / 256, i % 256),
        })
        .collect();
    let text = format!("{filler}[[rule]]\nallow = [\"*.example.com\"]\n");
    let policy = Policy::from_toml(&text).expect("policy");
    Compiled::new(&[(Layer::Sandbox, &policy)], Revision(1))
}

fn decisions(c: &mut Criterion) {
    let allowed = Host::parse("api.eu.example.com").expect("host");
    let unknown = Host::parse("api.eu.example.invalid").expect("host");
    let destination = Some("93.184.216.34".parse().expect("address"));
    let tls = |sni| Flow {
        protocol: Protocol::Tcp,
        port: 443,
        destination,
        evidence: Evidence::Tls { sni, ech: false },
    };
    let question = Flow { evidence: Evidence::Question(&allowed), ..tls(&allowed) };
    let address = Flow { evidence: Evidence::Address, ..tls(&allowed) };
    let own = OwnAddresses::new(["198.51.100.10".parse().expect("address")]);
    let mut group = c.benchmark_group("judge");
    for rules in [1, 10_000] {
        let compiled = compiled(rules);
        for (name, flow) in [
            ("tls-pass", tls(&allowed)),
            ("tls-deny", tls(&unknown)),
            ("question", question),
            ("address", address),
        ] {
            group.bench_with_input(BenchmarkId::new(name, rules), &flow, |b, flow| {
                b.iter(|| black_box(compiled.judge(black_box(flow))));
            });
        }
        let Verdict::Pass(permit) = compiled.judge(&tls(&allowed)) else {
            panic!("the bench's own rule does not match");
        };
        let found = "93.184.216.34".parse().expect("address");
        group.bench_function(BenchmarkId::new("dial", rules), |b| {
            b.iter(|| black_box(compiled.judge_address(black_box(&permit), found, &own)));
        });
    }
    group.finish();
}

/// The dearest policy that is accepted, in as many layers, and the dearest path.
fn dearest(c: &mut Criterion) {
    let host = Host::parse("api.example.com").expect("host");
    let text = |rules: usize| -> String {
        let rule = |rule: usize| {
            let glob = format!("/**/*{}{:02}*/**", "a*".repeat(12), rule);
            format!("[[rule]]\nallow = [\"api.example.com\"]\npaths = [\"{glob}\"]\n")
        };
        (0..rules).map(rule).collect()
    };
    let most = (1..64).rev().find(|rules| Policy::from_toml(&text(*rules)).is_ok());
    let policy = Policy::from_toml(&text(most.expect("a policy"))).expect("policy");
    let mut group = c.benchmark_group("judge-dearest");
    for (what, segment) in [("plain", "a".repeat(15)), ("parameter", "a".repeat(13) + ";a")] {
        let path = format!("/{segment}").repeat(255);
        let evidence = Evidence::Request { authority: &host, method: "GET", path: &path };
        let flow = Flow { protocol: Protocol::Tcp, port: 80, destination: None, evidence };
        for layers in 1..=3 {
            let named = Layer::ALL.map(|layer| (layer, &policy));
            let compiled = Compiled::new(named.get(..layers).expect("layers"), Revision(1));
            group.bench_with_input(BenchmarkId::new(what, layers), &flow, |b, flow| {
                b.iter(|| black_box(compiled.judge(black_box(flow))));
            });
        }
    }
    group.finish();
}

criterion_group!(benches, decisions, dearest);
criterion_main!(benches);
