//! An address of which a name was forgotten that some rule denies: closed where that could be, and nowhere
//! else.

use std::net::IpAddr;

use policy::{
    Compiled, Evidence, Flow, Host, Layer, Policy, PolicyMode, Protocol, Revision, Verdict,
};

const RULES: &str = r#"
[[rule]]
allow = ["10.0.0.0/8"]
[[rule]]
allow = ["10.0.0.0/8"]
protocol = "udp"
[[rule]]
allow = ["db.example.com"]
ports = [5432, 22]
[[rule]]
deny = ["*.example.com"]
ports = [5432]
protocol = "tcp"
[[rule]]
deny = ["*.example.com"]
ports = [123]
[[rule]]
deny = ["*"]
ports = [25]
"#;

fn judged(compiled: &Compiled, protocol: Protocol, port: u16, name: &str, all: bool) -> String {
    let names: Vec<Host> = Host::parse(name).into_iter().collect();
    let destination = Some("10.1.2.3".parse::<IpAddr>().expect("an address"));
    let evidence = Evidence::Pinned { names: &names, all };
    match compiled.judge(&Flow { protocol, port, destination, evidence }) {
        Verdict::Pass(_) => "pass".to_owned(),
        Verdict::Deny(denial) => denial.code.to_string(),
        Verdict::Undecidable(denial) => format!("{}, by {:?}", denial.code, denial.layer),
    }
}

/// Promise 26. Attack C07.
#[test]
fn where_a_denied_name_was_forgotten_its_ports_are_closed_and_no_others() {
    let policy = Policy::from_toml(RULES).expect("a policy");
    let compiled = Compiled::new(&[(Layer::Sandbox, &policy)], Revision(1));
    let (tcp, udp) = (Protocol::Tcp, Protocol::Udp);
    for (protocol, port, name, expected) in [
        (tcp, 5432, "", "undecidable, by Some(Sandbox)"),
        (tcp, 5432, "b.example.org", "undecidable, by Some(Sandbox)"),
        (tcp, 5432, "a.example.com", "rule"),
        (tcp, 22, "", "pass"),
        (tcp, 22, "db.example.com", "pass"),
        (tcp, 124, "", "pass"),
        (udp, 123, "", "undecidable, by Some(Sandbox)"),
        (udp, 5432, "", "pass"),
        // What every name is denied does not depend on which.
        (tcp, 25, "", "pass"),
        (tcp, 25, "b.example.org", "rule"),
    ] {
        assert_eq!(judged(&compiled, protocol, port, name, false), expected, "{port} {name}");
        if expected.starts_with("undecidable") {
            assert_eq!(judged(&compiled, protocol, port, name, true), "pass", "control: {port}");
        }
    }
}

#[test]
fn a_layer_that_only_observes_closes_nothing_for_a_name_that_was_forgotten() {
    let policy = Policy::from_toml(RULES).expect("a policy").with_mode(PolicyMode::Observe);
    let compiled = Compiled::new(&[(Layer::Sandbox, &policy)], Revision(1));
    assert_eq!(judged(&compiled, Protocol::Tcp, 5432, "", false), "pass");
}
