//! The nouns of Postern and its one decision.
//!
//! What may leave a sandbox, under which name, and why not: ids, canonical host names, the address
//! classifier, the policy language, `judge`, reason codes, the audit record. Pure: no runtime, no
//! clock, no log, no I/O. Time and bytes arrive as arguments, answers leave as values.
//!
//! The modules below are in order, top-down: each may use only modules below itself.
#![forbid(unsafe_code)]

pub mod explain;
pub mod judge;
mod ports;
mod reading;
pub mod compile;
pub mod flow;
pub mod document;
pub mod path;
pub mod trail;
pub mod audit;
pub mod reason;
pub mod class;
pub mod name;
pub mod id;
pub mod net;

pub use audit::AuditRecord;
pub use class::{AddressClass, OwnAddresses, host_service};
pub use compile::{Compiled, CompiledLayer, PolicyHandle, Reach};
pub use document::{
    Effect, Layer, Peer, Policy, PolicyError, PolicyMode, PortRange, Protocol, Rule,
};
pub use explain::{Explanation, explain};
pub use flow::{Evidence, Flow};
pub use id::{Revision, SandboxName, SnapshotName, Subject, TenantName};
pub use judge::{Denial, Dialable, Mode, Permit, Target, Verdict};
pub use name::{Authority, AuthorityHost, Host, Pattern};
pub use net::Slot;
pub use path::canonical_path;
pub use reason::Code;
pub use trail::{Records, Trail};
