//! Sleep and life by the API, with hooks in the place of a hypervisor that say what they were asked.

use std::time::Instant;

use super::*;

/// Whatever somebody else's hypervisor is told, a line each.
const HOOKS: &str = "[external]\n\
    on_standby = [\"sh\", \"-c\", \"echo standby >>DIR/told; test ! -e DIR/awake\"]\n\
    on_resume = [\"sh\", \"-c\", \"sleep 0.2; echo resume >>DIR/told; test ! -e DIR/asleep\"]\n\
    on_remove = [\"sh\", \"-c\", \"echo remove >>DIR/told\"]\n";
const PATIENCE: Duration = Duration::from_secs(20);

impl Daemon {
    async fn make(&self, fields: serde_json::Value) -> wire::Sandbox {
        let mut body = json!({ "name": "demo", "driver": "external" });
        let (Some(body), Some(fields)) = (body.as_object_mut(), fields.as_object()) else {
            panic!("objects")
        };
        body.extend(fields.clone());
        self.local.post("/v1/sandboxes", body).await.expect("created")
    }

    async fn ask(&self, verb: &str, body: serde_json::Value) -> Result<wire::Sandbox, Problem> {
        match self.local.post(&format!("/v1/sandboxes/demo/{verb}"), &body).await {
            Ok(sandbox) => Ok(sandbox),
            Err(Error::Refused(problem)) => Err(*problem),
            Err(other) => panic!("{verb}: {other:?}"),
        }
    }

    async fn demo(&self) -> Option<wire::Sandbox> {
        self.local.get("/v1/sandboxes/demo").await.ok()
    }

    async fn take_away(&self) {
        let path = "/v1/sandboxes/demo";
        let removed = self.local.send(Method::DELETE, path, HeaderMap::new(), Content::Nothing);
        removed.await.expect("gone");
    }

    fn told(&self) -> Vec<String> {
        let told = std::fs::read_to_string(self._dir.path().join("told")).unwrap_or_default();
        told.lines().map(str::to_owned).collect()
    }

    fn mark(&self, name: &str, there: bool) {
        let path = self._dir.path().join(name);
        let marked = if there { std::fs::write(path, "") } else { std::fs::remove_file(path) };
        marked.expect("marked");
    }

