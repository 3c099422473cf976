//! The configuration: one TOML file, every field with a default, read whole or refused whole.
//!
//! The only place that reads the process environment. Never logs a value: tokens are known by
//! their digests only.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

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
        /// Sockets and consoles; may be gone after a reboot.
        run_dir: PathBuf = "/run/postern".into(),
        /// Who may command the daemon, and how.
        api: Api = Api::default(),
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
        /// The record of every decision.
        audit: Audit = Audit::default(),
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
        /// Connections at once, all listeners together.
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
    /// The `external` driver: programs run when a sandbox comes and goes, argument by argument.
    External {
        /// Run after the tap exists.
        on_create: Vec<String> = Vec::new(),
        /// Run before the tap goes.
        on_remove: Vec<String> = Vec::new(),
        /// How long either may take.
        timeout: Span = Span::seconds(10),
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
                .map_err(|source| Error::Config { path: at.to_owned(), source }),
            Err(source) if source.kind() == std::io::ErrorKind::NotFound && path.is_none() => {
                Ok(Self::default())
            }
            Err(source) => Err(Error::ReadFile { path: at.to_owned(), source }),
        }
    }

    /// Reads a configuration.
    pub fn parse(text: &str) -> Result<Self, Problem> {
        let config: Self = input::toml(text)?;
        config.check().map_err(|problem| {
            let field = problem.field.clone().unwrap_or_default();
            let path: Vec<&str> = field.split(['.', '[', ']']).filter(|s| !s.is_empty()).collect();
            let line = input::toml_line(text, &path);
            problem.at(line)
        })?;
        Ok(config)
    }

    /// The resolver's part of it.
    #[must_use]
    pub fn resolver(&self) -> dns::ResolverConfig {
        dns::ResolverConfig {
            upstreams: self.dns.upstreams.clone(),
            timeout: self.dns.timeout.0,
            attempts: self.dns.attempts,
            cache_entries: self.dns.cache_entries,
        }
    }

    /// The router's part of it.
    #[must_use]
    pub fn router(&self) -> egress::Config {
        egress::Config {
            netns: self.guests.netns.clone(),
            divert_port: self.guests.divert_port,
            nflog_group: self.guests.nflog_group,
            limits: egress::Limits { flows: self.guests.flows, ..egress::Limits::default() },
        }
    }

    /// The keeper's part of it, with the addresses traffic leaves from.
    #[must_use]
    pub fn keeper(&self, egress: Vec<IpAddr>) -> lifecycle::Config {
        lifecycle::Config {
            state_dir: self.state_dir.clone(),
            run_dir: self.run_dir.clone(),
            image_dir: self.qemu.image.clone(),
            qemu: self.qemu.binary.clone(),
            netns: self.guests.netns.clone(),
            egress,
            slots: self.guests.sandboxes,
            hold_down: self.guests.slot_rest.0,
            boot_deadline: self.qemu.boot_timeout.0,
            uid_base: self.qemu.uid_base,
            hooks: vmm::Hooks {
                on_create: self.external.on_create.clone(),
                on_remove: self.external.on_remove.clone(),
                limit: self.external.timeout.0,
            },
        }
    }

    fn check(&self) -> Result<(), Problem> {
        self.check_api()?;
        self.check_egress()?;
        for (field, path) in [
            ("state_dir", &self.state_dir),
            ("run_dir", &self.run_dir),
            ("api.socket", &self.api.socket),
            ("qemu.image", &self.qemu.image),
            ("audit.dir", &self.audit.dir),
        ] {
            if !path.is_absolute() {
                let given = path.to_string_lossy();
                return Err(Problem::invalid(field, &given, "is not an absolute path")
                    .fix("begin it with `/`"));
            }
        }
        let netns = &self.guests.netns;
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if netns.is_empty() || netns.len() > 64 || !netns.chars().all(plain) || netns.starts_with('.') {
            return Err(Problem::invalid("guests.netns", netns, "is not a name of a namespace")
                .fix("use up to 64 letters, digits, `-`, `_` and `.`"));
        }
        // Ranges: field, value, smallest, largest.
        let wide = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
        for (field, given, least, most) in [
            ("guests.divert_port", u64::from(self.guests.divert_port), 1024, 65_535),
            ("guests.nflog_group", u64::from(self.guests.nflog_group), 1, 65_535),
            ("guests.sandboxes", u64::from(self.guests.sandboxes), 1, u64::from(policy::Slot::MAX)),
            ("guests.flows", wide(self.guests.flows), 1, 1 << 20),
            ("api.connections", wide(self.api.connections), 1, 1 << 16),
            ("dns.attempts", wide(self.dns.attempts), 1, 10),
            ("dns.cache_entries", self.dns.cache_entries, 1, 1 << 24),
            ("qemu.vcpus", u64::from(self.qemu.vcpus), 1, 32),
            ("qemu.uid_base", u64::from(self.qemu.uid_base), 1000, 4_000_000_000),
            ("qemu.memory", self.qemu.memory.0, 128 << 20, 64 << 30),
            ("audit.file_size", self.audit.file_size.0, 64 << 10, 64 << 30),
            ("audit.total_size", self.audit.total_size.0, 2 * self.audit.file_size.0, u64::MAX),
            ("audit.queue", wide(self.audit.queue), 16, 1 << 24),
        ] {
            if !(least..=most).contains(&given) {
                let problem = Problem::invalid(field, &given.to_string(), "is out of range");
                return Err(problem.fix(format!("use {least} to {most}")));
            }
        }
        for (field, span) in [
            ("dns.timeout", self.dns.timeout),
            ("qemu.boot_timeout", self.qemu.boot_timeout),
            ("external.timeout", self.external.timeout),
        ] {
            if span.0.is_zero() || span > Span::seconds(600) {
                return Err(Problem::invalid(field, &span.to_string(), "is out of range")
                    .fix("use 1ms to 10m"));
            }
        }
        Ok(())
    }

    fn check_api(&self) -> Result<(), Problem> {
        let mut names = HashSet::new();
        let mut digests = HashSet::new();
        for (i, token) in self.api.token.iter().enumerate() {
            let printable = token.name.chars().all(|c| c.is_ascii_graphic());
            if token.name.is_empty() || token.name.len() > 40 || !printable {
                let field = format!("api.token[{i}].name");
                return Err(Problem::invalid(field, &token.name, "is not a name of a token")
                    .fix("use 1 to 40 printable characters without spaces"));
            }
            if !names.insert(&token.name) {
                let field = format!("api.token[{i}].name");
                return Err(Problem::invalid(field, &token.name, "is the name of another token")
                    .fix("give each token its own name"));
            }
            if !digests.insert(token.sha256.0) {
                let field = format!("api.token[{i}].sha256");
                return Err(Problem::invalid(field, "", "is the digest of another token")
                    .fix("make a token of its own"));
            }
        }
        if let (Some(listen), true) = (self.api.listen, self.api.token.is_empty()) {
            return Err(Problem::invalid("api.listen", &listen.to_string(), "has no token to ask for")
                .fix("add an [[api.token]], or leave `listen` out"));
        }
        Ok(())
    }

    fn check_egress(&self) -> Result<(), Problem> {
        let addresses = &self.egress.addresses;
        for (i, address) in addresses.iter().enumerate() {
            let field = || format!("egress.addresses[{i}]");
            let given = address.to_string();
            let unusable = address.is_unspecified()
                || address.is_loopback()
                || address.is_multicast()
                || *address == IpAddr::V4(Ipv4Addr::BROADCAST);
            if unusable {
                return Err(Problem::invalid(field(), &given, "cannot be a source address")
                    .fix("use an address of an interface with a way out"));
            }
            if addresses.iter().take(i).any(|other| other.is_ipv4() == address.is_ipv4()) {
                return Err(Problem::invalid(field(), &given, "is a second one of its family")
                    .fix("give at most one IPv4 and one IPv6 address"));
            }
        }
        Ok(())
    }
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
mod tests {
    use super::*;

