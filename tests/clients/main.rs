//! Real programs against real servers through the router: in a Debian guest under QEMU, and in guests
//! that are namespaces. Each is let through by a rule, and its twin that no rule names is refused at
//! once, for the right reason, with nothing of it on the wire.
//!
//! Needs root, a built `postern`, and what `make clients outside` builds.
#![expect(
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "tests: what does not hold ends the test"
)]

mod asleep;
mod protocols;
mod programs;
mod browsers;
mod guest;
mod outside;
