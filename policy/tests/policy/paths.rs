//! Canonical paths and the globs over them.

use std::time::{Duration, Instant};

use policy::document::{MAX_CONDITIONS, MAX_PATHS_OVER_NAME};
use policy::path::{PathGlob, Segments};
use policy::{
    Compiled, Evidence, Flow, Host, Layer, Policy, Protocol, Revision, Verdict, canonical_path,
};
use proptest::prelude::*;

fn matches(glob: &PathGlob, path: &str) -> bool {
    glob.matches(&Segments::of(path.to_owned()))
}

#[test]
#[rustfmt::skip]
fn spellings_of_one_path_have_one_form() {
    for (path, canonical) in [
        ("/", "/"),
        ("/a/b", "/a/b"),
        ("/a/b/", "/a/b/"),
        ("/%61/%7Eb", "/a/~b"),
        ("/a/./b", "/a/b"),
        ("/a/../b", "/b"),
        ("/a/%2e%2E/b", "/b"),
        ("/a/b/..", "/a/"),
        ("/a/.", "/a/"),
        ("/..", "/"),
        ("/../../etc", "/etc"),
        ("/a%c3%a9%20x", "/a%C3%A9%20x"),
        ("/a%252fb", "/a%252fb"),
        ("/a;v=1/b", "/a;v=1/b"),
        ("/a%3bv=1/b", "/a%3Bv=1/b"),
        ("/;jsessionid=1", "/;jsessionid=1"),
        ("/...", "/..."),
    ] {
        assert_eq!(canonical_path(path).as_deref(), Some(canonical), "{path}");
    }
    for path in [
        "", "a", "*", "http://x/", "//", "//a", "/a//b", "/a//", "/a/%2fb", "/a%2Fb", "/a\\b",
        "/a%5cb", "/a%00", "/a\0", "/a%0d%0a", "/a\r\n", "/a b", "/a%", "/a%4", "/a%4g", "/é",
        "/a?b", "/a#b", "/a/..;/b", "/a/.;x/b", "/%2e%2e;x", "/a%7f", "/a\u{7f}", "/..%3bx/b", "/;/a",
        "/a/;x/b", "/%3b/a", "/a;b/c%3bd",
    ] {
        assert_eq!(canonical_path(path), None, "{path:?}");
    }
    assert_eq!(canonical_path(&format!("/{}", "a".repeat(4096))), None);
    assert!(canonical_path(&format!("/{}", "a".repeat(4095))).is_some());
    assert_eq!(canonical_path(&"/a".repeat(257)), None);
    assert!(canonical_path(&"/a".repeat(256)).is_some());
}

#[test]
#[rustfmt::skip]
fn a_star_stays_within_a_segment_and_two_cross() {
    for (glob, yes, no) in [
        ("/v1/**", &["/v1/a", "/v1/a/b", "/v1/"][..], &["/v1", "/v2/a", "/v1x/a", "/"][..]),
        ("/v1/*", &["/v1/a", "/v1/"], &["/v1/a/b", "/v1"]),
        ("/v1/a*c", &["/v1/ac", "/v1/abc", "/v1/acc"], &["/v1/a/c", "/v1/acb"]),
        ("/repos/*/pulls", &["/repos/a/pulls"], &["/repos/a/b/pulls", "/repos/pulls"]),
        (
            "/repos/**/pulls",
            &["/repos/a/pulls", "/repos/a/b/pulls", "/repos/pulls/pulls"],
            &["/repos/pulls", "/repos/a/pulls/x"],
        ),
        ("/**/a/**/b", &["/x/a/x/b", "/a/a/a/b", "/x/a/b/b"], &["/a/b", "/x/a/b"]),
        ("/**", &["/", "/a", "/a/b/"], &[]),
        ("/a", &["/a"], &["/a/", "/A", "/ab", "/"]),
        ("/*a*b*", &["/ab", "/xaxbx"], &["/ba", "/a/b"]),
    ] {
        let glob = PathGlob::parse(glob).expect(glob);
        for path in yes {
            assert!(matches(&glob, path), "{glob} {path}");
        }
        for path in no {
            assert!(!matches(&glob, path), "{glob} {path}");
        }
    }
    for bad in ["", "v1", "/a**", "/**a/b", "/a//b", "/a/../b", "/%61", "/a?x", "/a\\b", "/é"] {
        assert!(PathGlob::parse(bad).is_err(), "{bad}");
    }
}

