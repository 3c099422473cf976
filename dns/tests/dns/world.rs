//! A guest with a policy, and the questions it asks.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use dns::{Asker, Guest, Names, Pins, Resolver, ResolverConfig, Transport};
use hickory_proto::op::{Edns, Message, Query};
use hickory_proto::rr::rdata::opt::EdnsOption;
use hickory_proto::rr::{RData, RecordType};
use policy::{
    Compiled, Layer, OwnAddresses, Policy, PolicyHandle, Records, Revision, Slot, Subject, Trail,
};

use crate::upstream::{Upstream, name};

/// Where the guests' questions were sent.
pub(crate) const ASKED: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(policy::net::GATEWAY_IP), 53);

pub(crate) const POLICY: &str = r#"
[[rule]]
allow = ["api.allowed.example", "*.wild.example.com", "api.service.internal"]
"#;

pub(crate) struct World {
    pub(crate) guest: Guest,
    /// The resolver as the guest's connections have it.
    pub(crate) asker: Asker,
    pub(crate) pins: Arc<Pins>,
    pub(crate) policy: PolicyHandle,
    pub(crate) records: Records,
}

pub(crate) fn compiled(toml: &str, revision: u64) -> Compiled {
    let policy = Policy::from_toml(toml).expect("policy");
    Compiled::new(&[(Layer::Sandbox, &policy)], Revision(revision))
}

pub(crate) fn resolver(upstreams: &[&Upstream]) -> Resolver {
    resolver_at(&upstreams.iter().map(|upstream| upstream.address).collect::<Vec<_>>())
}

pub(crate) fn resolver_at(upstreams: &[SocketAddr]) -> Resolver {
    Resolver::new(ResolverConfig {
        upstreams: upstreams.to_vec(),
        timeout: Duration::from_secs(2),
        attempts: 2,
        cache_entries: 1000,
    })
    .expect("resolver")
}

pub(crate) fn world(toml: &str, upstreams: &[&Upstream]) -> World {
    world_of(toml, upstreams, Names::default(), true)
}

/// The same with so many bytes of names, and with or without a way out by IPv6.
pub(crate) fn world_of(toml: &str, upstreams: &[&Upstream], names: Names, ipv6: bool) -> World {
    made(toml, resolver(upstreams), names, ipv6)
}

/// The same with upstreams at these addresses, whoever they are.
pub(crate) fn world_at(toml: &str, upstreams: &[SocketAddr]) -> World {
    made(toml, resolver_at(upstreams), Names::default(), true)
}

fn made(toml: &str, resolver: Resolver, names: Names, ipv6: bool) -> World {
    let subject = Arc::new(Subject {
        sandbox: "demo".parse().expect("name"),
        tenant: "acme".parse().expect("name"),
        incarnation: 3,
        slot: Slot::new(7).expect("slot"),
    });
    let (trail, records) = Trail::bounded(4_000);
    let policy = PolicyHandle::new(compiled(toml, 5));
    let pins = Arc::new(Pins::new(1000));
    let own = OwnAddresses::new(["8.8.4.4".parse().expect("address")]);
    let asker = Asker::new(resolver, names);
    let asks = asker.clone();
    let guest = Guest::new(subject, policy.clone(), pins.clone(), own, asks, ipv6, trail);
    World { guest, asker, pins, policy, records }
}

/// A query with EDNS, as bytes.
pub(crate) fn query(host: &str, record_type: RecordType) -> Vec<u8> {
    let mut message = Message::query();
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(name(host), record_type));
    let mut edns = Edns::new();
    edns.set_max_payload(1232);
    message.set_edns(edns);
    message.to_vec().expect("encodable")
}

impl World {
    pub(crate) async fn ask(&self, host: &str, record_type: RecordType) -> Message {
        let query = query(host, record_type);
        let answer = self.guest.answer(&query, ASKED, Transport::Udp).await.expect("an answer");
        assert_eq!(answer[..2], query[..2], "the id of the query");
        Message::from_vec(&answer).expect("readable")
    }
}

/// The addresses an answer tells, as text; every record must be about the question's own name.
pub(crate) fn told(answer: &Message) -> Vec<String> {
    let of = |record: &hickory_proto::rr::Record| {
        assert_eq!(record.name, answer.queries[0].name, "told under another name");
        match &record.data {
            RData::A(a) => a.0.to_string(),
            other => panic!("told {other:?}"),
        }
    };
    answer.answers.iter().map(of).collect()
}

/// The extended error of an answer: info code and text.
pub(crate) fn extended(answer: &Message) -> Option<(u16, String)> {
    match answer.edns.as_ref()?.option(15.into())? {
        EdnsOption::Unknown(15, bytes) => {
            let (info, text) = bytes.split_first_chunk().expect("info code");
            Some((u16::from_be_bytes(*info), String::from_utf8(text.to_vec()).expect("text")))
        }
        other => panic!("{other:?}"),
    }
}
