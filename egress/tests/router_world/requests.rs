//! Clear-text HTTP through the router, request by request.

use std::sync::{Arc, Mutex};

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

use crate::peers::{Peers, count, serve, sink, soon};
use crate::place::{EGRESS, ORIGIN, SINK, run};

pub(crate) const RULES: &str = r#"
[[rule]]
allow = ["web.example.com"]
[[rule]]
allow = ["api.example.com"]
methods = ["POST"]
paths = ["/v1/**"]
"#;

/// What an origin was asked: method, target, host, and its fields' names.
pub(crate) type Asked = Arc<Mutex<Vec<String>>>;

/// Answers every request with what it was sent.
pub(crate) fn echo(listener: TcpListener) -> (Peers, Asked) {
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
pub(crate) async fn exchange(stream: &mut TcpStream, request: &str) -> (u16, String, String) {
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

/// Attack E20. And what has no such form is refused where a rule names paths.
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
pub(crate) fn canned(listener: TcpListener, answer: &'static str) -> Asked {
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

/// Attack E09. Whatever it says of keeping the connection.
#[test]
fn http_1_0_is_served_and_closed() {
    run(RULES, async |place| {
        echo(place.origin(ORIGIN, 80));
        let mut stream = soon(place.dial(ORIGIN, 80)).await.expect("connected");
        let request = "POST / HTTP/1.0\r\nHost: web.example.com\r\nConnection: keep-alive\r\n\
                       Content-Length: 2\r\n\r\nhiPOST / HTTP/1.1\r\nHost: web.example.com\r\n\r\n";
        stream.write_all(request.as_bytes()).await.expect("sent");
        let mut answer = String::new();
        soon(stream.read_to_string(&mut answer)).await.expect("an answer and the end");
        assert!(answer.contains(" 200 ") && answer.ends_with("\r\n\r\nhi"), "{answer}");
        assert_eq!(answer.matches("HTTP/1.").count(), 1, "{answer}");
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

#[test]
fn a_name_that_is_never_public_is_asked_of_nobody() {
    run("default = \"allow\"", async |place| {
        let (_web, seen) = echo(place.origin(ORIGIN, 80));
        for name in ["printer.local", "metadata.google.internal", "1.2.0.192.in-addr.arpa", "db"] {
            let mut stream = soon(place.dial(ORIGIN, 80)).await.expect("connected");
            let request = format!("GET / HTTP/1.1\r\nHost: {name}\r\n\r\n");
            assert_eq!(exchange(&mut stream, &request).await.0, 502, "{name}");
        }
        assert_eq!(place.asked.lock().expect("unpoisoned").as_slice(), [""; 0]);
        assert!(seen.lock().expect("unpoisoned").is_empty());
        let mut stream = soon(place.dial(ORIGIN, 80)).await.expect("connected");
        let request = "GET / HTTP/1.1\r\nHost: web.example.com\r\n\r\n";
        assert_eq!(exchange(&mut stream, request).await.0, 200);
    });
}
