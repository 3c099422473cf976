//! How upstreams are asked: rarely, in order, and never for longer than said.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dns::{Error, Family};
use hickory_proto::op::ResponseCode;
use policy::Host;

use crate::upstream::{Said, Upstream, address};
use crate::world::resolver;

fn host(text: &str) -> Host {
    Host::parse(text).expect("host")
}

/// Attack C16.
#[tokio::test]
async fn a_hundred_equal_lookups_at_once_are_one_question() {
    let upstream = Upstream::start(|query| Said {
        delay: Duration::from_millis(50),
        ..Said::records([address(&query.name().to_ascii(), "93.184.216.34", 60)])
    })
    .await;
    let (resolver, name) = (resolver(&[&upstream]), host("busy.example.com"));
    let lookups = (0..100).map(|_| resolver.addresses(&name, Family::V4));
    for answer in futures_util::future::join_all(lookups).await {
        assert_eq!(
            answer.expect("answer").addresses,
            ["93.184.216.34".parse::<std::net::IpAddr>().expect("ip")]
        );
    }
    assert_eq!(upstream.names(), ["busy.example.com."]);
}

#[tokio::test]
async fn a_lookup_outlives_the_caller_who_began_it() {
    let upstream = Upstream::start(|query| Said {
        delay: Duration::from_millis(100),
        ..Said::records([address(&query.name().to_ascii(), "93.184.216.34", 60)])
    })
    .await;
    let (resolver, name) = (Arc::new(resolver(&[&upstream])), host("left.example.com"));
    let (first, second) = (resolver.clone(), resolver.clone());
    let (one, two) = (name.clone(), name);
    let first = tokio::spawn(async move { first.addresses(&one, Family::V4).await });
    while upstream.asked().is_empty() {
        tokio::task::yield_now().await;
    }
    let second = tokio::spawn(async move { second.addresses(&two, Family::V4).await });
    tokio::task::yield_now().await;
    first.abort();
    assert!(second.await.expect("not aborted").is_ok());
}

/// Attack C15.
#[tokio::test]
async fn a_dead_first_upstream_costs_a_bounded_time_once() {
    let dead = Upstream::start(|_| Said::silence()).await;
    let alive = Upstream::with(&["93.184.216.34"]).await;
    let resolver = resolver(&[&dead, &alive]);
    let start = Instant::now();
    assert!(resolver.addresses(&host("one.example.com"), Family::V4).await.is_ok());
    assert!(start.elapsed() < Duration::from_secs(8), "{:?}", start.elapsed());
    assert!(!dead.asked().is_empty(), "the first is the first");
    let before = dead.asked().len();
    assert!(resolver.addresses(&host("two.example.com"), Family::V4).await.is_ok());
    assert_eq!(dead.asked().len(), before, "remembered as dead");
    assert_eq!(alive.names(), ["one.example.com.", "two.example.com."]);
}

#[tokio::test]
async fn an_upstream_that_answers_with_an_error_is_passed_over_but_not_set_aside() {
    for code in [ResponseCode::ServFail, ResponseCode::Refused] {
        let broken = Upstream::start(move |_| Said::code(code)).await;
        let alive = Upstream::with(&["93.184.216.34"]).await;
        let resolver = resolver(&[&broken, &alive]);
        for name in ["one.example.com", "two.example.com"] {
            assert!(resolver.addresses(&host(name), Family::V4).await.is_ok(), "{code}");
        }
        assert_eq!(broken.asked().len(), 2, "{code}");
    }
}

#[tokio::test]
async fn a_name_that_gets_no_answer_does_not_set_aside_an_upstream_that_answers_others() {
    let first = Upstream::start(|query| match query.name().to_ascii().starts_with("dead") {
        true => Said::silence(),
        false => Said::records([address(&query.name().to_ascii(), "93.184.216.34", 60)]),
    })
    .await;
    let second = Upstream::with(&["93.184.216.35"]).await;
    let resolver = resolver(&[&first, &second]);
    let (dead, one) = (host("dead.example.com"), host("one.example.com"));
    let others = async {
        while first.asked().is_empty() {
            tokio::task::yield_now().await;
        }
        resolver.addresses(&one, Family::V4).await.expect("answer")
    };
    let (dead, _) = tokio::join!(resolver.addresses(&dead, Family::V4), others);
    assert!(dead.is_ok(), "the second upstream knows it");
    let two = resolver.addresses(&host("two.example.com"), Family::V4).await.expect("answer");
    assert_eq!(two.addresses, ["93.184.216.34".parse::<std::net::IpAddr>().expect("address")]);
}

