//! Boots of a sandbox from its disk alone: whether they are allowed, when one is due, and what others are
//! told of it. What it had in memory, and its connections, are lost then. Pure; decides nothing about when.

use serde::{Deserialize, Serialize};

use crate::reason::Reason;

/// What becomes of a sandbox whose memory is lost, or whose saved state is of no use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ColdBoot {
    /// It is as good as asleep, and whoever wants something of it has it boot from its disk.
    #[default]
    Allowed,
    /// It has failed.
    Refused,
}

/// What the journal has of a sandbox's boots from its disk alone.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Cold {
    /// How often there was one since it was made.
    pub(crate) boots: u64,
    /// Why there was one last, or is to be.
    pub(crate) why: Option<Reason>,
    /// Its guest has yet to answer from one.
    pub(crate) due: bool,
}

impl Cold {
    /// One is due.
    pub(crate) fn begin(&mut self, why: Reason) {
        (self.why, self.due) = (Some(why), true);
    }

    /// Its guest has answered.
    pub(crate) const fn done(&mut self) {
        self.boots = self.boots.saturating_add(1);
        self.due = false;
    }
}
