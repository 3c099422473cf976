//! One layer's policy, indexed: names by their suffixes in a hash map, addresses by their prefixes.
//!
//! Both maps are filled from policies only, never by what a guest sends.

use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::{IpNet, Ipv4Net};

use crate::compile::ranges::Ranges;
use crate::document::{
    Conditions, Effect, Layer, Peer, Policy, PolicyMode, PortRange, Protocol, Rule,
};
use crate::name::{Host, Pattern};

/// A network and some ports of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Reach {
    /// The network.
    pub net: Ipv4Net,
    /// First and last port; none for every port.
    pub ports: Option<(u16, u16)>,
}

/// One layer, indexed.
#[derive(Debug)]
pub(crate) struct LayerIndex {
    pub(crate) layer: Layer,
    pub(crate) default: Effect,
    /// Whether it is in mode observe.
    pub(crate) observes: bool,
    names: HashMap<Box<str>, Named>,
    /// Most labels of any key of `names`: longer suffixes of a guest's name are not looked up.
    depth: usize,
    any: Vec<Clause>,
    nets: HashMap<IpNet, Vec<Clause>>,
    /// The prefix lengths that occur, for IPv4 and IPv6.
    prefixes: [Vec<u8>; 2],
    /// The ports that allow rules name for names.
    ports: Ranges,
    /// The ports on which deny rules name some names and not all, for TCP and for UDP.
    denied: [Ranges; 2],
    /// The names and zones of allow rules, labels from the last to the first, in order.
    allowed: Vec<Box<str>>,
    /// Those of them that say `always`.
    always: Vec<Box<str>>,
    /// The networks and ports that allow rules name for UDP.
    pub(crate) datagrams: Vec<Reach>,
}

/// The clauses under one name: for the name itself, and for what is below it.
#[derive(Debug, Default)]
struct Named {
    itself: Vec<Clause>,
    below: Vec<Clause>,
}

/// One peer of one rule.
#[derive(Clone, Debug)]
pub(crate) struct Clause {
    pub(crate) effect: Effect,
    /// The network, where the peer is one.
    pub(crate) net: Option<IpNet>,
    /// Whether it was found under the very name, and not under a wildcard.
    pub(crate) exact: bool,
    pub(crate) terms: Arc<Terms>,
    /// How it is shown, but for what its rule's peers share.
    head: Arc<str>,
}

/// What all peers of one rule share.
#[derive(Debug)]
pub(crate) struct Terms {
    pub(crate) conditions: Conditions,
    /// Those of the conditions.
    pub(crate) ports: Ranges,
    /// How they are shown.
    tail: Arc<str>,
}

/// A rule as it is shown: `rule[0] allow "*.github.com" ports 443`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shown {
    head: Arc<str>,
    tail: Option<Arc<str>>,
}

impl Clause {
    pub(crate) fn shown(&self) -> Shown {
        Shown { head: Arc::clone(&self.head), tail: Some(Arc::clone(&self.terms.tail)) }
    }
}

impl Shown {
    /// What is shown in place of a rule.
    pub(crate) fn instead(words: &str) -> Self {
        Self { head: words.into(), tail: None }
    }
}

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.head)?;
        self.tail.as_deref().map_or(Ok(()), |tail| f.write_str(tail))
    }
}

/// The ports of rules about names, while they are read.
#[derive(Default)]
struct Noted {
    allowed: Vec<PortRange>,
    denied: [Vec<PortRange>; 2],
}

impl Noted {
    fn note(&mut self, rule: &Rule) {
        let Conditions { ports, protocol, .. } = &rule.conditions;
        let names = || rule.peers.iter().filter(|peer| matches!(peer, Peer::Name(_)));
        if rule.effect == Effect::Allow && names().next().is_some() {
            self.allowed.extend(ports);
        }
        let every = |peer: &&Peer| matches!(peer, Peer::Name(Pattern::AnyPublic));
        if rule.effect == Effect::Allow || !names().any(|peer| !every(&peer)) {
            return;
        }
        for (denied, of) in self.denied.iter_mut().zip([Protocol::Tcp, Protocol::Udp]) {
            if protocol.is_none_or(|protocol| protocol == of) {
                denied.extend(ports);
                denied.extend(PortRange::new(1, u16::MAX).filter(|_| ports.is_empty()));
            }
        }
    }
}

