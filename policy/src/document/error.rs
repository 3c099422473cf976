//! What is wrong with a policy, for the person who wrote it.
//!
//! Shown values are shortened and escaped: an error may end in a terminal or a web page.

use serde::Serialize;

use crate::audit::shown;
use crate::document::source::Node;

/// Why a policy was refused: where, what, and the mend.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize)]
#[error("{}{problem}; {fix}", self.place())]
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

impl PolicyError {
    pub(crate) fn new(
        field: impl Into<String>,
        problem: impl Into<String>,
        fix: impl Into<String>,
    ) -> Self {
        Self {
            field: field.into(),
            line: None,
            value: None,
            problem: problem.into(),
            fix: fix.into(),
        }
    }

    pub(crate) fn with_value(mut self, value: &str) -> Self {
        let mut short: String = value.chars().take(60).collect();
        if short.len() < value.len() {
            short.push_str("...");
        }
        self.value = Some(shown(&short));
        self
    }

    /// The same error with the line of its field.
    pub(crate) fn located(mut self, root: &Node<'_>) -> Self {
        self.line = self.line.or_else(|| root.line_of(&self.field));
        self
    }

    fn place(&self) -> String {
        let mut place = String::new();
        if let Some(line) = self.line {
            place.push_str(&format!("line {line}: "));
        }
        if !self.field.is_empty() {
            place.push_str(&format!("{}: ", self.field));
        }
        if let Some(value) = &self.value {
            place.push_str(&format!("\"{value}\" "));
        }
        place
    }
}
