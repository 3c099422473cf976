//! Layers of policies made into one value that is judged in time independent of their size.
//!
//! Names are found by their suffixes in a hash map, addresses by their prefixes; both maps are
//! filled from policies only, never by what a guest sends.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use arc_swap::ArcSwap;
use ipnet::IpNet;

use crate::document::{Conditions, Effect, Layer, Peer, Policy, PolicyMode, Rule};
use crate::id::Revision;
use crate::name::{Host, Pattern};

/// Policies of one sandbox, in their layers, ready to judge. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Compiled {
    layers: Arc<[Option<LayerIndex>; 3]>,
    revision: Revision,
}

impl Compiled {
    /// Compiles layers. A layer that is absent lets everything through that the others let through;
    /// with no layer at all everything is denied. A layer given twice has the rules of both; it
    /// denies by default, and is enforced, if either does and is.
    #[must_use]
    pub fn new(layers: &[(Layer, &Policy)], revision: Revision) -> Self {
        let index = |wanted: Layer| {
            let mut policies = layers.iter().filter(|(layer, _)| *layer == wanted).peekable();
            policies.peek()?;
            let mut index = LayerIndex::empty(wanted);
            policies.for_each(|(_, policy)| index.add(policy));
            index.ports = merged(std::mem::take(&mut index.ports));
            Some(index)
        };
        let layers = [Layer::Platform, Layer::Tenant, Layer::Sandbox].map(index);
        Self { layers: Arc::new(layers), revision }
    }

    /// The revision this was compiled from.
    #[must_use]
    pub fn revision(&self) -> Revision {
        self.revision
    }

    /// Whether a connection to this port could be let through by some name, whatever it is. If not,
    /// there is no need to wait for its name.
    #[must_use]
    pub fn names_port(&self, port: u16) -> bool {
        let each = || self.layers.iter().flatten();
        each().any(|index| index.layer == Layer::Platform && index.names_port(port))
            || each().all(|index| {
                index.observes || index.default == Effect::Allow || index.names_port(port)
            })
    }

    /// Whether a layer records what it refuses instead of refusing it.
    #[must_use]
    pub fn observes(&self) -> bool {
        self.layers.iter().flatten().any(|index| index.observes)
    }

    /// The layers in their order, outermost first; none for an absent one.
    pub(crate) fn layers(&self) -> &[Option<LayerIndex>; 3] {
        &self.layers
    }
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
    /// The ports that allow rules name for names: first and last, in order and disjoint.
    ports: Vec<(u16, u16)>,
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
    pub(crate) conditions: Arc<Conditions>,
    /// The rule as it is shown: `rule[0] allow "*.github.com" ports 443`.
    pub(crate) text: Arc<str>,
}

