//! What a policy means, seen from the wire: nothing is nothing, a denial needs no help to be found, and
//! a change of one thing does not change another.

use std::net::{IpAddr, Ipv4Addr};

use hickory_proto::op::ResponseCode;
use hickory_proto::rr::RecordType;
use policy::net::GATEWAY_IP;
use serde_json::json;
use world::client::{self, ACCESS_DENIED, End, PATIENT};
use world::origin::port;
use world::world::METADATA;
use world::{Guest, Site, World, allow};

/// How a refusal of one destination showed in each protocol: the code, and nothing when it was not
/// refused.
#[derive(Debug)]
struct Refusals {
    dns: Option<String>,
    tls: bool,
    http: Option<String>,
    tcp: bool,
}

/// Tries a site by every protocol until it is refused or answered.
fn attempt(world: &World, guest: &Guest<'_>, site: &Site) -> Refusals {
    let query = client::query(&site.name, RecordType::A);
    let reply = guest.at_once(|| client::ask_udp((GATEWAY_IP, 53).into(), &query));
    let reply = reply.expect("an answer");
    let nxdomain = reply.metadata.response_code == ResponseCode::NXDomain;
    let hello = client::client_hello(&world.authority, &site.name);
    let some = |reply: &[u8]| !reply.is_empty();
    let tls = guest.at_once(|| client::exchange_until(site.at(443), &[&hello], PATIENT, some));
    let resolve = format!("{}:80:{}", site.name, site.ip);
    let url = format!("http://{}/", site.name);
    let http = client::at_once(|| guest.curl(&["--resolve", &resolve, &url]));
    let echo = site.at(port::ECHO);
    let tcp = guest.at_once(|| client::exchange_until(echo, &[b"ping\r\n"], PATIENT, some));
    Refusals {
        dns: nxdomain.then(|| client::extended_error(&reply).expect("an extended error").1),
        tls: tls.alert() == Some(ACCESS_DENIED),
        http: (http.status == 403).then(|| http.json()["error"]["code"].to_string()),
        tcp: tcp.end == End::Reset && tcp.bytes.is_empty(),
    }
}

/// Attack P17. A name the guest was told, and that a rule denies since: one reason in every protocol,
/// at once.
#[test]
fn a_denied_destination_fails_at_once_with_one_reason_in_every_protocol() {
    let world = World::shared();
    let site = world.site("told");
    let open = format!("{}[[rule]]\nallow = [{:?}]\nports = [7]\n", allow(&[&site]), site.name);
    let guest = world.guest(&open);
    let passes = attempt(world, &guest, &site);
    assert!(passes.dns.is_none() && !passes.tls && passes.http.is_none() && !passes.tcp);
    let deny = format!("{open}[[rule]]\ndeny = [{:?}]\n", site.name);
    assert_eq!(guest.set_policy(&deny).status, 200);
    let before = world.origin.connections(site.ip).len();
    let refused = attempt(world, &guest, &site);
    assert!(
        refused.dns.as_deref().is_some_and(|text| text.ends_with(":rule")),
        "{:?}",
        refused.dns
    );
    assert!(refused.tls && refused.tcp, "{refused:?}");
    assert_eq!(refused.http.as_deref(), Some("\"rule\""));
    for protocol in ["dns", "tls", "http", "tcp"] {
        guest.event(&[("protocol", protocol), ("outcome", "deny"), ("code", "rule")]);
    }
    assert_eq!(world.origin.connections(site.ip).len(), before);
}

/// Attacks F05, F11. A sandbox that nobody wrote a policy for, and one whose policy is empty.
#[test]
fn without_a_policy_nothing_passes() {
    let world = World::shared();
    let sink = world.attacker();
    let name = world.fresh_name();
    let wanted = json!({ "name": name, "driver": "external" }).to_string();
    let created = world.api("POST", "/v1/sandboxes", &["--json", &wanted]);
    assert_eq!(created.status, 201, "{}", created.text);
    let bare = Guest::behind(world, &name, created.json);
    for guest in [&bare, &world.guest("")] {
        let refused = attempt(world, guest, &sink);
        assert!(refused.dns.is_some_and(|text| text.ends_with(":no-rule")));
        assert!(refused.tls && refused.tcp && refused.http.is_some());
        assert_eq!(guest.set_policy("[[rule]]\nallow = []\n").status, 400, "no rule for nobody");
    }
    assert_eq!(world.sent_to(sink.ip), []);
    assert_eq!(world.names.asked(&sink.name), []);
    let api = world.site("api");
    assert_eq!(bare.set_policy(&allow(&[&api])).status, 200);
    bare.reaches(&api);
}

