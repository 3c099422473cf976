//! Others edit rules, too: by mistake, or because they are Docker. What they do opens nothing, is
//! noticed and undone.

use std::process::Stdio;

use policy::net::{GATEWAY_IP, GUEST_IP};
use world::client::{self, PATIENT};
use world::netns::Netns;
use world::poll::eventually;
use world::{Guest, World, allow};

pub(crate) fn nft(namespace: &Netns, rules: &str) {
    let mut child = namespace.command("nft").args(["-f", "-"]).stdin(Stdio::piped()).spawn();
    let mut stdin = child.as_mut().expect("nft").stdin.take().expect("a pipe");
    std::io::Write::write_all(&mut stdin, rules.as_bytes()).expect("its rules");
    drop(stdin);
    assert!(child.expect("nft").wait().expect("nft").success(), "{rules}");
}

pub(crate) fn listed(world: &World) -> String {
    let out = world.taps.command("nft").args(["-s", "list", "ruleset"]).output().expect("nft");
    String::from_utf8_lossy(&out.stdout).into_owned()
}

/// The table that holds the chains of a guest.
pub(crate) fn table_of(world: &World, guest: &Guest<'_>) -> String {
    let chain = format!("chain in_pt{} {{", guest.slot.number());
    let listed = listed(world);
    let (head, _) = listed.split_once(&chain).expect("the guest's chain");
    let table = head.lines().rev().find_map(|line| line.strip_prefix("table "));
    table.expect("in a table").trim_end_matches(" {").to_owned()
}

/// How many records of the daemon itself say this.
fn control_records(world: &World, text: &str) -> usize {
    let says = |record: &&serde_json::Value| {
        record["detail"].as_str().is_some_and(|detail| detail.contains(text))
    };
    world.records("kind=control").iter().filter(says).count()
}

/// The rules, and how often the audit says of a sandbox, or of what all share, that they were changed.
struct Before<'a> {
    world: &'a World,
    rules: String,
    whose: Option<&'a str>,
    told: usize,
}

impl<'a> Before<'a> {
    fn of(world: &'a World, whose: Option<&'a str>) -> Self {
        Self { world, rules: listed(world), whose, told: Self::told(world, whose) }
    }

    fn told(world: &World, whose: Option<&str>) -> usize {
        let told = |record: &&serde_json::Value| {
            let detail = record["detail"].as_str().unwrap_or_default();
            record["sandbox"].as_str() == whose && detail.contains("the fence was changed")
        };
        world.records("kind=control").iter().filter(told).count()
    }

    /// Waits until the rules are what they were, and the audit says so once more.
    fn comes_back(&self) {
        let lines = |text: &str| {
            let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
            lines.sort_unstable();
            lines
        };
        eventually("the rules are what they were", PATIENT, || {
            (lines(&listed(self.world)) == lines(&self.rules)).then_some(())
        });
        eventually("the audit says so", PATIENT, || {
            (Self::told(self.world, self.whose) > self.told).then_some(())
        });
    }
}

/// Promise 51. Attack B16. `nft flush ruleset` closes the node for a moment; then the rules are back.
#[test]
fn a_flushed_fence_is_noticed_and_put_up_again() {
    let world = World::new();
    let (api, sink) = (world.site("api"), world.attacker());
    let guest = world.guest(&allow(&[&api]));
    guest.reaches(&api);
    let mut open = guest.run(|| client::connect(api.at(80), PATIENT).expect("connect"));
    for _ in 0..2 {
        let before = [Some(&*guest.name), None].map(|whose| Before::of(&world, whose));
        assert!(before[0].rules.contains("inet postern"), "control: {}", before[0].rules);
        nft(&world.taps, "flush ruleset");
        before.iter().for_each(Before::comes_back);
        guest.reaches(&api);
        let hello = client::client_hello(&world.authority, &sink.name);
        let reply = guest.run(|| client::exchange(sink.at(443), &[&hello], PATIENT));
        assert_eq!(reply.alert(), Some(client::ACCESS_DENIED), "{reply:?}");
    }
    // What was open before goes on.
    let request = format!("GET /after HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n\r\n", api.name);
    guest.run(|| {
        let mut heard = Vec::new();
        std::io::Write::write_all(&mut open, request.as_bytes()).expect("write");
        client::read_to_end(&mut open, &mut heard, PATIENT);
        assert!(heard.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&heard));
    });
    assert_eq!(world.sent_to(sink.ip), []);
}

