//! Every way to be refused, in one table.

use http::Method;
use serde_json::Value;

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn whatever_is_refused_is_refused_in_one_form_and_changes_nothing() {
    let daemon = Daemon::start().await;
    daemon.create("demo", "default").await;
    let (client, get, put, post) = (&daemon.local, Method::GET, Method::PUT, Method::POST);
    let delete = Method::DELETE;
    let before: Value = client.get("/v1/sandboxes/demo/policy").await.expect("policy");
    let big = format!("{{\"name\":\"{}\"}}", "x".repeat(wire::BODY_LIMIT));
    let policy = "/v1/sandboxes/demo/policy";
    let rules = "/v1/sandboxes/demo/policy/rules";
    let explain = "/v1/sandboxes/demo/policy/explain";
    let toml = |text: &str| Content::Toml(text.to_owned().into());
    // Method, path, headers, body; then the kind, the field, a part of the fix.
    let none = || Content::Nothing;
    type Case<'a> = (&'a Method, &'a str, Content, Kind, &'a str, &'a str);
    let cases: Vec<Case<'_>> = vec![
        (&get, "/v2/x", none(), Kind::NotFound, "", "openapi.json"),
        (&put, "/v1/sandboxes", none(), Kind::MethodNotAllowed, "", "allow"),
        (&get, "/v1/sandboxes/none", none(), Kind::NotFound, "", "ls"),
        (&get, "/v1/sandboxes/%ff", none(), Kind::Invalid, "path", "openapi.json"),
        (&get, "/v1/tenants/%ff/policy", none(), Kind::Invalid, "path", "openapi.json"),
        (&get, "/v1/sandboxes/Bad_Name", none(), Kind::Invalid, "name", "use 1 to 40"),
        (
            &post,
            "/v1/sandboxes",
            none(),
            Kind::UnsupportedMediaType,
            "content-type",
            "application/json",
        ),
        (
            &post,
            "/v1/sandboxes",
            toml("x = 1"),
            Kind::UnsupportedMediaType,
            "content-type",
            "application/json",
        ),
        (&post, "/v1/sandboxes", text(&big), Kind::TooLarge, "", "less"),
        (&post, "/v1/sandboxes", text("{"), Kind::Invalid, "", ""),
        (
            &post,
            "/v1/sandboxes",
            text("{\"name\":\"a\",\"memroy\":\"1G\"}"),
            Kind::Invalid,
            "memroy",
            "did you mean `memory`?",
        ),
        (&post, "/v1/sandboxes", text("{\"name\":\"A\"}"), Kind::Invalid, "name", "use 1 to 40"),
        (&post, "/v1/sandboxes", text("{}"), Kind::Invalid, "name", "add `name`"),
        (
            &post,
            "/v1/sandboxes",
            text("{\"name\":\"a\",\"memory\":\"1K\"}"),
            Kind::Invalid,
            "memory",
            "256M",
        ),
        (
            &post,
            "/v1/sandboxes",
            text("{\"name\":\"a\",\"driver\":\"external\",\"memory\":\"1M\"}"),
            Kind::Invalid,
            "memory",
            "128M to 64G",
        ),
        (
            &post,
            "/v1/sandboxes",
            text("{\"name\":\"a\",\"driver\":\"xen\"}"),
            Kind::Invalid,
            "driver",
            "qemu, external",
        ),
        (
            &post,
            "/v1/sandboxes",
            text("{\"name\":\"demo\",\"driver\":\"external\"}"),
            Kind::Conflict,
            "name",
            "another name",
        ),
        (
            &post,
            "/v1/sandboxes",
            text("{\"name\":\"a\",\"policy\":{\"rule\":[{\"allow\":[\"1.2.3\"]}]}}"),
            Kind::Invalid,
            "policy.rule[0].allow[0]",
            "",
        ),
        (
            &post,
            "/v1/sandboxes?progres=true",
            text("{\"name\":\"a\"}"),
            Kind::Invalid,
            "progres",
            "did you mean `progress`?",
        ),
        (
            &post,
            "/v1/sandboxes?progress=1",
            text("{\"name\":\"a\"}"),
            Kind::Invalid,
            "progress",
            "`true`",
        ),
        (&delete, "/v1/sandboxes/demo?force=yes", none(), Kind::Invalid, "force", "`true`"),
        (&delete, "/v1/sandboxes/demo?forced=true", none(), Kind::Invalid, "forced", "`force`"),
        (&put, policy, toml("[[rule]]\nalow = [\"a.example\"]"), Kind::Invalid, "rule[0]", "allow"),
        (&put, policy, text("{\"rule\":[{\"allow\":[]}]}"), Kind::Invalid, "rule[0].allow", ""),
        (
            &post,
            rules,
            text("{\"allow\":[\"a.example\"],\"ports\":[0]}"),
            Kind::Invalid,
            "ports[0]",
            "",
        ),
        (
            &post,
            rules,
            text("{\"allow\":[\"a.example\"],\"always\":true}"),
            Kind::Invalid,
            "rule[0].always",
            "platform",
        ),
        (
            &post,
            rules,
            text("{\"allow\":[\"a.example\"],\"allow\":[\"b.example\"]}"),
            Kind::Invalid,
            "",
            "JSON",
        ),
        (
            &post,
            explain,
            text("{\"destination\":\"ftp://x.example\"}"),
            Kind::Invalid,
            "destination",
            "https://",
        ),
        (
            &post,
            "/v1/sandboxes/demo/exec",
            text("{\"argv\":[\"id\"]}"),
            Kind::UpgradeRequired,
            "",
            "postern-exec",
        ),
        (&get, "/v1/events?code=norule", none(), Kind::Invalid, "code", "did you mean `no-rule`?"),
        (&get, "/v1/events?since=yesterday", none(), Kind::Invalid, "since", "10m"),
        (&get, "/v1/events?limit=1000000", none(), Kind::Invalid, "limit", "10000"),
        (&get, "/v1/events?egress=x", none(), Kind::Invalid, "egress", "203.0.113.7"),
        (&get, "/v1/events?code=rule&code=rule", none(), Kind::Invalid, "code", "once"),
    ];
    for (method, path, content, kind, field, fix) in cases {
        let sent = format!("{method} {path} {content:?}").chars().take(200).collect::<String>();
        let problem = refusal(client, method.clone(), path, &[], content).await;
        assert_eq!(problem.code, kind, "{sent}: {problem:?}");
        assert_eq!(problem.field.as_deref().unwrap_or_default(), field, "{sent}: {problem:?}");
        assert!(problem.fix.as_deref().is_some_and(|f| f.contains(fix)), "{sent}: {problem:?}");
        assert!(problem.value.as_deref().is_none_or(|v| v.chars().count() <= 61), "{sent}");
    }
    let upgrade = [("connection", "upgrade"), ("upgrade", "postern-exec")];
    let long = text(&json!({ "argv": ["echo", "x".repeat(70_000)] }).to_string());
    let exec = "/v1/sandboxes/demo/exec";
    let problem = refusal(client, post.clone(), exec, &upgrade, long).await;
    assert_eq!((problem.code, problem.field.as_deref()), (Kind::Invalid, Some("argv")));
    let stale = [("if-match", "\"7777\"")];
    let problem = refusal(client, put.clone(), policy, &stale, toml("")).await;
    assert_eq!(problem.code, Kind::RevisionMoved);
    let problem = refusal(client, put, policy, &[("if-match", "x")], toml("")).await;
    assert_eq!(problem.field.as_deref(), Some("if-match"));
    let after: Value = client.get("/v1/sandboxes/demo/policy").await.expect("policy");
    assert_eq!(before, after);
    let list: wire::Sandboxes = client.get("/v1/sandboxes").await.expect("list");
    assert_eq!(list.sandboxes.len(), 1);
    daemon.end().await;
}
