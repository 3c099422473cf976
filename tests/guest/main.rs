//! The real program with a real microVM: a Debian guest under QEMU, driven by the command line.
//!
//! Needs root, QEMU, a built `postern` and the guest image (`POSTERN_IMAGE`, or `target/image`).
#![expect(
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "tests: what does not hold ends the test"
)]

mod streams;
mod killed;
mod asleep;
mod buried;
mod cold;
mod death;
mod machine;
mod lifetime;
mod programs;
mod blocks;
mod suspended;
mod snapshots;
