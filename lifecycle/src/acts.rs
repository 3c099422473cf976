//! What each act of the machine does: the only file of this room that touches taps, processes and
//! the agent. Every undoing is good for things that are not there.

use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use agent::{Decoder, Exec, FromGuest, FromHost, Message};
use egress::{Attachment, GuestStream, Router};
use fault::Point;
use policy::{PolicyHandle, SandboxName, Slot, Subject};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{sleep, timeout};
use vmm::{External, Hypervisor, Qemu};

use crate::config::Config;
use crate::error::{Error, Field};
use crate::machine::Act;
use crate::sandbox::Driver;
use crate::state::State;
use crate::store::Record;

/// How long an agent that listens may take to say who it is.
const HELLO: Duration = Duration::from_secs(5);
/// The pause between two tries to reach an agent that does not listen yet.
const AGAIN: Duration = Duration::from_millis(50);

/// The drivers of this node.
#[derive(Debug)]
pub(crate) struct Hypervisors {
    qemu: Qemu,
    external: External,
    image_dir: PathBuf,
}

impl Hypervisors {
    pub(crate) fn new(config: &Config) -> Self {
        let netns = config.netns.clone();
        Self {
            qemu: Qemu::new(&config.qemu),
            external: External { netns, hooks: config.hooks.clone() },
            image_dir: config.image_dir.clone(),
        }
    }

    /// Refuses a driver that cannot start anything on this node.
    pub(crate) fn check(&self, driver: Driver) -> Result<(), Error> {
        let missing = match driver {
            Driver::External => return Ok(()),
            Driver::Qemu => ["vmlinuz", "initrd.img", "root.ext4"]
                .into_iter()
                .find(|file| !self.image_dir.join(file).is_file()),
        };
        let Some(missing) = missing else { return Ok(()) };
        Err(Error::NoImage(self.image_dir.join(missing)))
    }

    /// Bytes that the disk of a sandbox of this driver can grow to: what its process may write is bounded
    /// by the size of the image's. None of ours for somebody else's.
    pub(crate) async fn disk(&self, driver: Driver) -> u64 {
        match driver {
            Driver::External => 0,
            Driver::Qemu => {
                let base = tokio::fs::metadata(self.image_dir.join("root.ext4")).await;
                base.map_or(0, |base| base.len())
            }
        }
    }

    /// Finds out how guests run here, if any can.
    pub(crate) async fn warm(&self) {
        if self.check(Driver::Qemu).is_ok() {
            self.qemu.accel().await;
        }
    }

    /// Whether what runs a sandbox is alive.
    pub(crate) fn is_running(&self, record: &Record) -> bool {
        record.process.as_ref().is_some_and(|process| match record.driver {
            Driver::Qemu => self.qemu.is_running(process),
            Driver::External => self.external.is_running(process),
        })
    }

