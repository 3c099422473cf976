//! The driver for QEMU: one process per microVM, that knows one guest and owns nothing else.
//!
//! This file is the order of a start and of a stop; what lies between is in `asleep`. The process runs
//! as a user of its own, without capabilities, in its own session and control group; it opens nothing
//! itself, every file and socket is handed to it open. It never depends on the daemon being alive.

mod report;
mod asleep;
mod accel;
mod command;
mod launch;
mod console;
mod control;
mod snapshot;
mod memory;
mod image;
mod disk;
mod find;

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fault::Point;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::sync::OnceCell;

use crate::cgroup;
use crate::error::Error;
use crate::hypervisor::{DriverName, HostProcess, Hypervisor, Machine, Process, Saved};
use crate::qemu::command::Begin;

pub use accel::{Accel, Choice};
pub use report::Report;

/// How long the guest gets to power off when asked, unless [`Qemu::with_grace`] says otherwise.
const GRACE: Duration = Duration::from_secs(5);
/// How long the kernel gets to end a killed process.
const AFTER_KILL: Duration = Duration::from_secs(10);

/// The driver. Clones share what was found out about this host.
#[derive(Clone, Debug)]
pub struct Qemu {
    binary: PathBuf,
    grace: Duration,
    accel: Arc<OnceCell<Choice>>,
}

impl Qemu {
    /// A driver that runs this `qemu-system-x86_64`. Nothing is run yet.
    #[must_use]
    pub fn new(binary: impl Into<PathBuf>) -> Self {
        Self { binary: binary.into(), grace: GRACE, accel: Arc::default() }
    }

    /// How long a guest gets to power off before its process is killed.
    #[must_use]
    pub fn with_grace(self, grace: Duration) -> Self {
        Self { grace, ..self }
    }

    /// What this host's guests run on, found by trying; asked once.
    pub async fn accel(&self) -> &Choice {
        self.accel.get_or_init(|| accel::choose(&self.binary)).await
    }

    /// The running process of a machine whose [`Process`] was not written down.
    #[must_use]
    pub fn find(&self, machine: &Machine) -> Option<Process> {
        find::find(machine)
    }

    /// Ends what a start left of which nothing was written down: processes in the machine's control
    /// groups, whatever they are by now, and the groups. A process that is about to enter one that
    /// is gone ends by itself.
    ///
    /// # Errors
    /// When a process does not end.
    pub async fn clear(&self, machine: &Machine) -> Result<(), Error> {
        empty(&cgroup::existing(machine)).await?;
        snapshot::abandon(&machine.state);
        Ok(())
    }

    /// Whether the guest of a process that was not paused stands still because its disk found no room for
    /// what it wrote; with `again` it is let go on then. To be dropped before anybody pauses it.
    ///
    /// # Errors
    /// When QEMU does not answer.
    pub async fn stuck(&self, process: &Process, again: bool) -> Result<bool, Error> {
        asleep::stuck(process, again).await
    }

    /// What is there of a saved machine of which nothing was written down, and whose process is gone;
    /// none when it was not saved to the end.
    ///
    /// # Errors
    /// [`Error::Unusable`]: it is there and damaged.
    pub async fn saved(&self, machine: &Machine) -> Result<Option<Saved>, Error> {
        asleep::find(machine).await
    }

    /// Makes a saved machine of files that were elsewhere: memory and disk are in their places, whole and on
    /// the disk, and `fetched` is its state, which gets its name. Since the memory is known to be whole, it
    /// does not matter in which boot of the host it was saved, nor which machine of the same hardware and image
    /// it was saved of.
    ///
    /// # Errors
    /// [`Error::Unusable`] when the state is damaged; nothing has its name then.
    pub async fn restore(&self, machine: &Machine, fetched: &Path) -> Result<Saved, Error> {
        asleep::restore(machine, fetched).await
    }

    /// Has the machine's own links to what it is made from, as far as it has not, from its folder `image`.
    ///
    /// # Errors
    /// When they cannot be made.
    pub async fn keep_image(&self, machine: &Machine) -> Result<(), Error> {
        image::keep(machine).await
    }

    /// Writes the memory of a saved machine to its disk, after which the kernel has room when it needs
    /// it; with `drop` it has it at once, and the resume reads from the disk.
    ///
    /// # Errors
    /// When the disk does not take it.
    pub async fn write_back(&self, machine: &Machine, drop: bool) -> Result<(), Error> {
        let memory = machine.memory.clone();
        asleep::blocking(move || memory::write_back(&memory, drop)).await
    }

