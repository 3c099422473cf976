//! What a verb is about: a sandbox as it was found by its name, or whose policy. It stays that one,
//! whoever has the name a moment later; never looked up a second time.

use std::sync::Arc;

use policy::{SandboxName, TenantName};

use crate::driver::Handle;
use crate::policies::Scope;
use crate::store::Record;

/// A sandbox that was found. It may be gone since; nobody else's takes its place here.
#[derive(Clone, Debug)]
pub struct Found(Arc<Handle>);

impl Found {
    pub(crate) fn new(handle: Handle) -> Self {
        Self(Arc::new(handle))
    }

    pub(crate) fn handle(&self) -> &Handle {
        &self.0
    }

    pub(crate) fn record(&self) -> &Record {
        &self.0.record
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &SandboxName {
        &self.record().name
    }

    /// Whose it is.
    #[must_use]
    pub fn tenant(&self) -> &TenantName {
        &self.record().tenant
    }
}

/// Whose policy a verb is about.
#[derive(Clone, Debug)]
pub enum Holder {
    /// The platform's, over everything on the node.
    Platform,
    /// A tenant's.
    Tenant(TenantName),
    /// One sandbox's own.
    Sandbox(Found),
}

impl Holder {
    /// The scope of its policy.
    #[must_use]
    pub fn scope(&self) -> Scope {
        match self {
            Self::Platform => Scope::Platform,
            Self::Tenant(tenant) => Scope::Tenant(tenant.clone()),
            Self::Sandbox(found) => Scope::Sandbox(found.name().clone()),
        }
    }

    pub(crate) fn record(&self) -> Option<&Record> {
        match self {
            Self::Platform | Self::Tenant(_) => None,
            Self::Sandbox(found) => Some(found.record()),
        }
    }
}
