//! The policies in force, in their layers, and the order in which a change takes effect:
//! checked whole, journalled, swapped, open flows judged again, and only then answered.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use policy::document::{Effect, Rule};
use policy::{Compiled, Layer, OwnAddresses, Peer, Policy, PolicyMode, Protocol};
use policy::{Revision, SandboxName, TenantName};
use serde::Serialize;
use tokio::sync::{Mutex, MutexGuard};

use crate::error::Error;
use crate::store::Store;

/// Whose policy.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// Over everything on the node.
    Platform,
    /// Over everything of a tenant.
    Tenant(TenantName),
    /// One sandbox's own.
    Sandbox(SandboxName),
}

impl Scope {
    /// The layer a policy of this scope is in.
    #[must_use]
    pub const fn layer(&self) -> Layer {
        match self {
            Self::Platform => Layer::Platform,
            Self::Tenant(_) => Layer::Tenant,
            Self::Sandbox(_) => Layer::Sandbox,
        }
    }

    fn parse(text: &str) -> Option<Self> {
        match text.split_once('/') {
            None => (text == "platform").then_some(Self::Platform),
            Some(("tenant", name)) => name.parse().ok().map(Self::Tenant),
            Some(("sandbox", name)) => name.parse().ok().map(Self::Sandbox),
            Some(_) => None,
        }
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Platform => f.write_str("platform"),
            Self::Tenant(name) => write!(f, "tenant/{name}"),
            Self::Sandbox(name) => write!(f, "sandbox/{name}"),
        }
    }
}

/// What a change of policy did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PolicyChange {
    /// The revision now in force.
    pub revision: Revision,
    /// Sandboxes it applies to.
    pub sandboxes: usize,
    /// Open flows that were judged again.
    pub checked: usize,
    /// Of those, the ones that are now denied and were cut.
    pub cut: usize,
    /// Flows that were cut, by this change or an earlier one, and are not over in spite of it.
    pub closing: usize,
    /// What the writer may not expect of it, one sentence each.
    pub notes: Vec<String>,
}

/// Checks a policy for a scope: rules that belong to another layer are refused.
pub(crate) fn check(policy: &Policy, scope: &Scope) -> Result<(), Error> {
    policy.check_layer(scope.layer()).map_err(Error::Policy)
}

#[derive(Clone, Debug)]
struct Versioned {
    policy: Arc<Policy>,
    revision: Revision,
}

/// All policies of the node. One lock: writes happen one after another.
#[derive(Debug)]
pub(crate) struct Policies {
    store: Store,
    held: Mutex<BTreeMap<Scope, Versioned>>,
}

/// The right to change policies, while nobody else does.
#[derive(Debug)]
pub(crate) struct Writing<'a> {
    store: &'a Store,
    held: MutexGuard<'a, BTreeMap<Scope, Versioned>>,
}

impl Policies {
    pub(crate) async fn open(store: Store) -> Result<Self, Error> {
        let mut held = BTreeMap::new();
        for (scope, policy, revision) in store.policies().await? {
            match Scope::parse(&scope) {
                Some(scope) => {
                    held.insert(scope, Versioned { policy: Arc::new(policy), revision });
                }
                None => tracing::warn!(scope, "policy of an unknown scope left alone"),
            }
        }
        Ok(Self { store, held: Mutex::new(held) })
    }

    /// The policy of a scope and its revision; an empty one at revision 0 where none was written.
    pub(crate) async fn show(&self, scope: &Scope) -> (Arc<Policy>, Revision) {
        match self.held.lock().await.get(scope) {
            Some(found) => (found.policy.clone(), found.revision),
            None => (Arc::default(), Revision::default()),
        }
    }

    pub(crate) async fn write(&self) -> Writing<'_> {
        Writing { store: &self.store, held: self.held.lock().await }
    }
}

