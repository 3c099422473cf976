//! What the connections of one guest may keep in the kernel: its memory for TCP is one for all guests
//! and the host (`tcp_mem`, tcp(7)), and no limit of a process counts it.
//!
//! A guest's first connections grow their buffers as they need. The n-th one open gets the n-th part of
//! a budget, so that what all together may hold grows with the logarithm of their number; never in step
//! with it. What the daemon itself keeps of them, heads and first flights, is divided in the same way.

use std::os::fd::AsFd;

use nix::sys::socket::{setsockopt, sockopt};

use crate::framing::MAX_HEAD;

/// What is divided, each way, on each side of us, in bytes of the kernel's memory.
const BUDGET: usize = 16 << 20;
/// What any connection may hold each way. It is slow with less.
const LEAST: usize = 64 << 10;
/// A socket grows its buffers by itself, as its namespace lets it, unless its share is less than this;
/// that of the guests (`world`) lets it no further.
const GROWN: usize = 4 << 20;

/// What is divided of the daemon's own memory, for each of the places in which bytes of a connection wait.
const HEAP: usize = 1 << 20;
/// What a head or a first flight may have however many connections there are; hyper takes no less.
pub(crate) const LEAST_HEAP: usize = 8 << 10;

/// The longest head or first flight of the `rank`-th connection, and what one buffer of it holds, in bytes.
pub(crate) fn heap(rank: usize) -> usize {
    (HEAP / rank.max(1)).clamp(LEAST_HEAP, MAX_HEAD)
}

/// Bounds both buffers of a socket of a guest's `rank`-th open connection.
pub(crate) fn bound(socket: &impl AsFd, rank: usize) {
    let share = share(rank);
    if share < GROWN {
        // The kernel takes it twice, to have as much for what it keeps beside the bytes (socket(7)).
        // This fails without CAP_NET_ADMIN only, and there are no taps without it.
        let _ = setsockopt(socket, sockopt::RcvBufForce, &(share / 2));
        let _ = setsockopt(socket, sockopt::SndBufForce, &(share / 2));
    }
}

/// What the `rank`-th connection may hold each way; the first has rank 1.
fn share(rank: usize) -> usize {
    (BUDGET / rank.max(1)).max(LEAST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_connections_are_free_and_all_together_hold_little_more_than_a_few() {
        assert!(share(4) >= GROWN && share(5) < GROWN);
        let together = |count| (1..=count).map(share).sum::<usize>();
        assert!(together(1024) < 10 * BUDGET, "{}", together(1024));
    }

    #[test]
    fn a_few_connections_may_have_long_heads_and_a_thousand_together_no_more_than_12_mib() {
        assert_eq!((heap(0), heap(16), heap(1024)), (MAX_HEAD, MAX_HEAD, LEAST_HEAP));
        let together: usize = (1..=1024).map(heap).sum();
        assert!(together < 12 << 20, "{together}");
    }
}
