//! What a configuration must hold beyond its shape: ranges, absolute paths, one of each.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr};

use lifecycle::WantedTerms;

use crate::config::{Config, External};
use crate::problem::Problem;
use crate::units::{Size, Span};

impl Config {
    /// The first thing that is wrong, with the path of its field.
    pub(crate) fn check(&self) -> Result<(), Problem> {
        self.check_api()?;
        self.check_egress()?;
        for (field, path) in [
            ("state_dir", &self.state_dir),
            ("memory_dir", &self.memory_dir),
            ("run_dir", &self.run_dir),
            ("api.socket", &self.api.socket),
            ("qemu.image", &self.qemu.image),
            ("audit.dir", &self.audit.dir),
            ("store.credentials", &self.store.credentials),
        ] {
            // What may be left empty has no other empty value.
            let left_out =
                matches!(field, "memory_dir" | "store.credentials") && path.as_os_str().is_empty();
            if !path.is_absolute() && !left_out {
                let given = path.to_string_lossy();
                return Err(Problem::invalid(field, &given, "is not an absolute path")
                    .fix("begin it with `/`"));
            }
        }
        let url = &self.store.url;
        if !url.is_empty() && url.strip_prefix("s3://").is_none_or(str::is_empty) {
            return Err(Problem::invalid("store.url", url, "is not the address of a bucket")
                .fix("write `s3://bucket/prefix`, or leave it out"));
        }
        // unix(7): a longer one can be listened on by a way round, and reached by nobody.
        let socket = self.api.socket.to_string_lossy();
        if socket.len() > 107 {
            return Err(Problem::invalid("api.socket", &socket, "is too long for a unix socket")
                .fix("use at most 107 bytes"));
        }
        let netns = &self.guests.netns;
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if netns.is_empty()
            || netns.len() > 64
            || !netns.chars().all(plain)
            || netns.starts_with('.')
        {
            return Err(Problem::invalid("guests.netns", netns, "is not a name of a namespace")
                .fix("use up to 64 letters, digits, `-`, `_` and `.`"));
        }
        self.check_log()?;
        let External { on_standby, on_resume, .. } = &self.external;
        for (field, given, missing) in [
            ("external.on_standby", on_standby, on_resume),
            ("external.on_resume", on_resume, on_standby),
        ] {
            if let (Some(program), true) = (given.first(), missing.is_empty()) {
                let problem =
                    Problem::invalid(field, program, "is there without the other of its pair");
                return Err(problem.fix("give `on_standby` and `on_resume`, or neither"));
            }
        }
        // Ranges: field, value, smallest, largest.
        let wide = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
        for (field, given, least, most) in [
            ("guests.divert_port", u64::from(self.guests.divert_port), 1024, 65_535),
            ("guests.nflog_group", u64::from(self.guests.nflog_group), 1, 65_535),
            ("guests.sandboxes", u64::from(self.guests.sandboxes), 1, u64::from(policy::Slot::MAX)),
            ("guests.flows", wide(self.guests.flows), 1, 1 << 20),
            ("guests.packets", u64::from(self.guests.packets), 100, 10_000_000),
            ("guests.bandwidth", self.guests.bandwidth.0, 0, 8 << 30),
            (
                "tenants.sandboxes",
                u64::from(self.tenants.sandboxes),
                0,
                u64::from(policy::Slot::MAX),
            ),
            ("tenants.connections", wide(self.tenants.connections), 1, 1 << 16),
            ("guests.udp_sessions", wide(self.guests.udp_sessions), 1, 1 << 12),
            ("api.connections", wide(self.api.connections), 1, 1 << 16),
            ("dns.attempts", wide(self.dns.attempts), 1, 10),
            ("dns.cache_entries", self.dns.cache_entries, 1, 1 << 24),
            ("dns.wildcard_burst", self.dns.wildcard_burst.0, 1024, 1 << 30),
            ("dns.wildcard_rate", self.dns.wildcard_rate.0, 1, 1 << 20),
            ("qemu.vcpus", u64::from(self.qemu.vcpus), 1, 32),
            ("qemu.uid_base", u64::from(self.qemu.uid_base), 1000, 4_000_000_000),
            ("audit.queue", wide(self.audit.queue), 16, 1 << 24),
            ("usage.rows", self.usage.rows, 1_000, 100_000_000),
            ("sleep.wakes", wide(self.sleep.wakes), 1, 1 << 10),
        ] {
            if !(least..=most).contains(&given) {
                let problem = Problem::invalid(field, &given.to_string(), "is out of range");
                return Err(problem.fix(format!("use {least} to {most}")));
            }
        }
        self.check_users()?;
        let file = self.audit.file_size;
        let twice = Size(file.0.saturating_mul(2));
        for (field, given, least, most) in [
            ("qemu.memory", self.qemu.memory, Size::mib(128), Size::mib(64 << 10)),
            ("audit.file_size", file, Size(64 << 10), Size::mib(64 << 10)),
            ("audit.total_size", self.audit.total_size, twice, Size(u64::MAX)),
        ] {
            if !(least..=most).contains(&given) {
                let problem = Problem::invalid(field, &given.to_string(), "is out of range");
                return Err(problem.fix(match most.0 {
                    u64::MAX => format!("use {least} or more, twice `audit.file_size`"),
                    _ => format!("use {least} to {most}"),
                }));
            }
        }
        let idle = self.guests.udp_idle;
        if idle < Span::seconds(1) || idle > Span::seconds(3600) {
            return Err(Problem::invalid("guests.udp_idle", &idle.to_string(), "is out of range")
                .fix("use 1s to 1h"));
        }
        for (field, span) in [
            ("dns.timeout", self.dns.timeout),
            ("guests.fence_look", self.guests.fence_look),
            ("qemu.boot_timeout", self.qemu.boot_timeout),
            ("external.timeout", self.external.timeout),
            ("sleep.wake_timeout", self.sleep.wake_timeout),
        ] {
            if span.0.is_zero() || span > Span::seconds(600) {
                return Err(Problem::invalid(field, &span.to_string(), "is out of range")
                    .fix("use 1ms to 10m"));
            }
        }
        if self.usage.keep < Span::seconds(3600) || self.usage.keep > Span::seconds(3650 * 86_400) {
            let keep = self.usage.keep.to_string();
            return Err(
                Problem::invalid("usage.keep", &keep, "is out of range").fix("use 1h to 3650d")
            );
        }
        let spans = [
            ("sleep.idle_after", Some(self.sleep.idle_after)),
            ("sleep.ttl", self.sleep.ttl),
            ("sleep.max_life", self.sleep.max_life),
            ("tenants.max_life", self.tenants.max_life),
        ];
        for (field, span) in spans {
            if let Some(span) = span.filter(|span| !WantedTerms::SPAN.contains(&span.0)) {
                return Err(Problem::invalid(field, &span.to_string(), "is out of range")
                    .fix("use 1s to 3650d"));
            }
        }
        if let (Some(life), Some(longest)) = (self.sleep.max_life, self.tenants.max_life)
            && life > longest
        {
            let problem = "is longer than `tenants.max_life`";
            return Err(Problem::invalid("sleep.max_life", &life.to_string(), problem)
                .fix(format!("use at most {longest}, or leave it out for that")));
        }
        Ok(())
    }

