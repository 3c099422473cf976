//! What a guest does to load the way out: one connection with a true ClientHello, as a program in a
//! guest makes it. Called inside a guest's namespace.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use policy::Slot;
use world::client::{PATIENT, connect};

use crate::machine::Machine;
use crate::origin::{DOWN, HOLD, UP};

/// A connection whose name is judged, and how long its first byte took from the SYN on.
pub(crate) fn open(to: SocketAddr, hello: &[u8]) -> io::Result<(TcpStream, Duration)> {
    let start = Instant::now();
    let mut stream = connect(to, PATIENT)?;
    stream.write_all(hello)?;
    let mut first = [0];
    stream.read_exact(&mut first)?;
    Ok((stream, start.elapsed()))
}

/// Takes so many bytes from the far side.
pub(crate) fn download(to: SocketAddr, hello: &[u8], bytes: u64) -> io::Result<Duration> {
    let (mut stream, _) = open(to, hello)?;
    say(&mut stream, DOWN, bytes)?;
    let start = Instant::now();
    let (mut buffer, mut taken) = (vec![0; 1 << 18], 0);
    while taken < bytes {
        match stream.read(&mut buffer)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            more => taken += more as u64,
        }
    }
    Ok(start.elapsed())
}

/// Sends so many bytes to the far side, and waits until it has them.
pub(crate) fn upload(to: SocketAddr, hello: &[u8], bytes: u64) -> io::Result<Duration> {
    let (mut stream, _) = open(to, hello)?;
    say(&mut stream, UP, bytes)?;
    let start = Instant::now();
    let block = vec![0x17; 1 << 18];
    let mut left = bytes;
    while left > 0 {
        let now = usize::try_from(left).map_or(block.len(), |left| left.min(block.len()));
        stream.write_all(block.get(..now).unwrap_or_default())?;
        left -= now as u64;
    }
    stream.read_exact(&mut [0])?;
    Ok(start.elapsed())
}

/// A connection that the far side keeps, and remembers as `number`.
pub(crate) fn hold(to: SocketAddr, hello: &[u8], number: u64) -> io::Result<TcpStream> {
    let (mut stream, _) = open(to, hello)?;
    say(&mut stream, HOLD, number)?;
    Ok(stream)
}

fn say(stream: &mut TcpStream, verb: u8, number: u64) -> io::Result<()> {
    stream.write_all(&[&[verb][..], &number.to_be_bytes()].concat())
}

/// What each machine's load gives, all at the same time, each in its own namespace.
pub(crate) fn everywhere(
    machines: &[Machine],
    slots: &[Slot],
    one: impl Fn(Slot) -> Vec<f64> + Sync,
) -> Vec<f64> {
    std::thread::scope(|scope| {
        let loads: Vec<_> = machines
            .iter()
            .zip(slots)
            .map(|(machine, slot)| scope.spawn(|| machine.netns.run(|| one(*slot))))
            .collect();
        loads.into_iter().flat_map(|load| load.join().expect("a load")).collect()
    })
}
