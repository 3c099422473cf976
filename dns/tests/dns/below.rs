//! Names above an allowed one, names that have only IPv6, and what a wildcard may carry out.

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dns::{Asker, Error, Family, Names, Transport};
use hickory_proto::op::{Message, ResponseCode};
use hickory_proto::rr::RecordType;
use policy::audit::Outcome;
use policy::net::SYNTHETIC;
use policy::{Code, Evidence, Flow, Host, Permit, Protocol, Verdict};
use tokio::task::JoinSet;

use crate::upstream::{Said, Upstream, address, alias};
use crate::world::{ASKED, POLICY, World, extended, query, resolver, told, world, world_of};

/// Attack C10.
#[tokio::test]
async fn a_refused_name_above_an_allowed_one_exists_without_records() {
    let upstream = Upstream::with(&["93.184.216.34"]).await;
    let world = world(POLICY, &[&upstream]);
    let types = [RecordType::A, RecordType::AAAA, RecordType::NS, RecordType::SOA, RecordType::DS];
    for host in ["allowed.example.", "example.", "wild.example.com.", "example.com.", "com."] {
        for record_type in types {
            let answer = world.ask(host, record_type).await;
            let told = (answer.response_code, answer.answers.len(), answer.authorities.len());
            assert_eq!(told, (ResponseCode::NoError, 0, 1), "{host} {record_type}");
            assert_eq!(extended(&answer), Some((17, "postern:no-rule".into())), "{host}");
        }
    }
    for host in ["x.api.allowed.example.", "other.example.", "net.", "internal.", "localhost."] {
        let answer = world.ask(host, RecordType::A).await;
        assert_eq!(answer.response_code, ResponseCode::NXDomain, "{host}");
    }
    assert_eq!(upstream.asked(), []);
}

#[tokio::test]
async fn a_top_level_domain_exists_for_a_guest_that_may_reach_names_in_it() {
    let upstream = Upstream::with(&["93.184.216.34"]).await;
    let world = world("default = \"allow\"", &[&upstream]);
    for (host, code) in [
        ("com.", ResponseCode::NoError),
        ("db.", ResponseCode::NXDomain),
        ("local.", ResponseCode::NXDomain),
        ("internal.", ResponseCode::NXDomain),
        ("onion.", ResponseCode::NXDomain),
    ] {
        let answer = world.ask(host, RecordType::A).await;
        assert_eq!(answer.response_code, code, "{host}");
        assert_eq!(extended(&answer), Some((17, "postern:private-address".into())), "{host}");
    }
    assert_eq!(upstream.asked(), []);
}

async fn of(records: &'static [(&'static str, &'static [&'static str])]) -> Upstream {
    Upstream::start(move |query| {
        let owner = query.name().to_ascii();
        let label = owner.split('.').next().unwrap_or_default();
        let Some((_, addresses)) = records.iter().find(|(name, _)| *name == label) else {
            return Said::code(ResponseCode::NXDomain);
        };
        let records = addresses.iter().map(|text| address(&owner, text, 60));
        Said::records(records.filter(|record| record.record_type() == query.query_type()))
    })
    .await
}

fn standing(answer: &Message) -> IpAddr {
    let told = told(answer);
    let [one] = &told[..] else { panic!("{told:?}") };
    let address: IpAddr = one.parse().expect("address");
    let IpAddr::V4(v4) = address else { panic!("{address}") };
    assert!(SYNTHETIC.contains(&v4), "{address}");
    address
}

/// Promise 36.
#[tokio::test]
async fn a_name_with_ipv6_addresses_only_is_told_one_that_stands_for_it() {
    let upstream = of(&[
        ("six", &["2606:4700::1", "fd00::1"]),
        ("more", &["2606:4700::2"]),
        ("both", &["2606:4700::3", "93.184.216.34"]),
    ])
    .await;
    let world = world(POLICY, &[&upstream]);
    let ask =
        async |label: &str| world.ask(&format!("{label}.wild.example.com."), RecordType::A).await;
    let six = standing(&ask("six").await);
    let more = standing(&ask("more").await);
    assert_ne!(six, more);
    assert_eq!(standing(&ask("six").await), six, "the same as long as it is remembered");
    assert_eq!(world.pins.names(six).names[0].as_str(), "six.wild.example.com");
    assert_eq!(told(&ask("both").await), ["93.184.216.34"]);
    let aaaa = world.ask("six.wild.example.com.", RecordType::AAAA).await;
    assert_eq!((aaaa.response_code, aaaa.answers.len()), (ResponseCode::NoError, 0));
    let record = world.records.drain().next().expect("a record");
    assert_eq!(record.outcome, Outcome::Allow);
    assert_eq!(record.detail, Some(format!("{six} stands for 2606:4700::1")));
    let asked = upstream.asked().into_iter().filter(|(name, _)| name.starts_with("both"));
    assert_eq!(asked.map(|(_, kind)| kind).collect::<Vec<_>>(), [RecordType::A]);
}

