//! `dns`: questions of guests, answered from the cache and forwarded, with 10,000 names allowed; beside
//! it forwarders that let the same names through and refuse all others.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use hickory_proto::rr::RecordType;
use policy::Slot;
use policy::net::GATEWAY_IP;
use world::client::query;
use world::poll::eventually;

use crate::gauge;
use crate::load;
use crate::machine::Machine;
use crate::report::{Better, Goal, Row, keep, quantile};
use crate::stage::{Peer, Stage, UPSTREAM};

const NAMES: u32 = 10_000;
const GUESTS: u16 = 8;
/// Below the 200 a second that one guest may ask for long.
const PACE: Duration = Duration::from_micros(5_500);
const SPAN: Duration = Duration::from_secs(3);
/// Names asked again and again.
const WARM: u32 = 50;

const CONDITIONS: &str = "Eight guests ask 180 questions a second each, one after the other, of 10,000 names that are allowed. \
    One thread each; the peers refuse all other names and write no log; we judge each question, pin what is answered to its guest and write a record of each to the audit. \
    CPU time is that of the process. Forwarded: every name is asked once, by one guest.";

struct Server {
    name: &'static str,
    pid: u32,
    /// Port on the guests' gateways in the yard; none: ours.
    port: Option<u16>,
    _peer: Option<Peer>,
}

#[derive(Default)]
struct Samples {
    rate: Vec<f64>,
    p50: Vec<f64>,
    p99: Vec<f64>,
}

fn name(n: u32) -> String {
    format!("h{n}.names.example.com")
}

pub(crate) fn run(rounds: usize) {
    let stage = Stage::new(1, "");
    for n in 0..NAMES {
        stage.names.set_turns(&name(n), 3600, vec![vec![Ipv4Addr::new(151, 101, 0, 1).into()]]);
    }
    let names: Vec<String> = (0..NAMES).map(|n| format!("{:?}", name(n))).collect();
    let policy = format!("[[rule]]\nallow = [{}]\n", names.join(", "));
    let slots: Vec<Slot> = (1..=GUESTS).filter_map(Slot::new).collect();
    let ours: Vec<Machine> =
        slots.iter().map(|slot| stage.guest(&format!("g{}", slot.number()), &policy)).collect();
    let theirs: Vec<Machine> =
        slots.iter().map(|slot| Machine::behind_gateway(&stage.yard, *slot)).collect();
    let mut servers = vec![Server { name: "ours", pid: stage.pid(), port: None, _peer: None }];
    for (name, port, start) in [
        ("unbound", 1053, unbound as fn(&Stage, u16) -> Peer),
        ("dnsdist", 2053, dnsdist),
        ("dnsmasq", 3053, dnsmasq),
    ] {
        let peer = start(&stage, port);
        servers.push(Server { name, pid: peer.pid(), port: Some(port), _peer: Some(peer) });
    }
    for (server, at) in servers.iter().zip([&ours, &theirs, &theirs, &theirs]) {
        let first = at.first().expect("a guest");
        eventually(&format!("{} answers", server.name), Duration::from_secs(30), || {
            let socket = first.netns.run(|| socket(server, slots.first().copied()));
            first.netns.run(|| ask(&socket, 0)).then_some(())
        });
    }
    let mut rows = Vec::new();
    for forwarded in [false, true] {
        let mut samples: Vec<Samples> = servers.iter().map(|_| Samples::default()).collect();
        // A name is forwarded once to each server in a run.
        let fresh: Vec<AtomicU32> = servers.iter().map(|_| AtomicU32::new(WARM)).collect();
        for round in 0..=rounds {
            for ((server, samples), fresh) in servers.iter().zip(&mut samples).zip(&fresh) {
                let machines = if server.port.is_none() { &ours } else { &theirs };
                let next = |n: u32| match forwarded {
                    true => fresh.fetch_add(1, Ordering::Relaxed) % NAMES,
                    false => n % WARM,
                };
                let before = gauge::cpu(server.pid);
                let span = if round == 0 { SPAN / 6 } else { SPAN };
                let span = if forwarded { span / 3 } else { span };
                let took = ask_all(server, machines, &slots, span, &next);
                let cpu = (gauge::cpu(server.pid) - before).as_secs_f64();
                // The first is to warm up.
                if round > 0 {
                    samples.rate.push(took.len() as f64 / cpu);
                    samples.p50.push(quantile(&took, 0.5));
                    samples.p99.push(quantile(&took, 0.99));
                }
            }
        }
        rows.extend(figures(if forwarded { "forwarded" } else { "cached" }, &servers, &samples));
    }
    keep("dns", &rows);
}

