//! What must hold between the parts of a policy, whoever put them together.
//!
//! Runs in time proportional to the document (times a logarithm): policies come from tenants.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::Hash;

use crate::document::{
    Conditions, Ech, Effect, MAX_CONDITIONS, MAX_PATHS_OVER_NAME, MAX_PEERS, MAX_RULES_OVER_NAME,
    MAX_RULES_PER_PEER, Peer, PolicyError, PortRange, Protocol, Rule,
};
use crate::name::Pattern;
use crate::path::PathGlob;

/// Checks rules one by one, then against one another.
pub(crate) fn rules(rules: &[Rule]) -> Result<(), PolicyError> {
    let peers: usize = rules.iter().map(|rule| rule.peers.len()).sum();
    if peers > MAX_PEERS {
        let problem = format!("{peers} patterns and networks are more than {MAX_PEERS}");
        let fix = "use wildcards or wider networks";
        return Err(PolicyError::new("rule", problem, fix));
    }
    for (index, rule) in rules.iter().enumerate() {
        alone(rule).map_err(|mut error| {
            error.field = format!("rule[{index}].{}", error.field);
            error
        })?;
    }
    together(rules)?;
    over_one_name(rules)
}

fn alone(rule: &Rule) -> Result<(), PolicyError> {
    let effect = key(rule.effect);
    let Conditions { ports, protocol, methods, paths, ech, always, unwoken } = &rule.conditions;
    if rule.peers.is_empty() {
        return Err(PolicyError::new(effect, "is empty", "name a host, an address or a network"));
    }
    let few = |field, len| match len {
        0..=MAX_CONDITIONS => Ok(()),
        _ => {
            let problem = format!("has {len} entries, more than {MAX_CONDITIONS}");
            Err(PolicyError::new(field, problem, "split the rule"))
        }
    };
    few("ports", ports.len())?;
    few("methods", methods.len())?;
    few("paths", paths.len())?;
    once("methods", methods)?;
    once("paths", paths)?;
    once(effect, &rule.peers)?;
    if let Some((at, method)) = methods.iter().enumerate().find(|(_, m)| !is_method(m)) {
        let fix = "write an upper-case token, as in \"GET\"";
        let field = format!("methods[{at}]");
        return Err(PolicyError::new(field, "is not a request method", fix).with_value(method));
    }
    if rule.effect == Effect::Deny && (*ech != Ech::Allow || *always) {
        let field = if *always { "always" } else { "ech" };
        return Err(PolicyError::new(field, "belongs to an allow rule", "leave it out"));
    }
    if *unwoken && (rule.effect == Effect::Deny || *protocol == Some(Protocol::Udp)) {
        let problem = match rule.effect {
            Effect::Deny => "belongs to an allow rule",
            Effect::Allow => "belongs to a rule for TCP: no datagram wakes a sandbox",
        };
        let error = PolicyError::new("wake_on_data", problem, "leave it out");
        return Err(error.with_value("false"));
    }
    for (at, peer) in rule.peers.iter().enumerate() {
        let wrong = |problem, fix| {
            let error = PolicyError::new(format!("{effect}[{at}]"), problem, fix);
            Err(error.with_value(&peer.to_string()))
        };
        match peer {
            Peer::Name(_) if *protocol == Some(Protocol::Udp) => {
                return wrong("is a name in a rule for UDP", "name an address or a network");
            }
            Peer::Net(_) if rule.conditions.needs_requests() => {
                return wrong(
                    "is an address in a rule with methods or paths",
                    "name hosts: requests are judged by the name they carry",
                );
            }
            _ => {}
        }
    }
    Ok(())
}

/// Two rules with the same effect on the same peer, ports, protocol, methods and paths.
fn together(rules: &[Rule]) -> Result<(), PolicyError> {
    let mut kinds = HashMap::new();
    let mut taken: HashMap<_, BTreeMap<u16, (u16, usize)>> = HashMap::new();
    let mut naming: HashMap<&Peer, usize> = HashMap::new();
    for (index, rule) in rules.iter().enumerate() {
        let next = kinds.len();
        let kind = *kinds.entry(kind(rule)).or_insert(next);
        for (at, peer) in rule.peers.iter().enumerate() {
            let field = || format!("rule[{index}].{}[{at}]", key(rule.effect));
            let count = naming.entry(peer).or_default();
            *count += 1;
            if *count > MAX_RULES_PER_PEER {
                let problem = format!("is named by more than {MAX_RULES_PER_PEER} rules");
                let error = PolicyError::new(field(), problem, "join the rules");
                return Err(error.with_value(&peer.to_string()));
            }
            let ports = taken.entry((kind, peer)).or_default();
            for range in in_force(rule, peer) {
                let before = ports.range(..=range.last()).next_back();
                if let Some((_, (last, other))) = before
                    && *last >= range.first()
                {
                    return Err(overlap(field(), index, *other, peer));
                }
                ports.insert(range.first(), (range.last(), index));
            }
        }
    }
    Ok(())
}

