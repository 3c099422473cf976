//! What a monitoring system reads is of the node, counts what passed, and names nobody but tenants: never a
//! sandbox, and never to a tenant.

use super::*;

/// The text, for who may read it.
async fn read(client: &Client) -> String {
    let sent = client.send(Method::GET, "/v1/metrics", HeaderMap::new(), Content::Nothing).await;
    sent.expect("told").text().await.expect("text")
}

/// The value of this sample.
fn value(text: &str, sample: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
    line.map(|value| value.parse().expect("a number"))
}

/// Promise 67. Promise 22.
#[tokio::test(flavor = "multi_thread")]
async fn metrics_count_what_every_tenant_used_and_only_the_operator_reads_them() {
    let daemon = Daemon::start().await;
    daemon.create("ours", "acme").await;
    daemon.create("theirs", "other").await;
    let acme = daemon.bearer(Some(OF_ACME));
    let problem = refusal(&acme, Method::GET, "/v1/metrics", &[], Content::Nothing).await;
    assert_eq!(problem.code, Kind::Forbidden);
    assert!(problem.fix.is_some_and(|fix| fix.contains("/v1/usage")));

    let running = "postern_sandbox_seconds_total{tenant=\"acme\",phase=\"running\"}";
    let there = "postern_sandboxes{tenant=\"acme\",state=\"running\"}";
    let made = "postern_decisions_total{kind=\"control\",outcome=\"allow\"}";
    let before = read(&daemon.bearer(Some(OF_ALL))).await;
    assert!(before.ends_with("# EOF\n"), "{before}");
    assert!(!before.contains("ours") && !before.contains("theirs"), "{before}");
    assert_eq!(value(&before, there), Some(1.0), "{before}");
    assert!(value(&before, "postern_uptime_seconds").is_some_and(|seconds| seconds > 0.0));
    for lost in ["postern_audit_lost_total", "postern_panics_total", "postern_stuck_slots"] {
        assert_eq!(value(&before, lost), Some(0.0), "{before}");
    }

    tokio::time::sleep(Duration::from_millis(50)).await;
    let later = read(&daemon.local).await;
    assert!(value(&later, running) > value(&before, running), "{later}");
    assert!(value(&later, running).is_some_and(|seconds| seconds < 600.0), "seconds: {later}");
    daemon.remove("ours").await;
    let gone = read(&daemon.local).await;
    assert_eq!(value(&gone, there), None, "{gone}");
    assert!(value(&gone, running) >= value(&later, running), "what is gone has been used: {gone}");
    assert!(value(&gone, made).is_some_and(|count| count >= 2.0), "two were made: {gone}");
    daemon.end().await;
}
