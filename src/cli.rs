//! The command line: arguments to one call of the daemon, its answer to a table or JSON.
//!
//! Exit codes: 0 done, 1 failed, 2 the command line or an input is not valid, 3 not found,
//! 4 refused; `exec` passes the command's own code on. JSON goes to standard output, everything
//! about it to standard error.

mod snapshots;
mod create;
mod exec;
mod rest;
mod connect;
mod tap;
mod inspect;
mod policy;
mod events;
mod usage;
mod node;
mod screen;

use std::future::Future;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::assemble;
use crate::cli::screen::Screen;
use crate::client::{Client, Endpoint};
use crate::config::{Config, DEFAULT_SOCKET};
use crate::error::Error;
use crate::telemetry;

const EXIT_CODES: &str = "\
Exit codes: 0 done, 1 failed, 2 the command line or an input is not valid, 3 not found,
4 refused or denied. `exec` passes the exit code of the command on (128 + n for signal n).";

/// Keeps the options of every command apart from those of the one whose help is read.
const EVERYWHERE: &str = "Options of every command";

/// What a microVM may reach, under which name, from which address.
#[derive(Debug, Parser)]
#[command(name = "postern", version, after_help = EXIT_CODES, max_term_width = 100)]
struct Arguments {
    #[command(flatten)]
    daemon: Daemon,
    #[command(subcommand)]
    command: Command,
}

/// Where the daemon is, and how to show what it says.
#[derive(Debug, clap::Args)]
struct Daemon {
    /// Print JSON instead of tables and sentences.
    #[arg(long, global = true, help_heading = EVERYWHERE)]
    json: bool,
    /// Unix socket of the daemon.
    #[arg(
        long,
        global = true,
        help_heading = EVERYWHERE,
        env = "POSTERN_SOCKET",
        value_name = "PATH",
        default_value = DEFAULT_SOCKET
    )]
    socket: PathBuf,
    /// Daemon elsewhere, as http://host:port; goes before --socket.
    #[arg(long, global = true, help_heading = EVERYWHERE, env = "POSTERN_URL", value_name = "URL")]
    url: Option<Endpoint>,
    /// Bearer token for --url. Prefer the environment: arguments are visible to others.
    #[arg(
        long,
        global = true,
        help_heading = EVERYWHERE,
        env = "POSTERN_TOKEN",
        value_name = "TOKEN",
        hide_env_values = true
    )]
    token: Option<String>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the daemon.
    Serve(node::Local),
    #[command(flatten)]
    Errand(Box<Errand>),
}

/// What is done and over, mostly by asking the daemon.
#[derive(Debug, Subcommand)]
enum Errand {
    /// Make a sandbox and wait until its guest answers.
    Create(create::Create),
    /// List sandboxes.
    Ls(inspect::List),
    /// Show one sandbox.
    Show(inspect::Show),
    /// Remove sandboxes and wait until nothing of them is left.
    Rm(inspect::Remove),
    /// Run a command in a sandbox, with its input and output here.
    Exec(exec::Exec),
    /// Put a sandbox to sleep; whoever wants something of it wakes it.
    Standby(rest::Standby),
    /// Put a sandbox to sleep and into the object store.
    Suspend(rest::Suspend),
    /// Wake a sandbox.
    Resume(rest::Resume),
    /// Take a snapshot of a sandbox, or remove snapshots.
    Snapshot(snapshots::Take),
    /// List snapshots.
    Snapshots(snapshots::List),
    /// Make a sandbox that goes on from a snapshot.
    Clone(snapshots::Clone),
    /// Take a sandbox back to a snapshot.
    Rollback(snapshots::RollBack),
    /// Keep a sandbox awake for a time.
    KeepAwake(rest::KeepAwake),
    /// Let a sandbox live on.
    Renew(rest::Renew),
    /// Connect standard input and output to a port of a guest.
    Connect(connect::Connect),
    /// Hand the tap of an external sandbox to a program, as an open descriptor.
    Tap(tap::Tap),
    /// Read, change and explain what a sandbox may reach.
    #[command(subcommand)]
    Policy(policy::Policy),
    /// Show what was decided, and go on showing it.
    Events(events::Events),
    /// Show what sandboxes have used: time, processors, memory, bytes.
    Usage(usage::Usage),
    /// Check whether this machine can serve.
    Doctor(node::Local),
    /// Print the OpenAPI description of the control API.
    Openapi,
    /// Print a completion script for a shell.
    Completions(node::Completions),
    /// Print the version.
    Version,
}

