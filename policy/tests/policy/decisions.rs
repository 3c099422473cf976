//! The semantics by example: one policy, some flows, what becomes of them.

use std::net::IpAddr;

use policy::{
    Compiled, Evidence, Flow, Host, Layer, Mode, OwnAddresses, Permit, Policy, PolicyHandle,
    Protocol, Revision, Target, Verdict, explain,
};

fn policy(toml: &str) -> Policy {
    Policy::from_toml(toml).unwrap_or_else(|error| panic!("{error}\n{toml}"))
}

fn sandbox(toml: &str) -> Compiled {
    Compiled::new(&[(Layer::Sandbox, &policy(toml))], Revision(3))
}

fn host(text: &str) -> Host {
    Host::parse(text).expect("host")
}

fn ip(text: &str) -> IpAddr {
    text.parse().expect("address")
}

/// A flow in a few words: `tls a.ex.org:443`, `ech a.ex.org:443`, `POST a.ex.org:80/v1`,
/// `pin a.ex.org,b.ex.org:5432`, `raw 203.0.113.7:25`, `udp 203.0.113.7:443`, `ask a.ex.org`. With
/// `@ 203.0.113.7` the guest aims at that address.
fn judge(compiled: &Compiled, words: &str) -> Verdict {
    let (words, aim) = match words.split_once(" @ ") {
        Some((words, aim)) => (words, Some(ip(aim))),
        None => (words, None),
    };
    let (kind, rest) = words.split_once(' ').expect("kind");
    let (rest, path) = rest.find('/').map_or((rest, "/"), |at| rest.split_at(at));
    let (names, port) = rest.rsplit_once(':').unwrap_or((rest, "0"));
    let port = port.parse().expect("port");
    if matches!(kind, "raw" | "udp") {
        let protocol = if kind == "raw" { Protocol::Tcp } else { Protocol::Udp };
        let destination = Some(ip(names));
        return compiled.judge(&Flow { protocol, port, destination, evidence: Evidence::Address });
    }
    let hosts: Vec<Host> = names.split(',').filter(|n| !n.is_empty()).map(host).collect();
    let evidence = match kind {
        "ask" => Evidence::Question(&hosts[0]),
        "tls" => Evidence::Tls { sni: &hosts[0], ech: false },
        "ech" => Evidence::Tls { sni: &hosts[0], ech: true },
        "pin" => Evidence::Pinned { names: &hosts, all: true },
        method => Evidence::Request { authority: &hosts[0], method, path },
    };
    compiled.judge(&Flow { protocol: Protocol::Tcp, port, destination: aim, evidence })
}

fn short(verdict: &Verdict) -> String {
    match verdict {
        Verdict::Pass(permit) => match permit.target() {
            Target::Name(name) => format!("pass {name} {:?}", permit.mode()),
            Target::Address(address) => format!("pass {address} {:?}", permit.mode()),
        },
        Verdict::Deny(denial) => format!("deny {}", denial.code),
        Verdict::Undecidable(denial) => format!("undecidable {}", denial.code),
    }
}

fn holds(compiled: &Compiled, table: &[(&str, &str)]) {
    for (flow, expected) in table {
        assert_eq!(short(&judge(compiled, flow)), *expected, "{flow}");
    }
}

fn permit(compiled: &Compiled, flow: &str) -> Permit {
    match judge(compiled, flow) {
        Verdict::Pass(permit) => permit,
        other => panic!("{flow}: {other:?}"),
    }
}

#[test]
fn a_name_without_ports_means_tls_on_443_and_http_on_80() {
    holds(
        &sandbox("[[rule]]\nallow = [\"a.ex.org\"]"),
        &[
            ("tls a.ex.org:443", "pass a.ex.org Splice"),
            ("ech a.ex.org:443", "pass a.ex.org Splice"),
            ("GET a.ex.org:80/x", "pass a.ex.org Requests"),
            ("ask a.ex.org", "pass a.ex.org Answer"),
            ("tls a.ex.org:80", "deny port"),
            ("GET a.ex.org:443", "deny port"),
            ("tls a.ex.org:8443", "deny port"),
            ("pin a.ex.org:443", "undecidable undecidable"),
            ("pin a.ex.org:80", "undecidable undecidable"),
            ("pin a.ex.org:22", "deny port"),
            ("tls b.ex.org:443", "deny no-rule"),
            ("ask b.ex.org", "deny no-rule"),
            ("pin b.ex.org:443", "deny no-rule"),
            ("pin :443", "deny no-name"),
            ("raw 1.1.1.1:443", "deny no-name"),
            ("udp 1.1.1.1:443", "deny quic"),
            ("udp 1.1.1.1:123", "deny protocol"),
        ],
    );
}

