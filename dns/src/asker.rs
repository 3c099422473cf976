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
    /// Those of a lookup; [`Error::OverAllowance`] and, for names that are never public
    /// ([`is_local`]), [`Error::NoSuchName`]: nobody was asked.
    pub async fn addresses(
        &self,
        permit: &Permit,
        host: &Host,
        family: Family,
    ) -> Result<Arc<Answer>, Error> {
        if is_local(host) {
            return Err(Error::NoSuchName { host: host.clone() });
        }
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
