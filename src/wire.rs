//! The shapes of the control API: what is sent and what is answered, under `/v1`.
//!
//! A field once published keeps its name and meaning; new ones may be added to answers.

mod snapshots;
mod usage;

use std::net::IpAddr;

use policy::{Revision, SandboxName, TenantName};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;
use utoipa::ToSchema;

use crate::problem::Problem;
use crate::units::{Moment, Size, Span};

pub use crate::wire::snapshots::{MakeClone, RollBack, Snapshot, Snapshots, TakeSnapshot};
pub use crate::wire::usage::{Carried, Usage, UsageBy, Used};

/// The tenant of who names none.
pub const DEFAULT_TENANT: &str = "default";
/// The largest body that is read, in bytes.
pub const BODY_LIMIT: usize = 1 << 20;
/// The protocol of an upgraded `exec`: frames of the guest's agent, both ways.
pub const EXEC_PROTOCOL: &str = "postern-exec";
/// The protocol of an upgraded `connect`: bytes to and from the port, both ways.
pub const CONNECT_PROTOCOL: &str = "postern-connect";
/// The content type of a stream of JSON values, one a line.
pub const JSON_LINES: &str = "application/jsonl";
/// The content type of a policy as TOML.
pub const TOML: &str = "application/toml";

/// Which hypervisor runs a sandbox.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, clap::ValueEnum,
)]
#[serde(rename_all = "kebab-case")]
pub enum Driver {
    /// A QEMU process of the daemon's.
    #[default]
    Qemu,
    /// Somebody else's: the daemon gives it a tap and calls the operator's hooks.
    External,
}

/// What becomes of a sandbox that is idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum OnIdle {
    /// It is put to sleep, and woken by whoever wants something of it.
    Standby,
    /// The same, and it is put into the object store then.
    Suspend,
    /// It is removed.
    Delete,
    /// Nothing.
    Never,
}

/// What becomes of a sandbox whose memory is lost, or whose saved state is of no use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum ColdBoot {
    /// It boots from its disk when somebody wants something of it.
    Allowed,
    /// It has failed.
    Refused,
}

/// What a policy does with what it refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Refuses it.
    Enforce,
    /// Lets it through and records it, as far as the layers above let it through.
    Observe,
}

/// The mode to put a policy in.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetMode {
    /// The mode.
    pub mode: Mode,
}

/// A sandbox to make.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Create {
    /// Its name, unique on the node: 1 to 40 of `a-z0-9-`.
    #[schema(value_type = String, example = "demo")]
    pub name: SandboxName,
    /// Whose it is; none: the caller's, or `default`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(value_type = Option<String>)]
    pub tenant: Option<TenantName>,
    /// What runs it.
    #[serde(default)]
    pub driver: Driver,
    /// Guest memory, e.g. `256M`; none: as configured.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(value_type = Option<String>, example = "256M")]
    pub memory: Option<Size>,
    /// Virtual CPUs; none: as configured.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub vcpus: Option<u8>,
    /// Its own layer of policy, as JSON; none: an empty one, which denies everything.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(value_type = Option<Object>)]
    pub policy: Option<Box<RawValue>>,
    /// What becomes of it when it is idle; none: as configured, as far as its driver can.
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
    /// What becomes of it when its memory is lost, as when the host is started anew; none: as configured,
    /// as far as its driver has its disk.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub cold_boot: Option<ColdBoot>,
}

/// When a sandbox that is put to sleep is to be woken, unless somebody does before; none: it is not by
/// itself. Give one of the two, or none.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Standby {
    /// At this time, RFC 3339, at most 3650 days from now.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(value_type = Option<String>, example = "2026-12-01T07:00:00Z")]
    pub wake_at: Option<Moment>,
    /// So long from now.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(value_type = Option<String>, example = "8h")]
    pub wake_in: Option<Span>,
}

/// How a sandbox is to be woken.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Resume {
    /// Also if it has failed: it boots from its disk then, as another incarnation, where `cold_boot` allows it
    /// and its tenant may have as much.
    #[serde(default)]
    pub cold: bool,
}

/// How long to keep a sandbox awake.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct KeepAwake {
    /// From now on, at most `24h`; a longer lease that it has stays.
    #[serde(rename = "for")]
    #[schema(value_type = String, example = "10m")]
    pub span: Span,
}

