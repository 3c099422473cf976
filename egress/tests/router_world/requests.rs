//! Clear-text HTTP through the router, request by request.

use std::io::ErrorKind;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use policy::Code;
use policy::audit::{Kind, Outcome};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

use crate::peers::{Peers, count, serve, sink, soon};
use crate::place::{EGRESS, ORIGIN, SINK, run};

const RULES: &str = r#"
[[rule]]
allow = ["web.example.com"]
[[rule]]
allow = ["api.example.com"]
methods = ["POST"]
paths = ["/v1/**"]
"#;

/// What an origin was asked: method, target, host, and its fields' names.
type Asked = Arc<Mutex<Vec<String>>>;

/// Answers every request with what it was sent.
fn echo(listener: TcpListener) -> (Peers, Asked) {
    let asked = Asked::default();
    let seen = Arc::clone(&asked);
    let peers = serve(listener, move |stream| {
        let seen = Arc::clone(&seen);
        let service = service_fn(move |request: Request<Incoming>| {
            let seen = Arc::clone(&seen);
            async move {
                let host = request.headers()["host"].to_str().expect("ascii").to_owned();
                let line = format!("{} {} {host}", request.method(), request.uri());
                seen.lock().expect("unpoisoned").push(line);
                let body = request.into_body().collect().await?.to_bytes();
                let mut response = Response::new(Full::<Bytes>::new(body));
                let hop = "x-private".parse().expect("a value");
                response.headers_mut().insert("connection", hop);
                response.headers_mut().insert("x-private", "1".parse().expect("a value"));
                Ok::<_, hyper::Error>(response)
            }
        });
        async move {
            let server = hyper::server::conn::http1::Builder::new();
            let _ = server.serve_connection(TokioIo::new(stream), service).await;
        }
    });
    (peers, asked)
}

/// Sends a request and reads one response whose body has a length.
async fn exchange(stream: &mut TcpStream, request: &str) -> (u16, String, String) {
    stream.write_all(request.as_bytes()).await.expect("sent");
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(soon(stream.read_u8()).await.expect("a head"));
    }
    let head = String::from_utf8(head).expect("ascii").to_lowercase();
    let status = head[9..12].parse().expect("a status");
    let length = head
        .split("content-length: ")
        .nth(1)
        .map_or(0, |rest| rest.split("\r\n").next().expect("a line").parse().expect("a number"));
    let mut body = vec![0; length];
    soon(stream.read_exact(&mut body)).await.expect("a body");
    (status, head, String::from_utf8(body).expect("utf-8"))
}

#[test]
fn every_request_of_a_connection_is_judged_by_itself() {
    run(RULES, async |place| {
        let (peers, asked) = echo(place.origin(ORIGIN, 80));
        let foreign = sink(place.origin(SINK, 80));
        let mut stream = soon(place.dial(SINK, 80)).await.expect("connected");
        let allowed =
            "POST /a?q=1 HTTP/1.1\r\nHost: Web.example.com\r\nContent-Length: 2\r\n\r\nhi";
        let (status, head, body) = exchange(&mut stream, allowed).await;
        assert_eq!((status, body.as_str()), (200, "hi"));
        assert!(!head.contains("x-private"), "a field of one hop passed: {head}");

        let denied = "GET / HTTP/1.1\r\nHost: Evil.example.com:80\r\n\r\n";
        let (status, head, body) = exchange(&mut stream, denied).await;
        assert_eq!(status, 403);
        assert!(head.contains("postern-deny: no-rule"), "{head}");
        let body: serde_json::Value = serde_json::from_str(&body).expect("json");
        assert_eq!(body["error"]["host"], "evil.example.com");

        let (status, ..) = exchange(&mut stream, allowed).await;
        assert_eq!(status, 200);
        assert_eq!(*asked.lock().expect("unpoisoned"), ["POST /a?q=1 web.example.com"; 2]);
        assert_eq!((count(&peers), count(&foreign)), (1, 0), "one connection, kept");
        assert_eq!(peers.lock().expect("unpoisoned")[0].ip(), std::net::IpAddr::from(EGRESS));

        let allow = place.record(|r| r.kind == Kind::Request).await;
        assert_eq!(allow.outcome, Outcome::Allow);
        assert_eq!((allow.method.as_deref(), allow.path.as_deref()), (Some("POST"), Some("/a")));
        assert_eq!(allow.egress, Some(peers.lock().expect("unpoisoned")[0]));
        let closed = place.record(|r| r.outcome == Outcome::Closed).await;
        assert_eq!(closed.status, Some(200));
        assert!(closed.bytes_out > Some(0) && closed.bytes_in > Some(0));
        let deny = place.record(|r| r.outcome == Outcome::Deny).await;
        assert_eq!((deny.status, deny.code), (Some(403), Some(Code::NoRule)));
        assert_eq!(deny.name.as_deref(), Some("evil.example.com"));
    });
}

