//! The ports of the egress addresses, shared fairly among the guests that leave from them.
//!
//! Towards one far side an address has as many as the kernel hands out. One is taken while its
//! connection lasts and, where our side ended that first, for a minute more (TIME-WAIT, RFC 9293,
//! section 3.3.2). Never gives a guest what is the share of another, whatever it opens and ends.

mod table;

use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use policy::Slot;
use tokio::time::Instant;

use crate::ports::table::{Line, Table};
use crate::unsent::{Left, left};

/// How long what the kernel said of its ports is good.
const KNOWN: Duration = Duration::from_secs(5);
/// After what time it is asked again about a connection whose end is under way: as long as TIME-WAIT
/// lasts (`TCP_TIMEWAIT_LEN` of `net/tcp.h`).
const AGAIN: Duration = Duration::from_secs(60);
/// The kernel's own range (`ip_local_port_range` of ip-sysctl), where it does not say another.
const USUAL: usize = 28_232;

/// The ports of all egress addresses of this node. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Ports(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    table: Mutex<Table>,
    known: Mutex<Option<(Instant, usize)>>,
}

/// A port of an egress address that a guest has taken; given back when dropped, or as soon after that
/// as the kernel has done with it. To be dropped after its socket.
#[derive(Debug)]
pub(crate) struct Port {
    ports: Ports,
    slot: Slot,
    from: IpAddr,
    to: Option<SocketAddr>,
    ours: Option<SocketAddr>,
}

impl Ports {
    /// All free, for guests in slots 1 to `slots`.
    pub(crate) fn new(slots: u16) -> Self {
        let table = Mutex::new(Table::new(slots.max(1).into()));
        Self(Arc::new(Shared { table, known: Mutex::default() }))
    }

    /// Takes one port of `from` for the guest in a slot, towards one far side; towards all of them for
    /// datagrams, whose ports are never shared.
    ///
    /// # Errors
    /// `AddrInUse` when the guest has its share.
    pub(crate) fn take(
        &self,
        slot: Slot,
        from: IpAddr,
        to: Option<SocketAddr>,
    ) -> io::Result<Port> {
        let (now, count) = (Instant::now(), self.count());
        let due = lock(&self.0.table).due(now);
        for (slot, line) in due {
            self.ended(slot, line);
        }
        if lock(&self.0.table).take((from, to), slot, count) {
            return Ok(Port { ports: self.clone(), slot, from, to, ours: None });
        }
        let (why, whither) = (
            "the sandbox has its share of the ports of the egress address",
            if to.is_some() { " towards this destination" } else { "" },
        );
        Err(io::Error::new(io::ErrorKind::AddrInUse, format!("{why}{whither}")))
    }

    /// Notes what the kernel still has of a connection whose socket is closed.
    fn ended(&self, slot: Slot, line: Line) {
        let left = left(line.ours, line.far).unwrap_or_else(|error| {
            tracing::debug!(%error, "ports");
            Left::More
        });
        let now = Instant::now();
        let mut table = lock(&self.0.table);
        match left {
            Left::Nothing => table.free((line.ours.ip(), Some(line.far)), slot),
            Left::TimeWait(left) => table.rest(line, slot, now + left, true),
            Left::More => table.rest(line, slot, now + AGAIN, false),
        }
    }

    /// How many ports an address has.
    fn count(&self) -> usize {
        let mut known = lock(&self.0.known);
        match *known {
            Some((asked, count)) if asked.elapsed() < KNOWN => count,
            _ => {
                let count = counted();
                *known = Some((Instant::now(), count));
                count
            }
        }
    }
}

impl Port {
    /// Which one it is, once the kernel has chosen.
    pub(crate) fn known(&mut self, ours: SocketAddr) {
        if let Some(far) = self.to {
            // Where the kernel gave one that was resting, it is not its last holder's any more.
            lock(&self.ports.0.table).wake(Line { ours, far });
            self.ours = Some(ours);
        }
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        match (self.ours, self.to) {
            (Some(ours), Some(far)) => self.ports.ended(self.slot, Line { ours, far }),
            _ => lock(&self.ports.0.table).free((self.from, self.to), self.slot),
        }
    }
}

/// What the kernel of this thread's namespace hands out (ip-sysctl: `ip_local_port_range`,
/// `ip_local_reserved_ports`).
fn counted() -> usize {
    let read = |name| {
        let path = format!("/proc/sys/net/ipv4/{name}");
        fs::read_to_string(path).unwrap_or_default()
    };
    range(&read("ip_local_port_range"), &read("ip_local_reserved_ports")).unwrap_or(USUAL)
}

fn range(all: &str, reserved: &str) -> Option<usize> {
    let mut ends = all.split_ascii_whitespace().map(str::parse::<usize>);
    let (first, last) = (ends.next()?.ok()?, ends.next()?.ok()?);
    let missing = |part: &str| {
        let (from, to) = part.split_once('-').unwrap_or((part, part));
        let (from, to) = (from.trim().parse().ok()?, to.trim().parse().ok()?);
        Some((last.min(to) + 1).saturating_sub(first.max(from)))
    };
    let reserved: usize = reserved.split(',').filter_map(missing).sum();
    Some((last + 1).saturating_sub(first).saturating_sub(reserved))
}

/// A panic elsewhere does not make these unreadable: their values are whole at every step.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_ports_are_not_counted() {
        for (all, reserved, count) in [
            ("32768\t60999\n", "\n", Some(28_232)),
            ("40000 40007", "39999-40001,40003,50000\n", Some(5)),
            ("5 5", "5", Some(0)),
            ("", "", None),
        ] {
            assert_eq!(range(all, reserved), count, "{all} {reserved}");
        }
    }
}
