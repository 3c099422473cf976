//! `postern usage`: what sandboxes have used, as a table or as JSON lines. Never sums up
//! what the API has not.

use policy::{SandboxName, TenantName};

use crate::cli::screen::{Screen, bytes, table};
use crate::client::{Client, query};
use crate::error::Error;
use crate::wire::{self, UsageBy, Used};

#[derive(Debug, clap::Args)]
pub(crate) struct Usage {
    /// Of this tenant.
    #[arg(long)]
    tenant: Option<TenantName>,
    /// Of sandboxes of this name, there or not.
    #[arg(long)]
    sandbox: Option<SandboxName>,
    /// From this hour on: RFC 3339, or how long ago as in 30d. A day ago if not given.
    #[arg(long, value_name = "TIME")]
    since: Option<String>,
    /// Until the end of this hour: RFC 3339, or how long ago. Now if not given.
    #[arg(long, value_name = "TIME")]
    until: Option<String>,
    /// What there is a row for.
    #[arg(long, value_enum, default_value = "sandbox")]
    by: UsageBy,
    /// Tell bytes by destination, too.
    #[arg(long)]
    destinations: bool,
}

impl Usage {
    pub(crate) async fn run(self, client: &Client, screen: &Screen) -> Result<(), Error> {
        let by = serde_json::to_value(self.by).ok();
        let pairs = [
            ("tenant", &self.tenant.map(|tenant| tenant.to_string())),
            ("sandbox", &self.sandbox.map(|sandbox| sandbox.to_string())),
            ("from", &self.since),
            ("to", &self.until),
            ("by", &by.and_then(|by| by.as_str().map(str::to_owned))),
            ("destinations", &self.destinations.then(|| "true".to_owned())),
        ];
        let usage: wire::Usage = client.get(&format!("/v1/usage?{}", query(&pairs))).await?;
        if screen.is_json() {
            return usage.rows.iter().try_for_each(|row| screen.value(row));
        }
        let header = [
            "HOUR", "TENANT", "SANDBOX", "RUNNING", "STANDBY", "VCPU", "CPU", "MEAN", "PEAK",
            "SAVED", "OUT", "IN",
        ];
        // Only of rows by hour is it told.
        let hourly = self.by == UsageBy::Hour;
        let skip = usize::from(!hourly);
        let rows = usage.rows.iter().map(|row| told(row).into_iter().skip(skip));
        screen.line(table(header.get(skip..).unwrap_or_default(), rows))?;
        for row in usage.rows.iter().filter(|row| !row.destinations.is_empty()) {
            let whose = [row.hour.as_deref(), row.sandbox.as_deref().or(Some(&row.tenant))];
            let whose = whose.into_iter().flatten().collect::<Vec<_>>().join(" ");
            let places = row.destinations.iter().map(|one| {
                let to = one.to.clone().unwrap_or_else(|| "(others)".to_owned());
                [to, bytes(one.bytes_out), bytes(one.bytes_in)]
            });
            screen.line(format!("\n{whose}\n{}", table(&["TO", "OUT", "IN"], places)))?;
        }
        Ok(())
    }
}

fn told(row: &Used) -> Vec<String> {
    let mib = |mib: u64| bytes(mib << 20);
    vec![
        row.hour.clone().unwrap_or_default(),
        row.tenant.clone(),
        row.sandbox.clone().unwrap_or_else(|| "(all)".to_owned()),
        span(row.running_seconds),
        span(row.standby_seconds + row.suspended_seconds),
        span(row.vcpu_seconds),
        span(row.cpu_seconds),
        mib(row.resident_mean_mib),
        mib(row.resident_peak_mib),
        // As storage is sold: MiB for an hour.
        format!("{:.1} MiB h", row.saved_mib_seconds / 3600.0),
        bytes(row.bytes_out),
        bytes(row.bytes_in),
    ]
}

/// Seconds for a person.
fn span(seconds: f64) -> String {
    match seconds {
        short if short < 60.0 => format!("{short:.1} s"),
        some if some < 3600.0 => format!("{:.1} min", some / 60.0),
        long => format!("{:.1} h", long / 3600.0),
    }
}
