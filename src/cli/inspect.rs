//! `postern ls`, `show` and `rm`.

use http::{HeaderMap, Method};
use policy::{SandboxName, TenantName};

use crate::cli::screen::{Screen, bytes, fields, table};
use crate::client::{Client, Content};
use crate::error::Error;
use crate::wire::{Awake, Forced, Mode, OnIdle, Sandbox, Sandboxes};

#[derive(Debug, clap::Args)]
pub(crate) struct List {
    /// Only those of this tenant.
    #[arg(long)]
    tenant: Option<TenantName>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Show {
    /// The sandbox.
    name: SandboxName,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Remove {
    /// The sandboxes.
    #[arg(required = true, value_name = "NAME")]
    names: Vec<SandboxName>,
    /// Also where what runs it does not end: that may be left, and its slot is nobody's then.
    #[arg(long)]
    force: bool,
}

impl List {
    pub(crate) async fn run(self, client: &Client, screen: &Screen) -> Result<(), Error> {
        let mut found: Sandboxes = client.get("/v1/sandboxes").await?;
        if let Some(tenant) = &self.tenant {
            found.sandboxes.retain(|sandbox| sandbox.tenant == *tenant);
        }
        screen.either(&found, |found| {
            let header = [
                "NAME", "TENANT", "STATE", "MODE", "DRIVER", "TAP", "FLOWS", "OUT", "IN", "CREATED",
            ];
            table(&header, found.sandboxes.iter().map(|sandbox| row(sandbox, screen)))
        })
    }
}

fn row(sandbox: &Sandbox, screen: &Screen) -> Vec<String> {
    vec![
        sandbox.name.to_string(),
        sandbox.tenant.to_string(),
        state(sandbox, screen),
        mode(sandbox, screen),
        driver(sandbox),
        sandbox.tap.clone().unwrap_or_default(),
        sandbox.traffic.open_flows.to_string(),
        bytes(sandbox.traffic.bytes_out),
        bytes(sandbox.traffic.bytes_in),
        sandbox.created.clone().unwrap_or_default(),
    ]
}

fn state(sandbox: &Sandbox, screen: &Screen) -> String {
    match sandbox.state.as_str() {
        "running" => screen.good("running"),
        "standby" | "suspended" => sandbox.state.clone(),
        "failed" => screen.bad("failed"),
        other => screen.doubtful(other),
    }
}

/// Loud where nothing of the sandbox's own is refused.
fn mode(sandbox: &Sandbox, screen: &Screen) -> String {
    match sandbox.mode {
        Mode::Enforce => "enforce".to_owned(),
        Mode::Observe => screen.bad("OBSERVE"),
    }
}

fn driver(sandbox: &Sandbox) -> String {
    let name = serde_json::to_value(sandbox.driver).ok();
    name.and_then(|name| name.as_str().map(str::to_owned)).unwrap_or_default()
}

impl Show {
    pub(crate) async fn run(self, client: &Client, screen: &Screen) -> Result<(), Error> {
        let found: Sandbox = client.get(&format!("/v1/sandboxes/{}", self.name)).await?;
        screen.either(&found, |found| {
            let egress: Vec<String> = found.egress.iter().map(ToString::to_string).collect();
            let mut pairs = vec![
                ("name", found.name.to_string()),
                ("tenant", found.tenant.to_string()),
                ("state", state(found, screen)),
                ("driver", driver(found)),
                ("memory", format!("{} MiB", found.memory_mib)),
                ("vcpus", found.vcpus.to_string()),
                ("guest address", found.guest_ip.to_string()),
                ("egress", egress.join(", ")),
                ("policy revision", found.revision.to_string()),
                ("policy mode", told_mode(found, screen)),
                ("incarnation", found.incarnation.to_string()),
                ("created", found.created.clone().unwrap_or_default()),
                ("open flows", found.traffic.open_flows.to_string()),
                ("bytes out", bytes(found.traffic.bytes_out)),
                ("bytes in", bytes(found.traffic.bytes_in)),
            ];
            if let (Some(tap), Some(netns)) = (&found.tap, &found.netns) {
                pairs.insert(6, ("tap", format!("{tap} in {netns}")));
            }
            if let Some(reason) = &found.reason {
                pairs.insert(3, ("reason", reason.clone()));
            }
            if let Some(scope) = &found.closed_by {
                let told =
                    format!("the policy of {scope} cannot be read: `postern policy set` it anew");
                pairs.insert(3, ("closed", screen.bad(&told)));
            }
            pairs.push(("when idle", told_idle(found)));
            if let Some(why) = &found.awake {
                pairs.push(("awake", told_awake(why, found.idle_in)));
            }
            if found.awake_by.len() > 1 {
                pairs.push(("kept awake by", told_holds(&found.awake_by)));
            }
            if let Some(seconds) = found.wakes_in {
                pairs.push(("wakes", told_wake(found, seconds)));
            }
            if found.wakes > 0 {
                pairs.push(("woken", format!("{} times since the daemon began", found.wakes)));
            }
            if found.cold_boots > 0 || found.cold_reason.is_some() {
                pairs.push(("booted cold", told_cold(found)));
            }
            if let Some(seconds) = found.expires_in {
                pairs.push(("removed", format!("in {}", told_span(seconds))));
            }
            if let Some(pid) = found.pid {
                pairs.push(("process", pid.to_string()));
            }
            fields(&pairs)
        })
    }
}

fn told_mode(sandbox: &Sandbox, screen: &Screen) -> String {
    let mode = mode(sandbox, screen);
    match sandbox.mode {
        Mode::Enforce => mode,
        Mode::Observe => format!("{mode}: what its policy refuses passes and is only recorded"),
    }
}

fn told_idle(sandbox: &Sandbox) -> String {
    let after = sandbox.idle_after.map(|span| format!(" after {span}")).unwrap_or_default();
    match sandbox.on_idle {
        OnIdle::Standby => format!("it sleeps{after}"),
        OnIdle::Suspend => format!("it sleeps{after}, in the store"),
        OnIdle::Delete => format!("it is removed{after}"),
        OnIdle::Never => "nothing".to_owned(),
    }
}

/// With a state that sleeps on, the reason is that of the next one.
fn told_cold(sandbox: &Sandbox) -> String {
    let times = format!("{} times", sandbox.cold_boots);
    match &sandbox.cold_reason {
        Some(why) => format!("{times}, from its disk alone; last or next because: {why}"),
        None => times,
    }
}

fn told_awake(why: &str, idle_in: Option<u64>) -> String {
    match idle_in {
        Some(seconds) => format!("{why}; idle in {} if nothing goes on", told_span(seconds)),
        None => why.to_owned(),
    }
}

fn told_holds(holds: &[Awake]) -> String {
    let each = holds.iter().map(|Awake { by, seconds }| match seconds {
        Some(seconds) => format!("{by} for {}", told_span(*seconds)),
        None => by.clone(),
    });
    each.collect::<Vec<_>>().join(", ")
}

fn told_wake(sandbox: &Sandbox, seconds: u64) -> String {
    let why = sandbox.wakes_because.as_deref().unwrap_or_default();
    match &sandbox.wake_at {
        Some(at) => format!("in {}: {why} (at {at})", told_span(seconds)),
        None => format!("in {}: {why}", told_span(seconds)),
    }
}

/// The two largest units that a span has.
fn told_span(seconds: u64) -> String {
    let units = [("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)];
    let mut left = seconds;
    let parts = units.map(|(unit, size)| {
        let count = left / size;
        left %= size;
        (count, unit)
    });
    let mut told = parts.iter().skip_while(|(count, _)| *count == 0).take(2);
    let first =
        told.next().map_or_else(|| "0s".to_owned(), |(count, unit)| format!("{count}{unit}"));
    match told.next() {
        Some((count, unit)) if *count > 0 => format!("{first} {count}{unit}"),
        _ => first,
    }
}

impl Remove {
    pub(crate) async fn run(self, client: &Client, screen: &Screen) -> Result<(), Error> {
        for name in &self.names {
            let force = if self.force { "?force=true" } else { "" };
            let path = format!("/v1/sandboxes/{name}{force}");
            let answer =
                client.send(Method::DELETE, &path, HeaderMap::new(), Content::Nothing).await?;
            let left = match self.force {
                true => answer.json::<Forced>().await?.left,
                false => None,
            };
            let mut gone = serde_json::json!({ "removed": name });
            if let (Some(left), Some(told)) = (&left, gone.as_object_mut()) {
                told.insert("left".to_owned(), left.as_str().into());
            }
            screen.either(&gone, |_| match &left {
                Some(left) => format!("{name} is gone, but for {left}"),
                None => format!("{name} is gone"),
            })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_told_in_their_two_largest_units() {
        for (seconds, told) in
            [(0, "0s"), (59, "59s"), (60, "1m"), (61, "1m 1s"), (90_000, "1d 1h"), (86_460, "1d")]
        {
            assert_eq!(told_span(seconds), told);
        }
    }
}
