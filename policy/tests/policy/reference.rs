//! A second, naive judge: every rule against every flow, every port for a question. Written from
//! the manual, not from the code it checks.

use std::net::IpAddr;

use policy::document::Ech;
use policy::path::Segments;
use policy::{
    Effect, Evidence, Flow, Host, Layer, Peer, Policy, PortRange, Protocol, Rule, canonical_path,
};

/// What the reference says of a flow.
#[derive(Debug, PartialEq)]
pub(crate) enum Answer {
    Name(Host),
    Address(IpAddr),
    Denied,
    /// Refused for another reason.
    Refused,
}

#[derive(Clone, Copy, PartialEq)]
enum Match {
    Yes,
    Maybe,
    No,
}

/// Judges a flow by layers, outermost first.
pub(crate) fn judge(layers: &[(Layer, &Policy)], flow: &Flow<'_>) -> Answer {
    let canonical = Flow { destination: flow.destination.map(|ip| ip.to_canonical()), ..*flow };
    match flow.evidence {
        Evidence::Question(host) => question(layers, &canonical, host),
        _ => connection(layers, &canonical),
    }
}

fn question(layers: &[(Layer, &Policy)], flow: &Flow<'_>, host: &Host) -> Answer {
    let mut answers = (1..=66).chain([80, 443, 5432, 5433, 65535]).chain(7990..8110).map(|port| {
        let flow = Flow { port, protocol: Protocol::Tcp, ..*flow };
        open(layers, &flow, Some(host), None)
    });
    let all: Vec<_> = answers.by_ref().collect();
    if all.iter().any(|answer| matches!(answer, Open::Yes { .. })) {
        return Answer::Name(host.clone());
    }
    if all.contains(&Open::Denied) { Answer::Denied } else { Answer::Refused }
}

fn connection(layers: &[(Layer, &Policy)], flow: &Flow<'_>) -> Answer {
    let names: Vec<&Host> = match &flow.evidence {
        Evidence::Tls { sni, .. } => vec![sni],
        Evidence::Request { authority, .. } => vec![authority],
        Evidence::Pinned { names, .. } => names.iter().collect(),
        _ => vec![],
    };
    let each: Vec<Open> = names.iter().map(|n| open(layers, flow, Some(n), None)).collect();
    if each.contains(&Open::Denied) {
        return Answer::Denied;
    }
    if each.contains(&Open::Maybe) {
        return Answer::Refused;
    }
    let raw_on_web =
        matches!(flow.evidence, Evidence::Pinned { .. }) && [80, 443].contains(&flow.port);
    for (name, open) in names.iter().zip(&each) {
        if let Open::Yes { by_rule } = open
            && (*by_rule || (flow.protocol == Protocol::Tcp && !raw_on_web))
        {
            return Answer::Name((*name).clone());
        }
    }
    match flow.destination {
        Some(ip) => match open(layers, flow, None, Some(ip)) {
            Open::Denied => Answer::Denied,
            Open::Yes { by_rule: true } => Answer::Address(ip),
            _ => Answer::Refused,
        },
        None => Answer::Refused,
    }
}

#[derive(Debug, PartialEq)]
enum Open {
    Yes { by_rule: bool },
    Maybe,
    Denied,
    No,
}

fn open(
    layers: &[(Layer, &Policy)],
    flow: &Flow<'_>,
    name: Option<&Host>,
    ip: Option<IpAddr>,
) -> Open {
    let matches = |rule: &Rule| {
        let peers = rule.peers.iter().filter(|peer| holds(peer, rule.effect, name, ip));
        peers.map(|peer| fits(rule, peer, flow)).fold(Match::No, |best, m| match (best, m) {
            (Match::Yes, _) | (_, Match::Yes) => Match::Yes,
            (Match::Maybe, _) | (_, Match::Maybe) => Match::Maybe,
            _ => Match::No,
        })
    };
    let rules = || layers.iter().flat_map(|(_, policy)| policy.rules());
    let denies = || rules().filter(|rule| rule.effect == Effect::Deny);
    if denies().any(|rule| matches(rule) == Match::Yes) {
        return Open::Denied;
    }
    if denies().any(|rule| matches(rule) == Match::Maybe) {
        return Open::Maybe;
    }
    let allows = |rule: &&Rule| rule.effect == Effect::Allow && matches(rule) == Match::Yes;
    let always = rules().filter(allows).any(|rule| rule.conditions.always);
    let each = layers.iter().all(|(_, policy)| {
        policy.default_effect() == Effect::Allow || policy.rules().iter().any(|r| allows(&r))
    });
    if layers.is_empty() || !(each || always) {
        return Open::No;
    }
    Open::Yes { by_rule: rules().any(|r| allows(&r)) }
}

fn holds(peer: &Peer, effect: Effect, name: Option<&Host>, ip: Option<IpAddr>) -> bool {
    match (peer, name, ip) {
        (Peer::Name(pattern), Some(host), _) => pattern.matches(host),
        (Peer::Net(net), _, Some(ip)) => {
            let inner = match ip {
                IpAddr::V6(v6) if v6.to_string().starts_with("64:ff9b::") => {
                    let [.., a, b, c, d] = v6.octets();
                    Some(IpAddr::from([a, b, c, d]))
                }
                _ => None,
            };
            let carried = effect == Effect::Deny && inner.is_some_and(|v4| net.contains(&v4));
            net.contains(&ip) || carried
        }
        _ => false,
    }
}

fn fits(rule: &Rule, peer: &Peer, flow: &Flow<'_>) -> Match {
    let c = &rule.conditions;
    let deny = rule.effect == Effect::Deny;
    let protocol = match c.protocol {
        Some(protocol) => protocol == flow.protocol,
        None => deny || flow.protocol == Protocol::Tcp,
    };
    let named = c.ports.iter().any(|range: &PortRange| range.contains(flow.port));
    if !protocol || !(named || c.ports.is_empty()) {
        return Match::No;
    }
    if c.ports.is_empty() && !deny && matches!(peer, Peer::Name(_)) {
        match (&flow.evidence, flow.port) {
            (Evidence::Tls { .. }, 443) | (Evidence::Request { .. }, 80) => {}
            (Evidence::Question(_), 80 | 443) => {}
            _ => return Match::No,
        }
    }
    let hidden = matches!(flow.evidence, Evidence::Tls { ech: true, .. } | Evidence::Pinned { .. });
    if c.ech == Ech::Deny && hidden {
        return Match::No;
    }
    if c.methods.is_empty() && c.paths.is_empty() {
        return Match::Yes;
    }
    match flow.evidence {
        Evidence::Request { method, path, .. } => {
            let method = c.methods.is_empty() || c.methods.iter().any(|m| m == method);
            let path = c.paths.is_empty()
                || match canonical_path(path) {
                    Some(path) => {
                        let bare: Vec<_> = path
                            .split('/')
                            .map(|part| part.split(';').next().unwrap_or(""))
                            .collect();
                        let [written, bare] = [path.clone(), bare.join("/")].map(|path| {
                            let path = Segments::of(path);
                            c.paths.iter().any(|glob| glob.matches(&path))
                        });
                        if deny { written || bare } else { written && bare }
                    }
                    None => deny,
                };
            if method && path { Match::Yes } else { Match::No }
        }
        Evidence::Question(_) => {
            if deny {
                Match::No
            } else {
                Match::Yes
            }
        }
        _ => {
            if deny {
                Match::Maybe
            } else {
                Match::No
            }
        }
    }
}
