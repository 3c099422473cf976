//! From a tree to a policy: keys and values, each refused with its field.

use crate::document::source::{Node, Value};
use crate::document::{
    Conditions, Ech, Effect, Peer, Policy, PolicyError, PolicyMode, PortRange, Protocol, Rule,
};
use crate::path::PathGlob;

const TOP: &[&str] = &["default", "mode", "rule"];
const KEYS: &[&str] = &[
    "allow",
    "deny",
    "ports",
    "protocol",
    "methods",
    "paths",
    "ech",
    "always",
    "wake_on_data",
    "comment",
];
const MAX_COMMENT: usize = 1000;

/// Reads a document.
pub(crate) fn policy(root: &Node<'_>) -> Result<Policy, PolicyError> {
    let table = Table::of(root, String::new(), TOP)?;
    let default = match table.get("default") {
        Some(value) => value.one_of(&[("deny", Effect::Deny), ("allow", Effect::Allow)])?,
        None => Effect::Deny,
    };
    let mode = match table.get("mode") {
        Some(value) => {
            value.one_of(&[("enforce", PolicyMode::Enforce), ("observe", PolicyMode::Observe)])?
        }
        None => PolicyMode::Enforce,
    };
    let rules = match table.get("rule") {
        Some(rules) => {
            let rules = rules.list("tables, one for each rule")?;
            rules.iter().map(rule).collect::<Result<_, _>>()?
        }
        None => Vec::new(),
    };
    Policy::checked(default, mode, rules)
}

fn rule(at: &Field<'_>) -> Result<Rule, PolicyError> {
    let table = Table::of(at.node, at.name.clone(), KEYS)?;
    let (effect, peers) = match (table.get("allow"), table.get("deny")) {
        (Some(peers), None) => (Effect::Allow, peers),
        (None, Some(peers)) => (Effect::Deny, peers),
        (Some(_), Some(_)) => {
            return Err(at.wrong("has 'allow' and 'deny'", "make it two rules"));
        }
        (None, None) => {
            let fix = "add allow = [\"api.example.com\"] or deny = [...]";
            return Err(at.wrong("names no host, address or network", fix));
        }
    };
    let conditions = Conditions {
        ports: table.each("ports", "ports", port)?,
        protocol: match table.get("protocol") {
            Some(value) => Some(value.one_of(&[("tcp", Protocol::Tcp), ("udp", Protocol::Udp)])?),
            None => None,
        },
        methods: table.each("methods", "methods", |field| Ok(field.text()?.to_owned()))?,
        paths: table.each("paths", "paths", |field| {
            let text = field.text()?;
            PathGlob::parse(text).map_err(|fix| field.wrong("is not a path", fix).with_value(text))
        })?,
        ech: match table.get("ech") {
            Some(value) => value.one_of(&[("allow", Ech::Allow), ("deny", Ech::Deny)])?,
            None => Ech::Allow,
        },
        always: match table.get("always") {
            Some(value) => value.boolean()?,
            None => false,
        },
        unwoken: match table.get("wake_on_data") {
            Some(value) => !value.boolean()?,
            None => false,
        },
    };
    let peers = peers.list("host patterns, addresses and networks")?;
    let peers = peers.iter().map(peer).collect::<Result<_, _>>()?;
    let comment = match table.get("comment") {
        Some(value) => Some(comment(&value)?),
        None => None,
    };
    Ok(Rule { effect, peers, conditions, comment })
}

fn peer(field: &Field<'_>) -> Result<Peer, PolicyError> {
    field.text()?.parse().map_err(|error| field.own(error))
}

fn port(field: &Field<'_>) -> Result<PortRange, PolicyError> {
    let text = match &field.node.value {
        Value::Integer(number) => number.to_string(),
        Value::Text(text) => text.to_string(),
        _ => return Err(field.expected("a port, or a range as \"8000-8099\"")),
    };
    text.parse().map_err(|error| field.own(error))
}

fn comment(field: &Field<'_>) -> Result<String, PolicyError> {
    let text = field.text()?;
    if text.len() > MAX_COMMENT {
        return Err(field.wrong("is too long", format!("use at most {MAX_COMMENT} bytes")));
    }
    Ok(text.to_owned())
}

/// A value and the field it stands in.
struct Field<'a> {
    name: String,
    node: &'a Node<'a>,
}

