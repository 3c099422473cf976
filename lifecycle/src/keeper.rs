//! The verbs of the room: create, show, list, remove, exec; those of policies are in `writes`.
//!
//! Every verb checks its input whole before anything happens, and is about the sandbox that was found,
//! never about whoever has its name by then. A journey that a caller began goes on when the caller goes
//! away.

mod accounts;
mod birth;
mod found;
mod rest;
mod room;
mod snapshots;
mod writes;

use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::sync::{Arc, Mutex};

use egress::{GuestStream, Router};
use fault::Point;
use policy::audit::{Kind, Outcome};
use policy::{AuditRecord, PolicyHandle, SandboxName, TenantName, Trail};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};
use vault::Vault;

use crate::acts::{Acts, Hypervisors};
use crate::config::Config;
use crate::driver::{Call, End, Handle, Published, Rest, Task};
use crate::error::{Error, Field};
use crate::fetches::Fetches;
use crate::machine::{Left, Machine};
use crate::policies::Policies;
use crate::reconcile;
use crate::sandbox::{Actor, Sandbox};
use crate::slots::{Slots, Stuck};
use crate::state::State;
use crate::store::{Record, Store};
use crate::threads::{joined, locked};
use crate::turns::Turns;
use crate::usage::Ledger;

pub use found::{Found, Holder};

/// Verbs that wait for one driver; whoever asks for more waits until it has heard some.
const VERBS: usize = 16;
/// Sandboxes that are put into the object store at once: packing one takes a processor.
const PUTS: usize = 2;

/// The room. Clones are the same.
#[derive(Clone, Debug)]
pub struct Keeper(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    config: Arc<Config>,
    router: Router,
    hypervisors: Arc<Hypervisors>,
    vault: Vault,
    store: Store,
    policies: Arc<Policies>,
    trail: Trail,
    handles: Mutex<BTreeMap<SandboxName, Handle>>,
    slots: Slots,
    ledger: Ledger,
    _clearing: AbortOnDropHandle<()>,
    _accounting: AbortOnDropHandle<()>,
    /// Turns of those that are woken at once.
    wakes: Turns,
    /// And of those that come back from the store.
    fetches: Fetches,
    /// And of those that are put into the object store.
    puts: Turns,
    /// One birth at a time takes a name and a slot.
    births: tokio::sync::Mutex<()>,
    drivers: TaskTracker,
}

impl Keeper {
    /// Opens the journal and brings what it says and what the kernel holds together: taps nobody owns
    /// are deleted, running microVMs adopted, half-made and half-removed ones undone. Returns when the
    /// fences of those that are adopted stand; what is undone may take longer, and is shut in meanwhile.
    pub async fn open(config: Config, router: Router, trail: Trail) -> Result<Self, Error> {
        let store = Store::open(&config.state_dir.join("postern.db"))?;
        let policies = Arc::new(Policies::open(store.clone()).await?);
        let accounts = config.state_dir.join("usage.db");
        let ledger = Ledger::open(&accounts, config.usage, router.clone()).await?;
        let accounting = ledger.clone().run();
        let vault = Vault::open(&config.store, &store.installation().await?)?;
        let config = Arc::new(config);
        let hypervisors = Arc::new(Hypervisors::new(&config));
        let slots = Slots::new(config.slots, config.hold_down);
        let uid_base = config.uid_base;
        let clearing =
            reconcile::clear_stuck(router.clone(), slots.clone(), store.clone(), uid_base);
        let wakes = Turns::new(config.wakes);
        let fetches = Fetches::new(&config.state_dir, config.state_reserve);
        let keeper = Self(Arc::new(Shared {
            _clearing: AbortOnDropHandle::new(tokio::spawn(clearing)),
            _accounting: AbortOnDropHandle::new(tokio::spawn(accounting)),
            ledger,
            slots,
            config,
            router,
            hypervisors,
            vault,
            store,
            policies,
            trail,
            handles: Mutex::default(),
            wakes,
            fetches,
            puts: Turns::new(PUTS),
            births: tokio::sync::Mutex::default(),
            drivers: TaskTracker::new(),
        }));
        keeper.reconcile().await?;
        keeper.0.ledger.settled().await;
        // What guests run on is found out by trying, which takes a second where KVM only pretends.
        let hypervisors = keeper.0.hypervisors.clone();
        tokio::spawn(async move { hypervisors.warm().await });
        Ok(keeper)
    }