    const EXAMPLE: &str = include_str!("../deploy/postern.toml");

    #[test]
    fn the_example_is_the_defaults_and_names_every_field() {
        assert_eq!(Config::parse(EXAMPLE).expect("as shipped"), Config::default());
        // With the settings uncommented it must still be the defaults, field by field.
        let setting = |line: &str| {
            let inner = line.strip_prefix("# ").unwrap_or(line);
            let set = inner.split_once(" = ").is_some_and(|(key, _)| {
                key.chars().all(|c| c.is_ascii_lowercase() || "_0123456789".contains(c))
            });
            if set { inner.to_owned() } else { line.to_owned() }
        };
        let plain = EXAMPLE.split("# [[api.token]]").next().expect("the part before tokens");
        let all: String = plain.lines().map(|line| setting(line) + "\n").collect();
        let given: toml::Table = all.parse().expect("toml");
        let defaults = toml::Table::try_from(Config::default()).expect("toml");
        let rest: Config = input::toml(&all).expect("uncommented");
        let mut expected = Config::default();
        expected.api.listen = rest.api.listen;
        assert_eq!(rest, expected);
        for (name, value) in &defaults {
            let shown = given.get(name).unwrap_or_else(|| panic!("{name} is not in the example"));
            for key in value.as_table().into_iter().flat_map(toml::Table::keys) {
                let known = shown.get(key).is_some() || key == "token";
                assert!(known, "{name}.{key} is not in the example");
            }
        }
    }

