//! The configuration: one TOML file, every field with a default, read whole or refused whole.
//!
//! The only place that reads the process environment. Never logs a value: tokens are known by
//! their digests only.

mod check;
mod parts;

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use lifecycle::{ColdBoot, OnIdle};
use policy::TenantName;
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::input;
use crate::problem::Problem;
use crate::units::{Size, Span};

/// Where the file is looked for when none is named; then a missing file means the defaults.
pub const DEFAULT_PATH: &str = "/etc/postern/postern.toml";
/// Where the daemon listens unless told otherwise.
pub const DEFAULT_SOCKET: &str = "/run/postern/postern.sock";

macro_rules! section {
    ($(#[$doc:meta])* $name:ident {
        $($(#[$field_doc:meta])* $field:ident: $kind:ty = $default:expr,)*
    }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct $name { $($(#[$field_doc])* pub $field: $kind,)* }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default,)* }
            }
        }
    };
}

section! {
    /// Everything an operator sets.
    Config {
        /// Journal and disks of the sandboxes.
        state_dir: PathBuf = "/var/lib/postern".into(),
        /// The memory of the guests, as files, in a folder of this installation alone; empty: beside their
        /// disks. On a disk it can be written out when the host is short of memory, and is once a guest
        /// sleeps; in a tmpfs nothing of it is written, and it stays in the host's memory.
        memory_dir: PathBuf = PathBuf::new(),
        /// Sockets and consoles; may be gone after a reboot.
        run_dir: PathBuf = "/run/postern".into(),
        /// Who may command the daemon, and how.
        api: Api = Api::default(),
        /// What one tenant may take of the node.
        tenants: Tenants = Tenants::default(),
        /// What is kept of the node.
        limits: Limits = Limits::default(),
        /// The world the guests live in.
        guests: Guests = Guests::default(),
        /// How traffic leaves.
        egress: Egress = Egress::default(),
        /// Where names are resolved.
        dns: Dns = Dns::default(),
        /// MicroVMs run by QEMU.
        qemu: Qemu = Qemu::default(),
        /// MicroVMs run by someone else.
        external: External = External::default(),
        /// How long sandboxes live, and what becomes of idle ones.
        sleep: Sleep = Sleep::default(),
        /// Where sandboxes are put that sleep for long.
        store: Store = Store::default(),
        /// The record of every decision.
        audit: Audit = Audit::default(),
        /// What sandboxes have used, for who pays.
        usage: Usage = Usage::default(),
        /// What the daemon says about itself.
        log: Log = Log::default(),
    }
}

section! {
    /// The control API.
    Api {
        /// Unix socket, mode 0660. Whoever can open it commands the node.
        socket: PathBuf = DEFAULT_SOCKET.into(),
        /// Group of the socket; empty: the daemon's own.
        group: String = String::new(),
        /// TCP address for callers with a token; none: no TCP.
        listen: Option<SocketAddr> = None,
        /// Host names that a TCP caller may use for this node, besides the address itself.
        hosts: Vec<String> = Vec::new(),
        /// Connections at once, on each listener.
        connections: usize = 256,
        /// Who may call over TCP.
        token: Vec<Token> = Vec::new(),
    }
}

/// One bearer token, known by its digest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Token {
    /// What the audit calls it.
    pub name: String,
    /// Whose sandboxes it sees: a tenant, or `*` for all and for the platform's policy.
    pub tenant: Reach,
    /// SHA-256 of the token, 64 hexadecimal digits.
    pub sha256: Digest,
}

/// What a token reaches.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Reach {
    /// Every tenant and the platform.
    All,
    /// One tenant.
    Tenant(TenantName),
}

/// A SHA-256 digest, written as 64 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest(pub [u8; 32]);

section! {
    /// What one tenant may take of what all share.
    Tenants {
        /// Sandboxes of one tenant; 0: as many as the node holds.
        sandboxes: u16 = 0,
        /// Guest memory of all that have not failed; 0: no bound.
        memory: Size = Size(0),
        /// Virtual CPUs of the same; 0: no bound.
        vcpus: u32 = 0,
        /// What the disks of all microVMs can grow to; 0: no bound.
        disk: Size = Size(0),
        /// What its snapshots have in the object store; 0: no bound.
        snapshots: Size = Size(0),
        /// The longest life that may be asked for, and that of whoever asks for none; none: any.
        max_life: Option<Span> = None,
        /// Connections to the API over TCP by the tokens of one tenant, all together.
        connections: usize = 64,
    }
}

section! {
    /// What is kept of the node for itself.
    Limits {
        /// Bytes that are to be free on the disk of `state_dir` where a sandbox is made: the disks of
        /// guests share it with the journal.
        state_reserve: Size = Size::mib(256),
    }
}

section! {
    /// The guests' network namespace and the ports used inside it.
    Guests {
        /// Name of the namespace, as `ip netns` knows it.
        netns: String = "postern".into(),
        /// Port inside the namespace to which TCP is diverted.
        divert_port: u16 = 15_000,
        /// Netfilter log group of dropped frames.
        nflog_group: u16 = 1_007,
        /// Sandboxes at once.
        sandboxes: u16 = 1_024,
        /// Open connections of one sandbox.
        flows: usize = 1_024,
        /// Frames a second that one sandbox may send, and a tenth of it at once; more are dropped.
        packets: u32 = 100_000,
        /// Bytes a second that one sandbox may send, likewise; 0: as many as it can.
        bandwidth: Size = Size(0),
        /// How often it is looked whether somebody else changed the rules around the guests.
        fence_look: Span = Span::seconds(1),
        /// UDP sessions of one sandbox; each is one of its connections, too.
        udp_sessions: usize = 256,
        /// A UDP session ends when nothing has passed for so long.
        udp_idle: Span = Span::seconds(60),
        /// How long a slot stays empty after use.
        slot_rest: Span = Span::seconds(60),
    }
}

section! {
    /// How allowed traffic leaves.
    Egress {
        /// Source addresses of allowed traffic: at most one per family, each on an interface of this
        /// host. Empty: the address the kernel chooses.
        addresses: Vec<IpAddr> = Vec::new(),
    }
}

section! {
    /// The resolver used on behalf of the guests.
    Dns {
        /// Upstream resolvers in order, with ports; empty: those of the system.
        upstreams: Vec<SocketAddr> = Vec::new(),
        /// How long a question may take, all attempts together.
        timeout: Span = Span::seconds(4),
        /// How often each upstream is asked within that time.
        attempts: usize = 2,
        /// Answers kept.
        cache_entries: u64 = 65_536,
        /// Bytes of names under a wildcard that a sandbox may have asked upstream at once, for each
        /// registrable domain; four times as many for all domains.
        wildcard_burst: Size = Size(16 << 10),
        /// The same a second, for long.
        wildcard_rate: Size = Size(64),
    }
}

section! {
    /// The `qemu` driver.
    Qemu {
        /// Folder of `vmlinuz`, `initrd.img` and `root.ext4`.
        image: PathBuf = "/var/lib/postern/image".into(),
        /// The program, by path or by name.
        binary: PathBuf = "qemu-system-x86_64".into(),
        /// The microVM in slot n runs as this user id plus n.
        uid_base: u32 = 64_000,
        /// Guest memory unless asked otherwise.
        memory: Size = Size::mib(256),
        /// Virtual CPUs unless asked otherwise.
        vcpus: u8 = 1,
        /// How long a guest may take from start to its agent's greeting.
        boot_timeout: Span = Span::seconds(60),
    }
}

section! {
    /// The `external` driver: programs run when a sandbox comes and goes, argument by argument. It sleeps
    /// only where the last two of them are there.
    External {
        /// Run after the tap exists.
        on_create: Vec<String> = Vec::new(),
        /// Run before the tap goes.
        on_remove: Vec<String> = Vec::new(),
        /// Run when the guest must stop and let go of the tap, to be resumed later; with `on_resume`.
        on_standby: Vec<String> = Vec::new(),
        /// Run when the tap may be opened again and the guest is to go on; good for one that runs.
        on_resume: Vec<String> = Vec::new(),
        /// How long each may take.
        timeout: Span = Span::seconds(10),
    }
}

section! {
    /// How long sandboxes live and what becomes of idle ones, where their creation says nothing else.
    Sleep {
        /// What becomes of an idle sandbox: `standby`, `suspend`, `delete` or `never`. One whose driver cannot be put
        /// to sleep is not, by default.
        on_idle: OnIdle = OnIdle::Standby,
        /// How long nothing may go on before a sandbox is idle.
        idle_after: Span = Span::seconds(15),
        /// A sandbox is removed so long after it was made or renewed; none: it is not.
        ttl: Option<Span> = None,
        /// A sandbox is removed so long after it was made, renewed or not; none: it is not.
        max_life: Option<Span> = None,
        /// What becomes of a sandbox whose memory is lost, as when the host is started anew, or whose saved
        /// state is of no use: `allowed`, it boots from its disk when somebody wants something of it; or
        /// `refused`, it has failed. Only where the driver has the disk.
        cold_boot: ColdBoot = ColdBoot::Allowed,
        /// Sandboxes that are woken at once; others wait for their turn.
        wakes: usize = 4,
        /// How long whoever wants something of a sandbox that sleeps waits for it.
        wake_timeout: Span = Span::seconds(30),
    }
}

section! {
    /// The object store that suspended sandboxes are in.
    Store {
        /// `s3://bucket/prefix`, with region and credentials as in the environment of other S3 clients
        /// (`AWS_REGION`, `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_ENDPOINT`); empty: the folder
        /// `store` in `state_dir`.
        url: String = String::new(),
        /// File with more of these, `NAME=value` a line, which go before the environment's; empty: none.
        credentials: PathBuf = PathBuf::new(),
    }
}

section! {
    /// The audit on disk, as JSON lines.
    Audit {
        /// Its folder.
        dir: PathBuf = "/var/log/postern".into(),
        /// A file is closed at this size.
        file_size: Size = Size::mib(64),
        /// Oldest files go when all together are larger.
        total_size: Size = Size::mib(1024),
        /// Records that may wait to be written; more are lost and counted.
        queue: usize = 65_536,
    }
}

section! {
    /// What sandboxes have used, hour by hour, in `usage.db` in `state_dir`.
    Usage {
        /// How long the hours of the past are kept.
        keep: Span = Span::seconds(400 * 86_400),
        /// Rows that tell sandboxes and destinations apart; of more, the oldest of whoever has most become
        /// sums.
        rows: u64 = 1_000_000,
    }
}

section! {
    /// The daemon's own log, on standard error.
    Log {
        /// What is said: `error`, `warn`, `info`, `debug`, or per module as in `info,egress=debug`.
        filter: String = "info".into(),
        /// How.
        format: LogFormat = LogFormat::Text,
    }
}

/// How a log line looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// For a person.
    Text,
    /// One JSON object a line.
    Json,
}

