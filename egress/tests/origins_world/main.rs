//! The same bytes through the router to servers that people run: each reads of them what was judged.
//!
//! Needs root, and nginx, haproxy, nodejs, gunicorn and waitress (`deploy/setup.sh test`).
#![expect(
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a test ends where the world is not as it must be"
)]

#[path = "../router_world/corpus.rs"]
mod corpus;
#[path = "../router_world/peers.rs"]
#[expect(dead_code, reason = "the router's own tests use all of it")]
mod peers;
#[path = "../router_world/place.rs"]
#[expect(dead_code, reason = "the router's own tests use all of it")]
mod place;
mod servers;

use corpus::{Written, cases, judged, keep, say, written};
use place::{ORIGIN, run};
use servers::{SERVERS, Server};

/// By its address a server may be sent any bytes, so that what it reads as a request must be one here.
const RULES: &str = r#"
[[rule]]
allow = ["web.example.com"]
ports = [80, "8001-8006"]
[[rule]]
allow = ["93.184.216.34"]
ports = ["8001-8006"]
[[rule]]
deny = ["evil.example.com"]
"#;

/// Requests that servers were found to read in different ways, beside those of the suite; `~` is the
/// rest of a head that is good, and a character from U+E000 to U+E0FF its low byte alone.
const CASES: &[&str] = &[
    "GET /a?b=c%20d HTTP/1.1~\r\n",
    "GET /a//b/%2e%2e/c HTTP/1.1~\r\n",
    "GET /a/../b;x/./c HTTP/1.1~\r\n",
    "GET /%41%7e%2F?a=/../b HTTP/1.1~\r\n",
    "GET /a|b\"<>^`{} HTTP/1.1~\r\n",
    "GET http://web.example.com/abs HTTP/1.1~\r\n",
    "GET http://WEB.example.com?q HTTP/1.1~\r\n",
    "OPTIONS * HTTP/1.1~\r\n",
    "OPTIONS http://web.example.com HTTP/1.1~\r\n",
    "M-SEARCH /x HTTP/1.1~\r\n",
    "GET /old HTTP/1.0~Connection: keep-alive\r\n\r\n",
    "POST /c HTTP/1.1~Content-Length: 5\r\n\r\nhello",
    "POST /0 HTTP/1.1~Content-Length: 0\r\n\r\n",
    "POST /t HTTP/1.1~Transfer-Encoding: chunked\r\n\r\n005;a=b\r\nhello\r\n0\r\n\r\n",
    "POST /T HTTP/1.1~Transfer-Encoding: CHUNKED\r\n\r\n1\r\nh\r\n4;x\r\nello\r\n000\r\n\r\n",
    "GET /g HTTP/1.1~Content-Length: 5\r\n\r\nhello",
    "DELETE /d HTTP/1.1~Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "POST /e HTTP/1.1~Expect: 100-continue\r\nContent-Length: 5\r\n\r\nhello",
    "POST /E HTTP/1.1~Expect: 100-Continue, x\r\nContent-Length: 5\r\n\r\nhello",
    "POST /p HTTP/1.1~Connection: close, content-length, host\r\nContent-Length: 5\r\n\r\nhello",
    "GET /k HTTP/1.1~Keep-Alive: 1\r\nProxy-Connection: close\r\nUpgrade: h2c\r\n\r\n",
    "GET /x HTTP/1.1~X-HTTP-Method-Override: DELETE\r\nX-Original-URL: /y\r\n\r\n",
    "GET /v HTTP/1.1~X: \u{80}\u{fe}\r\nY:\r\nZ:\t a \t\r\n\r\n",
    "POST /1 HTTP/1.1~Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "POST /2 HTTP/1.1~Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "POST /3 HTTP/1.1~Content-Length: 5\r\n Content-Length: 50\r\n\r\nhello",
    "POST /4 HTTP/1.1~Transfer-Encoding: chunked\n\r\n0\r\n\r\n",
    "POST /5 HTTP/1.1~Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "POST /6 HTTP/1.1~Transfer-Encoding\u{b}: chunked\r\n\r\n0\r\n\r\n",
    "POST /7 HTTP/1.1~Transfer-Encoding: chunked\r\n\r\n5\nhello\r\n0\r\n\r\n",
    "POST /8 HTTP/1.1~Transfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n",
    "POST /9 HTTP/1.1~Transfer-Encoding: chunked\r\n\r\n5\r\nhelloXX0\r\n\r\n",
    "POST /10 HTTP/1.1~Transfer-Encoding: chunked\r\n\r\n0\r\nX: y\r\n\r\n",
    "POST /11 HTTP/1.1~Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\nhello\r\n0\r\n\r\n",
    "GET  /12 HTTP/1.1~\r\n",
    "GET\t/13 HTTP/1.1~\r\n",
    " GET /14 HTTP/1.1~\r\n",
    " \r\n\tGET /15 HTTP/1.1~\r\n",
    "GET ws://web.example.com/16 HTTP/1.1~\r\n",
    "GET 17 HTTP/1.1~\r\n",
    "GET ?18 HTTP/1.1~\r\n",
    "GET @web.example.com/19 HTTP/1.1~\r\n",
    "GET web.example.com:80 HTTP/1.1~\r\n",
    "!GET /20 HTTP/1.1~\r\n",
    "1GET /21 HTTP/1.1~\r\n",
    "_GET /22 HTTP/1.1~\r\n",
    "AMETHODWITHMORELETTERSTHANANYTHATISREGISTERED /23 HTTP/1.1~\r\n",
    "GET\u{b}/24 HTTP/1.1~\r\n",
    "GET \u{c}/25 HTTP/1.1~\r\n",
    "G(T /26 HTTP/1.1~\r\n",
    "GET: /27 HTTP/1.1~\r\n",
    "GET \u{e9} HTTP/1.1~\r\n",
    "\"GET /28 HTTP/1.1~\r\n",
    "\u{feff}GET /29 HTTP/1.1~\r\n",
    // As Latin-1, by whose white space Python parts a line.
    "GET\u{e01c}/30 HTTP/1.1~\r\n",
    "GET\u{e01f}/31\u{e01e}HTTP/1.1~\r\n",
    "GET\u{e085}/32 HTTP/1.1~\r\n",
    "GET \u{e0a0}/33 HTTP/1.1~\r\n",
    "GET /34\u{e0a0}HTTP/1.1~\r\n",
    "\u{e085}GET /35 HTTP/1.1~\r\n",
    "\u{e0a0}\u{e01d}GET\u{e0a0}/36\u{e085}HTTP/1.1~\r\n",
    "GET /37\u{e0a0} HTTP/1.1~\r\n",
    "G\u{e0a0}T /38 HTTP/1.1~\r\n",
    "GET\u{a0}/39 HTTP/1.1~\r\n",
    "\u{85}GET /40 HTTP/1.1~\r\n",
    "\u{e9}GET /41 HTTP/1.1~\r\n",
    "\u{e0ff}GET /42 HTTP/1.1~\r\n",
    "(GET /43 HTTP/1.1~\r\n",
    "{\"GET\" /44 HTTP/1.1~\r\n",
    "<GET\t/45 HTTP/1.1~\r\n",
    "/GET\tx\ty /46 HTTP/1.1~\r\n",
    "@  /47  http/1.1~\r\n",
];

