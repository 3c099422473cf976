//! What is left of a connection when its bytes are not: enough to reset it where it was, after the daemon
//! that had it is gone, and to record its end. Fit for a journal; holds nothing of a guest's payload.

use std::net::{SocketAddr, SocketAddrV4};

use policy::audit::{AuditRecord, Kind, Outcome};
use policy::{Slot, Subject};
use serde::{Deserialize, Serialize};

use crate::repair::Checkpoint;
use crate::repair::option::Window;

/// A connection of a guest that sleeps, as numbers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Remains {
    /// The number that joins its audit records; 0 for one whose end has been recorded.
    pub flow: u64,
    local: SocketAddrV4,
    remote: SocketAddrV4,
    next_in: u32,
    next_out: u32,
    window: [u32; 5],
    segment: u32,
    scales: Option<(u8, u8)>,
    sack: bool,
    timestamp: Option<u32>,
    /// What its end is to be recorded as, as long as it is not.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    untold: Option<Untold>,
}

/// What the audit says of a connection that was let through and has not ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Untold {
    pub(crate) kind: Kind,
    pub(crate) protocol: String,
    pub(crate) name: Option<String>,
    pub(crate) destination: SocketAddr,
    pub(crate) dialed: Option<SocketAddr>,
}

impl Remains {
    pub(crate) fn of(checkpoint: &Checkpoint, flow: u64) -> Self {
        let Window { snd_wl1, snd_wnd, max_window, rcv_wnd, rcv_wup } = checkpoint.window;
        Self {
            flow,
            local: checkpoint.local,
            remote: checkpoint.remote,
            next_in: checkpoint.next_in,
            next_out: checkpoint.next_out,
            window: [snd_wl1, snd_wnd, max_window, rcv_wnd, rcv_wup],
            segment: checkpoint.segment,
            scales: checkpoint.scales,
            sack: checkpoint.sack,
            timestamp: checkpoint.timestamp,
            untold: None,
        }
    }

    /// The same, of one of which the audit has no end.
    pub(crate) fn of_open(self, untold: Option<Untold>) -> Self {
        Self { untold, ..self }
    }

    /// Its two ends: no other connection of the same guest has both.
    #[must_use]
    pub fn ends(&self) -> (SocketAddrV4, SocketAddrV4) {
        (self.local, self.remote)
    }

    /// Whether the audit has a beginning of it, and no end.
    #[must_use]
    pub fn is_untold(&self) -> bool {
        self.untold.is_some()
    }

    /// Its end need not be recorded: it has been.
    pub fn told(&mut self) {
        self.untold = None;
    }

    /// The same, of a guest with the same memory in this slot.
    #[must_use]
    pub fn in_slot(self, slot: Slot) -> Self {
        let remote = SocketAddrV4::new(slot.address(), self.remote.port());
        Self { remote, ..self }
    }

    /// The record of its end with the daemon that had it, if there is to be one: given once.
    pub fn ended(&mut self, subject: &Subject) -> Option<AuditRecord> {
        let Untold { kind, protocol, name, destination, dialed } = self.untold.take()?;
        let mut record = AuditRecord::new(fault::wall_clock(), kind, Outcome::Closed);
        record.flow = Some(self.flow);
        record.protocol = Some(protocol);
        (record.name, record.destination, record.dialed) = (name, Some(destination), dialed);
        record.detail = Some("it ended with the daemon, while the sandbox slept".to_owned());
        Some(record.about(subject))
    }
}

impl From<Remains> for Checkpoint {
    fn from(remains: Remains) -> Self {
        let [snd_wl1, snd_wnd, max_window, rcv_wnd, rcv_wup] = remains.window;
        Self {
            local: remains.local,
            remote: remains.remote,
            next_in: remains.next_in,
            next_out: remains.next_out,
            unread: Vec::new(),
            queued: Vec::new(),
            sent: 0,
            far_done: false,
            done: false,
            window: Window { snd_wl1, snd_wnd, max_window, rcv_wnd, rcv_wup },
            segment: remains.segment,
            scales: remains.scales,
            sack: remains.sack,
            timestamp: remains.timestamp,
            buffers: [0; 2],
            locked: 0,
            nodelay: true,
        }
    }
}
