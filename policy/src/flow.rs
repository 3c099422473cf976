//! What is known of a flow when it is judged. Everything here was chosen by the guest.

use std::net::IpAddr;

use crate::document::Protocol;
use crate::name::Host;

/// What is known of a flow when it is judged.
#[derive(Clone, Copy, Debug)]
pub struct Flow<'a> {
    /// Its transport.
    pub protocol: Protocol,
    /// The port the guest aimed at; for a question, ignored.
    pub port: u16,
    /// The address the guest aimed at: only address rules look at it.
    pub destination: Option<IpAddr>,
    /// What its bytes say about its name.
    pub evidence: Evidence<'a>,
}

/// How a name was found.
#[derive(Clone, Copy, Debug)]
pub enum Evidence<'a> {
    /// A DNS question: passes when any port of the name could pass.
    Question(&'a Host),
    /// The server name of a TLS ClientHello.
    Tls {
        /// The (outer) server name.
        sni: &'a Host,
        /// Whether the hello carries the `encrypted_client_hello` extension.
        ech: bool,
    },
    /// One HTTP request in clear (or, later, inside interception).
    Request {
        /// Its authority's host.
        authority: &'a Host,
        /// Its method, exactly as sent.
        method: &'a str,
        /// Its path without the query, beginning with `/`.
        path: &'a str,
    },
    /// A request that turns its connection into a stream of another protocol, which the rules let
    /// through as a request already: no rule for the host may need to see requests after it.
    Upgrade(&'a Host),
    /// Bytes of another protocol, or a server that speaks first: the names this sandbox was told for
    /// the address. Only rules that name the port explicitly count. Refused if any of the names is
    /// denied on that port; otherwise the first that passes is the one that is dialled.
    Pinned {
        /// The names, in their order.
        names: &'a [Host],
        /// Whether these are all that a rule could deny. If not, it cannot be judged where a rule denies
        /// names on the port.
        all: bool,
    },
    /// No name at all: only address rules count.
    Address,
}

impl<'a> Evidence<'a> {
    /// The names to judge, in their order.
    pub(crate) fn names(&self) -> &'a [Host] {
        match *self {
            Self::Question(host)
            | Self::Upgrade(host)
            | Self::Tls { sni: host, .. }
            | Self::Request { authority: host, .. } => std::slice::from_ref(host),
            Self::Pinned { names, .. } => names,
            Self::Address => &[],
        }
    }
}
