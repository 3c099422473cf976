//! The audit answers the compliance officer's question.

use world::client::PATIENT;
use world::poll::eventually;
use world::{World, allow};

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
