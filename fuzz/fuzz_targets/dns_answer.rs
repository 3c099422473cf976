//! Any records as the answer of an upstream resolver, sent to the real one over loopback: a guest is
//! told, and pinned, no address but those that its policy permits, nothing that is not an address, and
//! not much of it. The first bytes choose the flags and what is said.
#![no_main]

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use dns::{Asker, Guest, Names, Pins, Resolver, ResolverConfig, Transport};
use hickory_proto::op::{Message, Query};
use hickory_proto::rr::{Name, RData, Record, RecordType};
use libfuzzer_sys::fuzz_target;
use policy::net::{GATEWAY_IP, SYNTHETIC};
use policy::{
    Compiled, Host, Layer, OwnAddresses, Policy, PolicyHandle, Revision, Slot, Subject, Trail,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, UdpSocket};
use tokio::runtime::{Builder, Runtime};

const HOST: &str = "host.wild.example.com";
/// A network that a rule opens though it is private.
const OPENED: [u8; 2] = [10, 1];
/// An address of the host that Postern runs on.
const OWN: Ipv4Addr = Ipv4Addr::new(8, 8, 4, 4);
/// The header and the question of a query for [`HOST`].
const QUESTION: usize = 12 + HOST.len() + 2 + 4;

/// What the upstream says behind the question, and what it last sent.
#[derive(Default)]
struct Said {
    flags: [u8; 2],
    counts: [u8; 3],
    rest: Vec<u8>,
    sent: Vec<u8>,
}

struct World {
    runtime: Runtime,
    upstream: SocketAddr,
    said: Arc<Mutex<Said>>,
    policy: PolicyHandle,
}

static WORLD: LazyLock<World> = LazyLock::new(|| {
    let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
    let said = Arc::<Mutex<Said>>::default();
    let upstream = runtime.block_on(serve(said.clone()));
    let text = format!("[[rule]]\nallow = [\"{HOST}\", \"{}.{}.0.0/16\"]\n", OPENED[0], OPENED[1]);
    let policy = Policy::from_toml(&text).expect("a policy");
    let policy = PolicyHandle::new(Compiled::new(&[(Layer::Sandbox, &policy)], Revision(1)));
    World { runtime, upstream, said, policy }
});

/// Answers over UDP and TCP at one port.
async fn serve(said: Arc<Mutex<Said>>) -> SocketAddr {
    let tcp = TcpListener::bind("127.0.0.1:0").await.expect("TCP");
    let at = tcp.local_addr().expect("an address");
    let udp = UdpSocket::bind(at).await.expect("UDP");
    let datagrams = said.clone();
    tokio::spawn(async move {
        let mut query = [0; 1500];
        while let Ok((length, from)) = udp.recv_from(&mut query).await {
            let answer = answer(&query[..length], &datagrams);
            let _ = udp.send_to(&answer, from).await;
        }
    });
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = tcp.accept().await {
            let mut query = vec![0; stream.read_u16().await.unwrap_or_default().into()];
            if stream.read_exact(&mut query).await.is_ok() {
                let answer = answer(&query, &said);
                let framed = [&(answer.len() as u16).to_be_bytes()[..], &answer].concat();
                let _ = stream.write_all(&framed).await;
            }
        }
    });
    at
}

fn answer(query: &[u8], said: &Mutex<Said>) -> Vec<u8> {
    let mut said = said.lock().expect("said");
    let counts = said.counts.map(|count| [0, count]).concat();
    // The id, that it is a response to one question, the question: without them it is not looked at.
    let header = [&query[..2], &[said.flags[0] | 0x80, said.flags[1]], &[0, 1], &counts];
    let sent = [&header.concat(), &query[12..QUESTION.min(query.len())], &said.rest].concat();
    said.sent.clone_from(&sent);
    sent
}

/// Six bytes as one record: names, types and addresses that mean something here, or nearly.
fn record(bytes: &[u8; 6], out: &mut Vec<u8>) {
    let [owner, kind, ttl, rest @ ..] = *bytes;
    let name = |n: u8, out: &mut Vec<u8>| match n % 6 {
        0 | 1 => out.extend([0xc0, 12]),
        2 => out.extend(b"\x01a\x07example\0"),
        3 => out.extend(b"\x01b\x07example\0"),
        4 => out.extend([1, n, 0xc0, 12]),
        _ => out.push(0),
    };
    name(owner, out);
    let kind = [1, 1, 1, 5, 5, 28, 28, 65, 64, 16, 6, 41, kind][usize::from(kind % 13)];
    out.extend([0, kind, 0, if owner < 250 { 1 } else { 3 }, 0, 0, ttl, 60]);
    let mut data = Vec::new();
    match kind {
        1 => {
            let [a, b, c] = rest;
            let first =
                [93, 10, 127, 169, 192, 100, 198, 224, 0, 8, 172, 255, a][usize::from(a % 13)];
            let second = [b, 1, 254, 168, 64, 18, 8, 16][usize::from(b % 8)];
            data.extend([first, second, if c < 128 { 4 } else { c }, c % 5]);
        }
        28 => {
            data.extend(
                [[0x20, 0x01], [0xfe, 0x80], [0xfc, 0], [0, 0x64], [0, 0]]
                    [usize::from(rest[0] % 5)],
            );
            data.extend([rest[1]; 8]);
            data.extend([0, 0, 127, 0, 0, rest[2]]);
        }
        5 => name(rest[0], &mut data),
        _ => data.extend(rest),
    }
    out.extend((data.len() as u16).to_be_bytes());
    out.extend(data);
}

