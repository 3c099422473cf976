//! The policies in force, in their layers: what was written for each scope, what it was made into,
//! and the turns that writes of one tenant take.
//!
//! A policy is made ready to judge once, for its scope; what is in force for a sandbox shares it.
//! Nothing is waited for while what is in force is locked.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use fault::Point;
use policy::document::{Effect, Rule};
use policy::{Compiled, CompiledLayer, Layer, OwnAddresses, Peer, Policy, PolicyMode, Protocol};
use policy::{Revision, SandboxName, TenantName};
use serde::Serialize;
use tokio::sync::{Mutex as Turn, OwnedMutexGuard};

use crate::error::Error;
use crate::store::{PolicyRow, Record, Store};
use crate::threads::{aside, locked};

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

    /// Whether a sandbox is under it.
    pub(crate) fn is_over(&self, sandbox: &SandboxName, of: &TenantName) -> bool {
        match self {
            Self::Platform => true,
            Self::Tenant(tenant) => tenant == of,
            Self::Sandbox(name) => name == sandbox,
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

/// A policy as it was written, and ready to judge. Clones share both.
#[derive(Clone, Debug)]
pub(crate) struct Written {
    policy: Arc<Policy>,
    layer: CompiledLayer,
}

impl Written {
    /// Makes a policy ready to judge, which takes long where it is large.
    pub(crate) fn new(policy: Policy, scope: &Scope) -> Self {
        let layer = CompiledLayer::new(scope.layer(), &policy);
        Self { policy: Arc::new(policy), layer }
    }
}

/// What a scope holds.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    pub(crate) revision: Revision,
    /// What is wrong with what the journal has, where it cannot be read: the scope is closed then.
    written: Result<Written, Arc<str>>,
}

impl Held {
    pub(crate) fn new(written: Written, revision: Revision) -> Self {
        Self { revision, written: Ok(written) }
    }

    fn unreadable(scope: &Scope, problem: String, revision: Revision) -> Self {
        tracing::error!(%scope, problem, "policy not readable: closed until it is written anew");
        Self { revision, written: Err(problem.into()) }
    }

    pub(crate) fn policy(&self, scope: &Scope) -> Result<Arc<Policy>, Error> {
        match &self.written {
            Ok(written) => Ok(Arc::clone(&written.policy)),
            Err(problem) => {
                let (scope, problem) = (scope.to_string(), problem.to_string());
                Err(Error::Unreadable { scope, problem })
            }
        }
    }
}

/// What is asked of the policy of a scope.
#[derive(Clone, Debug)]
pub(crate) enum Edit {
    Replace(Policy),
    Add(Rule),
    Mode(PolicyMode),
}

impl Edit {
    /// As the audit tells it.
    fn told(&self) -> Result<String, Error> {
        Ok(match self {
            Self::Replace(policy) => format!("policy of {} rules set", policy.rules().len()),
            Self::Add(rule) => {
                let alone = Policy::default().with_rule(rule.clone()).map_err(Error::Policy)?;
                let written = alone.to_json().pointer("/rule/0").map(ToString::to_string);
                format!("policy rule added: {}", written.unwrap_or_default())
            }
            Self::Mode(mode) => format!("policy mode {mode} set"),
        })
    }
}

/// A write that was checked and is ready to be journalled and put in force.
#[derive(Debug)]
pub(crate) struct Draft {
    pub(crate) written: Written,
    /// As it is journalled; none for the very policy that is in force.
    pub(crate) document: Option<String>,
    pub(crate) notes: Vec<String>,
    /// For the audit.
    pub(crate) what: String,
}

impl Draft {
    /// Does an edit to what a scope holds, which takes long where that is large. `own` are the
    /// addresses of this host.
    pub(crate) fn new(
        edit: Edit,
        scope: &Scope,
        held: Option<&Held>,
        own: &OwnAddresses,
    ) -> Result<Self, Error> {
        let what = edit.told()?;
        let before = || held.map_or_else(|| Ok(Arc::default()), |held| held.policy(scope));
        let policy = match edit {
            Edit::Replace(policy) => policy,
            Edit::Add(rule) => before()?.with_rule(rule).map_err(Error::Policy)?,
            Edit::Mode(mode) => before()?.with_mode(mode),
        };
        check(&policy, scope)?;
        let notes = notes(&policy, &before().unwrap_or_default(), scope, own);
        let in_force = held.and_then(|held| held.written.as_ref().ok());
        if let Some(same) = in_force.filter(|written| *written.policy == policy) {
            let what = what + ", unchanged";
            return Ok(Self { written: same.clone(), document: None, notes, what });
        }
        let document = Some(policy.to_json().to_string());
        let written = Written::new(policy, scope);
        fault::at(Point::PolicyCompiled);
        Ok(Self { written, document, notes, what })
    }
}

/// All policies of the node.
#[derive(Debug)]
pub(crate) struct Policies {
    store: Store,
    held: Mutex<BTreeMap<Scope, Held>>,
    /// One write of a tenant at a time, its sandboxes' among them, and one of the platform. There is
    /// a lock for each tenant of which anything was ever written.
    turns: Mutex<BTreeMap<Option<TenantName>, Arc<Turn<()>>>>,
}

/// What is in force, while nobody else changes it. A guard, not to be kept while anything is waited for.
#[derive(Debug)]
pub(crate) struct InForce<'a>(MutexGuard<'a, BTreeMap<Scope, Held>>);

