//! The real program with a real microVM: a Debian guest under QEMU, driven by the command line.
//!
//! Needs root, QEMU, a built `postern` and the guest image (`POSTERN_IMAGE`, or `target/image`).

mod machine;
mod lifetime;
mod programs;