/// Promise 51. A hole that somebody cuts into one guest's fence is closed, and told to be his.
#[test]
fn a_rule_put_into_a_guests_fence_is_taken_out_again() {
    let world = World::new();
    let api = world.site("api");
    let (guest, other) = (world.guest(&allow(&[&api])), world.guest(&allow(&[&api])));
    let before = Before::of(&world, Some(&guest.name));
    let chain = before
        .rules
        .lines()
        .scan("", |table, line| {
            *table = line.strip_prefix("table ").unwrap_or(table);
            Some((*table, line.trim()))
        })
        .find_map(|(table, line)| {
            let name = line.strip_prefix("chain ")?.strip_suffix(" {")?;
            let of_guest = name.contains(&guest.slot.number().to_string());
            of_guest.then(|| format!("{} {name}", table.trim_end_matches(" {")))
        })
        .unwrap_or_else(|| panic!("no chain of {}: {}", guest.slot, before.rules));
    nft(&world.taps, &format!("insert rule {chain} accept"));
    assert!(listed(&world) != before.rules, "control");
    before.comes_back();
    guest.reaches(&api);
    other.reaches(&api);
}

/// Promise 51. A dormant table lists as before and filters nothing.
#[test]
fn a_table_that_somebody_made_dormant_is_woken() {
    let world = World::new();
    let (api, sink) = (world.site("api"), world.attacker());
    let guest = world.guest(&allow(&[&api]));
    guest.reaches(&api);
    let table = table_of(&world, &guest);
    for (table, whose) in [(&*table, Some(&*guest.name)), ("inet postern", None)] {
        let before = Before::of(&world, whose);
        nft(&world.taps, &format!("add table {table} {{ flags dormant; }}"));
        before.comes_back();
        guest.reaches(&api);
        let hello = client::client_hello(&world.authority, &sink.name);
        let reply = guest.run(|| client::exchange(sink.at(443), &[&hello], PATIENT));
        assert_eq!(reply.alert(), Some(client::ACCESS_DENIED), "{reply:?}");
    }
    assert_eq!(world.sent_to(sink.ip), []);
}

/// Promise 51. A repair that fails leaves its guest shut, and recorded; but not for ever, though the
/// rules may be as meant by then.
#[test]
fn a_guest_shut_by_a_repair_that_failed_speaks_again() {
    let world = World::new();
    let api = world.site("api");
    let (guest, other) = (world.guest(&allow(&[&api])), world.guest(&allow(&[&api])));
    guest.reaches(&api);
    let table = table_of(&world, &guest);
    let tap = format!("pt{}", guest.slot.number());
    let is_up = || {
        let out = world.taps.command("ip").args(["link", "show", &tap]).output().expect("ip");
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        text.split(['<', '>', ',']).any(|word| word == "UP")
    };
    assert!(is_up(), "control");
    // Somebody's rule leads to a chain of this guest, so that it cannot be replaced.
    nft(
        &world.taps,
        &format!(
            "add chain {table} alien
             add rule {table} alien jump guest_{tap}
             add chain {table} in_{tap} {{ policy accept; }}"
        ),
    );
    eventually("the guest is shut", PATIENT, || (!is_up()).then_some(()));
    eventually("the audit says so", PATIENT, || {
        (control_records(&world, "could not be put up again") > 0).then_some(())
    });
    other.reaches(&api);
    let shut = control_records(&world, "could not be put up again");
    nft(
        &world.taps,
        &format!(
            "add chain {table} in_{tap} {{ policy drop; }}
             delete chain {table} alien"
        ),
    );
    eventually("the guest may speak again", PATIENT, || is_up().then_some(()));
    eventually("it works again", PATIENT, || {
        let url = format!("https://{}/", api.name);
        (guest.curl(&["-m", "2", &url]).status == 200).then_some(())
    });
    assert_eq!(shut, 1, "not at every look");
}

