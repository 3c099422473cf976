//! One connection of the host: one command, its streams, its end.
//!
//! One loop over poll(2), nothing blocks: a side that does not read is not read from either, so
//! memory stays bounded, and the host's leaving is seen even while the command ignores its input.

use std::fs;
use std::io::{self, ErrorKind, PipeReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{ChildStderr, ChildStdin, ChildStdout, ExitStatus};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use agent::{Decoder, FromGuest, FromHost, Hello, Message, Status, VERSION};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::signal::{Signal, killpg};
use nix::sys::socket::{Shutdown, shutdown};
use nix::sys::time::TimeSpec;
use nix::time::{ClockId, clock_settime};
use nix::unistd::Pid;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::entropy::reseed;
use crate::spawn::spawn;

/// Bytes read at once.
const PORTION: usize = 16 * 1024;
/// Output waiting for the host beyond which the command is not read from.
const OUTBOUND: usize = 256 * 1024;
/// How long a host may take to say what it wants, and to take the last bytes.
const PATIENCE: Timespec = Timespec { tv_sec: 30, tv_nsec: 0 };
/// How long a host that has been told the end may go on speaking.
const FAREWELL: Duration = Duration::from_secs(30);

/// Serves one connection to its end. `peer` is set to non-blocking.
pub(crate) fn serve<S: Read + Write + AsFd>(peer: S) -> io::Result<()> {
    let mut peer = Peer { stream: peer, decoder: Decoder::default(), outbound: Vec::new() };
    set_nonblocking(peer.stream.as_fd())?;
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned();
    peer.say(&FromGuest::Hello(Hello { version: VERSION, boot_id, reseeds: true }))?;
    peer.flush_all()?;
    let exec = loop {
        match peer.next()? {
            FromHost::Exec(exec) => break exec,
            FromHost::Clock(nanos) => set_clock(nanos)?,
            FromHost::Entropy(bytes) => reseed(&bytes)?,
            FromHost::Stdin(_) | FromHost::StdinEnd => return Err(refused("input before exec")),
        }
    };
    match spawn(&exec) {
        Ok(child) => Running::new(child, peer)?.run(),
        Err(error) => {
            peer.say(&FromGuest::Failed(error.to_string()))?;
            peer.leave()
        }
    }
}

/// Steps the wall clock.
pub(crate) fn set_clock(unix_nanos: u64) -> io::Result<()> {
    let since = Duration::from_nanos(unix_nanos);
    Ok(clock_settime(ClockId::CLOCK_REALTIME, TimeSpec::from_duration(since))?)
}

struct Peer<S> {
    stream: S,
    decoder: Decoder<FromHost>,
    outbound: Vec<u8>,
}

impl<S: Read + Write + AsFd> Peer<S> {
    fn say(&mut self, message: &FromGuest) -> io::Result<()> {
        message.encode(&mut self.outbound).map_err(io::Error::other)
    }

    /// The next message, waited for.
    fn next(&mut self) -> io::Result<FromHost> {
        loop {
            if let Some(message) = self.decoder.message().map_err(io::Error::other)? {
                return Ok(message);
            }
            wait_for(self.stream.as_fd(), PollFlags::IN)?;
            if !self.receive()? {
                return Err(ErrorKind::UnexpectedEof.into());
            }
        }
    }

    /// Reads once; false when the host has left.
    fn receive(&mut self) -> io::Result<bool> {
        let mut portion = [0; PORTION];
        match self.stream.read(&mut portion) {
            Ok(0) => Ok(false),
            Ok(length) => {
                self.decoder.push(portion.get(..length).unwrap_or_default());
                Ok(true)
            }
            Err(error) if again(&error) => Ok(true),
            Err(error) => Err(error),
        }
    }

    fn flush_some(&mut self) -> io::Result<()> {
        write_some(&mut self.stream, &mut self.outbound)
    }

    fn flush_all(&mut self) -> io::Result<()> {
        while !self.outbound.is_empty() {
            self.flush_some()?;
            if !self.outbound.is_empty() {
                wait_for(self.stream.as_fd(), PollFlags::OUT)?;
            }
        }
        Ok(())
    }

    /// Says the rest and waits for the host to leave. A connection that is closed while it holds
    /// input nobody read is reset, and takes along what the host has not received yet.
    fn leave(&mut self) -> io::Result<()> {
        self.flush_all()?;
        shutdown(self.stream.as_fd().as_raw_fd(), Shutdown::Write)?;
        let begun = Instant::now();
        while begun.elapsed() < FAREWELL {
            wait_for(self.stream.as_fd(), PollFlags::IN)?;
            if !self.receive()? {
                break;
            }
            self.decoder = Decoder::default();
        }
        Ok(())
    }
}

/// What may become ready.
#[derive(Clone, Copy)]
enum Port {
    Peer,
    Stdin,
    Stdout,
    Stderr,
    Exited,
}

struct Running<S> {
    peer: Peer<S>,
    group: Pid,
    stdin: Option<ChildStdin>,
    /// Read from the host, not yet taken by the command.
    inbound: Vec<u8>,
    stdin_ends: bool,
    stdout: Option<ChildStdout>,
    stderr: Option<ChildStderr>,
    /// Hangs up when `status` can be received.
    exited: Option<PipeReader>,
    status: Receiver<io::Result<ExitStatus>>,
}

impl<S> Drop for Running<S> {
    /// Left without an exit status: the host is gone, so the command goes.
    fn drop(&mut self) {
        if self.exited.is_some() {
            // The group may have ended by itself this very moment.
            let _ = killpg(self.group, Signal::SIGKILL);
        }
    }
}

impl<S: Read + Write + AsFd> Running<S> {
    fn new(mut child: std::process::Child, peer: Peer<S>) -> io::Result<Self> {
        let (exited, hang_up) = io::pipe()?;
        let (tell, status) = channel();
        let group = Pid::from_raw(i32::try_from(child.id()).map_err(io::Error::other)?);
        let (stdin, stdout, stderr) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take());
        thread::spawn(move || {
            // The receiver is gone when the host is: nobody to tell.
            let _ = tell.send(child.wait());
            drop(hang_up);
        });
        let this = Self {
            peer,
            group,
            stdin,
            inbound: Vec::new(),
            stdin_ends: false,
            stdout,
            stderr,
            exited: Some(exited),
            status,
        };
        for pipe in [
            this.stdin.as_ref().map(AsFd::as_fd),
            this.stdout.as_ref().map(AsFd::as_fd),
            this.stderr.as_ref().map(AsFd::as_fd),
        ] {
            pipe.map(set_nonblocking).transpose()?;
        }
        Ok(this)
    }

    fn run(mut self) -> io::Result<()> {
        self.listen()?;
        loop {
            let ready = self.poll()?;
            for (port, events) in ready {
                match port {
                    Port::Peer => self.peer_ready(events)?,
                    Port::Stdin => self.feed(),
                    Port::Stdout => {
                        relay(&mut self.stdout, &mut self.peer, FromGuest::Stdout)?;
                    }
                    Port::Stderr => {
                        relay(&mut self.stderr, &mut self.peer, FromGuest::Stderr)?;
                    }
                    Port::Exited => return self.finish(),
                }
            }
        }
    }

    /// Waits until something can be done.
    fn poll(&self) -> io::Result<Vec<(Port, PollFlags)>> {
        let mut peer = PollFlags::RDHUP;
        peer.set(PollFlags::IN, self.inbound.is_empty());
        peer.set(PollFlags::OUT, !self.peer.outbound.is_empty());
        let mut asked = vec![(Port::Peer, self.peer.stream.as_fd(), peer)];
        if let (Some(stdin), false) = (&self.stdin, self.inbound.is_empty()) {
            asked.push((Port::Stdin, stdin.as_fd(), PollFlags::OUT));
        }
        if self.peer.outbound.len() < OUTBOUND {
            let stdout = self.stdout.as_ref().map(|out| (Port::Stdout, out.as_fd()));
            let stderr = self.stderr.as_ref().map(|out| (Port::Stderr, out.as_fd()));
            let outputs = [stdout, stderr].into_iter().flatten();
            asked.extend(outputs.map(|(port, fd)| (port, fd, PollFlags::IN)));
        }
        let exited = self.exited.as_ref().map(|fd| (Port::Exited, fd.as_fd(), PollFlags::IN));
        asked.extend(exited);
        let mut fds: Vec<_> = asked.iter().map(|(_, fd, flags)| PollFd::new(fd, *flags)).collect();
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let ports = asked.iter().map(|(port, ..)| *port);
        let ready = ports.zip(fds.iter().map(PollFd::revents));
        Ok(ready.filter(|(_, events)| !events.is_empty()).collect())
    }

    fn peer_ready(&mut self, events: PollFlags) -> io::Result<()> {
        if events.contains(PollFlags::OUT) {
            self.peer.flush_some()?;
        }
        if events.contains(PollFlags::IN) {
            if !self.peer.receive()? {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            return self.listen();
        }
        if events.intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR) {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        Ok(())
    }

    /// Takes what the host has said so far.
    fn listen(&mut self) -> io::Result<()> {
        while let Some(message) = self.peer.decoder.message().map_err(io::Error::other)? {
            match message {
                FromHost::Stdin(bytes) if !self.stdin_ends => self.inbound.extend(bytes),
                FromHost::StdinEnd => self.stdin_ends = true,
                FromHost::Clock(nanos) => set_clock(nanos)?,
                FromHost::Entropy(bytes) => reseed(&bytes)?,
                FromHost::Stdin(_) => return Err(refused("input after its end")),
                FromHost::Exec(_) => return Err(refused("a second exec")),
            }
        }
        self.feed();
        Ok(())
    }

    /// Gives the command what it takes of its input. One that closed its input gets no more.
    fn feed(&mut self) {
        if let Some(stdin) = &mut self.stdin
            && write_some(stdin, &mut self.inbound).is_err()
        {
            self.stdin = None;
        }
        if self.stdin.is_none() {
            self.inbound.clear();
        }
        if self.stdin_ends && self.inbound.is_empty() {
            self.stdin = None;
        }
    }

    /// The command has ended: what it wrote, then how it ended. Does not wait for processes it left
    /// behind, which may hold its output open.
    fn finish(mut self) -> io::Result<()> {
        self.exited = None;
        let status = self.status.recv().map_err(io::Error::other)??;
        while relay(&mut self.stdout, &mut self.peer, FromGuest::Stdout)? {
            self.peer.flush_all()?;
        }
        while relay(&mut self.stderr, &mut self.peer, FromGuest::Stderr)? {
            self.peer.flush_all()?;
        }
        let status = match (status.code(), status.signal()) {
            (Some(code), _) => Status::Code(code),
            (None, signal) => Status::Signal(signal.unwrap_or(0)),
        };
        self.peer.say(&FromGuest::Exit(status))?;
        self.peer.leave()
    }
}

/// Moves one portion of output; false when there is none now or ever.
fn relay<R: Read, S: Read + Write + AsFd>(
    output: &mut Option<R>,
    peer: &mut Peer<S>,
    as_message: fn(Vec<u8>) -> FromGuest,
) -> io::Result<bool> {
    let Some(pipe) = output else { return Ok(false) };
    let mut portion = vec![0; PORTION];
    match pipe.read(&mut portion) {
        Ok(length) if length > 0 => {
            portion.truncate(length);
            peer.say(&as_message(portion))?;
            peer.flush_some()?;
            Ok(true)
        }
        Err(error) if again(&error) => Ok(false),
        Ok(_) | Err(_) => {
            *output = None;
            Ok(false)
        }
    }
}

/// Writes what is taken without waiting and keeps the rest.
fn write_some(to: &mut impl Write, bytes: &mut Vec<u8>) -> io::Result<()> {
    let mut done = 0;
    while let Some(rest) = bytes.get(done..).filter(|rest| !rest.is_empty()) {
        match to.write(rest) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(length) => done += length,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => return Err(error),
        }
    }
    bytes.drain(..done);
    Ok(())
}

fn wait_for(fd: BorrowedFd<'_>, what: PollFlags) -> io::Result<()> {
    match poll(&mut [PollFd::new(&fd, what)], Some(&PATIENCE)) {
        Ok(0) => Err(ErrorKind::TimedOut.into()),
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn set_nonblocking(fd: BorrowedFd<'_>) -> io::Result<()> {
    let flags = OFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GETFL)?);
    fcntl(fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
    Ok(())
}

fn again(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

fn refused(why: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, format!("the host sent {why}"))
}

#[cfg(test)]
#[path = "session_tests.rs"]
mod tests;
