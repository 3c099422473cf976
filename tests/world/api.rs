//! Bad input over the API and the command line: refused whole, with what is wrong and what to do.

use serde_json::json;
use world::World;

/// Promise 19. A body that is not right makes nothing.
#[test]
fn a_bad_request_to_create_names_the_field_the_value_and_the_fix_and_makes_nothing() {
    let world = World::shared();
    let long = "x".repeat(5000);
    let cases = [
        (json!({ "name": "Bad Name" }), "name", "Bad Name"),
        (json!({ "name": "-x" }), "name", "-x"),
        (json!({ "name": "" }), "name", ""),
        (json!({ "name": long }), "name", "xxxx"),
        (json!({ "name": "../../etc" }), "name", "../../etc"),
        (json!({ "name": "a\u{1b}[2J\n" }), "name", "\\u{1b}"),
        (json!({ "nmae": "ok" }), "nmae", ""),
        (json!({ "name": "ok-1", "driver": "vmware" }), "driver", "vmware"),
        (json!({ "name": "ok-1", "driver": "external", "tenant": "No Such" }), "tenant", "No Such"),
        (json!({ "name": "ok-1", "driver": "external", "vcpus": 0 }), "vcpus", "0"),
        (json!({ "name": "ok-1", "driver": "external", "vcpus": "two" }), "vcpus", "two"),
        (json!({ "name": "ok-1", "driver": "external", "memory": "1Q" }), "memory", "1Q"),
        (json!({ "name": "ok-1", "driver": "external", "memory": "1M" }), "memory", ""),
        (
            json!({ "name": "ok-1", "driver": "external", "policy": { "rule": [{ "allow": ["10.0.0.0/33"] }] } }),
            "policy.rule[0].allow[0]",
            "10.0.0.0/33",
        ),
        (
            json!({ "name": "ok-1", "driver": "external", "policy": { "rules": [] } }),
            "policy.rules",
            "",
        ),
        (json!({ "name": 7 }), "name", "7"),
        (json!([]), "", ""),
    ];
    for (body, field, value) in cases {
        let answer = world.api("POST", "/v1/sandboxes", &["--json", &body.to_string()]);
        let error = &answer.json["error"];
        let context =
            format!("{}: {}", body.to_string().get(..60).unwrap_or(&body.to_string()), answer.text);
        assert_eq!(answer.status, 400, "{context}");
        let named = error["field"].as_str().unwrap_or_default();
        assert!(
            named.starts_with(field) || field.starts_with(named) && !named.is_empty(),
            "{context}"
        );
        let given = error["value"].as_str().unwrap_or_default();
        assert!(given.contains(value) && given.len() < 300, "{context}");
        assert!(error["fix"].as_str().is_some_and(|fix| !fix.is_empty()), "{context}");
        assert!(!answer.text.contains('\u{1b}'), "{context}");
    }
    assert_eq!(world.api("GET", "/v1/sandboxes/ok-1", &[]).status, 404);
}

/// Promise 19. Every refusal has one form, whoever notices first.
#[test]
fn every_refusal_of_the_api_has_the_same_form() {
    let world = World::shared();
    let big = world.dir().join("big.json");
    std::fs::write(&big, vec![b' '; (1 << 20) + 1]).expect("write");
    let big = format!("@{}", big.display());
    let cases: [(&str, &str, &[&str], u16); 9] = [
        ("GET", "/v1/nothing", &[], 404),
        ("GET", "/", &[], 404),
        ("GET", "/v1/sandboxes/nobody", &[], 404),
        ("PATCH", "/v1/sandboxes", &[], 405),
        ("POST", "/v1/sandboxes", &["-H", "content-type: text/plain", "-d", "x"], 415),
        ("POST", "/v1/sandboxes", &["--json", "{"], 400),
        (
            "POST",
            "/v1/sandboxes",
            &["-H", "content-type: application/json", "--data-binary", &big],
            413,
        ),
        ("GET", "/v1/events?cdoe=no-rule", &[], 400),
        ("GET", "/v1/events?since=yesterday", &[], 400),
    ];
    for (method, path, more, status) in cases {
        let answer = world.api(method, path, more);
        assert_eq!(answer.status, status, "{method} {path}: {}", answer.text);
        let error = &answer.json["error"];
        for key in ["code", "message", "docs"] {
            assert!(error[key].is_string(), "{method} {path}: {key} in {}", answer.text);
        }
    }
}

/// Promise 19. The command line says the same, and its exit code says which kind it is.
#[test]
fn the_command_line_tells_field_and_fix_and_exits_by_kind() {
    let world = World::shared();
    let missing = world.cli(&["show", "nobody"]);
    assert_eq!(missing.code, 3, "{missing:?}");
    assert_eq!(world.cli(&["frobnicate"]).code, 2);
    assert_eq!(world.cli(&["create"]).code, 2);
    let bad = world.cli(&["create", "Bad Name", "--driver", "external"]);
    assert_ne!(bad.code, 0);
    assert!(bad.stderr.contains("Bad Name") && bad.stderr.contains("a-z"), "{bad:?}");
    let name = world.fresh_name();
    let policy = world.dir().join("bad-cli.toml");
    std::fs::write(&policy, "[[rule]]\nallow = [\"10.0.0.0/33\"]\n").expect("write");
    let policy = policy.to_string_lossy().into_owned();
    let bad = world.cli(&["create", &name, "--driver", "external", "--policy", &policy]);
    assert!(bad.code != 0 && bad.stderr.contains("10.0.0.0/33"), "{bad:?}");
    assert_eq!(world.cli(&["show", &name]).code, 3, "nothing was made");
}

/// The whole life of a sandbox by the command line.
#[test]
fn the_command_line_creates_lists_changes_explains_and_removes() {
    let world = World::shared();
    let api = world.site("api");
    let name = world.fresh_name();
    let made =
        world.cli(&["create", &name, "--driver", "external", "--allow", &api.name, "--json"]).ok();
    let made = made.json_lines().pop().expect("a result");
    assert_eq!(made["name"], name, "{made}");
    let guest = world::Guest::behind(world, &name, made);
    guest.reaches(&api);
    let listed = world.cli(&["ls", "--json"]).ok();
    assert!(listed.stdout.contains(&name), "{listed:?}");
    assert!(world.cli(&["ls"]).ok().stdout.contains(&name));
    let new = world.site("new");
    world.cli(&["policy", "allow", &name, &new.name]).ok();
    guest.reaches(&new);
    world.cli(&["policy", "deny", &name, &new.name]).ok();
    let refused = guest.curl(&[&format!("https://{}/", new.name)]);
    assert_eq!(refused.status, 0, "{}", refused.head);
    let told = world.cli(&["policy", "explain", &name, &format!("https://{}/", new.name)]);
    assert!(told.stdout.contains(&new.name) && told.stdout.contains("deny"), "{told:?}");
    assert!(world.cli(&["policy", "get", &name]).ok().stdout.contains(&api.name));
    world.cli(&["rm", &name]).ok();
    assert_eq!(world.cli(&["show", &name]).code, 3);
}