impl Writing<'_> {
    /// The policy of a scope as it is now.
    pub(crate) fn current(&self, scope: &Scope) -> (Arc<Policy>, Revision) {
        match self.held.get(scope) {
            Some(found) => (found.policy.clone(), found.revision),
            None => (Arc::default(), Revision::default()),
        }
    }

    /// Whether this very policy is in force in a scope.
    pub(crate) fn holds(&self, scope: &Scope, policy: &Policy) -> bool {
        self.held.get(scope).is_some_and(|found| *found.policy == *policy)
    }

    /// Journals a policy and holds it; it is in force once the caller has compiled it anew.
    pub(crate) async fn set(&mut self, scope: &Scope, policy: Policy) -> Result<Revision, Error> {
        let document = policy.to_json().to_string();
        let revision = self.store.set_policy(scope.to_string(), document).await?;
        self.hold(scope.clone(), policy, revision);
        Ok(revision)
    }

    /// Holds a policy that is in the journal already.
    pub(crate) fn hold(&mut self, scope: Scope, policy: Policy, revision: Revision) {
        self.held.insert(scope, Versioned { policy: Arc::new(policy), revision });
    }

    /// Forgets a sandbox and its policy.
    pub(crate) async fn forget(&mut self, name: &SandboxName) -> Result<(), Error> {
        self.store.forget(name).await?;
        self.held.remove(&Scope::Sandbox(name.clone()));
        Ok(())
    }

    /// What is in force for a sandbox: the layers that exist, compiled.
    pub(crate) fn compile(&self, name: &SandboxName, tenant: &TenantName) -> Compiled {
        let scopes = [Scope::Platform, Scope::Tenant(tenant.clone()), Scope::Sandbox(name.clone())];
        let found: Vec<(Layer, &Versioned)> = scopes
            .iter()
            .filter_map(|scope| Some((scope.layer(), self.held.get(scope)?)))
            .collect();
        let revision = found.iter().map(|(_, held)| held.revision).max().unwrap_or_default();
        let layers: Vec<(Layer, &Policy)> =
            found.iter().map(|(layer, held)| (*layer, held.policy.as_ref())).collect();
        Compiled::new(&layers, revision)
    }
}

/// What the writer of a policy may not expect of it in place of the one `before`, one sentence
/// each. `own` are the addresses of this host.
#[must_use]
pub fn notes(policy: &Policy, before: &Policy, scope: &Scope, own: &OwnAddresses) -> Vec<String> {
    let mut notes = policy.notes();
    for (at, rule) in policy.rules().iter().enumerate() {
        let shut = rule.effect == Effect::Allow;
        for peer in rule.peers.iter().filter(|peer| shut && is_this_host(peer, own)) {
            notes.push(format!(
                "rule[{at}] allows {peer}, which stays closed: loopback and the addresses of this \
                 host are refused whatever a rule says"
            ));
        }
        notes.extend(datagram_note(rule).map(|note| format!("rule[{at}] {note}")));
    }
    match (before.mode(), policy.mode()) {
        (_, PolicyMode::Observe) => notes.push(
            "it is in mode observe: what this policy refuses passes and is only recorded"
                .to_owned(),
        ),
        (PolicyMode::Observe, PolicyMode::Enforce) => notes.push(
            "mode observe has ended: from now on this policy refuses what it does not allow"
                .to_owned(),
        ),
        (PolicyMode::Enforce, PolicyMode::Enforce) => {}
    }
    if scope.layer() == Layer::Sandbox && policy.default_effect() == Effect::Allow {
        notes.push(
            "its default is allow: every host that no rule denies is reached, on any port, and \
             what a rule denies may be reached through one of them (a proxy, a shared address, an \
             encrypted ClientHello); where a boundary is meant, deny by default and allow by rules"
                .to_owned(),
        );
    }
    if scope.layer() != Layer::Sandbox && policy.default_effect() == Effect::Deny {
        notes.push(format!(
            "its default is deny: what this {} policy does not allow is closed in every sandbox \
             below it, whatever the sandbox's own policy says",
            scope.layer()
        ));
    }
    notes
}

/// Whether a rule for this peer can only mean the host itself, which no rule opens.
fn is_this_host(peer: &Peer, own: &OwnAddresses) -> bool {
    match peer {
        Peer::Net(net) => {
            let address = net.network();
            let one = net.prefix_len() == net.max_prefix_len();
            address.is_loopback() || (one && (address.is_unspecified() || own.contains(address)))
        }
        // RFC 6761 section 6.3.
        Peer::Name(pattern) => {
            let name = pattern.to_string();
            name == "localhost" || name.ends_with(".localhost")
        }
    }
}