#[test]
fn the_guests_destination_does_not_make_a_name() {
    let compiled = sandbox("[[rule]]\nallow = [\"a.ex.org\"]\n[[rule]]\ndeny = [\"6.6.6.6\"]");
    holds(
        &compiled,
        &[
            ("tls a.ex.org:443 @ 6.6.6.6", "pass a.ex.org Splice"),
            ("tls b.ex.org:443 @ 6.6.6.6", "deny rule"),
            ("raw 6.6.6.6:443", "deny rule"),
        ],
    );
    let permit = permit(&compiled, "tls a.ex.org:443 @ 6.6.6.6");
    let own = OwnAddresses::default();
    let denial = compiled.judge_address(&permit, ip("6.6.6.6"), &own).expect_err("denied");
    assert_eq!(
        (denial.code.as_str(), denial.rule.as_deref()),
        ("rule", Some("rule[1] deny 6.6.6.6"))
    );
}

#[test]
fn ports_that_are_named_take_any_protocol() {
    holds(
        &sandbox("[[rule]]\nallow = [\"db.ex.org\"]\nports = [5432, \"8000-8001\"]"),
        &[
            ("pin db.ex.org:5432", "pass db.ex.org Raw"),
            ("tls db.ex.org:5432", "pass db.ex.org Splice"),
            ("GET db.ex.org:8001", "pass db.ex.org Requests"),
            ("tls db.ex.org:443", "deny port"),
            ("GET db.ex.org:8002", "deny port"),
            ("ask db.ex.org", "pass db.ex.org Answer"),
        ],
    );
}

#[test]
fn the_first_pinned_name_that_is_allowed_is_dialled_and_any_denied_one_closes() {
    let compiled = sandbox(
        "[[rule]]\nallow = [\"a.ex.org\", \"b.ex.org\"]\nports = [5432]\n[[rule]]\ndeny = [\"bad.ex.org\"]",
    );
    holds(
        &compiled,
        &[
            ("pin b.ex.org,a.ex.org:5432", "pass b.ex.org Raw"),
            ("pin other.ex.org,a.ex.org:5432", "pass a.ex.org Raw"),
            ("pin a.ex.org,bad.ex.org:5432", "deny rule"),
            ("pin other.ex.org:5432", "deny no-rule"),
        ],
    );
}

#[test]
fn a_deny_without_ports_closes_every_port_and_protocol() {
    let compiled = sandbox(
        "[[rule]]\nallow = [\"*.ex.org\"]\n[[rule]]\nallow = [\"*.ex.org\"]\nports = [8443]\n\
         [[rule]]\ndeny = [\"bad.ex.org\"]\n[[rule]]\ndeny = [\"half.ex.org\"]\nports = [443]\n\
         [[rule]]\ndeny = [\"both.ex.org\"]\nports = [443, 80, 8443]\n\
         [[rule]]\nallow = [\"9.9.9.0/24\"]\nprotocol = \"udp\"\n[[rule]]\ndeny = [\"9.9.9.9\"]",
    );
    holds(
        &compiled,
        &[
            ("tls ok.ex.org:443", "pass ok.ex.org Splice"),
            ("tls bad.ex.org:443", "deny rule"),
            ("tls bad.ex.org:8443", "deny rule"),
            ("ask bad.ex.org", "deny rule"),
            ("tls half.ex.org:443", "deny rule"),
            ("GET half.ex.org:80", "pass half.ex.org Requests"),
            ("ask half.ex.org", "pass half.ex.org Answer"),
            ("ask both.ex.org", "deny rule"),
            ("udp 9.9.9.8:53", "pass 9.9.9.8 Raw"),
            ("udp 9.9.9.9:53", "deny rule"),
        ],
    );
}

