//! What the host and the agent inside a guest say to each other, and nothing else.
//!
//! One TCP connection carries one command. Pure: bytes in, messages out. Both sides treat the other
//! as hostile, so a message that is too long, unknown or malformed ends the connection.
//!
//! The order of a connection: the guest says [`FromGuest::Hello`]; the host may send
//! [`FromHost::Clock`] and [`FromHost::Entropy`], then sends [`FromHost::Exec`]; then streams both
//! ways until the guest sends [`FromGuest::Exit`] or [`FromGuest::Failed`] and closes. A host that closes, even half, has left:
//! the guest kills the command's process group.
//!
//! The modules below are in order, top-down: each may use only modules below itself.
#![forbid(unsafe_code)]

pub mod message;
pub mod frame;
pub mod error;

pub use error::Error;
pub use frame::{Decoder, MAX_PAYLOAD, Message};
pub use message::{Exec, FromGuest, FromHost, Hello, Status};

/// The version of this protocol, in [`Hello`]. A host speaks to the same version only.
pub const VERSION: u16 = 1;

/// Bytes of one [`FromHost::Entropy`] at most.
pub const MAX_ENTROPY: usize = 512;