    /// Removes the copies of images in this folder that no machine has any more. Nothing may be started
    /// meanwhile.
    pub async fn forget_images(copies: &Path) {
        image::forget(copies).await;
    }

    /// What this host offers and lacks, for `postern doctor`. `image` is the directory of `vmlinuz`,
    /// `initrd.img` and `root.ext4`.
    pub async fn report(&self, image: &Path) -> Report {
        report::look(&self.binary, self.accel().await.clone(), image).await
    }
}

impl Qemu {
    async fn run(
        &self,
        machine: &Machine,
        tap: OwnedFd,
        process: &Process,
        begin: Begin,
    ) -> Result<HostProcess, Error> {
        let accel = self.accel().await.accel;
        make_dir(&machine.run_dir)?;
        fault::at(Point::QemuFolderMade);
        let memory = match begin {
            Begin::Boot => {
                image::keep(machine).await?;
                disk::make_overlay(&machine.base, &machine.disk).await?;
                memory::make(machine)?
            }
            Begin::Saved => memory::open(machine)?,
        };
        fault::at(Point::QemuDiskMade);
        let given = launch::Given {
            tap,
            control: listen(&process.control_socket())?,
            console: listen(&process.console_socket())?,
            base: disk::open(&machine.base, false)?,
            disk: disk::open(&machine.disk, true)?,
            kernel: disk::open(&machine.kernel, false)?,
            initrd: disk::open(&machine.initrd, false)?,
            memory,
        };
        fault::at(Point::QemuSocketsMade);
        let groups = cgroup::create(machine)?;
        fault::at(Point::QemuGroupsMade);
        let argv = command::argv(&self.binary, machine, accel, begin);
        let host = launch::launch(argv, machine, accel, &groups, given).await;
        host.inspect_err(|_| cgroup::remove(&groups))
    }
}

impl Hypervisor for Qemu {
    async fn start(&self, machine: &Machine, tap: OwnedFd) -> Result<Process, Error> {
        let mut process = Process::new(DriverName::Qemu, machine, None);
        // An earlier one of this name is not what this memory will hold.
        snapshot::consume(&machine.state)?;
        let run = self.run(machine, tap, &process, Begin::Boot).await;
        let host = run.inspect_err(|_| {
            remove_channels(&process);
            remove_file(&machine.memory);
        })?;
        tracing::info!(sandbox = %machine.name, pid = host.pid, "microVM started");
        process.host = Some(host);
        console::follow(&process);
        Ok(process)
    }

    async fn adopt(&self, process: &Process) -> bool {
        let alive = self.is_running(process);
        if alive {
            console::follow(process);
        }
        alive
    }

    fn is_running(&self, process: &Process) -> bool {
        process.host.as_ref().is_some_and(HostProcess::is_alive)
    }

    async fn stop(&self, process: &Process) -> Result<(), Error> {
        if process.driver != DriverName::Qemu {
            return Err(Error::OtherDriver(process.driver.as_str()));
        }
        let Some(host) = &process.host else { return Ok(()) };
        if let Some(handle) = handle(host)? {
            match control::power_down(&process.control_socket(), host.pid).await {
                Err(error) => {
                    tracing::warn!(sandbox = %process.name, %error, "power button out of reach");
                }
                Ok(true) if !ended(&handle, self.grace, host).await? => {
                    tracing::warn!(sandbox = %process.name, grace = ?self.grace, "guest did not power off");
                }
                Ok(_) => {}
            }
            end(&handle, host).await?;
        }
        // A guest that broke out of the first one may have left others.
        empty(&host.groups).await?;
        remove_channels(process);
        Ok(())
    }

    fn can_sleep(&self) -> bool {
        true
    }

    async fn pause(&self, process: &Process) -> Result<(), Error> {
        asleep::pause(process).await
    }

    async fn unpause(&self, process: &Process, machine: &Machine) -> Result<(), Error> {
        asleep::unpause(process, machine).await
    }

    async fn save(&self, process: &Process, machine: &Machine) -> Result<Saved, Error> {
        let accel = self.accel().await.accel;
        let host = control::host(process)?;
        let written = asleep::write(process, machine, accel).await;
        let saved = written.inspect_err(|_| snapshot::abandon(&machine.state))?;
        if let Some(handle) = handle(host)? {
            end(&handle, host).await?;
        }
        empty(&host.groups).await?;
        remove_channels(process);
        tracing::info!(sandbox = %machine.name, bytes = saved.state_bytes, "microVM saved");
        Ok(saved)
    }

