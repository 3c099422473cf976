//! Bytes that wait with us for a guest that sleeps, because their far side is to notice nothing of that.
//!
//! They are of the guest's share until they are taken or dropped. Never holds more than that, nor more than
//! its connection may have.

use std::sync::Arc;

use crate::side::Gate;

/// What room is taken by, in bytes: most of what waits is short, and comes often.
const PIECE: usize = 1024;

/// What waits for a guest on one connection.
#[derive(Debug)]
pub(crate) struct Kept {
    gate: Arc<Gate>,
    bytes: Vec<u8>,
    /// What it has of the guest's share, in bytes.
    held: usize,
    most: usize,
}

impl Kept {
    /// Nothing yet, for the guest behind this gate, of at most so many bytes.
    pub(crate) fn new(gate: &Arc<Gate>, most: usize) -> Self {
        Self { gate: Arc::clone(gate), bytes: Vec::new(), held: 0, most }
    }

    pub(crate) fn gate(&self) -> &Arc<Gate> {
        &self.gate
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Keeps these, too; all of them or, where there is no room, none: whether there was.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> bool {
        let length = self.bytes.len().saturating_add(bytes.len());
        if length > self.most {
            return false;
        }
        let held = length.next_multiple_of(PIECE).min(self.most);
        if held > self.held {
            if !self.gate.room(held - self.held) {
                return false;
            }
            self.held = held;
            self.bytes.reserve_exact(held - self.bytes.len());
        }
        self.bytes.extend_from_slice(bytes);
        true
    }

    /// All of it, which is to be given to the guest before anything else.
    pub(crate) fn take(&mut self) -> Vec<u8> {
        if self.held > 0 {
            self.gate.free(std::mem::take(&mut self.held));
        }
        std::mem::take(&mut self.bytes)
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.take();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::side::Store;

    /// What a connection may have, and what all of a guest's may.
    const MOST: usize = 64 << 10;
    const OF_ONE: usize = 8 << 20;

    /// Promises 37, 41.
    #[test]
    fn what_waits_for_a_guest_is_of_its_share_until_it_is_taken_or_dropped() {
        let gate = Gate::new(Store::new(1).share(None));
        let full = || {
            let mut kept = Kept::new(&gate, MOST);
            while kept.push(&[b':'; 100]) {}
            kept
        };
        let mut all: Vec<_> = (0..OF_ONE / MOST).map(|_| full()).collect();
        assert!(all.iter().all(|kept| kept.bytes.len() > MOST - 100), "each as much as it may");
        assert!(all.iter().all(|kept| kept.bytes.capacity() == MOST), "and no more");
        let mut late = full();
        assert!(late.is_empty() && !late.push(b":"), "there is no more for one guest");
        assert_eq!(all[0].take().len(), MOST - MOST % 100);
        assert!(late.push(b":") && !gate.room(MOST) && gate.room(MOST - PIECE));
        gate.free(MOST - PIECE);
        drop((all, late));
        assert!(gate.room(OF_ONE) && !gate.room(1), "nothing is left of it");
    }
}
