//! The audit answers the compliance officer's question.

use std::io::{Read, Write};
use std::net::UdpSocket;

use serde_json::Value;
use world::client::{self, End, PATIENT};
use world::origin::port;
use world::poll::eventually;
use world::world::EGRESS;
use world::{World, allow};

/// Promise 23. What was open when the daemon was told to stop has ended, and its record says with how much.
#[test]
fn every_connection_that_an_orderly_stop_ends_has_a_last_record() {
    const WORDS: &[u8] = b"ping\r\n";
    let world = World::new();
    let site = world.site("echo");
    let rule = |protocol: &str| {
        let ports = port::ECHO;
        format!(
            "[[rule]]\nallow = [\"{}\"]\nports = [{ports}]\nprotocol = \"{protocol}\"\n",
            site.ip
        )
    };
    let guest = world.guest(&(rule("tcp") + &rule("udp")));
    let _silent = world.internet.run(|| UdpSocket::bind(site.at(port::ECHO))).expect("an origin");
    let (mut stream, datagrams) = guest.run(|| {
        let stream = client::connect(site.at(port::ECHO), PATIENT).expect("connect");
        let datagrams = UdpSocket::bind("0.0.0.0:0").expect("bind");
        datagrams.send_to(WORDS, site.at(port::ECHO)).expect("send");
        (stream, datagrams)
    });
    stream.write_all(WORDS).expect("say");
    let mut heard = [0; WORDS.len()];
    stream.read_exact(&mut heard).expect("hear");
    let of = |protocol: &str, outcome: &str| {
        let is = |record: &Value, key: &str, value: &str| record[key] == value;
        let found = world.events(&guest.name).into_iter();
        found
            .filter(|record| is(record, "protocol", protocol) && is(record, "outcome", outcome))
            .collect::<Vec<_>>()
    };
    eventually("both are open", PATIENT, || {
        (of("tcp", "allow").len() == 1 && of("udp", "allow").len() == 1).then_some(())
    });
    assert_eq!((of("tcp", "closed"), of("udp", "closed")), (vec![], vec![]), "control");
    assert_eq!(world.daemon().terminate(), Some(0));
    world.daemon().start(&world.host);
    for protocol in ["tcp", "udp"] {
        let [last] = &of(protocol, "closed")[..] else { panic!("{:?}", world.events(&guest.name)) };
        assert_eq!(last["bytes_out"], WORDS.len(), "{last}");
        assert_eq!(last["flow"], of(protocol, "allow")[0]["flow"], "{last}");
    }
    drop((stream, datagrams));
}

/// Promise 23. Which sandbox used this egress address and port towards this name?
#[test]
fn an_egress_address_and_port_lead_to_one_sandbox() {
    let world = World::shared();
    let api = world.site("bank");
    let guests = [world.guest(&allow(&[&api])), world.guest(&allow(&[&api]))];
    for guest in &guests {
        let url = format!("https://{}/by/{}", api.name, guest.name);
        assert_eq!(guest.curl(&[&url]).status, 200);
    }
    for guest in &guests {
        let target = format!("/by/{}", guest.name);
        let seen = world.origin.requests(|request| request.target == target);
        let peer = seen[0].peer.to_string();
        let found = eventually("the record of an allowed connection", PATIENT, || {
            let query = format!("egress={peer}&name={}&outcome=allow", api.name);
            let found = world.records(&query);
            (!found.is_empty()).then_some(found)
        });
        let [record] = &found[..] else { panic!("{found:?}") };
        assert_eq!(record["sandbox"], guest.name, "{record}");
        assert_eq!(record["egress"], peer, "{record}");
        assert_eq!(record["dialed"], api.at(443).to_string(), "{record}");
        assert!(record["rule"].as_str().is_some_and(|rule| rule.contains(&api.name)), "{record}");
        assert!(record["revision"].is_number() && record["time"].is_string(), "{record}");
    }
}

