//! What a guest may learn, and what it makes the world hear.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use dns::Transport;
use hickory_proto::op::{Message, Query, ResponseCode};
use hickory_proto::rr::RecordType;
use policy::Code;
use policy::audit::Outcome;

use crate::upstream::{Said, Upstream, address, alias, name};
use crate::world::{ASKED, POLICY, compiled, extended, query, told, world};

fn ip(text: &str) -> IpAddr {
    text.parse().expect("address")
}

/// Attacks C01, P13.
#[tokio::test]
async fn a_denied_question_of_any_type_asks_nobody_anything() {
    let upstream = Upstream::with(&["93.184.216.34"]).await;
    let world = world(POLICY, &[&upstream]);
    for host in ["secret-data.evil.example.", "x.api.allowed.example.", "a.b.c.d.evil.test."] {
        for record_type in
            [RecordType::A, RecordType::AAAA, RecordType::TXT, RecordType::HTTPS, RecordType::ANY]
        {
            let answer = world.ask(host, record_type).await;
            assert_eq!(answer.response_code, ResponseCode::NXDomain, "{host} {record_type}");
            assert_eq!(extended(&answer), Some((17, "postern:no-rule".into())));
            assert_eq!((answer.answers.len(), answer.authorities.len()), (0, 1));
        }
    }
    // The control: the same path does ask for what is allowed.
    let answer = world.ask("api.allowed.example.", RecordType::A).await;
    assert_eq!(told(&answer), ["93.184.216.34"]);
    assert_eq!(upstream.asked(), [("api.allowed.example.".into(), RecordType::A)]);
}

/// Attack C17.
#[tokio::test]
async fn types_that_could_carry_text_are_refused_and_the_rest_is_empty_without_asking() {
    let upstream = Upstream::with(&["93.184.216.34"]).await;
    let world = world(POLICY, &[&upstream]);
    for record_type in [RecordType::AAAA, RecordType::HTTPS, RecordType::SVCB, RecordType::SRV] {
        let answer = world.ask("api.allowed.example.", record_type).await;
        assert_eq!((answer.response_code, answer.answers.len()), (ResponseCode::NoError, 0));
        assert_eq!(answer.authorities.len(), 1, "NODATA can be remembered");
    }
    for record_type in [
        RecordType::TXT,
        RecordType::NULL,
        RecordType::ANY,
        RecordType::AXFR,
        RecordType::CNAME,
        RecordType::MX,
    ] {
        let answer = world.ask("api.allowed.example.", record_type).await;
        assert_eq!(answer.response_code, ResponseCode::Refused, "{record_type}");
        assert_eq!(extended(&answer), Some((21, "postern:protocol".into())));
    }
    assert_eq!(upstream.asked(), []);
}

/// Attacks C17, C19.
#[tokio::test]
async fn local_names_are_never_forwarded_whatever_the_policy() {
    let upstream = Upstream::with(&["93.184.216.34"]).await;
    let world = world("default = \"allow\"", &[&upstream]);
    for host in [
        "localhost.",
        "db.",
        "printer.local.",
        "metadata.google.internal.",
        "api.service.internal.",
        "1.0.168.192.in-addr.arpa.",
        "4.4.8.8.in-addr.arpa.",
    ] {
        for record_type in [RecordType::A, RecordType::PTR] {
            let answer = world.ask(host, record_type).await;
            assert_eq!(answer.response_code, ResponseCode::NXDomain, "{host}");
        }
    }
    assert_eq!(upstream.asked(), []);
    assert_eq!(told(&world.ask("any.example.com.", RecordType::A).await), ["93.184.216.34"]);
}