/// Attacks F09, P33. Whatever else is changed, a canary that is denied stays denied.
#[test]
fn a_change_of_something_else_leaves_the_filter_as_it_is() {
    let world = World::new();
    let (api, more, canary) = (world.site("api"), world.site("more"), world.attacker());
    let tenant = world.fresh_name();
    let guest = world.guest_of(&tenant, &allow(&[&api]));
    let holds = |after: &str| {
        let refused = attempt(&world, &guest, &canary);
        assert!(refused.dns.is_some() && refused.tls && refused.tcp, "after {after}: {refused:?}");
        assert!(refused.http.is_some(), "after {after}: {refused:?}");
        guest.reaches(&api);
    };
    let json = |method: &str, path: &str, body: &serde_json::Value| {
        let answer = world.api(method, path, &["--json", &body.to_string()]);
        assert_eq!(answer.status, 200, "{path}: {}", answer.text);
    };
    let own = format!("/v1/sandboxes/{}/policy", guest.name);
    holds("its creation");
    json("POST", &format!("{own}/rules"), &json!({ "allow": [more.name] }));
    holds("a rule for somebody else");
    json("PUT", &format!("{own}/mode"), &json!({ "mode": "enforce" }));
    holds("a mode that was set already");
    json("PUT", &format!("/v1/tenants/{tenant}/policy"), &json!({ "default": "allow" }));
    holds("an open policy of its tenant");
    json("PUT", "/v1/platform/policy", &json!({ "default": "allow" }));
    holds("an open policy of the platform");
    drop(world.guest(&format!("default = \"allow\"\n{}", allow(&[&canary]))));
    holds("the coming and going of a neighbour that may reach it");
    assert_eq!(world.sent_to(canary.ip), []);
    let document = world.api("GET", &own, &[]).json;
    assert_eq!(document["default"], "deny", "{document}");
    assert_eq!(document["rule"].as_array().map(Vec::len), Some(2), "{document}");
}

/// Attack P57. A deny rule is found by the name in the bytes: no lookup, no pin is needed.
#[test]
fn a_denied_name_is_refused_where_all_else_is_allowed_and_nobody_asked_for_it() {
    let world = World::shared();
    let (other, denied) = (world.site("other"), world.attacker());
    let policy = format!("default = \"allow\"\n[[rule]]\ndeny = [{:?}]\n", denied.name);
    let guest = world.guest(&policy);
    let hello = client::client_hello(&world.authority, &denied.name);
    for at in [denied.at(443), other.at(443), denied.at(port::HTTPS_ALT)] {
        let reply = guest.run(|| client::exchange(at, &[&hello], PATIENT));
        assert_eq!(reply.alert(), Some(ACCESS_DENIED), "{at}: {reply:?}");
    }
    assert_eq!(world.sent_to(denied.ip), []);
    assert_eq!(world.names.asked(&denied.name), []);
    guest.event(&[("outcome", "deny"), ("code", "rule"), ("name", &denied.name)]);
    guest.reaches(&other);
}