/// Servers that know parameters read a path without them, others with them: a path is denied if one
/// reading is, and allowed if both are.
#[test]
#[rustfmt::skip]
fn parameters_neither_pass_a_deny_rule_nor_leave_what_is_allowed() {
    let host = Host::parse("a.example").expect("host");
    let passes = |rules: &str, path: &str| {
        let policy = Policy::from_toml(rules).expect("policy");
        let policy = Compiled::new(&[(Layer::Sandbox, &policy)], Revision(1));
        let evidence = Evidence::Request { authority: &host, method: "GET", path };
        let flow = Flow { protocol: Protocol::Tcp, port: 80, destination: None, evidence };
        matches!(policy.judge(&flow), Verdict::Pass(_))
    };
    let deny = "default = \"allow\"\n[[rule]]\ndeny = [\"a.example\"]\npaths = [\"/admin\", \"/admin/**\"]\n";
    let allow = "[[rule]]\nallow = [\"a.example\"]\npaths = [\"/public/*\", \"/a;*\", \"/b*\"]\n";
    for path in [
        "/admin", "/admin;", "/admin;x", "/admin;x/secret", "/admin;x=1;y=2", "/;/admin", "/;x/admin",
        "/admin%3b", "/admin%3Bx/secret", "/admin/;x", "/admin/secret;x", "/./admin;x", "/%61dmin;x",
        "/a/..%3b/admin", "/admin;x/a%3By",
    ] {
        assert!(!passes(deny, path), "{path}");
    }
    for path in ["/", "/admins", "/administrator;x", "/a;/admin", "/a;admin", "/;admin", "/Admin"] {
        assert!(passes(deny, path), "{path}");
    }
    for path in ["/public/a", "/public/a;x", "/public/;x", "/public/a%3bx", "/b;x"] {
        assert!(passes(allow, path), "{path}");
    }
    for path in ["/public;x/a", "/a;x", "/public/a;x/b", "/public;/;x", "/;x/public/a", "/public/a;x%3b"] {
        assert!(!passes(allow, path), "{path}");
    }
}

/// A policy with these paths in a rule each 32, over one name.
fn with_paths(globs: &[String]) -> String {
    let rule = |globs: &[String]| {
        let paths: Vec<String> = globs.iter().map(|glob| format!("{glob:?}")).collect();
        format!("[[rule]]\nallow = [\"a.example\"]\npaths = [{}]\n", paths.join(","))
    };
    globs.chunks(MAX_CONDITIONS).map(rule).collect()
}

/// As many globs of a form as a policy may hold over one name.
fn fill(form: impl Fn(usize) -> String) -> Vec<String> {
    let mut room = MAX_PATHS_OVER_NAME;
    let globs = (0..32 * MAX_CONDITIONS).map(form);
    globs
        .take_while(|glob| {
            let weight = PathGlob::parse(glob).expect("a glob").weight();
            let fits = weight <= room;
            room = room.saturating_sub(weight);
            fits
        })
        .collect()
}

/// Promise 26. Every guest of the node waits while one request is judged, and a tenant writes the
/// policy.
#[test]
fn the_worst_paths_of_a_tenant_are_judged_in_time() {
    let a = |count: usize| "a".repeat(count);
    #[rustfmt::skip]
    let forms: [(&str, Vec<String>, String); 6] = [
        ("a long part behind a star", fill(|n| format!("/*{}b{n}", a(490))), format!("/{}", a(4095))),
        ("a long part between stars", fill(|n| format!("/*{}b{n}*", a(200))), format!("/{}", a(4095))),
        ("many parts between stars", fill(|n| format!("/{}b{n}*", "*a".repeat(240))), format!("/{}", a(4095))),
        ("short parts between stars", fill(|n| format!("/**/*b{n:x}*/**")), format!("/{}", "aaaaaaaaaaaaaaa/".repeat(255))),
        ("many segments between", fill(|n| format!("/**{}/b{n}/**", "/a".repeat(20))), format!("/{}", "a/".repeat(255))),
        ("many segments at the end", fill(|n| format!("/**{}/b{n}", "/*".repeat(200))), format!("/{}", "a/".repeat(255))),
    ];
    for (what, globs, path) in forms {
        let policy = Policy::from_toml(&with_paths(&globs)).expect(what);
        let policy = Compiled::new(&[(Layer::Sandbox, &policy)], Revision(1));
        let authority = Host::parse("a.example").expect("host");
        let judge = |path: &str| {
            let evidence = Evidence::Request { authority: &authority, method: "GET", path };
            let flow = Flow { protocol: Protocol::Tcp, port: 80, destination: None, evidence };
            matches!(policy.judge(&flow), Verdict::Pass(_))
        };
        let like = globs.last().expect("a glob").replace("**", "x").replace('*', "y");
        assert!(judge(&like), "{what}: {like}");
        let start = Instant::now();
        assert!(!judge(&path), "{what}");
        let (took, globs) = (start.elapsed(), globs.len());
        println!("{what}: {globs} globs, {took:?}");
        // Unoptimised, on a busy machine: a thousand times what it takes. Trying every place for every
        // part takes longer still.
        assert!(took < Duration::from_secs(1), "{what}: {took:?}");
    }
}

