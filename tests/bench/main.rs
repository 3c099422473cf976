//! `make bench`: what the way out costs, beside the programs that do a part of it, in one run.
//!
//! Everything happens in network namespaces of its own; nothing leaves the machine. A figure that
//! misses its goal is told like the others. `make soak`: the same stage under attack, for long.
#![forbid(unsafe_code)]
#![expect(
    clippy::print_stdout,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a measurement: it prints, and what does not hold ends it"
)]

mod asleep;
mod connect;
mod dns;
mod gauge;
mod judge;
mod load;
mod machine;
mod origin;
mod peers;
mod report;
mod revoke;
mod slots;
mod soak;
mod splice;
mod stage;
mod writes;

use std::process::{Command, ExitCode};

/// A bench: its name, what it measures, and how.
type Bench = (&'static str, &'static str, fn(usize));

const BENCHES: &[Bench] = &[
    ("judge", "How long one decision takes, and whether more rules make it slower.", judge::run),
    ("egress-splice", "What a relayed GiB costs.", splice::run),
    ("egress-connect", "What a new allowed TLS connection costs.", connect::run),
    ("dns", "What a question of a guest costs.", dns::run),
    ("slots", "How long a sandbox's way takes to make and to take away.", slots::run),
    ("revoke", "How soon a tightened policy ends what it denies.", revoke::run),
    ("writes", "What a large policy costs, and whom it keeps waiting.", writes::run),
    ("density", "What the daemon holds for what does nothing.", revoke::density),
    ("asleep", "What the daemon holds for a thousand sandboxes that sleep.", asleep::density),
    ("standby", "How soon an idle guest holds nothing.", asleep::standby),
    ("resume", "How soon a guest that sleeps answers.", asleep::resume),
];

/// How often each way is measured unless told otherwise.
const ROUNDS: usize = 5;

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1);
    let wanted = words.next().unwrap_or_else(|| "all".to_owned());
    let rounds = words.next().and_then(|rounds| rounds.parse().ok()).unwrap_or(ROUNDS);
    if wanted == "soak" {
        return if soak::run() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    let picked: Vec<&Bench> =
        BENCHES.iter().filter(|(name, ..)| wanted == "all" || wanted == *name).collect();
    if picked.is_empty() {
        let names: Vec<&str> = BENCHES.iter().map(|(name, ..)| *name).collect();
        eprintln!("usage: bench all|{}|soak [ROUNDS]", names.join("|"));
        return ExitCode::from(2);
    }
    for (name, about, measure) in picked {
        println!("{name}: {about}");
        measure(rounds);
    }
    if wanted == "all" {
        let names: Vec<(&str, &str)> =
            BENCHES.iter().map(|(name, about, _)| (*name, *about)).collect();
        report::publish(&names, &versions());
    }
    ExitCode::SUCCESS
}

/// What was compared, and where.
fn versions() -> Vec<(String, String)> {
    let said = |line: &str| {
        let out = Command::new("sh").args(["-c", line]).output();
        let out = out.map(|out| String::from_utf8_lossy(&out.stdout).trim().to_owned());
        out.unwrap_or_default()
    };
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let mut versions = vec![
        ("postern".to_owned(), said("git rev-parse --short HEAD")),
        ("kernel".to_owned(), said("uname -r")),
        (
            "processors".to_owned(),
            format!(
                "{processors}, {}",
                said("sed -n 's/^model name.*: //p' /proc/cpuinfo | head -1")
            ),
        ),
    ];
    let packages = "haproxy nginx-light sniproxy unbound dnsdist dnsmasq-base nftables iproute2";
    for package in packages.split(' ') {
        let version = said(&format!("dpkg-query -W -f '${{Version}}' {package} 2>/dev/null"));
        versions.push((package.to_owned(), version));
    }
    versions
}
