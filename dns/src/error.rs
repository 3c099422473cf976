//! What can go wrong with a name. A failure says what was asked; it is shared by everybody who
//! waited for the same lookup, and so is cheap to clone.

use std::net::SocketAddr;
use std::time::Duration;

use hickory_resolver::net::NetError;
use policy::Host;

use crate::chain::Family;

/// Why there are no addresses.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The name does not exist (NXDOMAIN, RFC 2308).
    #[error("{host} does not exist")]
    NoSuchName {
        /// What was asked.
        host: Host,
    },
    /// The name exists without such an address (NODATA, RFC 2308).
    #[error("{host} has no {family} address")]
    NoAddresses {
        /// What was asked.
        host: Host,
        /// Which addresses.
        family: Family,
    },
    /// No upstream answered in time.
    #[error("no upstream resolver answered for {host} within {within:?}")]
    TimedOut {
        /// What was asked.
        host: Host,
        /// How long was waited.
        within: Duration,
    },
    /// The last upstream that was asked answered with an error, or could not be asked.
    #[error("no upstream resolver could answer for {host}")]
    Unanswered {
        /// What was asked.
        host: Host,
        /// What came of the last try.
        source: NetError,
    },
    /// The sandbox has had as many bytes of names asked as it may; nobody was asked.
    #[error("{host}: too many different names below one domain in too short a time")]
    OverAllowance {
        /// What was to be asked.
        host: Host,
    },
    /// The sandbox has as many lookups under way as it may; nobody was asked.
    #[error("{host}: too many lookups under way at once")]
    TooMany {
        /// What was to be asked.
        host: Host,
    },
    /// Lookups have as many descriptors as they may; nobody was asked.
    #[error("{host}: no descriptor is left for a lookup")]
    Exhausted {
        /// What was to be asked.
        host: Host,
    },
    /// The system's resolver configuration could not be read.
    #[error("reading the system's resolver configuration")]
    System(#[source] NetError),
    /// The system's resolver configuration names no server.
    #[error("the system's resolver configuration names no server")]
    NoUpstreams,
    /// The client of an upstream could not be set up.
    #[error("setting up the client of upstream resolver {upstream}")]
    Client {
        /// Its address.
        upstream: SocketAddr,
        /// Why not.
        source: NetError,
    },
}

impl Error {
    /// Whether a bound of ours is why there are no addresses, and not the name or an upstream.
    #[must_use]
    pub fn is_limit(&self) -> bool {
        matches!(self, Self::OverAllowance { .. } | Self::TooMany { .. } | Self::Exhausted { .. })
    }
}
