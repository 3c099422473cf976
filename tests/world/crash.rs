//! When the daemon dies or its rules are taken away, the guests are shut in, not let out.

use std::io::Write;
use std::net::{IpAddr, UdpSocket};
use std::time::Duration;

use policy::net::{GATEWAY_IP, GUEST_IP};
use serde_json::Value;
use world::client;
use world::wire::Seen;
use world::world::{EGRESS, METADATA, NEIGHBOUR, PUBLIC_RESOLVER, UPSTREAM};
use world::{Guest, Site, World, allow};

/// Everything a guest may try, at once; nothing of it is expected to succeed.
fn try_everything(guest: &Guest<'_>, sites: &[&Site]) {
    let limit = Duration::from_millis(200);
    let mut targets: Vec<_> = sites.iter().map(|site| site.ip).collect();
    targets.extend([EGRESS, METADATA, NEIGHBOUR, PUBLIC_RESOLVER, GATEWAY_IP]);
    guest.run(|| {
        std::thread::scope(|scope| {
            for ip in &targets {
                for number in [443, 80, 53, 22] {
                    scope.spawn(move || {
                        if let Ok(mut stream) = client::connect((*ip, number).into(), limit) {
                            let _ = stream.write_all(b"GET / HTTP/1.0\r\n\r\n");
                            client::read_to_end(&mut stream, &mut Vec::new(), limit);
                        }
                    });
                }
            }
            let socket = UdpSocket::bind("0.0.0.0:0").expect("bind");
            for (site, ip) in sites.iter().cycle().zip(&targets) {
                let query = client::query(&site.name, hickory_proto::rr::RecordType::A);
                for number in [53, 443, 4000] {
                    let _ = socket.send_to(&query.to_vec().expect("a query"), (*ip, number));
                }
            }
        });
    });
    let mut ping = Vec::new();
    etherparse::PacketBuilder::ethernet2(policy::net::GUEST_MAC, policy::net::GATEWAY_MAC)
        .ipv4(GUEST_IP.octets(), sites[0].ip.octets(), 64)
        .icmpv4_echo_request(1, 1)
        .write(&mut ping, &[])
        .expect("a frame");
    let _ = guest.cable.inject(&ping);
}

/// Neighbour discovery of the link itself, and what else ICMPv6 the two ends say to each other.
fn is_ping6(seen: &Seen) -> bool {
    seen.protocol == Some(58) || seen.addresses.is_some_and(|(_, to)| to.is_multicast())
}

fn shown(world: &World, name: &str) -> Value {
    world.api("GET", &format!("/v1/sandboxes/{name}"), &[]).json
}

/// Promise 16. Killed, restarted, killed again, and in between everything works.
#[test]
fn with_the_daemon_killed_nothing_leaves_and_the_next_daemon_adopts_the_sandbox() {
    let world = World::new();
    let (api, sink) = (world.site("api"), world.attacker());
    let guest = world.guest(&allow(&[&api]));
    guest.reaches(&api);
    let before = shown(&world, &guest.name);
    // The kernel still ends the dead daemon's own connections, all to the site; it opens none.
    let leaving = |seen: &Seen| seen.addresses.is_some() && !is_ping6(seen);
    for round in 0..2 {
        world.daemon().kill();
        let others = world.sent(|seen| leaving(seen) && !seen.is_to(api.ip)).len();
        let opened = world.sent(|seen| seen.opens).len();
        try_everything(&guest, &[&api, &sink]);
        assert_eq!(
            world.sent(|seen| leaving(seen) && !seen.is_to(api.ip)).len(),
            others,
            "{round}"
        );
        assert_eq!(world.sent(|seen| seen.opens).len(), opened, "{round}");
        assert_eq!(world.sent_to(sink.ip), [], "{round}");
        world.daemon().start(&world.host);
        guest.reaches(&api);
    }
    let after = shown(&world, &guest.name);
    for field in ["slot", "incarnation", "state", "tap"] {
        assert_eq!(before[field], after[field], "{field}");
    }
    // A guest that came before the crash is still told what is refused.
    let hello = client::client_hello(&world.authority, &sink.name);
    let reply = guest.run(|| client::exchange(sink.at(443), &[&hello], client::PATIENT));
    assert_eq!(reply.alert(), Some(client::ACCESS_DENIED));
}

/// Promise 16. The service manager's way: orderly, and the sandbox and its newest policy stay.
#[test]
fn a_daemon_told_to_stop_ends_well_and_the_next_one_goes_on() {
    let world = World::new();
    let (api, sink) = (world.site("api"), world.attacker());
    let guest = world.guest("");
    assert_eq!(guest.set_policy(&allow(&[&api])).status, 200);
    guest.reaches(&api);
    let before = shown(&world, &guest.name);
    assert_eq!(world.daemon().terminate(), Some(0));
    let opened = world.origin.connections(api.ip).len();
    try_everything(&guest, &[&api, &sink]);
    assert_eq!(world.sent_to(sink.ip), []);
    assert_eq!(world.origin.connections(api.ip).len(), opened);
    world.daemon().start(&world.host);
    guest.reaches(&api);
    assert_eq!(shown(&world, &guest.name)["revision"], before["revision"]);
}

