//! What others have of a sandbox's driver: how to reach it, and what it shows of the sandbox. Changes nothing.

use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use policy::{PolicyHandle, PolicyMode};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use crate::driver::{Calls, Published, Shown, Verb};
use crate::idle::awake;
use crate::sandbox::{Progress, Sandbox};
use crate::store::Record;
use crate::threads::locked;

/// What is known about a sandbox besides its driver: how to reach the driver and what to show.
#[derive(Clone, Debug)]
pub(crate) struct Handle {
    pub(crate) record: Record,
    pub(crate) policy: PolicyHandle,
    pub(crate) verbs: mpsc::Sender<Verb>,
    pub(crate) end: watch::Sender<End>,
    pub(crate) published: watch::Receiver<Published>,
    pub(crate) calls: Calls,
    pub(crate) shown: Arc<Mutex<Shown>>,
}

/// That a sandbox is to be removed: not a verb, since whoever fills the queue of those would keep it out.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct End {
    /// By force; it stays so.
    pub(crate) forced: bool,
}

impl Handle {
    /// Asks for its end.
    pub(crate) fn remove(&self, forced: bool) {
        self.end.send_modify(|end| end.forced |= forced);
    }

    pub(crate) fn view(&self, netns: &str, egress: &[IpAddr]) -> Sandbox {
        let seen = self.published.borrow().clone();
        let record = &self.record;
        let shown = locked(&self.shown).clone();
        let left = |until: Instant| until.saturating_duration_since(Instant::now());
        let in_force = self.policy.load();
        let mode = if in_force.observes() { PolicyMode::Observe } else { PolicyMode::Enforce };
        Sandbox {
            name: record.name.clone(),
            tenant: record.tenant.clone(),
            driver: record.driver,
            state: seen.state,
            reason: seen.reason,
            slot: record.slot,
            tap: record.slot.tap(),
            netns: netns.to_owned(),
            egress: egress.to_vec(),
            memory_mib: record.memory_mib,
            vcpus: record.vcpus,
            incarnation: seen.incarnation,
            revision: in_force.revision(),
            mode,
            closed_by: None,
            pid: seen.pid,
            on_idle: shown.on_idle,
            idle_after: shown.idle_after,
            awake: shown.holds.iter().map(|&(why, until)| awake(why, until.map(left))).collect(),
            wakes_in: shown.wakes_at.map(left),
            wakes_because: shown.wakes_because,
            wake_at: shown.alarm,
            expires_in: shown.ends_at.map(left),
            wakes: shown.wakes,
            cold_boots: seen.cold.boots,
            cold_reason: seen.cold.why,
            created: record.created,
        }
    }

    /// Waits until the sandbox rests, reporting what begins meanwhile.
    pub(crate) async fn rest(&mut self, mut progress: impl FnMut(Progress)) -> Published {
        let began = Instant::now();
        let mut last = None;
        loop {
            let seen = self.published.borrow_and_update().clone();
            if seen.doing.is_none() {
                return seen;
            }
            if let Some(act) = seen.doing.filter(|act| last != Some(*act)) {
                let at_ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
                progress(Progress { doing: act.doing(), at_ms });
                last = Some(act);
            }
            if self.published.changed().await.is_err() {
                return self.published.borrow().clone();
            }
        }
    }
}
