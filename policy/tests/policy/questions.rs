//! Questions: what they cost however a policy is written, and what may be said of names that are
//! refused while something below them is not.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use policy::document::MAX_RULES_OVER_NAME;
use policy::{
    Compiled, Evidence, Flow, Host, Layer, OwnAddresses, Permit, Policy, Protocol, Revision,
    Verdict,
};

fn host(text: &str) -> Host {
    Host::parse(text).expect("host")
}

fn compiled(layers: &[(Layer, &str)]) -> Compiled {
    let read = |text: &str| Policy::from_toml(text).expect("policy");
    let policies: Vec<_> = layers.iter().map(|(layer, text)| (*layer, read(text))).collect();
    let layers: Vec<_> = policies.iter().map(|(layer, policy)| (*layer, policy)).collect();
    Compiled::new(&layers, Revision(1))
}

fn ask(policy: &Compiled, name: &str) -> Option<Permit> {
    let name = host(name);
    let evidence = Evidence::Question(&name);
    let flow = Flow { protocol: Protocol::Tcp, port: 0, destination: None, evidence };
    match policy.judge(&flow) {
        Verdict::Pass(permit) => Some(permit),
        Verdict::Deny(_) | Verdict::Undecidable(_) => None,
    }
}

/// Rules over one name, each with as many ranges as there may be, from `first` on in steps of `step`.
fn many(effect: &str, zones: &[&str], first: usize, step: usize) -> String {
    let mut text = String::new();
    let mut port = first;
    for zone in zones {
        for _ in 0..MAX_RULES_OVER_NAME / 4 {
            let ports: Vec<_> = (0..32)
                .map(|_| {
                    port += step;
                    port.to_string()
                })
                .collect();
            let _ =
                writeln!(text, "[[rule]]\n{effect} = [\"{zone}\"]\nports = [{}]", ports.join(","));
        }
    }
    text
}

