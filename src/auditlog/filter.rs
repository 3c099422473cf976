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

    /// What the line of every record that passes contains: cheaper to look for than to read the line. The
    /// rarest first.
    #[must_use]
    pub fn marks(&self) -> Vec<String> {
        fn mark<T: serde::Serialize>(key: &str, value: Option<T>) -> Option<String> {
            let value = serde_json::to_string(&value?).ok()?;
            Some(format!("\"{key}\":{value}"))
        }
        let egress = self.egress.and_then(|Endpoint { ip, port }| {
            let whole = mark("egress", Some(SocketAddr::new(ip, port.unwrap_or_default())))?;
            match port {
                Some(_) => Some(whole),
                None => whole.strip_suffix("0\"").map(str::to_owned),
            }
        });
        let marks = [
            egress,
            mark("name", self.name.as_ref()),
            mark("code", self.code),
            mark("sandbox", self.sandbox.as_ref()),
            mark("kind", self.kind),
            mark("outcome", self.outcome),
            mark("tenant", self.tenant.as_ref()),
        ];
        marks.into_iter().flatten().collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn records() -> impl Strategy<Value = AuditRecord> {
        let names = prop::option::of("[a-c]{1,2}");
        let codes = prop::option::of(prop::sample::select(Code::ALL));
        let texts = prop::option::of(".{0,3}|a\",\"sandbox\":\"b");
        let six = any::<bool>();
        let parts = (names.clone(), names, codes, texts, 1..12_u16, six);
        parts.prop_map(|(sandbox, tenant, code, name, port, six)| {
            let mut record =
                AuditRecord::new(SystemTime::UNIX_EPOCH, Kind::Connection, Outcome::Deny);
            record.sandbox = sandbox.and_then(|name| name.parse().ok());
            record.tenant = tenant.and_then(|name| name.parse().ok());
            record.code = code;
            record.name = name;
            let ip: IpAddr = match six {
                true => std::net::Ipv6Addr::LOCALHOST.into(),
                false => [192, 0, 2, 1].into(),
            };
            record.egress = Some(SocketAddr::from((ip, port)));
            record
        })
    }

    proptest! {
        #[test]
        fn the_quick_look_never_hides_a_record_that_passes(
            record in records(), mask in any::<[bool; 7]>(), same in any::<bool>(),
            other in records(),
        ) {
            let like = if same { &record } else { &other };
            let [sandbox, tenant, code, name, egress, port, kind] = mask;
            let egress = like.egress.filter(|_| egress);
            let egress = egress.map(|at| Endpoint { ip: at.ip(), port: port.then(|| at.port()) });
            let filter = Filter {
                sandbox: like.sandbox.clone().filter(|_| sandbox),
                tenant: like.tenant.clone().filter(|_| tenant),
                code: like.code.filter(|_| code),
                name: like.name.clone().filter(|_| name),
                egress,
                kind: kind.then_some(like.kind),
                outcome: kind.then_some(like.outcome),
                ..Filter::default()
            };
            let line = serde_json::to_string(&record).expect("json");
            let marked = filter.marks().iter().all(|mark| line.contains(mark));
            prop_assert!(!filter.passes(&record) || marked);
            prop_assert!(!same || filter.passes(&record), "control");
        }
    }

    #[test]
    fn an_address_is_asked_for_with_or_without_its_port() {
        let mut record = AuditRecord::new(SystemTime::UNIX_EPOCH, Kind::Connection, Outcome::Allow);
        record.egress = "192.0.2.1:40222".parse().ok();
        for (asked, passes) in [
            ("192.0.2.1", true),
            ("192.0.2.1:40222", true),
            ("192.0.2.1:40223", false),
            ("192.0.2.2", false),
        ] {
            let filter = Filter { egress: asked.parse().ok(), ..Filter::default() };
            assert!(filter.egress.is_some());
            assert_eq!(filter.passes(&record), passes, "{asked}");
        }
        assert!("192.0.2.1:x".parse::<Endpoint>().is_err());
    }
}
