//! How a sandbox comes to be: a name and a slot are taken, it is journalled together with its policy,
//! and its driver starts. Whole or not at all: what fails or panics on the way leaves nothing.

use std::panic::AssertUnwindSafe;

use futures_util::FutureExt;
use tokio::time::Instant;

use crate::driver::Handle;
use crate::error::Error;
use crate::keeper::Keeper;
use crate::machine::Machine;
use crate::policies::{self, Held, Scope, Written};
use crate::sandbox::{Actor, CreateSpec, Progress, Sandbox};
use crate::state::State;
use crate::store::Record;
use crate::threads::{aside, locked};

impl Keeper {
    /// Makes a sandbox and waits until its guest answers. On an error nothing of it is left.
    pub async fn create(
        &self,
        spec: CreateSpec,
        actor: &Actor,
        progress: impl FnMut(Progress),
    ) -> Result<Sandbox, Error> {
        spec.check()?;
        policies::check(&spec.policy, &Scope::Sandbox(spec.name.clone()))?;
        self.0.hypervisors.check(spec.driver)?;
        let (keeper, actor) = (self.clone(), actor.clone());
        let mut handle = self.whole(async move { keeper.bear(spec, &actor).await }).await?;
        let seen = handle.rest(progress).await;
        match seen.error {
            Some(error) if seen.state != State::Running => Err(Error::Shared(error)),
            _ if seen.state == State::Gone => Err(Error::NotFound(handle.record.name.to_string())),
            _ => Ok(self.view(&handle)),
        }
    }

    /// Journals a sandbox and starts its driver.
    async fn bear(&self, spec: CreateSpec, actor: &Actor) -> Result<Handle, Error> {
        let shared = &self.0;
        let (policy, scope) = (spec.policy, Scope::Sandbox(spec.name.clone()));
        let prepared = aside(move || {
            let document = policy.to_json().to_string();
            (document, Written::new(policy, &scope))
        });
        let (document, written) = prepared.await?;
        let birth = shared.births.lock().await;
        if self.handle(&spec.name).is_ok() {
            return Err(Error::Exists(spec.name));
        }
        let limit = shared.config.tenant_slots;
        let theirs = |handle: &&Handle| handle.record.tenant == spec.tenant;
        if locked(&shared.handles).values().filter(theirs).count() >= usize::from(limit) {
            return Err(Error::Quota { tenant: spec.tenant, limit });
        }
        let slots = &shared.slots;
        // Where one tenant may have all there is, it may have all of that rest, too.
        let shares = usize::from(limit) < slots.count();
        if shares && !slots.leaves_some(&spec.tenant, Instant::now()) {
            return Err(Error::Resting(spec.tenant));
        }
        let slot = slots.take(Instant::now()).ok_or_else(|| Error::Full(slots.count()))?;
        let mut record = Record {
            name: spec.name,
            tenant: spec.tenant,
            driver: spec.driver,
            slot,
            incarnation: 0,
            memory_mib: spec.memory_mib,
            vcpus: spec.vcpus,
            state: State::Creating,
            reason: None,
            process: None,
            created: fault::wall_clock(),
        };
        let entered = self.enter(&mut record, document, written, actor);
        let handle = match AssertUnwindSafe(entered).catch_unwind().await {
            Ok(Ok(())) => self.drive(record, Machine::create()),
            Ok(Err(error)) => {
                slots.give_back(slot, Some(&record.tenant), Instant::now());
                return Err(error);
            }
            Err(_panic) => {
                // It may be in the journal: its driver sees to it that it is not.
                let mut undone = self.drive(record, Machine::leftover(State::Creating));
                undone.rest(|_| {}).await;
                return Err(Error::Panicked);
            }
        };
        drop(birth);
        Ok(handle)
    }

    /// Journals a sandbox together with its policy.
    async fn enter(
        &self,
        record: &mut Record,
        document: String,
        written: Written,
        actor: &Actor,
    ) -> Result<(), Error> {
        let shared = &self.0;
        let (incarnation, revision) = shared.store.insert(record.clone(), document).await?;
        record.incarnation = incarnation;
        let scope = Scope::Sandbox(record.name.clone());
        shared.policies.in_force().hold(scope, Held::new(written, revision));
        let mut control = self.control(record, actor, "sandbox create".to_owned());
        control.revision = Some(revision);
        shared.trail.record(control);
        Ok(())
    }
}
