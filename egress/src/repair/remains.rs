//! What is left of a connection when its bytes are not: enough to reset it where it was, after the daemon
//! that had it is gone. Fit for a journal; holds nothing of a guest's payload.

use std::net::SocketAddrV4;

use serde::{Deserialize, Serialize};

use crate::repair::Checkpoint;
use crate::repair::option::Window;

/// A connection of a guest that sleeps, as numbers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Remains {
    /// The number that joins its audit records.
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
        }
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
