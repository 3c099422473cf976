//! The control API over TCP: a token is a tenant's, and a tenant is alone.

use std::time::Duration;

use serde_json::{Value, json};
use world::client::PATIENT;
use world::daemon::{Answer, Request};
use world::netns::DIRECTORY_PREFIX;
use world::origin::{port, sum};
use world::poll::eventually;
use world::world::HOST;
use world::{Guest, World, allow, client};

const PORT: u16 = 7777;

pub(crate) fn world_with_tokens() -> World {
    world_with_tokens_and("")
}

pub(crate) fn world_with_tokens_and(more: &str) -> World {
    let tokens = [("a", "a"), ("b", "b"), ("all", "*")].map(|(name, tenant)| {
        let digest = sum(format!("secret-{name}").as_bytes());
        format!("{{ name = \"{name}\", tenant = \"{tenant}\", sha256 = \"{digest}\" }}")
    });
    let tokens = tokens.join(", ");
    World::with(&format!("[api]\nlisten = \"{HOST}:{PORT}\"\ntoken = [{tokens}]\n{more}"))
}

pub(crate) fn ask(world: &World, token: &str, method: &str, path: &str, more: &[&str]) -> Answer {
    let mut curl = world.host.command("curl");
    if !token.is_empty() {
        curl.args(["-H", &format!("authorization: Bearer secret-{token}")]);
    }
    curl.args(more);
    Request::by(curl, method, &format!("http://{HOST}:{PORT}{path}")).answer()
}

/// Promise 22. What is another tenant's does not exist.
#[test]
fn a_token_sees_and_touches_only_its_tenants_sandboxes() {
    let world = world_with_tokens();
    let (own, other) = (world.fresh_name(), world.fresh_name());
    assert_eq!(world.create(&own, "a", "").status, 201);
    assert_eq!(world.create(&other, "b", "").status, 201);
    let listed = ask(&world, "a", "GET", "/v1/sandboxes", &[]);
    assert_eq!(listed.json["sandboxes"].as_array().map(Vec::len), Some(1), "{}", listed.text);
    assert_eq!(listed.json["sandboxes"][0]["name"], own);
    let toml = ["-H", "content-type: application/toml", "--data-binary", "default = \"allow\""];
    let question = ["--json", "{\"destination\":\"x.example.com:443\"}"];
    let rule = ["--json", "{\"allow\":[\"x.example.com\"]}"];
    let exec = [
        "-H",
        "connection: upgrade",
        "-H",
        "upgrade: postern-exec",
        "--json",
        "{\"argv\":[\"id\"]}",
    ];
    let verbs: [(&str, &str, &[&str]); 7] = [
        ("GET", "", &[]),
        ("GET", "/policy", &[]),
        ("PUT", "/policy", &toml),
        ("POST", "/policy/rules", &rule),
        ("POST", "/policy/explain", &question),
        ("POST", "/exec", &exec),
        ("DELETE", "", &[]),
    ];
    let unknown = ask(&world, "a", "GET", "/v1/sandboxes/nobody", &[]);
    for (method, path, more) in verbs {
        let answer = ask(&world, "a", method, &format!("/v1/sandboxes/{other}{path}"), more);
        assert_eq!(answer.status, 404, "{method} {path}: {}", answer.text);
        assert_eq!(
            answer.json["error"]["message"], unknown.json["error"]["message"],
            "{method} {path}"
        );
    }
    assert_eq!(ask(&world, "a", "PUT", "/v1/tenants/b/policy", &toml).status, 404);
    assert_eq!(ask(&world, "a", "PUT", "/v1/platform/policy", &toml).status, 403);
    let whole = || world.api("GET", "/v1/events", &[]).text;
    eventually("both are in the audit", PATIENT, || {
        (whole().contains(&own) && whole().contains(&other)).then_some(())
    });
    let events = ask(&world, "a", "GET", "/v1/events", &[]);
    assert!(events.text.contains(&own) && !events.text.contains(&other), "{}", events.text);
    let foreign = json!({ "name": "x", "tenant": "b", "driver": "external" }).to_string();
    assert_eq!(ask(&world, "a", "POST", "/v1/sandboxes", &["--json", &foreign]).status, 403);
    let taken = json!({ "name": other, "driver": "external" }).to_string();
    assert_eq!(ask(&world, "a", "POST", "/v1/sandboxes", &["--json", &taken]).status, 409);
    // Nothing of all that did anything, and its own tenant may do it all.
    assert_eq!(ask(&world, "b", "GET", &format!("/v1/sandboxes/{other}"), &[]).status, 200);
    assert_eq!(
        ask(&world, "b", "GET", &format!("/v1/sandboxes/{other}/policy"), &[]).json,
        json!({"default": "deny"})
    );
    assert_eq!(ask(&world, "b", "DELETE", &format!("/v1/sandboxes/{other}"), &[]).status, 204);
    assert_eq!(ask(&world, "a", "GET", &format!("/v1/sandboxes/{own}"), &[]).status, 200);
}