impl LayerIndex {
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
            ports: Vec::new(),
        }
    }

    fn names_port(&self, port: u16) -> bool {
        let below = self.ports.partition_point(|(first, _)| *first <= port);
        below
            .checked_sub(1)
            .and_then(|at| self.ports.get(at))
            .is_some_and(|(_, last)| port <= *last)
    }

    fn add(&mut self, policy: &Policy) {
        if policy.default_effect() == Effect::Deny {
            self.default = Effect::Deny;
        }
        self.observes &= policy.mode() == PolicyMode::Observe;
        for (index, rule) in policy.rules().iter().enumerate() {
            let conditions = Arc::new(rule.conditions.clone());
            let suffix = suffix(rule);
            if rule.effect == Effect::Allow
                && rule.peers.iter().any(|peer| matches!(peer, Peer::Name(_)))
            {
                self.ports.extend(conditions.ports.iter().map(|r| (r.first(), r.last())));
            }
            for peer in &rule.peers {
                self.insert(
                    peer,
                    Clause {
                        effect: rule.effect,
                        net: match peer {
                            Peer::Net(net) => Some(*net),
                            Peer::Name(_) => None,
                        },
                        conditions: Arc::clone(&conditions),
                        text: text(index, rule.effect, peer, &suffix).into(),
                    },
                );
            }
        }
    }

    fn insert(&mut self, peer: &Peer, clause: Clause) {
        match peer {
            Peer::Name(Pattern::Exact(host)) => self.under(host).itself.push(clause),
            Peer::Name(Pattern::Below(zone)) => self.under(zone).below.push(clause),
            Peer::Name(Pattern::Within(zone)) => {
                let named = self.under(zone);
                named.itself.push(clause.clone());
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
        let name = host.as_str();
        let cuts = name.rmatch_indices('.').map(|(at, _)| at + 1).chain([0]);
        for cut in cuts.take(self.depth) {
            let Some(named) = name.get(cut..).and_then(|suffix| self.names.get(suffix)) else {
                continue;
            };
            let clauses = if cut == 0 { &named.itself } else { &named.below };
            clauses.iter().for_each(&mut see);
        }
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

/// Ranges in order, with those that meet made one.
fn merged(mut ranges: Vec<(u16, u16)>) -> Vec<(u16, u16)> {
    ranges.sort_unstable();
    ranges.dedup_by(|next, kept| {
        let meet = next.0 <= kept.1.saturating_add(1);
        if meet {
            kept.1 = kept.1.max(next.1);
        }
        meet
    });
    ranges
}

fn text(index: usize, effect: Effect, peer: &Peer, suffix: &str) -> String {
    let effect = match effect {
        Effect::Allow => "allow",
        Effect::Deny => "deny",
    };
    match peer {
        Peer::Name(pattern) => format!("rule[{index}] {effect} \"{pattern}\"{suffix}"),
        Peer::Net(_) => format!("rule[{index}] {effect} {peer}{suffix}"),
    }
}

fn suffix(rule: &Rule) -> String {
    let mut out = String::new();
    if let [first, rest @ ..] = rule.conditions.ports.as_slice() {
        out = rest.iter().fold(format!(" ports {first}"), |text, port| format!("{text},{port}"));
    }
    if let Some(protocol) = rule.conditions.protocol {
        out.push(' ');
        out.push_str(protocol.as_str());
    }
    out
}

/// The policy in force for one sandbox. Clones see the same; readers never wait.
#[derive(Clone, Debug, Default)]
pub struct PolicyHandle(Arc<ArcSwap<Compiled>>);

impl PolicyHandle {
    /// A handle that holds this policy.
    #[must_use]
    pub fn new(compiled: Compiled) -> Self {
        Self(Arc::new(ArcSwap::from_pointee(compiled)))
    }

    /// The policy in force now.
    #[must_use]
    pub fn load(&self) -> Arc<Compiled> {
        self.0.load_full()
    }

    /// Puts another in force; returns once every later `load` sees it.
    pub fn store(&self, compiled: Compiled) {
        self.0.store(Arc::new(compiled));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names_port(layers: &[(Layer, &str)], port: u16) -> bool {
        let policies: Vec<(Layer, Policy)> = layers
            .iter()
            .map(|(layer, text)| (*layer, Policy::from_toml(text).expect("a policy")))
            .collect();
        let layers: Vec<(Layer, &Policy)> = policies.iter().map(|(l, p)| (*l, p)).collect();
        Compiled::new(&layers, Revision(1)).names_port(port)
    }

    #[test]
    fn a_port_is_named_when_every_layer_names_it_or_the_platform_does() {
        let mail = "[[rule]]\nallow = [\"a.example\"]\nports = [\"20-25\", 26, 2525]\n";
        for (port, named) in [(19, false), (20, true), (26, true), (27, false), (2525, true)] {
            assert_eq!(names_port(&[(Layer::Sandbox, mail)], port), named, "{port}");
        }
        assert!(!names_port(&[(Layer::Tenant, ""), (Layer::Sandbox, mail)], 25));
        assert!(names_port(&[(Layer::Tenant, "default = \"allow\""), (Layer::Sandbox, mail)], 25));
        assert!(names_port(&[(Layer::Platform, mail), (Layer::Sandbox, "")], 25));
    }

    #[test]
    fn networks_and_denials_name_no_port() {
        for rule in ["allow = [\"203.0.113.0/24\"]", "deny = [\"a.example\"]"] {
            let text = format!("[[rule]]\n{rule}\nports = [25]\n");
            assert!(!names_port(&[(Layer::Sandbox, &text)], 25), "{rule}");
        }
    }
}