impl Config {
    /// Reads the file at `path`, or at [`DEFAULT_PATH`] if there is one.
    pub fn load(path: Option<&Path>) -> Result<Self, Error> {
        let at = path.unwrap_or(Path::new(DEFAULT_PATH));
        match std::fs::read_to_string(at) {
            Ok(text) => Self::parse(&text)
                .map_err(|source| Error::Config { path: at.to_owned(), source: source.into() }),
            Err(source) if source.kind() == std::io::ErrorKind::NotFound && path.is_none() => {
                Ok(Self::default())
            }
            Err(source) => Err(Error::ReadFile { path: at.to_owned(), source }),
        }
    }

    /// Reads a configuration.
    pub fn parse(text: &str) -> Result<Self, Problem> {
        let config: Self = input::toml(text).map_err(without_secret)?;
        config.check().map_err(|problem| {
            let field = problem.field.clone().unwrap_or_default();
            let path: Vec<&str> = field.split(['.', '[', ']']).filter(|s| !s.is_empty()).collect();
            let line = input::toml_line(text, &path);
            problem.at(line)
        })?;
        Ok(config)
    }
}

/// Shows nothing of what may be a token, written where its digest belongs.
fn without_secret(problem: Problem) -> Problem {
    let field = problem.field.as_deref().unwrap_or_default();
    let of_a_token =
        field.starts_with("api.token") && !field.ends_with(".name") && !field.ends_with(".tenant");
    if field.is_empty() || of_a_token { Problem { value: None, ..problem } } else { problem }
}

