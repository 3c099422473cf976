//! Who is meant: names of sandboxes and tenants, and the numbers that fence.
//!
//! Names are DNS labels, because a sandbox's name becomes a label of its preview address. Nothing
//! here ever comes from the guest: identity is the tap a frame arrived on.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::net::Slot;

/// A name that is not a usable label.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "{got:?} is not a name: use 1 to 40 of a-z, 0-9 and '-', starting and ending with a letter or digit"
)]
pub struct LabelError {
    /// What was given, cut to 60 characters.
    pub got: String,
}

macro_rules! label {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(Arc<str>);

        impl $name {
            /// The name as text: 1 to 40 of `a-z0-9-`.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $name {
            type Error = LabelError;
            fn try_from(text: String) -> Result<Self, LabelError> {
                parse_label(&text).map(Self)
            }
        }

        impl std::str::FromStr for $name {
            type Err = LabelError;
            fn from_str(text: &str) -> Result<Self, LabelError> {
                parse_label(text).map(Self)
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> Self {
                name.0.as_ref().to_owned()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

label! {
    /// The name of a sandbox, unique on an installation.
    SandboxName
}

label! {
    /// The name of a snapshot, unique on an installation.
    SnapshotName
}

label! {
    /// The name of a tenant.
    TenantName
}

/// The version of a policy, a secret or a route. Moves by one at each write.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Revision(pub u64);

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Who is speaking on a tap: fixed for as long as a slot is attached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject {
    /// The sandbox.
    pub sandbox: SandboxName,
    /// Its tenant.
    pub tenant: TenantName,
    /// Moves on clone, rollback, cold boot and re-creation, not on a wake.
    pub incarnation: u64,
    /// The slot it holds, and so its tap and internal address.
    pub slot: Slot,
}

fn parse_label(text: &str) -> Result<Arc<str>, LabelError> {
    let bytes = text.as_bytes();
    let inner = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit() || *b == b'-';
    let edge = |b: Option<&u8>| b.is_some_and(|b| *b != b'-');
    if bytes.len() <= 40 && bytes.iter().all(inner) && edge(bytes.first()) && edge(bytes.last()) {
        return Ok(Arc::from(text));
    }
    Err(LabelError { got: text.chars().take(60).collect() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandbox_name_is_a_dns_label() {
        for good in ["a", "demo", "a-1", "0", &"x".repeat(40)] {
            assert!(good.parse::<SandboxName>().is_ok(), "{good}");
        }
        for bad in ["", "-a", "a-", "A", "a_b", "a.b", "ä", &"x".repeat(41), "a\n"] {
            assert!(bad.parse::<SandboxName>().is_err(), "{bad:?}");
        }
    }
}
