//! The real program in a world of namespaces, judged by what crosses the wire.
//!
//! Needs root and a built `postern`. A refusal is proved three ways: what the guest saw, what the
//! audit says, and silence at the far side; beside it, on the same path, something allowed works.
#![expect(
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "tests: what does not hold ends the test"
)]

mod alarms;
mod allowed;
mod api;
mod audit;
mod clocks;
mod crash;
mod death;
mod dns;
mod exec;
mod external;
mod fence;
mod flood;
mod foreign;
mod frames;
mod fullness;
mod hellos;
mod hoards;
mod http;
mod isolation;
mod limits;
mod many;
mod mtu;
mod names;
mod observe;
mod operator;
mod oracle;
mod policies;
mod protocols;
mod refused;
mod removal;
mod reuse;
mod revoke;
mod segments;
mod semantics;
mod snapshots;
mod steps;
mod stubs;
mod tenants;
mod tls;
mod udp;
mod unreadable;
mod unwoken;
mod uplink;
mod usage;
mod writes;