    /// The users of slots, of which none may be one that others are: `nobody`, and the number that
    /// means none in 16 bits.
    fn check_users(&self) -> Result<(), Problem> {
        const NOBODY: u32 = 65_534;
        const TAKEN: std::ops::RangeInclusive<u32> = NOBODY..=u16::MAX as u32;
        let (base, slots) = (self.qemu.uid_base, u32::from(self.guests.sandboxes));
        let last = base.saturating_add(slots);
        if last < *TAKEN.start() || base >= *TAKEN.end() {
            return Ok(());
        }
        let problem = format!(
            "with {slots} sandboxes reaches the user {NOBODY}, who is `nobody`, or the one behind it"
        );
        let room = NOBODY.saturating_sub(base.saturating_add(1));
        let fix = match room {
            0 => format!("use {} or more", TAKEN.end()),
            _ => format!("use {} or more, or at most {room} `guests.sandboxes`", TAKEN.end()),
        };
        Err(Problem::invalid("qemu.uid_base", &base.to_string(), problem).fix(fix))
    }

    /// A word that is no level would be taken for a module, and silence everything else.
    fn check_log(&self) -> Result<(), Problem> {
        const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
        let filter = &self.log.filter;
        let level = |part: &str| part.rsplit('=').next().unwrap_or_default().trim().to_lowercase();
        match filter.split(',').find(|part| !LEVELS.contains(&level(part).as_str())) {
            None => Ok(()),
            Some(part) => Err(Problem::invalid("log.filter", part.trim(), "is not a level").fix(
                "use off, error, warn, info, debug or trace, also per module: `info,egress=debug`",
            )),
        }
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
            return Err(Problem::invalid(
                "api.listen",
                &listen.to_string(),
                "has no token to ask for",
            )
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
