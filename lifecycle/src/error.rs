//! What can go wrong in this room. A refusal of bad input is an error that names the field, what
//! was given and the mend; everything else names what was being done and to what.

use std::fmt;
use std::path::PathBuf;

use policy::{PolicyError, Revision, SandboxName, TenantName};

/// A field of a request that was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    /// Its path in the request, e.g. `memory`.
    pub field: String,
    /// What was given, shortened to 60 characters.
    pub value: String,
    /// What is wrong with it.
    pub problem: String,
    /// What to give instead.
    pub fix: String,
}

impl Field {
    pub(crate) fn new(field: &str, value: impl fmt::Display, problem: &str, fix: &str) -> Self {
        Self {
            field: field.to_owned(),
            value: value.to_string().chars().take(60).flat_map(char::escape_debug).collect(),
            problem: problem.to_owned(),
            fix: fix.to_owned(),
        }
    }
}

/// A failure of the room `lifecycle`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A request has a field that cannot be used.
    #[error("{}: {}; {}", .0.field, .0.problem, .0.fix)]
    Invalid(Field),
    /// A policy was refused.
    #[error("policy: {0}")]
    Policy(PolicyError),
    /// No sandbox has this name.
    #[error("no sandbox is called {0}")]
    NotFound(String),
    /// The name is taken.
    #[error("a sandbox called {0} exists already")]
    Exists(SandboxName),
    /// The policy moved since it was read.
    #[error(
        "the policy is at revision {current}, not {expected}: read it again and repeat the change"
    )]
    Conflict {
        /// What the caller had read.
        expected: Revision,
        /// What is in force.
        current: Revision,
    },
    /// The journal has a policy that cannot be read, so it cannot be shown or added to.
    #[error("the policy of {scope} in the journal cannot be read: {problem}")]
    Unreadable {
        /// Whose it is, e.g. `tenant/acme`.
        scope: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The sandbox is in a state in which this cannot be done.
    #[error("{name} is {state}: {problem}")]
    WrongState {
        /// The sandbox.
        name: SandboxName,
        /// Its state.
        state: &'static str,
        /// What follows.
        problem: String,
    },
    /// Every slot is taken or held back.
    #[error("all {0} slots are taken or held back after use; remove a sandbox or wait")]
    Full(usize),
    /// The tenant has as many sandboxes as one may have.
    #[error("tenant {tenant} has {limit} sandboxes, as many as one tenant may have")]
    Quota {
        /// The tenant.
        tenant: TenantName,
        /// How many one may have.
        limit: u16,
    },
    /// The tenant would have more of something than one may have.
    #[error("{}: {}; {}", .0.field, .0.problem, .0.fix)]
    Share(Field),
    /// The disk of the journal has less free than is kept for it.
    #[error("{free} bytes are free on the disk with the state, of the {reserve} that are kept")]
    Reserve {
        /// Bytes that are free.
        free: u64,
        /// Bytes that are kept.
        reserve: u64,
    },
    /// As many slots rest after sandboxes of the tenant as are free.
    #[error("as many slots rest after sandboxes of tenant {0} as are free")]
    Resting(TenantName),
    /// One step of a journey failed; what was made before it has been undone.
    #[error("{doing} {name} failed")]
    Step {
        /// What was being done.
        doing: &'static str,
        /// To which sandbox.
        name: SandboxName,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The agent in the guest did not answer or did not speak its protocol.
    #[error("the agent of {name} {problem}")]
    Agent {
        /// The sandbox.
        name: SandboxName,
        /// What went wrong.
        problem: String,
    },
    /// The store could not be read or written.
    #[error("{doing} in the store {path}")]
    Store {
        /// What was being done.
        doing: &'static str,
        /// The store's file.
        path: PathBuf,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The store's disk is full: what was to be written was not, and nothing else changed.
    #[error("{doing} in the store {path}: its disk is full")]
    NoRoom {
        /// What was being done.
        doing: &'static str,
        /// The store's file.
        path: PathBuf,
        /// What SQLite says.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The store has a row that does not even say whose it is: to start without it might open what it
    /// closes, or leave running what it tells of.
    #[error(
        "{row} in the store {path} cannot be read: {problem}; put a copy of the store back, or give \
         the row up with `{remedy}`"
    )]
    Row {
        /// Which row of which table.
        row: String,
        /// The store's file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
        /// The statement that takes it out.
        remedy: String,
    },
    /// A step of the router failed outside of a sandbox's journey.
    #[error("{doing} in the router")]
    Router {
        /// What was being done.
        doing: &'static str,
        /// Why.
        #[source]
        source: Box<egress::Error>,
    },
    /// What ended a journey that several callers may wait for.
    #[error(transparent)]
    Shared(std::sync::Arc<Self>),
    /// What was being done panicked.
    #[error("it broke off: this is a bug of Postern's, and the daemon's log says where")]
    Panicked,
    /// The daemon is stopping.
    #[error("the daemon is stopping")]
    Stopping,
}

impl Error {
    /// Whether trying again cannot help: a tap that is gone does not come back to what held it.
    pub(crate) fn is_lasting(&self) -> bool {
        matches!(self, Self::Step { source, .. }
            if matches!(source.downcast_ref(), Some(egress::Error::NoTap(_))))
    }
}

/// An error with its causes, in one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        text.push_str(": ");
        text.push_str(&next.to_string());
        cause = next.source();
    }
    text
}
