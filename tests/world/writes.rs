//! Policy writes of several tenants at once: nobody waits for a write of somebody else.

use std::sync::mpsc;

use fault::Point;
use serde_json::json;
use world::daemon::{Answer, Request};
use world::{Site, World, allow};

use crate::tenants::{ask, world_with_tokens};

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
        let refused = answers.recv_timeout(world::client::PATIENT).expect("an answer");
        assert_eq!(refused.status, 429, "{}", refused.text);
        assert!(refused.text.to_ascii_lowercase().contains("retry-after: 1"), "{}", refused.text);
        assert!(refused.text.contains("\"busy\""), "{}", refused.text);
        let of_other = write("b", "/v1/tenants/b/policy", "default = \"allow\"\n");
        assert_eq!(of_other.status, 200, "another tenant's: {}", of_other.text);
        world.daemon().release();
        let second = answers.recv_timeout(world::client::PATIENT).expect("an answer");
        let first = first.join().expect("an answer");
        assert_eq!((first.status, second.status), (200, 200), "{} {}", first.text, second.text);
        assert!(revision(&first) < revision(&second));
    });
    let shown = world.api("GET", path, &[]).text;
    assert!(shown.contains("x.example"), "the second is in force: {shown}");
    let again = write("a", path, "default = \"allow\"\n");
    assert_eq!(again.status, 200, "there is room again: {}", again.text);
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