    async fn reconcile(&self) -> Result<(), Error> {
        let shared = &self.0;
        let records = shared.store.sandboxes().await?;
        for slot in shared.store.resting(shared.config.hold_down).await? {
            shared.slots.rest(slot, Instant::now());
        }
        for (slot, driver) in shared.store.kept().await? {
            shared.slots.keep(slot, reconcile::kept_by(driver));
        }
        let kept = records.iter().filter_map(|record| Some(record.stored.as_ref()?.key.clone()));
        let kept = kept.chain(shared.store.snapshot_keys().await?).collect();
        let (vault, last) = (shared.vault.clone(), shared.store.last_key().await?);
        let hypervisors = shared.hypervisors.clone();
        tokio::spawn(reconcile::forget_orphans(vault, hypervisors, kept, last));
        reconcile::sweep(&shared.router, &shared.slots, &records).await?;
        shared.hypervisors.forget_images().await;
        fault::at(Point::OrphansSwept);
        let mut adopted = Vec::new();
        for mut record in records {
            shared.slots.take_this(record.slot);
            let machine = reconcile::judge(&shared.hypervisors, &mut record).await;
            let runs = matches!(machine.state(), State::Running | State::Saving);
            let handle = self.drive(record, machine);
            // A hook that hangs is waited for by who asks about its sandbox, and by nobody else.
            adopted.extend(runs.then_some(handle));
            fault::at(Point::SandboxTakenUp);
        }
        for mut handle in adopted {
            handle.rest(|_| {}).await;
        }
        Ok(())
    }

