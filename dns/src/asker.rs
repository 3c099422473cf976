//! The resolver as one sandbox may use it, for its questions and for its connections alike: what it
//! asks upstream under a wildcard is paid from its allowance.
//!
//! Judges nothing; whoever asks has a permit for the name.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use policy::{Host, Permit};

use crate::allowance::{Allowance, Names};
use crate::chain::Family;
use crate::error::Error;
use crate::resolver::{Answer, Resolver};

/// One sandbox's way to the resolver. Clones share one allowance.
#[derive(Clone, Debug)]
pub struct Asker {
    resolver: Resolver,
    allowance: Arc<Mutex<Allowance>>,
}

impl Asker {
    /// A way to `resolver` with a whole allowance.
    #[must_use]
    pub fn new(resolver: Resolver, names: Names) -> Self {
        let allowance = Allowance::new(names, Instant::now());
        Self { resolver, allowance: Arc::new(Mutex::new(allowance)) }
    }

    /// The addresses of a name that `permit` lets through; see [`Resolver::addresses`].
    ///
    /// # Errors
    /// Those of a lookup, and [`Error::OverAllowance`], on which nobody was asked.
    pub async fn addresses(
        &self,
        permit: &Permit,
        host: &Host,
        family: Family,
    ) -> Result<Arc<Answer>, Error> {
        if !permit.is_listed() && !self.resolver.knows(host, family) && !self.spend(host) {
            return Err(Error::OverAllowance { host: host.clone() });
        }
        self.resolver.addresses(host, family).await
    }

    fn spend(&self, host: &Host) -> bool {
        let mut allowance = self.allowance.lock().unwrap_or_else(PoisonError::into_inner);
        allowance.spend(host, Instant::now())
    }
}
