//! A policy is a promise about now: a write acts on what is open, and a bad one changes nothing.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use fault::Point;
use serde_json::json;
use world::client::{self, End, PATIENT};
use world::daemon::Answer;
use world::origin::port;
use world::poll::eventually;
use world::wire::Seen;
use world::{Guest, Site, World, allow};

use crate::revoke::Busy;

fn allow_echo(site: &Site) -> String {
    format!("[[rule]]\nallow = [\"{}\"]\nports = [{}]\n", site.ip, port::ECHO)
}

fn open_echo(guest: &Guest<'_>, site: &Site) -> TcpStream {
    guest.run(|| client::connect(site.at(port::ECHO), PATIENT).expect("connect"))
}

fn echoes(stream: &mut TcpStream) -> bool {
    let mut reply = [0; 6];
    stream.write_all(b"ping\r\n").is_ok() && stream.read_exact(&mut reply).is_ok()
}

/// Promise 18. The answer comes when the flow is cut, and says so; the guest sees a reset.
#[test]
fn a_tightened_policy_cuts_the_open_flow_it_denies_and_no_other() {
    let world = World::shared();
    let (kept, cut) = (world.site("kept"), world.site("cut"));
    let both = allow_echo(&kept) + &allow_echo(&cut);
    let guest = world.guest(&both);
    let (mut one, mut other) = (open_echo(&guest, &kept), open_echo(&guest, &cut));
    assert!(echoes(&mut one) && echoes(&mut other));
    let wider = guest.set_policy(&(both + &allow(&[&world.site("new")])));
    assert_eq!((wider.status, &wider.json["cut"]), (200, &json!(0)), "{}", wider.text);
    assert!(echoes(&mut one) && echoes(&mut other), "a wider policy cuts nothing");
    let tighter = guest.set_policy(&allow_echo(&kept));
    assert_eq!(tighter.json["checked"], 2, "{}", tighter.text);
    assert_eq!(tighter.json["cut"], 1, "{}", tighter.text);
    let end = client::read_to_end(&mut other, &mut Vec::new(), PATIENT);
    assert_eq!(end, End::Reset);
    assert!(echoes(&mut one));
    guest.event(&[("kind", "connection"), ("code", "policy-changed")]);
}

/// Promise 18. A connection that was cut and is not over is told as such, by each write, until it is.
#[test]
fn a_write_says_what_it_has_cut_and_what_is_not_over_in_spite_of_it() {
    let world = World::new();
    let site = world.site("site");
    let guest = world.guest(&allow_echo(&site));
    world.daemon().arm(Point::ConnectionDecided, "stall");
    let mut stream = open_echo(&guest, &site);
    stream.write_all(b"ping\r\n").expect("sent");
    world.daemon().stalls(Point::ConnectionDecided);
    let mark = world.mark();
    let denied = guest.set_policy("");
    let told = |answer: &Answer| (answer.json["cut"].clone(), answer.json["closing"].clone());
    assert_eq!(told(&denied), (json!(1), json!(1)), "{}", denied.text);
    let again = guest.set_policy("");
    assert_eq!(told(&again), (json!(0), json!(1)), "still: {}", again.text);
    world.daemon().release();
    let over = guest.set_policy("");
    assert_eq!(told(&over), (json!(0), json!(0)), "{}", over.text);
    let end = client::read_to_end(&mut stream, &mut Vec::new(), PATIENT);
    assert_eq!(end, End::Reset);
    let carries = |seen: &Seen| seen.is_to(site.ip) && seen.payload > 0;
    assert_eq!(world.sent_since(mark, carries), []);
}

/// Promise 18. The next connection is judged by the new policy.
#[test]
fn a_policy_acts_on_the_next_connection_as_soon_as_it_is_answered() {
    let world = World::shared();
    let api = world.site("api");
    let guest = world.guest("");
    let url = format!("http://{}/", api.name);
    let resolve = format!("{}:80:{}", api.name, api.ip);
    for round in 0..3 {
        let denied = guest.curl(&["--resolve", &resolve, &url]);
        assert_eq!(denied.status, 403, "round {round}: {}", denied.stderr);
        assert_eq!(guest.set_policy(&allow(&[&api])).status, 200);
        let allowed = guest.curl(&["--resolve", &resolve, &url]);
        assert_eq!(allowed.status, 200, "round {round}: {}", allowed.stderr);
        assert_eq!(guest.set_policy("").status, 200);
    }
    assert_eq!(world.requests(&api.name).len(), 3);
}