fn figures(what: &str, servers: &[Server], samples: &[Samples]) -> Vec<Row> {
    let Some(ours) = samples.first() else { return Vec::new() };
    let new = |figure: &str, unit, better, samples: &[f64]| {
        Row::new(format!("{what}, {figure}"), unit, better, samples).under(CONDITIONS)
    };
    // The goal speaks of unbound; the others stand beside it in a row of their own.
    let mut rate =
        new("questions", "per CPU s", Better::Higher, &ours.rate).goal(Goal::RatioAtLeast(1.0));
    let mut others = new("questions, against the others", "per CPU s", Better::Higher, &ours.rate);
    let mut p50 = new("p50", "us", Better::Lower, &ours.p50);
    let mut p99 = new("p99", "us", Better::Lower, &ours.p99);
    for (server, samples) in servers.iter().zip(samples).skip(1) {
        match server.name {
            "unbound" => rate = rate.peer(server.name, &samples.rate),
            _ => others = others.peer(server.name, &samples.rate),
        }
        p50 = p50.peer(server.name, &samples.p50);
        p99 = p99.peer(server.name, &samples.p99);
    }
    vec![rate, others, p50, p99]
}

/// Microseconds of each question.
fn ask_all(
    server: &Server,
    machines: &[Machine],
    slots: &[Slot],
    span: Duration,
    next: &(impl Fn(u32) -> u32 + Sync),
) -> Vec<f64> {
    load::everywhere(machines, slots, |slot| {
        let socket = socket(server, Some(slot));
        let (start, mut took) = (Instant::now(), Vec::new());
        let mut due = start;
        while due < start + span {
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            let count = u32::try_from(took.len()).unwrap_or(0);
            let asked = Instant::now();
            let n = next(count);
            assert!(ask(&socket, n), "{} does not answer {}", server.name, name(n));
            took.push(asked.elapsed().as_secs_f64() * 1e6);
            due = (due + PACE).max(Instant::now());
        }
        took
    })
}

fn socket(server: &Server, slot: Option<Slot>) -> UdpSocket {
    let to: SocketAddr = match (server.port, slot) {
        (Some(port), Some(slot)) => Machine::gateway(slot, port),
        _ => (GATEWAY_IP, 53).into(),
    };
    let socket = UdpSocket::bind("0.0.0.0:0").expect("a socket");
    socket.connect(to).expect("connected");
    socket.set_read_timeout(Some(Duration::from_secs(3))).expect("a time limit");
    socket
}

/// Whether the name is answered with an address.
fn ask(socket: &UdpSocket, n: u32) -> bool {
    let bytes = query(&name(n), RecordType::A).to_vec().expect("a question");
    let mut reply = [0; 1500];
    let got = socket.send(&bytes).and_then(|_| socket.recv(&mut reply));
    // NOERROR, and at least one answer (RFC 1035, section 4.1.1).
    matches!((got, reply), (Ok(12..), [_, _, _, code, _, _, high, low, ..])
        if code & 0xf == 0 && (high, low) != (0, 0))
}

fn write(stage: &Stage, name: &str, text: &str) -> String {
    let path = stage.dir.join(name);
    std::fs::write(&path, text).expect("a peer's configuration");
    path.display().to_string()
}

fn unbound(stage: &Stage, port: u16) -> Peer {
    let dir = stage.dir.display();
    let mut text = format!(
        "server:\n num-threads: 1\n interface: 0.0.0.0\n port: {port}\n access-control: 10.77.0.0/16 allow\n\
         \x20chroot: \"\"\n username: \"\"\n directory: \"{dir}\"\n pidfile: \"{dir}/unbound.pid\"\n use-syslog: no\n\
         \x20verbosity: 0\n module-config: \"iterator\"\n do-ip6: no\n msg-cache-size: 64m\n rrset-cache-size: 128m\n\
         \x20so-rcvbuf: 0\n outgoing-range: 4096\n num-queries-per-thread: 2048\n minimal-responses: yes\n local-zone: \".\" refuse\n"
    );
    for n in 0..NAMES {
        text += &format!(" local-zone: \"{}.\" transparent\n", name(n));
    }
    text += &format!(
        "remote-control:\n control-enable: no\nforward-zone:\n name: \".\"\n forward-addr: {UPSTREAM}\n"
    );
    let path = write(stage, "unbound.conf", &text);
    stage.peer("unbound", &["-d", "-c", &path])
}

fn dnsdist(stage: &Stage, port: u16) -> Peer {
    let mut text = format!(
        "setLocal('0.0.0.0:{port}')\nsetACL('10.77.0.0/16')\nsetSecurityPollSuffix('')\n\
         newServer({{address='{UPSTREAM}:53', healthCheckMode='up'}})\n\
         getPool(''):setCache(newPacketCache(100000))\nnames=newSuffixMatchNode()\n"
    );
    for n in 0..NAMES {
        text += &format!("names:add(newDNSName('{}.'))\n", name(n));
    }
    text += "addAction(NotRule(SuffixMatchNodeRule(names)), RCodeAction(DNSRCode.REFUSED))\n";
    let path = write(stage, "dnsdist.conf", &text);
    stage.peer("dnsdist", &["--supervised", "--disable-syslog", "-C", &path])
}

fn dnsmasq(stage: &Stage, port: u16) -> Peer {
    let mut text = format!(
        "port={port}\nno-resolv\nno-hosts\ncache-size=10000\nuser=root\nbind-interfaces\npid-file=\ndns-forward-max=2000\n"
    );
    for n in 0..NAMES {
        text += &format!("server=/{}/{UPSTREAM}\n", name(n));
    }
    let path = write(stage, "dnsmasq.conf", &text);
    stage.peer("dnsmasq", &["-k", "-C", &path])
}
