//! The verbs of sleep and of life: standby, resume, keep awake, renew, and the way to a guest's port.
//!
//! Whoever wants something of a guest that sleeps waits until it runs, for a bounded time; the waking goes on
//! when nobody waits any more.

use std::sync::Arc;
use std::time::Duration;

use egress::GuestStream;
use policy::net::AGENT_PORT;
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::cold::ColdBoot;
use crate::driver::{Call, Handle, LONGEST_LEASE, Reply, Verb};
use crate::error::{Error, Field};
use crate::keeper::{Found, Keeper};
use crate::night::{Alarm, Wake};
use crate::sandbox::{Actor, Driver, Sandbox};
use crate::state::State;
use crate::terms::{Can, OnIdle, Terms, Uptime, WantedTerms, checked};

impl Keeper {
    /// Puts a sandbox to sleep, whether it is idle or not, and waits until it is. It is woken at this time,
    /// if somebody has not woken it before; the last word on that counts.
    pub async fn standby(
        &self,
        found: &Found,
        wake: Option<Wake>,
        actor: &Actor,
    ) -> Result<Sandbox, Error> {
        let (now, wall) = (Uptime::now(), fault::wall_clock());
        let alarm = wake.map(|wake| Alarm::set(wake, &now, wall)).transpose()?;
        let until = alarm.as_ref().and_then(|alarm| {
            alarm.wall().duration_since(wall).ok().map(|left| format!(" for {}s", left.as_secs()))
        });
        let what = format!("standby{}", until.unwrap_or_default());
        let handle = self.asked(found, actor, &what);
        self.ask(handle, None, |reply| Verb::Standby(alarm, reply)).await?;
        Ok(self.view(handle))
    }

    /// Puts a sandbox to sleep and into the object store, and waits until it is there and nowhere else.
    pub async fn suspend(&self, found: &Found, actor: &Actor) -> Result<Sandbox, Error> {
        let handle = self.asked(found, actor, "suspend");
        self.ask(handle, None, Verb::Suspend).await?;
        Ok(self.view(handle))
    }

    /// Wakes a sandbox and waits until it runs; good for one that does.
    pub async fn resume(&self, found: &Found, actor: &Actor) -> Result<Sandbox, Error> {
        let handle = self.asked(found, actor, "resume");
        self.ask(handle, Some(self.0.config.wake_deadline), Verb::Wake).await?;
        Ok(self.view(handle))
    }

    /// The same, also for one that has failed, which boots from its disk: where that is allowed, and within what
    /// its tenant may have, for which one that has failed does not count.
    pub async fn resume_cold(&self, found: &Found, actor: &Actor) -> Result<Sandbox, Error> {
        let handle = self.asked(found, actor, "resume --cold");
        {
            // Whoever is made or comes back meanwhile counts.
            let _birth = self.0.births.lock().await;
            if handle.published.borrow().state == State::Failed {
                self.check_return(&handle.record).await?;
                self.ask(handle, None, Verb::Revive).await?;
            }
        }
        self.ask(handle, Some(self.0.config.wake_deadline), Verb::Wake).await?;
        Ok(self.view(handle))
    }

    /// Keeps a sandbox awake so long from now, and wakes it if it sleeps. A longer lease that it has stays.
    pub async fn keep_awake(
        &self,
        found: &Found,
        span: Duration,
        actor: &Actor,
    ) -> Result<Sandbox, Error> {
        let lease = Duration::from_secs(1)..=LONGEST_LEASE;
        if !lease.contains(&span) {
            let given = format!("{}ms", span.as_millis());
            let fix = "give 1s to 24h, and ask again before it is over";
            return Err(Error::Invalid(Field::new("for", given, "is out of range", fix)));
        }
        let handle = self.asked(found, actor, &format!("keep-awake {}s", span.as_secs()));
        // First the lease, which nothing puts it to sleep under.
        self.ask(handle, None, |reply| Verb::KeepAwake(span, reply)).await?;
        self.ask(handle, Some(self.0.config.wake_deadline), Verb::Wake).await?;
        Ok(self.view(handle))
    }

    /// Lets a sandbox live so long from now, or as long as it was given; no longer than its longest life.
    pub async fn renew(
        &self,
        found: &Found,
        ttl: Option<Duration>,
        actor: &Actor,
    ) -> Result<Sandbox, Error> {
        if let Some(ttl) = ttl {
            checked(("ttl", ttl))?;
        }
        let handle = self.asked(found, actor, "renew");
        self.ask(handle, None, |reply| Verb::Renew(ttl, reply)).await?;
        Ok(self.view(handle))
    }

