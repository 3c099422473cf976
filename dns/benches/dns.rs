//! Questions from bytes to bytes, without sockets to the guest: what one answer costs.
#![expect(clippy::expect_used, clippy::indexing_slicing, reason = "a bench fails by panicking")]

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use dns::{Asker, Guest, Names, Pins, Resolver, ResolverConfig, Transport};
use hickory_proto::op::{Message, Query};
use hickory_proto::rr::rdata::A;
use hickory_proto::rr::{Name, RData, Record, RecordType};
use policy::{Compiled, Layer, OwnAddresses, Policy, PolicyHandle, Revision, Slot, Subject, Trail};
use tokio::net::UdpSocket;

const ASKED: SocketAddr = SocketAddr::new(IpAddr::V4(policy::net::GATEWAY_IP), 53);
/// Below the burst that one guest may ask at once.
const QUESTIONS: usize = 300;

fn answers(criterion: &mut Criterion) {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
    let upstream = runtime.block_on(upstream());
    let resolver = Resolver::new(ResolverConfig {
        upstreams: vec![upstream],
        timeout: Duration::from_secs(2),
        ..ResolverConfig::default()
    })
    .expect("resolver");
    let policy = Policy::from_toml("[[rule]]\nallow = [\"api.example.com\"]").expect("policy");
    let policy = PolicyHandle::new(Compiled::new(&[(Layer::Sandbox, &policy)], Revision(1)));
    let subject = Arc::new(Subject {
        sandbox: "bench".parse().expect("name"),
        tenant: "bench".parse().expect("name"),
        incarnation: 1,
        slot: Slot::new(1).expect("slot"),
    });
    let guest = || {
        let (trail, _) = Trail::bounded(1);
        let pins = Arc::new(Pins::new(1000));
        let own = OwnAddresses::default();
        let asker = Asker::new(resolver.clone(), Names::default());
        Guest::new(subject.clone(), policy.clone(), pins, own, asker, true, trail)
    };
    let mut group = criterion.benchmark_group("dns");
    group.throughput(Throughput::Elements(QUESTIONS as u64));
    for (what, host) in [("cached", "api.example.com."), ("denied", "evil.example.com.")] {
        let mut query = Message::query();
        query.add_query(Query::query(Name::from_ascii(host).expect("name"), RecordType::A));
        let query = query.to_vec().expect("encodable");
        group.bench_function(what, |bencher| {
            bencher.iter_batched(
                guest,
                |guest| {
                    runtime.block_on(async {
                        for _ in 0..QUESTIONS {
                            let answer = guest.answer(&query, ASKED, Transport::Udp).await;
                            assert!(answer.is_some());
                        }
                    });
                    guest
                },
                BatchSize::SmallInput,
            );
        });
    }
}

/// An upstream that has one address for every name.
async fn upstream() -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").await.expect("udp");
    let address = socket.local_addr().expect("address");
    tokio::spawn(async move {
        let mut buffer = [0; 1500];
        while let Ok((length, from)) = socket.recv_from(&mut buffer).await {
            let query = Message::from_vec(&buffer[..length]).expect("query");
            let owner = query.queries[0].name().clone();
            let mut reply = Message::response(query.metadata.id, query.metadata.op_code);
            reply.add_query(query.queries[0].clone());
            let data = RData::A(A::new(93, 184, 216, 34));
            reply.add_answer(Record::from_rdata(owner, 300, data));
            socket.send_to(&reply.to_vec().expect("encodable"), from).await.expect("send");
        }
    });
    address
}

criterion_group!(benches, answers);
criterion_main!(benches);
