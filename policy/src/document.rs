//! The policy language: what a person writes, in TOML or JSON, read whole or refused whole.

use serde::{Deserialize, Serialize};

/// Which layer a policy belongs to. A flow passes when no layer denies it and each lets it through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Layer {
    /// The operator's, over everything on the node.
    Platform,
    /// A tenant's.
    Tenant,
    /// One sandbox's.
    Sandbox,
}

impl Layer {
    /// As shown in `explain` and in the audit.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Platform => "platform",
            Self::Tenant => "tenant",
            Self::Sandbox => "sandbox",
        }
    }
}

/// A policy document that was read and found valid. Keeps its source form, so that it can be shown.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Policy {}

/// Why a policy was refused: where, what, and the mend.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize)]
#[error("{field}: {problem}; {fix}")]
pub struct PolicyError {
    /// The field, e.g. `rule[2].allow[0]`; empty for the document.
    pub field: String,
    /// The line in the source, from 1, where it is known.
    pub line: Option<usize>,
    /// What was given, shortened to 60 characters and escaped.
    pub value: Option<String>,
    /// What is wrong.
    pub problem: String,
    /// What to write instead.
    pub fix: String,
}

impl Policy {
    /// Reads TOML.
    pub fn from_toml(_text: &str) -> Result<Self, PolicyError> {
        Ok(Self {})
    }

    /// Reads JSON: the same keys as the TOML, rules under `"rule"`.
    pub fn from_json(_text: &str) -> Result<Self, PolicyError> {
        Ok(Self {})
    }

    /// Writes it as TOML; reading that gives an equal policy.
    #[must_use]
    pub fn to_toml(&self) -> String {
        String::new()
    }

    /// Writes it as JSON; reading that gives an equal policy.
    #[must_use]
    pub fn to_json(&self) -> serde_json::Value {
        serde_json::Value::Null
    }
}
