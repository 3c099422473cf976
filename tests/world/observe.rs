//! Mode observe: what a sandbox's policy refuses passes and is recorded, what nobody may do stays
//! refused, and its end is a tightening like any other.

use std::io::{Read, Write};
use std::net::TcpStream;

use hickory_proto::rr::RecordType;
use policy::net::GATEWAY_IP;
use serde_json::{Value, json};
use world::client::{self, ACCESS_DENIED, End, PATIENT};
use world::origin::port;
use world::world::{EGRESS, HOST, METADATA, NEIGHBOUR};
use world::{Guest, Site, World, allow};

fn observing(sites: &[&Site]) -> String {
    format!("mode = \"observe\"\n{}", allow(sites))
}

fn told(guest: &Guest<'_>, site: &Site) -> Vec<std::net::Ipv4Addr> {
    let query = client::query(&site.name, RecordType::A);
    let reply = guest.run(|| client::ask_udp((GATEWAY_IP, 53).into(), &query));
    client::addresses(&reply.expect("an answer"))
}

fn echo(guest: &Guest<'_>, site: &Site) -> TcpStream {
    let mut stream = guest.run(|| client::connect(site.at(port::ECHO), PATIENT).expect("connect"));
    assert!(echoes(&mut stream));
    stream
}

fn echoes(stream: &mut TcpStream) -> bool {
    let mut reply = [0; 6];
    stream.write_all(b"ping\r\n").is_ok() && stream.read_exact(&mut reply).is_ok()
}

/// Promise 35. By name in DNS, TLS and HTTP, by pin, by address; the record says by which rule it
/// would have been refused and why.
#[test]
fn what_the_policy_refuses_passes_and_is_recorded_with_its_reason() {
    let world = World::shared();
    let (api, other, denied) = (world.site("api"), world.site("other"), world.site("denied"));
    let (by_address, nameless) = (world.site("address"), world.site("nameless"));
    let deny = format!("[[rule]]\ndeny = [{:?}]\n", denied.name);
    let guest = world.guest(&(observing(&[&api]) + &deny));
    for (site, code) in [(&other, "no-rule"), (&denied, "rule")] {
        assert_eq!(told(&guest, site), [site.ip], "{code}");
        for scheme in ["https", "http"] {
            let got = guest.curl(&[&format!("{scheme}://{}/observed", site.name)]);
            assert_eq!(got.status, 200, "{scheme} {code}: {}", got.stderr);
        }
        for kind in ["dns", "connection", "request"] {
            let name = site.name.as_str();
            let fields = [("outcome", "observe"), ("code", code), ("name", name), ("kind", kind)];
            let record = guest.event(&fields);
            assert_eq!(record["layer"], "sandbox", "{record}");
            assert_eq!(record["rule"].is_string(), code == "rule", "{record}");
        }
    }
    drop(echo(&guest, &other));
    guest.event(&[("outcome", "observe"), ("protocol", "tcp"), ("name", &other.name)]);
    drop(echo(&guest, &by_address));
    let aimed = by_address.at(port::ECHO).to_string();
    guest.event(&[("outcome", "observe"), ("code", "no-name"), ("destination", &aimed)]);
    let hello = client::client_hello(&world.authority, &nameless.ip.to_string());
    let to = nameless.at(443);
    let reply = guest.run(|| client::exchange_until(to, &[&hello], PATIENT, client::has_handshake));
    assert!(client::has_handshake(&reply.bytes), "TLS without a name: {reply:?}");
    guest.reaches(&api);
    let allowed = guest.event(&[("outcome", "allow"), ("protocol", "tls"), ("name", &api.name)]);
    assert_eq!(allowed["code"], Value::Null, "what a rule allows is no observation: {allowed}");
    let observed = world.records(&format!("sandbox={}&outcome=observe", guest.name));
    assert!(observed.iter().all(|record| record["name"] != json!(api.name)), "{observed:?}");
}