#[test]
fn methods_and_paths_are_judged_request_by_request() {
    let compiled = sandbox(
        "[[rule]]\nallow = [\"a.ex.org\"]\nmethods = [\"POST\"]\npaths = [\"/v1/**\"]\n\
         [[rule]]\nallow = [\"b.ex.org\"]\n[[rule]]\ndeny = [\"b.ex.org\"]\npaths = [\"/admin/**\"]",
    );
    holds(
        &compiled,
        &[
            ("POST a.ex.org:80/v1/x", "pass a.ex.org Requests"),
            ("POST a.ex.org:80/%76%31/x", "pass a.ex.org Requests"),
            ("GET a.ex.org:80/v1/x", "deny method"),
            ("post a.ex.org:80/v1/x", "deny method"),
            ("POST a.ex.org:80/v2/x", "deny path"),
            ("POST a.ex.org:80/v1/../v2/x", "deny path"),
            ("POST a.ex.org:80/v1/%2e%2e/v2/x", "deny path"),
            ("POST a.ex.org:80/v1//x", "deny path"),
            ("POST a.ex.org:80/v1/%2fx", "deny path"),
            ("tls a.ex.org:443", "undecidable undecidable"),
            ("tls a.ex.org:444", "deny port"),
            ("ask a.ex.org", "pass a.ex.org Answer"),
            ("GET b.ex.org:80/x", "pass b.ex.org Requests"),
            ("GET b.ex.org:80/admin/x", "deny rule"),
            ("GET b.ex.org:80/x/..//admin/x", "deny rule"),
            ("tls b.ex.org:443", "undecidable undecidable"),
            ("ask b.ex.org", "pass b.ex.org Answer"),
        ],
    );
}

#[test]
fn ech_is_refused_where_every_rule_that_matches_refuses_it() {
    let compiled = sandbox(
        "[[rule]]\nallow = [\"a.ex.org\", \"b.ex.org\"]\nech = \"deny\"\n[[rule]]\nallow = [\".b.ex.org\"]",
    );
    holds(
        &compiled,
        &[
            ("tls a.ex.org:443", "pass a.ex.org Splice"),
            ("ech a.ex.org:443", "deny ech"),
            ("ech b.ex.org:443", "pass b.ex.org Splice"),
        ],
    );
}

#[test]
fn bytes_in_which_no_hello_is_read_do_not_pass_by_a_rule_that_refuses_ech() {
    let compiled = sandbox(
        "[[rule]]\nallow = [\"a.ex.org\", \"203.0.113.7\"]\nports = [443, 8443]\nech = \"deny\"",
    );
    holds(
        &compiled,
        &[
            ("tls a.ex.org:8443", "pass a.ex.org Splice"),
            ("GET a.ex.org:8443/x", "pass a.ex.org Requests"),
            ("pin a.ex.org:8443", "undecidable undecidable"),
            ("pin a.ex.org:443", "undecidable undecidable"),
            ("pin :8443 @ 203.0.113.7", "undecidable undecidable"),
        ],
    );
}

#[test]
fn addresses_pass_by_address_rules_whatever_the_evidence() {
    let compiled = sandbox(
        "[[rule]]\nallow = [\"203.0.113.0/24\"]\nports = [25, 443]\n\
         [[rule]]\nallow = [\"198.51.100.7\"]\nprotocol = \"udp\"\nports = [3478]\n\
         [[rule]]\ndeny = [\"bad.ex.org\"]",
    );
    holds(
        &compiled,
        &[
            ("raw 203.0.113.7:25", "pass 203.0.113.7 Raw"),
            ("raw ::ffff:203.0.113.7:25", "pass 203.0.113.7 Raw"),
            ("raw 203.0.113.7:26", "deny port"),
            ("tls x.ex.org:443 @ 203.0.113.7", "pass 203.0.113.7 Splice"),
            ("GET x.ex.org:25 @ 203.0.113.7", "pass 203.0.113.7 Requests"),
            ("pin x.ex.org:443 @ 203.0.113.7", "pass 203.0.113.7 Raw"),
            ("tls bad.ex.org:443 @ 203.0.113.7", "deny rule"),
            ("tls x.ex.org:443 @ 203.0.114.7", "deny no-rule"),
            ("udp 203.0.113.7:25", "deny protocol"),
            ("udp 203.0.113.7:443", "deny quic"),
            ("udp 198.51.100.7:3478", "pass 198.51.100.7 Raw"),
            ("udp 198.51.100.7:443", "deny port"),
            ("raw 198.51.100.7:3478", "deny private-address"),
        ],
    );
}

