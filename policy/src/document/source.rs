//! A document as a tree that knows its lines, the same for TOML and JSON.
//!
//! Reads syntax only; what keys and values mean is decided in `read`.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;
use toml::de::{DeTable, DeValue};

use crate::document::{MAX_DOCUMENT, PolicyError};

/// Deepest nesting that any policy has: document, rules, rule, list, element.
const MAX_DEPTH: usize = 5;

/// One value and the line it begins on, from 1.
#[derive(Debug)]
pub(crate) struct Node<'a> {
    pub(crate) line: usize,
    pub(crate) value: Value<'a>,
}

#[derive(Debug)]
pub(crate) enum Value<'a> {
    Text(Cow<'a, str>),
    Integer(i64),
    Bool(bool),
    List(Vec<Node<'a>>),
    /// Keys with the line they stand on, in the order of the format's parser.
    Table(Vec<(Cow<'a, str>, usize, Node<'a>)>),
    /// What no policy has: floats, dates, null, too deep nesting.
    Other(&'static str),
}

impl Node<'_> {
    /// What kind of value it is, for an error.
    pub(crate) fn kind(&self) -> &'static str {
        match &self.value {
            Value::Text(_) => "a string",
            Value::Integer(_) => "a number",
            Value::Bool(_) => "a boolean",
            Value::List(_) => "a list",
            Value::Table(_) => "a table",
            Value::Other(kind) => kind,
        }
    }

    /// The line of a field such as `rule[2].allow[0]`, or of the innermost part that exists.
    pub(crate) fn line_of(&self, field: &str) -> Option<usize> {
        let mut line = None;
        let mut node = self;
        for step in field.split(['.', '[']).filter(|step| !step.is_empty()) {
            let next = match (&node.value, step.strip_suffix(']')) {
                (Value::List(items), Some(index)) => {
                    index.parse().ok().and_then(|i: usize| items.get(i)).map(|n| (n.line, n))
                }
                (Value::Table(rows), None) => {
                    rows.iter().find(|row| row.0 == step).map(|row| (row.1, &row.2))
                }
                _ => None,
            };
            let Some((at, inner)) = next else { break };
            (line, node) = (Some(at), inner);
        }
        line
    }
}

/// Reads the syntax of TOML.
pub(crate) fn toml(text: &str) -> Result<Node<'_>, PolicyError> {
    bounded(text)?;
    let lines = Lines::of(text);
    let table = DeTable::parse(text).map_err(|error| {
        let mut refused =
            PolicyError::new("", error.message().replace('\n', ", "), "mend the TOML");
        refused.line = error.span().map(|span| lines.at(span.start));
        refused
    })?;
    Ok(Node { line: 1, value: toml_table(table.into_inner(), &lines, 0) })
}

fn toml_table<'a>(table: DeTable<'a>, lines: &Lines, depth: usize) -> Value<'a> {
    let row = |(key, value): (toml::Spanned<Cow<'a, str>>, toml::Spanned<DeValue<'a>>)| {
        let line = lines.at(key.span().start);
        (key.into_inner(), line, toml_value(value, lines, depth + 1))
    };
    Value::Table(table.into_iter().map(row).collect())
}

fn toml_value<'a>(value: toml::Spanned<DeValue<'a>>, lines: &Lines, depth: usize) -> Node<'a> {
    let line = lines.at(value.span().start);
    let value = match value.into_inner() {
        DeValue::Array(_) | DeValue::Table(_) if depth >= MAX_DEPTH => Value::Other("nested"),
        DeValue::String(text) => Value::Text(text),
        DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix())
            .map_or(Value::Other("too large a number"), Value::Integer),
        DeValue::Boolean(yes) => Value::Bool(yes),
        DeValue::Array(items) => {
            Value::List(items.into_iter().map(|item| toml_value(item, lines, depth + 1)).collect())
        }
        DeValue::Table(table) => toml_table(table, lines, depth),
        DeValue::Float(_) => Value::Other("a fraction"),
        DeValue::Datetime(_) => Value::Other("a date"),
    };
    Node { line, value }
}

