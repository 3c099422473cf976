//! Which sandboxes exist and in what state.
//!
//! Creating and removing, the store and its journal, the policies in force, and the way to a
//! sandbox's agent. One driver task per sandbox is the only writer of its state; what it is about to
//! do is in the journal before it does it; set-up undoes itself in reverse. Nothing here opens a
//! socket or starts a process itself: `egress` and `vmm` do.
//!
//! The modules are in order, top-down: each may use only modules below itself.
#![forbid(unsafe_code)]

mod keeper;
mod reconcile;
mod driver;
mod policies;
mod acts;
mod machine;
mod idle;
mod stuck;
pub mod usage;
mod fetches;
mod turns;
mod slots;
mod store;
mod sandbox;
mod config;
mod night;
mod snapshot;
mod terms;
mod cold;
mod state;
mod database;
mod threads;
mod reason;
mod error;

pub use cold::ColdBoot;
pub use config::{Config, Quota, UsageBounds};
pub use driver::Call;
pub use error::{Error, Field};
pub use keeper::{Found, Holder, Keeper};
pub use night::Wake;
pub use policies::{PolicyChange, Scope, notes};
pub use reason::Reason;
pub use sandbox::{Actor, Awake, CreateSpec, Driver, Progress, Sandbox, Wish};
pub use snapshot::Snapshot;
pub use state::State;
pub use terms::{DefaultTerms, OnIdle, WantedTerms};
