//! The states of a sandbox; what leads from one to another is the machine's.

use serde::{Deserialize, Serialize};

/// The state of a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// Being made.
    Creating,
    /// Its guest answers.
    Running,
    /// Falling asleep, or turning back from that.
    Saving,
    /// Asleep: its memory, its processes and its connections are kept, and nothing of it runs.
    Standby,
    /// Asleep, and being put into the store.
    Suspending,
    /// Asleep in the store: nothing of it is here but its slot and what holds its connections.
    Suspended,
    /// Being woken.
    Resuming,
    /// Its process ended by itself. Nothing of it runs; it can be looked at and removed.
    Failed,
    /// Being removed.
    Deleting,
    /// Removed: nothing is left, its name and slot are free.
    Gone,
}

impl State {
    /// As shown to people.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Creating => "creating",
            Self::Running => "running",
            Self::Saving => "saving",
            Self::Standby => "standby",
            Self::Suspending => "suspending",
            Self::Suspended => "suspended",
            Self::Resuming => "resuming",
            Self::Failed => "failed",
            Self::Deleting => "deleting",
            Self::Gone => "gone",
        }
    }

    /// Whether it sleeps, and has arrived there.
    pub(crate) const fn is_rest(self) -> bool {
        matches!(self, Self::Standby | Self::Suspended)
    }

    /// Whether its guest has run, so that what is left of it is worth keeping.
    pub(crate) const fn has_run(self) -> bool {
        match self {
            Self::Running | Self::Saving | Self::Standby | Self::Resuming | Self::Failed => true,
            Self::Suspending | Self::Suspended => true,
            Self::Creating | Self::Deleting | Self::Gone => false,
        }
    }
}
