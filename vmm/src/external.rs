//! A machine that somebody else runs: we own the tap and the fence, they get two hooks.
//!
//! Hooks come from the operator's configuration only, never from a request. No shell: a hook is a
//! program and its arguments, run with a small environment and a bound on its time.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use policy::net::{AGENT_PORT, GATEWAY_IP, GUEST_IP, GUEST_MAC, GUEST_PREFIX};
use tokio::process::Command;
use tokio::time::timeout;

use crate::error::{Error, said};
use crate::hypervisor::{DriverName, Hypervisor, Machine, Process};

/// What the operator wants run, program and arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hooks {
    /// Run when the tap is ready and may be opened; empty for none.
    pub on_create: Vec<String>,
    /// Run when the machine must let go of the tap; empty for none.
    pub on_remove: Vec<String>,
    /// How long a hook may take.
    pub limit: Duration,
}

impl Default for Hooks {
    /// None, and 10 seconds for one that is added.
    fn default() -> Self {
        Self { on_create: Vec::new(), on_remove: Vec::new(), limit: Duration::from_secs(10) }
    }
}

/// The driver for other hypervisors and orchestrators.
#[derive(Clone, Debug)]
pub struct External {
    /// The network namespace the taps are in.
    pub netns: String,
    /// The operator's hooks.
    pub hooks: Hooks,
}

impl Hypervisor for External {
    /// Closes `tap`, so that the other hypervisor can open it, and runs `on_create`.
    async fn start(&self, machine: &Machine, tap: OwnedFd) -> Result<Process, Error> {
        drop(tap);
        let process = Process::new(DriverName::External, machine, None);
        self.run(&self.hooks.on_create, &process).await?;
        Ok(process)
    }

    async fn adopt(&self, process: &Process) -> bool {
        self.is_running(process)
    }

    /// Always: only its owner knows better.
    fn is_running(&self, process: &Process) -> bool {
        process.driver == DriverName::External
    }

    async fn stop(&self, process: &Process) -> Result<(), Error> {
        self.run(&self.hooks.on_remove, process).await
    }
}

impl External {
    async fn run(&self, hook: &[String], process: &Process) -> Result<(), Error> {
        let Some((program, arguments)) = hook.split_first() else { return Ok(()) };
        let [a, b, c, d, e, f] = GUEST_MAC;
        let child = Command::new(program)
            .args(arguments)
            .env_clear()
            .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
            .env("POSTERN_SANDBOX", process.name.as_str())
            .env("POSTERN_TENANT", process.tenant.as_str())
            .env("POSTERN_TAP", process.slot.tap())
            .env("POSTERN_NETNS", &self.netns)
            .env("POSTERN_RUN_DIR", &process.run_dir)
            .env("POSTERN_GUEST_IP", GUEST_IP.to_string())
            .env("POSTERN_GUEST_PREFIX", GUEST_PREFIX.to_string())
            .env("POSTERN_GUEST_MAC", format!("{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}"))
            .env("POSTERN_GATEWAY_IP", GATEWAY_IP.to_string())
            .env("POSTERN_AGENT_PORT", AGENT_PORT.to_string())
            .current_dir(Path::new("/"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(|source| Error::Program { program: program.clone(), source })?;
        let output = timeout(self.hooks.limit, child.wait_with_output())
            .await
            .map_err(|_elapsed| Error::Slow { program: program.clone(), limit: self.hooks.limit })?
            .map_err(|source| Error::Program { program: program.clone(), source })?;
        if output.status.success() {
            return Ok(());
        }
        Err(Error::Failed {
            program: program.clone(),
            said: said(Some(output.status), &output.stderr),
        })
    }
}
