//! What holds for every policy and every flow.

use std::net::IpAddr;

use policy::document::Ech;
use policy::path::PathGlob;
use policy::reason::Code;
use policy::{
    AddressClass, Compiled, CompiledLayer, Effect, Evidence, Flow, Host, Layer, OwnAddresses, Peer,
    Policy, PolicyMode, Protocol, Revision, Rule, Target, Verdict, explain,
};
use proptest::prelude::*;
use proptest::sample::{select, subsequence};

use crate::reference::{Answer, judge};

const HOSTS: &[&str] = &["ex.org", "a.ex.org", "b.a.ex.org", "other.net-x.org", "localhost"];
#[rustfmt::skip]
const PEERS: &[&str] = &[
    "ex.org", "a.ex.org", "b.a.ex.org", "*.ex.org", "*.a.ex.org", ".ex.org", ".a.ex.org", "*",
    "other.net-x.org", "203.0.113.0/24", "203.0.113.7", "10.0.0.0/8", "8.8.8.0/24", "0.0.0.0/0",
    "2606:4700::/32", "::/0", "64:ff9b::/96",
];
const ADDRESSES: &[&str] = &[
    "203.0.113.7",
    "10.1.2.3",
    "8.8.8.8",
    "1.1.1.1",
    "2606:4700::1",
    "::ffff:8.8.8.8",
    "64:ff9b::808:808",
    "127.0.0.1",
];
const PORTS: &[&str] = &["443", "80", "5432", "8000-8100", "1-65535", "1-442"];
const PATHS: &[&str] = &["/", "/v1/**", "/v1/*", "/a", "/a;*", "/*/a"];

/// A flow that owns its parts.
#[derive(Clone, Debug)]
struct Owned {
    kind: u8,
    protocol: Protocol,
    port: u16,
    destination: Option<IpAddr>,
    hosts: Vec<Host>,
    ech: bool,
    method: &'static str,
    path: &'static str,
}

impl Owned {
    fn flow(&self) -> Flow<'_> {
        let host = &self.hosts[0];
        let evidence = match self.kind {
            0 => Evidence::Question(host),
            1 => Evidence::Tls { sni: host, ech: self.ech },
            2 => Evidence::Request { authority: host, method: self.method, path: self.path },
            3 => Evidence::Pinned { names: &self.hosts, all: true },
            4 => Evidence::Pinned { names: &[], all: true },
            _ => Evidence::Address,
        };
        let Self { protocol, port, destination, .. } = *self;
        Flow { protocol, port, destination, evidence }
    }
}

fn flows() -> impl Strategy<Value = Owned> {
    let host = select(HOSTS).prop_map(|text| Host::parse(text).expect("host"));
    (
        0..6u8,
        prop_oneof![4 => Just(Protocol::Tcp), 1 => Just(Protocol::Udp)],
        select(vec![80, 443, 443, 5432, 8001, 22]),
        proptest::option::of(select(ADDRESSES).prop_map(|text| text.parse().expect("address"))),
        proptest::collection::vec(host, 1..3),
        any::<bool>(),
        select(vec!["GET", "POST", "get"]),
        select(vec!["/", "/v1/a", "/v1/a/b", "/%76%31/a", "/a//b", "/x/../a", "/a;x", "/v1;x/a"]),
    )
        .prop_map(|(kind, protocol, port, destination, hosts, ech, method, path)| Owned {
            kind,
            protocol,
            port,
            destination,
            hosts,
            ech,
            method,
            path,
        })
}