/// Attacks F06, P58. A name is allowed, the network it leads to is denied: the denial counts, for what
/// DNS tells and for what is dialled. And no rule for everything opens what is private.
#[test]
fn a_denied_network_beats_a_rule_for_every_name() {
    let world = World::shared();
    let (other, trap, private) = (world.site("other"), world.site("trap"), world.site("private"));
    world.names.set(&private.name, &[world::world::NEIGHBOUR.into()]);
    let rules = format!(
        "[[rule]]\nallow = [\"*\", \"0.0.0.0/0\"]\n[[rule]]\ndeny = [\"{}/32\"]\n",
        trap.ip
    );
    let guest = world.guest(&rules);
    for (site, code) in [(&trap, "rule"), (&private, "private-address")] {
        let query = client::query(&site.name, RecordType::A);
        let reply = guest.run(|| client::ask_udp((GATEWAY_IP, 53).into(), &query));
        let reply = reply.expect("an answer");
        assert!(client::addresses(&reply).is_empty(), "{code}: {reply}");
        let hello = client::client_hello(&world.authority, &site.name);
        for at in [site.at(443), other.at(443)] {
            let reply = guest.run(|| client::exchange(at, &[&hello], PATIENT));
            assert_eq!(reply.alert(), Some(ACCESS_DENIED), "{code} at {at}: {reply:?}");
        }
        guest.event(&[("outcome", "deny"), ("protocol", "tls"), ("code", code)]);
    }
    let raw = guest.run(|| client::exchange(trap.at(port::ECHO), &[b"ping\r\n"], PATIENT));
    assert_eq!(raw.end, End::Reset);
    assert_eq!(world.sent_to(trap.ip), []);
    assert_eq!(world.sent_to(world::world::NEIGHBOUR), []);
    let (to, ping) = (other.at(port::ECHO), b"ping\r\n");
    let raw = guest.run(|| client::exchange_until(to, &[ping], PATIENT, |got| got == ping));
    assert_eq!(raw.bytes, ping, "the control");
    guest.reaches(&other);
}

/// Attacks F06, P57. A request to an address is judged by the names that were told for it, as bytes
/// without a name are: that its network is allowed does not open what a rule denies by name.
#[test]
fn a_request_to_the_address_of_a_denied_name_is_refused_where_its_network_is_allowed() {
    let world = World::shared();
    let (denied, other) = (world.site("denied"), world.site("other"));
    let guest = world.guest(&allow(&[&denied, &other]));
    guest.reaches(&denied);
    guest.reaches(&other);
    let before = world.origin.connections(denied.ip).len();
    let rules = format!(
        "[[rule]]\nallow = [\"{}\", \"{}\"]\n[[rule]]\ndeny = [{:?}]\n",
        denied.ip, other.ip, denied.name
    );
    assert_eq!(guest.set_policy(&rules).status, 200);
    let ask = |site: &Site| {
        let request = format!("GET / HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", site.ip);
        guest.run(|| client::exchange(site.at(80), &[request.as_bytes()], PATIENT)).text()
    };
    let refused = ask(&denied);
    assert!(refused.starts_with("HTTP/1.1 403"), "{refused}");
    assert!(refused.contains("postern-deny: rule"), "{refused}");
    assert_eq!(world.origin.connections(denied.ip).len(), before, "nothing of it leaves");
    guest.event(&[("kind", "request"), ("outcome", "deny"), ("code", "rule")]);
    let passed = ask(&other);
    assert!(passed.starts_with("HTTP/1.1 200"), "the control: {passed}");
}

/// Attack F04. Every cloud's metadata service, by address and by a name that leads to it, even where a
/// rule allows every name and every address.
#[test]
fn the_metadata_services_of_the_clouds_are_refused() {
    let world = World::shared();
    let api = world.site("api");
    let everything = "[[rule]]\nallow = [\"*\", \"0.0.0.0/0\", \"::/0\"]\n";
    let guest = world.guest(everything);
    let v4 = [METADATA, Ipv4Addr::new(168, 63, 129, 16), Ipv4Addr::new(100, 100, 100, 200)];
    for address in v4 {
        let by_address = guest.curl(&[&format!("http://{address}/latest/meta-data/")]);
        assert_eq!(by_address.status, 403, "{address}: {}", by_address.stderr);
        let hello = client::client_hello(&world.authority, &address.to_string());
        for number in [443, 80, 8080] {
            let at = (address, number).into();
            let reply = guest.at_once(|| client::exchange(at, &[&hello], PATIENT));
            assert_ne!(reply.end, End::Open, "{at}");
        }
    }
    let v6: IpAddr = "fd00:ec2::254".parse().expect("an address");
    let mapped: IpAddr = "::ffff:169.254.169.254".parse().expect("an address");
    for address in v4.map(IpAddr::from).into_iter().chain([v6, mapped]) {
        let trap = world.site("trap");
        world.names.set(&trap.name, &[address]);
        let hello = client::client_hello(&world.authority, &trap.name);
        let reply = guest.run(|| client::exchange(trap.at(443), &[&hello], PATIENT));
        assert_eq!(reply.alert(), Some(ACCESS_DENIED), "a name for {address}: {reply:?}");
        assert_eq!(world.sent_to(trap.ip), []);
    }
    for name in ["metadata.google.internal", "metadata"] {
        let query = client::query(name, RecordType::A);
        let reply = guest.run(|| client::ask_udp((GATEWAY_IP, 53).into(), &query));
        assert!(client::addresses(&reply.expect("an answer")).is_empty(), "{name}");
        assert_eq!(world.names.asked(name), [], "{name}");
    }
    for address in v4 {
        assert_eq!(world.sent_to(address), [], "{address}");
    }
    assert_eq!(world.sent_to(v6), []);
    guest.reaches(&api);
}