/// How long a sandbox is to live.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Renew {
    /// From now on, and at every renewal without one; none: as long as it was given.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(value_type = Option<String>, example = "2h")]
    pub ttl: Option<Span>,
}

/// A port of a guest to connect to.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Connect {
    /// A TCP port on which a program of the guest listens.
    pub port: u16,
}

/// A sandbox as it is now.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Sandbox {
    /// Its name.
    #[schema(value_type = String)]
    pub name: SandboxName,
    /// Whose it is.
    #[schema(value_type = String)]
    pub tenant: TenantName,
    /// `creating`, `running`, `saving`, `standby`, `suspending`, `suspended`, `resuming`, `failed` or
    /// `deleting`.
    #[schema(example = "running")]
    pub state: String,
    /// Why it failed, or could not be put to sleep or woken, if so: the operator is told all of it, others
    /// what kind of thing went wrong.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub reason: Option<String>,
    /// What runs it.
    pub driver: Driver,
    /// Its slot on the node. This, its tap and where that is are told to the operator only.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub slot: Option<u16>,
    /// The name of its tap.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(example = "pt1")]
    pub tap: Option<String>,
    /// The network namespace that the tap is in.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(example = "postern")]
    pub netns: Option<String>,
    /// Its address inside, the same in every guest.
    #[schema(value_type = String, example = "169.254.100.2")]
    pub guest_ip: IpAddr,
    /// The addresses its traffic leaves from, at most one per family.
    #[schema(value_type = Vec<String>)]
    pub egress: Vec<IpAddr>,
    /// Guest memory in MiB.
    pub memory_mib: u32,
    /// Virtual CPUs.
    pub vcpus: u8,
    /// Moves when the sandbox becomes another one: re-creation, cold boot, clone. It grows, with the
    /// time and not by ones.
    pub incarnation: u64,
    /// The newest revision among the policies in force. It grows likewise.
    #[schema(value_type = u64)]
    pub revision: Revision,
    /// `observe` when a layer in force only records what it refuses.
    pub mode: Mode,
    /// Whose policy over it the journal has but cannot be read, `platform` or `tenant/acme`: until that
    /// is written anew nothing leaves the sandbox.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(example = "tenant/acme")]
    pub closed_by: Option<String>,
    /// The process that runs it, if it is the daemon's: told to the operator only.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub pid: Option<u32>,
    /// What becomes of it when it is idle.
    pub on_idle: OnIdle,
    /// How long nothing may go on before it is idle; none: it never is.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(value_type = Option<String>, example = "15s")]
    pub idle_after: Option<Span>,
    /// Why it is awake: what keeps it so longest; none while it is not.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(example = "bytes passed")]
    pub awake: Option<String>,
    /// All that keeps it awake, what does so longest first.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub awake_by: Vec<Awake>,
    /// Seconds until it is idle, if nothing goes on meanwhile; none where nobody knows.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub idle_in: Option<u64>,
    /// Seconds until it is woken, while it sleeps; none: by whoever wants something of it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub wakes_in: Option<u64>,
    /// Why it is woken then.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(example = "it was asked for")]
    pub wakes_because: Option<String>,
    /// When it is to be woken, as it was asked for, RFC 3339 in UTC.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub wake_at: Option<String>,
    /// Seconds until it is removed; none: not by itself.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub expires_in: Option<u64>,
    /// How often it was woken since the daemon began.
    #[serde(default)]
    pub wakes: u64,
    /// How often it was booted from its disk alone since it was made: each time as another incarnation,
    /// without its memory and its connections.
    #[serde(default)]
    pub cold_boots: u64,
    /// Why it was so last, or is to be when it is woken.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub cold_reason: Option<String>,
    /// When it was created, RFC 3339 in UTC; left out where the journal's word for it is damaged.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub created: Option<String>,
    /// What went through since the daemon attached it.
    pub traffic: Traffic,
    /// What the writer may not expect of the policy it was made with, one sentence each; told when it
    /// is made, and never again.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub notes: Vec<String>,
}

