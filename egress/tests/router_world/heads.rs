//! Heads that are refused, first and later on a connection, whole and byte by byte.

use policy::Code;
use policy::audit::Outcome;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::corpus::{keep, say, written};
use crate::peers::{count, sink, soon};
use crate::place::{ORIGIN, SINK, run};
use crate::requests::{RULES, exchange};

const GOOD: &str = "GET /good HTTP/1.1\r\nHost: web.example.com\r\n\r\n";

/// A head, and the status it is refused with.
type Bad = (&'static str, u16);

/// Attacks D25, E01, E02, E04.
const HOSTS: [Bad; 16] = [
    ("GET / HTTP/1.1\r\nHost: ../../x\r\n", 400),
    ("GET / HTTP/1.1\r\n", 400),
    ("GET / HTTP/1.1\r\nHost:\r\n", 400),
    ("GET / HTTP/1.1\r\nHost: web.example.com\r\nHost: web.example.com\r\n", 400),
    ("GET / HTTP/1.1\r\nHost: web.example.com, evil.example.com\r\n", 400),
    ("GET / HTTP/1.1\r\nHost: web.example.com@evil.example.com\r\n", 400),
    ("GET / HTTP/1.1\r\nHost: web.example.com/../x\r\n", 400),
    ("GET / HTTP/1.1\r\nHost: [web.example.com]\r\n", 400),
    ("GET / HTTP/1.1\r\nHost: [[::1]]\r\n", 400),
    ("GET / HTTP/1.1\r\nHost: 0x7f.1\r\n", 400),
    ("GET / HTTP/1.1\r\nHost: 2130706433\r\n", 400),
    ("GET / HTTP/1.1\r\nHost: [::ffff:7f00:1]\r\n", 421),
    ("GET / HTTP/1.1\r\nHost: web.example.com:81\r\n", 421),
    ("GET http://evil.example.com/ HTTP/1.1\r\nHost: web.example.com\r\n", 421),
    ("GET http://web.example.com/ HTTP/1.1\r\nHost: evil.example.com\r\n", 421),
    ("GET https://web.example.com/ HTTP/1.1\r\nHost: web.example.com\r\n", 400),
];

/// Attacks E05, E06, E07, E09.
const FRAMES: [Bad; 18] = [
    ("GET / HTTP/1.1\r\nHost: web.example.com\r\nX: a\r\n b\r\n", 400),
    ("GET / HTTP/1.1\nHost: web.example.com\n", 400),
    ("GET / HTTP/1.1\r\nHost: web.example.com\r\nX: a\rb\r\n", 400),
    ("GET / HTTP/1.1\r\nHost: web.example.com\r\nX: a\0b\r\n", 400),
    ("GET / HTTP/1.1\r\nHost : web.example.com\r\n", 400),
    ("GET / HTTP/1.1\r\nHost: web.example.com\r\n: a\r\n", 400),
    (
        "POST / HTTP/1.1\r\nHost: web.example.com\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n",
        400,
    ),
    (
        "POST / HTTP/1.1\r\nHost: web.example.com\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n",
        400,
    ),
    ("POST / HTTP/1.1\r\nHost: web.example.com\r\nContent-Length: 4\r\nContent-Length: 4\r\n", 400),
    ("POST / HTTP/1.1\r\nHost: web.example.com\r\nContent-Length: 4, 4\r\n", 400),
    ("POST / HTTP/1.1\r\nHost: web.example.com\r\nContent-Length: +4\r\n", 400),
    ("POST / HTTP/1.1\r\nHost: web.example.com\r\nContent-Length: 0x10\r\n", 400),
    ("POST / HTTP/1.1\r\nHost: web.example.com\r\nContent-Length: 010\r\n", 400),
    ("POST / HTTP/1.1\r\nHost: web.example.com\r\nTransfer-Encoding: chunked, identity\r\n", 400),
    ("POST / HTTP/1.0\r\nHost: web.example.com\r\nTransfer-Encoding: chunked\r\n", 400),
    ("GET /\r\n", 400),
    ("GET / HTTP/1.32\r\nHost: web.example.com\r\n", 505),
    ("GET / HTTP/2.0\r\nHost: web.example.com\r\n", 505),
];

/// Attacks E10, E12, E22, P18.
const METHODS: [Bad; 7] = [
    ("CONNECT web.example.com:443 HTTP/1.1\r\nHost: web.example.com:443\r\n", 405),
    ("CONNECT 93.184.216.36:443 HTTP/1.1\r\nHost: 93.184.216.36:443\r\n", 405),
    ("CONNECT web.example.com:80 HTTP/1.1\r\nHost: web.example.com\r\n", 405),
    ("TRACE / HTTP/1.1\r\nHost: web.example.com\r\n", 405),
    ("post / HTTP/1.1\r\nHost: web.example.com\r\n", 400),
    ("PRI * HTTP/2.0\r\n", 505),
    ("PRI * HTTP/1.1\r\n", 400),
];

/// Attacks D25, E01, E02, E04, E05, E06, E07, E09, E12, E22, P15, P18, P50. Whether it is the first of
/// its connection or not.
#[test]
fn a_bad_head_is_answered_and_nothing_after_it_is_read() {
    run(RULES, async |place| {
        let kept = keep(place.origin(ORIGIN, 80));
        let foreign = sink(place.origin(SINK, 443));
        for (bad, status) in HOSTS.iter().chain(&FRAMES).chain(&METHODS) {
            for first in [true, false] {
                let before = if first { "" } else { GOOD };
                // Where it is read as chunks, all that follows would be right.
                let words = format!("{before}{bad}\r\n0\r\n\r\n{GOOD}");
                let answer = say(&place, 80, words.as_bytes()).await;
                let statuses: Vec<&str> = answer
                    .match_indices("HTTP/1.1 ")
                    .map(|(at, _)| &answer[at + 9..at + 12])
                    .collect();
                let status = status.to_string();
                let wanted: &[&str] = if first { &[&status] } else { &["200", &status] };
                assert_eq!(statuses, wanted, "{words}");
                assert!(answer.contains("connection: close"), "{words}: {answer}");
                let deny = place.record(|r| r.outcome == Outcome::Deny).await;
                assert_eq!(deny.status.map(|s| s.to_string()), Some(status), "{words}");
                let seen = std::mem::take(&mut *kept.lock().expect("unpoisoned"));
                let seen: Vec<_> = seen.iter().flat_map(|bytes| written(bytes).0).collect();
                assert_eq!(seen.len(), usize::from(!first), "{words}: {seen:?}");
            }
        }
        assert_eq!(count(&foreign), 0);
    });
}

/// Attacks E06, E10. However its bytes are cut.
#[test]
fn a_bad_head_in_single_bytes_is_refused_like_one_that_comes_whole() {
    run(RULES, async |place| {
        let kept = keep(place.origin(ORIGIN, 80));
        for (bad, status) in [FRAMES[6], FRAMES[1], METHODS[5], METHODS[6]] {
            let mut stream = soon(place.dial(ORIGIN, 80)).await.expect("connected");
            assert_eq!(exchange(&mut stream, GOOD).await.0, 200);
            for byte in format!("{bad}\r\n").bytes() {
                if stream.write_all(&[byte]).await.is_err() {
                    break;
                }
                tokio::task::yield_now().await;
            }
            assert_eq!(exchange(&mut stream, "").await.0, status, "{bad}");
            assert_eq!(soon(stream.read(&mut [0])).await.expect("the end"), 0, "{bad}");
        }
        let seen = kept.lock().expect("unpoisoned").clone();
        assert_eq!(seen.iter().map(|bytes| written(bytes).0.len()).sum::<usize>(), 4);
    });
}

/// Attack E10. Prior knowledge of HTTP/2, in pieces.
#[test]
fn http_2_in_clear_in_pieces_is_refused() {
    run(RULES, async |place| {
        let kept = keep(place.origin(ORIGIN, 80));
        let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
        for cut in [1, 7, 16, preface.len() - 1] {
            let mut stream = soon(place.dial(ORIGIN, 80)).await.expect("connected");
            stream.set_nodelay(true).expect("set");
            let (first, second) = preface.split_at(cut);
            stream.write_all(first).await.expect("sent");
            tokio::task::yield_now().await;
            stream.write_all(second).await.expect("sent");
            assert!(soon(stream.read_u8()).await.is_err(), "{cut}");
            let deny = place.record(|r| r.outcome == Outcome::Deny).await;
            assert_eq!(deny.code, Some(Code::Protocol), "{cut}");
        }
        // What only begins like it is a request of another version.
        let answer = say(
            &place,
            80,
            b"PRI * HTTP/2.0\r\n\r\nGET / HTTP/1.1\r\nHost: web.example.com\r\n\r\n",
        );
        assert!(answer.await.starts_with("HTTP/1.1 505"));
        assert!(kept.lock().expect("unpoisoned").is_empty());
        assert!(say(&place, 80, GOOD.as_bytes()).await.starts_with("HTTP/1.1 200"), "the control");
    });
}

/// Attack E17. A body goes on framed, whatever the method, and what follows it is a request or
/// nothing.
#[test]
fn a_body_hides_no_request_whatever_the_method_and_the_expectation() {
    run(RULES, async |place| {
        let kept = keep(place.origin(ORIGIN, 80));
        let inner = "GET /inner HTTP/1.1\r\nHost: web.example.com\r\n\r\n";
        for method in ["GET", "HEAD", "DELETE", "OPTIONS", "POST"] {
            for expect in
                ["", "Expect: 100-continue\r\n", "Expect: 200-ok\r\n", "Expect: y 100-continue\r\n"]
            {
                let chunks = format!("{:x}\r\n{inner}\r\n0\r\n\r\n", inner.len());
                let length = format!("Content-Length: {}", inner.len());
                for (framing, body) in [(&*length, inner), ("Transfer-Encoding: chunked", &chunks)]
                {
                    let head =
                        format!("{method} /outer HTTP/1.1\r\nHost: web.example.com\r\n{expect}");
                    let words = format!("{head}{framing}\r\n\r\n{body}{GOOD}");
                    say(&place, 80, words.as_bytes()).await;
                    let seen = std::mem::take(&mut *kept.lock().expect("unpoisoned"));
                    let seen: Vec<_> = seen.iter().flat_map(|bytes| written(bytes).0).collect();
                    let targets: Vec<&str> = seen.iter().map(|seen| &*seen.target).collect();
                    assert_eq!(targets, ["/outer", "/good"], "{words}");
                    assert_eq!(seen[0].length, inner.len(), "{words}");
                }
            }
        }
    });
}

/// Attack E20. Without a rule for paths a path that servers read in different ways is the far
/// side's business, and goes on as it came; with one it is refused (`methods_and_paths_...`).
#[test]
fn a_path_without_a_canonical_form_passes_where_no_rule_names_paths() {
    run(RULES, async |place| {
        let kept = keep(place.origin(ORIGIN, 80));
        for path in ["/a//b", "/http://x.example/", "/a%2Fb?c=%zz", "/a\\b", "/..;/a"] {
            say(&place, 80, GOOD.replace("/good", path).as_bytes()).await;
            let seen = std::mem::take(&mut *kept.lock().expect("unpoisoned"));
            assert_eq!(written(&seen[0]).0[0].target, path);
        }
    });
}

/// Attack E21. Neither can what is named away take a field from the far side that it needs, nor
/// does what is meant for us go on.
#[test]
fn a_connection_field_names_no_field_away_that_the_far_side_needs() {
    run(RULES, async |place| {
        let kept = keep(place.origin(ORIGIN, 80));
        let fields = "Connection: authorization, host, content-length, x-hop, close\r\n\
                      Authorization: t\r\nX-Hop: 1\r\nProxy-Authorization: t\r\nKeep-Alive: 1\r\n\
                      Content-Length: 2\r\n";
        let head = format!("POST / HTTP/1.1\r\nHost: web.example.com\r\n{fields}\r\nhi");
        say(&place, 80, head.as_bytes()).await;
        let sent = String::from_utf8(kept.lock().expect("unpoisoned")[0].clone()).expect("ascii");
        let sent = sent.to_lowercase();
        for kept in ["host: web.example.com", "authorization: t", "content-length: 2"] {
            assert!(sent.contains(kept), "{kept}: {sent}");
        }
        for gone in ["x-hop", "proxy-authorization", "keep-alive", "connection"] {
            assert!(!sent.contains(gone), "{gone}: {sent}");
        }
    });
}

/// Attack P48. A host has one spelling, and a rule names whole labels.
#[test]
fn spellings_of_a_host_are_one_host_and_what_only_ends_like_it_is_another() {
    const NAMES: &str = r#"
        [[rule]]
        allow = ["web.example.com", "*.wild.example.com", ".both.example.com", "b\u00fccher.example"]
    "#;
    run(NAMES, async |place| {
        let kept = keep(place.origin(ORIGIN, 80));
        for (host, sent) in [
            ("WEB.Example.COM", Ok("web.example.com")),
            ("web.example.com.", Ok("web.example.com")),
            ("web.example.com:80", Ok("web.example.com")),
            ("xn--bcher-kva.example", Ok("xn--bcher-kva.example")),
            ("XN--Bcher-KVA.example.", Ok("xn--bcher-kva.example")),
            ("a.wild.example.com", Ok("a.wild.example.com")),
            ("a.b.WILD.example.com", Ok("a.b.wild.example.com")),
            ("both.example.com", Ok("both.example.com")),
            ("x.both.example.com", Ok("x.both.example.com")),
            ("evilweb.example.com", Err("403")),
            ("x.web.example.com", Err("403")),
            ("web.example.com.evil.example", Err("403")),
            ("wild.example.com", Err("403")),
            ("evilwild.example.com", Err("403")),
            ("evilboth.example.com", Err("403")),
            ("bcher-kva.example", Err("403")),
            ("b\u{fc}cher.example", Err("400")),
            ("web.example.com..", Err("400")),
            (".web.example.com", Err("400")),
            ("*.wild.example.com", Err("400")),
            ("web.example.com%2e", Err("400")),
        ] {
            let words = GOOD.replace("web.example.com", host);
            let answer = say(&place, 80, words.as_bytes()).await;
            let seen = std::mem::take(&mut *kept.lock().expect("unpoisoned"));
            let seen: Vec<_> = seen.iter().flat_map(|bytes| written(bytes).0).collect();
            let hosts: Vec<&str> = seen.iter().map(|seen| &*seen.host).collect();
            match sent {
                Ok(sent) => assert_eq!(hosts, [sent], "{host}: {answer}"),
                Err(status) => {
                    assert!(hosts.is_empty(), "{host}: {hosts:?}");
                    assert_eq!(answer.get(9..12), Some(status), "{host}: {answer}");
                }
            }
        }
    });
}

/// Attack D21. What its first bytes were, a connection stays: TLS behind a request is no request,
/// and goes nowhere.
#[test]
fn tls_behind_a_request_in_clear_is_refused() {
    run(RULES, async |place| {
        let kept = keep(place.origin(ORIGIN, 80));
        let hello = include_bytes!("../data/hellos/curl.bin");
        let answer = say(&place, 80, &[GOOD.as_bytes(), hello].concat()).await;
        let statuses: Vec<_> = answer.match_indices("HTTP/1.1 ").collect();
        assert_eq!(statuses.len(), 2, "{answer}");
        assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("HTTP/1.1 400"), "{answer}");
        let seen = kept.lock().expect("unpoisoned").clone();
        assert_eq!((seen.len(), written(&seen[0]).0.len(), written(&seen[0]).1), (1, 1, 0));
    });
}
