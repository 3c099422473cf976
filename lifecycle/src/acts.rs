//! What each act of the machine does: the only module of this room that touches taps, processes and
//! the agent. Every undoing is good for things that are not there.

mod agent;
mod drivers;
mod sleep;

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use egress::{Attachment, Router};
use fault::Point;
use policy::{PolicyHandle, SandboxName, Slot};
use tokio::time::timeout;
use vmm::Hypervisor;

use crate::config::{Config, Quota};
use crate::error::Error;
use crate::machine::Act;
use crate::sandbox::Driver;
use crate::state::State;
use crate::store::Record;

pub(crate) use crate::acts::agent::{exec, hello};
pub(crate) use crate::acts::drivers::{Hypervisors, free};

/// The pause between two tries to reach an agent that does not listen yet.
const AGAIN: Duration = Duration::from_millis(50);

/// The acts of one sandbox.
#[derive(Debug)]
pub(crate) struct Acts {
    config: Arc<Config>,
    router: Router,
    hypervisors: Arc<Hypervisors>,
    policy: PolicyHandle,
    /// Open from the making of the tap until the process has it.
    tap: Option<OwnedFd>,
}

impl Acts {
    pub(crate) fn new(
        config: Arc<Config>,
        router: Router,
        hypervisors: Arc<Hypervisors>,
        policy: PolicyHandle,
    ) -> Self {
        Self { config, router, hypervisors, policy, tap: None }
    }

    pub(crate) fn is_running(&self, record: &Record) -> bool {
        self.hypervisors.is_running(record)
    }

    pub(crate) fn hypervisors(&self) -> &Hypervisors {
        &self.hypervisors
    }

    /// What one tenant may take of the node.
    pub(crate) fn quota(&self) -> &Quota {
        &self.config.quota
    }

    pub(crate) fn hypervisors_shared(&self) -> Arc<Hypervisors> {
        Arc::clone(&self.hypervisors)
    }

    /// Does it. `hears` says whether the guest can hear a power button.
    pub(crate) async fn perform(
        &mut self,
        act: Act,
        record: &mut Record,
        hears: bool,
    ) -> Result<(), Error> {
        let name = record.name.clone();
        let done = match act {
            Act::MakeTap => self.make_tap(record.slot).await,
            Act::RaiseFence => self.raise_fence(record).await,
            Act::StartProcess => self.start_process(record).await,
            Act::GreetAgent => self.greet_agent(record).await,
            Act::Hold => self.router.hold(record.slot).await.map(drop).map_err(boxed),
            Act::Pause => self.pause(record).await,
            Act::Checkpoint => self.checkpoint(record).await,
            Act::Save => self.save(record).await,
            Act::OpenTap => self.open_tap(record.slot).await,
            Act::CheckFence => self.router.assure_fence(record.slot).await.map_err(boxed),
            Act::Prepare => self.prepare(record).await,
            Act::Rebuild => self.router.rebuild(record.slot).await.map(drop).map_err(boxed),
            Act::TellEnds => self.tell_ends(record).await,
            Act::Unpause => self.unpause(record).await,
            Act::DropLocal => self.hypervisors.drop_local(record).await.map_err(boxed),
            // Not of what is here: the driver does these.
            Act::BeginAnew | Act::Copy | Act::Rewind | Act::Store | Act::Fetch => Ok(()),
            Act::Refresh => self.refresh(record).await,
            Act::Release => self.router.release(record.slot).await.map_err(boxed),
            Act::Discard => self.discard(record).await,
            Act::StopProcess => self.stop_process(record, hears).await,
            Act::LowerFence => self.router.detach(record.slot).await.map(drop).map_err(boxed),
            Act::DeleteTap => self.delete_tap(record.slot).await,
            Act::DropMemory => self.drop_memory(record).await,
            Act::RemoveFiles => self.remove_files(&record.name).await,
        };
        done.map_err(|source| Error::Step { doing: act.doing(), name, source })
    }

    async fn make_tap(&mut self, slot: Slot) -> Result<(), Boxed> {
        let owner = self.uid(slot);
        let made = self.router.within(move || vmm::tap::create(slot, Some(owner))).await?;
        self.tap = Some(made?);
        Ok(())
    }

    async fn raise_fence(&self, record: &Record) -> Result<(), Boxed> {
        let attachment = Attachment {
            subject: Arc::new(record.subject()),
            policy: self.policy.clone(),
            egress: self.config.egress.clone(),
        };
        self.router.attach(attachment).await.map_err(boxed)
    }

    async fn start_process(&mut self, record: &mut Record) -> Result<(), Boxed> {
        let machine = self.describe(record);
        let tap = self.tap.take().ok_or("the tap is not open")?;
        tokio::fs::create_dir_all(self.state_dir(&record.name)).await?;
        fault::at(Point::FolderMade);
        let process = match record.driver {
            Driver::Qemu => self.hypervisors.qemu.start(&machine, tap).await?,
            Driver::External => self.hypervisors.external.start(&machine, tap).await?,
        };
        record.process = Some(process);
        Ok(())
    }

