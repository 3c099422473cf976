//! The policies in force, in their layers, and the order in which a change takes effect:
//! checked whole, journalled, swapped, open flows judged again, and only then answered.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use policy::{Compiled, Layer, Policy, Revision, SandboxName, TenantName};
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PolicyChange {
    /// The revision now in force.
    pub revision: Revision,
    /// Sandboxes it applies to.
    pub sandboxes: usize,
    /// Open flows that were judged again.
    pub checked: usize,
    /// Of those, the ones that are now denied and were cut.
    pub cut: usize,
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
