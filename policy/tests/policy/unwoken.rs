//! `wake_on_data = false`: which connections it is said of, and that it is shown. What it does is the
//! router's, and tested there.

use policy::{
    Compiled, Evidence, Flow, Host, Layer, OwnAddresses, Policy, Protocol, Revision, Verdict,
    explain,
};

fn wakes(layers: &[(Layer, &str)], evidence: Evidence<'_>, port: u16) -> (bool, Option<bool>) {
    let policies: Vec<(Layer, Policy)> = layers
        .iter()
        .map(|(layer, text)| (*layer, Policy::from_toml(text).expect("a policy")))
        .collect();
    let layers: Vec<(Layer, &Policy)> = policies.iter().map(|(l, p)| (*l, p)).collect();
    let compiled = Compiled::new(&layers, Revision(1));
    let destination = Some([203, 0, 113, 7].into());
    let flow = Flow { protocol: Protocol::Tcp, port, destination, evidence };
    let told = explain(&compiled, &flow, &OwnAddresses::default());
    let said = told.sentences.iter().any(|sentence| sentence.contains("wake_on_data = false"));
    assert_eq!(told.wake_on_data == Some(false), said, "{:?}", told.sentences);
    match compiled.judge(&flow) {
        Verdict::Pass(permit) => (permit.wakes(), told.wake_on_data),
        refused => panic!("{refused:?}"),
    }
}

/// Promise 74. As a deny does: whatever the order of rules and layers. A rule that does not match says nothing.
#[test]
fn a_connection_wakes_unless_a_rule_that_lets_it_through_says_otherwise() {
    let host = Host::parse("a.ex.org").expect("a host");
    let tls = Evidence::Tls { sni: &host, ech: false };
    let loud = "[[rule]]\nallow = [\"a.ex.org\"]\n";
    let quiet = "[[rule]]\nallow = [\"*.ex.org\"]\nwake_on_data = false\n";
    let (both, turned) = (format!("{loud}{quiet}"), format!("{quiet}{loud}"));
    let other = format!("{loud}[[rule]]\nallow = [\"b.ex.org\"]\nwake_on_data = false\n");
    let port =
        format!("{loud}[[rule]]\nallow = [\"*.ex.org\"]\nports = [22]\nwake_on_data = false\n");
    let open = "default = \"allow\"\n";
    let above = format!("{open}{quiet}");
    for (layers, expected) in [
        (vec![(Layer::Sandbox, loud)], true),
        (vec![(Layer::Sandbox, quiet)], false),
        (vec![(Layer::Sandbox, &*both)], false),
        (vec![(Layer::Sandbox, &*turned)], false),
        (vec![(Layer::Sandbox, &*other)], true),
        (vec![(Layer::Sandbox, &*port)], true),
        (vec![(Layer::Platform, open), (Layer::Sandbox, loud)], true),
        (vec![(Layer::Platform, &*above), (Layer::Sandbox, loud)], false),
        (vec![(Layer::Tenant, open), (Layer::Sandbox, quiet)], false),
    ] {
        assert_eq!(wakes(&layers, tls, 443), (expected, Some(expected)), "{layers:?}");
    }
    let question = wakes(&[(Layer::Sandbox, quiet)], Evidence::Question(&host), 0);
    assert_eq!(question, (false, None), "of an answer there is nothing to say");
    let address = "[[rule]]\nallow = [\"203.0.113.0/24\"]\nwake_on_data = false\n";
    assert!(!wakes(&[(Layer::Sandbox, address)], Evidence::Address, 5432).0);
}

#[test]
fn a_rule_that_says_so_is_shown_with_it_and_says_it_again_when_written() {
    let text = "[[rule]]\nallow = [\"a.ex.org\"]\nports = [22]\nwake_on_data = false\n";
    let policy = Policy::from_toml(text).expect("a policy");
    assert!(policy.to_toml().contains("wake_on_data = false"), "{}", policy.to_toml());
    let loud = Policy::from_toml(&text.replace("false", "true")).expect("a policy");
    assert!(!loud.to_toml().contains("wake_on_data"), "it goes without saying");
    let both = format!("{text}[[rule]]\nallow = [\"a.ex.org\"]\nports = [22]\n");
    let refused = Policy::from_toml(&both).expect_err("which of the two?").to_string();
    assert!(refused.contains("is already in rule[0]"), "{refused}");
    let compiled = Compiled::new(&[(Layer::Sandbox, &policy)], Revision(1));
    let names = [Host::parse("a.ex.org").expect("a host")];
    let evidence = Evidence::Pinned { names: &names, all: true };
    let flow = Flow { protocol: Protocol::Tcp, port: 22, destination: None, evidence };
    let Verdict::Pass(permit) = compiled.judge(&flow) else { panic!("it passes") };
    assert_eq!(permit.rule(), "rule[0] allow \"a.ex.org\" ports 22 wake_on_data=false");
}