    #[test]
    fn the_tokens_of_the_example_are_valid_once_uncommented() {
        let tokens = EXAMPLE.split("# [[api.token]]").nth(1).expect("an example token");
        let text: String = tokens
            .lines()
            .map_while(|line| line.strip_prefix("# ").or(line.is_empty().then_some("")))
            .map(|line| format!("{line}\n"))
            .collect();
        let config = Config::parse(&format!("[[api.token]]{text}")).expect("valid");
        assert_eq!(config.api.token.len(), 1);
    }

    #[test]
    fn a_bad_configuration_is_refused_with_field_value_line_and_fix() {
        let token = |name: &str, tenant: &str, digit: &str| {
            format!("[[api.token]]\nname = \"{name}\"\ntenant = \"{tenant}\"\nsha256 = \"{}\"\n", digit.repeat(64))
        };
        let cases: &[(String, &str, usize, &str)] = &[
            ("nmae = 1".into(), "nmae", 1, "the keys here"),
            ("stat_dir = \"/x\"".into(), "stat_dir", 1, "did you mean `state_dir`?"),
            ("state_dir = \"x\"".into(), "state_dir", 1, "begin it with `/`"),
            ("[dns]\ntimout = \"5s\"".into(), "dns.timout", 2, "did you mean `timeout`?"),
            ("[dns]\ntimeout = \"5\"".into(), "dns.timeout", 2, "`5s`"),
            ("[dns]\ntimeout = 5".into(), "dns.timeout", 2, "a string"),
            ("[dns]\ntimeout = \"0s\"".into(), "dns.timeout", 2, "1ms"),
            ("[dns]\nupstreams = [\"1.1.1.1\"]".into(), "dns.upstreams[0]", 2, "socket address"),
            ("[dns]\nattempts = 0".into(), "dns.attempts", 2, "1 to 10"),
            ("[egress]\naddresses = [\n\"192.0.2.1\",\n\"192.0.2.2\"]".into(), "egress.addresses[1]", 4, "at most one"),
            ("[egress]\naddresses = [\"127.0.0.1\"]".into(), "egress.addresses[0]", 2, "way out"),
            ("[egress]\naddresses = [\"1.2.3\"]".into(), "egress.addresses[0]", 2, "IP address"),
            ("[guests]\nnetns = \"../x\"".into(), "guests.netns", 2, "letters"),
            ("[guests]\ndivert_port = 80".into(), "guests.divert_port", 2, "1024"),
            ("[qemu]\nmemory = \"1M\"".into(), "qemu.memory", 2, "134217728"),
            ("[qemu]\nmemory = \"lots\"".into(), "qemu.memory", 2, "`256M`"),
            ("[audit]\nfile_size = \"1G\"".into(), "audit.total_size", 0, "use"),
            ("[log]\nformat = \"xml\"".into(), "log.format", 2, "text, json"),
            ("[api]\nlisten = \"127.0.0.1:1\"".into(), "api.listen", 2, "[[api.token]]"),
            (token("a b", "*", "0"), "api.token[0].name", 2, "without spaces"),
            (token("a", "B", "0"), "api.token[0].tenant", 3, "`*`"),
            (token("a", "b", "x"), "api.token[0].sha256", 4, "sha256sum"),
            (token("a", "b", "0") + &token("a", "b", "1"), "api.token[1].name", 6, "own name"),
            (token("a", "b", "0") + &token("b", "b", "0"), "api.token[1].sha256", 8, "its own"),
            ("[api\n".into(), "", 1, "TOML"),
        ];
        for (text, field, line, fix) in cases {
            let problem = Config::parse(text).expect_err(text);
            assert_eq!(problem.field.as_deref(), Some(*field), "{text}\n{problem}");
            assert_eq!(problem.line.unwrap_or(0), *line, "{text}\n{problem}");
            assert!(problem.value.is_some(), "{text}\n{problem}");
            assert!(problem.fix.as_deref().is_some_and(|f| f.contains(fix)), "{text}\n{problem}");
        }
    }

    #[test]
    fn a_digest_is_read_in_either_case() {
        let upper: Digest = "AB".repeat(32).try_into().expect("hex");
        assert_eq!(String::from(upper), "ab".repeat(32));
    }
}