/// Promise 35. What no rule could open, and what the layers above refuse, stays refused.
#[test]
fn what_nobody_may_reach_and_what_the_layers_above_deny_stays_refused() {
    let world = World::new();
    let (api, sink, pool) = (world.site("api"), world.attacker(), world.attacker());
    let tenant = world.fresh_name();
    let guest = world.guest_of(&tenant, &observing(&[&api]));
    let other = world.guest("");
    let put = |path: &str, policy: &str| {
        let toml = ["-H", "content-type: application/toml", "--data-binary", policy];
        let put = world.api("PUT", path, &toml);
        assert_eq!(put.status, 200, "{}", put.text);
    };
    let deny = |site: &Site| format!("default = \"allow\"\n[[rule]]\ndeny = [{:?}]\n", site.name);
    put(&format!("/v1/tenants/{tenant}/policy"), &deny(&sink));
    put("/v1/platform/policy", &deny(&pool));
    for (site, layer) in [(&sink, "tenant"), (&pool, "platform")] {
        let hello = client::client_hello(&world.authority, &site.name);
        let reply = guest.run(|| client::exchange(site.at(443), &[&hello], PATIENT));
        assert_eq!(reply.alert(), Some(ACCESS_DENIED), "{layer}: {reply:?}");
        assert_eq!(told(&guest, site), [] as [std::net::Ipv4Addr; 0]);
        guest.event(&[("outcome", "deny"), ("layer", layer), ("name", &site.name)]);
        assert_eq!(world.sent_to(site.ip), [], "{layer}");
    }
    let special = [METADATA, NEIGHBOUR, EGRESS, HOST, other.internal(), [127, 0, 0, 1].into()];
    for address in special {
        let trap = world.site("trap");
        world.names.set(&trap.name, &[address.into()]);
        let hello = client::client_hello(&world.authority, &trap.name);
        let reply = guest.run(|| client::exchange(trap.at(443), &[&hello], PATIENT));
        assert_eq!(reply.alert(), Some(ACCESS_DENIED), "a name for {address}: {reply:?}");
        assert_eq!(world.sent_to(trap.ip), []);
    }
    for address in [METADATA, NEIGHBOUR, other.internal()] {
        for number in [80, 443, port::ECHO] {
            let words: &[&[u8]] = &[b"\x01\x02\x03 bytes of no protocol\r\n"];
            let reply = guest.run(|| client::exchange((address, number).into(), words, PATIENT));
            assert_ne!(reply.end, End::Open, "{address}:{number}");
        }
        assert_eq!(world.sent_to(address), [], "{address}");
    }
    guest.event(&[("outcome", "deny"), ("code", "private-address")]);
    let broken: &[&[u8]] = &[&[22, 3, 9, 0, 5, 1, 0, 0, 1, 0]];
    let reply = guest.run(|| client::exchange(sink.at(443), broken, PATIENT));
    assert_ne!(reply.end, End::Open, "what cannot be read passes under no name: {reply:?}");
    let udp = guest.run(|| {
        let socket = std::net::UdpSocket::bind("0.0.0.0:0").expect("bind");
        socket.connect(api.at(443)).expect("connect");
        socket.set_read_timeout(Some(PATIENT)).expect("timeout");
        socket.send(&[0xc0; 1200]).expect("send");
        socket.recv(&mut [0; 16]).expect_err("nobody answers").kind()
    });
    assert_eq!(udp, std::io::ErrorKind::HostUnreachable, "QUIC falls back to TCP, which is seen");
    assert_eq!(world.sent_to(sink.ip), []);
    guest.reaches(&api);
}

