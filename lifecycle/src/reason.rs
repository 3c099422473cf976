//! Why a sandbox has failed or is shut in, for two kinds of readers: all of it for the operator, and for the
//! sandbox's tenant what was being done to it and what kind of thing went wrong. What a tenant is told
//! never names a path, a process, a device or an address of the node.

use serde::{Deserialize, Serialize};

use crate::error::{Error, chain};

/// A reason in the words for both.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reason {
    full: String,
    told: String,
}

impl Reason {
    /// One in which nothing is the node's alone.
    pub(crate) fn new(both: &str) -> Self {
        Self { full: both.to_owned(), told: both.to_owned() }
    }

    /// One of which its tenant is told this much.
    pub(crate) fn told_as(full: String, told: &str) -> Self {
        Self { full, told: told.to_owned() }
    }

    /// An error with its causes.
    pub(crate) fn of(error: &Error) -> Self {
        Self { full: chain(error), told: error.told() }
    }

    /// As the journal has it. What an earlier daemon wrote there was for the operator alone.
    pub(crate) fn read(text: String) -> Self {
        serde_json::from_str(&text).unwrap_or_else(|_| {
            Self::told_as(text, "an earlier daemon noted why: ask the operator")
        })
    }

    /// The same, after what it led to.
    pub(crate) fn behind(self, what: &str) -> Self {
        Self { full: format!("{what}: {}", self.full), told: format!("{what}: {}", self.told) }
    }

    /// All of it, in one line: for the operator.
    #[must_use]
    pub fn full(&self) -> &str {
        &self.full
    }

    /// What its tenant is told, in one line.
    #[must_use]
    pub fn told(&self) -> &str {
        &self.told
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_journal_has_of_an_earlier_daemon_is_for_the_operator_alone() {
        let kept = Reason::told_as("all of /it".to_owned(), "it").behind("failed");
        let json = serde_json::to_string(&kept).unwrap();
        assert_eq!(Reason::read(json), kept);
        let early = Reason::read("starting failed: /srv/x is missing".to_owned());
        assert_eq!(early.full(), "starting failed: /srv/x is missing");
        assert!(!early.told().contains('/'), "{early:?}");
    }
}