    /// Takes up what an earlier daemon started; false when it is gone.
    pub(crate) async fn adopt(&self, record: &Record) -> bool {
        let Some(process) = &record.process else { return false };
        match record.driver {
            Driver::Qemu => self.qemu.adopt(process).await,
            Driver::External => self.external.adopt(process).await,
        }
    }
}

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

    pub(crate) async fn perform(
        &mut self,
        act: Act,
        record: &mut Record,
        greeted: bool,
    ) -> Result<(), Error> {
        let name = record.name.clone();
        let done = match act {
            Act::MakeTap => self.make_tap(record.slot).await,
            Act::RaiseFence => self.raise_fence(record).await,
            Act::StartProcess => self.start_process(record).await,
            Act::GreetAgent => self.greet_agent(record).await,
            Act::StopProcess => self.stop_process(record, greeted).await,
            Act::LowerFence => self.router.detach(record.slot).await.map(drop).map_err(boxed),
            Act::DeleteTap => self.delete_tap(record.slot).await,
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
        let subject = Subject {
            sandbox: record.name.clone(),
            tenant: record.tenant.clone(),
            incarnation: record.incarnation,
            slot: record.slot,
        };
        let attachment = Attachment {
            subject: Arc::new(subject),
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
                sleep(AGAIN).await;
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

    async fn stop_process(&mut self, record: &mut Record, greeted: bool) -> Result<(), Boxed> {
        self.tap = None;
        let qemu = self.hypervisors.qemu.clone();
        // A guest that still boots heeds no power button, and has nothing to lose.
        let qemu = if greeted { qemu } else { qemu.with_grace(Duration::ZERO) };
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

    async fn remove_files(&self, name: &SandboxName) -> Result<(), Boxed> {
        for dir in [self.run_dir(name), self.memory_dir(name), self.state_dir(name)] {
            match tokio::fs::remove_dir_all(&dir).await {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
                _ => fault::at(Point::RunFilesRemoved),
            }
        }
        Ok(())
    }

    fn describe(&self, record: &Record) -> vmm::Machine {
        let image = |file: &str| self.config.image_dir.join(file);
        vmm::Machine {
            name: record.name.clone(),
            tenant: record.tenant.clone(),
            slot: record.slot,
            memory_mib: record.memory_mib,
            vcpus: record.vcpus,
            kernel: image("vmlinuz"),
            initrd: image("initrd.img"),
            cmdline: String::new(),
            base: image("root.ext4"),
            disk: self.state_dir(&record.name).join("disk.qcow2"),
            memory: self.memory_dir(&record.name).join("memory"),
            state: self.state_dir(&record.name).join("state"),
            run_dir: self.run_dir(&record.name),
            uid: self.uid(record.slot),
        }
    }

    fn uid(&self, slot: Slot) -> u32 {
        self.config.uid_base + u32::from(slot.number())
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

/// Starts a command: connects to the agent, hears its hello, says what to run.
pub(crate) async fn exec(
    router: &Router,
    record: &Record,
    exec: &Exec,
) -> Result<GuestStream, Error> {
    let mut bytes = Vec::new();
    FromHost::Exec(exec.clone()).encode(&mut bytes).map_err(|error| {
        let fix = "pass what is long as standard input or as a file";
        Error::Invalid(Field::new("argv", "", &format!("is too long: {error}"), fix))
    })?;
    let mut stream = hello(router, record).await?;
    let sent = stream.write_all(&bytes).await;
    sent.map_err(|error| mute(record, format!("went away: {error}")))?;
    Ok(stream)
}

/// Connects to the agent, hears its hello, and tells it the time and random bytes: both may have stood
/// still, and nothing of a connection tells whether.
async fn hello(router: &Router, record: &Record) -> Result<GuestStream, Error> {
    let port = policy::net::AGENT_PORT;
    let mut stream = router.connect(record.slot, port).await.map_err(|source| Error::Agent {
        name: record.name.clone(),
        problem: "cannot be reached".to_owned(),
        source: Some(Box::new(source)),
    })?;
    greet(&mut stream).await.map_err(|problem| mute(record, problem))?;
    Ok(stream)
}

/// An agent that is reached and does not do as it should.
fn mute(record: &Record, problem: String) -> Error {
    Error::Agent { name: record.name.clone(), problem, source: None }
}

async fn greet(stream: &mut GuestStream) -> Result<(), String> {
    let said = timeout(HELLO, first_word(stream)).await;
    let hello = match said {
        Ok(Ok(FromGuest::Hello(hello))) if hello.version == agent::VERSION => hello,
        Ok(Ok(FromGuest::Hello(hello))) => {
            return Err(format!("speaks version {}, not {}", hello.version, agent::VERSION));
        }
        Ok(Ok(_)) => return Err("did not begin with a hello".to_owned()),
        Ok(Err(problem)) => return Err(problem),
        Err(_) => return Err(format!("said nothing within {HELLO:?}")),
    };
    let now = fault::wall_clock().duration_since(UNIX_EPOCH).unwrap_or_default();
    let clock = FromHost::Clock(u64::try_from(now.as_nanos()).unwrap_or(u64::MAX));
    let mut bytes = Vec::new();
    clock.encode(&mut bytes).map_err(|error| error.to_string())?;
    if hello.reseeds {
        let fresh = fresh().map_err(|error| format!("gets no entropy: {error}"))?;
        FromHost::Entropy(fresh).encode(&mut bytes).map_err(|error| error.to_string())?;
    }
    stream.write_all(&bytes).await.map_err(|error| format!("went away: {error}"))
}

/// Random bytes of the host's, for a guest whose own may have been slept over or copied.
fn fresh() -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; 32];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Reads one message and not a byte more, since what follows belongs to whoever gets the stream.
async fn first_word(stream: &mut GuestStream) -> Result<FromGuest, String> {
    let mut decoder = Decoder::default();
    loop {
        let byte = stream.read_u8().await.map_err(|error| format!("went away: {error}"))?;
        decoder.push(&[byte]);
        match decoder.message() {
            Ok(Some(message)) => return Ok(message),
            Ok(None) => {}
            Err(error) => return Err(format!("broke the protocol: {error}")),
        }
    }
}

type Boxed = Box<dyn std::error::Error + Send + Sync>;

fn boxed(error: impl std::error::Error + Send + Sync + 'static) -> Boxed {
    Box::new(error)
}

fn below(dir: &Path, name: &SandboxName) -> PathBuf {
    dir.join("sandboxes").join(name.as_str())
}