#[test]
fn a_default_allow_lets_names_through_but_not_addresses_udp_or_raw_web_ports() {
    holds(
        &sandbox("default = \"allow\"\n[[rule]]\ndeny = [\"bad.ex.org\"]"),
        &[
            ("tls a.ex.org:443", "pass a.ex.org Splice"),
            ("tls a.ex.org:9999", "pass a.ex.org Splice"),
            ("GET a.ex.org:80", "pass a.ex.org Requests"),
            ("pin a.ex.org:22", "pass a.ex.org Raw"),
            ("pin a.ex.org:443", "undecidable undecidable"),
            ("tls bad.ex.org:443", "deny rule"),
            ("raw 1.1.1.1:443", "deny no-name"),
            ("udp 1.1.1.1:443", "deny quic"),
            ("udp 1.1.1.1:53", "deny protocol"),
        ],
    );
}

#[test]
fn every_layer_must_let_through_and_none_may_deny() {
    let platform = policy(
        "default = \"allow\"\n[[rule]]\ndeny = [\"pool.ex.org\"]\n[[rule]]\nallow = [\"deb.ex.org\", \"pool.ex.org\"]\nalways = true",
    );
    let tenant = policy("[[rule]]\nallow = [\".ex.org\"]\n[[rule]]\ndeny = [\"no.deb.ex.org\"]");
    let sandbox = policy("[[rule]]\nallow = [\"a.ex.org\", \"pool.ex.org\", \"out.test.ex.net\"]");
    let all = Compiled::new(
        &[(Layer::Sandbox, &sandbox), (Layer::Platform, &platform), (Layer::Tenant, &tenant)],
        Revision(9),
    );
    holds(
        &all,
        &[
            ("tls a.ex.org:443", "pass a.ex.org Splice"),
            ("tls deb.ex.org:443", "pass deb.ex.org Splice"),
            ("ask deb.ex.org", "pass deb.ex.org Answer"),
            ("tls pool.ex.org:443", "deny rule"),
            ("tls out.test.ex.net:443", "deny no-rule"),
            ("tls b.ex.org:443", "deny no-rule"),
            ("tls deb.ex.org:444", "deny port"),
        ],
    );
    let passed = permit(&all, "tls a.ex.org:443");
    assert_eq!((passed.layer(), &*passed.rule()), (Layer::Sandbox, "rule[0] allow \"a.ex.org\""));
    assert_eq!((passed.revision(), passed.mode(), passed.port()), (Revision(9), Mode::Splice, 443));
    assert_eq!(permit(&all, "tls deb.ex.org:443").layer(), Layer::Tenant);
    let Verdict::Deny(denial) = judge(&all, "tls out.test.ex.net:443") else { panic!("passed") };
    assert_eq!(denial.layer, Some(Layer::Tenant));
    holds(
        &Compiled::new(&[], Revision(0)),
        &[("tls a.ex.org:443", "deny no-rule"), ("ask a.ex.org", "deny no-rule")],
    );
}

#[test]
fn always_counts_in_the_platform_layer_only() {
    let mine = policy("[[rule]]\nallow = [\"a.ex.org\"]\nalways = true");
    let tenant = policy("[[rule]]\nallow = [\"b.ex.org\"]");
    let both = Compiled::new(&[(Layer::Tenant, &tenant), (Layer::Sandbox, &mine)], Revision(0));
    holds(&both, &[("tls a.ex.org:443", "deny no-rule")]);
}

#[test]
fn layers_agree_on_a_port_before_a_question_is_answered() {
    let tenant = policy("[[rule]]\nallow = [\"a.ex.org\"]\nports = [8443]");
    let sandbox = policy("[[rule]]\nallow = [\"a.ex.org\"]");
    let both = Compiled::new(&[(Layer::Tenant, &tenant), (Layer::Sandbox, &sandbox)], Revision(0));
    holds(&both, &[("ask a.ex.org", "deny port"), ("tls a.ex.org:443", "deny port")]);
}

