//! A tenant that wants more than its share of a sandbox's life, of its driver and of the turns of waking, and
//! a neighbour who goes on beside it.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use super::*;

const PATIENCE: Duration = Duration::from_secs(20);
/// One sandbox is woken at once, and the one of the name `bad` by hooks that do as files say.
const HOOKS: &str = "[sleep]\nwakes = 1\nwake_timeout = \"10s\"\n[external]\n\
    on_standby = [\"true\"]\n\
    on_resume = [\"sh\", \"-c\", \"test $POSTERN_SANDBOX != bad || { echo >DIR/waking; sleep 1; }\"]\n\
    on_remove = [\"sh\", \"-c\", \"test $POSTERN_SANDBOX != bad || test ! -e DIR/stuck\"]\n";

/// What is posted about a sandbox, and what came of it.
async fn post(
    client: &Client,
    path: &str,
    body: serde_json::Value,
) -> Result<wire::Sandbox, Error> {
    client.post(&format!("/v1/sandboxes{path}"), &body).await
}

/// A journal on a slow disk: somebody else writes to it most of the time. Over when dropped.
struct Slow(Arc<AtomicBool>, Option<std::thread::JoinHandle<()>>);

impl Drop for Slow {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
        if let Some(thread) = self.1.take() {
            thread.join().expect("no panic");
        }
    }
}