/// Promise 18. Attack F07. One that is under way to the far side is cut with those that have arrived.
#[test]
fn a_connection_that_is_being_dialled_is_cut_when_it_is_denied() {
    let world = World::shared();
    let slow = world.site("slow");
    world.names.silence(&slow.name);
    let guest = world.guest(&allow(&[&slow]));
    let hello = client::client_hello(&world.authority, &slow.name);
    std::thread::scope(|scope| {
        let calling =
            scope.spawn(|| guest.run(|| client::exchange(slow.at(443), &[&hello], PATIENT)));
        eventually("its name is asked for", PATIENT, || {
            (!world.names.asked(&slow.name).is_empty()).then_some(())
        });
        let closed = guest.set_policy("");
        assert_eq!((&closed.json["checked"], &closed.json["cut"]), (&json!(1), &json!(1)));
        world.names.set(&slow.name, &[slow.ip.into()]);
        let reply = calling.join().expect("an end");
        assert!(reply.end != End::Open && reply.bytes.first() != Some(&22), "{reply:?}");
    });
    guest.event(&[("outcome", "deny"), ("code", "policy-changed")]);
    assert_eq!(world.sent_to(slow.ip), []);
    assert_eq!(guest.set_policy(&allow(&[&slow])).status, 200);
    guest.reaches(&slow);
}

/// Promise 18. Attack F07. Its SYN is not sent again, though the name stays allowed.
#[test]
fn a_dial_to_an_address_that_is_denied_meanwhile_is_cut_and_no_syn_follows() {
    let world = World::shared();
    let silent = world.site("silent");
    let blackhole = format!("blackhole {}/32 table local", silent.ip);
    world.internet.ip(&format!("route add {blackhole}"));
    let allow = allow(&[&silent]);
    let guest = world.guest(&allow);
    let hello = client::client_hello(&world.authority, &silent.name);
    let opens = |seen: &Seen| seen.opens && seen.is_to(silent.ip);
    std::thread::scope(|scope| {
        let calling =
            scope.spawn(|| guest.run(|| client::exchange(silent.at(443), &[&hello], PATIENT)));
        eventually("a SYN leaves", PATIENT, || (!world.sent(opens).is_empty()).then_some(()));
        let denied = format!("{allow}[[rule]]\ndeny = [\"{}\"]\n", silent.ip);
        let denied = guest.set_policy(&denied);
        let mark = world.mark();
        world.internet.ip(&format!("route del {blackhole}"));
        assert_eq!((&denied.json["cut"], &denied.json["closing"]), (&json!(1), &json!(0)));
        let reply = calling.join().expect("an end");
        assert!(reply.end != End::Open && !client::has_handshake(&reply.bytes), "{reply:?}");
        // The kernel sends a SYN again one and three seconds after the first.
        std::thread::sleep(Duration::from_secs(4));
        assert_eq!(world.sent_since(mark, opens), []);
    });
    guest.event(&[("outcome", "deny"), ("code", "policy-changed")]);
    assert_eq!(guest.set_policy(&allow).status, 200);
    guest.reaches(&silent);
}