impl<'a> Field<'a> {
    fn wrong(&self, problem: impl Into<String>, fix: impl Into<String>) -> PolicyError {
        PolicyError::new(self.name.clone(), problem, fix)
    }

    fn expected(&self, what: &str) -> PolicyError {
        self.wrong(format!("is {}", self.node.kind()), format!("write {what}"))
    }

    /// An error of a word, made this field's.
    fn own(&self, error: PolicyError) -> PolicyError {
        PolicyError { field: self.name.clone(), ..error }
    }

    fn text(&self) -> Result<&'a str, PolicyError> {
        match &self.node.value {
            Value::Text(text) => Ok(text),
            _ => Err(self.expected("a string in quotes")),
        }
    }

    fn boolean(&self) -> Result<bool, PolicyError> {
        match &self.node.value {
            Value::Bool(yes) => Ok(*yes),
            _ => Err(self.expected("true or false")),
        }
    }

    fn one_of<T: Copy>(&self, choices: &[(&str, T)]) -> Result<T, PolicyError> {
        let text = self.text()?;
        choices.iter().find(|(word, _)| *word == text).map(|(_, choice)| *choice).ok_or_else(|| {
            let words: Vec<String> =
                choices.iter().map(|(word, _)| format!("\"{word}\"")).collect();
            let fix = format!("write {}", words.join(" or "));
            self.wrong("is not one of the choices", fix).with_value(text)
        })
    }

    fn list(&self, what: &str) -> Result<Vec<Self>, PolicyError> {
        match &self.node.value {
            Value::List(items) => Ok(items
                .iter()
                .enumerate()
                .map(|(i, node)| Self { name: format!("{}[{i}]", self.name), node })
                .collect()),
            _ => Err(self.expected(&format!("a list of {what}"))),
        }
    }
}

/// A table all of whose keys are known.
struct Table<'a> {
    name: String,
    rows: &'a [(std::borrow::Cow<'a, str>, usize, Node<'a>)],
}

impl<'a> Table<'a> {
    fn of(node: &'a Node<'a>, name: String, known: &[&str]) -> Result<Self, PolicyError> {
        let Value::Table(rows) = &node.value else {
            return Err(Field { name, node }.expected("a table"));
        };
        let table = Self { name, rows };
        match rows.iter().find(|(key, ..)| !known.contains(&key.as_ref())) {
            None => Ok(table),
            Some((key, line, _)) => {
                let fix = match nearest(key, known) {
                    Some(meant) => format!("did you mean '{meant}'?"),
                    None => format!("the keys are {}", known.join(", ")),
                };
                let mut error = PolicyError::new(table.field(""), "is not a known key", fix);
                error.line = Some(*line);
                Err(error.with_value(key))
            }
        }
    }

    fn field(&self, key: &str) -> String {
        match (self.name.as_str(), key) {
            (name, "") => name.to_owned(),
            ("", key) => key.to_owned(),
            (name, key) => format!("{name}.{key}"),
        }
    }

    fn get(&self, key: &str) -> Option<Field<'a>> {
        let row = self.rows.iter().find(|row| row.0 == key)?;
        Some(Field { name: self.field(key), node: &row.2 })
    }

    /// The elements of a list that may be absent, but not empty.
    fn each<T>(
        &self,
        key: &str,
        what: &str,
        read: impl Fn(&Field<'_>) -> Result<T, PolicyError>,
    ) -> Result<Vec<T>, PolicyError> {
        let Some(field) = self.get(key) else { return Ok(Vec::new()) };
        let items = field.list(what)?;
        if items.is_empty() {
            return Err(field.wrong("is empty", "leave the key out, or name at least one"));
        }
        items.iter().map(read).collect()
    }
}

/// The known word at most two edits away.
fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    let near = known.iter().map(|other| (edits(word, other), *other)).min()?;
    (word.len() <= 20 && near.0 <= 2).then_some(near.1)
}

fn edits(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate().take(32) {
        let mut left = i + 1;
        let mut next = vec![left];
        for (y, pair) in b.bytes().zip(row.windows(2)) {
            let [diagonal, above] = pair else { continue };
            left = (diagonal + usize::from(x != y)).min(above + 1).min(left + 1);
            next.push(left);
        }
        row = next;
    }
    row.last().copied().unwrap_or(usize::MAX)
}
