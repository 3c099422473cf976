//! A sandbox and a policy as the journal has them. Values only.

use std::time::{SystemTime, UNIX_EPOCH};

use egress::Remains;
use policy::{Policy, Revision, SandboxName, Slot, SnapshotName, Subject, TenantName};

use crate::cold::Cold;
use crate::night::Night;
use crate::reason::Reason;
use crate::sandbox::Driver;
use crate::snapshot::Snapshot;
use crate::state::State;
use crate::terms::Terms;

/// A sandbox as the journal has it.
#[derive(Clone, Debug)]
pub(crate) struct Record {
    pub(crate) name: SandboxName,
    pub(crate) tenant: TenantName,
    pub(crate) driver: Driver,
    pub(crate) slot: Slot,
    pub(crate) incarnation: u64,
    pub(crate) memory_mib: u32,
    pub(crate) vcpus: u8,
    /// Bytes that its disk can grow to; none where an earlier version made it.
    pub(crate) disk: Option<u64>,
    pub(crate) state: State,
    pub(crate) reason: Option<Reason>,
    pub(crate) process: Option<vmm::Process>,
    /// None where the journal's word for it is damaged.
    pub(crate) created: Option<SystemTime>,
    pub(crate) terms: Terms,
    /// What its machine was saved as, while it sleeps.
    pub(crate) saved: Option<vmm::Saved>,
    /// Its boots from its disk alone.
    pub(crate) cold: Cold,
    /// Where the object store has it; nothing of it has run since.
    pub(crate) stored: Option<vault::Stored>,
    pub(crate) night: Night,
}

impl Record {
    /// What the store has of it under this key, as a snapshot that is taken now.
    pub(crate) fn snapshot(
        &self,
        name: SnapshotName,
        stored: vault::Stored,
        now: SystemTime,
    ) -> Snapshot {
        let mut remains = self.night.remains.clone();
        remains.iter_mut().for_each(Remains::told);
        Snapshot {
            name,
            tenant: self.tenant.clone(),
            sandbox: self.name.clone(),
            incarnation: self.incarnation,
            memory_mib: self.memory_mib,
            vcpus: self.vcpus,
            disk: self.disk,
            created: now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
            stored,
            remains,
        }
    }

    /// Who it is, for the audit.
    pub(crate) fn subject(&self) -> Subject {
        Subject {
            sandbox: self.name.clone(),
            tenant: self.tenant.clone(),
            incarnation: self.incarnation,
            slot: self.slot,
        }
    }
}

/// A policy as the journal has it.
#[derive(Clone, Debug)]
pub(crate) struct PolicyRow {
    pub(crate) id: i64,
    pub(crate) scope: String,
    /// Or why it cannot be read.
    pub(crate) policy: Result<Policy, String>,
    pub(crate) revision: Revision,
}
