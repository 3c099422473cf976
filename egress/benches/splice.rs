//! CPU time a relayed GiB costs: our tunnel against tokio's copy, alternating, in the same run.
//!
//! `cargo bench -p egress --bench splice [-- GiB]`. One relay thread, whose CPU time is counted; the
//! sender and the receiver are threads of their own on loopback.
#![expect(
    clippy::expect_used,
    clippy::disallowed_methods,
    clippy::print_stdout,
    reason = "a measurement on loopback, printed"
)]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use bytes::Bytes;
use egress::tunnel::{Pool, tunnel};
use egress::{Limits, Meter};
use nix::time::{ClockId, clock_gettime};

const GIB: usize = 1 << 30;

#[derive(Clone, Copy, Debug)]
enum Relay {
    Tunnel,
    Copy,
    CopyWide,
}

fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let near = TcpStream::connect(listener.local_addr().expect("an address")).expect("connected");
    (near, listener.accept().expect("accepted").0)
}

fn thread_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).expect("a clock").into()
}

/// Runs the relay until both sides are done and returns the CPU time of its thread.
fn relay(how: Relay, guest: TcpStream, far: TcpStream) -> Duration {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let before = thread_time();
    runtime.expect("a runtime").block_on(async {
        let [mut guest, mut far] = [guest, far].map(|stream| {
            stream.set_nonblocking(true).expect("non-blocking");
            tokio::net::TcpStream::from_std(stream).expect("registered")
        });
        match how {
            Relay::Tunnel => {
                let (limits, meter, pool) = (Limits::default(), Meter::new(), Pool::new(2));
                let never = std::future::pending();
                tunnel(guest, far, Bytes::new(), &limits, &meter, &pool, never).await;
            }
            Relay::Copy => {
                tokio::io::copy_bidirectional(&mut guest, &mut far).await.expect("copied");
            }
            Relay::CopyWide => {
                let copy = tokio::io::copy_bidirectional_with_sizes;
                copy(&mut guest, &mut far, 1 << 16, 1 << 16).await.expect("copied");
            }
        }
    });
    thread_time() - before
}

fn run(how: Relay, bytes: usize) -> (f64, f64) {
    let ((mut client, guest), (far, mut server)) = (pair(), pair());
    let start = Instant::now();
    let relay = std::thread::spawn(move || relay(how, guest, far));
    let reader = std::thread::spawn(move || {
        let (mut buffer, mut read) = (vec![0; 1 << 18], 0);
        loop {
            match server.read(&mut buffer).expect("a read") {
                0 => return read,
                more => read += more,
            }
        }
    });
    let buffer = vec![1; 1 << 18];
    for _ in 0..bytes / buffer.len() {
        client.write_all(&buffer).expect("a write");
    }
    drop(client);
    assert_eq!(reader.join().expect("a reader"), bytes);
    let took = start.elapsed();
    let gib = bytes as f64 / GIB as f64;
    let cpu = relay.join().expect("a relay").as_secs_f64();
    (cpu / gib, 8.0 * bytes as f64 / 1e9 / took.as_secs_f64())
}

fn main() {
    let gib = std::env::args().skip(1).find_map(|argument| argument.parse().ok()).unwrap_or(4);
    println!("{:>10} {:>14} {:>8}", "relay", "CPU s per GiB", "Gbit/s");
    for _ in 0..3 {
        for how in [Relay::Tunnel, Relay::Copy, Relay::CopyWide] {
            let (cpu, rate) = run(how, gib * GIB);
            println!("{:>10} {cpu:>14.3} {rate:>8.1}", format!("{how:?}"));
        }
    }
}