/// Reads the syntax of JSON, of any length. Values are cut out of the text, so that their place is
/// known.
pub(crate) fn json(text: &str) -> Result<Node<'_>, PolicyError> {
    let raw: &RawValue = serde_json::from_str(text).map_err(|error| syntax(&error, 1))?;
    json_value(raw, &Place { text, lines: Lines::of(text) }, 0)
}

struct Place<'a> {
    text: &'a str,
    lines: Lines,
}

impl Place<'_> {
    /// The line of a part of the text. Addresses are compared, nothing is read through them.
    fn line(&self, part: &str) -> usize {
        self.lines.at(part.as_ptr().addr().saturating_sub(self.text.as_ptr().addr()))
    }
}

fn json_value<'a>(
    raw: &'a RawValue,
    place: &Place<'_>,
    depth: usize,
) -> Result<Node<'a>, PolicyError> {
    let text = raw.get();
    let line = place.line(text);
    let wrong = |error: serde_json::Error| syntax(&error, line);
    let value = match text.bytes().next() {
        Some(b'{' | b'[') if depth >= MAX_DEPTH => Value::Other("nested"),
        Some(b'{') => {
            let Rows(rows) = serde_json::from_str(text).map_err(wrong)?;
            let mut table = Vec::with_capacity(rows.len());
            for (key, value) in rows {
                let node = json_value(value, place, depth + 1)?;
                table.push((key, node.line, node));
            }
            Value::Table(table)
        }
        Some(b'[') => {
            let items: Vec<&RawValue> = serde_json::from_str(text).map_err(wrong)?;
            let nodes = items.into_iter().map(|item| json_value(item, place, depth + 1));
            Value::List(nodes.collect::<Result<_, _>>()?)
        }
        Some(b'"') => Value::Text(Cow::Owned(serde_json::from_str(text).map_err(wrong)?)),
        Some(b't' | b'f') => Value::Bool(text == "true"),
        Some(b'n') => Value::Other("null"),
        _ => text.parse().map_or(Value::Other("not a whole number"), Value::Integer),
    };
    Ok(Node { line, value })
}

/// The rows of a JSON object in their order. A key that comes twice is refused: which of the two
/// counts is a thing two readers may see differently.
struct Rows<'a>(Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'de> serde::Deserialize<'de> for Rows<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Each;
        impl<'de> Visitor<'de> for Each {
            type Value = Rows<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Rows<'de>, A::Error> {
                let mut rows = Vec::new();
                let mut seen = std::collections::HashSet::new();
                while let Some((key, value)) = map.next_entry::<String, &RawValue>()? {
                    if !seen.insert(key.clone()) {
                        let problem = format!("duplicate key `{}`", crate::audit::shown(&key));
                        return Err(serde::de::Error::custom(problem));
                    }
                    rows.push((Cow::Owned(key), value));
                }
                Ok(Rows(rows))
            }
        }
        deserializer.deserialize_map(Each)
    }
}

/// Refuses a text that is too long.
pub(crate) fn bounded(text: &str) -> Result<(), PolicyError> {
    if text.len() <= MAX_DOCUMENT {
        return Ok(());
    }
    let problem = format!("the document has {} bytes, more than {MAX_DOCUMENT}", text.len());
    Err(PolicyError::new("", problem, "use wildcards or networks in place of long lists"))
}

fn syntax(error: &serde_json::Error, first: usize) -> PolicyError {
    let text = error.to_string();
    let problem = text.split(" at line ").next().unwrap_or_default();
    let mut refused = PolicyError::new("", problem, "mend the JSON");
    refused.line = Some(first + error.line().saturating_sub(1));
    refused
}

/// Where the lines of a text begin.
struct Lines(Vec<usize>);

impl Lines {
    fn of(text: &str) -> Self {
        Self(text.match_indices('\n').map(|(at, _)| at).collect())
    }

    fn at(&self, offset: usize) -> usize {
        self.0.partition_point(|end| *end < offset) + 1
    }
}
