//! How a sandbox comes to be: a name and a slot are taken, it is journalled together with its policy,
//! and its driver starts. Whole or not at all: what fails or panics on the way leaves nothing.

use std::panic::AssertUnwindSafe;

use fault::Point;
use futures_util::FutureExt;
use policy::{Policy, SandboxName};
use tokio::time::Instant;

use crate::cold::Cold;
use crate::driver::{Handle, Verb};
use crate::error::{Error, chain};
use crate::keeper::{Found, Keeper, ask_to_go};
use crate::machine::Machine;
use crate::night::Night;
use crate::policies::{self, Held, Scope, Written};
use crate::sandbox::{Actor, CreateSpec, Driver, Progress, Sandbox};
use crate::snapshot::Snapshot;
use crate::state::State;
use crate::store::Record;
use crate::terms::WantedTerms;
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
        let born = self.whole(async move { keeper.bear(spec, None, &actor, turn).await });
        let mut handle = born.await?;
        let seen = handle.rest(progress).await;
        match seen.error {
            Some(error) if seen.state != State::Running => Err(Error::Shared(error)),
            _ if seen.state == State::Gone => Err(Error::NotFound(handle.record.name.to_string())),
            _ => Ok(self.view(&handle)),
        }
    }

    /// Makes a sandbox that goes on from a snapshot, as another incarnation, and waits until it runs. Memory,
    /// processors and tenant are the snapshot's; the policy is its own, as of one that is made anew, since
    /// that of its parent may have been narrowed meanwhile. On an error nothing of it is left.
    ///
    /// In the journal it is one that sleeps in the store, from the first: so the next daemon has all of it, or
    /// has never heard of it.
    pub async fn clone_of(
        &self,
        snapshot: &Snapshot,
        name: SandboxName,
        (policy, terms): (Policy, WantedTerms),
        actor: &Actor,
        turn: impl Send + 'static,
    ) -> Result<Sandbox, Error> {
        let spec = CreateSpec {
            name,
            tenant: snapshot.tenant.clone(),
            driver: Driver::Qemu,
            memory_mib: snapshot.memory_mib,
            vcpus: snapshot.vcpus,
            policy,
            terms,
        };
        spec.check()?;
        policies::check(&spec.policy, &Scope::Sandbox(spec.name.clone()))?;
        self.check_rest(spec.driver, &spec.terms)?;
        let (keeper, who, of) = (self.clone(), actor.clone(), snapshot.clone());
        let born = self.whole(async move { keeper.bear(spec, Some(of), &who, turn).await });
        let handle = born.await?;
        match self.ask(&handle, None, Verb::Wake).await {
            Ok(()) => Ok(self.view(&handle)),
            Err(error) => {
                // What could not be undone is told by whoever looks at it next.
                let undone = ask_to_go(&Found::new(handle), false).await;
                undone.map(|_| ()).unwrap_or_else(|left| {
                    tracing::error!(error = chain(&left), "a clone that failed is not gone");
                });
                Err(error)
            }
        }
    }

    /// Journals a sandbox and starts its driver.
    async fn bear(
        &self,
        spec: CreateSpec,
        of: Option<Snapshot>,
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
            disk: match &of {
                Some(of) => of.disk,
                None => Some(shared.hypervisors.disk(spec.driver).await),
            },
            state: if of.is_some() { State::Suspended } else { State::Creating },
            reason: None,
            process: None,
            created: Some(fault::wall_clock()),
            terms: self.terms(spec.driver, &spec.terms),
            saved: None,
            cold: Cold::default(),
            night: Night {
                remains: of.as_ref().map_or_else(Vec::new, |of| of.remains_in(slot)),
                ..Night::default()
            },
            stored: of.as_ref().map(|of| of.stored.clone()),
        };
        let machine = match &of {
            Some(of) => Machine::suspended(false).owing(!of.remains.is_empty()),
            None => Machine::create(),
        };
        let entered = self.enter(&mut record, document, written, of.as_ref(), actor);
        let handle = match AssertUnwindSafe(entered).catch_unwind().await {
            Ok(Ok(())) => self.drive(record, machine),
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
        of: Option<&Snapshot>,
        actor: &Actor,
    ) -> Result<(), Error> {
        let shared = &self.0;
        let (incarnation, revision) = match of {
            None => shared.store.insert(record.clone(), document).await?,
            Some(of) => {
                let inserted = shared.store.insert_clone(record.clone(), document, of).await?;
                inserted.ok_or_else(|| Error::NoSnapshot(of.name.to_string()))?
            }
        };
        record.incarnation = incarnation;
        let scope = Scope::Sandbox(record.name.clone());
        shared.policies.in_force().hold(scope, Held::new(written, revision));
        let what = of.map_or_else(
            || "sandbox create".to_owned(),
            |of| {
                let Snapshot { name, sandbox, incarnation, .. } = of;
                format!(
                    "sandbox cloned from snapshot {name} of {sandbox}, incarnation {incarnation}, whose \
                     connections are not its own,"
                )
            },
        );
        let mut control = self.control(record, actor, &what);
        control.revision = Some(revision);
        shared.trail.record(control);
        Ok(())
    }
}