#[test]
fn a_name_of_one_layer_and_an_address_of_another_do_not_add_up() {
    let tenant = policy("[[rule]]\nallow = [\"203.0.113.0/24\"]");
    let sandbox = policy("[[rule]]\nallow = [\"a.ex.org\"]");
    let both = Compiled::new(&[(Layer::Tenant, &tenant), (Layer::Sandbox, &sandbox)], Revision(0));
    holds(
        &both,
        &[
            ("tls a.ex.org:443 @ 203.0.113.7", "deny no-rule"),
            ("raw 203.0.113.7:443", "deny private-address"),
        ],
    );
}

fn dialable(
    compiled: &Compiled,
    flow: &str,
    own: &OwnAddresses,
    address: &str,
) -> Result<(), String> {
    let permit = permit(compiled, flow);
    match compiled.judge_address(&permit, ip(address), own) {
        Ok(dialable) => {
            assert_eq!(dialable.address().ip(), ip(address).to_canonical());
            assert_eq!(dialable.address().port(), permit.port());
            Ok(())
        }
        Err(denial) => Err(denial.code.to_string()),
    }
}

#[test]
fn special_addresses_need_a_rule_that_means_them() {
    let own = OwnAddresses::new([ip("10.1.0.1"), ip("8.8.4.4")]);
    let denied = |code: &str| Err(code.to_owned());
    let plain = sandbox("[[rule]]\nallow = [\"a.ex.org\"]");
    let wide = sandbox("[[rule]]\nallow = [\"a.ex.org\", \"0.0.0.0/0\", \"::/0\"]");
    let inner = sandbox(
        "[[rule]]\nallow = [\"a.ex.org\", \"10.0.0.0/8\"]\n[[rule]]\ndeny = [\"10.9.0.0/16\"]",
    );
    let exact = sandbox(
        "[[rule]]\nallow = [\"a.ex.org\", \"10.1.0.1\", \"8.8.4.4\", \"127.0.0.0/8\", \"0.0.0.0\", \"64:ff9b::7f00:1\"]",
    );
    let other = sandbox(
        "[[rule]]\nallow = [\"a.ex.org\"]\n[[rule]]\nallow = [\"10.0.0.0/8\"]\nports = [5432]",
    );
    let flow = "tls a.ex.org:443";
    for address in ["1.1.1.1", "2606:4700::1", "::ffff:1.1.1.1", "64:ff9b::101:101"] {
        assert_eq!(dialable(&plain, flow, &own, address), Ok(()), "{address}");
    }
    for address in [
        "127.0.0.1",
        "169.254.169.254",
        "10.2.3.4",
        "8.8.4.4",
        "::1",
        "::ffff:10.2.3.4",
        "64:ff9b::a02:304",
        "64:ff9b::808:404",
        "198.18.0.1",
    ] {
        assert_eq!(dialable(&plain, flow, &own, address), denied("private-address"), "{address}");
        assert_eq!(dialable(&wide, flow, &own, address), denied("private-address"), "{address}");
    }
    assert_eq!(dialable(&inner, flow, &own, "10.2.3.4"), Ok(()));
    assert_eq!(dialable(&inner, flow, &own, "::ffff:10.2.3.4"), Ok(()));
    assert_eq!(dialable(&inner, flow, &own, "10.9.3.4"), denied("rule"));
    assert_eq!(dialable(&inner, flow, &own, "64:ff9b::a09:304"), denied("rule"));
    assert_eq!(dialable(&inner, flow, &own, "10.1.0.1"), denied("private-address"), "own");
    for ours in ["10.1.0.1", "8.8.4.4", "127.0.0.1", "64:ff9b::7f00:1", "0.0.0.0"] {
        assert_eq!(dialable(&exact, flow, &own, ours), denied("private-address"), "{ours}");
    }
    assert_eq!(dialable(&other, flow, &own, "10.2.3.4"), denied("private-address"), "another port");
}

#[test]
fn an_address_permit_is_for_that_address_alone() {
    let own = OwnAddresses::default();
    let compiled = sandbox("[[rule]]\nallow = [\"203.0.113.0/24\"]");
    assert_eq!(dialable(&compiled, "raw 203.0.113.7:25", &own, "203.0.113.7"), Ok(()));
    assert_eq!(
        dialable(&compiled, "raw 203.0.113.7:25", &own, "203.0.113.8"),
        Err("no-rule".into())
    );
}

