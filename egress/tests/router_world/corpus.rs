//! Requests made to be read in more than one way, and an origin that keeps every byte of what it gets,
//! to be read again here by other means than the router's.

use std::fmt::Write as _;
use std::sync::{Arc, Mutex};

use policy::audit::{Kind, Outcome};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::peers::{serve, soon};
use crate::place::{ORIGIN, Place};

/// Everything a far side has read, connection by connection.
pub(crate) type Bytes = Arc<Mutex<Vec<Vec<u8>>>>;

/// A request as it stands in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Written {
    pub(crate) method: String,
    pub(crate) target: String,
    pub(crate) host: String,
    /// Of the body.
    pub(crate) length: usize,
}

/// Keeps every byte, and answers each request that is whole.
pub(crate) fn keep(listener: TcpListener) -> Bytes {
    let kept = Bytes::default();
    let keeping = Arc::clone(&kept);
    serve(listener, move |mut stream| {
        let keeping = Arc::clone(&keeping);
        async move {
            let mine = {
                let mut all = keeping.lock().expect("unpoisoned");
                all.push(Vec::new());
                all.len() - 1
            };
            let (mut buffer, mut answered) = (vec![0; 65_536], 0);
            while let Ok(length @ 1..) = stream.read(&mut buffer).await {
                let whole = {
                    let mut all = keeping.lock().expect("unpoisoned");
                    all[mine].extend(&buffer[..length]);
                    written(&all[mine]).0.len()
                };
                for _ in answered..whole {
                    let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
                    if stream.write_all(answer).await.is_err() {
                        return;
                    }
                }
                answered = whole;
            }
        }
    });
    kept
}

/// The requests in these bytes, and how many bytes are of none. Reads by the letter, and panics at
/// what leaves it a choice.
pub(crate) fn written(mut bytes: &[u8]) -> (Vec<Written>, usize) {
    let mut all = Vec::new();
    loop {
        let mut fields = [httparse::EMPTY_HEADER; 128];
        let mut head = httparse::Request::new(&mut fields);
        let end = match head.parse(bytes) {
            Ok(httparse::Status::Complete(end)) => end,
            Ok(httparse::Status::Partial) => return (all, bytes.len()),
            Err(error) => panic!("{error}: {:?}", String::from_utf8_lossy(bytes)),
        };
        let every = |name: &str| -> Vec<String> {
            let named = head.headers.iter().filter(|f| f.name.eq_ignore_ascii_case(name));
            named.map(|f| String::from_utf8_lossy(f.value).into_owned()).collect()
        };
        let (hosts, lengths) = (every("host"), every("content-length"));
        let codings = every("transfer-encoding");
        assert_eq!((head.version, hosts.len()), (Some(1), 1), "{head:?}");
        assert!(lengths.len() + codings.len() <= 1, "{head:?}");
        let rest = &bytes[end..];
        let body = match (lengths.first(), codings.first().map(String::as_str)) {
            (Some(length), _) => {
                assert!(length.bytes().all(|b| b.is_ascii_digit()), "{length}");
                let length = length.parse().expect("a number");
                (rest.len() >= length).then_some((length, length))
            }
            (None, Some("chunked")) => dechunk(rest),
            (None, None) => Some((0, 0)),
            (None, Some(other)) => panic!("{other}"),
        };
        let Some((length, used)) = body else { return (all, bytes.len()) };
        all.push(Written {
            method: head.method.expect("whole").to_owned(),
            target: head.path.expect("whole").to_owned(),
            host: hosts[0].clone(),
            length,
        });
        bytes = &rest[used..];
    }
}

/// The length of a body in chunks, with and without their framing; none while it is not whole.
fn dechunk(bytes: &[u8]) -> Option<(usize, usize)> {
    let (mut at, mut length) = (0, 0);
    loop {
        let line = bytes[at..].windows(2).position(|two| two == b"\r\n")?;
        let size = std::str::from_utf8(&bytes[at..at + line]).expect("ascii");
        let size = usize::from_str_radix(size, 16).expect("a size and nothing else");
        at += line + 2;
        if size == 0 {
            assert_eq!(bytes.get(at..at + 2)?, b"\r\n", "no trailers here");
            return Some((length, at + 2));
        }
        length += size;
        at += size;
        assert_eq!(bytes.get(at..at + 2)?, b"\r\n");
        at += 2;
    }
}

/// One case of the suite.
#[derive(Debug)]
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) tier: String,
    pub(crate) request: String,
}

/// The suite, each request with a host where it has none, with the body it says it has as far as
/// one can tell (a huge one made smaller), and with another request behind it.
pub(crate) fn cases() -> Vec<Case> {
    let lines = include_str!("../data/requests/desync.jsonl").lines();
    let case = |line: &str| {
        let case: serde_json::Value = serde_json::from_str(line).expect("json");
        let text = |key: &str| case[key].as_str().expect("text").to_owned();
        let mut request = format!("{} {} {}", text("method"), text("uri"), text("version"));
        request.push_str("\r\n");
        let (mut hosted, mut body) = (false, String::new());
        for field in case["headers"].as_array().expect("fields") {
            let [name, value] = [0, 1].map(|n| field[n].as_str().expect("text"));
            let is = |field: &str| name.trim().eq_ignore_ascii_case(field);
            let huge = value.trim().parse().is_ok_and(|length: u64| length > 99_999);
            let value = match value {
                _ if is("host") => "web.example.com",
                _ if is("content-length") && huge => "70000",
                value => value,
            };
            hosted |= is("host");
            // Beside chunks a length is what a server may ignore: then all is right.
            if is("content-length") && !body.ends_with("\r\n") {
                let digits: String = value.chars().filter(char::is_ascii_digit).take(5).collect();
                body = "x".repeat(digits.parse().unwrap_or(0));
            } else if is("transfer-encoding") {
                body = "3\r\nabc\r\n0\r\n\r\n".to_owned();
            }
            write!(request, "{name}: {value}\r\n").expect("memory");
        }
        if !hosted {
            request.push_str("Host: web.example.com\r\n");
        }
        let behind = "GET /behind HTTP/1.1\r\nHost: evil.example.com\r\n\r\n";
        Case {
            name: text("name"),
            tier: text("tier"),
            request: format!("{request}\r\n{body}{behind}"),
        }
    };
    lines.map(case).collect()
}

/// What was let through, as the audit has it.
pub(crate) fn judged(place: &Place) -> Vec<(String, String, String)> {
    let let_through =
        |r: &policy::AuditRecord| r.kind == Kind::Request && r.outcome == Outcome::Allow;
    let records = place.recorded().into_iter().filter(let_through);
    let texts = records.map(|r| (r.method, r.path, r.name));
    texts.map(|(m, p, n)| (m.expect("a method"), p.expect("a path"), n.expect("a name"))).collect()
}

/// Sends these bytes, says it is done, and reads what comes back, until the end or a reset.
pub(crate) async fn say(place: &Place, port: u16, bytes: &[u8]) -> String {
    let mut stream = soon(place.dial(ORIGIN, port)).await.expect("connected");
    let mut back = Vec::new();
    // A refusal may come, and the connection end, before all is sent.
    if stream.write_all(bytes).await.is_ok() {
        let _ = stream.shutdown().await;
    }
    let _ = soon(stream.read_to_end(&mut back)).await;
    String::from_utf8_lossy(&back).into_owned()
}