/// Written without the code that decides it.
fn permitted(ip: Ipv4Addr) -> bool {
    let [a, b, c, d] = ip.octets();
    let special = ip.is_private()
        || ip.is_loopback()
        || ip.is_link_local()
        || matches!((a, b), (0 | 224.., _) | (100, 64..128) | (198, 18 | 19))
        || (matches!((a, b, c), (192, 0, 0 | 2) | (198, 51, 100) | (203, 0, 113))
            // Anycast addresses, reachable from everywhere.
            && !matches!([a, b, c, d], [192, 0, 0, 9 | 10]));
    ip != OWN && (!special || [a, b] == OPENED)
}

/// The names that a chain of aliases from [`HOST`] comes to, in whatever order they are said.
fn reached(records: &[Record]) -> HashSet<Name> {
    let mut names = HashSet::from([Name::from_ascii(format!("{HOST}.")).expect("a name")]);
    for _ in records {
        for Record { name, data, .. } in records {
            if let (RData::CNAME(target), true) = (data, names.contains(name)) {
                names.insert(target.0.clone());
            }
        }
    }
    names
}

fuzz_target!(|bytes: &[u8]| {
    let Some(([mode, flags @ .., n1, n2, n3], rest)) = bytes.split_first_chunk::<6>() else {
        return;
    };
    let world = &*WORLD;
    let (mut counts, mut said) = ([*n1, *n2, *n3], rest.to_vec());
    if mode % 4 != 0 {
        let (records, _) = rest.as_chunks::<6>();
        said.clear();
        records.iter().for_each(|bytes| record(bytes, &mut said));
        counts = [u8::try_from(records.len()).unwrap_or(u8::MAX), 0, 0];
    }
    // Mostly no truncation, and no error.
    let flags = if mode % 8 < 6 { [0x01, 0x80] } else { *flags };
    *world.said.lock().expect("said") = Said { flags, counts, rest: said, sent: Vec::new() };
    let (trail, records) = Trail::bounded(64);
    let pins = Arc::new(Pins::new(64));
    let answer = world.runtime.block_on(asked(world, &pins, trail));
    let sent = std::mem::take(&mut world.said.lock().expect("said").sent);
    let host = Host::parse(HOST).expect("a host");

    let answer = answer.expect("every question is answered");
    assert!(answer.len() <= 1232);
    let answer = Message::from_vec(&answer).expect("a message");
    assert!(answer.answers.len() <= 32 && answer.additionals.is_empty());
    assert!(answer.authorities.iter().all(|record| record.record_type() == RecordType::SOA));
    let mut told = Vec::new();
    for record in &answer.answers {
        assert_eq!(record.name, answer.queries[0].name);
        let RData::A(ip) = record.data else { panic!("told {record}") };
        assert!(permitted(ip.0) || (SYNTHETIC.contains(&ip.0) && answer.answers.len() == 1));
        assert_eq!(pins.names(ip.0.into()).names, std::slice::from_ref(&host));
        told.push(IpAddr::from(ip.0));
    }
    if let Ok(sent) = Message::from_vec(&sent) {
        let owners = reached(&sent.answers);
        let owned = |ip: &IpAddr| {
            sent.answers.iter().any(|record| {
                owners.contains(&record.name)
                    && matches!(record.data, RData::A(a) if *ip == IpAddr::from(a.0))
            })
        };
        let stands = |ip: &IpAddr| matches!(ip, IpAddr::V4(v4) if SYNTHETIC.contains(v4));
        assert!(told.iter().all(|ip| stands(ip) || owned(ip)), "told what is another name's");
        for record in sent.answers.iter().chain(&sent.authorities).chain(&sent.additionals) {
            let ip = match record.data {
                RData::A(ip) => ip.0.into(),
                RData::AAAA(ip) => IpAddr::from(ip.0).to_canonical(),
                _ => continue,
            };
            assert!(
                told.contains(&ip) || pins.names(ip).names.is_empty(),
                "{ip} is pinned and not told"
            );
        }
    }
    for record in records.drain() {
        let text = [record.detail, record.name].into_iter().flatten();
        assert!(text.into_iter().all(|text| text.len() < 1500 && !text.contains(char::is_control)));
    }
});

/// A guest's question for [`HOST`] to a resolver that knows nothing yet.
async fn asked(world: &World, pins: &Arc<Pins>, trail: Trail) -> Option<Vec<u8>> {
    let resolver = Resolver::new(ResolverConfig {
        upstreams: vec![world.upstream],
        timeout: Duration::from_millis(200),
        attempts: 1,
        cache_entries: 16,
    });
    let subject = Arc::new(Subject {
        sandbox: "demo".parse().expect("a name"),
        tenant: "acme".parse().expect("a name"),
        incarnation: 1,
        slot: Slot::new(1).expect("a slot"),
    });
    let asker = Asker::new(resolver.expect("a resolver"), Names::default());
    let own = OwnAddresses::new([OWN.into()]);
    let guest = Guest::new(subject, world.policy.clone(), pins.clone(), own, asker, true, trail);
    let mut query = Message::query();
    query.add_query(Query::query(Name::from_ascii(HOST).expect("a name"), RecordType::A));
    let mut edns = hickory_proto::op::Edns::new();
    edns.set_max_payload(1232);
    query.set_edns(edns);
    let query = query.to_vec().expect("a query");
    guest.answer(&query, (GATEWAY_IP, 53).into(), Transport::Udp).await
}
