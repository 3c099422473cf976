//! The verbs of policies, and the order in which a write takes effect: checked whole and made ready,
//! journalled, put in force, open flows judged again, the fences moved, and only then answered.
//!
//! Writes of one tenant come one after another, and so do the platform's. What is common to all is
//! locked only while a policy that is ready is put in force.

use std::sync::Arc;

use fault::Point;
use policy::audit::{Kind, Outcome};
use policy::document::Rule;
use policy::{AuditRecord, Compiled, Policy, PolicyMode, Revision, Slot};

use crate::error::Error;
use crate::keeper::{Found, Holder, Keeper};
use crate::policies::{Draft, Edit, Held, PolicyChange, Scope};
use crate::sandbox::Actor;
use crate::store::Record;
use crate::threads::{aside, locked};

impl Keeper {
    /// The policy of a scope and its revision: empty at revision 0 where none was written.
    pub fn policy(&self, of: &Holder) -> Result<(Arc<Policy>, Revision), Error> {
        let scope = of.scope();
        match self.held(&scope, of.record())? {
            Some(held) => Ok((held.policy(&scope)?, held.revision)),
            None => Ok((Arc::default(), Revision::default())),
        }
    }

    /// What is in force for a sandbox, all layers together: what `explain` asks.
    #[must_use]
    pub fn in_force(&self, found: &Found) -> Arc<Compiled> {
        found.handle().policy.load()
    }

    /// Replaces the policy of a scope. Returns once open flows were judged by it.
    pub async fn set_policy(
        &self,
        of: &Holder,
        policy: Policy,
        expected: Option<Revision>,
        actor: &Actor,
    ) -> Result<PolicyChange, Error> {
        self.change(of, expected, actor, Edit::Replace(policy)).await
    }

    /// Adds one rule to the policy of a scope.
    pub async fn add_rule(
        &self,
        of: &Holder,
        rule: Rule,
        expected: Option<Revision>,
        actor: &Actor,
    ) -> Result<PolicyChange, Error> {
        self.change(of, expected, actor, Edit::Add(rule)).await
    }

    /// Puts the policy of a scope in another mode and leaves its rules as they are.
    pub async fn set_mode(
        &self,
        of: &Holder,
        mode: PolicyMode,
        expected: Option<Revision>,
        actor: &Actor,
    ) -> Result<PolicyChange, Error> {
        self.change(of, expected, actor, Edit::Mode(mode)).await
    }

    async fn change(
        &self,
        of: &Holder,
        expected: Option<Revision>,
        actor: &Actor,
        edit: Edit,
    ) -> Result<PolicyChange, Error> {
        let (keeper, of, actor) = (self.clone(), of.clone(), actor.clone());
        self.whole(async move { keeper.change_now(&of, expected, &actor, edit).await }).await
    }

    async fn change_now(
        &self,
        of: &Holder,
        expected: Option<Revision>,
        actor: &Actor,
        edit: Edit,
    ) -> Result<PolicyChange, Error> {
        let shared = &self.0;
        let tenant = match of {
            Holder::Platform => None,
            Holder::Tenant(tenant) => Some(tenant),
            Holder::Sandbox(found) => Some(found.tenant()),
        };
        let (scope, asked) = (&of.scope(), of.record());
        let _turn = shared.policies.turn(tenant).await;
        let held = self.held(scope, asked)?;
        let current = held.as_ref().map(|held| held.revision).unwrap_or_default();
        if let Some(expected) = expected.filter(|expected| *expected != current) {
            return Err(Error::Conflict { expected, current });
        }
        let (of, own) = (scope.clone(), shared.router.own().clone());
        let draft = aside(move || Draft::new(edit, &of, held.as_ref(), &own)).await??;
        let revision = match draft.document {
            Some(document) => shared.store.set_policy(scope.to_string(), document).await?,
            // Written again, it is as good as a question whether it is in force: no revision is used up.
            None => current,
        };
        // Even again: the write before may have ended between the journal and here.
        let slots = self.put_in_force(scope, Held::new(draft.written, revision));
        let judged = shared.router.rejudge(&slots).await;
        fault::at(Point::PolicyJudged);
        // What it denies is cut; only what it newly allows may still be refused without this.
        let fenced = shared.router.refence(&slots).await;
        let change = PolicyChange {
            revision,
            sandboxes: slots.len(),
            checked: judged.checked,
            cut: judged.cut,
            closing: judged.closing,
            notes: draft.notes,
        };
        let outcome = if fenced.is_ok() { Outcome::Allow } else { Outcome::Fail };
        let mut record = AuditRecord::new(fault::wall_clock(), Kind::Control, outcome);
        record.tenant = tenant.cloned();
        record.sandbox = asked.map(|asked| asked.name.clone());
        record.layer = Some(scope.layer().as_str().to_owned());
        record.revision = Some(revision);
        let PolicyChange { checked, cut, closing, .. } = &change;
        let detail = |who| {
            let what = &draft.what;
            format!(
                "{what} by {who}; {checked} flows judged again, {cut} cut, {closing} still closing"
            )
        };
        shared.trail.record(record.saying(&detail(actor.full()), &detail(actor.told())));
        fenced.map(|()| change).map_err(|source| Error::Router {
            doing: "the policy is in force, but a fence could not be changed",
            source: Box::new(source),
        })
    }

    /// What a scope holds; where `asked` is a sandbox, only what is that one's own. A sandbox holds a policy
    /// from its creation until it is forgotten, which is a moment before its name is free for another.
    fn held(&self, scope: &Scope, asked: Option<&Record>) -> Result<Option<Held>, Error> {
        let held = self.0.policies.in_force().of(scope);
        let Some(asked) = asked else { return Ok(held) };
        let now = self.handle(&asked.name)?.record.incarnation;
        match held {
            Some(held) if now == asked.incarnation => Ok(Some(held)),
            _ => Err(Error::NotFound(asked.name.to_string())),
        }
    }

    /// Lets all sandboxes under a scope be judged by what it holds from now on; gives their slots.
    fn put_in_force(&self, scope: &Scope, held: Held) -> Vec<Slot> {
        let mut in_force = self.0.policies.in_force();
        let before = in_force.hold(scope.clone(), held);
        let mut slots = Vec::new();
        for handle in locked(&self.0.handles).values() {
            let Record { name, tenant, slot, .. } = &handle.record;
            if scope.is_over(name, tenant) {
                handle.policy.store(in_force.over(name, tenant));
                fault::at(Point::PolicySwapped);
                slots.push(*slot);
            }
        }
        drop(in_force);
        // Last, since nobody else may hold what it was made into.
        drop(before);
        slots
    }
}
