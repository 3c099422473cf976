//! The API as callers meet it: the real keeper and router, the real listeners, the real client.
//! What needs a network namespace fails for who may not make one.

mod crowds;
mod description;
mod greedy;
mod metrics;
mod refusals;
mod rest;
mod untimely;
mod usage;

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use http::{HeaderMap, HeaderValue, Method, header};
use policy::{AuditRecord, Trail};
use serde_json::json;

use super::*;
use crate::client::{Client, Content, Endpoint};
use crate::error::Error;
use crate::wire;

const OF_ACME: &str = "a token of acme";
const OF_ALL: &str = "a token of everybody";
const PLACES: usize = 64;

struct Daemon {
    _dir: tempfile::TempDir,
    netns: String,
    audit: AuditLog,
    keeper: Keeper,
    stop: CancellationToken,
    serving: tokio::task::JoinHandle<()>,
    local: Client,
    tcp: String,
}

impl Daemon {
    async fn start() -> Self {
        Self::with("").await
    }

    /// With more of a configuration, in which `DIR` is its folder.
    async fn with(more: &str) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        assert!(nix::unistd::geteuid().is_root(), "needs root: it makes a network namespace");
        let dir = tempfile::tempdir().expect("folder");
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let netns = format!("pstapi-{}-{number}", std::process::id());
        let token = |secret: &str| {
            let digest = <sha2::Sha256 as sha2::Digest>::digest(secret);
            digest.iter().map(|byte| format!("{byte:02x}")).collect::<String>()
        };
        let text = format!(
            "state_dir = \"{dir}/state\"\nrun_dir = \"{dir}/run\"\n\
             [api]\nsocket = \"{dir}/run/api.sock\"\nlisten = \"127.0.0.1:0\"\nhosts = [\"node.example\"]\n\
             [[api.token]]\nname = \"acme\"\ntenant = \"acme\"\nsha256 = \"{}\"\n\
             [[api.token]]\nname = \"all\"\ntenant = \"*\"\nsha256 = \"{}\"\n\
             [guests]\nnetns = \"{netns}\"\nslot_rest = \"0s\"\n\
             [dns]\nupstreams = [\"127.0.0.1:9\"]\ntimeout = \"200ms\"\n\
             [qemu]\nimage = \"{dir}/none\"\n\
             [audit]\ndir = \"{dir}/audit\"\n",
            token(OF_ACME),
            token(OF_ALL),
            dir = dir.path().display(),
        );
        let text = text + &more.replace("DIR", &dir.path().to_string_lossy());
        let config = Config::parse(&text).expect("valid");
        std::fs::create_dir_all(&config.state_dir).expect("folder");
        let (trail, records) = Trail::bounded(1024);
        let audit = AuditLog::open(&config.audit, records).expect("audit");
        let resolver = dns::Resolver::new(config.resolver()).expect("resolver");
        let own = policy::OwnAddresses::default();
        let router = egress::Router::start(config.router(), resolver, own, trail.clone())
            .await
            .expect("router");
        let keeper = Keeper::open(
            config.keeper(Vec::new(), config.store().expect("a folder")),
            router.clone(),
            trail,
        )
        .await
        .expect("keeper");
        let stop = CancellationToken::new();
        let api = Api::new(&config, keeper.clone(), router, audit.clone(), stop.clone());
        let listeners = bind(&config.api).await.expect("listeners");
        let tcp = listeners.iter().find_map(Listener::address).expect("tcp").to_string();
        let serving = tokio::spawn(serve(listeners, api.routes(), PLACES, stop.clone()));
        let local = Client::new(Endpoint::Socket(config.api.socket.clone()), None);
        Self { _dir: dir, netns, audit, keeper, stop, serving, local, tcp }
    }

    fn bearer(&self, token: Option<&str>) -> Client {
        Client::new(Endpoint::Tcp(self.tcp.clone()), token.map(str::to_owned))
    }

    async fn create(&self, name: &str, tenant: &str) -> wire::Sandbox {
        let body = json!({ "name": name, "tenant": tenant, "driver": "external" });
        self.local.post("/v1/sandboxes", &body).await.expect("created")
    }

    async fn remove(&self, name: &str) {
        let found = self.keeper.find(&name.parse().expect("name")).expect("there");
        self.keeper.remove(&found, &lifecycle::Actor::new("test", true)).await.expect("gone");
    }

    async fn end(mut self) {
        for sandbox in self.keeper.list(None) {
            self.remove(sandbox.name.as_str()).await;
        }
        self.stop.cancel();
        (&mut self.serving).await.expect("served");
        self.keeper.close().await;
        self.audit.close();
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let ended = std::process::Command::new("ip").args(["netns", "del", &self.netns]).status();
        if !std::thread::panicking() {
            assert!(ended.is_ok_and(|status| status.success()), "{} is left", self.netns);
        }
    }
}

