//! A sandbox that goes back to a snapshot. That is read whole before anything is given up; then one step in the
//! journal makes the sandbox another incarnation, which sleeps in the store under the snapshot's key, and only
//! then what it was is ended. So whenever a daemon dies it is before or after, and nothing in between.

use std::sync::Arc;

use policy::audit::Outcome;

use crate::driver::Task;
use crate::driver::rest::Reply;
use crate::error::{Error, chain};
use crate::machine::Act;
use crate::night::Night;
use crate::reason::Reason;
use crate::sandbox::Driver;
use crate::snapshot::Snapshot;
use crate::state::State;
use crate::store::Record;

/// A moment to go back to, and who waits for that.
#[derive(Debug)]
pub(crate) struct Moment {
    to: Snapshot,
    reply: Reply,
}

impl Task {
    /// Somebody wants it back at this moment, which is begun once it rests.
    pub(super) fn want_back(&mut self, to: Snapshot, reply: Reply) {
        if self.record.driver == Driver::Qemu {
            self.rewinds.push_back(Moment { to, reply });
        } else {
            let problem = "its driver's files are not the node's to go back to";
            let _ = reply.send(Err(Arc::new(self.not_now(problem))));
        }
    }

    /// It rests: it goes back now, if that is wanted.
    pub(super) fn begin_to_rewind(&mut self) {
        if self.rewinds.is_empty() {
            return;
        }
        if matches!(self.machine.state(), State::Running | State::Standby | State::Suspended) {
            self.forget_error();
            self.machine.rewind();
            return self.publish(self.machine.next());
        }
        let error = Arc::new(self.not_now("only one that runs or sleeps goes back"));
        self.rewinds.drain(..).for_each(|one| _ = one.reply.send(Err(Arc::clone(&error))));
    }

    /// Goes back, as far as the journal: what follows is a wake. None where it does not, which is its caller's to
    /// hear; it is what it was then.
    pub(super) async fn rewind(&mut self) -> Option<Result<(), Error>> {
        let Some(Moment { to, reply }) = self.rewinds.pop_front() else {
            self.machine.stay_as_it_is();
            return None;
        };
        match self.rewound(&to).await {
            Some(Ok(())) => {
                let Snapshot { name, incarnation, .. } = &to;
                let told = format!(
                    "rolled back to snapshot {name} of incarnation {incarnation}; its connections are ended"
                );
                self.audit_why(Outcome::Allow, &told, None);
                let (name, state) = (self.record.name.clone(), self.machine.state().as_str());
                self.rest.wake(reply, || Error::WrongState {
                    name: name.clone(),
                    state,
                    problem: "it is rolled back".to_owned(),
                });
                return Some(Ok(()));
            }
            Some(Err(error)) => {
                tracing::warn!(sandbox = %self.record.name, snapshot = %to.name, error = chain(&error), "not rolled back");
                let why = Some(Reason::of(&error));
                let told = format!("not rolled back to snapshot {}", to.name);
                self.audit_why(Outcome::Fail, &told, why);
                let _ = reply.send(Err(Arc::new(error)));
            }
            None => {
                let problem = "it is being removed, or the daemon stops";
                let _ = reply.send(Err(Arc::new(self.not_now(problem))));
            }
        }
        self.machine.stay_as_it_is();
        None
    }

    /// None when somebody wanted it removed while the store was read, or its time was over.
    async fn rewound(&mut self, to: &Snapshot) -> Option<Result<(), Error>> {
        let checked = {
            let (vault, files) = (self.vault.clone(), self.acts.hypervisors().files(&self.record));
            self.unless_it_ends(vault.check(&to.stored, &files)).await
        };
        if let Err(error) = checked? {
            return Some(Err(self.step(Act::Rewind, error)));
        }
        let mut then = Record {
            stored: Some(to.stored.clone()),
            night: Night { remains: to.remains_in(self.record.slot), ..Night::default() },
            saved: None,
            reason: None,
            ..self.record.clone()
        };
        then.cold.due = false;
        Some(match self.store.rewind(then.clone(), to).await {
            Ok(Some(incarnation)) => {
                let past = std::mem::replace(&mut self.record, Record { incarnation, ..then });
                self.noted = Some(self.record.night.clone());
                // What the store had of what it was, if it had.
                past.stored.into_iter().for_each(|stored| self.release_key(stored.key));
                self.rest.set_alarm(None);
                Ok(())
            }
            Ok(None) => Err(Error::NoSnapshot(to.name.to_string())),
            Err(error) => Err(error),
        })
    }
}
