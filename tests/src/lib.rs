//! The world in a box, in which the real program is tested from outside.
//!
//! Network namespaces on one machine: a host for the daemon, an internet with origins and an
//! attacker, guests. Needs root. Everything here fails by panicking with what it was doing.
//!
//! The modules are in order, top-down: each may use only modules below itself.
#![forbid(unsafe_code)]
#![expect(
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a harness for tests: what does not hold ends the test"
)]

pub mod machine;
pub mod segment;
pub mod guest;
pub mod world;
pub mod daemon;
pub mod origin;
pub mod nameserver;
pub mod client;
pub mod wire;
pub mod pump;
pub mod ca;
pub mod room;
pub mod netns;
pub mod poll;

pub use guest::{Guest, allow};
pub use world::{Site, World};