async fn refusal(
    client: &Client,
    method: Method,
    path: &str,
    headers: &[(&'static str, &str)],
    content: Content,
) -> Problem {
    let mut map = HeaderMap::new();
    for (name, value) in headers {
        map.insert(*name, HeaderValue::from_str(value).expect("header"));
    }
    match client.send(method.clone(), path, map, content).await {
        Err(Error::Refused(problem)) => *problem,
        Err(other) => panic!("{method} {path}: {other:?}"),
        Ok(_) => panic!("{method} {path} was not refused"),
    }
}

fn text(json: &str) -> Content {
    Content::Json(json.to_owned().into())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_is_made_given_a_policy_explained_and_removed() {
    let daemon = Daemon::start().await;
    let client = &daemon.local;
    let body = json!({ "name": "demo", "driver": "external", "memory": "256M" });
    let path = "/v1/sandboxes?progress=true";
    let content = Content::json(&body).expect("json");
    let answer = client.send(Method::POST, path, HeaderMap::new(), content).await.expect("begun");
    let mut lines = answer.lines();
    let mut steps = 0;
    let made = loop {
        let line = lines.next().await.expect("line").expect("not ended");
        match serde_json::from_str(&line).expect("step") {
            wire::Step::Progress(_) => steps += 1,
            wire::Step::Sandbox(made) => break made,
            wire::Step::Error(problem) => panic!("{problem}"),
        }
    };
    assert!(steps >= 1);
    assert_eq!((made.state.as_str(), made.tenant.as_str()), ("running", "default"));
    assert_eq!(lines.next().await.expect("end"), None);

    let question = json!({ "destination": "https://api.example.com/" });
    let explain = "/v1/sandboxes/demo/policy/explain";
    let told: wire::Explained = client.post(explain, &question).await.expect("told");
    assert!(!told.allowed, "an empty policy denies");
    let rule = json!({ "allow": ["api.example.com"] });
    let change: wire::Change =
        client.post("/v1/sandboxes/demo/policy/rules", &rule).await.expect("added");
    assert_eq!(change.sandboxes, 1);
    let told: wire::Explained = client.post(explain, &question).await.expect("told");
    assert!(told.allowed, "{}", told.explanation);

    let mut accept = HeaderMap::new();
    accept.insert(header::ACCEPT, HeaderValue::from_static("application/toml"));
    let path = "/v1/sandboxes/demo/policy";
    let answer = client.send(Method::GET, path, accept, Content::Nothing).await.expect("policy");
    let tag = answer.etag().expect("revision").to_owned();
    let document = answer.text().await.expect("text");
    assert!(document.contains("api.example.com"), "{document}");
    let mut matching = HeaderMap::new();
    matching.insert(header::IF_MATCH, HeaderValue::from_str(&tag).expect("tag"));
    let content = Content::Toml(document.into());
    client.send(Method::PUT, path, matching, content).await.expect("what was read can be written");

    let removed =
        client.send(Method::DELETE, "/v1/sandboxes/demo", HeaderMap::new(), Content::Nothing);
    removed.await.expect("removed");
    let gone = refusal(client, Method::GET, "/v1/sandboxes/demo", &[], Content::Nothing).await;
    assert_eq!(gone.code, Kind::NotFound);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_makes_a_sandbox_is_told_what_its_policy_does_not_do() {
    let daemon = Daemon::start().await;
    let policy = json!({ "default": "allow", "rule": [{ "allow": ["127.0.0.1"] }] });
    let body = json!({ "name": "demo", "driver": "external", "policy": policy });
    let made: wire::Sandbox = daemon.local.post("/v1/sandboxes", &body).await.expect("made");
    let change = daemon.local.send(
        Method::PUT,
        "/v1/sandboxes/demo/policy",
        HeaderMap::new(),
        Content::json(&policy).expect("json"),
    );
    let change: wire::Change = change.await.expect("set").json().await.expect("a change");
    assert_eq!(made.notes, change.notes, "the same as who writes it later");
    assert_eq!(made.notes.len(), 2, "{:?}", made.notes);
    let body = json!({ "name": "other", "driver": "external", "policy": policy });
    let path = "/v1/sandboxes?progress=true";
    let content = Content::json(&body).expect("json");
    let answer = daemon.local.send(Method::POST, path, HeaderMap::new(), content).await;
    let told = answer.expect("begun").text().await.expect("told");
    let last = serde_json::from_str(told.lines().next_back().expect("a last step"));
    let Ok(wire::Step::Sandbox(last)) = last else { panic!("{told}") };
    assert_eq!(last.notes, change.notes);
    assert_eq!(daemon.create("plain", "default").await.notes, [""; 0]);
    let shown: wire::Sandbox = daemon.local.get("/v1/sandboxes/demo").await.expect("shown");
    assert_eq!(shown.notes, [""; 0]);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_sees_and_touches_only_its_tenant_and_never_the_platform() {
    let daemon = Daemon::start().await;
    daemon.create("theirs", "other").await;
    daemon.create("ours", "acme").await;
    let acme = daemon.bearer(Some(OF_ACME));
    let list: wire::Sandboxes = acme.get("/v1/sandboxes").await.expect("list");
    let names: Vec<&str> = list.sandboxes.iter().map(|sandbox| sandbox.name.as_str()).collect();
    assert_eq!(names, ["ours"]);

    let theirs = "/v1/sandboxes/theirs";
    let (none, rule) = (Content::Nothing, text("{\"allow\":[\"a.example\"]}"));
    let exec = text("{\"argv\":[\"id\"]}");
    let question = text("{\"destination\":\"a.example\"}");
    let upgrade = [("connection", "upgrade"), ("upgrade", "postern-exec")];
    let connect = [("connection", "upgrade"), ("upgrade", "postern-connect")];
    for (method, path, headers, content) in [
        (Method::GET, String::from(theirs), &[][..], none.clone()),
        (Method::DELETE, theirs.into(), &[], none.clone()),
        (Method::DELETE, format!("{theirs}?force=true"), &[], none.clone()),
        (Method::GET, format!("{theirs}/policy"), &[], none.clone()),
        (Method::PUT, format!("{theirs}/policy"), &[], text("{}")),
        (Method::POST, format!("{theirs}/policy/rules"), &[], rule.clone()),
        (Method::POST, format!("{theirs}/policy/explain"), &[], question),
        (Method::POST, format!("{theirs}/exec"), &upgrade, exec),
        (Method::POST, format!("{theirs}/connect"), &connect, text("{\"port\":80}")),
        (Method::POST, format!("{theirs}/standby"), &[], none.clone()),
        (Method::POST, format!("{theirs}/resume"), &[], none.clone()),
        (Method::POST, format!("{theirs}/keep-awake"), &[], text("{\"for\":\"1m\"}")),
        (Method::POST, format!("{theirs}/renew"), &[], text("{}")),
        (Method::GET, "/v1/tenants/other/policy".into(), &[], none.clone()),
        (Method::PUT, "/v1/tenants/other/policy".into(), &[], text("{}")),
        (Method::POST, "/v1/tenants/other/policy/rules".into(), &[], rule.clone()),
    ] {
        let problem = refusal(&acme, method.clone(), &path, headers, content).await;
        assert_eq!(problem.code, Kind::NotFound, "{method} {path}");
    }
    for client in [&acme, &daemon.bearer(Some(OF_ALL))] {
        let path = "/v1/platform/policy";
        let problem = refusal(client, Method::PUT, path, &[], text("{}")).await;
        assert_eq!(problem.code, Kind::Forbidden);
        let path = "/v1/platform/policy/rules";
        let problem = refusal(client, Method::POST, path, &[], rule.clone()).await;
        assert_eq!(problem.code, Kind::Forbidden);
    }
    for client in [&acme, &daemon.bearer(Some(OF_ALL))] {
        let path = "/v1/sandboxes/ours?force=true";
        let problem = refusal(client, Method::DELETE, path, &[], none.clone()).await;
        assert_eq!(problem.code, Kind::Forbidden);
    }
    let problem = refusal(&acme, Method::GET, "/v1/platform/policy", &[], none.clone()).await;
    assert_eq!(problem.code, Kind::Forbidden);
    let wanted = text("{\"name\":\"x\",\"tenant\":\"other\",\"driver\":\"external\"}");
    let problem = refusal(&acme, Method::POST, "/v1/sandboxes", &[], wanted).await;
    assert_eq!((problem.code, problem.field.as_deref()), (Kind::Forbidden, Some("tenant")));

    // What is its own, it may touch.
    let _: wire::Change = acme
        .post("/v1/tenants/acme/policy/rules", &json!({ "allow": ["*"] }))
        .await
        .expect("own tenant");
    let everything: wire::Sandboxes =
        daemon.bearer(Some(OF_ALL)).get("/v1/sandboxes").await.expect("list");
    assert_eq!(everything.sandboxes.len(), 2);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn over_tcp_nobody_is_answered_without_a_token_or_under_a_foreign_name() {
    let daemon = Daemon::start().await;
    let get = |client: Client, host: Option<&'static str>| async move {
        let headers: Vec<_> = host.map(|host| ("host", host)).into_iter().collect();
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.insert(name, HeaderValue::from_static(value));
        }
        match client.send(Method::GET, "/v1/health", map, Content::Nothing).await {
            Ok(_) => None,
            Err(Error::Refused(problem)) => Some(problem.code),
            Err(other) => panic!("{other:?}"),
        }
    };
    assert_eq!(get(daemon.bearer(Some(OF_ACME)), None).await, None);
    assert_eq!(get(daemon.bearer(Some(OF_ACME)), Some("node.example:7070")).await, None);
    assert_eq!(get(daemon.bearer(None), None).await, Some(Kind::Unauthorized));
    assert_eq!(get(daemon.bearer(Some("wrong")), None).await, Some(Kind::Unauthorized));
    let evil = get(daemon.bearer(Some(OF_ACME)), Some("evil.example")).await;
    assert_eq!(evil, Some(Kind::Misdirected));
    // Even what does not exist is not told to strangers.
    let problem = refusal(&daemon.bearer(None), Method::GET, "/v2", &[], Content::Nothing).await;
    assert_eq!(problem.code, Kind::Unauthorized);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn events_tell_the_past_then_the_present_and_only_to_whom_they_belong() {
    let daemon = Daemon::start().await;
    daemon.create("theirs", "other").await;
    daemon.create("ours", "acme").await;
    let acme = daemon.bearer(Some(OF_ACME));
    let path = "/v1/events?follow=true&since=1h&kind=control";
    let answer = acme.send(Method::GET, path, HeaderMap::new(), Content::Nothing).await;
    let mut lines = answer.expect("events").lines();
    let mut next = async || -> AuditRecord {
        let line = tokio::time::timeout(Duration::from_secs(10), lines.next()).await;
        let line = line.expect("in time").expect("stream").expect("not ended");
        serde_json::from_str(&line).expect("record")
    };
    let past = next().await;
    assert_eq!(past.sandbox.expect("sandbox").as_str(), "ours");
    let rule = json!({ "allow": ["a.example"] });
    let _: wire::Change =
        daemon.local.post("/v1/sandboxes/theirs/policy/rules", &rule).await.expect("added");
    let change: wire::Change =
        acme.post("/v1/sandboxes/ours/policy/rules", &rule).await.expect("added");
    let present = loop {
        let record = next().await;
        assert_eq!(record.sandbox.as_ref().expect("sandbox").as_str(), "ours");
        if record.revision == Some(change.revision) {
            break record;
        }
    };
    assert!(present.detail.expect("detail").contains("token=acme"));
    let everything =
        daemon.local.send(Method::GET, "/v1/events", HeaderMap::new(), Content::Nothing);
    let everything = everything.await.expect("events").text().await.expect("text");
    assert!(everything.contains("uid=0 pid="), "{everything}");
    daemon.end().await;
}