#[tokio::test]
async fn silence_everywhere_ends_at_the_timeout_and_is_not_asked_again_at_once() {
    let dead = Upstream::start(|_| Said::silence()).await;
    let resolver = resolver(&[&dead]);
    let start = Instant::now();
    let error =
        resolver.addresses(&host("one.example.com"), Family::V4).await.expect_err("silence");
    assert!(matches!(error, Error::TimedOut { .. }), "{error:?}");
    assert!(start.elapsed() < Duration::from_secs(8), "{:?}", start.elapsed());
    let before = dead.asked().len();
    assert!(resolver.addresses(&host("one.example.com"), Family::V4).await.is_err());
    assert_eq!(dead.asked().len(), before);
}

#[tokio::test]
async fn absence_is_remembered_and_told_apart() {
    let upstream = Upstream::start(|query| match query.name().to_ascii().starts_with("absent") {
        true => Said::code(ResponseCode::NXDomain),
        false => Said::default(),
    })
    .await;
    let resolver = resolver(&[&upstream]);
    for _ in 0..3 {
        let absent = resolver.addresses(&host("absent_1.example.com"), Family::V4).await;
        assert!(matches!(absent, Err(Error::NoSuchName { .. })), "{absent:?}");
        let empty = resolver.addresses(&host("empty.example.com"), Family::V6).await;
        assert!(matches!(empty, Err(Error::NoAddresses { family: Family::V6, .. })), "{empty:?}");
    }
    assert_eq!(upstream.asked().len(), 2);
}

/// Attack C14.
#[tokio::test]
async fn times_to_live_are_kept_within_a_second_and_five_minutes() {
    let upstream = Upstream::start(|query| {
        let owner = query.name().to_ascii();
        let ttl = if owner.starts_with("zero") { 0 } else { u32::MAX >> 1 };
        Said::records([address(&owner, "2001:4860:4860::8888", ttl)])
    })
    .await;
    let resolver = resolver(&[&upstream]);
    let ttl = async |name| resolver.addresses(&host(name), Family::V6).await.expect("answer").ttl();
    let zero = ttl("zero.example.com").await;
    assert!(zero <= Duration::from_secs(1) && zero > Duration::from_millis(500), "{zero:?}");
    let long = ttl("long.example.com").await;
    assert!(long <= Duration::from_secs(300) && long > Duration::from_secs(290), "{long:?}");
    let deadline = Instant::now() + Duration::from_secs(10);
    while upstream.asked().len() < 3 {
        ttl("zero.example.com").await;
        assert!(Instant::now() < deadline, "an answer outlived its TTL");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Attack C20.
#[tokio::test]
async fn an_upstreams_truncated_answer_is_asked_for_again_over_tcp() {
    let upstream = Upstream::start(|query| {
        let owner = query.name().to_ascii();
        let records = (1..=90).map(|n| address(&owner, &format!("93.184.216.{n}"), 60));
        Said { cut: true, ..Said::records(records) }
    })
    .await;
    let answer = resolver(&[&upstream]).addresses(&host("long.example.com"), Family::V4).await;
    assert_eq!(answer.expect("answer").addresses.len(), 32, "and bounded");
    assert_eq!(upstream.asked().len(), 2);
}

#[tokio::test]
async fn an_upstream_that_is_not_there_is_passed_over() {
    let gone = Upstream::with(&[]).await;
    let alive = Upstream::with(&["93.184.216.34"]).await;
    let resolver = resolver(&[&gone, &alive]);
    drop(gone);
    tokio::task::yield_now().await;
    assert!(resolver.addresses(&host("one.example.com"), Family::V4).await.is_ok());
}