/// A question looks at every port that a rule names, and a tenant may name very many.
#[test]
fn the_worst_policy_of_a_tenant_answers_a_question_in_time() {
    let zones = ["*.c.b.example", "*.b.example", ".c.b.example", "a.c.b.example"];
    // Every layer lets through, but never on the same port: the last port decides.
    let layers = [
        (Layer::Platform, many("allow", &zones, 1, 3)),
        (Layer::Tenant, many("allow", &zones, 2, 3)),
        (Layer::Sandbox, many("allow", &zones, 3, 3)),
    ];
    let layers: Vec<_> = layers.iter().map(|(layer, text)| (*layer, text.as_str())).collect();
    let policy = compiled(&layers);
    let start = Instant::now();
    for _ in 0..10 {
        assert_eq!(ask(&policy, "a.c.b.example"), None);
    }
    // Unoptimised, on a busy machine. Trying every port in turn takes minutes here.
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

#[test]
fn rules_over_one_name_are_bounded_and_the_error_names_one() {
    let zones = ["*.c.b.example", "*.b.example", ".c.b.example", "a.c.b.example"];
    let full = many("allow", &zones, 1, 1);
    assert!(Policy::from_toml(&full).is_ok());
    let more = format!("{full}[[rule]]\ndeny = [\"*\"]\n");
    let error = Policy::from_toml(&more).expect_err("too many");
    assert!(error.problem.contains("128 rules over it"), "{error:?}");
}

#[test]
fn a_port_that_only_a_range_opens_answers_the_question_unless_it_is_denied() {
    let range = "[[rule]]\nallow = [\"db.example.com\"]\nports = [\"5000-6000\"]\n";
    for (deny, answered) in [
        ("", true),
        ("ports = [\"1-5999\"]", true),
        ("ports = [\"1-4999\", \"5000-6000\"]", false),
        ("ports = [\"1-65535\"]", false),
        ("methods = [\"GET\"]", true),
    ] {
        let denial = format!("{range}[[rule]]\ndeny = [\"*.example.com\"]\n{deny}\n");
        let text = if deny.is_empty() { range } else { &denial };
        let both = compiled(&[(Layer::Tenant, "default = \"allow\""), (Layer::Sandbox, text)]);
        assert_eq!(ask(&both, "db.example.com").is_some(), answered, "{deny}");
    }
}

#[test]
fn a_permit_says_whether_a_rule_names_the_host_by_itself() {
    let policy = "[[rule]]\nallow = [\"*.example.com\", \"api.example.com\", \".example.org\"]\n";
    let policy = compiled(&[(Layer::Platform, "default = \"allow\""), (Layer::Sandbox, policy)]);
    for (name, listed) in [
        ("api.example.com", true),
        ("x.example.com", false),
        ("a.api.example.com", false),
        ("example.org", true),
        ("www.example.org", false),
    ] {
        assert_eq!(ask(&policy, name).expect(name).is_listed(), listed, "{name}");
    }
    let open = compiled(&[(Layer::Sandbox, "default = \"allow\"")]);
    assert!(!ask(&open, "api.example.com").expect("open").is_listed());
}

/// A resolver that is told NXDOMAIN concludes that nothing below exists (RFC 8020).
#[test]
fn a_refused_name_exists_as_long_as_something_below_it_may_pass() {
    let below = |layers: &[(Layer, &str)], name: &str| compiled(layers).passes_below(&host(name));
    let rules = "[[rule]]\nallow = [\"api.v1.example.com\", \"*.example.org\"]\n";
    let rules = format!("{rules}[[rule]]\ndeny = [\"*.dead.example.org\"]\n");
    let sandbox = [(Layer::Sandbox, rules.as_str())];
    for (name, expected) in [
        ("v1.example.com", true),
        ("example.com", true),
        ("com", true),
        ("api.v1.example.com", false),
        ("v2.example.com", false),
        ("1.example.com", false),
        ("net", false),
        ("example.org", true),
        ("a.b.example.org", true),
        ("dead.example.org", false),
        ("x.dead.example.org", false),
    ] {
        assert_eq!(below(&sandbox, name), expected, "{name}");
    }
    let open = "default = \"allow\"\n[[rule]]\ndeny = [\"one.example\", \".two.example\"]\n";
    assert!(below(&[(Layer::Sandbox, open)], "one.example"));
    assert!(!below(&[(Layer::Sandbox, open)], "two.example"));
    assert!(!below(&[(Layer::Tenant, ""), (Layer::Sandbox, open)], "one.example"));
    assert!(!below(&[], "example"));
    // A default of the platform opens nothing that the others leave out; its `always` does.
    let platform = |rule: &str| format!("default = \"allow\"\n{rule}");
    let always =
        platform("[[rule]]\nallow = [\"a.mirror.example\", \".cdn.example\"]\nalways = true\n");
    for (platform, expected) in [(platform(""), false), (always, true)] {
        let layers = [(Layer::Platform, platform.as_str()), (Layer::Sandbox, rules.as_str())];
        assert!(!below(&layers, "other.example"));
        for name in ["mirror.example", "cdn.example", "x.cdn.example"] {
            assert_eq!(below(&layers, name), expected, "{name}");
        }
    }
}

/// No rule opens the range that stands for names, nor that of the slots: they mean something else to
/// whoever would listen there.
#[test]
fn no_rule_opens_the_ranges_that_are_ours() {
    let rule = "[[rule]]\nallow = [\"198.18.0.0/15\", \"198.19.0.7\", \"10.0.0.1\"]\n";
    let policy = compiled(&[(Layer::Sandbox, rule)]);
    for (text, passes) in [("198.18.0.9", false), ("198.19.0.7", false), ("10.0.0.1", true)] {
        let address = text.parse().expect("address");
        let evidence = Evidence::Address;
        let flow = Flow { protocol: Protocol::Tcp, port: 22, destination: Some(address), evidence };
        let Verdict::Pass(permit) = policy.judge(&flow) else { panic!("{text}: a rule names it") };
        let own = OwnAddresses::default();
        let dialled = policy.judge_address(&permit, address, &own);
        assert_eq!(dialled.is_ok(), passes, "{text}");
    }
}
