//! Files of machines that sleep for long, kept in an object store: a folder of this node, or S3.
//!
//! Knows files and keys; no machine, no sandbox. What is given back is what was taken, or an error: the caller
//! keeps the sum of a list that has the sums of all else. A few MiB of memory for each file under way, however
//! large it is.
//!
//! The modules are in order, top-down: each may use only modules below itself.
#![forbid(unsafe_code)]

mod keep;
mod carry;
mod place;
mod bounded;
mod sparse;
mod error;

pub use error::Error;
pub use keep::{File, Stored, Vault};
pub use place::Location;
