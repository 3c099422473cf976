//! How an HTTP exchange goes on and ends: bodies, cuts, far sides that misbehave.

use std::io::ErrorKind;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use egress::Limits;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use policy::Code;
use policy::audit::{Kind, Outcome};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

use crate::peers::{PATIENCE, count, serve, soon, until};
use crate::place::{ORIGIN, limits, run, run_brief, run_within};
use crate::requests::{RULES, canned, echo, exchange};

#[test]
fn bodies_stream_both_ways_at_once() {
    run(RULES, async |place| {
        serve(place.origin(ORIGIN, 80), async |stream| {
            let service = service_fn(async |request: Request<Incoming>| {
                Ok::<_, hyper::Error>(Response::new(request.into_body()))
            });
            let server = hyper::server::conn::http1::Builder::new();
            let _ = server.serve_connection(TokioIo::new(stream), service).await;
        });
        let mut stream = soon(place.dial(ORIGIN, 80)).await.expect("connected");
        let head = "POST / HTTP/1.1\r\nHost: web.example.com\r\nTransfer-Encoding: chunked\r\n\r\n";
        stream.write_all(head.as_bytes()).await.expect("sent");
        let mut seen = Vec::new();
        for word in ["first", "second"] {
            let chunk = format!("{:x}\r\n{word}\r\n", word.len());
            stream.write_all(chunk.as_bytes()).await.expect("sent");
            while !seen.ends_with(chunk.as_bytes()) {
                seen.push(soon(stream.read_u8()).await.expect("its echo before the next"));
            }
        }
    });
}

#[test]
fn a_request_under_way_is_cut_when_the_policy_is_tightened() {
    run(RULES, async |place| {
        let asked =
            canned(place.origin(ORIGIN, 80), "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n1");
        let mut stream = soon(place.dial(ORIGIN, 80)).await.expect("connected");
        let request = "GET / HTTP/1.1\r\nHost: web.example.com\r\n\r\n";
        stream.write_all(request.as_bytes()).await.expect("sent");
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n1") {
            head.push(soon(stream.read_u8()).await.expect("a head"));
        }
        assert_eq!(asked.lock().expect("unpoisoned").len(), 1);
        place.write("", 2);
        assert_eq!(soon(place.rejudge()).await.cut, 1);
        assert!(soon(stream.read_u8()).await.is_err());
        let closed = place.record(|r| r.outcome == Outcome::Closed).await;
        assert_eq!(closed.code, Some(Code::PolicyChanged));
    });
}

#[test]
fn a_kept_connection_is_cut_between_two_requests_when_its_last_one_is_denied() {
    run(RULES, async |place| {
        let (peers, _) = echo(place.origin(ORIGIN, 80));
        let mut stream = soon(place.dial(ORIGIN, 80)).await.expect("connected");
        let request = "GET /last HTTP/1.1\r\nHost: web.example.com\r\n\r\n";
        assert_eq!(exchange(&mut stream, request).await.0, 200);
        place.record(|r| r.outcome == Outcome::Closed).await;
        place.write(RULES, 2);
        assert_eq!(soon(place.rejudge()).await.cut, 0, "an equal policy cuts nothing");
        place.write("", 3);
        assert_eq!(soon(place.rejudge()).await.cut, 1);
        assert!(soon(stream.read_u8()).await.is_err());
        assert_eq!(peers.lock().expect("unpoisoned").len(), 1);
        let closed = place.record(|r| r.code == Some(Code::PolicyChanged)).await;
        assert_eq!((closed.kind, closed.outcome), (Kind::Connection, Outcome::Closed));
        assert_eq!(closed.name.as_deref(), Some("web.example.com"));
        assert_eq!(closed.revision.map(|revision| revision.0), Some(3));
    });
}

#[test]
fn what_follows_an_early_answer_is_cut_and_accounted_like_what_came_before_it() {
    run(RULES, async |place| {
        serve(place.origin(ORIGIN, 80), async |mut stream| {
            let _ = stream.read(&mut [0; 1024]).await;
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
            let _ = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await;
        });
        let mut stream = soon(place.dial(ORIGIN, 80)).await.expect("connected");
        let request = "POST / HTTP/1.1\r\nHost: web.example.com\r\nContent-Length: 1000000\r\n\r\n";
        assert_eq!(exchange(&mut stream, request).await.0, 200);
        stream.write_all(&[b'x'; 10_000]).await.expect("sent");
        let meter = place.router.meter(place.slot).expect("attached");
        soon(async {
            while meter.bytes_out() < 10_000 {
                sleep(Duration::from_millis(1)).await;
            }
        })
        .await;
        place.write("", 2);
        assert_eq!(soon(place.rejudge()).await.cut, 1);
        assert!(soon(stream.read_u8()).await.is_err());
        let closed = place.record(|r| r.outcome == Outcome::Closed).await;
        assert_eq!((closed.code, closed.status), (Some(Code::PolicyChanged), Some(200)));
        assert!(closed.bytes_out >= Some(10_000), "{closed:?}");
    });
}

