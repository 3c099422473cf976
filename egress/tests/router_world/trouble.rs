//! What goes wrong around a connection: names that lead inside, an egress address that is gone, a
//! guest that is slow, a daemon that is new.

use std::io::ErrorKind;
use std::time::{Duration, Instant};

use policy::Code;
use policy::audit::{Kind, Outcome};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::peers::{Tls, count, sink, soon};
use crate::place::{HOST, INNER, ORIGIN, SINK, run};

const RULES: &str = r#"
[[rule]]
allow = [".example.com"]
"#;

#[test]
fn a_name_that_leads_inside_is_not_dialled() {
    let wide = r#"
[[rule]]
allow = [".example.com"]
[[rule]]
allow = ["93.184.216.9/32"]
ports = [443]
"#;
    for (rules, name) in [(RULES, "inner"), (RULES, "own"), (wide, "own")] {
        run(rules, async |place| {
            let tls = Tls::new(&["inner.example.com", "own.example.com", "www.example.com"]);
            let inside = sink(place.origin(INNER, 443));
            let host = sink(place.host_listener(HOST, 443));
            let stream = soon(place.dial(SINK, 443)).await.expect("connected");
            let name = format!("{name}.example.com");
            let refused = soon(tls.client(stream, &name)).await.expect_err("refused");
            assert!(refused.to_string().contains("AccessDenied"), "{refused}");
            assert_eq!((count(&inside), count(&host)), (0, 0), "{name}");
            let deny = place.record(|r| r.kind == Kind::Connection).await;
            assert_eq!((deny.outcome, deny.code), (Outcome::Deny, Some(Code::PrivateAddress)));

            let origin = tls.echo(place.origin(ORIGIN, 443));
            let stream = soon(place.dial(SINK, 443)).await.expect("connected");
            soon(tls.client(stream, "www.example.com")).await.expect("the control");
            assert_eq!(count(&origin), 1);
        });
    }
}

#[test]
fn without_its_egress_address_nothing_leaves() {
    run(RULES, async |place| {
        let tls = Tls::new(&["www.example.com"]);
        let origin = tls.echo(place.origin(ORIGIN, 443));
        let stream = soon(place.dial(ORIGIN, 443)).await.expect("connected");
        soon(tls.client(stream, "www.example.com")).await.expect("the control");
        place.lose_egress();
        let stream = soon(place.dial(ORIGIN, 443)).await.expect("connected");
        soon(tls.client(stream, "www.example.com")).await.expect_err("refused");
        assert_eq!(count(&origin), 1);
        let fail = place.record(|r| r.outcome == Outcome::Fail).await;
        assert_eq!(fail.code, Some(Code::EgressIpUnavailable));
    });
}

#[test]
fn half_a_hello_is_reset_when_its_time_is_over() {
    run(RULES, async |place| {
        let mut stream = soon(place.dial(ORIGIN, 443)).await.expect("connected");
        let begun = Instant::now();
        stream.write_all(&[0x16, 0x03, 0x01, 0x02, 0x00, 0x01]).await.expect("sent");
        let error = soon(stream.read_u8()).await.expect_err("reset");
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        assert!(begun.elapsed() > Duration::from_secs(2), "the limit of this place is 3 s");
        place.record(|r| r.code == Some(Code::Undecidable)).await;
    });
}

#[test]
fn the_next_daemon_takes_over_a_tap_that_is_up() {
    run(RULES, async |place| {
        let tls = Tls::new(&["www.example.com"]);
        let origin = tls.echo(place.origin(ORIGIN, 443));
        let place = place.restart().await;
        let stream = soon(place.dial(ORIGIN, 443)).await.expect("connected");
        soon(tls.client(stream, "www.example.com")).await.expect("a handshake");
        assert_eq!(count(&origin), 1);
        assert_eq!(place.router.present().await.expect("asked"), [place.slot]);
        let (told, meant) = (place.nft(), place.router.ruleset());
        assert!(told.contains("in_pt1") && meant.contains("in_pt1"));
    });
}

#[test]
fn a_second_daemon_in_the_same_world_is_refused_and_changes_nothing() {
    run(RULES, async |place| {
        let before = place.nft();
        let refused = place.start.try_router().await.expect_err("a second one");
        assert!(matches!(refused, egress::Error::Taken(_)), "{refused}");
        assert_eq!(place.nft(), before);
    });
}