    /// Does what changes the journal to its end, even when the caller goes away meanwhile: what was
    /// written and what is in force must not part.
    async fn whole<T: Send + 'static>(
        &self,
        act: impl Future<Output = Result<T, Error>> + Send + 'static,
    ) -> Result<T, Error> {
        joined(self.0.drivers.spawn(act)).await.flatten()
    }

    /// The sandbox of this name.
    pub fn find(&self, name: &SandboxName) -> Result<Found, Error> {
        self.handle(name).map(Found::new)
    }

    /// One sandbox as it is now.
    #[must_use]
    pub fn show(&self, found: &Found) -> Sandbox {
        self.view(found.handle())
    }

    /// All sandboxes by name, or a tenant's.
    #[must_use]
    pub fn list(&self, tenant: Option<&TenantName>) -> Vec<Sandbox> {
        let handles: Vec<Handle> = locked(&self.0.handles).values().cloned().collect();
        handles
            .iter()
            .filter(|handle| tenant.is_none_or(|tenant| handle.record.tenant == *tenant))
            .map(|handle| self.view(handle))
            .collect()
    }

    /// Removes a sandbox and waits until nothing of it is left, or until only the journal, which
    /// cannot be written, still has it. Removing one that is being removed waits for the same end.
    pub async fn remove(&self, found: &Found, actor: &Actor) -> Result<(), Error> {
        self.0.trail.record(self.control(found.record(), actor, "sandbox remove"));
        ask_to_go(found, false).await.map(drop)
    }

    /// The same, but what runs it is tried to be ended once more at most; everything else goes. Gives
    /// what of it is left, in words. The slot of a guest that may be there is nobody's.
    pub async fn force(&self, found: &Found, actor: &Actor) -> Result<Option<String>, Error> {
        self.0.trail.record(self.control(found.record(), actor, "sandbox remove by force"));
        ask_to_go(found, true).await
    }

    /// Starts a command in a guest, which is woken for it: a stream on which the agent has been told what
    /// to run; both directions carry the agent's frames from here on. The guest is not put to sleep by
    /// itself before the call is dropped.
    pub async fn exec(
        &self,
        found: &Found,
        exec: &agent::Exec,
        actor: &Actor,
    ) -> Result<(GuestStream, Call), Error> {
        let handle = found.handle();
        if exec.argv.is_empty() {
            let fix = "give the command and its arguments as a list";
            return Err(Error::Invalid(Field::new("argv", "[]", "is empty", fix)));
        }
        let program = exec.argv.first().map(|program| policy::audit::shown(program));
        let detail = format!("exec {}", program.unwrap_or_default());
        self.0.trail.record(self.control(&handle.record, actor, &detail));
        let call = self.awake(handle, "a command needs a running guest").await?;
        Ok((crate::acts::exec(&self.0.router, &handle.record, exec).await?, call))
    }

    /// How many slots are kept from use because something of their last guest would not go.
    #[must_use]
    pub fn stuck_slots(&self) -> usize {
        self.0.slots.stuck().len()
    }

    /// Lets drivers finish what they are at, then stops. MicroVMs go on running.
    pub async fn close(&self) {
        self.0.drivers.close();
        locked(&self.0.handles).clear();
        self.0.drivers.wait().await;
        self.0.ledger.close().await;
    }

    /// Notes that the router has closed: what it had of connections of guests that sleep has had its last
    /// record, which the next daemon need not write.
    pub async fn closed(&self) -> Result<(), Error> {
        self.0.store.ends_told().await
    }

    fn handle(&self, name: &SandboxName) -> Result<Handle, Error> {
        locked(&self.0.handles).get(name).cloned().ok_or_else(|| Error::NotFound(name.to_string()))
    }

    fn view(&self, handle: &Handle) -> Sandbox {
        let Record { name, tenant, .. } = &handle.record;
        let closed_by = self.0.policies.in_force().unreadable(name, tenant);
        let seen = handle.view(&self.0.config.netns, &self.0.config.egress);
        Sandbox { closed_by: closed_by.map(|scope| scope.to_string()), ..seen }
    }

    fn control(&self, record: &Record, actor: &Actor, what: &str) -> AuditRecord {
        let mut audit = AuditRecord::new(fault::wall_clock(), Kind::Control, Outcome::Allow);
        audit.sandbox = Some(record.name.clone());
        audit.tenant = Some(record.tenant.clone());
        let now = self.handle(&record.name).ok();
        let now = now.filter(|handle| handle.record.incarnation == record.incarnation);
        let now = now.map(|handle| handle.published.borrow().incarnation);
        audit.incarnation = Some(now.unwrap_or(record.incarnation));
        let by = |who| format!("{what} by {who}");
        audit.saying(&by(actor.full()), &by(actor.told()))
    }

    /// Starts the driver of a sandbox that is in the journal.
    fn drive(&self, record: Record, machine: Machine) -> Handle {
        let shared = self.0.clone();
        // Locked until the handle can be found: a policy put in force in between would pass it by.
        let in_force = shared.policies.in_force();
        let policy = PolicyHandle::new(in_force.over(&record.name, &record.tenant));
        let (verbs, inbox) = mpsc::channel(VERBS);
        let (wakes, fetches) = (shared.wakes.clone(), shared.fetches.clone());
        let mut rest = Rest::new(record.terms.clone(), record.tenant.clone(), wakes, fetches);
        rest.set_alarm(record.night.alarm.as_ref());
        let (published, seen) = watch::channel(Published {
            state: machine.state(),
            reason: record.reason.clone(),
            pid: None,
            incarnation: record.incarnation,
            cold: record.cold.clone(),
            doing: machine.next(),
            error: None,
            forced: false,
            left: None,
        });
        let acts = Acts::new(
            shared.config.clone(),
            shared.router.clone(),
            shared.hypervisors.clone(),
            policy.clone(),
        );
        let tab = shared.ledger.tab(&record, machine.state(), acts.kept_in(&record));
        let ((end, to_end), booted) = (watch::channel(End::default()), record.cold.boots);
        let handle = Handle {
            record: record.clone(),
            policy,
            verbs,
            end,
            published: seen,
            calls: rest.calls.clone(),
            shown: Arc::clone(&rest.shown),
        };
        locked(&shared.handles).insert(record.name.clone(), handle.clone());
        drop(in_force);
        let task = Task {
            record,
            machine,
            acts,
            store: shared.store.clone(),
            vault: shared.vault.clone(),
            puts: shared.puts.clone(),
            policies: shared.policies.clone(),
            trail: shared.trail.clone(),
            verbs: inbox,
            end: to_end,
            published,
            rest,
            copies: VecDeque::new(),
            stuck: crate::stuck::Stuck::new(Instant::now()),
            rewinds: VecDeque::new(),
            tab,
            arrived: None,
            booted,
            noted: None,
        };
        let drivers = shared.drivers.clone();
        drivers.spawn(async move {
            if let Some(gone) = task.run().await {
                // Name and slot are free before anybody hears that it is gone.
                locked(&shared.handles).remove(&gone.record.name);
                match gone.machine.left() {
                    Left::Nothing => {
                        let Record { slot, tenant, .. } = &gone.record;
                        shared.slots.give_back(*slot, Some(tenant), Instant::now());
                    }
                    Left::Network => shared.slots.keep(gone.record.slot, Stuck::Network),
                    Left::Process => {
                        let Record { slot, driver, .. } = gone.record;
                        shared.slots.keep(slot, reconcile::kept_by(driver));
                    }
                }
                gone.publish(None);
            }
        });
        handle
    }
}

/// Asks for the end of a sandbox and waits for it, or for why it has to be waited for. Gives what is left.
async fn ask_to_go(found: &Found, forced: bool) -> Result<Option<String>, Error> {
    let mut handle = found.handle().clone();
    handle.remove(forced);
    loop {
        let seen = handle.published.borrow_and_update().clone();
        match (seen.state, seen.error) {
            (State::Gone, _) => return Ok(seen.left),
            // What failed before it is removed by force is no answer to that.
            (State::Deleting, Some(error)) if seen.doing.is_none() && (seen.forced || !forced) => {
                return Err(Error::Shared(error));
            }
            _ => {}
        }
        if handle.published.changed().await.is_err() {
            let seen = handle.published.borrow();
            let gone = seen.state == State::Gone;
            return if gone { Ok(seen.left.clone()) } else { Err(Error::Stopping) };
        }
    }
}
