//! What happens at the wrong moment: callers that leave, names that change hands, a journal that
//! cannot be written.

use std::path::PathBuf;

use rusqlite::Connection;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpStream, UnixStream};

use lifecycle::{Actor, Holder};

use super::*;

const PATIENCE: Duration = Duration::from_secs(10);

async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let tried = tokio::time::timeout(PATIENCE, async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    assert!(tried.await.is_ok(), "not in time: {what}");
}

/// The head and the body of a request.
fn request(line: &str, more: &str, body: &str) -> (String, String) {
    let length = body.len();
    let head = format!(
        "{line} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n{more}\r\n"
    );
    (head, body.to_owned())
}

impl Daemon {
    fn journal(&self) -> Connection {
        Connection::open(self.state_dir().join("postern.db")).expect("the journal")
    }

    fn state_dir(&self) -> PathBuf {
        self._dir.path().join("state")
    }

    /// Sends a request and leaves while the journal is being written.
    async fn ask_and_leave(&self, line: &str, body: &str) {
        let journal = self.journal();
        journal.execute_batch("BEGIN IMMEDIATE").expect("the journal is kept busy");
        let socket = self._dir.path().join("run/api.sock");
        let mut caller = UnixStream::connect(socket).await.expect("connect");
        let (head, body) = request(line, "", body);
        caller.write_all((head + &body).as_bytes()).await.expect("sent");
        tokio::time::sleep(Duration::from_millis(200)).await;
        drop(caller);
        tokio::time::sleep(Duration::from_millis(200)).await;
        journal.execute_batch("COMMIT").expect("free again");
    }

    async fn state(&self, name: &str) -> Option<String> {
        let shown = self.local.get::<wire::Sandbox>(&format!("/v1/sandboxes/{name}")).await;
        shown.ok().map(|sandbox| sandbox.state)
    }
}

/// What the journal says and what is in force would differ for ever.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_caller_began_is_done_whole_when_the_caller_leaves() {
    let daemon = Daemon::start().await;
    let wanted = "{\"name\":\"demo\",\"driver\":\"external\"}";
    daemon.ask_and_leave("POST /v1/sandboxes", wanted).await;
    let running = async || daemon.state("demo").await.as_deref() == Some("running");
    eventually("the sandbox runs", running).await;
    let path = "/v1/sandboxes/demo/policy";
    daemon.ask_and_leave(&format!("PUT {path}"), "{\"default\":\"allow\"}").await;
    let in_force = async || {
        let held: serde_json::Value = daemon.local.get(path).await.expect("policy");
        held["default"] == "allow"
    };
    eventually("the policy is in force", in_force).await;
    daemon.end().await;
}

/// A full disk must neither keep a sandbox alive nor make its removal look done.
#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_goes_although_the_journal_cannot_be_written_and_is_gone_when_it_can() {
    let daemon = Daemon::start().await;
    let tap = daemon.create("demo", "default").await.tap.expect("the operator is told");
    let there = || {
        let mut ip = std::process::Command::new("ip");
        let shown = ip.args(["-n", &daemon.netns, "link", "show", &tap]).output();
        shown.expect("ip").status.success()
    };
    assert!(there(), "control");
    let journal = daemon.journal();
    let full = |verb| {
        format!(
            "CREATE TRIGGER full_{verb} BEFORE {verb} ON sandbox \
             BEGIN SELECT RAISE(FAIL, 'the disk is full'); END;"
        )
    };
    journal.execute_batch(&(full("UPDATE") + &full("DELETE"))).expect("triggers");
    let (client, path) = (&daemon.local, "/v1/sandboxes/demo");
    let problem = refusal(client, Method::DELETE, path, &[], Content::Nothing).await;
    assert_eq!(problem.code, Kind::Failed);
    assert!(problem.message.contains("the disk is full"), "{problem}");
    assert!(!there(), "the tap is gone all the same");
    assert_eq!(daemon.state("demo").await.as_deref(), Some("deleting"));
    journal.execute_batch("DROP TRIGGER full_UPDATE; DROP TRIGGER full_DELETE").expect("room");
    eventually("it is gone", async || daemon.state("demo").await.is_none()).await;
    daemon.create("demo", "default").await;
    daemon.end().await;
}

