//! microVMs: the tap a guest hangs on, the process it runs in, and how to end both.
//!
//! One seam, [`Hypervisor`]; drivers [`qemu`] and [`external`]. Knows one machine at a time, no
//! policy, no socket of a guest. A process lives longer than the daemon that started it: what is
//! needed to find it again is a value, [`Process`].
//!
//! The modules below are in order, top-down: each may use only modules below itself.
#![deny(unsafe_code)]

pub mod qemu;
pub mod external;
mod cgroup;
pub mod hypervisor;
pub mod tap;
pub mod error;

pub use error::Error;
pub use external::{External, Hooks};
pub use hypervisor::{DriverName, Hypervisor, Machine, Process, Saved, boot_id, has_processes};
pub use qemu::Qemu;