/// Promise 22. Slots are taken in order, and numbers that all tenants move count what the others do.
#[test]
fn a_tenant_is_shown_no_device_and_no_number_that_tells_what_others_do() {
    let world = world_with_tokens();
    let site = world.site("site");
    let rules = format!("[[rule]]\nallow = [\"{}\"]\nports = [{}]\n", site.ip, port::ECHO);
    let (own, other) = (world.guest_of("a", &rules), world.guest_of("b", &rules));
    let path = format!("/v1/sandboxes/{}", own.name);
    let told = ask(&world, "a", "GET", &path, &[]);
    let whole = ask(&world, "all", "GET", &path, &[]);
    for field in ["slot", "tap", "netns"] {
        assert!(told.json.get(field).is_none(), "{field}: {}", told.text);
        assert!(whole.json.get(field).is_some(), "control: the operator's: {}", whole.text);
    }
    let again = |rules: &str| own.set_policy(rules).json["revision"].as_u64().expect("a number");
    let (first, pause) = (again(""), Duration::from_millis(100));
    std::thread::sleep(pause);
    assert!(again(&rules) >= first + 100, "it follows the clock, and counts nothing");
    let born = |name: &str| {
        let made = world.create(name, "a", "").json["incarnation"].as_u64().expect("a number");
        assert_eq!(world.api("DELETE", &format!("/v1/sandboxes/{name}"), &[]).status, 204);
        made
    };
    let first = born(&world.fresh_name());
    std::thread::sleep(pause);
    assert!(born(&world.fresh_name()) >= first + 100);

    let speak = |guest: &Guest<'_>| {
        let (to, word) = (site.at(port::ECHO), b"word\r\n");
        let whole = |bytes: &[u8]| bytes.len() >= word.len();
        let echoed = guest.run(|| client::exchange_until(to, &[word], PATIENT, whole));
        assert_eq!(echoed.bytes, word);
    };
    speak(&own);
    (0..3).for_each(|_| speak(&other));
    speak(&own);
    let flows = eventually("both are told", PATIENT, || {
        let query = format!("/v1/events?sandbox={}&outcome=allow", own.name);
        let told = ask(&world, "a", "GET", &query, &[]).text;
        let records = told.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let flows: Vec<u64> = records.filter_map(|record| record["flow"].as_u64()).collect();
        <[u64; 2]>::try_from(flows).ok()
    });
    assert_eq!(flows[1], flows[0] + 1, "numbers of its own");
}