/// What S3 clients look for in the environment.
pub(crate) fn store_options() -> Vec<(String, String)> {
    let plain = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
        let name = name.into_string().ok().filter(|name| name.starts_with("AWS_"))?;
        Some((name, value.into_string().ok()?))
    };
    std::env::vars_os().filter_map(plain).collect()
}

/// The file by which tests make the daemon die or panic at a step; builds for use ignore it.
#[must_use]
pub fn fault_file() -> Option<PathBuf> {
    std::env::var_os("POSTERN_FAULT").map(PathBuf::from)
}

/// Whether output should carry no colours, by the convention of `NO_COLOR` and `TERM=dumb`.
#[must_use]
pub fn plain_output() -> bool {
    std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
        || std::env::var_os("TERM").is_some_and(|value| value == "dumb")
}

impl TryFrom<String> for Reach {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        match text.as_str() {
            "*" => Ok(Self::All),
            name => name
                .parse()
                .map(Self::Tenant)
                .map_err(|_| "is not a tenant; use the name of one, or `*` for all".to_owned()),
        }
    }
}

impl From<Reach> for String {
    fn from(reach: Reach) -> Self {
        match reach {
            Reach::All => "*".into(),
            Reach::Tenant(name) => name.into(),
        }
    }
}

impl TryFrom<String> for Digest {
    type Error = &'static str;
    fn try_from(text: String) -> Result<Self, &'static str> {
        const WRONG: &str = "is not a SHA-256 digest; write the 64 hexadecimal digits that \
                             `printf %s \"$token\" | sha256sum` prints";
        let mut digest = [0; 32];
        if text.len() != 64 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(WRONG);
        }
        for (byte, pair) in digest.iter_mut().zip(text.as_bytes().chunks(2)) {
            let pair = std::str::from_utf8(pair).map_err(|_| WRONG)?;
            *byte = u8::from_str_radix(pair, 16).map_err(|_| WRONG)?;
        }
        Ok(Self(digest))
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

#[cfg(test)]
mod tests;