/// What a rule for UDP names in vain.
fn datagram_note(rule: &Rule) -> Option<&'static str> {
    let udp = rule.effect == Effect::Allow && rule.conditions.protocol == Some(Protocol::Udp);
    let ports = &rule.conditions.ports;
    if !udp {
        None
    } else if rule.peers.iter().any(|peer| matches!(peer, Peer::Net(net) if net.addr().is_ipv6())) {
        Some("names IPv6 for UDP: guests speak IPv4 only, so nothing matches that")
    } else if ports.iter().any(|range| (range.first(), range.last()) == (53, 53)) {
        Some("names port 53 for UDP: questions to any address are answered here, and never leave")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_that_can_only_mean_this_host_is_noted() {
        let scope = Scope::Sandbox("demo".parse().unwrap());
        let own = OwnAddresses::new(["203.0.113.9".parse().unwrap()]);
        let noted = |peer: &str| {
            let policy = Policy::from_toml(&format!("[[rule]]\nallow = [\"{peer}\"]\n")).unwrap();
            notes(&policy, &Policy::default(), &scope, &own)
        };
        for peer in ["127.0.0.1", "127.0.0.0/8", "::1", "203.0.113.9", "localhost", "0.0.0.0"] {
            let notes = noted(peer);
            assert!(notes[0].contains(&format!("rule[0] allows {peer}")), "{peer}: {notes:?}");
        }
        for peer in ["203.0.113.8", "203.0.113.0/24", "0.0.0.0/0", "10.0.0.0/8", "example.com"] {
            assert_eq!(noted(peer), [""; 0], "{peer}");
        }
        let deny = Policy::from_toml("[[rule]]\ndeny = [\"127.0.0.1\"]\n").unwrap();
        assert_eq!(notes(&deny, &Policy::default(), &scope, &own), [""; 0]);
    }

    #[test]
    fn a_rule_for_datagrams_that_nothing_can_match_is_taken_with_a_note() {
        let scope = Scope::Sandbox("demo".parse().unwrap());
        let told = |peers: &str, ports: &str| {
            let rule = format!("[[rule]]\nallow = [{peers}]\nprotocol = \"udp\"\n{ports}\n");
            notes(
                &Policy::from_toml(&rule).unwrap(),
                &Policy::default(),
                &scope,
                &OwnAddresses::default(),
            )
            .join(" ")
        };
        assert_eq!(told("\"192.0.2.0/24\"", ""), "");
        assert_eq!(told("\"192.0.2.0/24\"", "ports = [443, \"50-60\"]"), "");
        assert!(told("\"192.0.2.0/24\", \"2001:db8::/32\"", "").contains("rule[0] names IPv6"));
        assert!(told("\"192.0.2.0/24\"", "ports = [53]").contains("rule[0] names port 53"));
    }

    /// Attack F10. Whoever writes it is told that it is no boundary.
    #[test]
    fn a_policy_that_only_denies_is_noted_as_no_boundary() {
        let scope = Scope::Sandbox("demo".parse().unwrap());
        let told = |text: &str, scope: &Scope| {
            let own = OwnAddresses::default();
            notes(&Policy::from_toml(text).unwrap(), &Policy::default(), scope, &own)
        };
        let denies = "default = \"allow\"\n[[rule]]\ndeny = [\"evil.example\"]\n";
        let [note] = &told(denies, &scope)[..] else { panic!("one note") };
        assert!(note.contains("deny by default"), "{note}");
        assert_eq!(told(denies, &Scope::Platform), [] as [String; 0], "there it is the usual form");
        assert_eq!(told("[[rule]]\nallow = [\"a.example\"]\n", &scope), [] as [String; 0]);
    }

    #[test]
    fn a_scope_is_read_as_it_is_written() {
        for scope in [
            Scope::Platform,
            Scope::Tenant("acme".parse().unwrap()),
            Scope::Sandbox("platform".parse().unwrap()),
        ] {
            assert_eq!(Scope::parse(&scope.to_string()), Some(scope));
        }
        assert_eq!(Scope::parse("node/x"), None);
    }
}
