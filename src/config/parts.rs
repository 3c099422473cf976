//! What each room needs of the configuration, in its own words. Checks nothing: that is done
//! before.

use std::net::IpAddr;

use crate::config::Config;
use crate::error::Error;
use crate::units::Size;

impl Config {
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
            slots: self.guests.sandboxes,
            limits: egress::Limits {
                flows: self.guests.flows,
                packets: self.guests.packets,
                bytes: (self.guests.bandwidth > Size(0)).then_some(self.guests.bandwidth.0),
                udp_sessions: self.guests.udp_sessions,
                udp_idle: self.guests.udp_idle.0,
                ..egress::Limits::default()
            },
            names: dns::Names {
                burst: u32::try_from(self.dns.wildcard_burst.0).unwrap_or(u32::MAX),
                rate: u32::try_from(self.dns.wildcard_rate.0).unwrap_or(u32::MAX),
            },
            look: self.guests.fence_look.0,
        }
    }

    /// Where suspended sandboxes are put, with what S3 needs to know.
    pub fn store(&self) -> Result<vault::Location, Error> {
        let path = &self.store.credentials;
        let mut options = crate::config::store_options();
        if !path.as_os_str().is_empty() {
            let text = std::fs::read_to_string(path)
                .map_err(|source| Error::ReadFile { path: path.clone(), source })?;
            let lines = text.lines().filter(|line| !line.trim_start().starts_with('#'));
            let pairs = lines.filter_map(|line| line.split_once('='));
            options.extend(pairs.map(|(name, value)| (name.trim().into(), value.trim().into())));
        }
        let folder = self.state_dir.join("store");
        Ok(vault::Location { url: self.store.url.clone(), folder, options })
    }

    /// The keeper's part of it, with the addresses traffic leaves from.
    #[must_use]
    pub fn keeper(&self, egress: Vec<IpAddr>, store: vault::Location) -> lifecycle::Config {
        lifecycle::Config {
            store,
            state_dir: self.state_dir.clone(),
            memory_dir: match self.memory_dir.as_os_str().is_empty() {
                true => self.state_dir.clone(),
                false => self.memory_dir.clone(),
            },
            run_dir: self.run_dir.clone(),
            image_dir: self.qemu.image.clone(),
            qemu: self.qemu.binary.clone(),
            netns: self.guests.netns.clone(),
            egress,
            slots: self.guests.sandboxes,
            quota: lifecycle::Quota {
                sandboxes: match self.tenants.sandboxes {
                    0 => u16::MAX,
                    limit => limit,
                },
                memory_mib: bounded(self.tenants.memory.0) >> 20,
                vcpus: bounded(u64::from(self.tenants.vcpus)),
                disk: bounded(self.tenants.disk.0),
                snapshots: bounded(self.tenants.snapshots.0),
            },
            state_reserve: self.limits.state_reserve.0,
            hold_down: self.guests.slot_rest.0,
            boot_deadline: self.qemu.boot_timeout.0,
            uid_base: self.qemu.uid_base,
            terms: lifecycle::DefaultTerms {
                on_idle: self.sleep.on_idle,
                idle_after: self.sleep.idle_after.0,
                ttl: self.sleep.ttl.map(|span| span.0),
                max_life: self.sleep.max_life.map(|span| span.0),
                longest_life: self.tenants.max_life.map(|span| span.0),
                cold_boot: self.sleep.cold_boot,
            },
            usage: lifecycle::UsageBounds { keep: self.usage.keep.0, rows: self.usage.rows },
            wakes: self.sleep.wakes,
            wake_deadline: self.sleep.wake_timeout.0,
            hooks: vmm::Hooks {
                on_create: self.external.on_create.clone(),
                on_remove: self.external.on_remove.clone(),
                on_standby: self.external.on_standby.clone(),
                on_resume: self.external.on_resume.clone(),
                limit: self.external.timeout.0,
            },
        }
    }
}

/// A bound where there is one: 0 stands for none.
const fn bounded(limit: u64) -> u64 {
    match limit {
        0 => u64::MAX,
        limit => limit,
    }
}