/// Promise 10. Attack F04. A rule that a tenant writes opens no metadata service: what answers there is
/// the host's. One of the platform does, and shows on the wire.
#[test]
fn only_the_platform_opens_a_metadata_service() {
    let world = World::new();
    let api = world.site("api");
    let rule = format!("[[rule]]\nallow = [\"{METADATA}\", \"169.254.0.0/16\"]\n");
    let guest = world.guest_of("mallory", &(allow(&[&api]) + &rule));
    let ask = || guest.curl(&[&format!("http://{METADATA}/latest/meta-data/iam/")]);
    let refused = ask();
    assert_eq!(refused.status, 403, "{} {}", refused.text(), refused.stderr);
    assert_eq!(refused.json()["error"]["code"], "private-address", "{}", refused.text());
    guest.event(&[
        ("outcome", "deny"),
        ("code", "private-address"),
        ("destination", "169.254.169.254:80"),
    ]);
    assert_eq!(world.sent_to(METADATA), []);
    guest.reaches(&api);
    let platform = format!("default = \"allow\"\n[[rule]]\nallow = [\"{METADATA}\"]\n");
    let toml = ["-H", "content-type: application/toml", "--data-binary", &platform];
    let written = world.api("PUT", "/v1/platform/policy", &toml);
    assert_eq!(written.status, 200, "{}", written.text);
    let _ = ask();
    assert!(!world.sent_to(METADATA).is_empty(), "control: the way is there");
}

/// Attack P55. One connection out for each that is let through, and none for one that is not.
#[test]
fn one_connection_of_a_guest_is_one_connection_out() {
    const EACH: usize = 5;
    let world = World::shared();
    let (site, echo, sink) = (world.site("counted"), world.site("echo"), world.attacker());
    let rule = format!("[[rule]]\nallow = [\"{}\"]\nports = [{}]\n", echo.ip, port::ECHO);
    let guest = world.guest(&(allow(&[&site]) + &rule));
    for _ in 0..EACH {
        guest.reaches(&site);
        assert_eq!(guest.curl(&[&format!("http://{}/", site.name)]).status, 200);
        let reply = guest.run(|| {
            let whole = |bytes: &[u8]| bytes == b"ping\r\n";
            client::exchange_until(echo.at(port::ECHO), &[b"ping\r\n"], PATIENT, whole)
        });
        assert_eq!(reply.bytes, b"ping\r\n");
        let hello = client::client_hello(&world.authority, &sink.name);
        let _ = guest.run(|| client::exchange(sink.at(443), &[&hello], PATIENT));
    }
    for (to, count) in [(site.ip, 2 * EACH), (echo.ip, EACH), (sink.ip, 0)] {
        assert_eq!(world.origin.connections(to).len(), count, "{to}");
        let mut opened: Vec<_> = world
            .sent(|seen| seen.opens && seen.is_to(to))
            .iter()
            .filter_map(|seen| seen.ports)
            .collect();
        opened.sort_unstable();
        opened.dedup();
        assert_eq!(opened.len(), count, "{to}");
    }
}