/// Attacks C04, F04.
#[tokio::test]
async fn an_ipv6_address_that_leads_to_a_special_one_is_not_told_in_any_disguise() {
    const DISGUISES: &[&str] = &[
        "::ffff:10.0.0.5",
        "64:ff9b::a00:5",
        "64:ff9b:1::a00:5",
        "2002:a00:5::1",
        "2001::a00:5",
        "::10.0.0.5",
        "::ffff:0:10.0.0.5",
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
        "fd00:ec2::254",
        "fe80::1",
        "::1",
        "2001:db8::1",
        "2606:4700::5efe:a00:5",
        "64:ff9b::808:404",
    ];
    for disguise in DISGUISES {
        let upstream = Upstream::start(move |query| {
            let record = address(&query.name().to_ascii(), disguise, 60);
            let wanted = record.record_type() == query.query_type();
            Said::records(wanted.then_some(record))
        })
        .await;
        let world = world(POLICY, &[&upstream]);
        let answer = world.ask("trap.wild.example.com.", RecordType::A).await;
        assert_eq!(answer.response_code, ResponseCode::NXDomain, "{disguise}");
        assert_eq!(extended(&answer), Some((17, "postern:private-address".into())), "{disguise}");
        assert!(answer.answers.is_empty(), "{disguise}");
    }
    // The control: the same way to a public one.
    let upstream = of(&[("trap", &["64:ff9b::808:808"])]).await;
    let world = world(POLICY, &[&upstream]);
    standing(&world.ask("trap.wild.example.com.", RecordType::A).await);
}

/// Attack F04. Whatever a name says, the services that clouds have at fixed addresses are not told.
#[tokio::test]
async fn no_name_leads_to_a_metadata_service() {
    const SERVICES: &[&str] =
        &["169.254.169.254", "168.63.129.16", "100.100.100.200", "169.254.170.2"];
    for service in SERVICES {
        let upstream = Upstream::start(move |query| {
            Said::records([address(&query.name().to_ascii(), service, 60)])
        })
        .await;
        let world = world("default = \"allow\"", &[&upstream]);
        let answer = world.ask("metadata.example.com.", RecordType::A).await;
        assert_eq!(extended(&answer), Some((17, "postern:private-address".into())), "{service}");
        for name in ["metadata.google.internal.", "instance-data.ec2.internal.", "metadata."] {
            let answer = world.ask(name, RecordType::A).await;
            assert!(answer.answers.is_empty(), "{name}");
        }
        assert_eq!(upstream.names(), ["metadata.example.com."]);
    }
}

#[tokio::test]
async fn without_a_way_out_by_ipv6_such_a_name_has_no_address_and_the_audit_says_why() {
    let upstream = of(&[("six", &["2606:4700::1"]), ("none", &[])]).await;
    let world = world_of(POLICY, &[&upstream], Names::default(), false);
    let answer = world.ask("six.wild.example.com.", RecordType::A).await;
    assert_eq!((answer.response_code, answer.answers.len()), (ResponseCode::NoError, 0));
    assert_eq!(extended(&answer), Some((0, "postern:egress-ip-unavailable".into())));
    let record = world.records.drain().next().expect("a record");
    assert_eq!((record.outcome, record.code), (Outcome::Fail, Some(Code::EgressIpUnavailable)));
    assert_eq!(record.detail.as_deref(), Some("it has IPv6 addresses only: 2606:4700::1"));
    let answer = world.ask("none.wild.example.com.", RecordType::A).await;
    assert_eq!((answer.response_code, extended(&answer)), (ResponseCode::NoError, None));
}