/// Promise 22. What went wrong on the node is told to its tenants in general, and to the operator, over either
/// way in, with paths and causes.
#[test]
fn a_tenant_is_not_told_what_is_the_nodes_alone() {
    let ended = format!("{DIRECTORY_PREFIX}-{}-told", std::process::id());
    let create = "case $POSTERN_SANDBOX in bad) echo no /srv/image 77 >&2; exit 4;; esac";
    let remove = format!("test -e {ended} || {{ echo /srv/vm runs >&2; exit 4; }}");
    let world = world_with_tokens_and(&format!(
        "[external]\non_create = [\"/bin/sh\", \"-c\", \"{create}\"]\n\
         on_remove = [\"/bin/sh\", \"-c\", \"{remove}\"]\n"
    ));
    // What a tenant is told, and what the operator is of the same thing.
    let compare = |what: &str, own: &Value, whole: [&Value; 2], begins: &str, path: &str| {
        let own = own.as_str().unwrap_or_else(|| panic!("{what}: nothing was told"));
        assert!(own.starts_with(begins) && !own.contains(['/', '=']), "{what}: {own}");
        for whole in whole.map(|whole| whole.as_str().unwrap_or_default()) {
            assert!(whole.starts_with(begins) && whole.contains(path), "{what}: {whole}");
        }
    };
    let guest = world.guest_of("a", "");
    let path = format!("/v1/sandboxes/{}", guest.name);
    let exec = [
        "-H",
        "connection: upgrade",
        "-H",
        "upgrade: postern-exec",
        "--json",
        "{\"argv\":[\"id\"]}",
    ];
    let asks = [
        (
            "POST",
            "/v1/sandboxes/".to_owned(),
            vec!["--json", "{\"name\":\"x\",\"tenant\":\"a\"}"],
            "needs the guest image",
            "/vmlinuz",
        ),
        ("POST", format!("{path}/exec"), exec.to_vec(), "the agent of", "cannot connect to port"),
        ("DELETE", path.clone(), vec![], "stopping the microVM of", "/srv/vm runs"),
        ("DELETE", path.clone(), vec![], "stopping the microVM of", "/srv/vm runs"),
    ];
    for (method, path, more, begins, names) in &asks {
        let path = path.trim_end_matches('/');
        let own = ask(&world, "a", method, path, more);
        assert!(!own.text.contains(names), "{}", own.text);
        let (all, local) = (ask(&world, "all", method, path, more), world.api(method, path, more));
        let message = |answer: &Answer| answer.json["error"]["message"].clone();
        compare(method, &message(&own), [&message(&all), &message(&local)], begins, names);
    }
    let shown = |token| match token {
        "" => world.api("GET", &path, &[]).json["reason"].clone(),
        token => ask(&world, token, "GET", &path, &[]).json["reason"].clone(),
    };
    compare(
        "show",
        &shown("a"),
        [&shown("all"), &shown("")],
        "stopping the microVM",
        "/srv/vm runs",
    );
    let listed = ask(&world, "a", "GET", "/v1/sandboxes", &[]);
    assert!(listed.text.contains("stopping the microVM"), "control: {}", listed.text);
    assert!(!listed.text.contains("/srv"), "{}", listed.text);
    std::fs::write(&ended, "").expect("it ends");
    eventually("it is gone", PATIENT, || {
        (world.api("GET", &path, &[]).status == 404).then_some(())
    });
    // The same of a creation, in its last step.
    let bad = json!({ "name": "bad", "tenant": "a", "driver": "external" }).to_string();
    let steps = "/v1/sandboxes?progress=true";
    let last = |answer: Answer| {
        let last = answer.text.lines().next_back().unwrap_or_default().to_owned();
        serde_json::from_str::<Value>(&last).expect("a step")["error"]["message"].clone()
    };
    let own = ask(&world, "a", "POST", steps, &["--json", &bad]);
    assert!(own.text.contains("progress") && !own.text.contains("/srv"), "{}", own.text);
    let all = last(ask(&world, "all", "POST", steps, &["--json", &bad]));
    let local = last(world.api("POST", steps, &["--json", &bad]));
    compare("create", &last(own), [&all, &local], "starting the microVM of bad", "/srv/image 77");
    // And in the audit.
    let details = |answer: Answer| -> Vec<Value> {
        let records = answer.text.lines().map(|line| serde_json::from_str(line).expect("JSON"));
        let control = records.filter(|record: &Value| record["kind"] == "control");
        control.map(|record| record["detail"].clone()).collect()
    };
    let events = "/v1/events?tenant=a";
    let (own, all, local) = eventually("all is recorded", PATIENT, || {
        let own = details(ask(&world, "a", "GET", events, &[]));
        let all = details(ask(&world, "all", "GET", events, &[]));
        let local = details(world.api("GET", events, &[]));
        let removed = local.iter().filter(|it| it.to_string().contains("removed")).count();
        (removed == 4 && own.len() == local.len()).then_some((own, all, local))
    });
    assert_eq!(all, local);
    for (begins, names) in [
        ("sandbox removed: stopping the microVM", "/srv/vm runs"),
        ("sandbox removed: starting the microVM", "/srv/image 77"),
        ("sandbox create by ", "uid=0"),
    ] {
        let whole = all.iter().position(|it| it.to_string().contains(names)).expect(names);
        compare(begins, &own[whole], [&all[whole], &local[whole]], begins, names);
    }
    assert!(world.daemon().log().contains("/srv/image 77"));
    let _ = std::fs::remove_file(&ended);
}