/// Every rule over a name, its own and those of wildcards above it, is looked at to judge it, and every
/// path of theirs: a tenant may not make that long.
fn over_one_name(rules: &[Rule]) -> Result<(), PolicyError> {
    let (mut itself, mut below) = (HashMap::<&str, Load>::new(), HashMap::<&str, Load>::new());
    let mut any = Load::default();
    for rule in rules {
        let one = Load::of(rule);
        for peer in &rule.peers {
            match peer {
                Peer::Name(Pattern::Exact(host)) => {
                    itself.entry(host.as_str()).or_default().add(one)
                }
                Peer::Name(Pattern::Below(zone)) => {
                    below.entry(zone.as_str()).or_default().add(one)
                }
                Peer::Name(Pattern::Within(zone)) => {
                    itself.entry(zone.as_str()).or_default().add(one);
                    below.entry(zone.as_str()).or_default().add(one);
                }
                Peer::Name(Pattern::AnyPublic) => any.add(one),
                Peer::Net(_) => {}
            }
        }
    }
    let load = |loads: &HashMap<&str, Load>, name| loads.get(name).copied().unwrap_or_default();
    for (index, rule) in rules.iter().enumerate() {
        for (at, peer) in rule.peers.iter().enumerate() {
            let mut whole = any;
            match peer {
                Peer::Net(_) => continue,
                Peer::Name(Pattern::AnyPublic) => {}
                Peer::Name(Pattern::Exact(name) | Pattern::Below(name) | Pattern::Within(name)) => {
                    let name = name.as_str();
                    let zones = name.match_indices('.').filter_map(|(dot, _)| name.get(dot + 1..));
                    zones.for_each(|zone| whole.add(load(&below, zone)));
                    whole.add(load(&itself, name).max(load(&below, name)));
                }
            }
            whole.check().map_err(|(problem, fix)| {
                let field = format!("rule[{index}].{}[{at}]", key(rule.effect));
                PolicyError::new(field, problem, fix).with_value(&peer.to_string())
            })?;
        }
    }
    Ok(())
}

/// What there is over a name: rules, and what their paths weigh.
#[derive(Clone, Copy, Default)]
struct Load {
    rules: usize,
    paths: usize,
}

impl Load {
    fn of(rule: &Rule) -> Self {
        Self { rules: 1, paths: rule.conditions.paths.iter().map(PathGlob::weight).sum() }
    }

    fn add(&mut self, more: Self) {
        self.rules += more.rules;
        self.paths += more.paths;
    }

    fn max(self, other: Self) -> Self {
        Self { rules: self.rules.max(other.rules), paths: self.paths.max(other.paths) }
    }

    /// What is too much of it, and what to do.
    fn check(self) -> Result<(), (String, &'static str)> {
        let Self { rules, paths } = self;
        if rules > MAX_RULES_OVER_NAME {
            let problem = format!("has more than {MAX_RULES_OVER_NAME} rules over it");
            return Err((problem, "join the rules of the wildcards above it"));
        }
        if paths > MAX_PATHS_OVER_NAME {
            let problem =
                format!("has paths over it that weigh {paths}, more than {MAX_PATHS_OVER_NAME}");
            let fix = "write fewer or shorter 'paths': one weighs its bytes, and 512 more for each \
                       segment between two '**' and where a segment has two '*'";
            return Err((problem, fix));
        }
        Ok(())
    }
}

fn overlap(field: String, index: usize, other: usize, peer: &Peer) -> PolicyError {
    if index == other {
        let fix = "name each port once";
        return PolicyError::new(format!("rule[{index}].ports"), "has a port twice", fix);
    }
    let problem = format!("is already in rule[{other}] for the same ports");
    PolicyError::new(field, problem, "remove one, or join the rules").with_value(&peer.to_string())
}

/// What two rules must share to be duplicates where their ports overlap.
fn kind(rule: &Rule) -> (Effect, Option<Protocol>, Vec<&str>, Vec<&str>) {
    let Conditions { protocol, methods, paths, .. } = &rule.conditions;
    let protocol = match rule.effect {
        Effect::Allow => Some(protocol.unwrap_or(Protocol::Tcp)),
        Effect::Deny => *protocol,
    };
    let mut methods: Vec<&str> = methods.iter().map(String::as_str).collect();
    let mut paths: Vec<&str> = paths.iter().map(|path| path.as_str()).collect();
    methods.sort_unstable();
    paths.sort_unstable();
    (rule.effect, protocol, methods, paths)
}

fn in_force(rule: &Rule, peer: &Peer) -> Vec<PortRange> {
    let implied: &[(u16, u16)] = match (rule.effect, peer) {
        _ if !rule.conditions.ports.is_empty() => return rule.conditions.ports.clone(),
        (Effect::Allow, Peer::Name(_)) => &[(80, 80), (443, 443)],
        _ => &[(1, u16::MAX)],
    };
    implied.iter().filter_map(|(from, to)| PortRange::new(*from, *to)).collect()
}

fn once<T: Hash + Eq + ToString>(field: &str, items: &[T]) -> Result<(), PolicyError> {
    let mut seen = HashSet::new();
    match items.iter().enumerate().find(|(_, item)| !seen.insert(*item)) {
        None => Ok(()),
        Some((at, item)) => {
            let error = PolicyError::new(format!("{field}[{at}]"), "is named twice", "remove one");
            Err(error.with_value(&item.to_string()))
        }
    }
}

/// A token (RFC 9110, section 5.6.2) without lower case: methods are case-sensitive, and a rule for
/// `get` would never match what a person means.
fn is_method(method: &str) -> bool {
    let token =
        |b: u8| b.is_ascii_uppercase() || b.is_ascii_digit() || b"!#$%&'*+-.^_`|~".contains(&b);
    !method.is_empty() && method.len() <= 32 && method.bytes().all(token)
}

fn key(effect: Effect) -> &'static str {
    match effect {
        Effect::Allow => "allow",
        Effect::Deny => "deny",
    }
}
