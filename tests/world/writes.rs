//! Policy writes of several tenants at once: nobody waits for a write of somebody else.

use std::sync::mpsc;

use fault::Point;
use serde_json::json;
use world::client::{self, PATIENT};
use world::daemon::{Answer, Request};
use world::poll::eventually;
use world::{Site, World, allow};

use crate::tenants::{ask, world_with_tokens, world_with_tokens_and};

const TOML: [&str; 3] = ["-H", "content-type: application/toml", "--data-binary"];

fn to_set(world: &World, path: &str, policy: &str) -> Request {
    world.daemon().request("PUT", path, &[&TOML[..], &[policy]].concat())
}

/// Promise 57. One that is held up while it is made ready holds up its own tenant's writes only.
#[test]
fn a_write_that_takes_long_stalls_no_other_tenant() {
    let world = World::new();
    let (old, new) = (world.site("old"), world.site("new"));
    let slow = world.guest_of("slow", &allow(&[&old]));
    let other = world.guest_of("other", &allow(&[&old]));
    slow.reaches(&old);
    world.daemon().arm(Point::PolicyCompiled, "stall");
    let path = format!("/v1/sandboxes/{}/policy", slow.name);
    let long = to_set(&world, &path, &allow(&[&new]));
    // Removing it waits for its tenant's writes; making it does not.
    let mut newcomer = None;
    std::thread::scope(|scope| {
        let held_up = scope.spawn(|| long.answer());
        world.daemon().stalls(Point::PolicyCompiled);
        let written = other.set_policy(&allow(&[&new]));
        assert_eq!(written.status, 200, "{}", written.text);
        other.reaches(&new);
        for path in ["/v1/tenants/other/policy", "/v1/platform/policy"] {
            let written = to_set(&world, path, "default = \"allow\"\n").answer();
            assert_eq!(written.status, 200, "{path}: {}", written.text);
        }
        let read = world.api("GET", &path, &[]);
        assert!(read.text.contains(&old.name), "what is in force can be read: {}", read.text);
        newcomer.insert(world.guest_of("slow", &allow(&[&old]))).reaches(&old);
        slow.reaches(&old);
        assert!(!held_up.is_finished());
        world.daemon().release();
        let written = held_up.join().expect("an answer");
        assert_eq!((written.status, &written.json["sandboxes"]), (200, &json!(1)), "{written:?}");
    });
    slow.reaches(&new);
    let url = format!("https://{}/", old.name);
    assert_eq!(slow.curl(&[&url]).code, 6, "no such name");
}

/// Promise 57. One under way, one that waits; who asks for more is told when to ask again, and what it
/// wrote last is in force.
#[test]
fn a_tenant_has_no_more_than_one_write_waiting_and_they_keep_their_order() {
    let world = world_with_tokens();
    let path = "/v1/tenants/a/policy";
    let write = |token: &str, path: &str, policy: &str| {
        ask(&world, token, "PUT", path, &[&["-i"], &TOML[..], &[policy]].concat())
    };
    let (answered, answers) = mpsc::channel();
    world.daemon().arm(Point::PolicyCompiled, "stall");
    std::thread::scope(|scope| {
        let first = scope.spawn(|| write("a", path, "default = \"allow\"\n"));
        world.daemon().stalls(Point::PolicyCompiled);
        for mode in ["enforce", "observe"] {
            let (answered, write) = (answered.clone(), &write);
            let policy = format!(
                "default = \"allow\"\nmode = \"{mode}\"\n[[rule]]\ndeny = [\"x.example\"]\n"
            );
            scope.spawn(move || answered.send(write("a", path, &policy)).expect("heard"));
        }
        // Only the one too many is answered while the first is held up.
        let refused = answers.recv_timeout(PATIENT).expect("an answer");
        assert_eq!(refused.status, 429, "{}", refused.text);
        assert!(refused.text.to_ascii_lowercase().contains("retry-after: 1"), "{}", refused.text);
        assert!(refused.text.contains("\"busy\""), "{}", refused.text);
        let of_other = write("b", "/v1/tenants/b/policy", "default = \"allow\"\n");
        assert_eq!(of_other.status, 200, "another tenant's: {}", of_other.text);
        world.daemon().release();
        let second = answers.recv_timeout(PATIENT).expect("an answer");
        let first = first.join().expect("an answer");
        assert_eq!((first.status, second.status), (200, 200), "{} {}", first.text, second.text);
        assert!(revision(&first) < revision(&second));
    });
    let shown = world.api("GET", path, &[]).text;
    assert!(shown.contains("x.example"), "the second is in force: {shown}");
    let again = write("a", path, "default = \"allow\"\n");
    assert_eq!(again.status, 200, "there is room again: {}", again.text);
}

/// Asks for a sandbox of the token's tenant.
fn make(world: &World, token: &str, policy: &serde_json::Value) -> Answer {
    let wanted = json!({ "name": world.fresh_name(), "driver": "external", "policy": policy });
    ask(world, token, "POST", "/v1/sandboxes", &["--json", &wanted.to_string()])
}