impl Daemon {
    fn slow(&self) -> Slow {
        let over = Arc::<AtomicBool>::default();
        let (stop, path) = (Arc::clone(&over), self._dir.path().join("state/postern.db"));
        let thread = std::thread::spawn(move || {
            let journal = rusqlite::Connection::open(path).expect("journal");
            journal.busy_timeout(PATIENCE).expect("set");
            while !stop.load(Ordering::Relaxed) {
                journal.execute_batch("BEGIN IMMEDIATE").expect("begun");
                std::thread::sleep(Duration::from_millis(30));
                journal.execute_batch("COMMIT").expect("ended");
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        Slow(over, Some(thread))
    }

    /// Makes one that is asleep.
    async fn asleep(&self, client: &Client, name: &str) {
        let body = json!({ "name": name, "driver": "external", "on_idle": "never" });
        post(client, "", body).await.expect("created");
        post(client, &format!("/{name}/standby"), json!({})).await.expect("asleep");
    }

    /// Renews one over and over, for many callers at once.
    fn flood(&self, name: &str) -> tokio::task::JoinSet<()> {
        let found = self.keeper.find(&name.parse().expect("name")).expect("there");
        let one = |keeper: Keeper, found| async move {
            let actor = lifecycle::Actor::new("test", true);
            while keeper.renew(&found, Some(Duration::from_secs(3600)), &actor).await.is_ok() {}
        };
        (0..500).map(|_| one(self.keeper.clone(), found.clone())).collect()
    }

    async fn until_its_hook_runs(&self) {
        let (began, waking) = (Instant::now(), self._dir.path().join("waking"));
        while !waking.exists() {
            assert!(began.elapsed() < PATIENCE, "its hook is run");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn until_bad(&self, what: &str, so: impl Fn(Option<&str>) -> bool) {
        let began = Instant::now();
        loop {
            let seen = self.local.get::<wire::Sandbox>("/v1/sandboxes/bad").await.ok();
            if so(seen.as_ref().map(|one| one.state.as_str())) {
                return;
            }
            assert!(began.elapsed() < PATIENCE, "{what}: {seen:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Promise 64.
#[tokio::test(flavor = "multi_thread")]
async fn nobody_is_given_a_longer_life_than_the_operator_lets_one_have() {
    let daemon = Daemon::with("[tenants]\nmax_life = \"1h\"\n").await;
    let acme = daemon.bearer(Some(OF_ACME));
    let of = |name: &str, life| json!({ "name": name, "driver": "external", "max_life": life });
    let made = post(&acme, "", of("a", json!("1h"))).await.expect("as long as it may be");
    assert!(made.expires_in.is_some_and(|left| left <= 3600), "{made:?}");
    let content = Content::json(&of("b", json!("61m"))).expect("json");
    let problem = refusal(&acme, Method::POST, "/v1/sandboxes", &[], content).await;
    assert_eq!((problem.code, problem.field.as_deref()), (Kind::Invalid, Some("max_life")));
    assert!(problem.fix.as_deref().is_some_and(|fix| fix.contains("3600s")), "{problem}");
    let made = post(&acme, "", of("c", json!(null))).await.expect("without a wish");
    assert!(made.expires_in.is_some_and(|left| left <= 3600), "{made:?}");
    let renewed = post(&acme, "/c/renew", json!({ "ttl": "3650d" })).await.expect("renewed");
    assert!(renewed.expires_in.is_some_and(|left| left <= 3600), "no longer than its life");
    daemon.end().await;
}

/// Promise 64.
#[tokio::test(flavor = "multi_thread")]
async fn one_that_is_renewed_all_the_time_ends_with_its_life() {
    let daemon = Daemon::start().await;
    let acme = daemon.bearer(Some(OF_ACME));
    let body = json!({ "name": "bad", "driver": "external", "max_life": "3s" });
    post(&acme, "", body).await.expect("created");
    let (slow, flood) = (daemon.slow(), daemon.flood("bad"));
    daemon.until_bad("its life is over", |state| state.is_none()).await;
    drop((flood, slow));
    daemon.end().await;
}

/// Promises 59, 64.
#[tokio::test(flavor = "multi_thread")]
async fn one_that_is_renewed_all_the_time_is_removed_by_force() {
    let daemon = Daemon::start().await;
    let acme = daemon.bearer(Some(OF_ACME));
    post(&acme, "", json!({ "name": "bad", "driver": "external" })).await.expect("created");
    let (slow, flood) = (daemon.slow(), daemon.flood("bad"));
    tokio::time::sleep(Duration::from_secs(1)).await;
    let path = "/v1/sandboxes/bad?force=true";
    let forced = daemon.local.send(Method::DELETE, path, HeaderMap::new(), Content::Nothing);
    tokio::time::timeout(PATIENCE, forced).await.expect("it goes").expect("gone");
    drop((flood, slow));
    daemon.end().await;
}

/// Promise 62.
#[tokio::test(flavor = "multi_thread")]
async fn one_that_is_renewed_all_the_time_keeps_no_turn_of_waking() {
    let daemon = Daemon::with(HOOKS).await;
    let acme = daemon.bearer(Some(OF_ACME));
    daemon.asleep(&acme, "bad").await;
    daemon.asleep(&daemon.local, "demo").await;
    post(&daemon.local, "/demo/resume", json!({})).await.expect("the control");
    post(&daemon.local, "/demo/standby", json!({})).await.expect("asleep");
    let waking = tokio::spawn(async move { post(&acme, "/bad/resume", json!({})).await });
    daemon.until_its_hook_runs().await;
    let (slow, flood) = (daemon.slow(), daemon.flood("bad"));
    post(&daemon.local, "/demo/resume", json!({})).await.expect("its turn comes");
    drop((flood, slow));
    waking.await.expect("no panic").expect("and the other one runs, too");
    daemon.end().await;
}

/// Promise 62.
#[tokio::test(flavor = "multi_thread")]
async fn a_removal_that_hangs_in_the_middle_of_a_wake_keeps_nobody_else_asleep() {
    let daemon = Daemon::with(HOOKS).await;
    let acme = daemon.bearer(Some(OF_ACME));
    daemon.asleep(&acme, "bad").await;
    daemon.asleep(&daemon.local, "demo").await;
    let dir = daemon._dir.path().to_owned();
    std::fs::write(dir.join("stuck"), "").expect("marked");
    let client = daemon.bearer(Some(OF_ACME));
    let waking = tokio::spawn(async move { post(&client, "/bad/resume", json!({})).await });
    daemon.until_its_hook_runs().await;
    let client = daemon.bearer(Some(OF_ACME));
    let removing = tokio::spawn(async move {
        let path = "/v1/sandboxes/bad";
        client.send(Method::DELETE, path, HeaderMap::new(), Content::Nothing).await.map(drop)
    });
    daemon.until_bad("it hangs", |state| state == Some("deleting")).await;
    post(&daemon.local, "/demo/resume", json!({})).await.expect("its turn comes");
    daemon.until_bad("it hangs still", |state| state == Some("deleting")).await;
    std::fs::remove_file(dir.join("stuck")).expect("mended");
    let (woken, _) = (waking.await.expect("no panic"), removing.await.expect("no panic"));
    woken.expect_err("it was removed instead");
    daemon.end().await;
}
