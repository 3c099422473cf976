//! A policy in the journal that the daemon cannot read shuts in what is under it, and nothing else.

use rusqlite::Connection;
use serde_json::json;
use world::client::{self, AT_ONCE, PATIENT};
use world::origin::port;
use world::{Guest, Site, World, allow};

/// Asks in every way for a site that is allowed; whatever comes of it, `site` must see nothing.
fn tries(world: &World, guest: &Guest<'_>, site: &Site) {
    let asked = guest.curl(&[&format!("https://{}/", site.name)]);
    assert_eq!(asked.code, 6, "no such name: {}", asked.stderr);
    let hello = client::client_hello(&world.authority, &site.name);
    let request = format!("GET / HTTP/1.1\r\nHost: {}\r\n\r\n", site.name);
    let ways: [(u16, &[u8]); 3] =
        [(443, &hello), (80, request.as_bytes()), (port::ECHO, b"ping\r\n")];
    for (number, words) in ways {
        let reply = guest.run(|| client::exchange(site.at(number), &[words], AT_ONCE));
        let refused = reply.alert().is_some() || reply.text().contains("postern-deny");
        assert!(refused || reply.bytes.is_empty(), "{number}: {reply:?}");
    }
}

/// Promise 56. A rule of the platform that says `always` opens nothing, either; the next write mends it.
#[test]
fn a_policy_that_cannot_be_read_shuts_its_own_scope_until_it_is_written_anew() {
    let world = World::new();
    let site = world.site("api");
    let all_ways = format!(
        "{}[[rule]]\nallow = [\"{}\"]\nports = [{}]\n",
        allow(&[&site]),
        site.ip,
        port::ECHO
    );
    let (shut, other) = (world.guest_of("acme", &all_ways), world.guest_of("other", &all_ways));
    let always = format!("default = \"allow\"\n{}always = true\n", allow(&[&site]));
    let set = |path: &str, policy: &str| {
        let words = ["-H", "content-type: application/toml", "--data-binary", policy];
        world.api("PUT", path, &words)
    };
    let open = "default = \"allow\"\n";
    assert_eq!(set("/v1/platform/policy", &always).status, 200);
    assert_eq!(set("/v1/tenants/acme/policy", open).status, 200);
    let own = format!("sandbox/{}", shut.name);
    let own_path = format!("/v1/sandboxes/{}/policy", shut.name);
    let of_tenant = "/v1/tenants/acme/policy";
    let cases = [
        (&*own, &*own_path, "UPDATE policy SET document = '{'", &*all_ways, true),
        (&*own, &*own_path, "DELETE FROM policy", &*all_ways, true),
        ("tenant/acme", of_tenant, "UPDATE policy SET document = '{\"alow\":[]}'", open, true),
        ("tenant/acme", of_tenant, "UPDATE policy SET document = CAST(x'ff' AS TEXT)", open, true),
        ("platform", "/v1/platform/policy", "UPDATE policy SET document = ''", &*always, false),
    ];
    for (scope, path, damaged, whole, neighbour) in cases {
        shut.reaches(&site);
        world.daemon().kill();
        let journal = Connection::open(world.dir().join("state/postern.db")).expect("the journal");
        let damage = format!("{damaged} WHERE scope = '{scope}'");
        assert_eq!(journal.execute(&damage, []).expect("damaged"), 1, "{scope}");
        drop(journal);
        world.daemon().start(&world.host);
        let mark = world.mark();
        tries(&world, &shut, &site);
        let seen = world.sent_since(mark, |seen| seen.is_to(site.ip));
        assert_eq!(seen, [], "{scope} {damaged}");
        if neighbour {
            other.reaches(&site);
        } else {
            let mark = world.mark();
            tries(&world, &other, &site);
            assert_eq!(world.sent_since(mark, |seen| seen.is_to(site.ip)), [], "{scope}");
        }
        let shown = world.api("GET", &format!("/v1/sandboxes/{}", shut.name), &[]).json;
        assert_eq!(shown["closed_by"], scope, "{shown}");
        let doctor = world.cli(&["doctor", "--json", "--config", &config(&world)]).json();
        let check = doctor["checks"].as_array().expect("checks").iter();
        let check = check.filter(|check| check["name"] == "policies").collect::<Vec<_>>();
        assert_eq!(check[0]["status"], "warn", "{doctor}");
        assert!(check[0]["found"].as_str().is_some_and(|found| found.contains(scope)), "{doctor}");
        assert!(world.daemon().log().contains("policy not readable"), "{scope}");
        // Nobody knows what a rule would be added to.
        let rule = ["--json", "{\"allow\":[\"x.example.com\"]}"];
        let added = world.api("POST", &format!("{path}/rules"), &rule);
        assert_eq!((added.status, &added.json["error"]["code"]), (409, &json!("conflict")));
        let read = world.api("GET", path, &[]);
        assert_eq!(read.status, 409, "{}", read.text);
        assert!(read.json["error"]["fix"].as_str().is_some_and(|fix| fix.contains("anew")));
        let written = set(path, whole);
        assert_eq!(written.status, 200, "{scope}: {}", written.text);
        let shown = world.api("GET", &format!("/v1/sandboxes/{}", shut.name), &[]).json;
        assert!(shown["closed_by"].is_null(), "{shown}");
        shut.reaches(&site);
        other.reaches(&site);
    }
    let echo = shut.run(|| {
        let whole = |bytes: &[u8]| bytes == b"ping\r\n";
        client::exchange_until(site.at(port::ECHO), &[b"ping\r\n"], PATIENT, whole)
    });
    assert_eq!(echo.bytes, b"ping\r\n", "control");
}

fn config(world: &World) -> String {
    world.dir().join("postern.toml").display().to_string()
}
