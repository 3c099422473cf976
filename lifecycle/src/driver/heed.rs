//! What is wanted of a sandbox, wherever it is: its end, and verbs. Of those no more are heard at once than
//! have been queued by then, and what all of them agree on is journalled once: who asks all the time keeps a
//! driver neither from acting nor from the end of its sandbox, which is not asked for in that queue.

use std::sync::Arc;
use std::time::Duration;

use crate::driver::rest::Reply;
use crate::driver::{Task, Verb};
use crate::error::{Error, Field};
use crate::night::Alarm;
use crate::reason::Reason;
use crate::sandbox::Driver;
use crate::state::State;
use crate::terms::{Terms, Uptime};

/// Terms that were asked for, and who waits for them.
struct Wished {
    terms: Terms,
    replies: Vec<Reply>,
}

impl Task {
    /// Takes up that it is to be removed, whatever has failed until now.
    pub(super) fn heed_end(&mut self) {
        let forced = self.end.borrow_and_update().forced;
        if self.machine.state() != State::Deleting {
            // Who removes it is told of nothing else.
            self.published.send_modify(|seen| seen.error = None);
        }
        self.machine.remove();
        if forced && !self.machine.is_forced() {
            self.machine.force();
            self.published.send_modify(|seen| {
                seen.forced = true;
                seen.error = None;
            });
        }
    }

    /// Whether somebody has wanted its end since that was heeded last.
    pub(super) fn is_to_end(&self) -> bool {
        self.end.has_changed().unwrap_or_default()
    }

    /// Takes up this verb and those that wait by now.
    pub(super) async fn heed_queued(&mut self, first: Option<Verb>) {
        let mut wished = Wished { terms: self.rest.terms.clone(), replies: Vec::new() };
        let queued = self.verbs.len();
        if let Some(verb) = first {
            self.heed(verb, &mut wished).await;
        }
        for _ in 0..queued {
            let Ok(verb) = self.verbs.try_recv() else { break };
            self.heed(verb, &mut wished).await;
        }
        self.agree(wished).await;
    }

    /// Takes up what is wanted, other terms only in `wished`.
    async fn heed(&mut self, verb: Verb, wished: &mut Wished) {
        match verb {
            Verb::Wake(reply) => match self.machine.state() {
                State::Running if self.machine.is_up() => _ = reply.send(Ok(())),
                State::Failed | State::Deleting | State::Gone => self.refuse(reply),
                _ => {
                    let (name, state) = (self.record.name.clone(), self.machine.state().as_str());
                    let problem = "somebody wants something of it".to_owned();
                    self.rest.wake(reply, || Error::WrongState {
                        name: name.clone(),
                        state,
                        problem: problem.clone(),
                    });
                }
            },
            Verb::Revive(reply) => {
                let revived = self.revive().await;
                let _ = reply.send(revived.map_err(Arc::new));
            }
            Verb::Standby(alarm, reply) => match self.machine.state() {
                _ if !self.acts.hypervisors().can_sleep(self.record.driver) => {
                    let problem = "its driver cannot be put to sleep on this node";
                    let _ = reply.send(Err(Arc::new(self.not_now(problem))));
                }
                State::Standby | State::Suspended if self.machine.next().is_none() => {
                    let set = self.set_alarm(alarm).await;
                    let _ = reply.send(set.map_err(Arc::new));
                }
                State::Failed | State::Deleting | State::Gone => self.refuse(reply),
                _ => {
                    // In the journal before it falls asleep.
                    self.rest.set_alarm(alarm.as_ref());
                    self.record.night.alarm = alarm;
                    self.rest.sleep(reply);
                    if self.machine.is_up() {
                        self.begin_to_sleep();
                    }
                }
            },
            Verb::Suspend(reply) => match self.machine.state() {
                _ if self.record.driver != Driver::Qemu => {
                    let problem = "its driver's files are not the node's to be put into the store";
                    let _ = reply.send(Err(Arc::new(self.not_now(problem))));
                }
                State::Suspended if self.machine.next().is_none() => _ = reply.send(Ok(())),
                State::Failed | State::Deleting | State::Gone => self.refuse(reply),
                _ if self.machine.is_cold() => {
                    let problem = "its memory is lost, and there is nothing to put into the store";
                    let _ = reply.send(Err(Arc::new(self.not_now(problem))));
                }
                _ => {
                    self.rest.suspend(reply);
                    if self.machine.is_up() {
                        self.begin_to_sleep();
                    }
                }
            },
            Verb::Snapshot(name, reply) => self.want_copy(name, reply),
            Verb::RollBack(to, reply) => self.want_back(*to, reply),
            Verb::KeepAwake(span, reply) => {
                wished.terms.keep_awake(span, &Uptime::now());
                wished.replies.push(reply);
            }
            Verb::Renew(ttl, reply) => {
                if ttl.is_none() && !wished.terms.is_limited() {
                    let fix = "give the span it is to live from now on";
                    let field = Field::new("ttl", "", "is missing, and it has none", fix);
                    let _ = reply.send(Err(Arc::new(Error::Invalid(field))));
                    return;
                }
                wished.terms.renew(ttl, &Uptime::now());
                wished.replies.push(reply);
            }
        }
    }