fn rules(effect: Option<Effect>, always: bool) -> impl Strategy<Value = Rule> {
    let effect = match effect {
        Some(effect) => Just(effect).boxed(),
        None => prop_oneof![2 => Just(Effect::Allow), 1 => Just(Effect::Deny)].boxed(),
    };
    (
        effect,
        subsequence(PEERS, 1..4),
        prop_oneof![1 => Just(vec![]), 1 => subsequence(PORTS, 1..3)],
        prop_oneof![3 => Just(None), 1 => Just(Some(Protocol::Tcp)), 1 => Just(Some(Protocol::Udp))],
        prop_oneof![3 => Just(vec![]), 1 => Just(vec!["POST".to_owned()])],
        prop_oneof![3 => Just(vec![]), 1 => subsequence(PATHS, 1..3)],
        prop_oneof![3 => Just(Ech::Allow), 1 => Just(Ech::Deny)],
        prop_oneof![2 => Just(false), 1 => Just(always)],
        prop_oneof![3 => Just(false), 1 => Just(true)],
        proptest::option::of("[ -~é\n\"\\\\]{0,10}"),
    )
        .prop_map(|(effect, peers, ports, protocol, methods, paths, ech, always, unwoken, comment)| {
            let peers = peers.iter().map(|peer| peer.parse().expect("peer")).collect();
            let mut rule = Rule::new(effect, peers);
            rule.conditions.ports = ports.iter().map(|port| port.parse().expect("port")).collect();
            rule.conditions.protocol = protocol;
            rule.conditions.methods = methods;
            rule.conditions.paths =
                paths.iter().map(|path| PathGlob::parse(path).expect("path")).collect();
            if effect == Effect::Allow {
                rule.conditions.ech = ech;
                rule.conditions.always = always;
                rule.conditions.unwoken = unwoken && protocol != Some(Protocol::Udp);
            }
            rule.comment = comment;
            rule
        })
}

/// The rules, without those that the ones before refuse.
fn policy(default: Effect, rules: impl IntoIterator<Item = Rule>) -> Policy {
    let empty = match default {
        Effect::Allow => Policy::from_toml("default = \"allow\"").expect("policy"),
        Effect::Deny => Policy::default(),
    };
    rules.into_iter().fold(empty, |policy, rule| policy.with_rule(rule).unwrap_or(policy))
}

fn policies(always: bool) -> impl Strategy<Value = Policy> {
    (
        prop_oneof![2 => Just(Effect::Deny), 1 => Just(Effect::Allow)],
        proptest::collection::vec(rules(None, always), 0..6),
    )
        .prop_map(|(default, rules)| policy(default, rules))
}

fn layers() -> impl Strategy<Value = Vec<(Layer, Policy)>> {
    let option = proptest::option::of;
    (option(policies(true)), option(policies(false)), option(policies(false))).prop_map(
        |(platform, tenant, sandbox)| {
            let all =
                [(Layer::Platform, platform), (Layer::Tenant, tenant), (Layer::Sandbox, sandbox)];
            all.into_iter().filter_map(|(layer, policy)| Some((layer, policy?))).collect()
        },
    )
}

/// The same, with each layer but the platform's in one mode or the other.
fn observing() -> impl Strategy<Value = Vec<(Layer, Policy)>> {
    (layers(), any::<[bool; 2]>()).prop_map(|(mut layers, [tenant, sandbox])| {
        for (layer, policy) in &mut layers {
            let observes = match layer {
                Layer::Platform => false,
                Layer::Tenant => tenant,
                Layer::Sandbox => sandbox,
            };
            if observes {
                *policy = policy.with_mode(PolicyMode::Observe);
            }
        }
        layers
    })
}

/// What a layer in mode observe comes to where it would refuse: a rule for everything.
const EVERYTHING: &str = "default = \"allow\"\n[[rule]]\nallow = [\"*\", \"0.0.0.0/0\", \"::/0\"]\n\
                          ports = [\"1-65535\"]\n";

fn mapped(
    layers: &[(Layer, Policy)],
    observed: impl Fn(&Policy) -> Policy,
) -> Vec<(Layer, Policy)> {
    let one = |(layer, policy): &(Layer, Policy)| match policy.mode() {
        PolicyMode::Enforce => (*layer, policy.clone()),
        PolicyMode::Observe => (*layer, observed(policy)),
    };
    layers.iter().map(one).collect()
}

fn borrowed(layers: &[(Layer, Policy)]) -> Vec<(Layer, &Policy)> {
    layers.iter().map(|(layer, policy)| (*layer, policy)).collect()
}

