//! One corpus of spellings: what is a host, which host it is, and what is none.

use policy::name::NameError::{self, *};
use policy::{Authority, AuthorityHost, Host, Pattern};
use proptest::prelude::*;

/// Spellings and the one form they share.
#[rustfmt::skip]
const SAME: &[(&str, &[&str])] = &[
    (
        "example.com",
        &[
            "example.com", "EXAMPLE.COM", "eXample.Com", "example.com.", "ｅｘａｍｐｌｅ.com",
            "example。com", "example．com", "example｡com", "exa\u{ad}mple.com",
            "exam\u{200b}ple.com", "ⓔxample.com", "𝐞xample.com", "Example.COM。",
        ],
    ),
    (
        "xn--bcher-kva.example",
        &[
            "bücher.example", "BÜCHER.example", "bu\u{308}cher.example", "xn--bcher-kva.example",
            "XN--BCHER-KVA.Example", "Xn--bcher-Kva.example.",
        ],
    ),
    ("xn--fiqs8s", &["中国", "xn--fiqs8s"]),
    ("xn--strae-oqa.de", &["straße.de", "xn--strae-oqa.de", "STRAẞE.de"]),
    ("strasse.de", &["strasse.de", "STRASSE.DE"]),
    ("xn--mgbh0fb.example", &["مثال.example"]),
    ("_dmarc.example.com", &["_dmarc.example.com", "_DMARC.example.com"]),
    ("_https._tcp.example.com", &["_https._tcp.example.com"]),
    ("under_score.example.com", &["under_score.example.com"]),
    ("r3---sn-4g5e6nez.googlevideo.com", &["r3---sn-4g5e6nez.googlevideo.com"]),
    ("a--b.example", &["a--b.example"]),
    ("localhost", &["localhost", "LOCALHOST", "localhost."]),
    ("com", &["com", "com."]),
    ("a", &["a", "A"]),
    ("1.example", &["1.example"]),
    ("1.2.3.example", &["1.2.3.example"]),
    ("127.0.0.1.nip.io", &["127.0.0.1.nip.io"]),
    ("0x7f.1.example", &["0x7f.1.example"]),
    ("1a", &["1a"]),
    ("0x7g", &["0x7g"]),
    ("x0x1", &["x0x1"]),
    ("1e3.x1", &["1e3.x1"]),
    ("4.4.in-addr.arpa", &["4.4.in-addr.arpa"]),
    ("3com.com", &["3com.com"]),
    ("metadata.google.internal", &["metadata.google.internal", "METADATA.google.internal."]),
];

/// What is no host, and why.
#[rustfmt::skip]
const REFUSED: &[(NameError, &[&str])] = &[
    (Empty, &[""]),
    (
        IpAddress,
        &[
            "1.2.3.4", "127.0.0.1", "127.0.0.1.", "127.1", "127.0.1", "127", "0", "00",
            "2130706433", "0x7f.1", "0x7f.0.0.1", "0x7f000001", "0X7F000001", "0x", "0x0",
            "0177.0.0.1", "0177.1", "017700000001", "0300.0250.1.1", "1.2.3", "1.2.3.4.5",
            "1.2.3.256", "999.999.999.999", "1.2.3.08", "4294967296", "99999999999999999999",
            "169.254.169.254", "0xa9fea9fe", "2852039166", "0251.0376.0251.0376", "example.1",
            "example.com.1", "example.0x10", "example.0x", "example.08", "foo.0XfF", "１２７.０.０.１",
            "127。0。0。1", "①②⑦.1", "127.0.0.１", "::1", "::", "[::1]", "[::1]:80", "[1.2.3.4]",
            "fe80::1", "::ffff:1.2.3.4", "[::ffff:127.0.0.1]", "2001:db8::1", "[[::1]]",
            "[fe80::1%25eth0]", "[", "[]",
        ],
    ),
    (
        Malformed,
        &[
            ".", "..", "...", ".example.com", "example..com", "example.com..", "a..", " ",
            "example.com ", " example.com", "exam ple.com", "example.com\n", "example.com\r\n",
            "example.com\t", "evil.test\0.example.com", "\0", "example.com\0",
            "example\u{1}.com", "example\u{7f}.com", "example\u{80}.com", "-example.com",
            "example-.com", "a.-b.com", "a.b-.com", "-", "a.-", "*.example.com", "*",
            "ex*mple.com", "example.com/", "example.com/path", "http://example.com",
            "//example.com", "user@example.com", "user:pw@example.com", "example.com:443",
            "example.com:", ":443", "example.com#", "example.com?", "example.com\\",
            "exam\\ple.com", "example.com%00", "ex%61mple.com", "%65xample.com", "example,com",
            "example;com", "exa'mple.com", "exa\"mple.com", "exa`mple.com", "exa$mple.com",
            "exa(mple).com", "<example>.com", "example.com|x", "example^.com", "example&.com",
            "example=.com", "example+.com", "example!.com", "example~.com", "{example}.com",
            "example.com]", "1.2.3.4:80", "1.2.3.4/32",
            // An A-label that decodes to ASCII, to nothing, or not at all (RUSTSEC-2024-0421).
            "xn--example-.org", "xn--.com", "xn--a.com", "xn--ls8h=.la", "xn--zzzzzz-.com",
            "xn--\u{fc}.com", "xn--99999999.com",
            // An A-label whose U-label has another A-label.
            "xn--ab-yzt.example", "\u{202e}moc.elpmaxe",
            "exam\u{2028}ple.com", "example\u{3000}.com", "\u{300}a.com", "\u{fffd}.com",
            "a\u{2f}b.com", "a\u{ff0f}b.com", "a\u{2488}com", "℀.com", "fe80::1%eth0",
        ],
    ),
    (
        TooLong,
        &[
            "aaaaaaaaaabbbbbbbbbbccccccccccddddddddddeeeeeeeeeeffffffffff1234.com",
            "a.aaaaaaaaaabbbbbbbbbbccccccccccddddddddddeeeeeeeeeeffffffffff1234",
        ],
    ),
];