/// Promise 23. The record of an allowed connection is there before its first byte is.
#[test]
fn an_allowed_connection_is_recorded_before_the_far_side_answers() {
    let world = World::shared();
    let api = world.site("api");
    let guest = world.guest(&allow(&[&api]));
    guest.reaches(&api);
    let record = guest.event(&[("outcome", "allow"), ("name", &api.name), ("kind", "connection")]);
    let closed = guest.event(&[("outcome", "closed"), ("name", &api.name), ("kind", "connection")]);
    assert_eq!(record["flow"], closed["flow"]);
    assert!(record["time"].as_str() <= closed["time"].as_str(), "{record} {closed}");
    assert!(
        closed["bytes_out"].as_u64() > Some(0) && closed["bytes_in"].as_u64() > Some(0),
        "{closed}"
    );
}

/// Who changed what, and from where.
#[test]
fn a_change_of_policy_is_in_the_audit_with_who_made_it() {
    let world = World::shared();
    let guest = world.guest("");
    assert_eq!(guest.set_policy("default = \"allow\"\n").status, 200);
    world.event_that(&guest.name, "of a change of policy and who made it", |record| {
        let detail = record["detail"].as_str().unwrap_or_default();
        record["kind"] == "control" && detail.contains("policy") && detail.contains("uid=0")
    });
}

/// `events --follow` shows a refusal while it happens.
#[test]
fn a_follower_sees_a_refusal_while_it_happens() {
    use std::io::{BufRead, BufReader};
    let world = World::shared();
    let sink = world.attacker();
    let guest = world.guest("");
    let words = ["events", "--follow", "--sandbox", &guest.name, "--json"];
    let mut follow = world
        .daemon()
        .command(&words)
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("follow");
    let lines = BufReader::new(follow.stdout.take().expect("a pipe")).lines();
    let (heard, hears) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for line in lines.map_while(Result::ok) {
            let _ = heard.send(line);
        }
    });
    eventually("the follower hears of it", PATIENT, || {
        guest.curl(&[
            "--resolve",
            &format!("{}:80:{}", sink.name, sink.ip),
            &format!("http://{}/", sink.name),
        ]);
        hears.try_iter().any(|line| line.contains(&sink.name)).then_some(())
    });
    follow.kill().expect("end the follower");
    follow.wait().expect("wait");
}

