//! The one decision: may this flow leave?
//!
//! Only this module makes a `Permit`, and only a permit opens a way out. `Undecidable` closes.

use std::net::{IpAddr, SocketAddr};

use crate::class::OwnAddresses;
use crate::document::Layer;
use crate::id::Revision;
use crate::name::Host;
use crate::reason::Code;

/// The transport of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

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
    /// Bytes of another protocol, or a server that speaks first: the names this sandbox was told for
    /// the address. Only rules that name the port explicitly count.
    Pinned(&'a [Host]),
    /// No name at all: only address rules count.
    Address,
}

/// The answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It may leave, under this permit.
    Pass(Permit),
    /// It may not.
    Deny(Denial),
    /// It cannot be judged with this evidence, and so closes. The denial says what was missing.
    Undecidable(Denial),
}

/// A refusal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Denial {
    /// Why.
    pub code: Code,
    /// The layer that refused.
    pub layer: Option<Layer>,
    /// The rule that refused, as `explain` prints it; none when no rule matched.
    pub rule: Option<String>,
    /// The revision it was judged by.
    pub revision: Revision,
}

/// How the flow is carried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// TLS passed through unopened.
    Splice,
    /// HTTP, request by request.
    Requests,
    /// Bytes as they are.
    Raw,
    /// A DNS answer.
    Answer,
}

/// The right to open one connection. Only `judge` makes one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Permit {
    pub(crate) target: Target,
    pub(crate) port: u16,
    pub(crate) protocol: Protocol,
    pub(crate) mode: Mode,
    pub(crate) layer: Layer,
    pub(crate) rule: String,
    pub(crate) revision: Revision,
}

/// What a permit is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// This name, resolved by us.
    Name(Host),
    /// This address, because an address rule names it.
    Address(IpAddr),
}

/// The right to send to one address: what `dial` takes. Only `judge_address` makes one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dialable(SocketAddr);

impl Permit {
    /// What it is for.
    #[must_use]
    pub fn target(&self) -> &Target {
        &self.target
    }
    /// The port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }
    /// The transport.
    #[must_use]
    pub fn protocol(&self) -> Protocol {
        self.protocol
    }
    /// How the flow is carried.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.mode
    }
    /// The innermost layer that allowed it.
    #[must_use]
    pub fn layer(&self) -> Layer {
        self.layer
    }
    /// The rule that allowed it, as `explain` prints it.
    #[must_use]
    pub fn rule(&self) -> &str {
        &self.rule
    }
    /// The revision it was judged by.
    #[must_use]
    pub fn revision(&self) -> Revision {
        self.revision
    }
}

impl Dialable {
    /// Where to connect.
    #[must_use]
    pub fn address(self) -> SocketAddr {
        self.0
    }
}

impl Denial {
    /// A refusal for a reason that is not a rule's.
    #[must_use]
    pub fn because(code: Code, revision: Revision) -> Self {
        Self { code, layer: None, rule: None, revision }
    }
}

#[expect(unused, reason = "replaced by the real one")]
fn own(_: &OwnAddresses) {}