/// Promise 22. How much others do, and what is broken, is the operator's.
#[test]
fn a_tenant_is_told_of_the_nodes_health_only_that_it_serves() {
    let world = world_with_tokens();
    let counts = ["audit_lost", "panics", "stuck_slots"];
    let own = ask(&world, "a", "GET", "/v1/health", &[]).json;
    assert_eq!(own["status"], "ok");
    assert!(counts.iter().all(|count| own[count].is_null()), "{own}");
    let all = ask(&world, "all", "GET", "/v1/health", &[]).json;
    assert!(counts.iter().all(|count| all[count].is_number()), "{all}");
    let local = world.api("GET", "/v1/health", &[]).json;
    assert!(counts.iter().all(|count| local[count].is_number()), "{local}");
}

/// Promise 22. Attack K11. Without a token, or under a foreign name, nothing is answered.
#[test]
fn a_caller_without_a_known_token_or_under_a_foreign_host_name_is_refused() {
    let world = world_with_tokens();
    for token in ["", "c", "A"] {
        let answer = ask(&world, token, "GET", "/v1/sandboxes", &[]);
        assert_eq!(answer.status, 401, "{token}: {}", answer.text);
        assert!(answer.json["error"]["fix"].is_string(), "{}", answer.text);
    }
    let rebound = ask(&world, "a", "GET", "/v1/sandboxes", &["-H", "host: rebound.attacker.net"]);
    assert_eq!(rebound.status, 421, "{}", rebound.text);
    assert_eq!(ask(&world, "a", "GET", "/v1/sandboxes", &[]).status, 200, "control");
    assert!(!world.daemon().log().contains("secret-a"));
}

/// Promise 10. The control API is not for guests, even where their policy allows everything.
#[test]
fn a_guest_does_not_reach_the_control_api() {
    let world = world_with_tokens();
    let api = world.site("api");
    let trap = world.site("trap");
    world.names.set(&trap.name, &[HOST.into()]);
    let rule = format!(
        "default = \"allow\"\n[[rule]]\nallow = [\"{}\"]\nports = [80, {PORT}]\n",
        trap.name
    );
    let guest = world.guest(&rule);
    for address in [HOST, world::world::EGRESS, policy::net::GATEWAY_IP] {
        let request = format!(
            "GET /v1/sandboxes HTTP/1.1\r\nHost: {HOST}\r\nAuthorization: Bearer secret-a\r\n\r\n"
        );
        let to = (address, PORT).into();
        let reply = guest
            .run(|| client::exchange_until(to, &[request.as_bytes()], PATIENT, client::has_head));
        assert!(!reply.text().contains("200 OK"), "{address}: {}", reply.text());
    }
    let resolve = format!("{}:{PORT}:{}", trap.name, trap.ip);
    let url = format!("http://{}:{PORT}/v1/health", trap.name);
    let got = guest.curl(&["--resolve", &resolve, "-H", "authorization: Bearer secret-a", &url]);
    assert_eq!(got.json()["error"]["code"], "private-address", "{} {}", got.text(), got.stderr);
    assert_eq!(ask(&world, "a", "GET", "/v1/health", &[]).status, 200, "control");
    guest.reaches(&api);
}

