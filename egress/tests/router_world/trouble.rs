//! What goes wrong around a connection: names that lead inside, an egress address that is gone, a
//! guest that is slow, a daemon that is new.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::time::{Duration, Instant};

use egress::Limits;
use policy::Code;
use policy::audit::{Kind, Outcome};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use crate::peers::{PATIENCE, Peers, Tls, count, serve, sink, soon, until};
use crate::place::{
    EGRESS, HOST, INNER, ORIGIN, Place, SECOND, SINK, limits, run, run_brief, run_within,
};
use crate::requests::exchange;

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

/// A connection that its holder does not let go of delays the end of its own slot and no other's.
#[test]
fn a_slot_that_is_slow_to_end_holds_up_no_other() {
    run(RULES, async |place| {
        let other = policy::Slot::new(2).expect("in range");
        place.make_tap(other);
        let listener = place.guest_listener(1007);
        let (ours, theirs) =
            tokio::join!(soon(place.router.connect(place.slot, 1007)), soon(listener.accept()));
        let (held, _theirs) = (ours.expect("ours"), theirs.expect("theirs"));
        let ending = tokio::spawn({
            let (router, slot) = (place.router.clone(), place.slot);
            async move { router.detach(slot).await }
        });
        while place.router.meter(place.slot).is_some() {
            tokio::task::yield_now().await;
        }
        place.attach_at(other).await.expect("attached");
        place.router.detach(other).await.expect("detached");
        assert!(!ending.is_finished(), "the control: the first one still waits");
        soon(ending).await.expect("no panic").expect("detached all the same");
        drop(held);
        soon(place.attach()).await.expect("attached again");
    });
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

/// A quiet connection is not ended by it: our probes of it are answered.
#[test]
fn an_open_connection_whose_egress_address_is_gone_ends_when_nothing_is_acknowledged() {
    let rules = "[[rule]]\nallow = [\"93.184.216.34\"]\nports = [2525]\n";
    let (user_timeout, idle) = (Duration::from_secs(1), Duration::from_secs(60));
    run_within(Limits { user_timeout, idle, ..limits() }, rules, async |place| {
        serve(place.origin(ORIGIN, 2525), |mut stream| async move {
            let (mut from, mut to) = stream.split();
            let _ = tokio::io::copy(&mut from, &mut to).await;
        });
        let mut stream = soon(place.dial(ORIGIN, 2525)).await.expect("connected");
        for _ in 0..2 {
            stream.write_all(b"\0").await.expect("sent");
            assert_eq!(soon(stream.read_u8()).await.expect("its echo"), 0);
            tokio::time::sleep(3 * user_timeout).await;
        }
        place.lose_egress();
        stream.write_all(b"\0").await.expect("taken by the router");
        let ended = soon(stream.read_u8()).await;
        assert_eq!(ended.expect_err("reset").kind(), ErrorKind::ConnectionReset);
        let closed = place.record(|r| r.outcome == Outcome::Closed).await;
        assert_eq!(closed.detail.as_deref(), Some("reset by the far side"));
    });
}

#[test]
fn half_a_hello_is_reset_when_its_time_is_over() {
    run_brief(RULES, async |place| {
        let mut stream = soon(place.dial(ORIGIN, 443)).await.expect("connected");
        let begun = Instant::now();
        stream.write_all(&[0x16, 0x03, 0x01, 0x02, 0x00, 0x01]).await.expect("sent");
        let error = soon(stream.read_u8()).await.expect_err("reset");
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        assert!(begun.elapsed() > Duration::from_secs(5), "the limit of this place is 6 s");
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
        assert_eq!(place.router.present().await.expect("asked"), BTreeSet::from([place.slot]));
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

/// Attack B07. A far side towards which every port of the egress address is taken costs a refusal
/// that says so; other far sides are reached as before, and never from another address.
#[test]
fn without_a_free_port_towards_a_far_side_the_refusal_says_so_and_others_are_reached() {
    const PORTS: u16 = 8;
    run(RULES, async |place| {
        place.ports_of_the_host(40_000, 40_000 + PORTS - 1);
        let tls = Tls::new(&["www.example.com", "second.example.com"]);
        let origin = tls.echo(place.origin(ORIGIN, 443));
        // Another program of the host has them.
        let held: Vec<_> = (0..PORTS).map(|_| place.host_dials((ORIGIN, 443))).collect();
        let stream = soon(place.dial(ORIGIN, 443)).await.expect("connected");
        soon(tls.client(stream, "www.example.com")).await.expect_err("refused");
        let deny = place.record(|r| r.outcome == Outcome::Deny).await;
        assert_eq!(deny.code, Some(Code::Limit));
        assert!(
            deny.detail.as_deref().is_some_and(|detail| detail.contains("every port")),
            "{deny:?}"
        );

        let second = tls.echo(place.origin(SECOND, 443));
        let stream = soon(place.dial(SECOND, 443)).await.expect("connected");
        soon(tls.client(stream, "second.example.com")).await.expect("another far side");
        assert_eq!((count(&origin), count(&second)), (held.len(), 1));
        let peers = second.lock().expect("unpoisoned").clone();
        assert!(peers.iter().all(|peer| peer.ip() == EGRESS), "{peers:?}");
    });
}

/// Attack B07. Connections that a guest ends first keep their ports, and count as its own until the
/// kernel has done with them; with its share of them taken the refusal says so. Those that the far side
/// ends first cost nothing, and neither does what is open towards others.
#[test]
fn what_a_guest_has_ended_counts_towards_its_share_of_the_ports() {
    const PORTS: u16 = 32;
    const SHARE: u16 = PORTS / 2;
    let rules = r#"
[[rule]]
allow = ["93.184.216.34", "93.184.216.35"]
ports = [2525]
"#;
    run(rules, async |place| {
        place.ports_of_the_host(40_000, 40_000 + PORTS - 1);
        // Says back one byte; then ends the connection, or waits for the guest to.
        let serve_at = |address| {
            serve(place.origin(address, 2525), |mut stream| async move {
                let word = stream.read_u8().await.unwrap_or_default();
                let _ = stream.write_u8(word).await;
                if word == 2 {
                    let _ = stream.read_u8().await;
                }
            })
        };
        let (first, second) = (serve_at(ORIGIN), serve_at(SECOND));
        let visit = async |address, word: u8| {
            let mut stream = soon(place.dial(address, 2525)).await.expect("connected");
            stream.write_u8(word).await.expect("sent");
            let served = soon(stream.read_u8()).await.is_ok();
            if word == 2 {
                let _ = stream.shutdown().await;
            }
            // To its end, however that comes.
            let _ = soon(stream.read_u8()).await;
            served
        };
        for _ in 0..2 * PORTS {
            assert!(visit(ORIGIN, 1).await, "ended by the far side");
        }
        for n in 0..SHARE {
            assert!(visit(ORIGIN, 2).await, "{n} of the share");
        }
        assert!(!visit(ORIGIN, 2).await, "over it");
        let deny = place.record(|r| r.outcome == Outcome::Deny).await;
        assert_eq!(deny.code, Some(Code::Limit));
        assert!(deny.detail.as_deref().is_some_and(|why| why.contains("its share")), "{deny:?}");
        assert_eq!(count(&first), usize::from(2 * PORTS + SHARE), "nothing of it left");
        assert!(visit(SECOND, 2).await, "another far side");
        assert_eq!(count(&second), 1);
    });
}

/// Attacks B09, P30. A thousand connections whose guest is done and whose far side never is: each
/// gives its place back after a while, and the guest gets out all along.
#[test]
fn a_thousand_half_closed_connections_give_their_places_back() {
    const ROUNDS: usize = 16;
    const AT_ONCE: usize = 64;
    let rules = r#"
[[rule]]
allow = ["93.184.216.34"]
ports = [2525]
"#;
    run_brief(rules, async |place| {
        let far = serve(place.origin(ORIGIN, 2525), |mut stream| async move {
            let _ = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await;
            std::future::pending::<()>().await;
        });
        let meter = place.router.meter(place.slot).expect("attached");
        for round in 1..=ROUNDS {
            let mut held = Vec::new();
            for _ in 0..AT_ONCE {
                let mut stream = soon(place.dial(ORIGIN, 2525)).await.expect("connected");
                stream.write_all(b"\0neither").await.expect("sent");
                stream.shutdown().await.expect("half-closed");
                held.push(stream);
            }
            let freed = async {
                while count(&far) < round * AT_ONCE || meter.open() > 0 {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            };
            assert!(
                timeout(PATIENCE, freed).await.is_ok(),
                "round {round}: {} arrived, {} are open",
                count(&far),
                meter.open()
            );
        }
    });
}

/// Promise 23. The far side has seen a connection and then its end; a write in between denied it.
#[test]
fn a_far_side_that_was_connected_to_and_then_denied_is_told_with_its_egress_port() {
    let tls = &Tls::new(&["www.example.com"]);
    run(RULES, async |place| {
        let origin = tls.echo(place.origin(ORIGIN, 443));
        let stream = soon(place.dial(SINK, 443)).await.expect("connected");
        soon(tls.client(stream, "www.example.com")).await.expect("the control");
        denied_while_it_is_dialled(&place, &origin, async || {
            let stream = soon(place.dial(SINK, 443)).await.expect("connected");
            tls.client(stream, "www.example.com").await.expect_err("refused");
        })
        .await;
    });
    run(RULES, async |place| {
        let origin = sink(place.origin(ORIGIN, 80));
        let request = "GET / HTTP/1.1\r\nhost: www.example.com\r\n\r\n";
        let mut held = soon(place.dial(SINK, 80)).await.expect("connected");
        held.write_all(request.as_bytes()).await.expect("sent");
        denied_while_it_is_dialled(&place, &origin, async || {
            let mut stream = soon(place.dial(SINK, 80)).await.expect("connected");
            let (status, head, _) = exchange(&mut stream, request).await;
            assert_eq!(status, 403, "{head}");
        })
        .await;
    });
}

/// Expects that one connection has been let through to `origin`, and lets `again` try for another.
async fn denied_while_it_is_dialled(place: &Place, origin: &Peers, again: impl AsyncFn()) {
    let allowed = place.record(|r| r.outcome == Outcome::Allow && r.kind != Kind::Dns).await;
    assert!(allowed.egress.is_some() && count(origin) == 1, "control: {allowed:?}");
    // Its SYN is lost, and sent again after a second.
    place.land.ip("i", "link set in down");
    let meanwhile = async {
        while !place.host_sockets(ORIGIN).contains("SYN-SENT") {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        // As between the write of a policy and the turn of this connection to be judged again.
        place.write("", 2);
        place.land.ip("i", "link set in up");
    };
    let tried = async { tokio::join!(again(), meanwhile) };
    soon(tried).await;
    // The control: it is connected to again.
    until(|| count(origin) >= 2).await;
    let peers = origin.lock().expect("unpoisoned").clone();
    let [_, peer] = peers[..] else { panic!("control: and once only: {peers:?}") };
    let told = place.record(|r| r.egress == Some(peer)).await;
    assert_eq!((told.outcome, told.code), (Outcome::Fail, Some(Code::NoRule)));
    assert_eq!(told.dialed.map(|to| to.ip()), Some(ORIGIN.into()));
}

/// Promise 23. So it is not joined with other refusals.
#[test]
fn a_refusal_after_a_packet_had_left_is_no_denial() {
    const PORTS: u16 = 8;
    run(RULES, async |place| {
        place.ports_of_the_host(40_000, 40_000 + PORTS - 1);
        let tls = Tls::new(&["both.example.com"]);
        let second = tls.echo(place.origin(SECOND, 443));
        let held: Vec<_> = (0..PORTS).map(|_| place.host_dials((SECOND, 443))).collect();
        // Nobody listens at the first address, which resets what comes; no port is left for the second.
        let stream = soon(place.dial(ORIGIN, 443)).await.expect("connected");
        soon(tls.client(stream, "both.example.com")).await.expect_err("refused");
        let told = place.record(|r| r.egress.is_some()).await;
        assert_eq!((told.outcome, told.code), (Outcome::Fail, Some(Code::Limit)), "{told:?}");
        assert_eq!(told.dialed, Some((ORIGIN, 443).into()));
        assert_eq!(count(&second), held.len(), "nothing else came");
    });
}
