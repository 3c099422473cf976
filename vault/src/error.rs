//! What can go wrong with things in an object store. No credential is in it.

use std::io;
use std::path::PathBuf;

/// A failure of this room.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The store cannot be used as configured.
    #[error("the object store {url} cannot be used: {problem}")]
    Place {
        /// Where it is meant to be.
        url: String,
        /// What is wrong.
        problem: String,
    },
    /// The store did not do what was asked.
    #[error("{doing} {object} in the object store failed")]
    Store {
        /// What was being done.
        doing: &'static str,
        /// To which object.
        object: String,
        /// What it said.
        #[source]
        source: Box<object_store::Error>,
    },
    /// The store answers, and has not what it was given.
    #[error("{0} is not in the object store any more")]
    Missing(String),
    /// What the store gives is not what it was given.
    #[error("{object} in the object store is damaged: {problem}")]
    Damaged {
        /// Which object.
        object: String,
        /// How.
        problem: String,
    },
    /// It was put into another store than the one of now.
    #[error(
        "it is in the object store {was}, and `store.url` is {is}: set it back to wake this one"
    )]
    Elsewhere {
        /// Where it is.
        was: String,
        /// Which store this is.
        is: String,
    },
    /// A file on this node.
    #[error("cannot {act} {path}")]
    File {
        /// What was being done, as a verb.
        act: &'static str,
        /// To what.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
}

impl Error {
    /// Whether the store answered that it has it no more, which no later try changes.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::Missing(_))
    }
}
