//! A request that turns its connection into a stream: only a WebSocket handshake, only where a rule
//! lets the host through unseen, and only once the far side has agreed to this handshake.

use std::io::ErrorKind;
use std::sync::{Arc, Mutex};

use futures_util::{SinkExt, StreamExt};
use policy::Code;
use policy::audit::{Kind, Outcome};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio_tungstenite::tungstenite::{Error, Message};
use tokio_tungstenite::{WebSocketStream, accept_async, client_async};

use crate::peers::{serve, soon};
use crate::place::{ORIGIN, Place, run};
use crate::requests::{RULES, exchange};

/// The example of RFC 6455, section 1.3.
const ASKED: &str = "GET /chat HTTP/1.1\r\nHost: web.example.com\r\nUpgrade: websocket\r\n\
     Connection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\
     Sec-WebSocket-Version: 13\r\n\r\n";
const AGREED: &str = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\
     Connection: Upgrade\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n";
const PLAIN: &str = "GET /plain HTTP/1.1\r\nHost: web.example.com\r\n\r\n";

/// What an origin reads, in all.
type Read = Arc<Mutex<String>>;

/// Answers each head with the next of these answers, the first when it is told to, then only reads.
fn scripted(listener: TcpListener, answers: &'static [&'static str]) -> (Read, Arc<Notify>) {
    let (read, go) = (Read::default(), Arc::new(Notify::new()));
    let (reading, told) = (Arc::clone(&read), Arc::clone(&go));
    serve(listener, move |mut stream| {
        let (reading, told) = (Arc::clone(&reading), Arc::clone(&told));
        async move {
            let mut heads = 0;
            let mut buffer = [0; 4096];
            while let Ok(length @ 1..) = stream.read(&mut buffer).await {
                let due = {
                    let mut read = reading.lock().expect("unpoisoned");
                    read.push_str(std::str::from_utf8(&buffer[..length]).expect("text"));
                    read.matches("\r\n\r\n").count().min(answers.len())
                };
                for answer in &answers[heads.min(due)..due] {
                    told.notified().await;
                    told.notify_one();
                    let _ = stream.write_all(answer.as_bytes()).await;
                }
                heads = heads.max(due);
            }
        }
    });
    (read, go)
}

async fn ends_with(read: &Read, end: &str) {
    soon(async {
        while !read.lock().expect("unpoisoned").ends_with(end) {
            tokio::time::sleep(std::time::Duration::from_millis(2)).await;
        }
    })
    .await;
}

pub(crate) async fn websocket(
    place: &Place,
) -> Result<WebSocketStream<tokio::net::TcpStream>, Error> {
    let stream = soon(place.dial(ORIGIN, 80)).await.expect("connected");
    let url = "ws://web.example.com/chat";
    soon(client_async(url, stream)).await.map(|(socket, _)| socket)
}

/// Promise 40. A WebSocket works, is in the audit as the request it began as, and a policy write cuts it.
#[test]
fn a_websocket_passes_where_no_rule_looks_at_requests_and_is_cut_like_any_flow() {
    run(RULES, async |place| {
        serve(place.origin(ORIGIN, 80), async |stream| {
            let Ok(mut socket) = accept_async(stream).await else { return };
            let _ = socket.send(Message::text("welcome")).await;
            while let Some(Ok(message)) = socket.next().await {
                if message.is_binary() && socket.send(message).await.is_err() {
                    return;
                }
            }
        });
        let mut socket = websocket(&place).await.expect("a handshake");
        let greeting = soon(socket.next()).await.expect("a message").expect("whole");
        assert_eq!(greeting, Message::text("welcome"));
        let large = Message::binary(vec![7; 300_000]);
        for _ in 0..3 {
            socket.send(large.clone()).await.expect("sent");
            assert_eq!(soon(socket.next()).await.expect("a message").expect("whole"), large);
        }
        assert_eq!(place.router.meter(place.slot).expect("attached").open(), 1);
        let allow = place.record(|r| r.kind == Kind::Request).await;
        assert_eq!((allow.outcome, allow.path.as_deref()), (Outcome::Allow, Some("/chat")));

        place.write(RULES, 2);
        assert_eq!(soon(place.rejudge()).await.cut, 0, "an equal policy cuts nothing");
        place.write("", 3);
        assert_eq!(soon(place.rejudge()).await.cut, 1);
        let error = soon(socket.next()).await.expect("an error").expect_err("cut");
        assert!(matches!(error, Error::Io(e) if e.kind() == ErrorKind::ConnectionReset));
        let closed = place.record(|r| r.outcome == Outcome::Closed).await;
        assert_eq!((closed.status, closed.code), (Some(101), Some(Code::PolicyChanged)));
        let bytes = 900_000..1_000_000;
        assert!(bytes.contains(&closed.bytes_out.expect("counted")), "{closed:?}");
        assert!(bytes.contains(&closed.bytes_in.expect("counted")), "{closed:?}");
        let meter = place.router.meter(place.slot).expect("attached");
        assert!(bytes.contains(&meter.bytes_out()) && bytes.contains(&meter.bytes_in()));
    });
}