#[test]
fn what_the_paths_over_one_name_weigh_is_bounded_and_the_error_says_what_to_change() {
    let glob = |n: usize| format!("/{}{n:03}", "a".repeat(508));
    let full: Vec<String> = (0..MAX_PATHS_OVER_NAME / 512).map(glob).collect();
    let text = with_paths(&full);
    assert!(Policy::from_toml(&text).is_ok());
    for pattern in ["a.example", ".example.org", "*"] {
        let full = text.replace("a.example", pattern);
        let more = format!("{full}[[rule]]\nallow = [\"{pattern}\"]\npaths = [\"/b\"]\n");
        let error = Policy::from_toml(&more).expect_err("too much").to_string();
        for part in ["line 2: rule[0].allow[0]", pattern, "16386, more than 16384", "'paths'"] {
            assert!(error.contains(part), "{error}");
        }
    }
    let others = format!("{text}[[rule]]\nallow = [\"b.example\"]\npaths = [\"/b\"]\n");
    assert!(Policy::from_toml(&others).is_ok(), "of another name");
    let above = format!("{text}[[rule]]\ndeny = [\"*.example\", \"*\"]\npaths = [\"/b\"]\n");
    assert!(Policy::from_toml(&above.replace("a.example", "a.b.example")).is_err(), "above it");
}

#[test]
fn only_what_is_looked_for_along_a_path_weighs_more_than_its_bytes() {
    for (glob, searches) in [
        ("/a/b", 0),
        ("/v1/**", 0),
        ("/a*/b*c/**/d*e/*", 0),
        ("/a*b*/c*d*", 1),
        ("/a*b*/**/c*d*", 1),
        ("/**/a/**", 1),
        ("/**/a/**/b*/c/**/x", 3),
    ] {
        let weight = PathGlob::parse(glob).expect("a glob").weight();
        assert_eq!(weight, glob.len() + 512 * searches, "{glob}");
    }
}

/// The same by trying everything.
fn naive(glob: &[&str], path: &[&str]) -> bool {
    fn segment(glob: &[u8], text: &[u8]) -> bool {
        match glob {
            [] => text.is_empty(),
            [b'*', rest @ ..] => (0..=text.len()).any(|cut| segment(rest, &text[cut..])),
            [byte, rest @ ..] => text.first() == Some(byte) && segment(rest, &text[1..]),
        }
    }
    match glob {
        [] => path.is_empty(),
        ["**", rest @ ..] => (1..=path.len()).any(|cut| naive(rest, &path[cut..])),
        [part, rest @ ..] => path.split_first().is_some_and(|(first, tail)| {
            segment(part.as_bytes(), first.as_bytes()) && naive(rest, tail)
        }),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    #[test]
    fn globs_match_what_trying_everything_matches(
        glob in "(/(\\*\\*|[ab*]{0,5}x?)){1,5}",
        path in "(/[abx]{0,4}){1,7}",
    ) {
        if let Ok(parsed) = PathGlob::parse(&glob) {
            let parts: Vec<&str> = glob.split('/').collect();
            let segments: Vec<&str> = path.split('/').collect();
            prop_assert_eq!(matches(&parsed, &path), naive(&parts, &segments));
        }
    }

    #[test]
    fn a_canonical_path_is_its_own_canonical_form(path in "/([a-z./%;25eEfF~]|%2e|\\PC){0,20}") {
        if let Some(canonical) = canonical_path(&path) {
            prop_assert_eq!(canonical_path(&canonical), Some(canonical.clone()));
            prop_assert!(canonical.split('/').all(|part| part != ".." && part != "."));
        }
    }
}
