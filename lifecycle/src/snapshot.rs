//! A snapshot: what a sandbox was at one moment, under a name of its own, in the object store. Values only.
//!
//! It outlives the sandbox that it was taken of. Where its key is in the store is nobody's business outside.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use egress::Remains;
use policy::{SandboxName, Slot, SnapshotName, TenantName};
use serde::{Deserialize, Serialize};

/// A snapshot, as the journal has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Its name.
    pub name: SnapshotName,
    /// Whose it is.
    pub tenant: TenantName,
    /// The sandbox that it was taken of, there or not.
    pub sandbox: SandboxName,
    /// Which incarnation of it that was.
    pub incarnation: u64,
    /// Guest memory in MiB.
    pub memory_mib: u32,
    /// Virtual CPUs.
    pub vcpus: u8,
    /// Bytes that the guest's disk can grow to; none where that was not known.
    pub(crate) disk: Option<u64>,
    /// In seconds since 1970.
    pub(crate) created: u64,
    pub(crate) stored: vault::Stored,
    /// The connections that the guest had, which are none of whoever goes on from here.
    #[serde(default)]
    pub(crate) remains: Vec<Remains>,
}

impl Snapshot {
    /// Bytes that it has in the store.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.stored.bytes
    }

    /// When it was taken.
    #[must_use]
    pub fn created(&self) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(self.created.min(u64::from(u32::MAX)))
    }

    /// The connections that its guest believes in, as they are in another slot.
    pub(crate) fn remains_in(&self, slot: Slot) -> Vec<Remains> {
        self.remains.iter().map(|one| one.clone().in_slot(slot)).collect()
    }
}
