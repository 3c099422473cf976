//! Names for guests: their questions judged, resolved, filtered, pinned and answered; and the
//! resolver that everything in the house asks.
//!
//! Never opens a socket to a guest: bytes and streams are handed in, and who is speaking with them.
//! Never lets a question that the policy refuses cause a query to anybody.
//!
//! The modules below are in order, top-down: each may use only modules below itself.
#![forbid(unsafe_code)]

mod stream;
mod guest;
mod reply;
pub mod question;
mod pins;
mod asker;
mod resolver;
mod sockets;
mod error;
mod allowance;
mod budget;
mod chain;

pub use allowance::Names;
pub use asker::Asker;
pub use chain::Family;
pub use error::Error;
pub use guest::{Guest, Transport};
pub use pins::{Pinned, Pins};
pub use resolver::{Answer, Resolver, ResolverConfig};
