//! Canonical paths and the globs over them.

use policy::canonical_path;
use policy::path::PathGlob;
use proptest::prelude::*;

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
        ("/...", "/..."),
    ] {
        assert_eq!(canonical_path(path).as_deref(), Some(canonical), "{path}");
    }
    for path in [
        "", "a", "*", "http://x/", "//", "//a", "/a//b", "/a//", "/a/%2fb", "/a%2Fb", "/a\\b",
        "/a%5cb", "/a%00", "/a\0", "/a%0d%0a", "/a\r\n", "/a b", "/a%", "/a%4", "/a%4g", "/é",
        "/a?b", "/a#b", "/a/..;/b", "/a/.;x/b", "/%2e%2e;x", "/a%7f", "/a\u{7f}",
    ] {
        assert_eq!(canonical_path(path), None, "{path:?}");
    }
    assert_eq!(canonical_path(&format!("/{}", "a".repeat(8192))), None);
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
            assert!(glob.matches(path), "{glob} {path}");
        }
        for path in no {
            assert!(!glob.matches(path), "{glob} {path}");
        }
    }
    for bad in ["", "v1", "/a**", "/**a/b", "/a//b", "/a/../b", "/%61", "/a?x", "/a\\b", "/é"] {
        assert!(PathGlob::parse(bad).is_err(), "{bad}");
    }
}

#[test]
fn a_glob_made_to_backtrack_is_done_at_once() {
    let glob = PathGlob::parse(&"/*a".repeat(40).replace("/*a/", "/**/*a*a*a*b/")).expect("glob");
    let path = format!("/{}", "a/".repeat(2000));
    let start = std::time::Instant::now();
    assert!(!glob.matches(&path));
    assert!(start.elapsed() < std::time::Duration::from_secs(2), "{:?}", start.elapsed());
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
        glob in "(/(\\*\\*|[ab*]{0,3}x?)){1,4}",
        path in "(/[abx]{0,3}){1,5}",
    ) {
        if let Ok(parsed) = PathGlob::parse(&glob) {
            let parts: Vec<&str> = glob.split('/').collect();
            let segments: Vec<&str> = path.split('/').collect();
            prop_assert_eq!(parsed.matches(&path), naive(&parts, &segments));
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