impl Policies {
    /// Reads what the journal has. A policy that cannot be read closes its scope, and no other; so
    /// does a sandbox's own that is not there, since each has had one from the first. One of which
    /// nobody can say whose it is might close anything: there is no start without it.
    pub(crate) async fn open(store: Store) -> Result<Self, Error> {
        let rows = store.policies().await?;
        let of = store.clone();
        let held = move || rows.into_iter().map(|row| held(row, &of)).collect();
        let mut held: BTreeMap<Scope, Held> = aside::<Result<_, Error>>(held).await??;
        for Record { name, .. } in store.sandboxes().await? {
            let scope = Scope::Sandbox(name);
            let lost = || Held::unreadable(&scope, "there is none".to_owned(), Revision::default());
            held.entry(scope.clone()).or_insert_with(lost);
        }
        Ok(Self { store, held: Mutex::new(held), turns: Mutex::default() })
    }

    /// Waits until no other write of this tenant, or else of the platform, is under way.
    pub(crate) async fn turn(&self, tenant: Option<&TenantName>) -> OwnedMutexGuard<()> {
        let turn = Arc::clone(locked(&self.turns).entry(tenant.cloned()).or_default());
        turn.lock_owned().await
    }

    pub(crate) fn in_force(&self) -> InForce<'_> {
        InForce(locked(&self.held))
    }

    /// Forgets a sandbox and its policy. Of one whose `process` may be there its slot is remembered.
    pub(crate) async fn forget(&self, record: &Record, process: bool) -> Result<(), Error> {
        // A write under way would leave its policy behind.
        let _turn = self.turn(Some(&record.tenant)).await;
        self.store.forget(&record.name, process).await?;
        locked(&self.held).remove(&Scope::Sandbox(record.name.clone()));
        Ok(())
    }
}

impl InForce<'_> {
    /// What a scope holds, if anything was written for it.
    pub(crate) fn of(&self, scope: &Scope) -> Option<Held> {
        self.0.get(scope).cloned()
    }

    /// Holds what is in the journal already. Gives what was held before: freeing it takes its time, too.
    pub(crate) fn hold(&mut self, scope: Scope, held: Held) -> Option<Held> {
        self.0.insert(scope, held)
    }

    /// What a sandbox is judged by: the layers that exist. One that cannot be read may have denied
    /// anything; then there is none, and everything is denied.
    pub(crate) fn over(&self, name: &SandboxName, tenant: &TenantName) -> Compiled {
        let found: Vec<Held> = scopes(name, tenant).iter().filter_map(|s| self.of(s)).collect();
        let revision = found.iter().map(|held| held.revision).max().unwrap_or_default();
        let layers = found.into_iter().map(|held| held.written.map(|written| written.layer));
        let layers: Vec<CompiledLayer> = layers.collect::<Result<_, _>>().unwrap_or_default();
        Compiled::of(&layers, revision)
    }

    /// The outermost scope over a sandbox whose policy cannot be read, if there is one.
    pub(crate) fn unreadable(&self, name: &SandboxName, tenant: &TenantName) -> Option<Scope> {
        let closed = |scope: &Scope| self.0.get(scope).is_some_and(|held| held.written.is_err());
        scopes(name, tenant).into_iter().find(closed)
    }
}

/// The scopes over a sandbox, outermost first.
fn scopes(name: &SandboxName, tenant: &TenantName) -> [Scope; 3] {
    [Scope::Platform, Scope::Tenant(tenant.clone()), Scope::Sandbox(name.clone())]
}

/// What a row of the journal comes to.
fn held(row: PolicyRow, store: &Store) -> Result<(Scope, Held), Error> {
    let PolicyRow { id, scope: text, policy, revision } = row;
    let unknown = || store.unreadable("policy", id, &text, "it is the policy of no scope there is");
    let scope = Scope::parse(&text).ok_or_else(unknown)?;
    let held = match policy {
        Ok(policy) => Held::new(Written::new(policy, &scope), revision),
        Err(problem) => Held::unreadable(&scope, problem, revision),
    };
    Ok((scope, held))
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
        let unopened = shut && scope.layer() != Layer::Platform;
        for peer in rule.peers.iter().filter(|peer| unopened && is_host_service(peer)) {
            notes.push(format!(
                "rule[{at}] allows {peer}, which stays closed: link-local and metadata addresses \
                 are opened only by a rule of the platform policy that names them"
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

fn is_host_service(peer: &Peer) -> bool {
    let Peer::Net(net) = peer else { return false };
    policy::host_service(net.network()).is_some_and(|block| block.contains(net))
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
        for peer in ["169.254.169.254", "169.254.0.0/16", "fe80::/10", "fd00:ec2::254"] {
            let notes = noted(peer);
            assert!(notes[0].contains("only by a rule of the platform"), "{peer}: {notes:?}");
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
