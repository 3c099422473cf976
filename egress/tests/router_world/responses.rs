//! Far sides that answer wrongly: more than once, less than they say, in two framings, without end.

use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;

use crate::peers::{count, serve, soon};
use crate::place::{ORIGIN, Place, run};
use crate::requests::{RULES, exchange};

const ASK: &str = "GET / HTTP/1.1\r\nHost: web.example.com\r\n\r\n";

/// Answers the first head of its n-th connection with the n-th answer and closes when it says so;
/// notes how each connection ended.
struct Answers {
    peers: crate::peers::Peers,
    ended: Arc<Mutex<Vec<usize>>>,
}

fn answering(listener: TcpListener, answers: &'static [&'static str], closes: bool) -> Answers {
    let ended = Arc::<Mutex<Vec<usize>>>::default();
    let (ending, next) = (Arc::clone(&ended), Arc::new(Mutex::new(0)));
    let peers = serve(listener, move |mut stream| {
        let (ending, next) = (Arc::clone(&ending), Arc::clone(&next));
        async move {
            let n = {
                let mut next = next.lock().expect("unpoisoned");
                *next += 1;
                *next - 1
            };
            head(&mut stream).await;
            let _ = stream.write_all(answers.get(n).expect("an answer for it").as_bytes()).await;
            if !closes {
                // Whatever comes now is a request that should have come on another connection.
                let mut rest = Vec::new();
                let _ = stream.read_to_end(&mut rest).await;
                ending.lock().expect("unpoisoned").push(rest.len());
            }
        }
    });
    Answers { peers, ended }
}

async fn head(stream: &mut TcpStream) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let Ok(byte) = stream.read_u8().await else { return };
        head.push(byte);
    }
}

async fn connected(place: &Place) -> TcpStream {
    soon(place.dial(ORIGIN, 80)).await.expect("connected")
}

/// Attack E25. A connection on which more came than was asked for is closed at once, and what came
/// answers nothing.
#[test]
fn a_second_answer_to_one_request_answers_no_other() {
    const TWO: &str = "HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na\
                       HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nb";
    const BYTE: &str = "HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nab";
    const GOOD: &str = "HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nc";
    for answers in [&[TWO, GOOD], &[BYTE, GOOD]] {
        run(RULES, async |place| {
            let origin = answering(place.origin(ORIGIN, 80), answers, false);
            let mut stream = connected(&place).await;
            assert_eq!(exchange(&mut stream, ASK).await.2, "a");
            let (status, _, body) = exchange(&mut stream, ASK).await;
            assert_eq!((status, &*body, count(&origin.peers)), (200, "c", 2));
            soon(async {
                while origin.ended.lock().expect("unpoisoned").is_empty() {
                    tokio::task::yield_now().await;
                }
            })
            .await;
            assert_eq!(*origin.ended.lock().expect("unpoisoned"), [0], "nothing was sent to it");
        });
    }
}

/// Attack E25. What cannot be read in one way, or at all, is a 502, and so is nothing.
#[test]
fn an_answer_that_cannot_be_read_is_a_502() {
    let large = format!("HTTP/1.1 200 OK\r\nX: {}\r\n\r\n", "x".repeat(140_000));
    let many = format!("HTTP/1.1 200 OK\r\n{}\r\n", "x: y\r\n".repeat(5_000));
    for answer in [
        "",
        "HTTP/1.1 200 OK\r\nContent-Le",
        "SSH-2.0-server\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\na",
        "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: +1\r\n\r\na",
        "HTTP/1.1 200 OK\r\nX\0: y\r\n\r\n",
        "HTTP/3.7 200 OK\r\n\r\n",
        &large,
        &many,
    ] {
        let answers: &'static [&'static str] = Box::leak(Box::new([&*answer.to_owned().leak()]));
        run(RULES, async |place| {
            answering(place.origin(ORIGIN, 80), answers, true);
            let mut stream = connected(&place).await;
            let (status, head, _) = exchange(&mut stream, ASK).await;
            let shown = &answer[..answer.len().min(60)];
            assert_eq!(status, 502, "{shown:?}: {head}");
            assert!(head.contains("postern-deny: upstream-unreachable"), "{shown:?}: {head}");
        });
    }
}

/// Attack E25. An answer that ends before it should does not look whole to the guest.
#[test]
fn an_answer_that_ends_early_ends_the_guests_connection() {
    for answer in [
        "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nabc",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
    ] {
        run(RULES, async |place| {
            let arrived = Arc::new(Notify::new());
            let over = Arc::clone(&arrived);
            serve(place.origin(ORIGIN, 80), move |mut stream| {
                let over = Arc::clone(&over);
                async move {
                    head(&mut stream).await;
                    stream.write_all(answer.as_bytes()).await.expect("answered");
                    over.notified().await;
                }
            });
            let mut stream = connected(&place).await;
            stream.write_all(ASK.as_bytes()).await.expect("sent");
            let mut seen = Vec::new();
            while !seen.ends_with(b"abc") {
                seen.push(soon(stream.read_u8()).await.expect("what there is of it"));
            }
            arrived.notify_one();
            let _ = soon(stream.read_to_end(&mut seen)).await;
            let seen = String::from_utf8(seen).expect("ascii");
            assert!(seen.starts_with("HTTP/1.1 200"), "{seen}");
            assert!(!seen.contains("\r\n0\r\n"), "{seen}");
        });
    }
}