    /// Has one that failed sleep with its disk alone, in the journal too.
    async fn revive(&mut self) -> Result<(), Error> {
        if self.machine.state() != State::Failed {
            return Ok(());
        }
        if !self.acts.hypervisors().may_boot(&self.record).await {
            let problem = "it has no disk of this node to boot from, or is not to (`cold_boot`)";
            return Err(self.not_now(problem));
        }
        let (machine, cold) = (self.machine.clone(), self.record.cold.clone());
        if !self.machine.revive() {
            return Err(self.not_now("its process may still be there"));
        }
        let failed =
            self.record.reason.clone().unwrap_or_else(|| Reason::new("for no known reason"));
        self.record.cold.begin(failed.behind("asked for after it had failed"));
        if let Err(error) = self.note().await {
            (self.machine, self.record.cold) = (machine, cold);
            return Err(error);
        }
        self.forget_error();
        self.publish(None);
        Ok(())
    }

    /// Journals when one that sleeps is to be woken before that holds.
    async fn set_alarm(&mut self, alarm: Option<Alarm>) -> Result<(), Error> {
        let before = std::mem::replace(&mut self.record.night.alarm, alarm);
        let noted = self.note().await;
        if noted.is_err() {
            self.record.night.alarm = before;
        }
        self.rest.set_alarm(self.record.night.alarm.as_ref());
        self.look_again();
        noted
    }

    /// Journals other terms before they hold.
    async fn agree(&mut self, wished: Wished) {
        if wished.replies.is_empty() {
            return;
        }
        let agreed = self.store.agree(&self.record.name, wished.terms.clone()).await;
        if agreed.is_ok() {
            self.rest.agreed(wished.terms);
            self.look_again();
        }
        let agreed = agreed.map_err(Arc::new);
        wished.replies.into_iter().for_each(|reply| _ = reply.send(agreed.clone()));
    }

    fn refuse(&self, reply: Reply) {
        let problem = match self.machine.state() {
            State::Failed => {
                "it cannot sleep or wake; `postern resume --cold` boots it from its disk"
            }
            _ => "it cannot sleep or wake",
        };
        let _ = reply.send(Err(Arc::new(self.not_now(problem))));
    }

    pub(super) fn not_now(&self, problem: &str) -> Error {
        Error::WrongState {
            name: self.record.name.clone(),
            state: self.machine.state().as_str(),
            problem: problem.to_owned(),
        }
    }
}

/// The longest that one lease keeps a sandbox awake.
pub(crate) const LONGEST_LEASE: Duration = Duration::from_secs(86_400);
