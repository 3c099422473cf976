//! A sandbox as others see it, and the request that makes one. Values only.

use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use policy::{Policy, PolicyMode, Revision, SandboxName, Slot, TenantName};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Field};
use crate::reason::Reason;
use crate::state::State;
use crate::terms::{OnIdle, WantedTerms};

/// Which hypervisor runs a sandbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Driver {
    /// A QEMU process of ours.
    #[default]
    Qemu,
    /// Somebody else's: we give it a tap and call the operator's hooks.
    External,
}

/// What a caller asks for. Checked whole before anything happens.
#[derive(Clone, Debug)]
pub struct CreateSpec {
    /// Its name, unique on this installation.
    pub name: SandboxName,
    /// Whose it is.
    pub tenant: TenantName,
    /// What runs it.
    pub driver: Driver,
    /// Guest memory in MiB.
    pub memory_mib: u32,
    /// Virtual CPUs.
    pub vcpus: u8,
    /// Its own layer of policy.
    pub policy: Policy,
    /// How long it lives, and what becomes of it when it is idle.
    pub terms: WantedTerms,
}

/// A sandbox that somebody wants, as far as it needs room.
#[derive(Clone, Debug)]
pub struct Wish {
    /// Its name.
    pub name: SandboxName,
    /// Whose it would be.
    pub tenant: TenantName,
    /// What would run it.
    pub driver: Driver,
    /// Guest memory in MiB.
    pub memory_mib: u32,
    /// Virtual CPUs.
    pub vcpus: u8,
}

impl CreateSpec {
    /// Guest memory that may be asked for, in MiB.
    pub const MEMORY_MIB: std::ops::RangeInclusive<u32> = 128..=65_536;
    /// Virtual CPUs that may be asked for.
    pub const VCPUS: std::ops::RangeInclusive<u8> = 1..=32;

    /// What room it needs.
    pub(crate) fn wish(&self) -> Wish {
        Wish {
            name: self.name.clone(),
            tenant: self.tenant.clone(),
            driver: self.driver,
            memory_mib: self.memory_mib,
            vcpus: self.vcpus,
        }
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        if !Self::MEMORY_MIB.contains(&self.memory_mib) {
            let given = format!("{}M", self.memory_mib);
            let field = Field::new("memory", given, "is out of range", "give 128M to 64G");
            return Err(Error::Invalid(field));
        }
        if !Self::VCPUS.contains(&self.vcpus) {
            let field = Field::new("vcpus", self.vcpus, "is out of range", "give 1 to 32");
            return Err(Error::Invalid(field));
        }
        self.terms.check()
    }
}

/// A sandbox as it is now.
#[derive(Clone, Debug)]
pub struct Sandbox {
    /// Its name.
    pub name: SandboxName,
    /// Whose it is.
    pub tenant: TenantName,
    /// What runs it.
    pub driver: Driver,
    /// Its state.
    pub state: State,
    /// Why it failed, or why it is shut in although it runs.
    pub reason: Option<Reason>,
    /// Its slot.
    pub slot: Slot,
    /// The name of its tap inside the guests' namespace.
    pub tap: String,
    /// The guests' namespace, as `ip netns` names it.
    pub netns: String,
    /// The addresses its traffic leaves from, at most one per family.
    pub egress: Vec<IpAddr>,
    /// Guest memory in MiB.
    pub memory_mib: u32,
    /// Virtual CPUs.
    pub vcpus: u8,
    /// Moves on clone, rollback, cold boot and re-creation.
    pub incarnation: u64,
    /// The newest revision among the layers in force.
    pub revision: Revision,
    /// `observe` when a layer in force only records what it refuses.
    pub mode: PolicyMode,
    /// The scope over it whose policy cannot be read: nothing leaves until that is written anew.
    pub closed_by: Option<String>,
    /// The process that runs it, if one of ours does.
    pub pid: Option<u32>,
    /// What becomes of it when it is idle.
    pub on_idle: OnIdle,
    /// How long nothing may go on before it counts as idle; none: it never does.
    pub idle_after: Option<Duration>,
    /// What keeps it awake, what does so longest first; empty while it is not.
    pub awake: Vec<Awake>,
    /// In how long it is woken; none: by whoever wants something of it.
    pub wakes_in: Option<Duration>,
    /// Why then.
    pub wakes_because: Option<&'static str>,
    /// The time it is to be woken at, as it was asked for.
    pub wake_at: Option<SystemTime>,
    /// In how long it is removed; none: not by itself.
    pub expires_in: Option<Duration>,
    /// How often it was woken since this daemon began.
    pub wakes: u64,
    /// How often it was booted from its disk alone since it was made.
    pub cold_boots: u64,
    /// Why it was last, or is to be when it is woken.
    pub cold_reason: Option<Reason>,
    /// When it was created; none where the journal's word for it is damaged.
    pub created: Option<SystemTime>,
}

/// Something that keeps a sandbox awake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Awake {
    /// In a word: `bytes`.
    pub by: &'static str,
    /// As shown to people.
    pub why: &'static str,
    /// For how long, if nothing goes on until then; none where nobody knows.
    pub left: Option<Duration>,
}

/// One line of progress of a long verb.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Progress {
    /// What begins now, in the present participle: `booting`.
    pub doing: &'static str,
    /// Milliseconds since the verb was taken up.
    pub at_ms: u64,
}

/// Who asked for a change, and from where: for the audit, never for a decision.
#[derive(Clone, Debug)]
pub struct Actor {
    description: String,
    is_operator: bool,
}

impl Actor {
    /// From a description without secrets, e.g. `uid=0 unix`. Of the operator, tenants are told no more
    /// than that it was the operator.
    #[must_use]
    pub fn new(description: impl Into<String>, is_operator: bool) -> Self {
        Self { description: description.into(), is_operator }
    }

    pub(crate) fn full(&self) -> &str {
        &self.description
    }

    pub(crate) fn told(&self) -> &str {
        if self.is_operator { "the operator" } else { &self.description }
    }
}
