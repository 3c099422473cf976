//! Snapshots are their tenant's, and what has no files of the node's has none. The row is written as the daemon
//! would; no guest is needed to be refused one.

use rusqlite::{Connection, params};
use serde_json::json;

use crate::tenants::{ask, world_with_tokens};

/// Promises 22, 70, 71. What is another tenant's does not exist.
#[test]
fn a_token_sees_and_touches_only_its_tenants_snapshots() {
    let world = world_with_tokens();
    let journal = Connection::open(world.dir().join("state/postern.db")).expect("the journal");
    for (name, tenant, key) in [("of-a", "a", "1-x"), ("of-b", "b", "2-x")] {
        let row = json!({
            "name": name, "tenant": tenant, "sandbox": "x", "incarnation": 7, "memory_mib": 256, "vcpus": 1,
            "disk": null, "created": 7,
            "stored": { "key": key, "url": "/none", "bytes": 4711, "list": "00" },
        });
        let insert = "INSERT INTO snapshot VALUES (?1, ?2, ?3, 4711, ?4)";
        journal.execute(insert, params![name, tenant, key, row.to_string()]).expect("written");
    }
    let names = |token: &str, query: &str| {
        let listed = ask(&world, token, "GET", &format!("/v1/snapshots{query}"), &[]);
        let all = listed.json["snapshots"].as_array().cloned().unwrap_or_default();
        all.iter()
            .map(|one| one["name"].as_str().unwrap_or_default().to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(names("a", ""), ["of-a"]);
    assert_eq!(names("all", ""), ["of-a", "of-b"]);
    assert_eq!(names("all", "?sandbox=y"), Vec::<String>::new());
    let clone = ["--json", "{\"name\":\"new\"}"];
    let unknown = ask(&world, "a", "GET", "/v1/snapshots/nothing", &[]);
    assert_eq!(unknown.status, 404);
    for (method, path, more) in
        [("GET", "", &[][..]), ("POST", "/clone", &clone[..]), ("DELETE", "", &[])]
    {
        let answer = ask(&world, "a", method, &format!("/v1/snapshots/of-b{path}"), more);
        assert_eq!(answer.status, 404, "{method} {path}: {}", answer.text);
        assert_eq!(answer.json["error"]["message"], unknown.json["error"]["message"]);
    }
    // The control: its own is found, and says what is wrong with it; nothing of the clone is left.
    assert_eq!(ask(&world, "a", "GET", "/v1/snapshots/of-a", &[]).json["bytes"], 4711);
    let made = ask(&world, "a", "POST", "/v1/snapshots/of-a/clone", &clone);
    assert!(made.status >= 400 && made.text.contains("object store"), "{}", made.text);
    assert_eq!(ask(&world, "a", "GET", "/v1/sandboxes/new", &[]).status, 404);
    assert_eq!(ask(&world, "a", "DELETE", "/v1/snapshots/of-a", &[]).status, 204);
    assert_eq!(names("all", ""), ["of-b"]);
    // A snapshot is of files that the node has.
    let name = world.fresh_name();
    assert_eq!(world.create(&name, "a", "").status, 201);
    let path = format!("/v1/sandboxes/{name}/snapshots");
    let refused = ask(&world, "a", "POST", &path, &["--json", "{\"name\":\"mine\"}"]);
    assert_eq!(refused.status, 409, "{}", refused.text);
    let refused = ask(&world, "a", "POST", &path, &["--json", "{\"name\":\"A_b\"}"]);
    assert_eq!(refused.status, 400, "{}", refused.text);
    assert_eq!(ask(&world, "b", "POST", &path, &["--json", "{\"name\":\"its\"}"]).status, 404);
}