/// Promise 51. What cannot be mended keeps nothing else from being mended.
#[test]
fn a_guests_fence_is_mended_while_the_policy_route_cannot_be() {
    let world = World::new();
    let api = world.site("api");
    let guest = world.guest(&allow(&[&api]));
    guest.reaches(&api);
    let before = Before::of(&world, Some(&guest.name));
    let (table, tap) = (table_of(&world, &guest), format!("pt{}", guest.slot.number()));
    // The route needs the loopback.
    world.taps.ip("link set lo down");
    world.taps.ip("route flush table 100");
    nft(&world.taps, &format!("insert rule {table} guest_{tap} accept"));
    before.comes_back();
    world.taps.ip("link set lo up");
    eventually("it works again", PATIENT, || {
        let url = format!("https://{}/", api.name);
        (guest.curl(&["-m", "2", &url]).status == 200).then_some(())
    });
}

/// Promise 51. Without the policy route nothing is diverted, so nothing works; it is put back.
#[test]
fn a_policy_route_that_somebody_removed_is_put_back() {
    let world = World::new();
    let api = world.site("api");
    let guest = world.guest(&allow(&[&api]));
    guest.reaches(&api);
    for words in ["rule flush", "route flush table 100"] {
        world.taps.ip(words);
        // `ip rule flush` takes the table of local addresses along, which is the kernel's own.
        if words == "rule flush" {
            world.taps.ip("rule add pref 0 lookup local");
            world.taps.ip("rule add pref 32766 lookup main");
        }
        eventually("it works again", PATIENT, || {
            let url = format!("https://{}/", api.name);
            (guest.curl(&["-m", "2", &url]).status == 200).then_some(())
        });
    }
    let told = |record: &serde_json::Value| {
        record["detail"].as_str().is_some_and(|detail| detail.contains("route of diverted"))
    };
    eventually("the audit says so", PATIENT, || {
        (world.records("kind=control").iter().filter(|record| told(record)).count() >= 2)
            .then_some(())
    });
}

/// Attack B16. Rules as Docker has them on the host, and rules that accept everything before ours
/// among the guests, open nothing and shut nothing.
#[test]
fn foreign_rules_before_and_beside_ours_change_no_verdict() {
    let world = World::new();
    let (api, sink) = (world.site("api"), world.attacker());
    let (guest, other) = (world.guest(&allow(&[&api])), world.guest(&allow(&[&api])));
    nft(
        &world.host,
        "table ip nat {
           chain postrouting { type nat hook postrouting priority 100;
             ip saddr 172.17.0.0/16 masquerade; }
           chain docker { type nat hook prerouting priority -100; fib daddr type local accept; }
         }
         table ip filter {
           chain forward { type filter hook forward priority 0; policy drop;
             ct state established,related accept; }
         }",
    );
    nft(
        &world.taps,
        "table inet foreign {
           chain first_pre { type filter hook prerouting priority -400; policy accept; accept; }
           chain first_in { type filter hook input priority -400; policy accept; accept; }
           chain first_on { type filter hook forward priority -400; policy accept; accept; }
         }",
    );
    for guest in [&guest, &other] {
        guest.reaches(&api);
        let hello = client::client_hello(&world.authority, &sink.name);
        let reply = guest.run(|| client::exchange(sink.at(443), &[&hello], PATIENT));
        assert_eq!(reply.alert(), Some(client::ACCESS_DENIED), "{reply:?}");
    }
    // To a neighbour and through it, by its address in this namespace, and spoofed as it.
    for (source, to) in [(GUEST_IP, other.internal()), (other.internal(), sink.ip)] {
        let mut frame = Vec::new();
        etherparse::PacketBuilder::ethernet2(policy::net::GUEST_MAC, policy::net::GATEWAY_MAC)
            .ipv4(source.octets(), to.octets(), 64)
            .udp(4000, 4000)
            .write(&mut frame, b"through")
            .expect("a frame");
        guest.cable.inject(&frame).expect("the tap takes it");
    }
    let to_gateway = guest.run(|| client::connect((GATEWAY_IP, 15_000).into(), client::AT_ONCE));
    assert!(
        to_gateway.is_err()
            || guest.run(|| {
                client::exchange((GATEWAY_IP, 15_000).into(), &[b"x"], PATIENT).bytes.is_empty()
            })
    );
    guest.reaches(&api);
    assert_eq!(world.sent_to(sink.ip), []);
    assert_eq!(world.sent_to(other.internal()), []);
    let from =
        |address| world.wire.frames(|seen| seen.is_from(address) && seen.is_to(api.ip)).len();
    assert_eq!(from(world::world::HOST), 0, "never from another address");
    assert!(from(world::world::EGRESS) > 0);
}