#[test]
fn a_far_side_that_takes_no_more_is_given_up_when_both_are_idle() {
    run_brief(RULES, async |place| {
        let (ended, mut end) = tokio::sync::mpsc::channel(1);
        let (idle, woken) = (Arc::new(Notify::new()), ended);
        let wake = Arc::clone(&idle);
        serve(place.origin(ORIGIN, 80), move |mut stream| {
            let (idle, ended) = (Arc::clone(&idle), woken.clone());
            async move {
                let _ = stream.read(&mut [0; 1024]).await;
                let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
                idle.notified().await;
                let read = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await;
                let _ = ended.send(read.map_err(|error| error.kind())).await;
            }
        });
        let mut stream = soon(place.dial(ORIGIN, 80)).await.expect("connected");
        let request =
            "POST / HTTP/1.1\r\nHost: web.example.com\r\nContent-Length: 1000000000\r\n\r\n";
        assert_eq!(exchange(&mut stream, request).await.0, 200);
        let full = Duration::from_millis(500);
        while timeout(full, stream.write_all(&[b'x'; 65_536])).await.is_ok() {}
        drop(stream);
        let meter = place.router.meter(place.slot).expect("attached");
        soon(async {
            while meter.open() > 0 {
                sleep(Duration::from_millis(10)).await;
            }
        })
        .await;
        wake.notify_one();
        assert_eq!(soon(end.recv()).await, Some(Err(ErrorKind::ConnectionReset)));
    });
}

/// Attack E25. Interim answers without end.
#[test]
fn a_far_side_that_answers_without_end_is_a_502() {
    run(RULES, async |place| {
        serve(place.origin(ORIGIN, 80), async |mut stream| {
            let _ = stream.read(&mut [0; 1024]).await;
            let interim = b"HTTP/1.1 100 Continue\r\n\r\n".repeat(1000);
            while stream.write_all(&interim).await.is_ok() {}
        });
        let mut stream = soon(place.dial(ORIGIN, 80)).await.expect("connected");
        let request = "GET / HTTP/1.1\r\nHost: web.example.com\r\n\r\n";
        let (status, head, _) = soon(exchange(&mut stream, request)).await;
        assert_eq!(status, 502);
        assert!(head.contains("postern-deny: upstream-unreachable"), "{head}");
    });
}

#[test]
fn a_body_in_chunks_goes_on_whatever_the_method() {
    run(RULES, async |place| {
        echo(place.origin(ORIGIN, 80));
        let mut stream = soon(place.dial(ORIGIN, 80)).await.expect("connected");
        for method in ["GET", "DELETE", "OPTIONS"] {
            let request = format!(
                "{method} / HTTP/1.1\r\nHost: web.example.com\r\nTransfer-Encoding: chunked\r\n\r\n\
                 5\r\nhello\r\n0\r\n\r\n"
            );
            let (status, _, body) = exchange(&mut stream, &request).await;
            assert_eq!((status, body.as_str()), (200, "hello"), "{method}");
        }
    });
}

#[test]
fn a_kept_connection_is_not_used_under_another_policy() {
    run(RULES, async |place| {
        let (peers, _) = echo(place.origin(ORIGIN, 80));
        let mut stream = soon(place.dial(ORIGIN, 80)).await.expect("connected");
        let request = "GET / HTTP/1.1\r\nHost: web.example.com\r\n\r\n";
        for (revision, connections) in [(1, 1), (1, 1), (2, 2)] {
            if revision == 2 {
                place.write(RULES, revision);
            }
            assert_eq!(exchange(&mut stream, request).await.0, 200);
            assert_eq!(count(&peers), connections);
        }
        place.write("", 3);
        assert_eq!(exchange(&mut stream, request).await.0, 403);
    });
}

#[test]
fn a_far_side_that_is_not_there_is_a_502() {
    run(RULES, async |place| {
        let mut stream = soon(place.dial(ORIGIN, 80)).await.expect("connected");
        let request = "GET / HTTP/1.1\r\nHost: web.example.com\r\n\r\n";
        let (status, head, _) = exchange(&mut stream, request).await;
        assert_eq!(status, 502);
        assert!(head.contains("postern-deny: upstream-unreachable"), "{head}");
        let fail = place.record(|r| r.outcome == Outcome::Fail).await;
        assert_eq!(fail.code, Some(Code::UpstreamUnreachable));
    });
}

#[test]
fn a_request_the_guest_gives_up_on_does_not_wait_for_a_far_side_that_is_silent() {
    // It ends by the reset alone, and by being half closed for long enough: each time all other patience
    // is longer than that of the test.
    let patient = Limits { idle: 4 * PATIENCE, half_closed: 4 * PATIENCE, ..limits() };
    given_up_on(patient, true);
    given_up_on(Limits { half_closed: limits().half_closed, ..patient }, false);
}

fn given_up_on(limits: Limits, reset: bool) {
    run_within(limits, RULES, async move |place| {
        let origin = place.origin(ORIGIN, 80);
        let held = Arc::new(Mutex::new(Vec::new()));
        let holding = Arc::clone(&held);
        tokio::spawn(async move {
            while let Ok((stream, _)) = origin.accept().await {
                holding.lock().expect("unpoisoned").push(stream);
            }
        });
        let head = b"GET / HTTP/1.1\r\nHost: web.example.com\r\n\r\n";
        let mut stream = soon(place.dial(ORIGIN, 80)).await.expect("connected");
        stream.write_all(head).await.expect("sent");
        until(|| held.lock().expect("unpoisoned").len() == 1).await;
        assert_eq!(place.router.meter(place.slot).expect("attached").open(), 1, "it may wait");
        if reset {
            stream.set_zero_linger().expect("set");
        }
        drop(stream);
        place.has_open(0).await;
    });
}
