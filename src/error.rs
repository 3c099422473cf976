//! What can go wrong in the program itself, and the exit code each comes to.
//!
//! A variant says what was being done and to what; the cause is its source.

use std::io;
use std::path::{Path, PathBuf};

use crate::problem::{Kind, Problem};

/// A failure of the program.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The configuration was refused.
    #[error("the configuration {path} is refused")]
    Config {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: Box<Problem>,
    },
    /// A policy in a file was refused.
    #[error("the policy {path} is refused")]
    Policy {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: Box<Problem>,
    },
    /// A file could not be read.
    #[error("reading {path}")]
    ReadFile {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A file or folder could not be made ready.
    #[error("{doing} {path}")]
    Prepare {
        /// What was being done.
        doing: &'static str,
        /// To which file or folder.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A listener could not be opened.
    #[error("listening on {on}")]
    Listen {
        /// The address.
        on: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Another daemon serves this state.
    #[error("another daemon serves {0}: stop it first")]
    Running(PathBuf),
    /// This machine lacks what the daemon needs.
    #[error("this machine cannot serve: {0}")]
    Unfit(String),
    /// The log filter is not valid.
    #[error("the log filter {filter:?} is refused")]
    LogFilter {
        /// The filter.
        filter: String,
        /// Why.
        #[source]
        source: tracing_subscriber::filter::ParseError,
    },
    /// This host's addresses could not be read.
    #[error("reading this host's addresses")]
    Addresses(#[source] io::Error),
    /// The resolver could not be set up.
    #[error("setting up the resolver")]
    Resolver(#[source] Box<dns::Error>),
    /// The router could not be started.
    #[error("starting the router")]
    Router(#[source] Box<egress::Error>),
    /// The keeper of sandboxes could not be opened.
    #[error("opening the sandboxes' store")]
    Keeper(#[source] Box<lifecycle::Error>),
    /// The daemon could not be reached.
    #[error("reaching the daemon at {at}; is `postern serve` running?")]
    Connect {
        /// Its address.
        at: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The conversation with the daemon broke.
    #[error("{doing} with the daemon")]
    Conversation {
        /// What was being done.
        doing: &'static str,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The daemon answered what this program does not understand.
    #[error("the daemon answered {0}: is it of another version?")]
    Answer(String),
    /// The daemon, or this program before asking it, refused.
    #[error("{0}")]
    Refused(Box<Problem>),
    /// Reading or writing the terminal or a pipe.
    #[error("{doing}")]
    Terminal {
        /// What was being done.
        doing: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The runtime could not be started.
    #[error("starting the runtime")]
    Runtime(#[source] io::Error),
}

impl Error {
    /// The exit code: 1 failed, 2 not valid, 3 not found, 4 refused.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Config { .. } | Self::Policy { .. } => 2,
            Self::Refused(problem) => match problem.code {
                Kind::Invalid => 2,
                Kind::NotFound => 3,
                Kind::Unauthorized | Kind::Forbidden | Kind::Misdirected => 4,
                _ => 1,
            },
            _ => 1,
        }
    }
}

impl From<Problem> for Error {
    fn from(problem: Problem) -> Self {
        Self::Refused(Box::new(problem))
    }
}

/// A refusal that names a line, with the file that the line is in.
#[must_use]
pub fn in_file(error: Error, path: &Path) -> Error {
    match error {
        Error::Refused(source) if source.line.is_some() && source.code == Kind::Invalid => {
            Error::Policy { path: path.to_owned(), source }
        }
        other => other,
    }
}

/// An error and its causes, in one line.
#[must_use]
pub fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |said, cause| format!("{said}: {cause}"))
}
