//! `make soak`: many guests misbehave for long, in every way at once, while each goes on with what it is
//! allowed. Nothing may grow, nothing forbidden may leave, and the allowed must go on.
//!
//! Bounded by `SOAK_SECONDS` (1,200) and `SOAK_GUESTS` (200); traffic stays in the stage's namespaces.

mod oracle;
mod guest;
mod nights;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use world::ca::Authority;
use world::client::client_hello;

use crate::asleep::Sleeper;
use crate::gauge;
use crate::machine::Machine;
use crate::report::{median, quantile};
use crate::soak::guest::{Hellos, Told, misbehave};
use crate::soak::nights::Nights;
use crate::soak::oracle::Oracle;
use crate::stage::{NAME, Stage};

/// The daemon keeps as many pipes of either width for the next who asks, two descriptors each.
const KEPT_PIPES: usize = 2 * 64 * 2;
const SLACK_DESCRIPTORS: usize = 64;
const SLACK_MEMORY: f64 = 8.0 * 1024.0 * 1024.0;

/// What the node holds at one moment.
#[derive(Clone, Copy, Debug)]
struct Holding {
    memory: f64,
    descriptors: usize,
    rules: usize,
    /// Connections that the kernel tracks among the guests and on the host, where it says.
    tracked: Option<u64>,
    taps: usize,
}

/// Whether all held.
pub(crate) fn run() -> bool {
    let seconds = number("SOAK_SECONDS", 1_200);
    let guests = u16::try_from(number("SOAK_GUESTS", 200)).expect("fewer guests");
    let span = Duration::from_secs(seconds);
    println!("soak: {guests} guests, {seconds} s");
    let stage = Stage::new(2, &Sleeper::config());
    let oracle = Oracle::in_front_of(&stage);
    let policy = guest::policy(0);
    let name = |n: u16| format!("g{n}");
    let machines: Vec<Machine> = (1..=guests).map(|n| stage.guest(&name(n), &policy)).collect();
    let authority = Authority::new();
    let hellos = Hellos {
        allowed: client_hello(&authority, NAME),
        denied: client_hello(&authority, "sink.attacker.net"),
    };
    let mut line = nights::prepare(&stage);
    let before = holding(&stage);
    println!("{before:?} before");
    let (stop, mut samples) = (AtomicBool::new(false), Vec::new());
    let (told, churned, nights) = std::thread::scope(|scope| {
        let (stage, hellos, stop) = (&stage, &hellos, &stop);
        let each: Vec<_> = machines
            .iter()
            .enumerate()
            .map(|(n, machine)| {
                scope.spawn(move || {
                    let name = format!("g{}", n + 1);
                    machine.netns.run(|| misbehave(stage, machine, &name, n as u64, hellos, stop))
                })
            })
            .collect();
        let churn = scope.spawn(|| churn(stage, hellos, stop));
        let nights = scope.spawn(|| nights::pass(stage, &mut line, span, stop));
        let start = Instant::now();
        let step = (span / 40).max(Duration::from_millis(500));
        while start.elapsed() < span {
            std::thread::sleep(step);
            let now = holding(stage);
            println!("{:5.0} s {now:?}", start.elapsed().as_secs_f64());
            samples.push(now);
        }
        stop.store(true, Ordering::Relaxed);
        let told: Vec<Told> = each.into_iter().map(|one| one.join().expect("a guest")).collect();
        (told, churn.join().expect("the churn"), nights.join().expect("the nights"))
    });
    let settled = settle(&stage, before);
    verdict(&stage, &oracle, &told, (churned, &nights), before, &samples, settled)
}

/// Waits until what the guests left open is gone, for a while.
fn settle(stage: &Stage, before: Holding) -> Holding {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let now = holding(stage);
        let rest = now.descriptors <= before.descriptors + KEPT_PIPES + SLACK_DESCRIPTORS;
        if (rest && now.rules == before.rules && now.taps == before.taps)
            || Instant::now() > deadline
        {
            return now;
        }
        std::thread::sleep(Duration::from_millis(500));
    }
}

