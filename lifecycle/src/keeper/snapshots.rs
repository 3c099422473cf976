//! The verbs of snapshots: take one, list them, remove one.
//!
//! A snapshot is its tenant's. It is found by its name once, and what is done is done to that one.

use policy::audit::{Kind, Outcome};
use policy::{AuditRecord, SandboxName, SnapshotName, TenantName};

use crate::driver::{Verb, release};
use crate::error::{Error, Field};
use crate::keeper::{Found, Keeper};
use crate::sandbox::{Actor, Sandbox};
use crate::snapshot::Snapshot;

impl Keeper {
    /// Takes a snapshot of a sandbox, which sleeps for it, and waits until that is in the journal. The sandbox
    /// goes on as it was: it is woken again if it ran.
    pub async fn snapshot(
        &self,
        found: &Found,
        name: SnapshotName,
        actor: &Actor,
    ) -> Result<Snapshot, Error> {
        let handle = self.asked(found, actor, &format!("snapshot {name}"));
        let wanted = name.clone();
        self.ask(handle, None, |reply| Verb::Snapshot(wanted, reply)).await?;
        self.find_snapshot(&name).await
    }

    /// All snapshots by name, or a tenant's, or those of a sandbox of this name.
    pub async fn snapshots(
        &self,
        tenant: Option<&TenantName>,
        of: Option<&SandboxName>,
    ) -> Result<Vec<Snapshot>, Error> {
        let mut all = self.0.store.snapshots().await?;
        all.retain(|one| tenant.is_none_or(|tenant| one.tenant == *tenant));
        all.retain(|one| of.is_none_or(|of| one.sandbox == *of));
        Ok(all)
    }

    /// The snapshot of this name.
    pub async fn find_snapshot(&self, name: &SnapshotName) -> Result<Snapshot, Error> {
        let found = self.0.store.snapshot(name).await?;
        found.ok_or_else(|| Error::NoSnapshot(name.to_string()))
    }

    /// Takes a sandbox back to a snapshot, of itself or of one that it was made of or like, and waits until it
    /// runs: as another incarnation, without the connections of now, which are ended on both sides. The
    /// snapshot is read whole first; where that fails nothing is changed.
    pub async fn roll_back(
        &self,
        found: &Found,
        to: &Snapshot,
        actor: &Actor,
    ) -> Result<Sandbox, Error> {
        let record = found.record();
        let refused = |problem: &str, fix: &str| {
            Err(Error::Invalid(Field::new("snapshot", &to.name, problem, fix)))
        };
        if to.tenant != record.tenant {
            return Err(Error::NoSnapshot(to.name.to_string()));
        }
        if (to.memory_mib, to.vcpus) != (record.memory_mib, record.vcpus) {
            let problem = format!(
                "has {} MiB and {} processors, and {} has {} and {}",
                to.memory_mib, to.vcpus, record.name, record.memory_mib, record.vcpus
            );
            return refused(&problem, "give a snapshot of this sandbox, or `clone` this one");
        }
        let handle = self.asked(found, actor, &format!("rollback to snapshot {}", to.name));
        let moment = Box::new(to.clone());
        self.ask(handle, None, |reply| Verb::RollBack(moment, reply)).await?;
        Ok(self.show(found))
    }

    /// Removes a snapshot. What goes on from it does so.
    pub async fn remove_snapshot(&self, snapshot: &Snapshot, actor: &Actor) -> Result<(), Error> {
        self.note(snapshot, actor, &format!("snapshot {} removed", snapshot.name));
        let (keeper, snapshot) = (self.clone(), snapshot.clone());
        let dropped = self.whole(async move {
            let shared = &keeper.0;
            let dropped = shared.store.drop_snapshot(&snapshot).await?;
            if dropped {
                let key = snapshot.stored.key.clone();
                let (store, hypervisors) = (shared.store.clone(), shared.hypervisors.clone());
                // Not waited for: the store may not answer, and the journal has it no more.
                tokio::spawn(release(shared.vault.clone(), store, hypervisors, key, None));
            }
            Ok((dropped, snapshot.name))
        });
        match dropped.await? {
            (true, _) => Ok(()),
            (false, name) => Err(Error::NoSnapshot(name.to_string())),
        }
    }

    fn note(&self, snapshot: &Snapshot, actor: &Actor, what: &str) {
        let mut audit = AuditRecord::new(fault::wall_clock(), Kind::Control, Outcome::Allow);
        audit.sandbox = Some(snapshot.sandbox.clone());
        audit.tenant = Some(snapshot.tenant.clone());
        audit.incarnation = Some(snapshot.incarnation);
        let by = |who| format!("{what} by {who}");
        self.0.trail.record(audit.saying(&by(actor.full()), &by(actor.told())));
    }
}
