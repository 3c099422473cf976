//! How a sandbox comes to be: a name and a slot are taken, it is journalled together with its policy,
//! and its driver starts. Whole or not at all: what fails or panics on the way leaves nothing.

use std::panic::AssertUnwindSafe;

use fault::Point;
use futures_util::FutureExt;
use tokio::time::Instant;

use crate::cold::Cold;
use crate::driver::Handle;
use crate::error::Error;
use crate::keeper::Keeper;
use crate::machine::Machine;
use crate::night::Night;
use crate::policies::{self, Held, Scope, Written};
use crate::sandbox::{Actor, CreateSpec, Progress, Sandbox};
use crate::state::State;
use crate::store::Record;
use crate::threads::aside;

impl Keeper {
    /// Makes a sandbox and waits until its guest answers. On an error nothing of it is left. The turn
    /// is given back once the policy is ready to judge, whatever became of the caller.
    pub async fn create(
        &self,
        spec: CreateSpec,
        actor: &Actor,
        turn: impl Send + 'static,
        progress: impl FnMut(Progress),
    ) -> Result<Sandbox, Error> {
        spec.check()?;
        policies::check(&spec.policy, &Scope::Sandbox(spec.name.clone()))?;
        self.0.hypervisors.check(spec.driver)?;
        self.check_rest(spec.driver, &spec.terms)?;
        let (keeper, actor) = (self.clone(), actor.clone());
        let mut handle = self.whole(async move { keeper.bear(spec, &actor, turn).await }).await?;
        let seen = handle.rest(progress).await;
        match seen.error {
            Some(error) if seen.state != State::Running => Err(Error::Shared(error)),
            _ if seen.state == State::Gone => Err(Error::NotFound(handle.record.name.to_string())),
            _ => Ok(self.view(&handle)),
        }
    }

    /// Journals a sandbox and starts its driver.
    async fn bear(
        &self,
        spec: CreateSpec,
        actor: &Actor,
        turn: impl Send + 'static,
    ) -> Result<Handle, Error> {
        let shared = &self.0;
        let wish = spec.wish();
        let (policy, scope) = (spec.policy, Scope::Sandbox(spec.name.clone()));
        let prepared = aside(move || {
            let prepared = (policy.to_json().to_string(), Written::new(policy, &scope));
            fault::at(Point::PolicyCompiled);
            drop(turn);
            prepared
        });
        let (document, written) = prepared.await?;
        let birth = shared.births.lock().await;
        self.check_room(&wish).await?;
        let slots = &shared.slots;
        // Where one tenant may have all there is, it may have all of that rest, too.
        let shares = usize::from(shared.config.quota.sandboxes) < slots.count();
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
            disk: Some(shared.hypervisors.disk(spec.driver).await),
            state: State::Creating,
            reason: None,
            process: None,
            created: Some(fault::wall_clock()),
            terms: self.terms(spec.driver, &spec.terms),
            saved: None,
            cold: Cold::default(),
            night: Night::default(),
            stored: None,
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
        let mut control = self.control(record, actor, "sandbox create");
        control.revision = Some(revision);
        shared.trail.record(control);
        Ok(())
    }
}
