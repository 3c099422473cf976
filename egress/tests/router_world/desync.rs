//! Requests made to be read in more than one way: what an origin gets is what was judged, no more.

use std::collections::BTreeMap;

use proptest::collection::vec;
use proptest::prelude::any;
use proptest::sample::{Index, select};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;

use crate::corpus::{Bytes, Case, Written, cases, judged, keep, say, written};
use crate::place::{ORIGIN, Place, run};

const RULES: &str = r#"
[[rule]]
allow = ["web.example.com"]
"#;

/// Says this, and compares what an origin read of it with what was judged. What was read, and the
/// answer.
async fn compare(place: &Place, kept: &Bytes, request: &[u8]) -> (Vec<Written>, String) {
    let shown = String::from_utf8_lossy(request);
    let answer = say(place, 80, request).await;
    let (mut seen, mut rest) = (Vec::new(), 0);
    for bytes in std::mem::take(&mut *kept.lock().expect("unpoisoned")) {
        let (whole, more) = written(&bytes);
        seen.extend(whole);
        rest += more;
    }
    let judged = judged(place);
    // The last may have been cut short, by its guest.
    let cut = usize::from(seen.len() < judged.len());
    assert!(rest == 0 || cut == 1, "{rest} bytes are of no request: {shown}");
    assert_eq!(seen.len() + cut, judged.len(), "{shown}: {seen:?} {judged:?}");
    for (seen, (method, path, host)) in seen.iter().zip(&judged) {
        let target = seen.target.split('?').next().expect("a first part");
        assert_eq!((&seen.method, target, &seen.host), (method, &**path, host), "{shown}");
    }
    (seen, answer)
}

/// Cases that comply and that we refuse: codings beside `chunked`, which nobody sends; a target
/// that is not ASCII, has a fragment, or is empty.
const STRICTER: [&str; 10] = [
    "Correct TE OK",
    "Transfer-Encoding: identity and chunked OK",
    "Multiple transfer encoding headers in a single request OK",
    "TE with custom parameters OK",
    "Different Transfer-Encoding headers",
    "Different Transfer-Encoding headers combined",
    "Transfer-Encoding with a param: chunked;custom_param",
    "Compliant URL",
    "International in URI",
    "Empty URI",
];

/// Promise 39. Attacks E05, E06, E07, E09, P50. Of each case of the suite an origin reads exactly what was
/// judged, or nothing and the guest is told and the connection closed; what complies passes.
#[test]
fn of_every_case_of_a_suite_an_origin_reads_what_was_judged() {
    run(RULES, async |place| {
        let kept = keep(place.origin(ORIGIN, 80));
        let mut tiers: BTreeMap<(String, &str), usize> = BTreeMap::new();
        for Case { name, tier, request } in cases() {
            let (seen, answer) = compare(&place, &kept, request.as_bytes()).await;
            assert!(seen.iter().all(|seen| seen.target != "/behind"), "{name}: {seen:?}");
            let status = answer.get(9..12).unwrap_or_default();
            let refused = seen.is_empty();
            // What does not even begin like a request is bytes without a name, and those are reset.
            if refused && !answer.is_empty() {
                assert!(status.starts_with('4') || status == "505", "{name}: {answer}");
                assert!(answer.contains("connection: close"), "{name}: {answer}");
                assert!(!answer.contains("no-rule"), "{name}: what came behind was read: {answer}");
            }
            let stricter = STRICTER.contains(&&*name);
            match &*tier {
                "Compliant" => assert_eq!(refused, stricter, "{name}: {answer}"),
                "Severe" => assert!(refused, "{name}: {answer}"),
                _ => {}
            }
            let fate = match (refused, answer.is_empty()) {
                (false, _) => "forwarded",
                (true, false) => "answered and closed",
                (true, true) => "reset",
            };
            *tiers.entry((tier, fate)).or_default() += 1;
        }
        println!("{tiers:?}");
        let reset = tiers.iter().filter(|((_, fate), _)| *fate == "reset");
        assert!(reset.map(|(_, n)| n).sum::<usize>() < 10, "most are answered: {tiers:?}");
    });
}

/// Attacks E27, P50. The same of requests that were broken at random.
#[test]
fn of_requests_broken_at_random_an_origin_reads_what_was_judged() {
    let whole = cases().into_iter().filter(|case| case.tier == "Compliant");
    let whole: Vec<String> = whole.map(|case| case.request).collect();
    let breaks =
        vec((any::<Index>(), select(b"\0\t\n\r :,;0\x7f\xffa".to_vec()), any::<bool>()), 0..4);
    let mut runner = TestRunner::deterministic();
    let mut broken = || {
        let strategy = (select(whole.clone()), &breaks);
        let (request, breaks) = strategy.new_tree(&mut runner).expect("a request").current();
        let mut request = request.into_bytes();
        for (at, byte, replaced) in breaks {
            // Where it matters: not in a long body.
            let at = at.index(request.len().min(600));
            if replaced {
                request[at] = byte;
            } else {
                request.insert(at, byte);
            }
        }
        request
    };
    let requests: Vec<Vec<u8>> = (0..400).map(|_| broken()).collect();
    run(RULES, async |place| {
        let kept = keep(place.origin(ORIGIN, 80));
        let mut passed = 0;
        for request in requests {
            let (seen, _) = compare(&place, &kept, &request).await;
            passed += usize::from(!seen.is_empty());
        }
        assert!((40..360).contains(&passed), "{passed} of 400 passed");
    });
}
