//! `postern standby`, `suspend`, `resume`, `keep-awake` and `renew`.

use policy::SandboxName;
use serde::Serialize;
use serde_json::json;

use crate::cli::screen::Screen;
use crate::client::Client;
use crate::error::Error;
use crate::units::{Moment, Span};
use crate::wire::{self, Sandbox};

#[derive(Debug, clap::Args)]
pub(crate) struct Standby {
    /// The sandbox.
    name: SandboxName,
    /// Wake it at this time, e.g. 2026-12-01T07:00:00Z, unless somebody does before.
    #[arg(long, value_name = "TIME", conflicts_with = "wake_in")]
    wake_at: Option<Moment>,
    /// The same, so long from now, e.g. 8h.
    #[arg(long, value_name = "SPAN")]
    wake_in: Option<Span>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Suspend {
    /// The sandbox.
    name: SandboxName,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Resume {
    /// The sandbox.
    name: SandboxName,
    /// Also if it has failed: it boots from its disk then.
    #[arg(long)]
    cold: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct KeepAwake {
    /// The sandbox.
    name: SandboxName,
    /// For so long from now, at most 24h.
    #[arg(long = "for", value_name = "SPAN", default_value = "10m")]
    span: Span,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Renew {
    /// The sandbox.
    name: SandboxName,
    /// So long from now, and at every renewal without it; none: as long as it was given.
    #[arg(long, value_name = "SPAN")]
    ttl: Option<Span>,
}

impl Standby {
    pub(crate) async fn run(self, client: &Client, screen: &Screen) -> Result<(), Error> {
        let wanted = wire::Standby { wake_at: self.wake_at, wake_in: self.wake_in };
        let asleep = ask(client, &self.name, "standby", &wanted).await?;
        screen.either(&asleep, |asleep| match &asleep.wake_at {
            Some(at) => format!("{} is on {} until {at}", asleep.name, asleep.state),
            None => format!("{} is on {}", asleep.name, asleep.state),
        })
    }
}

impl Suspend {
    pub(crate) async fn run(self, client: &Client, screen: &Screen) -> Result<(), Error> {
        let asleep = ask(client, &self.name, "suspend", &json!({})).await?;
        screen.either(&asleep, |asleep| format!("{} is {}", asleep.name, asleep.state))
    }
}

impl Resume {
    pub(crate) async fn run(self, client: &Client, screen: &Screen) -> Result<(), Error> {
        let how = wire::Resume { cold: self.cold };
        let woken = ask(client, &self.name, "resume", &how).await?;
        screen.either(&woken, |woken| format!("{} is {}", woken.name, woken.state))
    }
}

impl KeepAwake {
    pub(crate) async fn run(self, client: &Client, screen: &Screen) -> Result<(), Error> {
        let lease = wire::KeepAwake { span: self.span };
        let kept = ask(client, &self.name, "keep-awake", &lease).await?;
        screen.either(&kept, |kept| format!("{} is kept awake for {}", kept.name, self.span))
    }
}

impl Renew {
    pub(crate) async fn run(self, client: &Client, screen: &Screen) -> Result<(), Error> {
        let renewed = ask(client, &self.name, "renew", &wire::Renew { ttl: self.ttl }).await?;
        screen.either(&renewed, |renewed| match renewed.expires_in {
            Some(seconds) => format!("{} is removed in {seconds} s", renewed.name),
            None => format!("{} is not removed by itself", renewed.name),
        })
    }
}

async fn ask(
    client: &Client,
    name: &SandboxName,
    verb: &str,
    body: &impl Serialize,
) -> Result<Sandbox, Error> {
    client.post(&format!("/v1/sandboxes/{name}/{verb}"), body).await
}
