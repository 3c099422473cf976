//! Snapshots of a sandbox: it sleeps while its files are put into the store, and goes on as it was. One that ran
//! is woken by the clock, at once, which the journal has: so the next daemon does it if this one cannot.
//!
//! A snapshot is there once the journal has it, which is after the store has all of it, and not before.

use policy::SnapshotName;
use policy::audit::Outcome;

use std::sync::Arc;

use crate::driver::Task;
use crate::driver::rest::Reply;
use crate::error::{Error, chain};
use crate::machine::Act;
use crate::night::Alarm;
use crate::reason::Reason;
use crate::sandbox::Driver;
use crate::state::State;
use crate::terms::Uptime;

/// A snapshot that is wanted, and who waits for it.
#[derive(Debug)]
pub(crate) struct Wanted {
    name: SnapshotName,
    reply: Reply,
}

impl Task {
    /// Somebody wants one, which is taken once the sandbox rests.
    pub(super) fn want_copy(&mut self, name: SnapshotName, reply: Reply) {
        if self.record.driver == Driver::Qemu {
            self.copies.push_back(Wanted { name, reply });
        } else {
            let problem = "its driver's files are not the node's to take a snapshot of";
            let _ = reply.send(Err(Arc::new(self.not_now(problem))));
        }
    }

    /// It rests: the snapshots that are wanted are taken now, or it is told why they are not. Where it was
    /// meant to fall asleep for them and did not, that is `failed`.
    pub(super) fn begin_to_copy(&mut self, failed: Option<&Arc<Error>>) {
        if self.copies.is_empty() {
            return;
        }
        let problem = match self.machine.state() {
            State::Running if failed.is_none() => {
                self.forget_error();
                let alarm = Alarm::now(&Uptime::now(), fault::wall_clock());
                self.rest.set_alarm(Some(&alarm));
                self.record.night.alarm = Some(alarm);
                self.machine.copy();
                self.publish(self.machine.next());
                return;
            }
            State::Standby if !self.machine.is_cold() => {
                self.forget_error();
                self.machine.copy();
                self.publish(self.machine.next());
                return;
            }
            State::Running => "it could not be put to sleep",
            State::Standby => "its memory is lost, and there is nothing to take a snapshot of",
            State::Suspending | State::Suspended => {
                "a snapshot is taken of what is on this node: resume it first"
            }
            _ => "a snapshot is taken of one that runs or sleeps",
        };
        let error = failed.cloned().unwrap_or_else(|| Arc::new(self.not_now(problem)));
        self.copies.drain(..).for_each(|one| _ = one.reply.send(Err(Arc::clone(&error))));
    }

    /// Takes the snapshot that was wanted first. What it comes to is its caller's to hear; the sandbox goes on
    /// in any case. None when somebody wanted that removed meanwhile.
    pub(super) async fn copy_away(&mut self) -> Option<Result<(), Error>> {
        let Some(Wanted { name, reply }) = self.copies.pop_front() else { return Some(Ok(())) };
        let Some(taken) = self.copied(&name).await else {
            let _ =
                reply.send(Err(Arc::new(self.not_now("it is being removed, or the daemon stops"))));
            return None;
        };
        match &taken {
            Ok(()) => self.audit_why(Outcome::Allow, &format!("snapshot {name} taken"), None),
            Err(error) => {
                tracing::warn!(sandbox = %self.record.name, snapshot = %name, error = chain(error), "no snapshot");
                let why = Some(Reason::of(error));
                self.audit_why(Outcome::Fail, &format!("snapshot {name} not taken"), why);
            }
        }
        let _ = reply.send(taken.map_err(Arc::new));
        Some(Ok(()))
    }

    async fn copied(&mut self, name: &SnapshotName) -> Option<Result<(), Error>> {
        let most = self.acts.quota().snapshots;
        let ready = async {
            self.store.check_snapshot(name, &self.record.tenant, most).await?;
            self.acts.hypervisors().check_room(&self.record).await?;
            self.store.next_key(&self.record.name).await
        };
        let key = match ready.await {
            Ok(key) => key,
            Err(error) => return Some(Err(error)),
        };
        let put = self.put(&key, true).await;
        let kept = match put {
            Some(Ok(stored)) => self.keep(name, stored).await,
            Some(Err(error)) => Err(self.step(Act::Copy, error)),
            None => {
                self.forget_key(key);
                return None;
            }
        };
        if kept.is_err() {
            self.drop_image(&key).await;
            self.forget_key(key);
        }
        Some(kept)
    }

    /// With what else it needs, and in the journal.
    async fn keep(&self, name: &SnapshotName, stored: vault::Stored) -> Result<(), Error> {
        let hypervisors = self.acts.hypervisors();
        let linked = hypervisors.keep_image(&self.record, &stored.key).await;
        linked.map_err(|error| self.step(Act::Copy, error))?;
        let snapshot = self.record.snapshot(name.clone(), stored, fault::wall_clock());
        self.store.keep_snapshot(&snapshot, self.acts.quota().snapshots).await
    }

    async fn drop_image(&self, key: &str) {
        self.acts.hypervisors().drop_image(key).await;
    }
}