/// What follows each, to be read as part of it where a server reads it otherwise.
const BEHIND: &str = "GET /behind HTTP/1.1\r\nHost: web.example.com\r\n\r\n";

/// A length that is not known, of a body that was cut short.
const CUT: usize = usize::MAX;

/// What is sent for a text.
fn bytes(text: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    for char in text.chars() {
        match u32::from(char).to_be_bytes() {
            [0, 0, 0xe0, byte] => bytes.push(byte),
            _ => bytes.extend(char.to_string().bytes()),
        }
    }
    bytes
}

/// Whether a server read the request as it was written. Some do not say how long the body was, and
/// one has no word for `*`.
fn same(read: &[String], written: &Written, port: u16) -> bool {
    let [method, target, host, length] = read else { return false };
    *method == written.method
        && (*target == written.target || (target == "-" && written.target == "*"))
        && *host == format!("web.example.com:{port}")
        && (length == "-" || written.length == CUT || *length == written.length.to_string())
}

/// Promise 39. Attack E27. The requests that a server reads are those that were judged, each the
/// same for every server; a server may refuse one, but not read another.
#[test]
fn every_server_reads_what_was_judged() {
    let host = "\r\nHost: web.example.com\r\n";
    let mut texts: Vec<(String, String)> =
        CASES.iter().map(|case| ((*case).to_owned(), case.replace('~', host) + BEHIND)).collect();
    texts.extend(cases().into_iter().map(|c| (format!("{} ({})", c.name, c.tier), c.request)));
    run(RULES, async |place| {
        let kept = keep(place.origin(ORIGIN, 80));
        let servers: Vec<Server> =
            SERVERS.iter().map(|kind| Server::start(&place, *kind)).collect();
        for server in &servers {
            server.ready(&place).await;
        }
        judged(&place);
        let (mut read, mut refused) = (0, 0);
        for (name, text) in &texts {
            let text = bytes(text);
            say(&place, 80, &text).await;
            let bytes = std::mem::take(&mut *kept.lock().expect("unpoisoned"));
            let mut wanted: Vec<Written> =
                bytes.iter().flat_map(|bytes| written(bytes).0).collect();
            let mut let_through = judged(&place);
            // The last may have been cut short, where its body has a flaw.
            let cut = let_through.len() - wanted.len();
            assert!(cut <= 1, "{name}: {let_through:?} {wanted:?}");
            wanted.extend(
                let_through.drain(wanted.len()..).map(|(method, target, host)| Written {
                    method,
                    target,
                    host,
                    length: CUT,
                }),
            );
            for server in &servers {
                let answer = say(&place, server.port, &text).await;
                assert_eq!(judged(&place).len(), wanted.len(), "{}: {name}", server.name);
                let errors =
                    answer.matches("HTTP/1.1 4").count() + answer.matches("HTTP/1.1 5").count();
                let lines = server.requests(wanted.len() - cut, errors).await;
                let mut due = wanted.iter();
                for line in &lines {
                    let found = due.any(|wanted| same(line, wanted, server.port));
                    assert!(found, "{} read {line:?} of {wanted:?}: {name}", server.name);
                }
                let missing = wanted.len() - lines.len();
                assert!(
                    missing <= errors + cut,
                    "{}: {lines:?} of {wanted:?}: {answer}",
                    server.name
                );
                read += lines.len();
                refused += missing;
            }
        }
        println!("{} texts, {} servers: {read} read, {refused} not", texts.len(), servers.len());
        assert!(read > 10 * refused, "{read} read, {refused} not");
        for server in &servers {
            assert_eq!(server.surplus().await, 0, "{} read more later", server.name);
        }
    });
}
