//! What sandboxes have used, as it is answered. A bill can be made from it: every number is a sum over whole
//! hours, but those that are said to be something else.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What there is a row for.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, clap::ValueEnum,
)]
#[serde(rename_all = "kebab-case")]
pub enum UsageBy {
    /// Each sandbox.
    #[default]
    Sandbox,
    /// Each tenant.
    Tenant,
    /// Each sandbox and hour.
    Hour,
}

/// What was used over a span of time.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Usage {
    /// Its beginning, RFC 3339 in UTC: a whole hour.
    pub from: String,
    /// Its end, likewise; what is in the future is not used yet.
    pub to: String,
    /// By hour, tenant and sandbox.
    pub rows: Vec<Used>,
}

/// What one sandbox, or all of a tenant, have used. Times are in seconds, to the millisecond.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Used {
    /// The hour, by its beginning, where it is of one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub hour: Option<String>,
    /// Whose.
    pub tenant: String,
    /// The sandbox, there or not; none: several, of which the parts are not known any more or were not
    /// asked for.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub sandbox: Option<String>,
    /// Running, falling asleep and waking.
    pub running_seconds: f64,
    /// Asleep on the node.
    pub standby_seconds: f64,
    /// Asleep elsewhere.
    pub suspended_seconds: f64,
    /// Being made or removed, or failed.
    pub other_seconds: f64,
    /// Virtual CPUs that it was given, while it ran.
    pub vcpu_seconds: f64,
    /// Processors of the node that its process has had; 0 where that is not the daemon's.
    pub cpu_seconds: f64,
    /// MiB of memory that it was given, while it ran.
    pub memory_mib_seconds: f64,
    /// MiB of memory that its process held, while it ran.
    pub resident_mib_seconds: f64,
    /// The same, on average while it ran. No sum.
    pub resident_mean_mib: u64,
    /// The most of it, as seen once a second. No sum.
    pub resident_peak_mib: u64,
    /// MiB of files that were kept of it while it slept.
    pub saved_mib_seconds: f64,
    /// Payload bytes out.
    pub bytes_out: u64,
    /// Payload bytes in.
    pub bytes_in: u64,
    /// The same by destination, the most first, where that was asked for.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub destinations: Vec<Carried>,
}

/// Bytes to and from one destination.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Carried {
    /// The name that a rule let it through to, or its address; none: all that are not told apart.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(example = "api.github.com")]
    pub to: Option<String>,
    /// Payload bytes to it.
    pub bytes_out: u64,
    /// Payload bytes from it.
    pub bytes_in: u64,
}