fn verdict(layers: &[(Layer, Policy)], flow: &Flow<'_>) -> Verdict {
    Compiled::new(&borrowed(layers), Revision(1)).judge(flow)
}

/// What of a verdict may not depend on the order of the rules.
fn gist(verdict: &Verdict) -> Result<Target, Code> {
    match verdict {
        Verdict::Pass(permit) => Ok(permit.target().clone()),
        Verdict::Deny(denial) | Verdict::Undecidable(denial) => Err(denial.code),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn judge_says_what_a_naive_reading_of_every_rule_says(layers in layers(), flow in flows()) {
        let flow = flow.flow();
        let expected = judge(&borrowed(&layers), &flow);
        let got = match gist(&verdict(&layers, &flow)) {
            Ok(Target::Name(host)) => Answer::Name(host),
            Ok(Target::Address(address)) => Answer::Address(address),
            Err(Code::Rule) => Answer::Denied,
            Err(_) => Answer::Refused,
        };
        prop_assert_eq!(got, expected);
    }

    #[test]
    fn layers_that_are_compiled_one_by_one_judge_as_those_that_are_compiled_together(
        layers in observing(),
        flow in flows(),
    ) {
        let one = |(layer, policy): &(Layer, Policy)| CompiledLayer::new(*layer, policy);
        let apart: Vec<CompiledLayer> = layers.iter().rev().map(one).collect();
        let apart = Compiled::of(&apart, Revision(1)).judge(&flow.flow());
        prop_assert_eq!(apart, verdict(&layers, &flow.flow()));
    }

    /// Promise 74.
    #[test]
    fn what_may_wake_a_sandbox_decides_nothing_else(layers in layers(), flow in flows()) {
        let loud: Vec<_> = layers.iter().map(|(layer, old)| {
            let rules = old.rules().iter().cloned().map(|mut rule| {
                rule.conditions.unwoken = false;
                rule
            });
            (*layer, policy(old.default_effect(), rules))
        }).collect();
        let (said, unsaid) = (verdict(&layers, &flow.flow()), verdict(&loud, &flow.flow()));
        prop_assert_eq!(gist(&said), gist(&unsaid));
        if let Verdict::Pass(permit) = unsaid {
            prop_assert!(permit.wakes());
        }
    }

    /// Promise 26. Attack F06.
    #[test]
    fn deny_beats_allow_whatever_the_order(
        layers in layers(),
        flow in flows(),
        order in any::<proptest::sample::Index>(),
    ) {
        let turned: Vec<_> = layers.iter().rev().map(|(layer, old)| {
            let mut rules = old.rules().to_vec();
            if !rules.is_empty() {
                let by = order.index(rules.len());
                rules.rotate_left(by);
                rules.reverse();
            }
            (*layer, policy(old.default_effect(), rules))
        }).collect();
        let (before, after) = (verdict(&layers, &flow.flow()), verdict(&turned, &flow.flow()));
        prop_assert_eq!(gist(&before), gist(&after));
    }

    #[test]
    fn a_deny_more_never_opens_and_an_allow_more_never_closes(
        layers in layers(),
        flow in flows(),
        at in any::<proptest::sample::Index>(),
        deny in rules(Some(Effect::Deny), false),
        allow in rules(Some(Effect::Allow), false),
    ) {
        prop_assume!(!layers.is_empty());
        let flow = flow.flow();
        let before = gist(&verdict(&layers, &flow));
        let with = |rule| {
            let mut layers = layers.clone();
            let changed = at.index(layers.len());
            layers[changed].1 = layers[changed].1.with_rule(rule).ok()?;
            Some(gist(&verdict(&layers, &flow)))
        };
        if let Some(after) = with(deny) {
            prop_assert!(before.is_ok() || after.is_err(), "{:?} then {:?}", before, after);
        }
        if let Some(after) = with(allow) {
            prop_assert!(before.is_err() || after.is_ok(), "{:?} then {:?}", before, after);
        }
    }

    #[test]
    fn what_may_be_dialled_is_public_or_named_and_never_denied(layers in layers(), flow in flows()) {
        let compiled = Compiled::new(&borrowed(&layers), Revision(1));
        let own = OwnAddresses::new(["1.1.1.1".parse().expect("address")]);
        let Verdict::Pass(permit) = compiled.judge(&flow.flow()) else { return Ok(()) };
        for text in ADDRESSES {
            let address: IpAddr = text.parse().expect("address");
            let Ok(dialable) = compiled.judge_address(&permit, address, &own) else { continue };
            let address = address.to_canonical();
            prop_assert_eq!(dialable.address().ip(), address);
            prop_assert_eq!(dialable.address().port(), permit.port());
            if let Target::Address(only) = permit.target() {
                prop_assert_eq!(*only, address);
            }
            let rules = || layers.iter().flat_map(|(_, policy)| policy.rules());
            let nets = |effect| rules().filter(move |rule| rule.effect == effect).flat_map(|rule| {
                let peers = rule.peers.iter();
                peers.filter_map(move |peer| match peer {
                    Peer::Net(net) if net.contains(&address) => Some((rule, *net)),
                    _ => None,
                })
            });
            for (rule, _) in nets(Effect::Deny) {
                prop_assert!(!rule.conditions.ports.is_empty() || rule.conditions.protocol.is_some());
            }
            if AddressClass::of(address, &own) != AddressClass::Public {
                prop_assert!(nets(Effect::Allow).any(|(_, net)| net.prefix_len() >= 8), "{}", address);
            }
        }
    }

    #[test]
    fn observing_refuses_only_what_others_refuse_and_says_what_it_would_have(
        layers in observing(),
        flow in flows(),
    ) {
        let flow = flow.flow();
        let enforced = mapped(&layers, |policy| policy.with_mode(PolicyMode::Enforce));
        let open = mapped(&layers, |_| Policy::from_toml(EVERYTHING).expect("a policy"));
        let before = gist(&verdict(&enforced, &flow));
        let udp = flow.protocol == Protocol::Udp && !matches!(flow.evidence, Evidence::Question(_));
        let expected = match (&before, udp) {
            (Err(_), false) => gist(&verdict(&open, &flow)),
            _ => before.clone(),
        };
        let got = verdict(&layers, &flow);
        prop_assert_eq!(gist(&got).ok(), expected.ok());
        if let Verdict::Pass(permit) = got {
            prop_assert_eq!(permit.would_deny().map(|denial| denial.code), before.err());
        }
    }

    #[test]
    fn observing_opens_no_special_purpose_address(layers in observing(), flow in flows()) {
        let compiled = Compiled::new(&borrowed(&layers), Revision(1));
        let enforced = mapped(&layers, |policy| policy.with_mode(PolicyMode::Enforce));
        let enforced = Compiled::new(&borrowed(&enforced), Revision(1));
        let own = OwnAddresses::new(["1.1.1.1".parse().expect("address")]);
        let Verdict::Pass(permit) = compiled.judge(&flow.flow()) else { return Ok(()) };
        for text in ADDRESSES {
            let address: IpAddr = text.parse().expect("address");
            let told = compiled.judge_address(&permit, address, &own).is_ok();
            let would = enforced.judge_address(&permit, address, &own).is_ok();
            if AddressClass::of(address, &own) == AddressClass::Public {
                prop_assert!(told || !would, "{} is closed", address);
                let noted = compiled.would_deny(&permit, address, &own).is_some();
                prop_assert!(!told || would || noted, "{} is not noted", address);
            } else {
                prop_assert_eq!(told, would, "{}", address);
            }
        }
    }

    #[test]
    fn a_name_with_something_below_that_passes_exists(layers in observing()) {
        let compiled = Compiled::new(&borrowed(&layers), Revision(1));
        for child in HOSTS {
            let host = Host::parse(child).expect("host");
            let evidence = Evidence::Question(&host);
            let flow = Flow { protocol: Protocol::Tcp, port: 0, destination: None, evidence };
            if let Verdict::Pass(_) = compiled.judge(&flow) {
                for (dot, _) in child.match_indices('.') {
                    let parent = Host::parse(&child[dot + 1..]).expect("host");
                    prop_assert!(compiled.passes_below(&parent), "{} of {}", parent, child);
                }
            }
        }
    }

    #[test]
    fn an_explanation_agrees_with_the_verdict(layers in observing(), flow in flows()) {
        let compiled = Compiled::new(&borrowed(&layers), Revision(7));
        let own = OwnAddresses::default();
        let told = explain(&compiled, &flow.flow(), &own);
        let verdict = match compiled.judge(&flow.flow()) {
            Verdict::Pass(permit) => match *permit.target() {
                Target::Address(address) => compiled
                    .judge_address(&permit, address, &own)
                    .map_or_else(Verdict::Deny, |_| Verdict::Pass(permit)),
                Target::Name(_) => Verdict::Pass(permit),
            },
            refused => refused,
        };
        match verdict {
            Verdict::Pass(permit) => {
                prop_assert_eq!(told.code, None);
                prop_assert_eq!(told.rule, Some(permit.rule()));
                prop_assert_eq!(told.layer, Some(permit.layer()));
            }
            Verdict::Deny(denial) | Verdict::Undecidable(denial) => {
                prop_assert_eq!(told.code, Some(denial.code));
                prop_assert_eq!(told.rule, denial.rule);
                prop_assert_eq!(told.target, None);
            }
        }
        prop_assert!(!told.sentences.is_empty());
    }

    #[test]
    fn a_policy_is_read_back_equal_from_toml_and_json(
        policy in policies(true),
        observes in any::<bool>(),
    ) {
        let mode = if observes { PolicyMode::Observe } else { PolicyMode::Enforce };
        let policy = policy.with_mode(mode);
        prop_assert_eq!(Policy::from_toml(&policy.to_toml()), Ok(policy.clone()));
        prop_assert_eq!(Policy::from_json(&policy.to_json().to_string()), Ok(policy.clone()));
    }

    #[test]
    fn no_text_breaks_the_reader(text in "(\\[\\[rule\\]\\]\n|allow = |\\[|\\]|\"|a\\.ex\\.org|mode = \"observe\"|\\{|\\}|:|,|default|\\PC|\n){0,20}") {
        for read in [Policy::from_toml(&text), Policy::from_json(&text)] {
            if let Err(error) = read {
                prop_assert!(!error.problem.is_empty() && !error.fix.is_empty());
            }
        }
    }
}

#[test]
fn an_address_that_the_platform_always_lets_out_is_dialled_whatever_other_layers_leave_out() {
    let policy = |text: &str| Policy::from_toml(text).expect("a policy");
    let platform = "default = \"allow\"\n[[rule]]\nallow = [\"8.8.8.0/24\", \"10.1.0.0/16\"]\n";
    let (always, tenant) = (policy(&format!("{platform}always = true\n")), Policy::default());
    let denies = policy("[[rule]]\ndeny = [\"8.8.8.8\"]\n");
    let (plain, own) = (policy(platform), OwnAddresses::default());
    for address in ["8.8.8.8", "10.1.2.3"].map(|text| text.parse().expect("an address")) {
        let (evidence, destination) = (Evidence::Address, Some(address));
        let flow = Flow { protocol: Protocol::Tcp, port: 22, destination, evidence };
        let judged = |platform, tenant| {
            let layers = [(Layer::Platform, platform), (Layer::Tenant, tenant)];
            let compiled = Compiled::new(&layers, Revision(1));
            let Verdict::Pass(permit) = compiled.judge(&flow) else { return false };
            compiled.judge_address(&permit, address, &own).is_ok()
        };
        assert!(judged(&always, &tenant), "{address}");
        assert!(!judged(&plain, &tenant), "{address}: the tenant leaves it out");
    }
    let destination = Some("8.8.8.8".parse().expect("an address"));
    let evidence = Evidence::Address;
    let flow = Flow { protocol: Protocol::Tcp, port: 22, destination, evidence };
    let both = [(Layer::Platform, &always), (Layer::Tenant, &denies)];
    let denied = Compiled::new(&both, Revision(1)).judge(&flow);
    assert!(matches!(denied, Verdict::Deny(_)), "a deny still holds: {denied:?}");
}