/// Promises 18, 35. Attack P33. The rules stay what they were, whichever way the mode goes.
#[test]
fn the_end_of_observing_cuts_what_it_had_let_through_and_nothing_else() {
    let world = World::shared();
    let (kept, cut) = (world.site("kept"), world.site("cut"));
    let rule = format!("[[rule]]\nallow = [\"{}\"]\nports = [{}]\n", kept.ip, port::ECHO);
    let guest = world.guest(&rule);
    let path = format!("/v1/sandboxes/{}/policy", guest.name);
    let document = || world.api("GET", &path, &[]).json;
    let rules = document();
    let mode = |mode: &str| {
        let body = json!({ "mode": mode }).to_string();
        let put = world.api("PUT", &format!("{path}/mode"), &["--json", &body]);
        assert_eq!(put.status, 200, "{}", put.text);
        put.json
    };
    let observes = mode("observe");
    assert!(observes["notes"][0].as_str().is_some_and(|n| n.contains("observe")), "{observes}");
    assert_eq!(document()["rule"], rules["rule"]);
    assert_eq!(document()["mode"], "observe");
    let (mut stays, mut goes) = (echo(&guest, &kept), echo(&guest, &cut));
    let extra = json!({ "deny": ["example.org"] }).to_string();
    let added = world.api("POST", &format!("{path}/rules"), &["--json", &extra]);
    assert_eq!((added.status, &added.json["cut"]), (200, &json!(0)), "{}", added.text);
    assert_eq!(document()["mode"], "observe", "one rule more leaves the mode alone");
    assert_eq!(document()["default"], rules["default"]);
    assert!(echoes(&mut stays) && echoes(&mut goes));

    let enforced = mode("enforce");
    assert_eq!((&enforced["checked"], &enforced["cut"]), (&json!(2), &json!(1)), "{enforced}");
    let mark = world.mark();
    assert!(enforced["notes"][0].as_str().is_some_and(|n| n.contains("ended")), "{enforced}");
    assert_eq!(client::read_to_end(&mut goes, &mut Vec::new(), PATIENT), End::Reset);
    assert!(echoes(&mut stays));
    assert_eq!(world.sent_since(mark, |seen| seen.payload > 0 && seen.is_to(cut.ip)), []);
    assert_eq!(document()["rule"].as_array().map(Vec::len), Some(2));
    let reply = guest.run(|| client::exchange(cut.at(port::ECHO), &[b"ping\r\n"], PATIENT));
    assert_eq!(reply.end, End::Reset);

    mode("observe");
    drop(echo(&guest, &cut));
    let whole = guest.set_policy(&rule);
    assert_eq!(
        document()["mode"],
        Value::Null,
        "a document that says nothing is enforced: {whole:?}"
    );
}

/// Nobody finds out by accident that a sandbox is not enforced.
#[test]
fn a_sandbox_that_observes_is_shown_as_such_wherever_it_is_shown() {
    let world = World::new();
    let name = world.fresh_name();
    let words = ["create", &name, "--driver", "external", "--allow", "api.example.com"];
    let made = world.cli(&[&words[..], &["--mode", "observe"]].concat()).ok();
    assert!(made.stdout.contains("observe"), "{}", made.stdout);
    assert!(world.cli(&["ls"]).ok().stdout.contains("OBSERVE"));
    assert!(world.cli(&["show", &name]).ok().stdout.contains("OBSERVE"));
    assert_eq!(world.cli(&["show", &name, "--json"]).ok().json()["mode"], "observe");
    let url = "https://other.example.org/";
    let explained = world.cli(&["policy", "explain", &name, url]).ok();
    assert!(explained.stdout.contains("passes, observed: no-rule"), "{}", explained.stdout);
    let config = world.dir().join("postern.toml");
    let doctor = || {
        let mut command = world.daemon().command(&["doctor", "--json", "--config"]);
        let report = world::daemon::Ran::of(&command.arg(&config).output().expect("run")).json();
        let checks = report["checks"].as_array().expect("checks").clone();
        checks.into_iter().find(|check| check["name"] == "mode").expect("a check of the mode")
    };
    let warned = doctor();
    assert_eq!(warned["status"], "warn", "{warned}");
    assert!(warned["found"].as_str().is_some_and(|found| found.contains(&name)), "{warned}");
    let told = world.cli(&["policy", "mode", &name, "enforce"]).ok();
    assert!(told.stdout.contains("ended"), "{}", told.stdout);
    assert!(!world.cli(&["ls"]).ok().stdout.contains("OBSERVE"));
    assert_eq!(doctor()["status"], "ok");
    assert_eq!(world.cli(&["policy", "explain", &name, url]).code, 4);
    let refused = world.cli(&["policy", "mode", "platform", "observe"]);
    assert_eq!(refused.code, 2, "{refused:?}");
    let platform = ["-H", "content-type: application/toml", "--data-binary", "mode = \"observe\""];
    let refused = world.api("PUT", "/v1/platform/policy", &platform);
    assert_eq!((refused.status, &refused.json["error"]["field"]), (400, &json!("mode")));
    world.cli(&["rm", &name]).ok();
}