/// Runs the program.
#[must_use]
pub fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let screen = Screen::new(arguments.daemon.json);
    let ended = match arguments.command {
        Command::Serve(local) => serve(&local),
        Command::Errand(errand) => {
            let client = arguments.daemon.client();
            block_on(false, errand.run(&client, &screen))
        }
    };
    match ended {
        Ok(code) => ExitCode::from(code),
        Err(Error::Terminal { source, .. }) if source.kind() == std::io::ErrorKind::BrokenPipe => {
            ExitCode::SUCCESS
        }
        Err(error) => {
            screen.error(&error);
            ExitCode::from(error.exit_code())
        }
    }
}

impl Errand {
    async fn run(self, client: &Client, screen: &Screen) -> Result<u8, Error> {
        match self {
            Self::Create(create) => create.run(client, screen).await?,
            Self::Ls(list) => list.run(client, screen).await?,
            Self::Show(show) => show.run(client, screen).await?,
            Self::Rm(remove) => remove.run(client, screen).await?,
            Self::Exec(exec) => return exec.run(client).await,
            Self::Standby(standby) => standby.run(client, screen).await?,
            Self::Suspend(suspend) => suspend.run(client, screen).await?,
            Self::Resume(resume) => resume.run(client, screen).await?,
            Self::Snapshot(take) => take.run(client, screen).await?,
            Self::Snapshots(list) => list.run(client, screen).await?,
            Self::Clone(clone) => clone.run(client, screen).await?,
            Self::Rollback(back) => back.run(client, screen).await?,
            Self::KeepAwake(keep) => keep.run(client, screen).await?,
            Self::Renew(renew) => renew.run(client, screen).await?,
            Self::Connect(connect) => connect.run(client).await?,
            Self::Tap(tap) => return tap.run(client).await,
            Self::Policy(policy) => return policy.run(client, screen).await,
            Self::Events(events) => events.run(client, screen).await?,
            Self::Usage(usage) => usage.run(client, screen).await?,
            Self::Doctor(local) => return local.doctor(screen).await,
            Self::Openapi => node::openapi(screen)?,
            Self::Completions(completions) => completions.run(screen)?,
            Self::Version => node::version(screen)?,
        }
        Ok(0)
    }
}

fn serve(local: &node::Local) -> Result<u8, Error> {
    let config = Config::load(local.config.as_deref())?;
    telemetry::start(&config.log)?;
    block_on(true, assemble::serve(config)).map(|()| 0)
}

/// Runs to the end without waiting for a read of standard input that nobody will answer.
fn block_on<T>(every_core: bool, work: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    if !every_core {
        builder.worker_threads(1);
    }
    let runtime = builder.enable_all().build().map_err(Error::Runtime)?;
    let ended = runtime.block_on(work);
    runtime.shutdown_background();
    ended
}