#[test]
fn methods_and_paths_are_judged_in_the_form_that_is_sent() {
    run(RULES, async |place| {
        let (_, asked) = echo(place.origin(ORIGIN, 80));
        let mut stream = soon(place.dial(ORIGIN, 80)).await.expect("connected");
        for (line, status, code) in [
            ("POST /v1/x/../chat", 200, None),
            ("GET /v1/chat", 403, Some("method")),
            ("POST /v1/../admin", 403, Some("path")),
            ("POST /v1/%2e%2e/admin", 403, Some("path")),
            ("POST /v1//admin", 403, Some("path")),
        ] {
            let request =
                format!("{line} HTTP/1.1\r\nHost: api.example.com\r\nContent-Length: 0\r\n\r\n");
            let (got, head, _) = exchange(&mut stream, &request).await;
            assert_eq!(got, status, "{line}");
            if let Some(code) = code {
                assert!(head.contains(&format!("postern-deny: {code}")), "{line}: {head}");
            }
        }
        assert_eq!(*asked.lock().expect("unpoisoned"), ["POST /v1/chat api.example.com"]);
        let allow = place.record(|r| r.kind == Kind::Request).await;
        assert_eq!(allow.path.as_deref(), Some("/v1/chat"), "what was sent");
    });
}

#[test]
fn a_body_is_wanted_only_once_its_request_is_let_through() {
    run(RULES, async |place| {
        echo(place.origin(ORIGIN, 80));
        let mut stream = soon(place.dial(ORIGIN, 80)).await.expect("connected");
        let head = "POST / HTTP/1.1\r\nHost: web.example.com\r\nExpect: 100-continue\r\n\
                    Transfer-Encoding: chunked\r\n\r\n";
        let (status, ..) = exchange(&mut stream, head).await;
        assert_eq!(status, 100);
        let (status, _, body) = exchange(&mut stream, "5\r\nhello\r\n0\r\n\r\n").await;
        assert_eq!((status, body.as_str()), (200, "hello"));

        let denied = head.replace("web", "evil");
        assert_eq!(exchange(&mut stream, &denied).await.0, 403);
    });
}

#[test]
fn what_cannot_be_judged_is_refused_with_its_status() {
    run(RULES, async |place| {
        let (peers, _) = echo(place.origin(ORIGIN, 80));
        for (request, status) in [
            ("GET / HTTP/1.1\r\n\r\n", 400),
            ("GET / HTTP/1.1\r\nHost: a.b\r\nHost: a.b\r\n\r\n", 400),
            ("GET http://web.example.com/ HTTP/1.1\r\nHost: evil.example.com\r\n\r\n", 421),
            ("CONNECT web.example.com:443 HTTP/1.1\r\nHost: web.example.com:443\r\n\r\n", 405),
            ("GET / HTTP/1.1\r\nHost: 93.184.216.34\r\n\r\n", 403),
        ] {
            let mut stream = soon(place.dial(ORIGIN, 80)).await.expect("connected");
            assert_eq!(exchange(&mut stream, request).await.0, status, "{request}");
        }
        assert_eq!(count(&peers), 0);
    });
}