    async fn prepare(
        &self,
        machine: &Machine,
        tap: OwnedFd,
        saved: &Saved,
    ) -> Result<Process, Error> {
        let accel = self.accel().await.accel;
        let whole = asleep::read(machine, accel, saved).await?;
        let mut process = Process::new(DriverName::Qemu, machine, None);
        let run = self.run(machine, tap, &process, Begin::Saved).await;
        process.host = Some(run.inspect_err(|_| remove_channels(&process))?);
        if let Err(error) = asleep::load(&process, machine, &whole).await {
            // It has not run: what was saved is as it was.
            let stopped = self.clone().with_grace(Duration::ZERO).stop(&process).await;
            if let Err(error) = stopped {
                tracing::warn!(sandbox = %machine.name, %error, "failed resume not ended");
            }
            return Err(error);
        }
        console::follow(&process);
        Ok(process)
    }
}

/// Ends this process at once.
async fn end(handle: &OwnedFd, host: &HostProcess) -> Result<(), Error> {
    kill(handle, host)?;
    if !ended(handle, AFTER_KILL, host).await? {
        return Err(Error::Survivor { pid: host.pid, limit: AFTER_KILL });
    }
    fault::at(Point::QemuKilled);
    Ok(())
}

/// Ends every process in these groups, whatever it is by now, and the groups.
async fn empty(groups: &[PathBuf]) -> Result<(), Error> {
    let begun = Instant::now();
    loop {
        let mut alive = Vec::new();
        for pid in cgroup::processes(groups) {
            let Some(host) = HostProcess::identify(pid, Vec::new()) else { continue };
            let Some(handle) = handle(&host)? else { continue };
            kill(&handle, &host)?;
            alive.push((handle, host));
        }
        if alive.is_empty() {
            cgroup::remove(groups);
            return Ok(());
        }
        for (handle, host) in alive {
            let left = AFTER_KILL.saturating_sub(begun.elapsed());
            if !ended(&handle, left, &host).await? {
                return Err(Error::Survivor { pid: host.pid, limit: AFTER_KILL });
            }
        }
        // What one of them started meanwhile is found by the next look.
    }
}

/// A handle on this very process, `None` when it is gone. Taken first and checked after, so that
/// what the handle points at is what was checked.
fn handle(host: &HostProcess) -> Result<Option<OwnedFd>, Error> {
    let Some(pid) = i32::try_from(host.pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
    match pidfd_open(pid, PidfdFlags::NONBLOCK) {
        Ok(handle) => Ok(host.is_alive().then_some(handle)),
        Err(rustix::io::Errno::SRCH) => Ok(None),
        Err(source) => Err(file("open a handle on", &proc_dir(host), source.into())),
    }
}

fn kill(handle: &OwnedFd, host: &HostProcess) -> Result<(), Error> {
    match pidfd_send_signal(handle, Signal::KILL) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
        Err(source) => Err(file("kill", &proc_dir(host), source.into())),
    }
}

/// Waits for the process to end, which makes its handle readable; false when the time is over.
async fn ended(handle: &OwnedFd, limit: Duration, host: &HostProcess) -> Result<bool, Error> {
    let wait = |source| file("wait for", &proc_dir(host), source);
    let handle = handle.try_clone().map_err(wait)?;
    let poll = move || {
        let limit = Timespec::try_from(limit).map_err(io::Error::other)?;
        retry_on_intr(|| poll(&mut [PollFd::new(&handle, PollFlags::IN)], Some(&limit)))
            .map_err(io::Error::from)
    };
    let ready = tokio::task::spawn_blocking(poll).await;
    ready.unwrap_or_else(|lost| Err(lost.into())).map(|ready| ready > 0).map_err(wait)
}

fn proc_dir(host: &HostProcess) -> PathBuf {
    PathBuf::from(format!("/proc/{}", host.pid))
}

/// A socket only we can connect to, made by us, so that the process needs no directory to write in.
fn listen(path: &Path) -> Result<OwnedFd, Error> {
    remove_file(path);
    let make = || {
        let listener = UnixListener::bind(path)?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
        Ok(listener.into())
    };
    make().map_err(|source| file("listen on", path, source))
}

fn remove_channels(process: &Process) {
    remove_file(&process.control_socket());
    remove_file(&process.console_socket());
    remove_file(&process.words_fifo());
}

fn remove_file(path: &Path) {
    if let Err(error) = fs::remove_file(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(path = %path.display(), %error, "not removed");
    }
}

fn make_dir(path: &Path) -> Result<(), Error> {
    let make = || {
        fs::create_dir_all(path)?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o700))
    };
    make().map_err(|source| file("make", path, source))
}

fn file(act: &'static str, path: &Path, source: io::Error) -> Error {
    Error::File { act, path: path.to_owned(), source }
}