/// Promise 17. The rules are gone, the daemon lives: there is still no way out.
#[test]
fn with_every_rule_flushed_nothing_leaves() {
    // Nobody puts them up again meanwhile.
    let world = World::with("[guests]\nfence_look = \"10m\"\n");
    let (api, sink) = (world.site("api"), world.attacker());
    let guest = world.guest(&allow(&[&api]));
    guest.reaches(&api);
    let flushed = world.taps.command("nft").args(["flush", "ruleset"]).status();
    assert!(flushed.expect("nft").success());
    let (opened, asked) =
        (world.origin.connections(api.ip).len(), world.names.asked(&api.name).len());
    try_everything(&guest, &[&api, &sink]);
    for address in [sink.ip, METADATA, NEIGHBOUR, PUBLIC_RESOLVER] {
        assert_eq!(world.sent_to(address), [], "{address}");
    }
    let foreign = world.sent(|seen| {
        // The daemon's own questions are counted below.
        let ours = |from, to| from == IpAddr::from(EGRESS) || to == IpAddr::from(UPSTREAM);
        seen.addresses.is_some_and(|(from, to)| from.is_ipv4() && !ours(from, to))
    });
    assert_eq!(foreign, []);
    assert_eq!(world.origin.connections(api.ip).len(), opened);
    assert_eq!(world.names.asked(&api.name).len(), asked);
}

/// Promise 21. Whatever was half made is either whole or gone.
#[test]
fn a_daemon_killed_in_the_middle_of_a_creation_leaves_nothing_half_made() {
    let world = World::new();
    let api = world.site("api");
    for round in 0..6_u64 {
        let name = world.fresh_name();
        let wanted = serde_json::json!({ "name": name, "driver": "external" }).to_string();
        let request = world.daemon().request("POST", "/v1/sandboxes", &["--json", &wanted]);
        std::thread::scope(|scope| {
            scope.spawn(move || request.attempt());
            std::thread::sleep(Duration::from_millis(8 * round));
            world.daemon().kill();
        });
        world.daemon().start(&world.host);
        world.undone();
        let listed = world.api("GET", "/v1/sandboxes", &[]).json;
        let whole: Vec<&str> = listed["sandboxes"]
            .as_array()
            .expect("sandboxes")
            .iter()
            .map(|sandbox| {
                assert_eq!(sandbox["state"], "running", "{sandbox}");
                sandbox["tap"].as_str().expect("a tap")
            })
            .collect();
        assert_eq!(taps(&world), whole, "round {round}");
        for tap in &whole {
            let rules = world.taps.command("nft").args(["list", "ruleset"]).output().expect("nft");
            assert!(
                String::from_utf8_lossy(&rules.stdout).contains(&format!("\"{tap}\"")),
                "{tap}"
            );
        }
        let again = world.create(&name, "default", "");
        assert!([201, 409].contains(&again.status), "round {round}: {}", again.text);
        let removed = world.api("DELETE", &format!("/v1/sandboxes/{name}"), &[]);
        assert_eq!(removed.status, 204, "round {round}: {}", removed.text);
        assert_eq!(taps(&world), [""; 0], "round {round}");
    }
    world.guest(&allow(&[&api])).reaches(&api);
}

/// Promise 21. A removal that was begun is finished, whoever finishes it.
#[test]
fn a_daemon_killed_in_the_middle_of_a_removal_leaves_nothing_half_removed() {
    let world = World::new();
    for round in 0..4_u64 {
        let name = world.fresh_name();
        assert_eq!(world.create(&name, "default", "").status, 201, "round {round}");
        let path = format!("/v1/sandboxes/{name}");
        let request = world.daemon().request("DELETE", &path, &[]);
        std::thread::scope(|scope| {
            scope.spawn(move || request.attempt());
            std::thread::sleep(Duration::from_millis(8 * round));
            world.daemon().kill();
        });
        world.daemon().start(&world.host);
        world.undone();
        // Either it had not begun, or it is over.
        let still = world.api("GET", &path, &[]).status == 200;
        assert_eq!(taps(&world).len(), usize::from(still), "round {round}");
        if still {
            assert_eq!(world.api("DELETE", &path, &[]).status, 204, "round {round}");
        }
        assert_eq!(taps(&world), [""; 0], "round {round}");
    }
}

/// The taps that exist in the guests' namespace, by name.
pub(crate) fn taps(world: &World) -> Vec<String> {
    let links = world.taps.command("ip").args(["-j", "link"]).output().expect("ip link");
    let links: Value = serde_json::from_slice(&links.stdout).expect("JSON");
    let names = links.as_array().expect("links").iter().map(|link| link["ifname"].as_str());
    let mut taps: Vec<String> =
        names.flatten().filter(|name| *name != "lo").map(str::to_owned).collect();
    taps.sort();
    taps
}