/// Attack E16. Where a rule looks at methods or paths, what comes after the handshake cannot be
/// judged by it: the upgrade is another right than the request.
#[test]
fn a_websocket_is_refused_where_a_rule_looks_at_requests() {
    run(RULES, async |place| {
        let (read, go) = scripted(place.origin(ORIGIN, 80), &[AGREED]);
        go.notify_one();
        for rules in [
            "[[rule]]\nallow = [\"web.example.com\"]\nmethods = [\"GET\"]\n",
            "[[rule]]\nallow = [\"web.example.com\"]\npaths = [\"/**\"]\n",
            "[[rule]]\nallow = [\"web.example.com\"]\n\
             [[rule]]\ndeny = [\"web.example.com\"]\npaths = [\"/admin\"]\n",
            "[[rule]]\nallow = [\"web.example.com\"]\nech = \"deny\"\n",
        ] {
            place.write(rules, 2);
            let mut stream = soon(place.dial(ORIGIN, 80)).await.expect("connected");
            let (status, head, _) = exchange(&mut stream, ASKED).await;
            assert_eq!(status, 403, "{rules}: {head}");
            assert!(head.contains("postern-deny: undecidable"), "{rules}: {head}");
        }
        assert_eq!(*read.lock().expect("unpoisoned"), "");
        place.write(RULES, 3);
        let mut stream = soon(place.dial(ORIGIN, 80)).await.expect("connected");
        assert_eq!(exchange(&mut stream, ASKED).await.0, 101, "the control");
    });
}

/// Attack E14. Bytes behind the handshake wait for the answer: they are the tunnel's if it is yes,
/// and requests, to be judged, if it is no.
#[test]
fn bytes_behind_an_upgrade_wait_for_its_answer() {
    run(RULES, async |place| {
        let (read, go) = scripted(place.origin(ORIGIN, 80), &[AGREED]);
        let mut stream = soon(place.dial(ORIGIN, 80)).await.expect("connected");
        stream.write_all(format!("{ASKED}early").as_bytes()).await.expect("sent");
        ends_with(&read, "\r\n\r\n").await;
        go.notify_one();
        assert_eq!(exchange(&mut stream, "").await.0, 101);
        ends_with(&read, "\r\n\r\nearly").await;
        stream.write_all(b" late").await.expect("sent");
        ends_with(&read, "\r\n\r\nearly late").await;
    });
    run(RULES, async |place| {
        let no = "HTTP/1.1 426 Upgrade Required\r\nContent-Length: 0\r\n\r\n";
        let yes = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
        let (read, go) = scripted(place.origin(ORIGIN, 80), Box::leak(Box::new([no, yes])));
        let mut stream = soon(place.dial(ORIGIN, 80)).await.expect("connected");
        let denied = "GET /smuggled HTTP/1.1\r\nHost: evil.example.com\r\n\r\n";
        stream.write_all(format!("{ASKED}{denied}{PLAIN}").as_bytes()).await.expect("sent");
        ends_with(&read, "\r\n\r\n").await;
        go.notify_one();
        for status in [426, 403, 200] {
            assert_eq!(exchange(&mut stream, "").await.0, status);
        }
        let read = read.lock().expect("unpoisoned").clone();
        assert!(!read.contains("smuggled") && read.contains("GET /plain"), "{read}");
    });
}

/// Attack E15. Nor does a far side turn a request into a tunnel that nobody asked for, or agree to
/// a handshake that is not this one.
#[test]
fn a_far_side_that_switches_unasked_is_a_502_and_the_connection_is_closed() {
    const WRONG: &str = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\
         Connection: Upgrade\r\nSec-WebSocket-Accept: c3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n";
    const OTHER: &str = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\n\
         Connection: Upgrade\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n";
    for (asked, answer) in [(PLAIN, AGREED), (ASKED, WRONG), (ASKED, OTHER)] {
        run(RULES, async |place| {
            let answers = Box::leak(Box::new([answer]));
            let (read, go) = scripted(place.origin(ORIGIN, 80), answers);
            go.notify_one();
            let mut stream = soon(place.dial(ORIGIN, 80)).await.expect("connected");
            stream.write_all(format!("{asked}{PLAIN}").as_bytes()).await.expect("sent");
            let (status, head, _) = exchange(&mut stream, "").await;
            assert_eq!(status, 502, "{answer}: {head}");
            assert!(head.contains("connection: close"), "{head}");
            assert_eq!(soon(stream.read(&mut [0])).await.unwrap_or(0), 0, "nothing more");
            let read = read.lock().expect("unpoisoned").clone();
            assert_eq!(read.matches("HTTP/1.1").count(), 1, "{read}");
        });
    }
}

/// Attack E11. Other protocols are not asked for: the request goes on as a request.
#[test]
fn an_upgrade_to_anything_else_is_stripped() {
    run(RULES, async |place| {
        let yes = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
        let answers: &'static [&'static str] = Box::leak(vec![yes; 8].into_boxed_slice());
        let (read, go) = scripted(place.origin(ORIGIN, 80), answers);
        go.notify_one();
        let mut stream = soon(place.dial(ORIGIN, 80)).await.expect("connected");
        for fields in [
            "Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQ\r\n",
            "Upgrade: TLS/1.0\r\nConnection: Upgrade\r\n",
            "Upgrade: websocket, h2c\r\nConnection: Upgrade\r\n\
             Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n",
            "Upgrade: websocket\r\nConnection: Upgrade\r\n",
        ] {
            let request = PLAIN.replace("\r\n\r\n", &format!("\r\n{fields}\r\n"));
            assert_eq!(exchange(&mut stream, &request).await.0, 200, "{fields}");
        }
        let read = read.lock().expect("unpoisoned").to_lowercase();
        assert_eq!(read.matches("get /plain").count(), 4, "{read}");
        assert!(!read.contains("upgrade") && !read.contains("http2-settings"), "{read}");
    });
}
