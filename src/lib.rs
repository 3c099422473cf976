//! The program `postern`: configuration, assembly, control API, command line.
//!
//! The only crate that knows all rooms. It puts them together bottom-up and takes them apart
//! top-down; no rule about traffic is decided here.
//!
//! The modules below are in order, top-down: each may use only modules below itself.
#![forbid(unsafe_code)]

pub mod cli;
pub mod assemble;
pub mod api;
pub mod doctor;
pub mod auditlog;
pub mod client;
pub mod wire;
pub mod telemetry;
pub mod host;
pub mod config;
pub mod units;
pub mod input;
pub mod error;
pub mod problem;