impl LayerIndex {
    /// Of all the policies of one layer.
    pub(crate) fn new<'p>(layer: Layer, policies: impl IntoIterator<Item = &'p Policy>) -> Self {
        let (mut index, mut named) = (Self::empty(layer), Noted::default());
        policies.into_iter().for_each(|policy| index.add(policy, &mut named));
        index.ports = Ranges::of(&named.allowed);
        index.denied = named.denied.each_ref().map(Ranges::of);
        index.allowed.sort_unstable();
        index.always.sort_unstable();
        index
    }

    fn empty(layer: Layer) -> Self {
        Self {
            layer,
            default: Effect::Allow,
            observes: true,
            names: HashMap::new(),
            depth: 0,
            any: Vec::new(),
            nets: HashMap::new(),
            prefixes: [Vec::new(), Vec::new()],
            ports: Ranges::default(),
            denied: Default::default(),
            allowed: Vec::new(),
            always: Vec::new(),
            datagrams: Vec::new(),
        }
    }

    pub(crate) fn names_port(&self, port: u16) -> bool {
        self.ports.contains(port)
    }

    pub(crate) fn denies_names_at(&self, protocol: Protocol, port: u16) -> bool {
        let [tcp, udp] = &self.denied;
        let denied = if protocol == Protocol::Tcp { tcp } else { udp };
        denied.contains(port)
    }

    /// Whether a deny rule names this host or a zone that it is in.
    pub(crate) fn denies_some_of(&self, host: &Host) -> bool {
        self.suffixes(host).any(|(itself, named)| {
            let clauses = if itself { &named.itself } else { &named.below };
            clauses.iter().any(|clause| clause.effect == Effect::Deny)
        })
    }

    fn add(&mut self, policy: &Policy, named: &mut Noted) {
        if policy.default_effect() == Effect::Deny {
            self.default = Effect::Deny;
        }
        self.observes &= policy.mode() == PolicyMode::Observe;
        for (index, rule) in policy.rules().iter().enumerate() {
            let conditions = rule.conditions.clone();
            named.note(rule);
            if rule.effect == Effect::Allow && conditions.protocol == Some(Protocol::Udp) {
                self.datagrams.extend(reaches(rule));
            }
            let (ports, tail) = (Ranges::of(&conditions.ports), tail(rule).into());
            let terms = Arc::new(Terms { conditions, ports, tail });
            for peer in &rule.peers {
                self.insert(
                    peer,
                    Clause {
                        effect: rule.effect,
                        net: match peer {
                            Peer::Net(net) => Some(*net),
                            Peer::Name(_) => None,
                        },
                        exact: false,
                        terms: Arc::clone(&terms),
                        head: head(index, rule.effect, peer).into(),
                    },
                );
            }
        }
    }

    fn insert(&mut self, peer: &Peer, clause: Clause) {
        if let Peer::Name(Pattern::Exact(name) | Pattern::Below(name) | Pattern::Within(name)) =
            peer
            && clause.effect == Effect::Allow
        {
            let name: Box<str> = reversed(name).into();
            if clause.terms.conditions.always {
                self.always.push(name.clone());
            }
            self.allowed.push(name);
        }
        match peer {
            Peer::Name(Pattern::Exact(host)) => {
                self.under(host).itself.push(Clause { exact: true, ..clause });
            }
            Peer::Name(Pattern::Below(zone)) => self.under(zone).below.push(clause),
            Peer::Name(Pattern::Within(zone)) => {
                let named = self.under(zone);
                named.itself.push(Clause { exact: true, ..clause.clone() });
                named.below.push(clause);
            }
            Peer::Name(Pattern::AnyPublic) => self.any.push(clause),
            Peer::Net(net) => {
                let [v4, v6] = &mut self.prefixes;
                let lengths = if net.addr().is_ipv4() { v4 } else { v6 };
                if !lengths.contains(&net.prefix_len()) {
                    lengths.push(net.prefix_len());
                }
                self.nets.entry(*net).or_default().push(clause);
            }
        }
    }

    fn under(&mut self, host: &Host) -> &mut Named {
        self.depth = self.depth.max(host.as_str().split('.').count());
        self.names.entry(host.as_str().into()).or_default()
    }

    /// Shows every clause that names this host.
    pub(crate) fn named<'a>(&'a self, host: &Host, mut see: impl FnMut(&'a Clause)) {
        self.any.iter().for_each(&mut see);
        for (itself, named) in self.suffixes(host) {
            let clauses = if itself { &named.itself } else { &named.below };
            clauses.iter().for_each(&mut see);
        }
    }

    /// What there is under the suffixes of a name, and whether the suffix is the whole of it.
    fn suffixes(&self, host: &Host) -> impl Iterator<Item = (bool, &Named)> {
        let name = host.as_str();
        let cuts = name.rmatch_indices('.').map(|(at, _)| at + 1).chain([0]);
        cuts.take(self.depth)
            .filter_map(move |cut| Some((cut == 0, self.names.get(name.get(cut..)?)?)))
    }

    /// Shows every clause that names whatever is below this name.
    fn covering(&self, host: &Host) -> impl Iterator<Item = &Clause> {
        self.any.iter().chain(self.suffixes(host).flat_map(|(_, named)| &named.below))
    }

    pub(crate) fn lets_below(&self, host: &Host) -> bool {
        self.default == Effect::Allow
            || names_below(&self.allowed, host)
            || self.covering(host).any(|clause| clause.effect == Effect::Allow)
    }

    /// The same, whatever other layers lack: the platform's right alone.
    pub(crate) fn always_lets_below(&self, host: &Host) -> bool {
        self.layer == Layer::Platform
            && (names_below(&self.always, host)
                || self.covering(host).any(|clause| clause.terms.conditions.always))
    }

    /// Whether everything below this name is denied, on every port.
    pub(crate) fn shuts_below(&self, host: &Host) -> bool {
        self.covering(host).any(|Clause { effect, terms, .. }| {
            let conditions = &terms.conditions;
            *effect == Effect::Deny
                && conditions.ports.is_empty()
                && conditions.protocol != Some(Protocol::Udp)
                && !conditions.needs_requests()
        })
    }

    /// Shows every clause whose network holds this address.
    pub(crate) fn holding<'a>(&'a self, address: IpAddr, mut see: impl FnMut(&'a Clause)) {
        let [v4, v6] = &self.prefixes;
        for length in if address.is_ipv4() { v4 } else { v6 } {
            let net = IpNet::new(address, *length).ok().map(|net| net.trunc());
            net.and_then(|net| self.nets.get(&net)).into_iter().flatten().for_each(&mut see);
        }
    }
}