impl Daemon {
    fn client(&self) -> Client {
        let socket = || Endpoint::Socket(self.socket.clone());
        Client::new(self.url.clone().unwrap_or_else(socket), self.token.clone())
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parsed(line: &str) -> Result<Arguments, clap::Error> {
        Arguments::try_parse_from(line.split_whitespace())
    }

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn documented_lines_are_understood() {
        for line in [
            "postern serve --config /etc/postern/postern.toml",
            "postern create demo",
            "postern create demo --allow api.github.com --allow *.x.org --memory 512M",
            "postern create demo --policy p.toml --tenant acme --driver external --json",
            "postern ls --json",
            "postern show demo",
            "postern rm demo other",
            "postern rm --force demo",
            "postern exec demo -- curl -sS https://api.github.com/",
            "postern exec demo --env A=b --cwd /tmp --user nobody -- id -u",
            "postern create demo --on-idle never --ttl 2h --max-life 7d",
            "postern create demo --idle-after 1m --on-idle delete",
            "postern standby demo",
            "postern standby demo --wake-at 2026-12-01T07:00:00Z",
            "postern standby demo --wake-in 8h --json",
            "postern suspend demo",
            "postern resume demo --json",
            "postern snapshot demo before-lunch",
            "postern snapshot rm before-lunch other",
            "postern snapshot -- rm before-lunch",
            "postern snapshots",
            "postern snapshots demo --json",
            "postern clone before-lunch demo-2 --allow api.github.com --ttl 2h",
            "postern clone before-lunch demo-2 --policy p.toml --json",
            "postern rollback demo before-lunch",
            "postern keep-awake demo --for 10m",
            "postern renew demo",
            "postern renew demo --ttl 2h",
            "postern connect demo 5432",
            "postern tap demo --fd 5 -- cloud-hypervisor --net fd=5",
            "postern policy get demo",
            "postern policy get tenant/acme --json",
            "postern policy set platform policy.toml",
            "postern policy set demo - --if-revision 3",
            "postern policy allow demo api.github.com *.x.org --port 443",
            "postern policy allow demo 203.0.113.0/24 --port 3000-3010 --protocol udp",
            "postern policy deny demo gist.github.com",
            "postern create demo --allow api.github.com --mode observe",
            "postern policy mode demo enforce --if-revision 3",
            "postern policy mode tenant/acme observe",
            "postern policy explain demo https://api.github.com/ --method GET --path /x",
            "postern events --follow --sandbox demo --code no-rule",
            "postern events --since 10m --egress 198.51.100.10:40222",
            "postern usage --since 30d --by tenant",
            "postern usage --sandbox demo --destinations --until 2026-01-31T12:00:00Z --json",
            "postern doctor --json",
            "postern openapi",
            "postern completions bash",
            "postern version",
            "postern --url http://10.0.0.1:7070 --token x ls",
        ] {
            if let Err(error) = parsed(line) {
                panic!("{line}: {error}");
            }
        }
    }

    #[test]
    fn a_bad_line_is_refused_with_what_is_wrong() {
        for (line, said) in [
            ("postern create Demo", "use 1 to 40"),
            ("postern create demo --memory much", "256M"),
            ("postern create demo --policy p --allow a.example", "cannot be used with"),
            ("postern exec demo", "COMMAND"),
            ("postern exec demo --env AB -- x", "NAME=VALUE"),
            ("postern policy get tenant/A_b", "tenant/NAME"),
            ("postern policy allow demo", "HOST"),
            ("postern policy allow demo a.example --port 0x1", "port"),
            ("postern --url https://x ls", "http://host:port"),
            ("postern keep-awake demo --for long", "span of time"),
            ("postern snapshot demo", "SNAPSHOT"),
            ("postern snapshot rm", "SNAPSHOT"),
            ("postern snapshot demo A_b", "use 1 to 40"),
            ("postern connect demo 0", "1..=65535"),
            ("postern standby demo --wake-at 07:00", "RFC 3339"),
            ("postern standby demo --wake-in 8h --wake-at 2026-12-01T07:00:00Z", "cannot be used"),
            ("postern frobnicate", "unrecognized"),
        ] {
            let error = parsed(line).expect_err(line).to_string();
            assert!(error.contains(said), "{line}: {error}");
        }
    }

    #[test]
    fn completions_are_made_for_every_shell() {
        use clap::ValueEnum;
        for shell in clap_complete::Shell::value_variants() {
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut Arguments::command(), "postern", &mut script);
            let script = String::from_utf8(script).expect("text");
            assert!(script.contains("explain"), "{shell}");
        }
    }
}