/// Promise 55. One tenant takes neither all slots nor all connections; it is told which setting says so.
#[test]
fn a_tenant_takes_no_more_sandboxes_than_one_may() {
    let world = World::with("[tenants]\nsandboxes = 2\n");
    let names: Vec<String> = (0..3).map(|_| world.fresh_name()).collect();
    assert_eq!(world.create(&names[0], "a", "").status, 201);
    assert_eq!(world.create(&names[1], "a", "").status, 201);
    let refused = world.create(&names[2], "a", "");
    assert_eq!(refused.status, 429, "{}", refused.text);
    let error = &refused.json["error"];
    assert_eq!((&error["code"], &error["field"]), (&json!("quota"), &json!("tenant")), "{error}");
    assert!(error["fix"].as_str().is_some_and(|fix| fix.contains("tenants.sandboxes")), "{error}");
    assert_eq!(world.create(&names[2], "b", "").status, 201, "another tenant's");
    assert_eq!(world.api("DELETE", &format!("/v1/sandboxes/{}", names[0]), &[]).status, 204);
    assert_eq!(world.create(&names[0], "a", "").status, 201, "there is room again");
}

/// Promise 60. What fails has no memory any more; what another tenant has does not count.
#[test]
fn a_tenant_takes_no_more_memory_and_processors_than_one_may() {
    let world = World::with("[tenants]\nmemory = \"512M\"\nvcpus = 3\n");
    let names: Vec<String> = (0..3).map(|_| world.fresh_name()).collect();
    let create = |name: &str, tenant: &str, memory: &str, vcpus: u8| {
        let wanted = json!({
            "name": name, "tenant": tenant, "driver": "external", "memory": memory, "vcpus": vcpus
        });
        world.api("POST", "/v1/sandboxes", &["--json", &wanted.to_string()])
    };
    let refused = |answer: Answer, field: &str, setting: &str| {
        assert_eq!(answer.status, 429, "{}", answer.text);
        let error = &answer.json["error"];
        assert_eq!((&error["code"], &error["field"]), (&json!("quota"), &json!(field)), "{error}");
        assert!(error["fix"].as_str().is_some_and(|fix| fix.contains(setting)), "{error}");
    };
    let first = create(&names[0], "a", "256M", 1);
    assert_eq!(first.status, 201, "{}", first.text);
    refused(create(&names[1], "a", "256M", 3), "vcpus", "tenants.vcpus");
    refused(create(&names[1], "a", "512M", 1), "memory", "tenants.memory");
    assert_eq!(create(&names[1], "a", "256M", 2).status, 201, "all of it");
    refused(create(&names[2], "a", "128M", 1), "memory", "tenants.memory");
    assert_eq!(create(&names[2], "b", "512M", 3).status, 201, "another tenant's");
    assert_eq!(world.api("DELETE", &format!("/v1/sandboxes/{}", names[2]), &[]).status, 204);
    world.daemon().kill();
    let tap = first.json["tap"].as_str().expect("a tap");
    let gone = world.taps.command("ip").args(["link", "delete", tap]).status().expect("ip");
    assert!(gone.success());
    world.daemon().start(&world.host);
    eventually("it has failed", PATIENT, || {
        let shown = world.api("GET", &format!("/v1/sandboxes/{}", names[0]), &[]).json;
        (shown["state"] == "failed").then_some(())
    });
    eventually("there is room again", PATIENT, || {
        (create(&names[2], "a", "256M", 1).status == 201).then_some(())
    });
    refused(create(&world.fresh_name(), "a", "128M", 1), "memory", "tenants.memory");
}