/// An origin that answers every connection with these bytes once it has read a head, and says what
/// it read.
fn canned(listener: TcpListener, answer: &'static str) -> Asked {
    let asked = Asked::default();
    let seen = Arc::clone(&asked);
    serve(listener, move |mut stream| {
        let seen = Arc::clone(&seen);
        async move {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                let Ok(byte) = stream.read_u8().await else { return };
                head.push(byte);
            }
            seen.lock().expect("unpoisoned").push(String::from_utf8(head).expect("ascii"));
            let _ = stream.write_all(answer.as_bytes()).await;
            let _ = stream.read_u8().await;
        }
    });
    asked
}

#[test]
fn trailers_pass_and_an_upgrade_is_not_offered() {
    run(RULES, async |place| {
        let answer = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: x-sum\r\n\r\n\
                      2\r\nhi\r\n0\r\nx-sum: 9\r\n\r\n";
        let asked = canned(place.origin(ORIGIN, 80), answer);
        let mut stream = soon(place.dial(ORIGIN, 80)).await.expect("connected");
        let request = "GET / HTTP/1.1\r\nHost: web.example.com\r\nTE: trailers\r\n\
                       Connection: te, upgrade\r\nUpgrade: websocket\r\n\r\n";
        stream.write_all(request.as_bytes()).await.expect("sent");
        let mut seen = Vec::new();
        while !seen.ends_with(b"x-sum: 9\r\n\r\n") {
            seen.push(soon(stream.read_u8()).await.expect("trailers"));
        }
        let head = asked.lock().expect("unpoisoned")[0].to_lowercase();
        assert!(head.contains("te: trailers") && !head.contains("upgrade"), "{head}");
    });
}

#[test]
fn a_head_keeps_the_length_of_the_body_it_leaves_out() {
    run(RULES, async |place| {
        canned(place.origin(ORIGIN, 80), "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n");
        let mut stream = soon(place.dial(ORIGIN, 80)).await.expect("connected");
        let request = "HEAD / HTTP/1.1\r\nHost: web.example.com\r\n\r\n";
        stream.write_all(request.as_bytes()).await.expect("sent");
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(soon(stream.read_u8()).await.expect("a head"));
        }
        let head = String::from_utf8(head).expect("ascii").to_lowercase();
        assert!(head.contains("content-length: 9"), "{head}");
    });
}

#[test]
fn a_body_whose_length_is_said_twice_leaves_with_one() {
    run(RULES, async |place| {
        let (_, asked) = echo(place.origin(ORIGIN, 80));
        for fields in [
            "Content-Length: 4\r\nTransfer-Encoding: chunked",
            "Transfer-Encoding: chunked\r\nContent-Length: 4",
        ] {
            let mut stream = soon(place.dial(ORIGIN, 80)).await.expect("connected");
            let request = format!(
                "POST / HTTP/1.1\r\nHost: web.example.com\r\n{fields}\r\n\r\n0\r\n\r\n\
                 GET /smuggled HTTP/1.1\r\nHost: evil.example.com\r\n\r\n"
            );
            let (status, ..) = exchange(&mut stream, &request).await;
            assert!(status == 200 || status == 400, "{status}");
        }
        let asked = asked.lock().expect("unpoisoned").clone();
        assert!(asked.iter().all(|line| line == "POST / web.example.com"), "{asked:?}");
    });
}