#[tokio::test]
async fn an_answer_with_some_addresses_withheld_says_so_in_the_audit() {
    let upstream = of(&[("mixed", &["10.0.0.1", "93.184.216.34", "127.0.0.1"])]).await;
    let world = world(POLICY, &[&upstream]);
    assert_eq!(told(&world.ask("mixed.wild.example.com.", RecordType::A).await), ["93.184.216.34"]);
    let record = world.records.drain().next().expect("a record");
    assert_eq!((record.outcome, record.code), (Outcome::Allow, None));
    let withheld = "withheld by private-address: 10.0.0.1, 127.0.0.1";
    assert_eq!(record.detail.as_deref(), Some(withheld));
}

fn permit(world: &World, host: &Host) -> Permit {
    let evidence = Evidence::Tls { sni: host, ech: false };
    let flow = Flow { protocol: Protocol::Tcp, port: 443, destination: None, evidence };
    match world.policy.load().judge(&flow) {
        Verdict::Pass(permit) => permit,
        refused => panic!("{refused:?}"),
    }
}

/// Floods ever new names under the allowed wildcard: how many bytes in front of the domain were heard
/// upstream.
async fn tunnel(world: &World, upstream: &Upstream, questions: usize) -> usize {
    for n in 0..questions {
        let host = format!("{}.{n:06}.wild.example.com.", "5ec2e7".repeat(9));
        let asked = query(&host, RecordType::A);
        world.guest.answer(&asked, ASKED, Transport::Udp).await.expect("below the burst");
    }
    upstream.names().iter().map(|name| name.len() - "example.com.".len()).sum()
}

/// Attack C02.
#[tokio::test]
async fn names_under_a_wildcard_carry_no_more_than_their_allowance() {
    let names = Names { burst: 2048, rate: 1 };
    let upstream = Upstream::with(&["93.184.216.34"]).await;
    let world = world_of(POLICY, &[&upstream], names, true);
    let start = Instant::now();
    let heard = tunnel(&world, &upstream, 300).await;
    let most = 2048 + usize::try_from(start.elapsed().as_secs() + 1).expect("short");
    assert!((1024..=most).contains(&heard), "{heard} bytes");
    let over = format!("{}.wild.example.com.", "more.".repeat(20).trim_end_matches('.'));
    let over = world.ask(&over, RecordType::A).await;
    assert_eq!(over.response_code, ResponseCode::ServFail);
    assert_eq!(extended(&over), Some((0, "postern:limit".into())));
    // What is listed by name, and what is known, goes on.
    assert_eq!(told(&world.ask("api.allowed.example.", RecordType::A).await), ["93.184.216.34"]);
    let known = upstream.names()[0].clone();
    assert_eq!(told(&world.ask(&known, RecordType::A).await), ["93.184.216.34"]);
    drop(world.guest);
    let limits = world.records.drain().filter(|record| record.code == Some(Code::Limit));
    let refused: u64 = limits.map(|record| record.count.unwrap_or(1)).sum();
    assert!(refused > 200, "{refused} counted");
}