#[test]
fn every_spelling_of_a_host_is_that_host() {
    for (canonical, spellings) in SAME {
        for spelling in spellings.iter().filter(|s| !s.is_empty()) {
            let host = Host::parse(spelling).unwrap_or_else(|e| panic!("{spelling:?} {e}"));
            assert_eq!(host.as_str(), *canonical, "{spelling:?}");
        }
    }
}

#[test]
fn what_is_no_host_is_refused_with_its_reason() {
    let mut wrong = Vec::new();
    for (error, texts) in REFUSED {
        for text in *texts {
            if Host::parse(text) != Err(*error) {
                wrong.push(format!("{text:?}: {:?}, not {error:?}", Host::parse(text)));
            }
            if matches!(Pattern::parse(text), Ok(Pattern::Exact(_))) {
                wrong.push(format!("{text:?} is a pattern"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_corpus_is_as_large_as_it_claims() {
    let same: usize = SAME.iter().map(|(_, all)| all.len()).sum();
    let refused: usize = REFUSED.iter().map(|(_, all)| all.len()).sum();
    assert!(same + refused >= 190, "{same} + {refused}");
}

#[test]
fn a_name_has_at_most_253_bytes_in_labels_of_63() {
    let label = "a".repeat(63);
    let longest = format!("{label}.{label}.{label}.{}", "a".repeat(61));
    assert_eq!(longest.len(), 253);
    assert!(Host::parse(&longest).is_ok());
    assert!(Host::parse(&format!("{longest}.")).is_ok(), "the root's dot is not counted");
    assert_eq!(Host::parse(&format!("{longest}a")), Err(TooLong));
    assert_eq!(Host::parse(&"a.".repeat(100_000)), Err(TooLong));
    // The limit is of the A-label: 20 bytes of text here, more than 63 there.
    assert_eq!(Host::parse(&format!("{}.com", "ü".repeat(60))), Err(TooLong));
}

#[test]
fn a_name_on_the_wire_is_ascii() {
    assert_eq!(Host::from_wire("bücher.example".as_bytes()), Err(Malformed));
    assert_eq!(Host::from_wire(b"\xff.example"), Err(Malformed));
    assert_eq!(Host::from_wire(b"EXAMPLE.com").expect("host").as_str(), "example.com");
}

#[test]
#[rustfmt::skip]
fn a_wildcard_stands_in_front_and_covers_no_public_suffix() {
    for (text, shown) in [
        ("Example.com.", "example.com"),
        ("*.Example.com", "*.example.com"),
        (".example.com", ".example.com"),
        ("*.bücher.example.com", "*.xn--bcher-kva.example.com"),
        ("*.github.io", "*.github.io"),
        ("*.githubusercontent.com", "*.githubusercontent.com"),
        ("*.svc.cluster.local", "*.svc.cluster.local"),
        ("*", "*"),
        ("com", "com"),
    ] {
        assert_eq!(Pattern::parse(text).expect(text).to_string(), shown);
    }
    for text in [
        "*.com", ".com", "*.co.uk", ".co.uk", "*.internal", "*.ck", "*.COM.", "*.xn--fiqs8s",
        "*.中国",
    ] {
        assert_eq!(Pattern::parse(text), Err(TooWide), "{text}");
    }
    for text in [
        "a.*.com", "*a.com", "a*.com", "**.example.com", "*.*.example.com", "*..example.com",
        "*.example.*", "**",
    ] {
        assert!(Pattern::parse(text).is_err(), "{text}");
    }
    assert_eq!(Pattern::parse("api.*.example.com"), Err(Wildcard));
    for text in ["*.1.2.3.4", ".127.1", "*.0x7f.1", "..", "*.", ".", "*.[::1]"] {
        assert!(Pattern::parse(text).is_err(), "{text}");
    }
}

#[test]
#[rustfmt::skip]
fn patterns_match_whole_labels_only() {
    let table: &[(&str, &[&str], &[&str])] = &[
        (
            "example.com",
            &["example.com"],
            &["a.example.com", "example.com.evil.test", "xexample.com", "com"],
        ),
        (
            "*.example.com",
            &["a.example.com", "a.b.example.com"],
            &["example.com", "xexample.com", "a.example.com.evil.test"],
        ),
        (
            ".example.com",
            &["example.com", "a.b.example.com"],
            &["xexample.com", "com", "example.org"],
        ),
        ("*", &["example.com", "localhost"], &[]),
    ];
    for (pattern, yes, no) in table {
        let pattern = Pattern::parse(pattern).expect("pattern");
        for (hosts, expected) in [(yes, true), (no, false)] {
            for host in *hosts {
                assert_eq!(
                    pattern.matches(&Host::parse(host).expect("host")),
                    expected,
                    "{pattern} {host}"
                );
            }
        }
    }
}

#[test]
#[rustfmt::skip]
fn an_authority_has_brackets_round_ipv6_only() {
    let name = |text: &str| AuthorityHost::Name(Host::parse(text).expect("host"));
    let address = |text: &str| AuthorityHost::Address(text.parse().expect("address"));
    for (text, host, port) in [
        ("example.com", name("example.com"), None),
        ("EXAMPLE.com.:8080", name("example.com"), Some(8080)),
        ("example.com:080", name("example.com"), Some(80)),
        ("1.2.3.4", address("1.2.3.4"), None),
        ("1.2.3.4:80", address("1.2.3.4"), Some(80)),
        ("[::1]", address("::1"), None),
        ("[2001:db8::1]:443", address("2001:db8::1"), Some(443)),
    ] {
        assert_eq!(Authority::parse(text), Ok(Authority { host, port }), "{text}");
    }
    for text in [
        "", ":80", "[::1", "::1", "[[::1]]", "[::1]]", "[::1]x", "[::1]80", "[1.2.3.4]",
        "[example.com]", "[fe80::1%25eth0]", "example.com:", "example.com:0",
        "example.com:65536", "example.com:+80", "example.com:-1", "example.com: 80",
        "example.com:80 ", "example.com:8o", "example.com:000080", "user@example.com",
        "user:pw@example.com", "a:80:80", "127.1", "127.1:80", "0x7f.1:80", "2130706433",
        "1.2.3.4.:80", "bücher.example", "example.com/", "example.com,b.example", "a b",
        "example.com\0", "example.com:８０",
    ] {
        assert!(Authority::parse(text).is_err(), "{text:?}: {:?}", Authority::parse(text));
    }
}

/// Texts near the border of what a host is.
fn texts() -> impl Strategy<Value = String> {
    prop_oneof![
        "[a-zA-Z0-9_.-]{1,40}",
        "(xn--)?[a-z0-9-]{1,12}(\\.(xn--)?[a-z0-9-]{1,12}){0,3}\\.?",
        "[0-9a-fx.]{1,20}",
        "\\PC{1,12}(\\.\\PC{1,6}){0,2}",
        "[a-zäöüßéñ中国ｅ①。．.-]{1,20}",
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    #[test]
    fn a_canonical_name_is_its_own_canonical_form(text in texts()) {
        if let Ok(host) = Host::parse(&text) {
            prop_assert_eq!(Host::parse(host.as_str()), Ok(host.clone()));
            prop_assert_eq!(Host::from_wire(host.as_str().as_bytes()), Ok(host.clone()));
            prop_assert_eq!(Host::parse(&host.as_str().to_uppercase()), Ok(host.clone()));
            prop_assert_eq!(Host::parse(&format!("{host}.")), Ok(host.clone()));
            prop_assert!(host.as_str().bytes().all(|b| b.is_ascii_graphic() && !b.is_ascii_uppercase()));
        }
    }

    #[test]
    fn no_host_is_an_address_to_the_c_library(text in "[0-9a-fxX.]{1,24}") {
        if let Ok(host) = Host::parse(&text) {
            prop_assert!(!read_by_inet_aton(host.as_str()), "{}", host);
        }
    }

    #[test]
    fn a_pattern_is_read_back_as_itself(text in "(\\*\\.|\\.)?[a-zA-Z0-9-]{1,8}(\\.[a-zA-Z0-9-]{1,8}){0,3}") {
        if let Ok(pattern) = Pattern::parse(&text) {
            prop_assert_eq!(Pattern::parse(&pattern.to_string()), Ok(pattern));
        }
    }
}

/// One to four parts, each decimal, octal or hexadecimal.
fn read_by_inet_aton(text: &str) -> bool {
    let part = |part: &str| match part.strip_prefix("0x") {
        Some(hex) => hex.bytes().all(|b| b.is_ascii_hexdigit()),
        None => !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()),
    };
    text.split('.').count() <= 4 && text.split('.').all(part)
}