#[test]
fn http_1_0_is_served_and_closed() {
    run(RULES, async |place| {
        echo(place.origin(ORIGIN, 80));
        let mut stream = soon(place.dial(ORIGIN, 80)).await.expect("connected");
        let request = "POST / HTTP/1.0\r\nHost: web.example.com\r\nContent-Length: 2\r\n\r\nhi";
        stream.write_all(request.as_bytes()).await.expect("sent");
        let mut answer = String::new();
        soon(stream.read_to_string(&mut answer)).await.expect("an answer and the end");
        assert!(answer.contains(" 200 ") && answer.ends_with("\r\n\r\nhi"), "{answer}");
    });
}

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
        assert_eq!(place.router.rejudge(place.slot).cut, 1);
        assert!(soon(stream.read_u8()).await.is_err());
        let closed = place.record(|r| r.outcome == Outcome::Closed).await;
        assert_eq!(closed.code, Some(Code::PolicyChanged));
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
        assert_eq!(place.router.rejudge(place.slot).cut, 1);
        assert!(soon(stream.read_u8()).await.is_err());
        let closed = place.record(|r| r.outcome == Outcome::Closed).await;
        assert_eq!((closed.code, closed.status), (Some(Code::PolicyChanged), Some(200)));
        assert!(closed.bytes_out >= Some(10_000), "{closed:?}");
    });
}

#[test]
fn a_far_side_that_takes_no_more_is_given_up_when_both_are_idle() {
    run(RULES, async |place| {
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
fn http_2_in_clear_is_reset() {
    run(RULES, async |place| {
        let mut stream = soon(place.dial(ORIGIN, 80)).await.expect("connected");
        stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.expect("sent");
        assert!(soon(stream.read_u8()).await.is_err());
        assert_eq!(place.record(|r| r.kind == Kind::Connection).await.code, Some(Code::Protocol));
    });
}

#[test]
fn a_request_the_guest_gives_up_on_does_not_wait_for_a_far_side_that_is_silent() {
    run(RULES, async |place| {
        let origin = place.origin(ORIGIN, 80);
        let held = Arc::new(Mutex::new(Vec::new()));
        let holding = Arc::clone(&held);
        tokio::spawn(async move {
            while let Ok((stream, _)) = origin.accept().await {
                holding.lock().expect("unpoisoned").push(stream);
            }
        });
        let meter = place.router.meter(place.slot).expect("attached");
        let head = b"GET / HTTP/1.1\r\nHost: web.example.com\r\n\r\n";
        let open = async |wanted| {
            while meter.open() != wanted {
                sleep(Duration::from_millis(5)).await;
            }
        };
        for reset in [true, false] {
            let mut stream = soon(place.dial(ORIGIN, 80)).await.expect("connected");
            stream.write_all(head).await.expect("sent");
            soon(open(1)).await;
            sleep(Duration::from_millis(200)).await;
            assert_eq!(meter.open(), 1, "it may still wait");
            if reset {
                let socket = socket2::SockRef::from(&stream);
                socket.set_linger(Some(Duration::ZERO)).expect("set");
            }
            drop(stream);
            let patience = if reset { 500 } else { 2500 };
            let ended = timeout(Duration::from_millis(patience), open(0)).await;
            assert!(ended.is_ok(), "reset: {reset}");
        }
        assert_eq!(held.lock().expect("unpoisoned").len(), 2, "both arrived");
    });
}

#[test]
fn a_body_that_cannot_be_read_is_the_guests_fault_and_too_large_a_head_is_told_so() {
    run(RULES, async |place| {
        echo(place.origin(ORIGIN, 80));
        let head = "POST / HTTP/1.1\r\nHost: web.example.com\r\nTransfer-Encoding: chunked\r\n\r\n";
        let mut stream = soon(place.dial(ORIGIN, 80)).await.expect("connected");
        let (status, head, _) = exchange(&mut stream, &format!("{head}zz\r\n")).await;
        assert_eq!(status, 400, "{head}");
        assert!(head.contains("postern-deny: undecidable"), "{head}");
        let deny = place.record(|r| r.outcome == Outcome::Deny).await;
        assert_eq!((deny.code, deny.status), (Some(Code::Undecidable), Some(400)));

        let large =
            format!("GET / HTTP/1.1\r\nHost: web.example.com\r\nx: {}\r\n\r\n", "x".repeat(70_000));
        let mut stream = soon(place.dial(ORIGIN, 80)).await.expect("connected");
        let (status, ..) = exchange(&mut stream, &large).await;
        assert_eq!(status, 431);
        let deny = place.record(|r| r.outcome == Outcome::Deny).await;
        assert_eq!(deny.status, Some(431));
    });
}
