//! Layers of policies made into one value that is judged in time independent of their size.

use std::net::IpAddr;
use std::sync::Arc;

use arc_swap::ArcSwap;

use crate::class::OwnAddresses;
use crate::document::{Layer, Policy};
use crate::id::Revision;
use crate::judge::{Denial, Dialable, Flow, Permit, Verdict};
use crate::reason::Code;

/// Policies of one sandbox, in their layers, ready to judge.
#[derive(Clone, Debug, Default)]
pub struct Compiled {
    revision: Revision,
}

impl Compiled {
    /// Compiles layers. A layer that is absent lets everything through that the others let through;
    /// with no layer at all everything is denied.
    #[must_use]
    pub fn new(_layers: &[(Layer, &Policy)], revision: Revision) -> Self {
        Self { revision }
    }

    /// The revision this was compiled from.
    #[must_use]
    pub fn revision(&self) -> Revision {
        self.revision
    }

    /// Judges a flow.
    #[must_use]
    pub fn judge(&self, _flow: &Flow<'_>) -> Verdict {
        Verdict::Deny(Denial::because(Code::NoRule, self.revision))
    }

    /// Judges one address that the permit's target has. Every address is judged before it is
    /// dialled, and by the resolver before it is told to a guest.
    pub fn judge_address(
        &self,
        _permit: &Permit,
        _address: IpAddr,
        _own: &OwnAddresses,
    ) -> Result<Dialable, Denial> {
        Err(Denial::because(Code::PrivateAddress, self.revision))
    }
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