    /// Waits for the agent's first word and sets the guest's clock. A foreign guest may have no
    /// agent, so nobody waits for one there.
    async fn greet_agent(&self, record: &Record) -> Result<(), Boxed> {
        if record.driver == Driver::External {
            return Ok(());
        }
        let deadline = self.config.boot_deadline;
        let greeted = timeout(deadline, async {
            loop {
                if !self.is_running(record) {
                    return Err("the microVM ended while booting".to_owned());
                }
                match hello(&self.router, record).await {
                    Ok(_stream) => return Ok(()),
                    Err(error) => tracing::trace!(sandbox = %record.name, %error, "no agent yet"),
                }
                tokio::time::sleep(AGAIN).await;
            }
        });
        let problem = match greeted.await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(problem)) => problem,
            Err(_) => format!(
                "its agent did not answer within {deadline:?}; if it only boots slowly, as under \
                 emulation, raise `qemu.boot_timeout`"
            ),
        };
        // Its log goes with a creation that is undone.
        let console = record.process.as_ref().map(vmm::Process::console_end).unwrap_or_default();
        let console = match console.as_str() {
            "" => "is empty".to_owned(),
            console => format!("ends: {console}"),
        };
        Err(boxed(Error::Boot { problem, console }))
    }

    async fn stop_process(&mut self, record: &mut Record, hears: bool) -> Result<(), Boxed> {
        self.tap = None;
        let qemu = self.hypervisors.qemu.clone();
        // A guest that still boots, or stands still, heeds no power button, and has nothing to lose.
        let qemu = if hears { qemu } else { qemu.with_grace(Duration::ZERO) };
        let process = match record.driver {
            // A daemon that died between the start and its note left a process only QEMU's own
            // traces lead to.
            Driver::Qemu => match record.process.clone() {
                Some(process) => Some(process),
                None => qemu.find(&self.describe(record)),
            },
            // And whatever the hook of somebody else's started, which only the other hook can end. One
            // that has failed was ended then.
            Driver::External if record.state == State::Failed => record.process.clone(),
            Driver::External => {
                let found = || self.hypervisors.external.find(&self.describe(record));
                Some(record.process.clone().unwrap_or_else(found))
            }
        };
        if let Some(process) = process {
            match record.driver {
                Driver::Qemu => qemu.stop(&process).await?,
                Driver::External => self.hypervisors.external.stop(&process).await?,
            }
        } else if record.driver == Driver::Qemu {
            qemu.clear(&self.describe(record)).await?;
        }
        record.process = None;
        Ok(())
    }

    async fn delete_tap(&mut self, slot: Slot) -> Result<(), Boxed> {
        self.tap = None;
        self.router.delete_tap(slot).await.map_err(boxed)
    }

    /// A sandbox that has failed counts for no quota of memory, so it has none. Its console log stays.
    async fn drop_memory(&self, record: &Record) -> Result<(), Boxed> {
        let machine = self.describe(record);
        for file in [machine.memory, machine.state] {
            match tokio::fs::remove_file(&file).await {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
                _ => {}
            }
        }
        Ok(())
    }

    async fn remove_files(&self, name: &SandboxName) -> Result<(), Boxed> {
        for dir in [self.run_dir(name), self.memory_dir(name), self.state_dir(name)] {
            match tokio::fs::remove_dir_all(&dir).await {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
                _ => fault::at(Point::RunFilesRemoved),
            }
        }
        Ok(())
    }

    /// The files of a sandbox that sleeps: its memory and its state.
    pub(crate) fn kept_in(&self, record: &Record) -> [PathBuf; 2] {
        let machine = self.describe(record);
        [machine.memory, machine.state]
    }

    fn describe(&self, record: &Record) -> vmm::Machine {
        describe(&self.config, record)
    }

    fn uid(&self, slot: Slot) -> u32 {
        uid(&self.config, slot)
    }

    fn run_dir(&self, name: &SandboxName) -> PathBuf {
        below(&self.config.run_dir, name)
    }

    fn memory_dir(&self, name: &SandboxName) -> PathBuf {
        below(&self.config.memory_dir, name)
    }

    fn state_dir(&self, name: &SandboxName) -> PathBuf {
        below(&self.config.state_dir, name)
    }
}

/// The machine of a sandbox, as its driver is to run it.
fn describe(config: &Config, record: &Record) -> vmm::Machine {
    let state_dir = below(&config.state_dir, &record.name);
    let image = |file: &str| state_dir.join("image").join(file);
    let memory_dir = below(&config.memory_dir, &record.name);
    vmm::Machine {
        name: record.name.clone(),
        tenant: record.tenant.clone(),
        slot: record.slot,
        memory_mib: record.memory_mib,
        vcpus: record.vcpus,
        image: config.image_dir.clone(),
        copies: copies(config),
        kernel: image("vmlinuz"),
        initrd: image("initrd.img"),
        cmdline: String::new(),
        base: image("root.ext4"),
        disk: state_dir.join("disk.qcow2"),
        memory: memory_dir.join("memory"),
        state: state_dir.join("state"),
        run_dir: below(&config.run_dir, &record.name),
        uid: uid(config, record.slot),
    }
}

/// Where images are copied to that cannot be linked.
fn copies(config: &Config) -> PathBuf {
    config.state_dir.join("images")
}

fn uid(config: &Config, slot: Slot) -> u32 {
    config.uid_base + u32::from(slot.number())
}

type Boxed = Box<dyn std::error::Error + Send + Sync>;

fn boxed(error: impl std::error::Error + Send + Sync + 'static) -> Boxed {
    Box::new(error)
}

fn below(dir: &Path, name: &SandboxName) -> PathBuf {
    dir.join("sandboxes").join(name.as_str())
}
