//! The shapes of snapshots, and of sandboxes that are made of them, as they are sent and answered. Never says
//! where the store has one.

use policy::{SandboxName, SnapshotName, TenantName};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;

use crate::units::Span;
use crate::wire::{ColdBoot, OnIdle};

/// A snapshot to take.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TakeSnapshot {
    /// Its name, unique on the node: 1 to 40 of `a-z0-9-`.
    #[schema(value_type = String, example = "before-lunch")]
    pub name: SnapshotName,
}

/// A snapshot: what a sandbox was at one moment.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Snapshot {
    /// Its name.
    #[schema(value_type = String)]
    pub name: SnapshotName,
    /// Whose it is.
    #[schema(value_type = String)]
    pub tenant: TenantName,
    /// The sandbox that it was taken of, there or not.
    #[schema(value_type = String)]
    pub sandbox: SandboxName,
    /// Which incarnation of it that was.
    pub incarnation: u64,
    /// Guest memory in MiB.
    pub memory_mib: u32,
    /// Virtual CPUs.
    pub vcpus: u8,
    /// Bytes that it has in the object store, packed: what counts for `tenants.snapshots`.
    pub bytes: u64,
    /// When it was taken, RFC 3339 in UTC.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub created: Option<String>,
}

/// All snapshots that the caller may see.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Snapshots {
    /// By name.
    pub snapshots: Vec<Snapshot>,
}

/// A moment to go back to.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RollBack {
    /// The snapshot.
    #[schema(value_type = String, example = "before-lunch")]
    pub snapshot: SnapshotName,
}

/// A sandbox to make of a snapshot.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MakeClone {
    /// Its name, unique on the node: 1 to 40 of `a-z0-9-`.
    #[schema(value_type = String, example = "demo-2")]
    pub name: SandboxName,
    /// Its own layer of policy, as JSON; none: an empty one, which denies everything. Nothing of its parent's
    /// comes along.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(value_type = Option<Object>)]
    pub policy: Option<Box<RawValue>>,
    /// What becomes of it when it is idle; none: as configured.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub on_idle: Option<OnIdle>,
    /// How long nothing may go on before it is idle, e.g. `15s`; none: as configured.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(value_type = Option<String>, example = "15s")]
    pub idle_after: Option<Span>,
    /// It is removed so long after it was made or renewed; none: as configured.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(value_type = Option<String>, example = "2h")]
    pub ttl: Option<Span>,
    /// It is removed so long after it was made, renewed or not; none: as configured.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(value_type = Option<String>, example = "7d")]
    pub max_life: Option<Span>,
    /// What becomes of it when its memory is lost, or the snapshot's is of no use to it; none: as configured.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub cold_boot: Option<ColdBoot>,
}
