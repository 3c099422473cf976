//! A policy back as a document.

use serde::Serialize;

use crate::document::{Ech, Effect, Policy, PolicyMode, PortRange, Protocol, Rule};

#[derive(Serialize)]
struct Document {
    default: Effect,
    #[serde(skip_serializing_if = "Option::is_none")]
    mode: Option<PolicyMode>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    rule: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    #[serde(skip_serializing_if = "Option::is_none")]
    allow: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    deny: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    ports: Vec<Port>,
    #[serde(skip_serializing_if = "Option::is_none")]
    protocol: Option<Protocol>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    methods: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    paths: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ech: Option<Ech>,
    #[serde(skip_serializing_if = "Option::is_none")]
    always: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    wake_on_data: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    comment: Option<String>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Port {
    One(u16),
    Range(String),
}

/// As TOML.
#[expect(
    clippy::expect_used,
    reason = "strings, numbers and lists of them always have a TOML form"
)]
pub(crate) fn toml(policy: &Policy) -> String {
    toml::to_string(&document(policy)).expect("a policy in TOML")
}

/// As JSON.
#[expect(
    clippy::expect_used,
    reason = "strings, numbers and lists of them always have a JSON form"
)]
pub(crate) fn json(policy: &Policy) -> serde_json::Value {
    serde_json::to_value(document(policy)).expect("a policy in JSON")
}

fn document(policy: &Policy) -> Document {
    Document {
        default: policy.default,
        mode: (policy.mode != PolicyMode::default()).then_some(policy.mode),
        rule: policy.rules.iter().map(row).collect(),
    }
}

fn row(rule: &Rule) -> Row {
    let peers = |effect| {
        (rule.effect == effect).then(|| rule.peers.iter().map(ToString::to_string).collect())
    };
    let conditions = &rule.conditions;
    Row {
        allow: peers(Effect::Allow),
        deny: peers(Effect::Deny),
        ports: conditions.ports.iter().copied().map(port).collect(),
        protocol: conditions.protocol,
        methods: conditions.methods.clone(),
        paths: conditions.paths.iter().map(ToString::to_string).collect(),
        ech: (conditions.ech != Ech::default()).then_some(conditions.ech),
        always: conditions.always.then_some(true),
        wake_on_data: conditions.unwoken.then_some(false),
        comment: rule.comment.clone(),
    }
}

fn port(range: PortRange) -> Port {
    if range.first() == range.last() {
        return Port::One(range.first());
    }
    Port::Range(range.to_string())
}