    /// Connects to a port of a guest, which is woken for it. The connection survives its sleep, and does not
    /// keep it awake by itself.
    pub async fn connect(
        &self,
        found: &Found,
        port: u16,
        actor: &Actor,
    ) -> Result<GuestStream, Error> {
        if port == 0 || port == AGENT_PORT {
            let fix = "give the port of a program of the guest; `exec` runs commands";
            return Err(Error::Invalid(Field::new("port", port, "is not for this", fix)));
        }
        let handle = self.asked(found, actor, &format!("connect {port}"));
        let _call = self.awake(handle, "a connection needs a running guest").await?;
        let connected = self.0.router.connect(handle.record.slot, port).await;
        connected.map_err(|error| Error::Port {
            name: found.name().clone(),
            port,
            source: Box::new(error),
        })
    }

    /// Waits until the guest runs, if it sleeps. It is not put to sleep by itself before the call is over.
    pub(super) async fn awake(&self, handle: &Handle, needs: &str) -> Result<Call, Error> {
        // In this order: a driver that finds nobody calling has told that its guest falls asleep before.
        let call = handle.calls.begin();
        let state = handle.published.borrow().state;
        match state {
            State::Running => {}
            State::Saving
            | State::Standby
            | State::Suspending
            | State::Suspended
            | State::Resuming => {
                self.ask(handle, Some(self.0.config.wake_deadline), Verb::Wake).await?;
            }
            State::Gone => return Err(Error::NotFound(handle.record.name.to_string())),
            State::Creating | State::Failed | State::Deleting => {
                return Err(Error::WrongState {
                    name: handle.record.name.clone(),
                    state: state.as_str(),
                    problem: needs.to_owned(),
                });
            }
        }
        Ok(call)
    }

    /// Refuses what a driver cannot do on this node.
    pub(super) fn check_rest(&self, driver: Driver, wanted: &WantedTerms) -> Result<(), Error> {
        if wanted.cold_boot == Some(ColdBoot::Allowed) && !self.can(driver).boot {
            let problem = "is not possible for this driver, whose disks are not the node's";
            let fix = "leave it out, or use the driver `qemu`";
            return Err(Error::Invalid(Field::new("cold_boot", "allowed", problem, fix)));
        }
        if wanted.on_idle == Some(OnIdle::Suspend) && !self.can(driver).store {
            let problem = "is not possible for this driver, whose files are not the node's";
            let fix = "use `standby`, `never` or `delete`, or the driver `qemu`";
            return Err(Error::Invalid(Field::new("on_idle", "suspend", problem, fix)));
        }
        wanted.checked_by(&self.0.config.terms)?;
        if wanted.on_idle != Some(OnIdle::Standby) || self.0.hypervisors.can_sleep(driver) {
            return Ok(());
        }
        let problem = "is not possible for this driver on this node";
        let fix =
            "use `never` or `delete`, or have `external.on_standby` and `on_resume` configured";
        Err(Error::Invalid(Field::new("on_idle", "standby", problem, fix)))
    }

    pub(super) fn terms(&self, driver: Driver, wanted: &WantedTerms) -> Terms {
        Terms::agree(wanted, &self.0.config.terms, self.can(driver))
    }

    fn can(&self, driver: Driver) -> Can {
        let ours = driver == Driver::Qemu;
        Can { sleep: self.0.hypervisors.can_sleep(driver), boot: ours, store: ours }
    }

    /// The handle of a sandbox, with a record of what was asked of it.
    pub(super) fn asked<'a>(&self, found: &'a Found, actor: &Actor, what: &str) -> &'a Handle {
        let handle = found.handle();
        self.0.trail.record(self.control(&handle.record, actor, &format!("sandbox {what}")));
        handle
    }

    /// Asks its driver, and waits for what comes of it.
    pub(super) async fn ask(
        &self,
        handle: &Handle,
        limit: Option<Duration>,
        verb: impl FnOnce(Reply) -> Verb,
    ) -> Result<(), Error> {
        let (reply, told) = oneshot::channel();
        let name = &handle.record.name;
        let asked = async {
            handle.verbs.send(verb(reply)).await.ok()?;
            told.await.ok()
        };
        let told = match limit {
            None => asked.await,
            Some(limit) => timeout(limit, asked)
                .await
                .map_err(|_| Error::Late { name: name.clone(), limit })?,
        };
        match told {
            Some(came) => came.map_err(|error| Error::Shared(Arc::clone(&error))),
            None if handle.published.borrow().state == State::Gone => {
                Err(Error::NotFound(name.to_string()))
            }
            None => Err(Error::Stopping),
        }
    }
}
