//! What was used, as sums that add up: time by phase, processors, memory, what is kept of those asleep,
//! bytes. Values only; the units are those of the columns in the book.

use serde::{Deserialize, Serialize};

use crate::state::State;

/// How a sandbox passes its time, as a bill sees it; the costliest last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Phase {
    /// Being made or removed, or failed.
    Other,
    /// Kept elsewhere.
    Suspended,
    Standby,
    /// It has a process, falling asleep included, and waking from when there is one.
    Running,
}

impl From<State> for Phase {
    fn from(state: State) -> Self {
        match state {
            State::Running | State::Saving | State::Resuming => Self::Running,
            State::Standby | State::Suspending => Self::Standby,
            State::Suspended => Self::Suspended,
            State::Creating | State::Failed | State::Deleting | State::Gone => Self::Other,
        }
    }
}

macro_rules! amounts {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What was used. Sums, all but the peak.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Amounts { $($(#[$doc])* pub $name: u64,)* }

        impl Amounts {
            /// Their names, as columns.
            pub(crate) const COLUMNS: &'static [&'static str] = &[$(stringify!($name),)*];

            /// In the order of the columns.
            pub(crate) fn values(&self) -> Vec<u64> {
                vec![$(self.$name,)*]
            }

            /// From values in that order; those that are missing are 0.
            pub(crate) fn from_values(values: impl IntoIterator<Item = u64>) -> Self {
                let mut values = values.into_iter();
                Self { $($name: values.next().unwrap_or_default(),)* }
            }
        }
    };
}

amounts! {
    /// Milliseconds in which it had a process: ran, fell asleep or woke.
    running_ms,
    /// Milliseconds asleep, and until it had a process when it was woken.
    standby_ms,
    /// Milliseconds asleep, kept elsewhere, and until it was back.
    suspended_ms,
    /// Milliseconds in which it was made or removed, or had failed.
    other_ms,
    /// Virtual CPUs it was given, times milliseconds running.
    vcpu_ms,
    /// Milliseconds of processors that its process has had.
    cpu_ms,
    /// MiB of memory it was given, times milliseconds running.
    memory_mib_ms,
    /// MiB that its process held in memory, times milliseconds running.
    resident_mib_ms,
    /// The most MiB that it held.
    resident_peak_mib,
    /// MiB of its memory and state in files, times milliseconds asleep.
    saved_mib_ms,
    /// Payload bytes out.
    bytes_out,
    /// Payload bytes in.
    bytes_in,
}

/// The one that is no sum.
pub(crate) const PEAK: &str = "resident_peak_mib";

impl Amounts {
    /// Milliseconds in all phases together.
    #[must_use]
    pub const fn life_ms(&self) -> u64 {
        self.running_ms + self.standby_ms + self.suspended_ms + self.other_ms
    }

    /// Adds what was used by others, or at other times.
    pub fn add(&mut self, more: &Self) {
        let peak = self.resident_peak_mib.max(more.resident_peak_mib);
        let both = self.values().into_iter().zip(more.values());
        *self = Self::from_values(both.map(|(one, other)| one.saturating_add(other)));
        self.resident_peak_mib = peak;
    }
}