    /// Waits until it is so, and gives what is shown then.
    async fn until(
        &self,
        what: &str,
        so: impl Fn(&Option<wire::Sandbox>) -> bool,
    ) -> Option<wire::Sandbox> {
        let began = Instant::now();
        loop {
            let seen = self.demo().await;
            if so(&seen) {
                return seen;
            }
            assert!(began.elapsed() < PATIENCE, "{what}: {seen:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn until_state(&self, state: &str) -> wire::Sandbox {
        let is = |seen: &Option<wire::Sandbox>| seen.as_ref().is_some_and(|one| one.state == state);
        self.until(state, is).await.expect("there")
    }
}

/// Promise 62.
#[tokio::test(flavor = "multi_thread")]
async fn an_idle_sandbox_sleeps_and_whoever_wants_something_of_it_wakes_it() {
    let daemon = Daemon::with(HOOKS).await;
    let made = daemon.make(json!({ "idle_after": "2s" })).await;
    assert_eq!((made.on_idle, made.state.as_str()), (wire::OnIdle::Standby, "running"));
    let awake = daemon.until("why", |seen| seen.as_ref().is_some_and(|one| one.awake.is_some()));
    assert!(awake.await.expect("there").idle_in.is_some_and(|seconds| (1..=2).contains(&seconds)));
    let asleep = daemon.until_state("standby").await;
    assert_eq!((asleep.awake, asleep.idle_in, asleep.wakes), (None, None, 0));
    assert_eq!(daemon.told(), ["standby"]);
    let woken = daemon.ask("resume", json!({})).await.expect("woken");
    assert_eq!((woken.state.as_str(), woken.wakes), ("running", 1));
    assert_eq!(daemon.told(), ["standby", "resume"]);
    daemon.ask("standby", json!({})).await.expect("asleep");
    // There is no guest, so nobody answers there; but it was woken for it.
    let upgrade = [("connection", "upgrade"), ("upgrade", "postern-connect")];
    let path = "/v1/sandboxes/demo/connect";
    let problem =
        refusal(&daemon.local, Method::POST, path, &upgrade, text("{\"port\":8080}")).await;
    assert_eq!(problem.code, Kind::Unavailable, "{problem}");
    assert_eq!(daemon.told()[2..], ["standby", "resume"]);
    let problem = refusal(&daemon.local, Method::POST, path, &upgrade, text("{\"port\":0}")).await;
    assert_eq!(problem.field.as_deref(), Some("port"));
    daemon.ask("standby", json!({})).await.expect("asleep");
    daemon.take_away().await;
    assert_eq!(daemon.told()[4..], ["standby", "remove"], "its owner hears of its end");
    daemon.end().await;
}

/// Promise 63. Attack P42.
#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_who_want_it_awake_wake_it_once_even_if_they_do_not_wait() {
    let daemon = Daemon::with(HOOKS).await;
    daemon.make(json!({ "on_idle": "never" })).await;
    daemon.ask("standby", json!({})).await.expect("asleep");
    let found = daemon.keeper.find(&"demo".parse().expect("name")).expect("there");
    let asked = (0..1000).map(|n| {
        let (keeper, found) = (daemon.keeper.clone(), found.clone());
        tokio::spawn(async move {
            let actor = lifecycle::Actor::new("test", true);
            let resume = keeper.resume(&found, &actor);
            // Some of them leave.
            let patience = if n % 3 == 0 { Duration::from_millis(10) } else { PATIENCE };
            tokio::time::timeout(patience, resume).await.ok().map(|woken| woken.expect("woken"))
        })
    });
    let mut woken = 0;
    for one in asked.collect::<Vec<_>>() {
        woken += usize::from(one.await.expect("no panic").is_some());
    }
    assert!(woken >= 666, "{woken}");
    assert_eq!(daemon.told(), ["standby", "resume"]);
    assert_eq!(daemon.demo().await.expect("there").wakes, 1);
    daemon.ask("standby", json!({})).await.expect("asleep");
    let actor = lifecycle::Actor::new("test", true);
    let resume = daemon.keeper.resume(&found, &actor);
    let left = tokio::time::timeout(Duration::from_millis(50), resume).await;
    assert!(left.is_err(), "the only one who asked has left");
    daemon.until_state("running").await;
    daemon.end().await;
}

/// Promise 63.
#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_put_to_sleep_or_woken_says_so_and_stays_what_it_was() {
    let daemon = Daemon::with(HOOKS).await;
    daemon.make(json!({ "on_idle": "never" })).await;
    daemon.mark("awake", true);
    daemon.ask("standby", json!({})).await.expect_err("it stays awake");
    let shown = daemon.until_state("running").await;
    assert!(shown.reason.is_some_and(|why| why.contains("pausing")), "with the reason");
    assert_eq!(daemon.told(), ["standby", "resume"], "whatever became of it, it is to run");
    daemon.mark("awake", false);
    let asleep = daemon.ask("standby", json!({})).await.expect("asleep");
    assert_eq!(asleep.reason, None);
    daemon.mark("asleep", true);
    daemon.ask("resume", json!({})).await.expect_err("it sleeps on");
    let shown = daemon.until_state("standby").await;
    assert!(shown.reason.is_some_and(|why| why.contains("resuming")), "with the reason");
    daemon.mark("asleep", false);
    daemon.ask("resume", json!({})).await.expect("the next one wakes it");
    daemon.end().await;
}

/// Promise 64.
#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_lives_as_long_as_it_is_renewed_and_no_longer_than_its_life() {
    let daemon = Daemon::start().await;
    daemon.make(json!({ "ttl": "6s", "max_life": "16s" })).await;
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(10) {
        let renewed = daemon.ask("renew", json!({})).await.expect("it lives on");
        assert!(renewed.expires_in.is_some_and(|left| left <= 6), "{renewed:?}");
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    let renewed = daemon.ask("renew", json!({ "ttl": "1h" })).await.expect("it lives on");
    assert!(
        renewed.expires_in.is_some_and(|left| left <= 6),
        "no longer than its life: {renewed:?}"
    );
    daemon.until("gone", Option::is_none).await;
    assert!(began.elapsed() < Duration::from_secs(40));
    let made = daemon.make(json!({})).await;
    assert_eq!((made.on_idle, made.expires_in), (wire::OnIdle::Never, None), "no hooks, no sleep");
    let problem = daemon.ask("renew", json!({})).await.expect_err("there is nothing to renew");
    assert_eq!(problem.field.as_deref(), Some("ttl"));
    let problem = daemon.ask("renew", json!({ "ttl": "0s" })).await.expect_err("no time");
    assert_eq!(problem.field.as_deref(), Some("ttl"));
    let problem = daemon.ask("standby", json!({})).await.expect_err("nobody would stop it");
    assert_eq!(problem.code, Kind::Conflict);
    daemon.ask("renew", json!({ "ttl": "1s" })).await.expect("a short one");
    daemon.until("gone", Option::is_none).await;
    daemon.make(json!({ "on_idle": "delete", "idle_after": "1s" })).await;
    daemon.until("gone", Option::is_none).await;
    let body = json!({ "name": "demo", "driver": "external", "on_idle": "standby" });
    let content = Content::json(&body).expect("json");
    let problem = refusal(&daemon.local, Method::POST, "/v1/sandboxes", &[], content).await;
    assert_eq!((problem.code, problem.field.as_deref()), (Kind::Invalid, Some("on_idle")));
    daemon.end().await;
}