/// Attack C02. After the burst, the rate: the figure that the manual promises.
#[tokio::test]
async fn a_tunnel_under_a_wildcard_goes_on_at_its_rate() {
    let names = Names { burst: 1024, rate: 100 };
    let upstream = Upstream::with(&["93.184.216.34"]).await;
    let world = world_of(POLICY, &[&upstream], names, true);
    let first = tunnel(&world, &upstream, 100).await;
    let start = Instant::now();
    let mut n = 0;
    while start.elapsed() < Duration::from_secs(3) {
        n += 1;
        let asked = query(&format!("{}.{n:06}.wild.example.com.", "beef".repeat(8)), RecordType::A);
        world.guest.answer(&asked, ASKED, Transport::Udp).await;
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let heard: usize = upstream.names().iter().map(|name| name.len() - "example.com.".len()).sum();
    let most = 100.0 * start.elapsed().as_secs_f64() + 110.0;
    let after = u32::try_from(heard - first).expect("little");
    assert!((100.0..=most).contains(&f64::from(after)), "{after} bytes, at most {most}");
}

/// Attack C02. Names said in TLS or HTTP are resolved to dial them: it is the same allowance.
#[tokio::test]
async fn connections_pay_for_names_from_the_allowance_of_questions() {
    let names = Names { burst: 1024, rate: 1 };
    let upstream = Upstream::with(&["93.184.216.34"]).await;
    let world = world_of(POLICY, &[&upstream], names, true);
    let asker = Asker::new(resolver(&[&upstream]), names);
    let mut refused = 0;
    for n in 0..100 {
        let host = Host::parse(&format!("{}.{n}.wild.example.com", "x".repeat(50))).expect("host");
        match asker.addresses(&permit(&world, &host), &host, Family::V4).await {
            Ok(_) => {}
            Err(Error::OverAllowance { .. }) => refused += 1,
            Err(error) => panic!("{error}"),
        }
    }
    assert!(refused > 70, "{refused}");
    assert_eq!(upstream.asked().len(), 100 - refused);
    let listed = Host::parse("api.allowed.example").expect("host");
    asker.addresses(&permit(&world, &listed), &listed, Family::V4).await.expect("costs nothing");
    let clone = asker.clone();
    let new = Host::parse(&format!("{}.wild.example.com", "y".repeat(60))).expect("host");
    let over = clone.addresses(&permit(&world, &new), &new, Family::V4).await;
    assert!(matches!(over, Err(Error::OverAllowance { .. })), "a clone has the same allowance");
}

/// Attack C16. The bound on lookups under way is one for questions and connections: a question over it
/// fails at once, a connection waits for its turn as long as a lookup may take.
#[tokio::test]
async fn connections_and_questions_of_a_guest_share_one_bound_on_lookups() {
    let upstream = Upstream::start(|query| match query.name().to_ascii() {
        name if name.starts_with("dead") => Said::silence(),
        name => Said::records([address(&name, "93.184.216.34", 60)]),
    })
    .await;
    let world = world(POLICY, &[&upstream]);
    let look_up = |label: &str| {
        let host = Host::parse(&format!("{label}.wild.example.com")).expect("host");
        let (asker, permit) = (world.asker.clone(), permit(&world, &host));
        async move { asker.addresses(&permit, &host, Family::V4).await }
    };
    let asked = || upstream.names().into_iter().collect::<HashSet<_>>().len();
    let known = world.ask("known.wild.example.com.", RecordType::A).await;
    assert_eq!(told(&known), ["93.184.216.34"], "the control");

    let mut dials: JoinSet<_> = (0..63).map(|n| look_up(&format!("dead{n}"))).collect();
    while asked() < 64 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(told(&world.ask("last.wild.example.com.", RecordType::A).await).len(), 1);
    dials.extend((63..300).map(|n| look_up(&format!("dead{n}"))));
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(asked(), 64 + 2, "known, last, and 64 that wait");
    let over = world.ask("over.wild.example.com.", RecordType::A).await;
    assert_eq!(over.response_code, ResponseCode::ServFail);
    assert_eq!(extended(&over), Some((0, "postern:limit".into())));
    assert_eq!(told(&world.ask("known.wild.example.com.", RecordType::A).await).len(), 1);
    assert!(!upstream.names().iter().any(|name| name.starts_with("over")));

    let ended = dials.join_all().await;
    let waited = ended.iter().filter(|end| matches!(end, Err(Error::TooMany { .. }))).count();
    assert!(waited >= 300 - 2 * 64, "{waited} got no turn in time");
    let dials: JoinSet<_> = (0..100).map(|n| look_up(&format!("alive{n}"))).collect();
    assert!(dials.join_all().await.iter().all(Result::is_ok), "each gets its turn");
}

/// Attack C06. A chain that does not end, or is too long, leads nowhere, and in bounded time.
#[tokio::test]
async fn chains_of_aliases_that_loop_or_do_not_end_lead_nowhere() {
    let turns = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counted = turns.clone();
    let upstream = Upstream::start(move |query| {
        let owner = query.name().to_ascii();
        let turn = counted.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        match owner.split('.').next() {
            Some("self") => Said::records([alias(&owner, &owner, 60)]),
            Some("one" | "two") => {
                let other = if owner.starts_with("one") { "two" } else { "one" };
                let other = format!("{other}.wild.example.com.");
                Said::records([alias(&owner, &other, 60), alias(&other, &owner, 60)])
            }
            _ => Said::records([alias(&owner, &format!("n{turn}.far.example."), 60)]),
        }
    })
    .await;
    let world = world(POLICY, &[&upstream]);
    for label in ["self", "one", "endless"] {
        let start = Instant::now();
        let answer = world.ask(&format!("{label}.wild.example.com."), RecordType::A).await;
        assert!(answer.answers.is_empty(), "{label}: {answer}");
        assert!(start.elapsed() < Duration::from_secs(20), "{label}: {:?}", start.elapsed());
    }
    let asked = upstream.asked().len();
    assert!(asked < 150, "{asked} questions");
}