fn verdict(
    stage: &Stage,
    oracle: &Oracle,
    told: &[Told],
    (churned, nights): (u32, &Nights),
    before: Holding,
    samples: &[Holding],
    settled: Holding,
) -> bool {
    let first: Vec<f64> = told.iter().flat_map(|one| one.first_byte.iter().copied()).collect();
    let sum = |of: fn(&Told) -> u64| told.iter().map(of).sum::<u64>();
    let (early, late) = (quarter(samples, 1), quarter(samples, 3));
    let memory = |of: &[Holding]| median(&of.iter().map(|one| one.memory).collect::<Vec<_>>());
    let (held, then) = (memory(late), memory(early));
    let (forbidden, allowed) = oracle.seen();
    let asked = stage.names.asked("attacker.net").len();
    println!(
        "{} misdeeds, {} policy writes, {churned} sandboxes made and removed; {} nights of a guest, {} of others; {} allowed connections, first byte p50 {:.2} ms, p99 {:.2} ms\n\
         memory {:.1} MiB in the second quarter, {:.1} MiB in the last; {settled:?} at rest\n\
         packets on the uplink: {allowed} allowed, {forbidden} forbidden; forbidden names asked upstream: {asked}",
        sum(|one| one.misdeeds),
        sum(|one| one.writes),
        nights.of_guest,
        nights.of_many,
        first.len(),
        quantile(&first, 0.5),
        quantile(&first, 0.99),
        then / 1048576.0,
        held / 1048576.0,
    );
    for problem in told.iter().flat_map(|one| &one.problems).take(20).chain(&nights.problems) {
        println!("  {problem}");
    }
    let checks = [
        ("every allowed connection worked", sum(|one| one.failures) == 0 && !first.is_empty()),
        ("nothing denied was answered by the far side", sum(|one| one.leaks) == 0),
        ("sandboxes were made and removed", churned > 0),
        (
            "all that slept woke, with what was open",
            nights.problems.is_empty() && nights.of_guest > 0 && nights.of_many > 0,
        ),
        ("no forbidden packet left", forbidden == 0 && allowed > 0),
        ("no forbidden name was asked", asked == 0),
        ("the oracle sees a forbidden packet", oracle.sees_one(stage)),
        ("memory is flat", held <= then * 1.1 + SLACK_MEMORY),
        (
            "descriptors are given back",
            settled.descriptors <= before.descriptors + KEPT_PIPES + SLACK_DESCRIPTORS,
        ),
        ("the rules are those of the start", settled.rules == before.rules),
        ("the taps are those of the start", settled.taps == before.taps),
        (
            "no connection is tracked",
            before.tracked.is_some_and(|then| settled.tracked.is_some_and(|now| now <= then)),
        ),
        ("the daemon lives", stage.api("GET", "/v1/health", "", "").status == 200),
    ];
    for (what, held) in checks {
        println!("{} {what}", if held { "  ok" } else { "FAIL" });
    }
    checks.iter().all(|(_, held)| *held)
}

/// One of four quarters of the samples, counted from 0.
fn quarter(samples: &[Holding], which: usize) -> &[Holding] {
    let length = samples.len() / 4;
    samples.get(which * length..(which + 1) * length).unwrap_or_default()
}

/// Makes sandboxes, lets them do one allowed thing, and removes them; how many.
fn churn(stage: &Stage, hellos: &Hellos, stop: &AtomicBool) -> u32 {
    let mut made = 0;
    while !stop.load(Ordering::Relaxed) {
        let name = format!("churn-{made}");
        let mut machine = stage.guest(&name, &guest::policy(0));
        machine.netns.run(|| guest::control(&hellos.allowed)).expect("a new guest works at once");
        machine.unplug();
        let removed = stage.api("DELETE", &format!("/v1/sandboxes/{name}"), "", "");
        assert!(matches!(removed.status, 200 | 204), "{}", removed.json);
        made += 1;
        std::thread::sleep(Duration::from_secs(1));
    }
    made
}

fn holding(stage: &Stage) -> Holding {
    let listed = stage.taps.bare_command("nft").args(["-s", "list", "ruleset"]).output();
    let listed = listed.expect("run nft").stdout;
    let tracked = || {
        let count = std::fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_count");
        count.ok()?.trim().parse::<u64>().ok()
    };
    let taps = stage.taps.run(|| {
        let links = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap_or_default();
        links.lines().filter(|line| line.trim_start().starts_with("pt")).count()
    });
    Holding {
        memory: gauge::memory(stage.pid()) as f64,
        descriptors: gauge::descriptors(stage.pid()),
        rules: String::from_utf8_lossy(&listed).lines().count(),
        tracked: stage.taps.run(tracked).zip(stage.host.run(tracked)).map(|(a, b)| a + b),
        taps,
    }
}

fn number(variable: &str, without: u64) -> u64 {
    std::env::var_os(variable).map_or(without, |value| {
        let value = value.to_string_lossy().into_owned();
        value.parse().unwrap_or_else(|e| panic!("{variable}={value}: {e}"))
    })
}