/// Promise 57. However many sandboxes a tenant has made at once, their policies are read by turns, and hold
/// up nobody else's.
#[test]
fn policies_of_new_sandboxes_are_read_by_turns_of_their_tenant() {
    let world = world_with_tokens();
    let open = json!({ "default": "allow" });
    let (answered, answers) = mpsc::channel();
    world.daemon().arm(Point::PolicyCompiled, "stall");
    std::thread::scope(|scope| {
        let first = scope.spawn(|| make(&world, "a", &open));
        world.daemon().stalls(Point::PolicyCompiled);
        for _ in 0..3 {
            let (answered, world, open) = (answered.clone(), &world, &open);
            scope.spawn(move || answered.send(make(world, "a", open).status).expect("heard"));
        }
        let (other, bare) = (make(&world, "b", &open), make(&world, "a", &json!(null)));
        assert_eq!(other.status, 201, "another tenant's: {}", other.text);
        assert_eq!(bare.status, 201, "without a policy: {}", bare.text);
        let early = answers.recv_timeout(client::AT_ONCE);
        world.daemon().release();
        assert!(early.is_err(), "{early:?}");
        assert_eq!(first.join().expect("an answer").status, 201);
        for _ in 0..3 {
            assert_eq!(answers.recv_timeout(PATIENT), Ok(201), "in its turn");
        }
    });
}

/// Promise 57. The turn is for the policy: however long the guests take, their tenant's writes go on.
#[test]
fn sandboxes_that_are_being_made_hold_up_no_policy_write_of_their_tenant() {
    let hook = "d=${POSTERN_RUN_DIR%/sandboxes/*}; touch $d/made-$POSTERN_SANDBOX; until test -e $d/go; do \
                sleep 0.1; done";
    let config = format!("[external]\non_create = [\"/bin/sh\", \"-c\", \"{hook}\"]\n");
    let world = world_with_tokens_and(&config);
    let run = world.dir().join("run");
    let under_way = || {
        let files = std::fs::read_dir(&run).into_iter().flatten().flatten();
        files.filter(|file| file.file_name().to_string_lossy().starts_with("made-")).count()
    };
    std::thread::scope(|scope| {
        let making = [(); 2].map(|()| scope.spawn(|| make(&world, "a", &json!({}))));
        eventually("both are being made", PATIENT, || (under_way() == 2).then_some(()));
        let words = [&TOML[..], &["default = \"allow\"\n"]].concat();
        let written = ask(&world, "a", "PUT", "/v1/tenants/a/policy", &words);
        std::fs::write(run.join("go"), "").expect("they go on");
        assert_eq!(written.status, 200, "{}", written.text);
        for one in making {
            let made = one.join().expect("an answer");
            assert_eq!(made.status, 201, "{}", made.text);
        }
    });
}

/// Promises 55, 57. Who may have no more sandboxes has no more policies read.
#[test]
fn the_policy_of_a_sandbox_that_there_is_no_room_for_is_not_read() {
    let world = world_with_tokens_and("[tenants]\nsandboxes = 1\n");
    let bad = json!({ "default": "perhaps" });
    let unread = make(&world, "a", &bad);
    assert_eq!(unread.json["error"]["field"], "policy.default", "control: {}", unread.text);
    assert_eq!(make(&world, "a", &json!({})).status, 201);
    let refused = make(&world, "a", &bad);
    assert_eq!(refused.status, 429, "{}", refused.text);
    assert_eq!(refused.json["error"]["code"], "quota", "{}", refused.text);
}

/// Promise 18. Of its sandbox, its tenant and the platform at once: none puts back what another changed.
#[test]
fn writes_of_every_layer_at_the_same_time_are_all_in_force_together() {
    let world = World::new();
    let guest = world.guest_of("acme", "");
    let own = format!("/v1/sandboxes/{}/policy", guest.name);
    let denies = |site: &Site| format!("default = \"allow\"\n[[rule]]\ndeny = [{:?}]\n", site.name);
    for round in 0..6 {
        let [platform, tenant, open] = ["platform", "tenant", "open"].map(|at| world.site(at));
        let writes = [
            ("/v1/platform/policy", denies(&platform)),
            ("/v1/tenants/acme/policy", denies(&tenant)),
            (&*own, allow(&[&platform, &tenant, &open])),
        ];
        let writes = writes.map(|(path, policy)| to_set(&world, path, &policy));
        let newest = std::thread::scope(|scope| {
            let writing = writes.map(|write| scope.spawn(|| write.answer()));
            let revision = |answer: Answer| {
                assert_eq!(answer.status, 200, "{round}: {}", answer.text);
                answer.json["revision"].as_u64()
            };
            writing.map(|one| revision(one.join().expect("an answer"))).into_iter().max()
        });
        let shown = world.api("GET", &format!("/v1/sandboxes/{}", guest.name), &[]).json;
        assert_eq!(Some(shown["revision"].as_u64()), newest, "{round}: {shown}");
        guest.reaches(&open);
        for (site, layer) in [(&platform, "platform"), (&tenant, "tenant")] {
            let resolve = format!("{}:80:{}", site.name, site.ip);
            let got = guest.curl(&["--resolve", &resolve, &format!("http://{}/", site.name)]);
            let refusal = &got.json()["error"];
            assert_eq!((&refusal["layer"], &refusal["code"]), (&json!(layer), &json!("rule")));
            assert_eq!(world.sent_to(site.ip), [], "{round}: {layer}");
        }
    }
}

/// The revision that an answer tells whose text has the head, too.
fn revision(answer: &Answer) -> u64 {
    let body = answer.text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    let body: serde_json::Value = serde_json::from_str(body).expect("JSON");
    body["revision"].as_u64().expect("a revision")
}