/// Promise 22. A name that changes hands between the look at whose it is and what is done to it.
#[tokio::test(flavor = "multi_thread")]
async fn a_verb_is_about_the_sandbox_that_was_found_whoever_has_its_name_by_then() {
    let daemon = Daemon::start().await;
    let keeper = &daemon.keeper;
    daemon.create("demo", "acme").await;
    let found = keeper.find(&"demo".parse().expect("name")).expect("there");
    let holder = Holder::Sandbox(found.clone());
    let (actor, policy) = (Actor::new("test", true), || policy::Policy::default());
    let set = keeper.set_policy(&holder, policy(), None, &actor).await;
    assert_eq!(set.expect("control").sandboxes, 1);
    daemon.remove("demo").await;
    let later = daemon.create("demo", "other").await;
    let rule = json!({ "allow": ["secret.example.com"] });
    let path = "/v1/sandboxes/demo/policy";
    let _: wire::Change = daemon.local.post(&format!("{path}/rules"), &rule).await.expect("added");
    let before: serde_json::Value = daemon.local.get(path).await.expect("policy");
    let absent = |refused: Option<lifecycle::Error>| {
        assert!(matches!(refused, Some(lifecycle::Error::NotFound(_))), "{refused:?}");
    };
    absent(keeper.policy(&holder).err());
    absent(keeper.set_policy(&holder, policy(), None, &actor).await.err());
    absent(keeper.set_mode(&holder, policy::PolicyMode::Observe, None, &actor).await.err());
    let command = agent::Exec { argv: vec!["id".to_owned()], ..agent::Exec::default() };
    absent(keeper.exec(&found, &command, &actor).await.err());
    assert!(!keeper.in_force(&found).observes());
    keeper.remove(&found, &actor).await.expect("it is gone, as is wanted");
    let now: wire::Sandbox = daemon.local.get("/v1/sandboxes/demo").await.expect("still there");
    assert_eq!((now.incarnation, &*now.state), (later.incarnation, "running"));
    assert_eq!(daemon.local.get::<serde_json::Value>(path).await.expect("policy"), before);
    daemon.end().await;
}

/// A name that changes hands while a request of its last owner is on its way.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_does_not_reach_a_later_sandbox_of_another_tenant() {
    let daemon = Daemon::start().await;
    let token = format!("authorization: Bearer {OF_ACME}\r\nexpect: 100-continue\r\n");
    let upgrade = token.clone() + "connection: upgrade\r\nupgrade: postern-exec\r\n";
    let requests = [
        ("POST /v1/sandboxes/demo/exec", &upgrade, "{\"argv\":[\"id\"]}"),
        ("PUT /v1/sandboxes/demo/policy", &token, "{\"default\":\"allow\"}"),
        ("POST /v1/sandboxes/demo/policy/rules", &token, "{\"allow\":[\"*\"]}"),
    ];
    for (line, more, body) in requests {
        daemon.create("demo", "acme").await;
        let (head, body) = request(line, more, body);
        #[expect(clippy::disallowed_methods, reason = "to the daemon: no guest's traffic")]
        let caller = TcpStream::connect(&daemon.tcp).await.expect("connect");
        let mut caller = BufReader::new(caller);
        caller.write_all(head.as_bytes()).await.expect("sent");
        let mut answer = String::new();
        caller.read_line(&mut answer).await.expect("an answer");
        assert!(answer.contains("100 Continue"), "{line}: {answer}");
        daemon.remove("demo").await;
        daemon.create("demo", "other").await;
        caller.write_all(body.as_bytes()).await.expect("sent");
        answer.clear();
        while !answer.contains("HTTP/1.1") {
            answer.clear();
            caller.read_line(&mut answer).await.expect("an answer");
        }
        assert!(answer.contains("404"), "{line}: {answer}");
        let held: serde_json::Value =
            daemon.local.get("/v1/sandboxes/demo/policy").await.expect("policy");
        assert_eq!(held, json!({ "default": "deny" }), "{line}");
        daemon.remove("demo").await;
    }
    daemon.end().await;
}