/// Promise 64.
#[tokio::test(flavor = "multi_thread")]
async fn a_lease_keeps_a_sandbox_awake_until_it_is_over_and_wakes_one_that_sleeps() {
    let daemon = Daemon::with(HOOKS).await;
    daemon.make(json!({ "idle_after": "1s" })).await;
    let kept = daemon.ask("keep-awake", json!({ "for": "4s" })).await.expect("kept");
    let began = Instant::now();
    assert_eq!(kept.awake.as_deref(), Some("it is kept awake"));
    assert!(kept.idle_in.is_some_and(|left| (3..=5).contains(&left)), "{kept:?}");
    daemon.until_state("standby").await;
    let took = began.elapsed();
    assert!(took > Duration::from_millis(2900) && took < Duration::from_secs(8), "{took:?}");
    let kept = daemon.ask("keep-awake", json!({ "for": "1h" })).await.expect("woken");
    assert_eq!((kept.state.as_str(), kept.wakes), ("running", 1));
    for span in ["0s", "25h"] {
        let problem = daemon.ask("keep-awake", json!({ "for": span })).await.expect_err(span);
        assert_eq!(problem.field.as_deref(), Some("for"));
    }
    daemon.end().await;
}

/// Promise 64.
#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_sleeps_until_the_time_that_was_asked_for_or_until_somebody_wakes_it() {
    let daemon = Daemon::with(HOOKS).await;
    daemon.make(json!({ "on_idle": "never" })).await;
    let began = Instant::now();
    let asleep = daemon.ask("standby", json!({ "wake_in": "2s" })).await.expect("asleep");
    assert_eq!(asleep.wakes_because.as_deref(), Some("it was asked for"));
    assert!(asleep.wakes_in.is_some_and(|left| (1..=2).contains(&left)), "{asleep:?}");
    assert!(asleep.wake_at.is_some() && asleep.awake.is_none());
    let woken = daemon.until_state("running").await;
    assert!(began.elapsed() >= Duration::from_millis(1000), "{:?}", began.elapsed());
    assert_eq!((woken.wakes, woken.wake_at, woken.wakes_in), (1, None, None));

    // Who wakes it before has woken it.
    let asleep = daemon.ask("standby", json!({ "wake_in": "3s" })).await.expect("asleep");
    assert!(asleep.wake_at.is_some());
    daemon.ask("resume", json!({})).await.expect("woken");
    let asleep = daemon.ask("standby", json!({})).await.expect("asleep");
    assert_eq!((asleep.wake_at, asleep.wakes_in), (None, None));
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!(daemon.until_state("standby").await.wakes, 2);

    // The last word counts, while it sleeps, too.
    let far = "2999-12-01T07:00:00+02:00";
    let problem = daemon.ask("standby", json!({ "wake_at": far })).await.expect_err("far away");
    assert_eq!(problem.field.as_deref(), Some("wake_at"), "{problem}");
    let hour = json!({ "wake_in": "1h" });
    let asleep = daemon.ask("standby", hour).await.expect("asleep, and told when");
    assert!(asleep.wakes_in.is_some_and(|left| (3590..=3600).contains(&left)), "{asleep:?}");
    let none = daemon.local.send(
        Method::POST,
        "/v1/sandboxes/demo/standby",
        HeaderMap::new(),
        Content::Nothing,
    );
    let asleep: wire::Sandbox = none.await.expect("no body").json().await.expect("a sandbox");
    assert_eq!(asleep.wake_at, None, "taken back");
    daemon.ask("standby", json!({ "wake_in": "1s" })).await.expect("asleep");
    assert_eq!(daemon.until_state("running").await.wakes, 3);
    for (body, field) in [
        (json!({ "wake_in": "0s" }), "wake_in"),
        (json!({ "wake_at": "07:00" }), "wake_at"),
        (json!({ "wake_at": "2020-01-01T00:00:00Z" }), "wake_at"),
        (json!({ "wake_at": far, "wake_in": "1s" }), "wake_at"),
        (json!({ "wake_up": "1s" }), "wake_up"),
    ] {
        let problem = daemon.ask("standby", body).await.expect_err(field);
        assert_eq!((problem.code, problem.field.as_deref()), (Kind::Invalid, Some(field)));
    }
    assert_eq!(daemon.until_state("running").await.wakes, 3, "nothing changed");
    daemon.end().await;
}

