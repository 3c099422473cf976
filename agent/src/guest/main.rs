//! `postern-guest`: the first process of a guest and the agent the host talks to.
//!
//! One static program, three parts: as process 1 it boots the guest and reaps; `serve` is the agent,
//! started by process 1; called `poweroff` it asks process 1 to end. Interprets no shell.
#![deny(unsafe_code)]

use std::env;
use std::path::Path;
use std::process::ExitCode;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

mod init;
mod boot;
mod network;
mod serve;
mod session;
mod spawn;
mod entropy;
mod cmdline;

fn main() -> ExitCode {
    let mut args = env::args_os();
    let called = args.next().unwrap_or_default();
    let called = Path::new(&called).file_name().and_then(|name| name.to_str()).unwrap_or("");
    if std::process::id() == 1 {
        return init::run();
    }
    let outcome = match (called, args.next()) {
        ("poweroff" | "halt" | "reboot" | "shutdown", _) => {
            kill(Pid::from_raw(1), Signal::SIGTERM).map_err(std::io::Error::from)
        }
        (_, Some(part)) if part == "serve" => serve::run(),
        _ => Err(std::io::Error::other("this program is a guest's process 1")),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("postern-guest: {error}");
            ExitCode::FAILURE
        }
    }
}