#[test]
fn a_layer_opens_special_addresses_only_as_far_as_those_above_it() {
    let own = OwnAddresses::default();
    let names = policy("[[rule]]\nallow = [\"a.ex.org\"]");
    let open = policy("default = \"allow\"");
    let inner = policy("[[rule]]\nallow = [\"a.ex.org\", \"10.0.0.0/8\"]");
    let of = |platform: &Policy, sandbox: &Policy| {
        let layers = [(Layer::Platform, platform), (Layer::Sandbox, sandbox)];
        dialable(&Compiled::new(&layers, Revision(0)), "tls a.ex.org:443", &own, "10.2.3.4")
    };
    assert_eq!(of(&inner, &names), Ok(()), "the operator names it");
    assert_eq!(of(&open, &inner), Ok(()), "the operator leaves it open");
    assert_eq!(of(&names, &inner), Err("private-address".into()), "the operator names hosts only");
}

#[test]
fn an_answer_is_filtered_like_a_dial_but_can_never_be_dialled() {
    let compiled = sandbox(
        "[[rule]]\nallow = [\"a.ex.org\"]\n[[rule]]\nallow = [\"10.0.0.0/8\"]\nports = [5432]\n[[rule]]\ndeny = [\"6.6.6.6\"]",
    );
    let permit = permit(&compiled, "ask a.ex.org");
    let own = OwnAddresses::default();
    let judged =
        |address| compiled.judge_address(&permit, ip(address), &own).map(|d| d.address().port());
    assert_eq!(judged("1.1.1.1"), Ok(0));
    assert_eq!(judged("10.2.3.4"), Ok(0));
    assert_eq!(judged("127.0.0.1").map_err(|d| d.code.as_str()), Err("private-address"));
    assert_eq!(judged("6.6.6.6").map_err(|d| d.code.as_str()), Err("rule"));
}

#[test]
fn a_handle_shows_every_clone_the_policy_in_force() {
    let handle = PolicyHandle::default();
    let clone = handle.clone();
    assert_eq!(short(&judge(&clone.load(), "tls a.ex.org:443")), "deny no-rule");
    handle.store(sandbox("[[rule]]\nallow = [\"a.ex.org\"]"));
    assert_eq!(short(&judge(&clone.load(), "tls a.ex.org:443")), "pass a.ex.org Splice");
}

#[test]
fn an_explanation_names_each_layer_and_its_rule() {
    let platform = policy("default = \"allow\"");
    let sandbox = policy("[[rule]]\nallow = [\"*.ex.org\"]\nports = [8443]");
    let compiled =
        Compiled::new(&[(Layer::Platform, &platform), (Layer::Sandbox, &sandbox)], Revision(2));
    let name = host("a.ex.org");
    let flow = |port| Flow {
        protocol: Protocol::Tcp,
        port,
        destination: None,
        evidence: Evidence::Tls { sni: &name, ech: false },
    };
    let refused = serde_json::to_value(explain(&compiled, &flow(443), &OwnAddresses::default()))
        .expect("json");
    assert_eq!(
        refused,
        serde_json::json!({
            "verdict": "deny", "code": "port", "layer": "sandbox", "revision": 2,
            "rule": "rule[0] allow \"*.ex.org\" ports 8443",
            "layers": [
                { "layer": "platform", "verdict": "pass" },
                { "layer": "sandbox", "verdict": "deny", "code": "port", "rule": "rule[0] allow \"*.ex.org\" ports 8443" },
            ],
            "sentences": [
                "The platform policy lets it through: no rule matches, and its default is allow.",
                "The sandbox policy does not let it through by rule[0] allow \"*.ex.org\" ports 8443: it is allowed on other ports or another protocol only.",
                "It is refused (port): it is allowed on other ports or another protocol only.",
            ],
        })
    );
    let passed = explain(&compiled, &flow(8443), &OwnAddresses::default());
    assert_eq!(
        passed.sentences.last().map(String::as_str),
        Some("It passes to a.ex.org port 8443, TLS unopened.")
    );
    assert_eq!((passed.target.as_deref(), passed.port), (Some("a.ex.org"), Some(8443)));
}
