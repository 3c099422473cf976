//! What the daemon cannot read in its journal shuts in what it is about, and nothing else; where nobody can
//! say what that is, there is no start.

use rusqlite::Connection;
use serde_json::json;
use world::client::{self, AT_ONCE, PATIENT};
use world::daemon::{Ran, program};
use world::origin::port;
use world::poll::eventually;
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
        ("tenant/acme", of_tenant, "UPDATE policy SET revision = -1", open, true),
        ("platform", "/v1/platform/policy", "UPDATE policy SET document = ''", &*always, false),
    ];
    for (scope, path, damaged, whole, neighbour) in cases {
        shut.reaches(&site);
        world.daemon().kill();
        change(&world, &format!("{damaged} WHERE scope = '{scope}'"));
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

/// Promise 56. Nobody knows what runs there: it is ended by its traces, and keeps its slot until it is removed.
#[test]
fn a_sandbox_whose_row_is_damaged_has_failed_with_the_reason_and_keeps_nobody_else() {
    let world = World::without_daemon("");
    let ended = world.dir().join("ended");
    let hook = format!("echo $POSTERN_SANDBOX >> {}", ended.display());
    let config = std::fs::read_to_string(config(&world)).expect("the configuration");
    let hook = format!("{config}\n[external]\non_remove = [\"/bin/sh\", \"-c\", \"{hook}\"]\n");
    std::fs::write(self::config(&world), hook).expect("write");
    world.daemon().start(&world.host);
    let site = world.site("api");
    let other = world.guest(&allow(&[&site]));
    for (damage, column) in [
        ("process = '{'", "process"),
        ("process = CAST(x'ff' AS TEXT)", "process"),
        ("state = 'walking'", "state"),
        ("vcpus = 4000", "vcpus"),
        ("incarnation = -1", "incarnation"),
    ] {
        let _ = std::fs::remove_file(&ended);
        let guest = world.guest(&allow(&[&site]));
        guest.reaches(&site);
        world.daemon().kill();
        change(&world, &format!("UPDATE sandbox SET {damage} WHERE name = '{}'", guest.name));
        world.daemon().start(&world.host);
        let path = format!("/v1/sandboxes/{}", guest.name);
        let shown = eventually(&format!("{damage}: it has failed"), PATIENT, || {
            let shown = world.api("GET", &path, &[]).json;
            (shown["state"] == "failed").then_some(shown)
        });
        let reason = shown["reason"].as_str().unwrap_or_default();
        let place = ["table sandbox", "row ", &format!("column {column}")];
        assert!(place.iter().all(|part| reason.contains(part)), "{shown}");
        assert_eq!(shown["slot"], guest.created["slot"]);
        eventually(&format!("{damage}: its guest is ended"), PATIENT, || {
            let told = std::fs::read_to_string(&ended).unwrap_or_default();
            (told.trim() == guest.name).then_some(())
        });
        let mark = world.mark();
        assert_ne!(guest.curl(&["-m", "2", &format!("https://{}/", site.name)]).code, 0);
        assert_eq!(world.sent_since(mark, |seen| seen.is_to(site.ip)), [], "{damage}");
        other.reaches(&site);
        assert_eq!(world.api("DELETE", &path, &[]).status, 204, "{damage}");
    }
    other.reaches(&site);
}

/// Promise 56. What only describes it is left out, and the log says where it was.
#[test]
fn a_sandbox_of_which_only_a_description_is_damaged_goes_on() {
    let world = World::new();
    let site = world.site("api");
    let guest = world.guest(&allow(&[&site]));
    let path = format!("/v1/sandboxes/{}", guest.name);
    let shown = world.api("GET", &path, &[]).json;
    assert!(shown["created"].is_string(), "control: {shown}");
    for (damage, column) in [
        ("created = -1", "created"),
        ("created = 253402300800", "created"),
        ("created = 9223372036854775807", "created"),
        ("created = 7, reason = CAST(x'ff' AS TEXT)", "reason"),
    ] {
        world.daemon().kill();
        let logged = world.daemon().log().len();
        change(&world, &format!("UPDATE sandbox SET {damage} WHERE name = '{}'", guest.name));
        world.daemon().start(&world.host);
        let shown = world.api("GET", &path, &[]);
        assert_eq!((shown.status, &shown.json["state"]), (200, &json!("running")), "{damage}");
        assert_eq!(shown.json["created"].is_string(), column != "created", "{}", shown.text);
        let (listed, health) = (world.cli(&["ls"]).ok(), world.api("GET", "/v1/health", &[]).json);
        assert!(listed.stdout.contains(&guest.name), "{}", listed.stdout);
        assert_eq!(health["panics"], 0, "{damage}");
        let log = world.daemon().log();
        let place = ["table sandbox", &format!("column {column}")];
        let mut said = log[logged..].lines();
        assert!(said.any(|line| place.iter().all(|part| line.contains(part))), "{damage}: {log}");
        guest.reaches(&site);
    }
}

/// Promise 56. What nobody can say the meaning of may close anything, or be the only trace of what runs.
#[test]
fn a_row_that_does_not_say_whose_it_is_keeps_the_daemon_from_starting_until_it_is_given_up() {
    let world = World::new();
    let site = world.site("api");
    let guest = world.guest_of("acme", &allow(&[&site]));
    let written =
        world.api("PUT", "/v1/tenants/acme/policy", &["--json", "{\"default\":\"deny\"}"]);
    assert_eq!(written.status, 200, "{}", written.text);
    let lost = world.guest(&allow(&[&site]));
    for (damage, row) in [
        ("UPDATE policy SET scope = 'tenantacme' WHERE scope = 'tenant/acme'", "tenantacme"),
        (&*format!("UPDATE sandbox SET slot = 70000 WHERE name = '{}'", lost.name), &*lost.name),
        (&*format!("UPDATE sandbox SET name = '../x' WHERE name = '{}'", guest.name), "../x"),
        ("INSERT INTO kept VALUES (70000, 'boot', 'qemu')", "table kept"),
        ("INSERT INTO resting VALUES (70000, 'boot', 0)", "table resting"),
    ] {
        world.daemon().kill();
        change(&world, damage);
        let mut serve = world.host.bare_command("timeout");
        serve.arg("20").arg(program()).args(["serve", "--config", &config(&world)]);
        let ran = serve.output().expect("run it");
        let ran = Ran::of(&ran);
        assert!(ran.code > 0, "{damage}: {ran:?}");
        assert!(ran.stderr.contains(row), "{damage}: {}", ran.stderr);
        let remedy = ran.stderr.split('`').find(|word| word.starts_with("DELETE FROM"));
        change(&world, remedy.expect("a remedy"));
        world.daemon().start(&world.host);
    }
    let none = world.api("GET", "/v1/sandboxes", &[]).json;
    assert_eq!(none, json!({ "sandboxes": [] }), "each was given up");
    world.guest(&allow(&[&site])).reaches(&site);
}

/// Changes one row of the journal while no daemon has it.
fn change(world: &World, statement: &str) {
    let journal = Connection::open(world.dir().join("state/postern.db")).expect("the journal");
    assert_eq!(journal.execute(statement, []).expect("changed"), 1, "{statement}");
}

fn config(world: &World) -> String {
    world.dir().join("postern.toml").display().to_string()
}