/// Whether one of these, reversed and in order, is below this name.
fn names_below(reversed_names: &[Box<str>], host: &Host) -> bool {
    let below = reversed(host) + ".";
    let first = reversed_names.partition_point(|name| **name < *below);
    reversed_names.get(first).is_some_and(|name| name.starts_with(&below))
}

/// The labels from the last to the first: what is below a name begins with it.
fn reversed(name: &Host) -> String {
    name.as_str().rsplit('.').collect::<Vec<_>>().join(".")
}

/// The IPv4 networks of a rule with its ports.
fn reaches(rule: &Rule) -> impl Iterator<Item = Reach> + '_ {
    let ports: Vec<_> = match rule.conditions.ports.as_slice() {
        [] => vec![None],
        ranges => ranges.iter().map(|range| Some((range.first(), range.last()))).collect(),
    };
    let nets = rule.peers.iter().filter_map(|peer| match peer {
        Peer::Net(IpNet::V4(net)) => Some(net.trunc()),
        _ => None,
    });
    nets.flat_map(move |net| ports.clone().into_iter().map(move |ports| Reach { net, ports }))
}

fn head(index: usize, effect: Effect, peer: &Peer) -> String {
    let effect = match effect {
        Effect::Allow => "allow",
        Effect::Deny => "deny",
    };
    match peer {
        Peer::Name(pattern) => format!("rule[{index}] {effect} \"{pattern}\""),
        Peer::Net(_) => format!("rule[{index}] {effect} {peer}"),
    }
}

fn tail(rule: &Rule) -> String {
    let mut out = String::new();
    if let [first, rest @ ..] = rule.conditions.ports.as_slice() {
        out = rest.iter().fold(format!(" ports {first}"), |text, port| format!("{text},{port}"));
    }
    if let Some(protocol) = rule.conditions.protocol {
        out.push(' ');
        out.push_str(protocol.as_str());
    }
    if rule.conditions.unwoken {
        out.push_str(" wake_on_data=false");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_hosts_of_a_rule_share_is_kept_once() {
        let ports: Vec<String> = (0..32).map(|n| format!("\"{0}0-{0}5\"", 1000 + n)).collect();
        let hosts: Vec<String> = (0..100).map(|n| format!("\".h{n}.example\"")).collect();
        let text =
            format!("[[rule]]\nallow = [{}]\nports = [{}]\n", hosts.join(","), ports.join(","));
        let policy = Policy::from_toml(&text).expect("a policy");
        let index = LayerIndex::new(Layer::Sandbox, [&policy]);
        let (mut clauses, mut own) = (Vec::new(), 0);
        for n in 0..100 {
            let host = Host::parse(&format!("h{n}.example")).expect("a host");
            index.named(&host, |clause| clauses.push(clause));
        }
        let first = clauses.first().expect("a clause");
        assert!(clauses.iter().all(|clause| Arc::ptr_eq(&clause.terms, &first.terms)));
        clauses.iter().for_each(|clause| own += clause.head.len());
        assert!(own < 100 * 40, "{own} bytes");
        let shown = first.shown().to_string();
        assert!(shown.starts_with("rule[0] allow \".h0.example\" ports 10000-10005,"), "{shown}");
    }
}