/// Promise 55. A slot rests after each of its sandboxes, and is nobody's meanwhile.
#[test]
fn a_tenant_that_comes_and_goes_leaves_slots_to_others() {
    const SLOTS: usize = 4;
    let config = format!("[guests]\nsandboxes = {SLOTS}\nslot_rest = \"10m\"\n");
    let world = World::with(&format!("{config}[tenants]\nsandboxes = 1\n"));
    let comes_and_goes = || {
        let name = world.fresh_name();
        let made = world.create(&name, "a", "");
        if made.status == 201 {
            assert_eq!(world.api("DELETE", &format!("/v1/sandboxes/{name}"), &[]).status, 204);
        }
        made
    };
    assert_eq!(comes_and_goes().status, 201, "control");
    let refused = (1..=SLOTS).map(|_| comes_and_goes()).find(|made| made.status != 201);
    let other = world.create(&world.fresh_name(), "b", "");
    assert_eq!(other.status, 201, "another tenant's: {}", other.text);
    let refused = refused.expect("not all slots are its own");
    assert_eq!(refused.status, 429, "{}", refused.text);
    let error = &refused.json["error"];
    assert_eq!((&error["code"], &error["field"]), (&json!("quota"), &json!("tenant")), "{error}");
    assert!(error["fix"].as_str().is_some_and(|fix| fix.contains("slot_rest")), "{error}");
}

/// Promise 55. And the operator's socket and the other tenants' connections stay.
#[test]
fn a_tenant_takes_no_more_connections_than_one_may() {
    use std::io::{Read, Write};
    const MOST: usize = 3;
    let tokens = ["a", "b"].map(|tenant| {
        let digest = sum(format!("secret-{tenant}").as_bytes());
        format!("{{ name = \"{tenant}\", tenant = \"{tenant}\", sha256 = \"{digest}\" }}")
    });
    let world = World::with(&format!(
        "[api]\nlisten = \"{HOST}:{PORT}\"\ntoken = [{}]\n[tenants]\nconnections = {MOST}\n",
        tokens.join(", ")
    ));
    let request = format!(
        "GET /v1/sandboxes HTTP/1.1\r\nhost: {HOST}:{PORT}\r\nauthorization: Bearer secret-a\r\n\r\n"
    );
    let mut open: Vec<_> = world.host.run(|| {
        let connect = |_| {
            let to = (HOST, PORT).into();
            let mut stream = client::connect(to, PATIENT).expect("connect");
            stream.write_all(request.as_bytes()).expect("ask");
            let mut first = [0; 12];
            stream.read_exact(&mut first).expect("an answer");
            assert_eq!(&first, b"HTTP/1.1 200", "control");
            stream
        };
        (0..MOST).map(connect).collect()
    });
    let refused = ask(&world, "a", "GET", "/v1/sandboxes", &[]);
    assert_eq!(refused.status, 429, "{}", refused.text);
    let fix = refused.json["error"]["fix"].as_str().unwrap_or_default();
    assert!(fix.contains("tenants.connections"), "{}", refused.text);
    assert_eq!(ask(&world, "b", "GET", "/v1/sandboxes", &[]).status, 200, "another tenant's");
    assert_eq!(world.api("GET", "/v1/health", &[]).status, 200, "the operator's");
    open.pop();
    eventually("there is room again", PATIENT, || {
        (ask(&world, "a", "GET", "/v1/sandboxes", &[]).status == 200).then_some(())
    });
}

/// What a tenant may write, the next daemon can read: none keeps the node from starting.
#[test]
fn a_policy_that_grows_as_it_is_kept_does_not_keep_the_next_daemon_from_starting() {
    let world = World::new();
    let api = world.site("api");
    let guest = world.guest_of("acme", &allow(&[&api]));
    guest.reaches(&api);
    let comment = "\\".repeat(1000);
    let rule = |n| format!("[[rule]]\nallow = [\"h{n}.example.com\"]\ncomment = '{comment}'\n");
    let path = world.dir().join("policy.toml");
    let write = |rules: usize| {
        let text = (0..rules).map(rule).collect::<String>() + &allow(&[&api]);
        std::fs::write(&path, text).expect("write");
        let data = format!("@{}", path.display());
        let words = ["-H", "content-type: application/toml", "--data-binary", &data];
        world.api("PUT", "/v1/tenants/acme/policy", &words)
    };
    let (long, short) = (write(600), write(400));
    assert_eq!(short.status, 200, "control: {}", short.text);
    assert!(long.status == 400 || long.status == 422, "{} {}", long.status, long.text);
    world.daemon().kill();
    world.daemon().start(&world.host);
    guest.reaches(&api);
}
