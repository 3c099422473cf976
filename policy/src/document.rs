//! The policy language: what a person writes, in TOML or JSON, read whole or refused whole.
//!
//! An allow rule is narrow where it says nothing, a deny rule wide: see `docs/policy.md`. What a
//! `Policy` holds has been checked; there is no other way to make one.

mod check;
mod error;
mod read;
mod source;
mod terms;
mod write;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use crate::document::error::PolicyError;
pub use crate::document::terms::{Conditions, Ech, Effect, Peer, PolicyMode, PortRange, Protocol};

/// Most bytes of a document.
pub const MAX_DOCUMENT: usize = 1 << 20;
/// Most patterns, addresses and networks of a policy.
pub const MAX_PEERS: usize = 10_000;
/// Most rules of one policy that name the same pattern, address or network.
pub const MAX_RULES_PER_PEER: usize = 32;
/// Most rules of one policy over one name: its own, and those of the wildcards above it.
pub const MAX_RULES_OVER_NAME: usize = 128;
/// Most that the paths of rules over one name may weigh, in bytes that are compared to judge one
/// request, where looking for a part along its path stands for 512.
pub const MAX_PATHS_OVER_NAME: usize = 1 << 14;
/// Most ports, methods or paths of one rule.
pub const MAX_CONDITIONS: usize = 32;

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
    /// All of them, outermost first.
    pub const ALL: [Self; 3] = [Self::Platform, Self::Tenant, Self::Sandbox];

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

impl fmt::Display for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A policy document that was read and found valid. The empty one denies everything.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    default: Effect,
    mode: PolicyMode,
    rules: Vec<Rule>,
}

/// One rule: what it does, to whom, and under which conditions.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    /// Whether it lets through or refuses.
    pub effect: Effect,
    /// The hosts, addresses and networks it names; at least one.
    pub peers: Vec<Peer>,
    /// What else must hold.
    pub conditions: Conditions,
    /// A remark for people.
    pub comment: Option<String>,
}

impl Default for Policy {
    fn default() -> Self {
        Self { default: Effect::Deny, mode: PolicyMode::Enforce, rules: Vec::new() }
    }
}

impl Policy {
    /// Reads TOML.
    pub fn from_toml(text: &str) -> Result<Self, PolicyError> {
        let source = source::toml(text)?;
        read::policy(&source).and_then(Self::bounded).map_err(|error| error.located(&source))
    }

    /// Reads JSON: the same keys as the TOML, rules under `"rule"`.
    pub fn from_json(text: &str) -> Result<Self, PolicyError> {
        source::bounded(text)?;
        let source = source::json(text)?;
        read::policy(&source).and_then(Self::bounded).map_err(|error| error.located(&source))
    }

    /// Reads JSON that `to_json` wrote, however long: what was taken once must not be refused later.
    pub fn from_written(text: &str) -> Result<Self, PolicyError> {
        let source = source::json(text)?;
        read::policy(&source).map_err(|error| error.located(&source))
    }

    /// The line, from 1, on which a field such as `rule[2].always` stands in a TOML document: for what
    /// is refused after it was read.
    #[must_use]
    pub fn line_in_toml(text: &str, field: &str) -> Option<usize> {
        source::toml(text).ok()?.line_of(field)
    }

    /// The same in a JSON document.
    #[must_use]
    pub fn line_in_json(text: &str, field: &str) -> Option<usize> {
        source::json(text).ok()?.line_of(field)
    }

    /// What happens to a flow that no rule matches.
    #[must_use]
    pub fn default_effect(&self) -> Effect {
        self.default
    }

    /// What happens to what it refuses.
    #[must_use]
    pub fn mode(&self) -> PolicyMode {
        self.mode
    }

    /// The same policy in another mode.
    #[must_use]
    pub fn with_mode(&self, mode: PolicyMode) -> Self {
        Self { mode, ..self.clone() }
    }

    /// The rules, in the order of the document; an index is the number in `rule[n]`.
    #[must_use]
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// This policy with one rule more, last. Refused as a document with that rule would be.
    pub fn with_rule(&self, rule: Rule) -> Result<Self, PolicyError> {
        let mut rules = self.rules.clone();
        rules.push(rule);
        Self::checked(self.default, self.mode, rules).and_then(Self::bounded)
    }

    /// Whether it may stand in this layer: `always` is the platform's alone, and the platform's
    /// policy is always enforced.
    pub fn check_layer(&self, layer: Layer) -> Result<(), PolicyError> {
        if layer == Layer::Platform && self.mode == PolicyMode::Observe {
            return Err(PolicyError::new(
                "mode",
                format!("does not belong in a {layer} policy, which is always enforced"),
                "leave it out; set it in the policy of a sandbox or a tenant",
            )
            .with_value("observe"));
        }
        let always = self.rules.iter().position(|rule| rule.conditions.always);
        match always {
            Some(index) if layer != Layer::Platform => Err(PolicyError::new(
                format!("rule[{index}].always"),
                format!("does not belong in a {layer} policy"),
                "leave it out; only the platform policy names hosts that are always allowed",
            )
            .with_value("true")),
            _ => Ok(()),
        }
    }

    /// What its writer may not expect of it, one sentence a rule: a rule that needs requests is
    /// closed over TLS, because nobody sees a request inside it.
    #[must_use]
    pub fn notes(&self) -> Vec<String> {
        let numbered = self.rules.iter().enumerate();
        let closed = numbered.filter(|(_, rule)| {
            let ports = &rule.conditions.ports;
            rule.effect == Effect::Allow
                && rule.conditions.needs_requests()
                && (ports.is_empty() || ports.iter().any(|range| range.contains(443)))
        });
        let note = |(at, _): (usize, &Rule)| {
            format!(
                "rule[{at}] names methods or paths: clear-text HTTP is judged by them, TLS to its \
                 hosts is refused as undecidable"
            )
        };
        closed.map(note).collect()
    }

    /// Writes it as TOML; reading that gives an equal policy.
    #[must_use]
    pub fn to_toml(&self) -> String {
        write::toml(self)
    }

    /// Writes it as JSON; reading that gives an equal policy.
    #[must_use]
    pub fn to_json(&self) -> serde_json::Value {
        write::json(self)
    }

    fn checked(default: Effect, mode: PolicyMode, rules: Vec<Rule>) -> Result<Self, PolicyError> {
        check::rules(&rules)?;
        Ok(Self { default, mode, rules })
    }

    /// Refuses what would be too long when written back, in either mode: escapes may double it.
    fn bounded(self) -> Result<Self, PolicyError> {
        let length = self.with_mode(PolicyMode::Observe).to_json().to_string().len();
        if length <= MAX_DOCUMENT {
            return Ok(self);
        }
        let problem = format!("it has {length} bytes as JSON, more than {MAX_DOCUMENT}");
        let fix = "use wildcards or networks in place of long lists, and shorter comments";
        Err(PolicyError::new("", problem, fix))
    }
}

impl Serialize for Policy {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        self.to_json().serialize(s)
    }
}

impl Rule {
    /// A rule for these peers without conditions.
    #[must_use]
    pub fn new(effect: Effect, peers: Vec<Peer>) -> Self {
        Self { effect, peers, conditions: Conditions::default(), comment: None }
    }
}