#[tokio::test]
async fn special_addresses_are_filtered_and_a_name_that_has_no_other_does_not_exist() {
    let upstream = Upstream::start(|query| {
        let owner = query.name().to_ascii();
        let records = |of: &[&str]| Said::records(of.iter().map(|text| address(&owner, text, 60)));
        if owner.starts_with("mixed") {
            records(&["10.0.0.1", "93.184.216.34", "169.254.169.254", "127.0.0.1"])
        } else {
            records(&["10.0.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "8.8.4.4"])
        }
    })
    .await;
    let world = world(POLICY, &[&upstream]);
    assert_eq!(told(&world.ask("mixed.wild.example.com.", RecordType::A).await), ["93.184.216.34"]);
    let answer = world.ask("private.wild.example.com.", RecordType::A).await;
    assert_eq!(answer.response_code, ResponseCode::NXDomain);
    assert_eq!(extended(&answer), Some((17, "postern:private-address".into())));
    for private in ["10.0.0.1", "169.254.169.254", "127.0.0.1", "8.8.4.4"] {
        assert_eq!(
            world.pins.names(ip(private)).names,
            [],
            "{private} was not told, so not pinned"
        );
    }
}

/// Attack C05.
#[tokio::test]
async fn a_name_rebound_to_a_private_address_is_not_told() {
    let rebound = Arc::new(AtomicBool::new(false));
    let is_rebound = rebound.clone();
    let upstream = Upstream::start(move |query| {
        let to = if is_rebound.load(Ordering::SeqCst) { "10.1.2.3" } else { "93.184.216.34" };
        Said::records([address(&query.name().to_ascii(), to, 0)])
    })
    .await;
    let world = world(POLICY, &[&upstream]);
    assert_eq!(told(&world.ask("r.wild.example.com.", RecordType::A).await), ["93.184.216.34"]);
    rebound.store(true, Ordering::SeqCst);
    let deadline = Instant::now() + Duration::from_secs(10);
    let refusal = loop {
        let answer = world.ask("r.wild.example.com.", RecordType::A).await;
        if answer.response_code == ResponseCode::NXDomain {
            break answer;
        }
        assert_eq!(told(&answer), ["93.184.216.34"]);
        assert!(Instant::now() < deadline, "the TTL of a second never ran out");
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert_eq!(extended(&refusal), Some((17, "postern:private-address".into())));
    assert_eq!(upstream.asked().len(), 2);
}

/// Attack C06.
#[tokio::test]
async fn a_chain_of_aliases_is_told_and_pinned_under_the_questions_name() {
    let upstream = Upstream::start(|query| {
        let owner = query.name().to_ascii().to_lowercase();
        match owner.as_str() {
            // The target's address comes from a second question, as from a plain forwarder.
            "split.wild.example.com." => {
                Said::records([alias(&owner, "cdn.elsewhere.example.", 50)])
            }
            "cdn.elsewhere.example." => Said::records([address(&owner, "93.184.216.34", 60)]),
            _ => Said {
                additionals: vec![address("other.example.", "93.184.216.99", 60)],
                ..Said::records([
                    address("other.example.", "93.184.216.98", 60),
                    alias(&owner, "cdn.elsewhere.example.", 50),
                    address("cdn.elsewhere.example.", "93.184.216.35", 60),
                ])
            },
        }
    })
    .await;
    let world = world(POLICY, &[&upstream]);
    for (host, expected) in [("split", "93.184.216.34"), ("whole", "93.184.216.35")] {
        let host = format!("{host}.wild.example.com");
        let answer = world.ask(&format!("{host}."), RecordType::A).await;
        assert_eq!(told(&answer), [expected]);
        assert!(answer.answers[0].ttl <= 50, "the lowest TTL of the chain");
        assert_eq!(world.pins.names(ip(expected)).names[0].as_str(), host);
    }
    assert_eq!(world.pins.names(ip("93.184.216.98")).names, []);
}

/// Promise 22. Answers are kept for all sandboxes: how old one is tells when another has asked.
#[tokio::test]
async fn what_is_told_of_an_answer_does_not_say_how_old_it_is() {
    let upstream = Upstream::start(|query| {
        let name = query.name().to_ascii();
        let ttl = if name.starts_with("long") { 300 } else { 40 };
        Said::records([address(&name, "93.184.216.34", ttl)])
    })
    .await;
    let world = world(POLICY, &[&upstream]);
    let ttl = async |name: &str| world.ask(name, RecordType::A).await.answers[0].ttl;
    for (name, expected) in [("long.wild.example.com.", 60), ("short.wild.example.com.", 40)] {
        assert_eq!(ttl(name).await, expected, "{name}");
    }
    tokio::time::sleep(Duration::from_millis(2_100)).await;
    for (name, expected) in [("long.wild.example.com.", 60), ("short.wild.example.com.", 40)] {
        assert_eq!(ttl(name).await, expected, "{name}, two seconds later");
    }
    assert_eq!(upstream.names().len(), 2, "control: the second answers were kept ones");
}

/// Attack C15.
#[tokio::test]
async fn absence_and_failure_of_an_allowed_name_are_told_apart() {
    let upstream = Upstream::start(|query| match query.name().to_ascii().split('.').next() {
        Some("absent") => Said::code(ResponseCode::NXDomain),
        Some("empty") => Said::default(),
        Some("silent") => Said::silence(),
        _ => Said::code(ResponseCode::ServFail),
    })
    .await;
    let world = world(POLICY, &[&upstream]);
    for (label, code, reason) in [
        ("absent", ResponseCode::NXDomain, None),
        ("empty", ResponseCode::NoError, None),
        ("broken", ResponseCode::ServFail, Some((23, "postern:unresolvable".into()))),
        ("silent", ResponseCode::ServFail, Some((22, "postern:unresolvable".into()))),
    ] {
        let start = Instant::now();
        let answer = world.ask(&format!("{label}.wild.example.com."), RecordType::A).await;
        assert_eq!((answer.response_code, extended(&answer)), (code, reason), "{label}");
        assert!(start.elapsed() < Duration::from_secs(8), "{label}: bounded by the timeout");
    }
    let records: Vec<_> = world.records.drain().collect();
    assert_eq!(records.len(), 4);
    assert!(
        records.iter().all(
            |record| (record.outcome, record.code) == (Outcome::Fail, Some(Code::Unresolvable))
        )
    );
}

/// Attack C20.
#[tokio::test]
async fn an_answer_too_long_for_a_datagram_is_cut_and_whole_over_tcp() {
    let upstream = Upstream::start(|query| {
        let owner = query.name().to_ascii();
        Said::records((1..=30).map(|n| address(&owner, &format!("93.184.216.{n}"), 60)))
    })
    .await;
    let world = world(POLICY, &[&upstream]);
    let mut plain = Message::query();
    plain.add_query(Query::query(name("api.allowed.example."), RecordType::A));
    let plain = plain.to_vec().expect("encodable");
    let udp = world.guest.answer(&plain, ASKED, Transport::Udp).await.expect("answer");
    let message = Message::from_vec(&udp).expect("readable");
    assert!(udp.len() <= 512 && message.metadata.truncation && message.answers.is_empty());
    let tcp = world.guest.answer(&plain, ASKED, Transport::Tcp).await.expect("answer");
    let message = Message::from_vec(&tcp).expect("readable");
    assert!(!message.metadata.truncation);
    assert_eq!(told(&message).len(), 30);
    assert_eq!(told(&world.ask("api.allowed.example.", RecordType::A).await).len(), 30, "1232 fit");
    assert_eq!(upstream.asked().len(), 1, "all of one lookup");
}

#[tokio::test]
async fn questions_are_answered_in_the_spelling_of_every_common_stub() {
    let upstream = Upstream::with(&["93.184.216.34"]).await;
    let world = world(POLICY, &[&upstream]);
    // glibc (RD), glibc with trust-ad (RD, AD), 0x20 stubs, and EDNS with DO, a cookie and padding.
    let question = b"\x03api\x07allowed\x07example\x00\x00\x01\x00\x01";
    let mixed = b"\x03aPI\x07alLOWed\x07ExAmPlE\x00\x00\x01\x00\x01";
    let opt = b"\x00\x00\x29\x05\xc0\x00\x00\x80\x00\x00\x14\x00\x0a\x00\x08\x01\x02\x03\x04\x05\x06\x07\x08\x00\x0c\x00\x04\x00\x00\x00\x00";
    for (flags, question, opt) in [
        ([0x01, 0x00], question, &[][..]),
        ([0x01, 0x20], question, &[]),
        ([0x01, 0x00], mixed, &[]),
        ([0x01, 0x20], question, opt),
        ([0x00, 0x10], mixed, opt),
    ] {
        let counts = [0, 1, 0, 0, 0, 0, 0, u8::from(!opt.is_empty())];
        let query = [&[0xab, 0xcd], &flags[..], &counts, question, opt].concat();
        let answer = world.guest.answer(&query, ASKED, Transport::Udp).await.expect("answer");
        assert_eq!(answer[12..12 + question.len()], question[..], "the question as it came");
        let message = Message::from_vec(&answer).expect("readable");
        assert_eq!(told(&message), ["93.184.216.34"]);
        assert_eq!(message.metadata.id, 0xabcd);
        assert_eq!(message.metadata.recursion_desired, flags[0] & 1 == 1);
        assert_eq!(message.edns.is_some(), !opt.is_empty());
    }
    assert_eq!(upstream.asked().len(), 1, "one name, however it is spelt");
}

#[tokio::test]
async fn a_policy_tightened_while_an_upstream_is_asked_is_obeyed() {
    let upstream = Upstream::start(|query| Said {
        delay: Duration::from_millis(300),
        ..Said::records([address(&query.name().to_ascii(), "93.184.216.34", 60)])
    })
    .await;
    let world = world(POLICY, &[&upstream]);
    let tighten = async {
        while upstream.asked().is_empty() {
            tokio::task::yield_now().await;
        }
        world.policy.store(compiled("default = \"deny\"", 6));
    };
    let (answer, ()) = tokio::join!(world.ask("api.allowed.example.", RecordType::A), tighten);
    assert_eq!(extended(&answer), Some((17, "postern:no-rule".into())));
    assert_eq!(world.pins.names(ip("93.184.216.34")).names, []);
}

/// Attacks C11, C16.
#[tokio::test]
async fn a_flood_is_dropped_before_it_is_read_and_its_size_recorded() {
    let upstream = Upstream::with(&["93.184.216.34"]).await;
    let world = world(POLICY, &[&upstream]);
    let query = query("x.evil.example.", RecordType::A);
    let mut answered = 0;
    for _ in 0..2000 {
        answered += u64::from(world.guest.answer(&query, ASKED, Transport::Udp).await.is_some());
    }
    assert!((400..2000).contains(&answered), "{answered}");
    drop(world.guest);
    let records: Vec<_> = world.records.drain().collect();
    assert!(records.len() < 1000, "{}", records.len());
    let sum = |code| {
        let of = records.iter().filter(|record| record.code == Some(code));
        of.map(|record| record.count.unwrap_or(1)).sum::<u64>()
    };
    assert_eq!((sum(Code::NoRule), sum(Code::Limit)), (answered, 2000 - answered));
    assert_eq!(upstream.asked(), []);
}

/// Attack C16.
#[tokio::test]
async fn a_guest_has_a_bounded_number_of_lookups_under_way() {
    let upstream = Upstream::start(|query| Said {
        delay: Duration::from_millis(500),
        ..Said::records([address(&query.name().to_ascii(), "93.184.216.34", 60)])
    })
    .await;
    let world = world(POLICY, &[&upstream]);
    let names: Vec<_> = (0..70).map(|n| format!("n{n}.wild.example.com.")).collect();
    let asks = names.iter().map(|name| world.ask(name, RecordType::A));
    let answers = futures_util::future::join_all(asks).await;
    let limit = Some((0, "postern:limit".into()));
    let (over, within): (Vec<_>, Vec<_>) =
        answers.iter().partition(|answer| extended(answer) == limit);
    assert_eq!((within.len(), over.len()), (64, 6));
    assert!(over.iter().all(|answer| answer.response_code == ResponseCode::ServFail));
    assert!(within.iter().all(|answer| told(answer) == ["93.184.216.34"]));
    assert_eq!(told(&world.ask("n69.wild.example.com.", RecordType::A).await).len(), 1, "later");
}

#[tokio::test]
async fn every_decision_is_one_record_that_says_what_who_and_why() {
    let upstream = Upstream::with(&["93.184.216.34"]).await;
    let world = world(POLICY, &[&upstream]);
    world.ask("API.allowed.example.", RecordType::A).await;
    world.ask("Gist.evil.example.", RecordType::TXT).await;
    let records: Vec<_> = world.records.drain().collect();
    let [allowed, denied] = &records[..] else { panic!("{records:?}") };
    assert_eq!((allowed.outcome, allowed.code, allowed.status), (Outcome::Allow, None, Some(0)));
    assert_eq!(allowed.name.as_deref(), Some("api.allowed.example"));
    assert_eq!(allowed.layer.as_deref(), Some("sandbox"));
    assert!(allowed.rule.is_some() && allowed.micros.is_some());
    assert_eq!(
        (denied.outcome, denied.code, denied.status),
        (Outcome::Deny, Some(Code::NoRule), Some(3))
    );
    assert_eq!(
        (denied.name.as_deref(), denied.path.as_deref()),
        (Some("gist.evil.example"), Some("TXT"))
    );
    for record in &records {
        assert_eq!(record.sandbox.as_ref().map(|name| name.as_str()), Some("demo"));
        assert_eq!((record.incarnation, record.destination), (Some(3), Some(ASKED)));
        assert_eq!(record.revision, Some(policy::Revision(5)));
    }
}