/// Something that keeps a sandbox awake.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Awake {
    /// `start`, `bytes`, `processors`, `call`, `lease`, `failure` (to put it to sleep), `driver` (it cannot
    /// be put to sleep) or `never`.
    #[schema(example = "bytes")]
    pub by: String,
    /// For so many seconds, if nothing goes on meanwhile; none where nobody knows.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[serde(rename = "for")]
    pub seconds: Option<u64>,
}

/// Counters of a sandbox.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct Traffic {
    /// Connections open now.
    pub open_flows: u64,
    /// Payload bytes out.
    pub bytes_out: u64,
    /// Payload bytes in.
    pub bytes_in: u64,
}

/// All sandboxes that the caller may see.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Sandboxes {
    /// By name.
    pub sandboxes: Vec<Sandbox>,
}

/// What a removal by force came to: the sandbox is gone.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Forced {
    /// What of it may be there still, and what follows for its slot; none: nothing is.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(
        example = "its guest, which no hook has ended; slot 7 is kept from use until this host boots anew"
    )]
    pub left: Option<String>,
}

/// One line of the stream that `POST /v1/sandboxes?progress=true` answers; the last one is
/// `sandbox` or `error`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// Something began.
    Progress(Progress),
    /// It is there.
    Sandbox(Box<Sandbox>),
    /// It could not be made, and nothing of it is left.
    Error(Problem),
}

/// What is being done.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Progress {
    /// In the present participle.
    #[schema(example = "starting the microVM of demo")]
    pub doing: String,
    /// Milliseconds since the verb was taken up.
    pub at_ms: u64,
}

/// A command to run in a guest, without a shell.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Exec {
    /// Program and arguments.
    #[schema(example = json!(["uname", "-a"]))]
    pub argv: Vec<String>,
    /// Environment, added to the agent's own.
    #[serde(default)]
    pub env: std::collections::BTreeMap<String, String>,
    /// Working directory; none: `/root`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub cwd: Option<String>,
    /// User by name; none: root.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub user: Option<String>,
}

/// What a write of policy did. It is in force when this is answered.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Change {
    /// The revision now in force.
    #[schema(value_type = u64)]
    pub revision: Revision,
    /// Sandboxes it applies to.
    pub sandboxes: usize,
    /// Open flows that were judged again.
    pub checked: usize,
    /// Of those, the ones that are now denied and were cut.
    pub cut: usize,
    /// Flows that were cut, by this write or an earlier one, and were not over two seconds later:
    /// bytes of theirs may still leave. The same write again waits for them once more.
    #[serde(default)]
    pub closing: usize,
    /// What the writer may not expect of it, one sentence each.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub notes: Vec<String>,
}

/// A flow to explain.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Question {
    /// `https://host/path`, `http://host/path`, `ws://host/path` (a WebSocket), `host:port` or
    /// `address:port`.
    #[schema(example = "https://api.github.com/")]
    pub destination: String,
    /// Request method; `GET` if none is given.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub method: Option<String>,
    /// Request path, in place of the one in `destination`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub path: Option<String>,
    /// `tcp` (if none is given) or `udp`.
    #[serde(default)]
    pub protocol: Transport,
}

/// A transport.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, clap::ValueEnum,
)]
#[serde(rename_all = "kebab-case")]
pub enum Transport {
    /// TCP.
    #[default]
    Tcp,
    /// UDP.
    Udp,
}

/// The answer to a question.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Explained {
    /// Whether it would pass.
    pub allowed: bool,
    /// Layer by layer, by the same code that decides.
    #[schema(value_type = Object)]
    pub explanation: Value,
}

/// How the daemon is.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Health {
    /// `ok`, or `stopping`.
    #[schema(example = "ok")]
    pub status: String,
    /// The program's version.
    pub version: String,
    /// Seconds since it started.
    pub uptime_seconds: u64,
    /// Sandboxes that the caller may see.
    pub sandboxes: usize,
    /// Audit records lost since the start. This and what follows is told to the operator only.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub audit_lost: Option<u64>,
    /// Tasks that ended by a panic since the start: each is a bug.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub panics: Option<u64>,
    /// Slots that nobody gets, because something of their last guest is still there: a tap, or a fence
    /// to which somebody else's rule leads. It is tried again and again to take it away.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub stuck_slots: Option<usize>,
}
