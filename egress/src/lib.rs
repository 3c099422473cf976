//! The router: every socket to or from a guest, and the only door from their world to the outside.
//!
//! A guest speaks through its tap; the fence lets ARP, TCP, DNS and the datagrams that its policy may
//! mean in and nothing else; `conn` reads the first bytes, has them judged, and dials the judged name
//! from the sandbox's egress address; `relay` does the same for datagrams.
//! What is not let through is refused at once, with a reason the guest and the audit both see.
//!
//! The modules below are in order, top-down: each may use only modules below itself.
#![forbid(unsafe_code)]

pub mod router;
mod watch;
mod conn;
mod http;
mod relay;
mod account;
mod guest;
mod questions;
mod accept;
mod stream;
pub mod tunnel;
mod dial;
mod ports;
mod refuse;
mod side;
mod repair;
mod closing;
mod buffers;
pub mod framing;
pub mod sniff;
pub mod drops;
pub mod fence;
pub mod link;
mod unsent;
mod facing;
mod sever;
mod flows;
mod attempts;
pub mod meter;
pub mod keepalive;
pub mod limits;
mod room;
pub mod world;
pub mod error;

pub use error::Error;
pub use flows::Rejudged;
pub use limits::Limits;
pub use meter::{Carried, Meter};
pub use repair::Remains;
pub use router::{Activity, Attachment, Config, Detached, Held, Router};
pub use side::{GuestSide, Wanted};
pub use stream::GuestStream;
