//! The resolver as one sandbox may use it, for its questions and for its connections alike: what it
//! asks upstream under a wildcard is paid from its allowance, and so many lookups are under way at once.
//!
//! Judges nothing; whoever asks has a permit for the name. Never more than [`MAX_LOOKUPS`] at a time.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use policy::{Host, Permit};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;

use crate::allowance::{Allowance, Names};
use crate::chain::Family;
use crate::error::Error;
use crate::resolver::{Answer, Resolver};

/// Lookups of one sandbox under way at once, those of its questions and its connections together.
const MAX_LOOKUPS: usize = 64;

/// One sandbox's way to the resolver. Clones share one allowance and one bound on lookups.
#[derive(Clone, Debug)]
pub struct Asker {
    resolver: Resolver,
    allowance: Arc<Mutex<Allowance>>,
    lookups: Arc<Semaphore>,
}

impl Asker {
    /// A way to `resolver` with a whole allowance.
    #[must_use]
    pub fn new(resolver: Resolver, names: Names) -> Self {
        let allowance = Allowance::new(names, Instant::now());
        Self {
            resolver,
            allowance: Arc::new(Mutex::new(allowance)),
            lookups: Arc::new(Semaphore::new(MAX_LOOKUPS)),
        }
    }

    /// The addresses of a name that `permit` lets through; see [`Resolver::addresses`]. Where as many
    /// lookups as may be are under way, it waits for its turn as long as a lookup may take.
    ///
    /// # Errors
    /// Those of a lookup; [`Error::OverAllowance`], [`Error::TooMany`] and, for names that are never
    /// public ([`is_local`]), [`Error::NoSuchName`]: nobody was asked.
    pub async fn addresses(
        &self,
        permit: &Permit,
        host: &Host,
        family: Family,
    ) -> Result<Arc<Answer>, Error> {
        self.look_up(permit, host, family, Some(self.resolver.timeout())).await
    }

    /// The same, but what has no turn at once fails at once.
    pub(crate) async fn addresses_now(
        &self,
        permit: &Permit,
        host: &Host,
        family: Family,
    ) -> Result<Arc<Answer>, Error> {
        self.look_up(permit, host, family, None).await
    }

    async fn look_up(
        &self,
        permit: &Permit,
        host: &Host,
        family: Family,
        patience: Option<Duration>,
    ) -> Result<Arc<Answer>, Error> {
        if is_local(host) {
            return Err(Error::NoSuchName { host: host.clone() });
        }
        if let Some(remembered) = self.resolver.remembered(host, family).await {
            return remembered;
        }
        let Some(_turn) = self.turn(patience).await else {
            return Err(Error::TooMany { host: host.clone() });
        };
        // Somebody else may have asked for it while this waited.
        if !permit.is_listed() && !self.resolver.knows(host, family) && !self.spend(host) {
            return Err(Error::OverAllowance { host: host.clone() });
        }
        self.resolver.addresses(host, family).await
    }

    async fn turn(&self, patience: Option<Duration>) -> Option<SemaphorePermit<'_>> {
        match patience {
            None => self.lookups.try_acquire().ok(),
            Some(patience) => timeout(patience, self.lookups.acquire()).await.ok()?.ok(),
        }
    }

    fn spend(&self, host: &Host) -> bool {
        let mut allowance = self.allowance.lock().unwrap_or_else(PoisonError::into_inner);
        allowance.spend(host, Instant::now())
    }
}

/// Names that never mean a public host: single labels, and the special-use names.
pub(crate) fn is_local(host: &Host) -> bool {
    !host.as_str().contains('.') || is_special_use(host)
}

/// The special-use domains (RFC 6761, 6762, 7686, 8375, 9476) and `internal`, and everything below.
/// `arpa` is here because reverse names tell an outsider what a guest looks at, and a guest nothing
/// that it may dial.
pub(crate) fn is_special_use(host: &Host) -> bool {
    const LOCAL: [&str; 7] = ["alt", "arpa", "internal", "invalid", "local", "localhost", "onion"];
    host.as_str().rsplit('.').next().is_some_and(|last| LOCAL.contains(&last))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn special_use_names_and_single_labels_are_local() {
        let local = |text: &str| is_local(&Host::parse(text).expect(text));
        for name in ["localhost", "a.localhost", "printer.local", "metadata.google.internal"] {
            assert!(local(name), "{name}");
        }
        for name in ["db", "1.0.168.192.in-addr.arpa", "router.home.arpa", "x.onion"] {
            assert!(local(name), "{name}");
        }
        for name in ["example.com", "local.example.com", "xlocal.net", "internal.example.org"] {
            assert!(!local(name), "{name}");
        }
    }
}
