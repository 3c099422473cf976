//! Who asks what was used is told of its own, in whole hours, and how to ask if not.

use super::*;
use crate::wire::Usage;

/// Promise 67. Promise 22.
#[tokio::test(flavor = "multi_thread")]
async fn each_tenant_is_told_what_its_own_sandboxes_used_gone_or_not() {
    let daemon = Daemon::start().await;
    daemon.create("ours", "acme").await;
    daemon.create("theirs", "other").await;
    daemon.remove("ours").await;
    let rows = async |client: &Client, query: &str| {
        let usage: Usage = client.get(&format!("/v1/usage{query}")).await.expect("told");
        assert!(usage.from.ends_with(":00:00Z") && usage.to.ends_with(":00:00Z"), "{usage:?}");
        let row = |row: wire::Used| (row.tenant, row.sandbox.unwrap_or_default());
        usage.rows.into_iter().map(row).collect::<Vec<_>>()
    };
    let (ours, theirs) =
        (("acme".to_owned(), "ours".to_owned()), ("other".to_owned(), "theirs".to_owned()));
    let acme = daemon.bearer(Some(OF_ACME));
    assert_eq!(rows(&acme, "").await, std::slice::from_ref(&ours));
    assert_eq!(rows(&acme, "?tenant=acme&by=hour").await[0], ours);
    assert_eq!(rows(&acme, "?sandbox=theirs").await, []);
    assert_eq!(rows(&daemon.local, "").await, [ours, theirs.clone()]);
    assert_eq!(rows(&daemon.local, "?sandbox=theirs").await, [theirs]);
    let tenants = [("acme".to_owned(), String::new()), ("other".to_owned(), String::new())];
    assert_eq!(rows(&daemon.local, "?by=tenant").await, tenants);
    let path = "/v1/usage?tenant=other";
    let problem = refusal(&acme, Method::GET, path, &[], Content::Nothing).await;
    assert_eq!(problem.code, Kind::Forbidden);
    daemon.end().await;
}

/// Promise 19.
#[tokio::test(flavor = "multi_thread")]
async fn a_question_that_cannot_be_answered_names_its_field_and_what_to_ask() {
    let daemon = Daemon::start().await;
    for (query, field) in [
        ("from=2026-01-02T00:00:00Z&to=2026-01-01T00:00:00Z", "from"),
        ("from=yesterday", "from"),
        ("by=week", "by"),
        ("destinations=some", "destinations"),
        ("tenants=acme", "tenants"),
        ("sandbox=A_b", "sandbox"),
    ] {
        let path = format!("/v1/usage?{query}");
        let problem = refusal(&daemon.local, Method::GET, &path, &[], Content::Nothing).await;
        assert_eq!((problem.code, problem.field.as_deref()), (Kind::Invalid, Some(field)));
        assert!(problem.fix.is_some(), "{query}");
    }
    let _: Usage = daemon.local.get("/v1/usage?from=30d&to=1h").await.expect("control");
    daemon.end().await;
}

/// Promise 37. One that asks without end has one question read, and keeps nobody from an answer.
#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_has_one_question_to_the_accounts_under_way() {
    let daemon = Daemon::start().await;
    let ask = async |client: Client| match client.get::<Usage>("/v1/usage").await {
        Ok(_) => true,
        Err(Error::Refused(problem)) if problem.code == Kind::Busy => false,
        Err(other) => panic!("{other:?}"),
    };
    let (mut answered, mut refused) = (0, 0);
    while answered == 0 || refused == 0 {
        let many = (0..PLACES / 8).map(|_| tokio::spawn(ask(daemon.bearer(Some(OF_ACME)))));
        for one in many.collect::<Vec<_>>() {
            let told = one.await.expect("asked");
            (answered, refused) = (answered + u32::from(told), refused + u32::from(!told));
        }
        assert!(ask(daemon.local.clone()).await, "the operator is answered");
    }
    assert!(ask(daemon.bearer(Some(OF_ACME))).await, "and it is again, once that is over");
    daemon.end().await;
}
