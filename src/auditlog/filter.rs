//! Which records somebody asked for. Pure.

use std::net::{IpAddr, SocketAddr};
use std::time::SystemTime;

use policy::audit::{Kind, Outcome};
use policy::{AuditRecord, Code, SandboxName, TenantName};

/// A record passes when it passes every part that is set.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// Not older.
    pub since: Option<SystemTime>,
    /// Not newer.
    pub until: Option<SystemTime>,
    /// Of this sandbox.
    pub sandbox: Option<SandboxName>,
    /// Of this tenant.
    pub tenant: Option<TenantName>,
    /// With this reason.
    pub code: Option<Code>,
    /// With this outcome.
    pub outcome: Option<Outcome>,
    /// Of this kind.
    pub kind: Option<Kind>,
    /// About this name.
    pub name: Option<String>,
    /// That left from this address, and port if one is given.
    pub egress: Option<Endpoint>,
}

/// An address with or without a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// The address.
    pub ip: IpAddr,
    /// The port.
    pub port: Option<u16>,
}

impl std::str::FromStr for Endpoint {
    type Err = &'static str;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let with_port = |at: SocketAddr| Self { ip: at.ip(), port: Some(at.port()) };
        let alone = |ip: IpAddr| Self { ip, port: None };
        let read = text.parse().map(with_port).or_else(|_| text.parse().map(alone));
        read.map_err(|_| "is not an address; write `203.0.113.7` or `203.0.113.7:40222`")
    }
}

impl Filter {
    /// Whether the record passes.
    #[must_use]
    pub fn passes(&self, record: &AuditRecord) -> bool {
        fn same<T: PartialEq>(wanted: &Option<T>, found: Option<&T>) -> bool {
            wanted.as_ref().is_none_or(|wanted| found == Some(wanted))
        }
        let left_from = |at: &Endpoint| {
            record.egress.is_some_and(|e| e.ip() == at.ip && at.port.is_none_or(|p| p == e.port()))
        };
        self.since.is_none_or(|since| record.time >= since)
            && self.until.is_none_or(|until| record.time <= until)
            && same(&self.sandbox, record.sandbox.as_ref())
            && same(&self.tenant, record.tenant.as_ref())
            && same(&self.code, record.code.as_ref())
            && same(&self.outcome, Some(&record.outcome))
            && same(&self.kind, Some(&record.kind))
            && same(&self.name, record.name.as_ref())
            && self.egress.as_ref().is_none_or(left_from)
    }

    /// Whether a line could pass, by looking for what it must contain: cheaper than reading it.
    #[must_use]
    pub fn may_pass(&self, line: &str) -> bool {
        let has = |key: &str, value: Option<&str>| {
            value.is_none_or(|value| line.contains(&format!("\"{key}\":\"{value}\"")))
        };
        has("sandbox", self.sandbox.as_ref().map(SandboxName::as_str))
            && has("tenant", self.tenant.as_ref().map(TenantName::as_str))
            && has("code", self.code.map(Code::as_str))
    }
}
