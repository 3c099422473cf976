//! Why something was refused: one closed set of codes, the same in DNS, TLS, HTTP, ICMP, the audit,
//! metrics and the API. A code never changes its meaning and is never removed.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! codes {
    ($($(#[doc = $doc:literal])* $name:ident = $text:literal,)*) => {
        /// A stable reason code.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(rename_all = "kebab-case")]
        pub enum Code { $($(#[doc = $doc])* $name,)* }

        impl Code {
            /// Every code, in the order of the documentation.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// The code as it is shown everywhere.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }

            /// One sentence for a person, without a full stop.
            #[must_use]
            pub const fn meaning(self) -> &'static str {
                match self { $(Self::$name => codes!(@doc $($doc)*),)* }
            }
        }
    };
    (@doc $first:literal) => { $first.trim_ascii() };
}

codes! {
    /// no rule of the policy allows it
    NoRule = "no-rule",
    /// a rule of the policy denies it
    Rule = "rule",
    /// it is allowed on other ports or another protocol only
    Port = "port",
    /// the host is allowed for other request methods only
    Method = "method",
    /// the host is allowed for other paths only
    Path = "path",
    /// the address is private, special-purpose, or belongs to this host
    PrivateAddress = "private-address",
    /// the connection carries no name to judge
    NoName = "no-name",
    /// the name is not a valid host name
    BadName = "bad-name",
    /// two names of one connection differ
    NameMismatch = "name-mismatch",
    /// what was sent does not show what the rules look at (a request inside TLS, say), or cannot be read
    Undecidable = "undecidable",
    /// the allowed name does not resolve
    Unresolvable = "unresolvable",
    /// the far side's certificate could not be verified
    UpstreamUntrusted = "upstream-untrusted",
    /// the far side cannot be reached
    UpstreamUnreachable = "upstream-unreachable",
    /// a secret was sent towards a host it is not bound to
    SecretWrongHost = "secret-wrong-host",
    /// a secret that the request needs could not be had
    SecretUnavailable = "secret-unavailable",
    /// a secret would have travelled in clear text
    SecretPlaintext = "secret-plaintext",
    /// the sandbox's egress address cannot be used
    EgressIpUnavailable = "egress-ip-unavailable",
    /// a limit of this sandbox is reached
    Limit = "limit",
    /// this protocol is not let out
    Protocol = "protocol",
    /// QUIC is not let out; clients fall back to TCP
    Quic = "quic",
    /// the rule refuses connections with an encrypted ClientHello
    Ech = "ech",
    /// the policy was tightened while the flow was open
    PolicyChanged = "policy-changed",
    /// the sandbox is asleep
    Asleep = "asleep",
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_reads_the_same_in_text_and_in_json() {
        for code in Code::ALL {
            assert_eq!(serde_json::to_string(code).expect("json"), format!("\"{code}\""));
            assert!(!code.meaning().is_empty());
        }
    }
}
