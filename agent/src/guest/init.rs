//! Process 1: boots the guest, keeps the agent running, reaps what is left behind, powers off.
//!
//! Never returns while the guest lives: a fault ends the guest with a line on the console, so that
//! the host sees a stopped machine and not a silent one.

use std::convert::Infallible;
use std::fs::File;
use std::io::{self, Read};
use std::process::{Command, ExitCode};
use std::thread;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::reboot::{RebootMode, reboot};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::signalfd::SignalFd;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::{Pid, sethostname, sync};

use crate::boot;
use crate::cmdline::Cmdline;
use crate::network;
use crate::session::set_clock;

/// How long processes get between SIGTERM and SIGKILL at power-off.
const FAREWELL: Duration = Duration::from_millis(500);

/// Runs the guest to its end.
pub(crate) fn run() -> ExitCode {
    let Err(error) = live();
    if error.kind() != io::ErrorKind::Interrupted {
        eprintln!("postern-guest: {error}");
    }
    sync();
    let Err(error) = reboot(RebootMode::RB_POWER_OFF);
    eprintln!("postern-guest: power off: {error}");
    ExitCode::FAILURE
}

/// Ends with [`io::ErrorKind::Interrupted`] when asked to power off.
fn live() -> io::Result<Infallible> {
    // Before any thread: every thread must leave these to the signalfd.
    let signals: SigSet = [Signal::SIGCHLD, Signal::SIGTERM, Signal::SIGINT].into_iter().collect();
    signals.thread_block()?;
    boot::switch_root()?;
    let cmdline = Cmdline::read()?;
    if let Some(written) = cmdline.clock {
        not_before(Duration::from_nanos(written))?;
    }
    sethostname(&cmdline.name)?;
    network::set_up(&cmdline)?;
    watch_power_buttons();
    let events = SignalFd::new(&signals)?;
    let mut agent = start_agent()?;
    loop {
        let Some(event) = events.read_signal()? else { continue };
        if event.ssi_signo != Signal::SIGCHLD as u32 {
            end_everything();
            return Err(io::ErrorKind::Interrupted.into());
        }
        while let Some(gone) = reap()? {
            if gone == agent {
                eprintln!("postern-guest: the agent ended, starting it again");
                thread::sleep(FAREWELL);
                agent = start_agent()?;
            }
        }
    }
}

/// The kernel took the time from the machine's clock chip, if it has one. The host's word is older by
/// what firmware and kernel took so far, so it only corrects a clock that is behind it.
fn not_before(written: Duration) -> io::Result<()> {
    let least = written + Duration::from(clock_gettime(ClockId::CLOCK_BOOTTIME)?);
    if Duration::from(clock_gettime(ClockId::CLOCK_REALTIME)?) >= least {
        return Ok(());
    }
    set_clock(u64::try_from(least.as_nanos()).unwrap_or(u64::MAX))
}

/// The agent is a child, so that process 1 may reap any process without taking the agent's own.
fn start_agent() -> io::Result<Pid> {
    let agent = Command::new("/proc/self/exe").arg("serve").spawn()?;
    Ok(Pid::from_raw(i32::try_from(agent.id()).map_err(io::Error::other)?))
}

fn reap() -> io::Result<Option<Pid>> {
    match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
        Ok(WaitStatus::StillAlive) | Err(Errno::ECHILD) => Ok(None),
        Ok(status) => Ok(status.pid()),
        Err(error) => Err(error.into()),
    }
}

fn end_everything() {
    let all = Pid::from_raw(-1);
    // ESRCH means nobody is left.
    let _ = kill(all, Signal::SIGTERM);
    let end = std::time::Instant::now() + FAREWELL;
    while std::time::Instant::now() < end && waitpid(None, Some(WaitPidFlag::WNOHANG)).is_ok() {
        thread::sleep(Duration::from_millis(10));
    }
    let _ = kill(all, Signal::SIGKILL);
}

/// The host's request to power off is the ACPI power button, a key press to Linux.
fn watch_power_buttons() {
    for number in 0..8 {
        let Ok(mut device) = File::open(format!("/dev/input/event{number}")) else { continue };
        thread::spawn(move || {
            let mut event = [0; EVENT];
            while device.read_exact(&mut event).is_ok() {
                if is_power_press(&event) {
                    let _ = kill(Pid::this(), Signal::SIGTERM);
                }
            }
        });
    }
}

/// Size of `struct input_event` on 64-bit Linux: time (16), type (2), code (2), value (4).
const EVENT: usize = 24;

fn is_power_press(event: &[u8; EVENT]) -> bool {
    const EV_KEY: [u8; 2] = 1_u16.to_ne_bytes();
    const KEY_POWER: [u8; 2] = 116_u16.to_ne_bytes();
    let [.., t0, t1, c0, c1, v0, v1, v2, v3] = *event;
    [t0, t1] == EV_KEY && [c0, c1] == KEY_POWER && [v0, v1, v2, v3] == 1_i32.to_ne_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_pressing_the_power_key_powers_off() {
        let event = |kind: u16, code: u16, value: i32| {
            let mut bytes = [0_u8; EVENT];
            bytes[16..18].copy_from_slice(&kind.to_ne_bytes());
            bytes[18..20].copy_from_slice(&code.to_ne_bytes());
            bytes[20..].copy_from_slice(&value.to_ne_bytes());
            is_power_press(&bytes)
        };
        assert!(event(1, 116, 1));
        assert!(!event(1, 116, 0), "released");
        assert!(!event(1, 30, 1), "another key");
        assert!(!event(0, 116, 1), "no key at all");
    }
}
