//! `postern snapshot`, `snapshots`, `clone` and `rollback`. Only asks the API and shows what it answers; never
//! decides what may be made of what.

use http::{HeaderMap, Method};
use policy::{SandboxName, SnapshotName};

use crate::cli::create::{GivenPolicy, GivenTerms};
use crate::cli::screen::{Screen, bytes, noted, table};
use crate::client::{Client, Content, query};
use crate::error::Error;
use crate::wire::{self, MakeClone, Sandbox, Snapshot, Snapshots};

#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct Take {
    /// The sandbox.
    #[arg(required = true, value_name = "NAME")]
    of: Option<SandboxName>,
    /// The name of the snapshot: 1 to 40 of a-z, 0-9 and '-'.
    #[arg(required = true, value_name = "SNAPSHOT")]
    name: Option<SnapshotName>,
    #[command(subcommand)]
    other: Option<Other>,
}

/// What else is done with snapshots.
#[derive(Debug, clap::Subcommand)]
enum Other {
    /// Remove snapshots; what was made of them goes on.
    Rm {
        /// The snapshots.
        #[arg(required = true, value_name = "SNAPSHOT")]
        names: Vec<SnapshotName>,
    },
}

#[derive(Debug, clap::Args)]
pub(crate) struct List {
    /// Only those of this sandbox, there or not.
    of: Option<SandboxName>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Clone {
    /// The snapshot.
    snapshot: SnapshotName,
    /// Name of the new sandbox: 1 to 40 of a-z, 0-9 and '-'.
    name: SandboxName,
    #[command(flatten)]
    policy: GivenPolicy,
    #[command(flatten)]
    terms: GivenTerms,
}

#[derive(Debug, clap::Args)]
pub(crate) struct RollBack {
    /// The sandbox.
    name: SandboxName,
    /// The snapshot.
    snapshot: SnapshotName,
}

impl RollBack {
    pub(crate) async fn run(self, client: &Client, screen: &Screen) -> Result<(), Error> {
        let path = format!("/v1/sandboxes/{}/rollback", self.name);
        let wanted = wire::RollBack { snapshot: self.snapshot };
        let back: Sandbox = client.post(&path, &wanted).await?;
        let to = wanted.snapshot;
        screen.either(&back, |back| format!("{} is {}, as it was at {to}", back.name, back.state))
    }
}

impl Take {
    pub(crate) async fn run(self, client: &Client, screen: &Screen) -> Result<(), Error> {
        if let Some(Other::Rm { names }) = self.other {
            for name in names {
                let (path, nothing) = (format!("/v1/snapshots/{name}"), HeaderMap::new());
                client.send(Method::DELETE, &path, nothing, Content::Nothing).await?;
                let gone = serde_json::json!({ "removed": name });
                screen.either(&gone, |_| format!("snapshot {name} is gone"))?;
            }
            return Ok(());
        }
        // Clap has seen to it that both are there.
        let (Some(of), Some(name)) = (self.of, self.name) else { return Ok(()) };
        let path = format!("/v1/sandboxes/{of}/snapshots");
        let taken: Snapshot = client.post(&path, &wire::TakeSnapshot { name }).await?;
        screen.either(&taken, |taken| {
            format!("snapshot {} of {} has {}", taken.name, taken.sandbox, bytes(taken.bytes))
        })
    }
}

impl List {
    pub(crate) async fn run(self, client: &Client, screen: &Screen) -> Result<(), Error> {
        let of = query(&[("sandbox", &self.of.map(|of| of.to_string()))]);
        let found: Snapshots = client.get(&format!("/v1/snapshots?{of}")).await?;
        screen.either(&found, |found| {
            let header =
                ["NAME", "TENANT", "SANDBOX", "INCARNATION", "MEMORY", "VCPUS", "SIZE", "TAKEN"];
            table(&header, found.snapshots.iter().map(row))
        })
    }
}

fn row(snapshot: &Snapshot) -> Vec<String> {
    vec![
        snapshot.name.to_string(),
        snapshot.tenant.to_string(),
        snapshot.sandbox.to_string(),
        snapshot.incarnation.to_string(),
        format!("{} MiB", snapshot.memory_mib),
        snapshot.vcpus.to_string(),
        bytes(snapshot.bytes),
        snapshot.created.clone().unwrap_or_default(),
    ]
}

impl Clone {
    pub(crate) async fn run(self, client: &Client, screen: &Screen) -> Result<(), Error> {
        let (policy, terms) = (self.policy.read()?, self.terms);
        let wanted = MakeClone {
            name: self.name,
            policy,
            on_idle: terms.on_idle,
            idle_after: terms.idle_after,
            ttl: terms.ttl,
            max_life: terms.max_life,
            cold_boot: terms.cold_boot,
        };
        let path = format!("/v1/snapshots/{}/clone", self.snapshot);
        let made: Sandbox = client.post(&path, &wanted).await?;
        screen.either(&made, |made| noted(format!("{} is {}", made.name, made.state), &made.notes))
    }
}