/// Promise 64. What could not be woken in time is tried again.
#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_woken_at_its_time_is_tried_again() {
    let daemon = Daemon::with(HOOKS).await;
    daemon.make(json!({ "on_idle": "never" })).await;
    daemon.ask("standby", json!({ "wake_in": "1s" })).await.expect("asleep");
    daemon.mark("asleep", true);
    let failed = daemon.until("it was tried", |seen| {
        seen.as_ref().is_some_and(|one| one.state == "standby" && one.reason.is_some())
    });
    let shown = failed.await.expect("there");
    assert!(shown.wakes_in.is_some_and(|left| left <= 10), "{shown:?}");
    daemon.mark("asleep", false);
    daemon.until_state("running").await;
    daemon.end().await;
}

/// Promise 62.
#[tokio::test(flavor = "multi_thread")]
async fn it_is_shown_what_keeps_a_sandbox_awake_and_for_how_long() {
    let daemon = Daemon::with(HOOKS).await;
    let made = daemon.make(json!({ "idle_after": "1h" })).await;
    let by =
        |shown: &wire::Sandbox| shown.awake_by.iter().map(|one| one.by.clone()).collect::<Vec<_>>();
    let shown = daemon.until("why", |seen| seen.as_ref().is_some_and(|one| one.awake.is_some()));
    let shown = shown.await.expect("there");
    assert_eq!(by(&shown), ["start"], "{made:?}");
    assert!(shown.idle_in.is_some_and(|left| (3500..=3600).contains(&left)), "{shown:?}");
    let kept = daemon.ask("keep-awake", json!({ "for": "2h" })).await.expect("kept");
    assert_eq!(by(&kept), ["lease", "start"]);
    assert_eq!(kept.idle_in, kept.awake_by[0].seconds, "the longest counts");
    assert!(kept.awake_by[1].seconds < kept.awake_by[0].seconds, "{kept:?}");
    let asleep = daemon.ask("standby", json!({})).await.expect("asleep");
    assert_eq!((by(&asleep), asleep.idle_in), (Vec::new(), None));
    daemon.end().await;
}

/// Promise 62.
#[tokio::test(flavor = "multi_thread")]
async fn who_wakes_one_sandbox_waits_for_few_of_a_tenant_that_wakes_many() {
    let hooks = "[sleep]\nwakes = 1\n[external]\non_standby = [\"true\"]\n\
        on_resume = [\"sh\", \"-c\", \"echo $POSTERN_TENANT >>DIR/told; sleep 0.3\"]\n";
    let daemon = Daemon::with(hooks).await;
    let names: Vec<String> = (0..8).map(|n| format!("many-{n}")).collect();
    let actor = || lifecycle::Actor::new("test", true);
    let found = |name: &str| daemon.keeper.find(&name.parse().expect("name")).expect("there");
    for (name, tenant) in names.iter().map(|name| (&**name, "many")).chain([("one", "acme")]) {
        daemon.create(name, tenant).await;
        daemon.keeper.standby(&found(name), None, &actor()).await.expect("asleep");
    }
    let resume = |name: &str| {
        let (keeper, found) = (daemon.keeper.clone(), found(name));
        tokio::spawn(async move {
            let actor = lifecycle::Actor::new("test", true);
            keeper.resume(&found, &actor).await.map(drop).expect("woken");
        })
    };
    let many: Vec<_> = names.iter().map(|name| resume(name)).collect();
    let began = Instant::now();
    while daemon.told().is_empty() {
        assert!(began.elapsed() < PATIENCE, "nobody is woken");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    resume("one").await.expect("no panic");
    let before = daemon.told().iter().position(|tenant| tenant == "acme").expect("woken");
    assert!(before <= 3, "behind {before} of theirs");
    for one in many {
        one.await.expect("no panic");
    }
    assert_eq!(daemon.told().len(), 9, "and none of theirs is forgotten");
    daemon.end().await;
}
