//! What can go wrong in this room. A refusal of bad input is an error that names the field, what
//! was given and the mend; everything else names what was being done and to what.

use std::path::PathBuf;
use std::{fmt, io};

use policy::{PolicyError, Revision, SandboxName, SnapshotName, TenantName};

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
    /// No snapshot has this name.
    #[error("no snapshot is called {0}")]
    NoSnapshot(String),
    /// The name of a snapshot is taken.
    #[error("a snapshot called {0} exists already")]
    SnapshotExists(SnapshotName),
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
    #[error(
        "the disk with the state has {} MiB free, less than the {} MiB that are kept for the journal",
        free >> 20, reserve >> 20
    )]
    Reserve {
        /// Bytes that are free.
        free: u64,
        /// Bytes that are kept.
        reserve: u64,
    },
    /// What comes back from the object store would leave less free than is kept for the journal.
    #[error(
        "what comes back from the store needs {} MiB, and its disk has {} MiB free, of which {} MiB are \
         kept for the journal",
        needs >> 20, free >> 20, reserve >> 20
    )]
    Returning {
        /// Bytes that it needs on that disk.
        needs: u64,
        /// Bytes that are free there, and nobody's who comes back at the moment.
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
        /// Why, where the router said so.
        #[source]
        source: Option<Box<egress::Error>>,
    },
    /// A guest did not come up.
    #[error("{problem}; its console {console}")]
    Boot {
        /// What it did not do.
        problem: String,
        /// What its console says.
        console: String,
    },
    /// There is no image to make guests of.
    #[error("needs the guest image, but {} is missing", .0.display())]
    NoImage(PathBuf),
    /// A port of the guest could not be reached.
    #[error("port {port} of {name} cannot be reached")]
    Port {
        /// The sandbox.
        name: SandboxName,
        /// The port.
        port: u16,
        /// Why.
        #[source]
        source: Box<egress::Error>,
    },
    /// The guest was not woken in time; that goes on.
    #[error("{name} was not woken within {limit:?}; it may be a moment later")]
    Late {
        /// The sandbox.
        name: SandboxName,
        /// How long was waited.
        limit: std::time::Duration,
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
    /// The object store for sandboxes that sleep for long.
    #[error(transparent)]
    Vault(#[from] vault::Error),
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
    /// Whether what a machine was saved as is of no use, now and later.
    pub(crate) fn is_unusable(&self) -> bool {
        matches!(self, Self::Step { source, .. }
            if matches!(source.downcast_ref(), Some(vmm::Error::Unusable { .. })))
    }

    /// Whether the object store has it no more.
    pub(crate) fn is_missing(&self) -> bool {
        matches!(self, Self::Step { source, .. }
            if source.downcast_ref().is_some_and(vault::Error::is_missing))
    }

    /// Whether trying again cannot help: a tap that is gone does not come back to what held it.
    pub(crate) fn is_lasting(&self) -> bool {
        matches!(self, Self::Step { source, .. }
            if matches!(source.downcast_ref(), Some(egress::Error::NoTap(_))))
    }

    /// What whoever is not the operator is told: what was being done to which sandbox, and what kind of
    /// thing went wrong; no path, process, device or address of the node.
    #[must_use]
    pub fn told(&self) -> String {
        match self {
            Self::Shared(shared) => shared.told(),
            Self::Step { source, .. } => format!("{self}: {}", kind(&**source)),
            Self::Store { doing, .. } => format!("{doing} failed: the node's store was of no use"),
            Self::NoRoom { doing, .. } => format!("{doing} failed: the node's store is full"),
            Self::Row { .. } => "the node's store has a row that cannot be read".to_owned(),
            Self::Vault(_) => "the node's object store could not be used".to_owned(),
            Self::NoImage(_) => "needs the guest image, which this node has not".to_owned(),
            Self::Boot { problem, .. } => problem.clone(),
            Self::Reserve { .. } => {
                "the disk with the state has less free than is kept for the journal".to_owned()
            }
            Self::Returning { .. } => {
                "the node's disk has no room for what comes back from the store".to_owned()
            }
            // What these say of themselves is a tenant's or nobody's; `Router`, `Port` and `Agent` keep to
            // themselves what caused them.
            Self::Invalid(_)
            | Self::Share(_)
            | Self::Policy(_)
            | Self::NotFound(_)
            | Self::NoSnapshot(_)
            | Self::SnapshotExists(_)
            | Self::Exists(_)
            | Self::Conflict { .. }
            | Self::Unreadable { .. }
            | Self::WrongState { .. }
            | Self::Full(_)
            | Self::Quota { .. }
            | Self::Resting(_)
            | Self::Agent { .. }
            | Self::Router { .. }
            | Self::Port { .. }
            | Self::Late { .. }
            | Self::Panicked
            | Self::Stopping => self.to_string(),
        }
    }

    /// All there is to say, for the operator; none where that is no more than everybody is told.
    #[must_use]
    pub fn full(&self) -> Option<String> {
        match self {
            Self::Shared(shared) => shared.full(),
            Self::Step { .. }
            | Self::Store { .. }
            | Self::NoImage(_)
            | Self::Boot { .. }
            | Self::Vault(_)
            | Self::Reserve { .. }
            | Self::Returning { .. }
            | Self::Agent { .. }
            | Self::Port { .. }
            | Self::Router { .. } => Some(chain(self)),
            _ => None,
        }
    }
}

/// What kind of thing made a step fail.
fn kind(source: &(dyn std::error::Error + 'static)) -> String {
    use vmm::Error as V;
    if let Some(own) = source.downcast_ref::<Error>() {
        return own.told();
    }
    let stored = source.downcast_ref::<vault::Error>();
    let kind = match source.downcast_ref::<V>() {
        None if stored.is_some_and(vault::Error::is_missing) => "the object store has it no more",
        None if matches!(stored, Some(vault::Error::Damaged { .. })) => {
            "what the object store has of it is damaged"
        }
        None if stored.is_some() => "the node's object store could not be used",
        Some(V::Tap { .. }) => "the kernel did not give it its device",
        Some(V::File { .. }) => "a file of the node could not be used",
        Some(V::Program { .. }) => "a program of the node could not be run",
        Some(V::Failed { .. }) => "a program of the node failed",
        Some(V::Slow { .. }) => "a program of the node took too long",
        Some(V::Survivor { .. } | V::Control { .. }) => "its microVM would not end",
        Some(V::OtherDriver(_)) => "its driver is not configured",
        Some(V::Unusable { .. }) => "what was saved of it could not be used",
        Some(V::Sleepless(_)) => "it cannot sleep",
        None if source.is::<egress::Error>() => "the node's router or kernel refused",
        None if source.is::<io::Error>() => "a file of the node could not be used",
        None => "something of the node's failed",
    };
    kind.to_owned()
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Promise 22.
    #[test]
    fn what_a_tenant_is_told_says_what_was_done_to_what_and_names_nothing_of_the_node() {
        let vmm = vmm::Error::Failed { program: "/srv/x".into(), said: "no /srv/y".into() };
        let denied = || io::Error::other("open /srv/z: denied");
        let file = vmm::Error::File { act: "open", path: "/srv/disk".into(), source: denied() };
        let netns = || egress::Error::WorldEnded("postern /run".to_owned());
        let sources: [Box<dyn std::error::Error + Send + Sync>; 6] = [
            Box::new(vmm),
            Box::new(file),
            Box::new(vmm::Error::Survivor { pid: 4711, limit: std::time::Duration::ZERO }),
            Box::new(netns()),
            Box::new(denied()),
            "the tap /dev/net/tun is not open".into(),
        ];
        let name = || "demo".parse().unwrap();
        let step = |source| Error::Step { doing: "starting the microVM of", name: name(), source };
        let mut errors: Vec<Error> = sources.into_iter().map(step).collect();
        errors.push(Error::Shared(std::sync::Arc::new(step(Box::new(netns())))));
        for error in &errors {
            let told = error.told();
            assert!(told.starts_with("starting the microVM of demo failed: "), "{told}");
        }
        let (doing, path, source) = ("writing", "/srv/db".into(), Box::new(denied()));
        errors.push(Error::Store { doing, path, source });
        errors.push(Error::NoImage("/srv/vmlinuz".into()));
        errors.push(Error::Reserve { free: 4711 << 20, reserve: 4712 << 20 });
        errors.push(Error::Returning { needs: 1, free: 4711 << 20, reserve: 4712 << 20 });
        errors.push(Error::Router { doing, source: Box::new(netns()) });
        let problem = "cannot be reached".to_owned();
        errors.push(Error::Agent { name: name(), problem, source: Some(Box::new(netns())) });
        for error in errors {
            let (told, full) = (error.told(), error.full().expect("there is more"));
            assert!(!told.contains('/') && !told.contains("4711"), "{told}");
            assert!(full.contains('/') || full.contains("4711"), "{full}");
        }
    }
}
