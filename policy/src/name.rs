//! Host names in one canonical form, and the patterns that name them.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// A host name: lower case, A-labels (UTS 46), no trailing dot, at most 253 bytes in labels of at
/// most 63, and not an IP address in any spelling. Two names are the same host when they are equal.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Host(Arc<str>);

/// Why a text is not a host name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NameError {
    /// Nothing there.
    #[error("is empty")]
    Empty,
    /// More than 253 bytes, or a label of more than 63.
    #[error("is too long: 253 bytes in labels of at most 63")]
    TooLong,
    /// A byte that no host name has, or an empty label.
    #[error("is not a host name")]
    Malformed,
    /// An IP address, in whatever spelling.
    #[error("is an IP address, not a name")]
    IpAddress,
}

impl Host {
    /// Reads a name in any case, with or without one trailing dot, U-labels or A-labels.
    pub fn parse(text: &str) -> Result<Self, NameError> {
        if text.is_empty() { return Err(NameError::Empty); }
        Ok(Self(Arc::from(text.to_ascii_lowercase())))
    }

    /// The canonical text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for Host {
    type Error = NameError;
    fn try_from(text: String) -> Result<Self, NameError> {
        Self::parse(&text)
    }
}

impl From<Host> for String {
    fn from(host: Host) -> Self {
        host.0.as_ref().to_owned()
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What a rule calls hosts by.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Pattern {
    /// `x`: this name only.
    Exact(Host),
    /// `*.x`: every name below x, at any depth, not x itself.
    Below(Host),
    /// `.x`: x and every name below it.
    Within(Host),
    /// `*`: any public name.
    AnyPublic,
}