/// Promise 18. Attack F07. Connections that are made, judged or dialled while the write is under way
/// are no gap: none is opened and none carries a byte once it is answered.
#[test]
fn nothing_slips_through_while_a_policy_is_written() {
    const ROUNDS: usize = 8;
    let world = World::new();
    let (site, address) = (world.site("race"), world.site("race-ip"));
    let rule = format!("[[rule]]\nallow = [\"{}\"]\nports = [{}]\n", address.ip, port::ECHO);
    let open = allow(&[&site]) + &rule;
    let guest = world.guest("");
    let hello = client::client_hello(&world.authority, &site.name);
    let request = format!("GET / HTTP/1.1\r\nHost: {}\r\n\r\n", site.name);
    let ways: [(SocketAddr, &[u8]); 3] = [
        (site.at(port::HTTPS), &hello),
        (site.at(port::HTTP), request.as_bytes()),
        (address.at(port::ECHO), b"ping\r\n"),
    ];
    let (tried, passed) = ([0, 1, 2].map(|_| AtomicUsize::new(0)), AtomicUsize::new(0));
    let busy = AtomicBool::new(true);
    let more = |of: &AtomicUsize, than: usize| {
        eventually("the guest goes on", PATIENT, || {
            (of.load(Ordering::Relaxed) > than).then_some(())
        });
    };
    std::thread::scope(|scope| {
        let _busy = Busy(&busy);
        for ((to, words), tried) in ways.iter().zip(&tried) {
            let (guest, busy, passed) = (&guest, &busy, &passed);
            scope.spawn(move || {
                while busy.load(Ordering::Relaxed) {
                    let some = |reply: &[u8]| !reply.is_empty();
                    let reply = guest.run(|| client::exchange_until(*to, &[words], PATIENT, some));
                    let refused = reply.alert().is_some() || reply.text().contains("postern-deny");
                    let through = !refused && !reply.bytes.is_empty();
                    passed.fetch_add(usize::from(through), Ordering::Relaxed);
                    tried.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        for round in 0..ROUNDS {
            assert_eq!(guest.set_policy(&open).status, 200);
            more(&passed, passed.load(Ordering::Relaxed) + 3);
            let closed = guest.set_policy("");
            let mark = world.mark();
            assert_eq!(closed.status, 200, "{}", closed.text);
            for one in &tried {
                more(one, one.load(Ordering::Relaxed) + 2);
            }
            let to = |seen: &Seen| seen.is_to(site.ip) || seen.is_to(address.ip);
            let left = world.sent_since(mark, |seen| to(seen) && (seen.opens || seen.payload > 0));
            assert_eq!(left, [], "round {round}");
        }
    });
}

/// Promise 19. Attack P53. The old policy stays, whatever is wrong with the new one.
#[test]
fn a_bad_policy_is_refused_with_the_field_and_the_fix_and_the_old_one_stays() {
    let world = World::shared();
    let api = world.site("api");
    let guest = world.guest(&allow(&[&api]));
    let path = format!("/v1/sandboxes/{}/policy", guest.name);
    let before = world.api("GET", &path, &["-H", "accept: application/toml"]).text;
    let cases = [
        ("[[rule]]\nalow = [\"a.example.com\"]\n", "rule[0]"),
        ("[[rule]]\nallow = [\"a b\"]\n", "rule[0].allow[0]"),
        ("[[rule]]\nallow = [\"*.com\"]\n", "rule[0].allow[0]"),
        ("[[rule]]\nallow = [\"10.0.0.0/33\"]\n", "rule[0].allow[0]"),
        ("[[rule]]\nallow = [\"0x7f.1\"]\n", "rule[0].allow[0]"),
        ("[[rule]]\nallow = []\n", "rule[0].allow"),
        ("[[rule]]\nallow = [\"a.example.com\"]\nports = [\"9-1\"]\n", "rule[0].ports[0]"),
        ("[[rule]]\nallow = [\"a.example.com\"]\nports = [70000]\n", "rule[0].ports[0]"),
        ("[[rule]]\nallow = [\"a.example.com\"]\nmethods = [\"get it\"]\n", "rule[0].methods[0]"),
        ("[[rule]]\nallow = [\"a.example.com\"]\npaths = [\"v1\"]\n", "rule[0].paths[0]"),
        ("default = \"maybe\"\n", "default"),
        ("mode = \"audit\"\n", "mode"),
        ("[[rule]]\nallow = [\"10.0.0.0/net\"]\n", "rule[0].allow[0]"),
        ("[[rule]]\npermit = [\"a.example.com\"]\n", "rule[0]"),
        ("[[rule]]\nallow = [\"a.example.com\"]\nsecret = \"none\"\n", "rule[0]"),
        (
            "[[rule]]\nallow = [\"a.example.com\"]\n[[rule]]\nallow = [\"A.example.com.\"]\n",
            "rule[1].allow[0]",
        ),
        ("[[rule]\n", ""),
    ];
    for (policy, field) in cases {
        let answer = guest.set_policy(policy);
        let error = &answer.json["error"];
        assert_eq!(answer.status, 400, "{policy}{}", answer.text);
        assert_eq!(error["field"].as_str().unwrap_or_default(), field, "{policy}{error}");
        assert!(error["fix"].as_str().is_some_and(|fix| !fix.is_empty()), "{policy}{error}");
        assert!(error["line"].is_number(), "{policy}{error}");
    }
    let after = world.api("GET", &path, &["-H", "accept: application/toml"]).text;
    assert_eq!(before, after);
    guest.reaches(&api);
}

/// A layer above can only take away; what it takes is named with the layer.
#[test]
fn a_tenants_deny_beats_the_sandboxs_allow() {
    let world = World::shared();
    let (api, gist) = (world.site("api"), world.site("gist"));
    let tenant = world.fresh_name();
    let guest = world.guest_of(&tenant, &allow(&[&api, &gist]));
    let deny = format!("default = \"allow\"\n[[rule]]\ndeny = [\"{}\"]\n", gist.name);
    let toml = ["-H", "content-type: application/toml", "--data-binary", &deny];
    let set = world.api("PUT", &format!("/v1/tenants/{tenant}/policy"), &toml);
    assert_eq!((set.status, &set.json["sandboxes"]), (200, &json!(1)), "{}", set.text);
    guest.reaches(&api);
    let resolve = format!("{}:80:{}", gist.name, gist.ip);
    let got = guest.curl(&["--resolve", &resolve, &format!("http://{}/", gist.name)]);
    assert_eq!(got.status, 403, "{}", got.stderr);
    assert_eq!(got.json()["error"]["layer"], "tenant", "{}", got.text());
    assert_eq!(got.json()["error"]["code"], "rule", "{}", got.text());
    assert_eq!(world.sent_to(gist.ip), []);
}

/// What `explain` says is what happens.
#[test]
fn explain_says_what_happens() {
    let world = World::shared();
    let (api, sink) = (world.site("api"), world.attacker());
    let guest = world.guest(&allow(&[&api]));
    for (site, allowed) in [(&api, true), (&sink, false)] {
        let question = json!({ "destination": format!("https://{}/", site.name) }).to_string();
        let path = format!("/v1/sandboxes/{}/policy/explain", guest.name);
        let told = world.api("POST", &path, &["--json", &question]);
        assert_eq!(told.json["allowed"], json!(allowed), "{}", told.text);
        let hello = client::client_hello(&world.authority, &site.name);
        let reply = guest.run(|| {
            client::exchange_until(site.at(443), &[&hello], PATIENT, client::has_handshake)
        });
        assert_eq!(client::has_handshake(&reply.bytes), allowed, "{reply:?}");
        assert_eq!(reply.alert().is_none(), allowed, "{reply:?}");
    }
}

/// What `explain` says of a WebSocket is what happens to its handshake.
#[test]
fn explain_judges_an_upgrade_as_the_router_does() {
    let world = World::shared();
    let (any, get) = (world.site("any"), world.site("get"));
    let by_method = format!("[[rule]]\nallow = [{:?}]\nmethods = [\"GET\"]\n", get.name);
    let guest = world.guest(&(allow(&[&any]) + &by_method));
    for (site, passes) in [(&any, true), (&get, false)] {
        let handshake = format!(
            "GET /chat HTTP/1.1\r\nHost: {}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
             Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
            site.name
        );
        for (scheme, allowed) in [("http", true), ("ws", passes)] {
            let question = format!("{scheme}://{}/chat", site.name);
            let told = world.cli(&["--json", "policy", "explain", &guest.name, &question]);
            assert_eq!(told.json()["allowed"], json!(allowed), "{question}: {}", told.stdout);
        }
        let to = site.at(port::HTTP);
        let words = [handshake.as_bytes()];
        let reply =
            guest.run(|| client::exchange_until(to, &words, PATIENT, client::has_head)).text();
        assert_eq!(reply.contains("postern-deny: undecidable"), !passes, "{reply}");
        let asked = world.requests(&site.name);
        assert_eq!(asked.len(), usize::from(passes), "{asked:?}");
        let websocket = ("upgrade".to_owned(), "websocket".to_owned());
        assert!(asked.iter().all(|request| request.headers.contains(&websocket)), "{asked:?}");
    }
}

/// A write that depends on an older revision than the one in force changes nothing.
#[test]
fn a_write_on_top_of_a_revision_that_moved_is_refused() {
    let world = World::shared();
    let api = world.site("api");
    let guest = world.guest(&allow(&[&api]));
    let path = format!("/v1/sandboxes/{}/policy", guest.name);
    let moved = guest.set_policy(&allow(&[&api])).json["revision"].as_u64().expect("a revision");
    let stale = format!("if-match: \"{}\"", moved - 1);
    let toml = ["-H", &*stale, "-H", "content-type: application/toml", "--data-binary", "# none"];
    let refused = world.api("PUT", &path, &toml);
    assert_eq!(refused.status, 412, "{}", refused.text);
    guest.reaches(&api);
}