/// Attack K05. What a guest calls things never breaks a line, moves a cursor or fills a screen: in the
/// audit, on the command line, in the daemon's log.
#[test]
fn hostile_names_break_no_line_of_audit_screen_or_log() {
    const HOSTILE: &[u8] = b"\x1b[2J\r\nFORGED\xff\xfe\x00\x07";
    let world = World::new();
    let (api, sink) = (world.site("api"), world.attacker());
    let guest = world.guest(&allow(&[&api]));
    let harmless = format!("{}.example.com", "a".repeat(HOSTILE.len()));
    let mut hello = client::client_hello(&world.authority, &harmless);
    let at = hello.windows(harmless.len()).position(|part| part == harmless.as_bytes());
    let at = at.expect("its name");
    hello[at..at + HOSTILE.len()].copy_from_slice(HOSTILE);
    let long = "b".repeat(65_000);
    let head = |target: &[u8], host: &[u8]| {
        [b"GET ", target, b" HTTP/1.1\r\nhost: ", host, b"\r\n\r\n"].concat()
    };
    let bare = &HOSTILE[..4];
    let mut question = vec![7, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    question.push(u8::try_from(HOSTILE.len()).expect("short"));
    question.extend_from_slice(HOSTILE);
    question.extend_from_slice(b"\x03net\x00\x00\x01\x00\x01");
    guest.run(|| {
        let reply = client::exchange(sink.at(443), &[&hello], PATIENT);
        assert_ne!(reply.end, End::Open, "{reply:?}");
        for (target, host) in [
            (&b"/"[..], HOSTILE),
            (b"/", bare),
            (HOSTILE, b"forged.example"),
            (bare, b"forged.example"),
            (b"/%1b%5b2J%0d%0aFORGED", b"forged.example"),
            (b"/", long.as_bytes()),
            (long.as_bytes(), b"forged.example"),
        ] {
            let reply = client::exchange(sink.at(80), &[&head(target, host)], PATIENT);
            assert!(!reply.text().starts_with("HTTP/1.1 200"), "{reply:?}");
        }
        let socket = UdpSocket::bind("0.0.0.0:0").expect("bind");
        socket.send_to(&question, (policy::net::GATEWAY_IP, 53)).expect("ask");
    });
    guest.reaches(&api);
    let closed = |record: &Value| record["outcome"] == "closed";
    let all = eventually("everything is recorded", PATIENT, || {
        let records = world.events(&guest.name);
        let denied = |kind: &&str| {
            records.iter().any(|one| one["kind"] == **kind && one["outcome"] == "deny")
        };
        let all = ["dns", "connection", "request"].iter().all(denied);
        (all && records.iter().any(closed)).then_some(records)
    });
    let said = serde_json::to_string(&all).expect("JSON");
    assert!(said.contains("FORGED"), "control: {said}");
    let longest =
        all.iter().flat_map(|one| ["name", "path", "detail", "method"].map(|key| &one[key]));
    let longest = longest.filter_map(|text| text.as_str()).map(|text| text.chars().count()).max();
    assert!(longest < Some(2_000), "{longest:?}");
    let is_control = |c: char| c.is_control() && c != '\n';
    for entry in std::fs::read_dir(world.dir().join("audit")).expect("the audit") {
        let text = std::fs::read_to_string(entry.expect("an entry").path()).expect("UTF-8");
        assert!(!text.contains(is_control));
        for line in text.lines() {
            serde_json::from_str::<Value>(line).expect("a record a line");
        }
    }
    let shown = world.cli(&["events", "--sandbox", &guest.name]).ok().stdout;
    assert!(shown.lines().count() >= all.len() && !shown.contains(is_control), "{shown:?}");
    assert!(shown.lines().all(|line| line.starts_with("20")), "a date begins each line: {shown}");
    let log = world.daemon().log();
    assert!(!log.contains(is_control), "{:?}", log.chars().find(|c| is_control(*c)));
    let forged = log.lines().find(|line| !line.starts_with("20"));
    assert_eq!(forged, None, "a date begins each line");
    assert!(log.lines().all(|line| line.len() < 4_000), "no line without end");
    assert_eq!(world.sent_to(sink.ip), []);
}

/// Promise 23. A peer that was knocked at in vain knows an address, a port and a time: so does the audit,
/// of each attempt there was.
#[test]
fn the_audit_says_whose_a_failed_dial_was() {
    let world = World::shared();
    let (one, two) = (world.site("closed"), world.site("closed"));
    let name = world.site("both");
    world.names.set(&name.name, &[one.ip.into(), two.ip.into()]);
    let rule = format!("[[rule]]\nallow = [\"{}\", \"{}\"]\nports = [9200]\n", one.ip, name.name);
    let guest = world.guest(&rule);
    let at = (one.ip, 9200).into();
    let reply = guest.run(|| client::exchange(at, &[b"x\r\n"], PATIENT));
    assert_eq!(reply.end, End::Reset);
    let got = guest.curl(&[&format!("http://{}:9200/", name.name)]);
    assert_ne!(got.status, 200, "{}", got.text());
    for (ip, least) in [(one.ip, 2), (two.ip, 1)] {
        let opened = world.sent(|seen| seen.opens && seen.is_to(ip));
        let mut ports: Vec<u16> = opened.iter().filter_map(|s| Some(s.ports?.0)).collect();
        ports.sort_unstable();
        ports.dedup();
        assert!(ports.len() >= least, "control: {ip} was knocked at, from {ports:?}");
        for port in ports {
            let egress = format!("{EGRESS}:{port}");
            let dialed = format!("{ip}:9200");
            guest.event(&[("outcome", "fail"), ("egress", &egress), ("dialed", &dialed)]);
            assert!(!world.records(&format!("egress={egress}")).is_empty(), "{egress}");
        }
    }
}
