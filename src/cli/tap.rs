//! `postern tap`: hands the tap of an `external` sandbox to a program as an open descriptor, for a
//! hypervisor that does not enter the guests' namespace itself. Must run on the daemon's machine, as
//! root; everything else about the program stays as it is here.

use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use command_fds::{CommandFdExt, FdMapping};
use nix::sched::{CloneFlags, setns};
use policy::{SandboxName, Slot};

use crate::client::Client;
use crate::error::Error;
use crate::problem::{Kind, Problem};
use crate::wire::{Driver, Sandbox};

#[derive(Debug, clap::Args)]
pub(crate) struct Tap {
    /// The sandbox, of driver `external`.
    name: SandboxName,
    /// The number the descriptor gets in the program.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(i32).range(3..1024))]
    fd: i32,
    /// The program and its arguments, e.g. `qemu-system-x86_64 -netdev tap,id=n,fd=3 ...`. The tap
    /// has virtio-net headers of 12 bytes.
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    program: Vec<String>,
}

impl Tap {
    /// Becomes the program; returns only when that fails.
    pub(crate) async fn run(self, client: &Client) -> Result<u8, Error> {
        let found: Sandbox = client.get(&format!("/v1/sandboxes/{}", self.name)).await?;
        if found.driver != Driver::External {
            let problem = Problem::invalid("name", self.name.as_str(), "has a microVM of its own");
            return Err(problem.fix("name a sandbox created with `--driver external`").into());
        }
        let tap = open(&found)?;
        let mut words = self.program.into_iter();
        let program = words.next().unwrap_or_default();
        let mut command = Command::new(&program);
        command.args(words);
        let mapping = FdMapping { parent_fd: tap, child_fd: self.fd };
        let failed = match command.fd_mappings(vec![mapping]) {
            Ok(command) => command.exec(),
            Err(collision) => std::io::Error::other(collision.to_string()),
        };
        Err(Error::Prepare { doing: "starting", path: program.into(), source: failed })
    }
}

/// Opens the tap on a thread in the guests' namespace; this one stays where it is.
fn open(sandbox: &Sandbox) -> Result<OwnedFd, Error> {
    let Some((netns, number)) = sandbox.netns.as_ref().zip(sandbox.slot) else {
        let problem = Problem::new(Kind::Forbidden, "its tap is the operator's to open");
        return Err(problem.fix("ask over the unix socket of the daemon's machine").into());
    };
    let path = Path::new("/run/netns").join(netns);
    let failed = |doing, source| Error::Prepare { doing, path: path.clone(), source };
    let slot = Slot::new(number).ok_or_else(|| Error::Answer("no such slot".to_owned()))?;
    let netns = std::fs::File::open(&path).map_err(|source| failed("opening", source))?;
    let entered = std::thread::spawn(move || {
        setns(&netns, CloneFlags::CLONE_NEWNET).map_err(std::io::Error::from)?;
        vmm::tap::attach(slot).map_err(std::io::Error::other)
    });
    let opened = entered.join().unwrap_or_else(|_| Err(std::io::Error::other("panicked")));
    opened.map_err(|source| failed("opening a tap in", source))
}
