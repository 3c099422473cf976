//! A machine turned into files and back: pause, save, prepare, unpause.
//!
//! The order is the point. A state file has its name only when it is whole, and has lost it before the
//! guest's next instruction; so there is never one that does not match the memory beside it. Nothing
//! here lets a guest run but [`unpause`], and [`stuck`] one that was not paused.

use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use fault::Point;
use sha2::{Digest, Sha256};

use crate::error::Error;
use crate::hypervisor::{DriverName, Machine, Process, Saved, boot_id};
use crate::qemu::accel::Accel;
use crate::qemu::control::{self, Control, Status};
use crate::qemu::snapshot::{self, Meets};
use crate::qemu::{command, file};

/// How long a machine may take to stop: it ends what its disk is at.
const PAUSE: Duration = Duration::from_secs(10);
/// How long a look at it may take.
const LOOK: Duration = Duration::from_secs(2);
/// How long its state may take, with what the disk has not written yet.
const SAVE: Duration = Duration::from_secs(30);
/// How long reading it may take.
const LOAD: Duration = Duration::from_secs(20);
/// The name under which QEMU is given the file.
const STATE: &str = "state";

pub(super) async fn pause(process: &Process) -> Result<(), Error> {
    let pid = control::host(process)?.pid;
    let talk = async {
        let mut control = Control::open(&process.control_socket()).await?;
        control.execute(serde_json::json!({ "execute": "stop" })).await?;
        control.paused().await
    };
    control::within(PAUSE, "pause the guest", pid, talk).await?;
    fault::at(Point::QemuPaused);
    Ok(())
}

/// Whether the guest is stopped because its disk found no room. It is let go on then, if `again` says so:
/// whether it found some this time shows later.
pub(super) async fn stuck(process: &Process, again: bool) -> Result<bool, Error> {
    let pid = control::host(process)?.pid;
    let talk = async {
        let mut control = Control::open(&process.control_socket()).await?;
        let stuck = control.status().await? == Status::Stuck;
        if stuck && again {
            control.execute(serde_json::json!({ "execute": "cont" })).await?;
        }
        Ok(stuck)
    };
    control::within(LOOK, "look at the guest", pid, talk).await
}

/// Lets the guest run.
pub(super) async fn unpause(process: &Process, machine: &Machine) -> Result<(), Error> {
    let pid = control::host(process)?.pid;
    let talk = async {
        let mut control = Control::open(&process.control_socket()).await?;
        match control.status().await? {
            Status::Running | Status::Paused | Status::Stuck | Status::Other => Ok(control),
            Status::Incoming => Err(std::io::Error::other("it has no guest yet")),
        }
    };
    let mut control = control::within(PAUSE, "reach the guest", pid, talk).await?;
    snapshot::consume(&machine.state)?;
    fault::at(Point::QemuStateConsumed);
    let talk = control.execute(serde_json::json!({ "execute": "cont" }));
    control::within(PAUSE, "let the guest go on", pid, talk).await?;
    fault::at(Point::QemuUnpaused);
    Ok(())
}

/// Writes the state of a paused guest; the process stays, and could still go on.
pub(super) async fn write(
    process: &Process,
    machine: &Machine,
    accel: Accel,
) -> Result<Saved, Error> {
    let pid = control::host(process)?.pid;
    let path = &machine.state;
    let begun = snapshot::begin(path)?;
    fault::at(Point::QemuStateBegun);
    let talk = async {
        let mut control = Control::open(&process.control_socket()).await?;
        control.paused().await?;
        let qemu = control.version().await?;
        control.prepare_migration().await?;
        control.give(STATE, begun.as_fd()).await?;
        control.migrate("migrate", STATE).await?;
        control.paused().await?;
        Ok(qemu)
    };
    let qemu = control::within(SAVE, "save the guest", pid, talk).await?;
    let (path, meets) = (path.clone(), meets(machine, accel, qemu)?);
    let at = path.clone();
    let (state_bytes, digest) = blocking(move || snapshot::end(&at, &meets)).await?;
    fault::at(Point::QemuStateNamed);
    Ok(Saved { driver: DriverName::Qemu, state: Some(path), state_bytes, digest })
}

/// What is there of a saved machine; none when it is not saved.
pub(super) async fn find(machine: &Machine) -> Result<Option<Saved>, Error> {
    let path = machine.state.clone();
    let whole = blocking(move || snapshot::open(&path)).await?;
    Ok(whole.map(|whole| Saved {
        driver: DriverName::Qemu,
        state: Some(machine.state.clone()),
        state_bytes: whole.bytes,
        digest: whole.digest,
    }))
}

/// Gives a state that was elsewhere its name, as one of this boot.
pub(super) async fn restore(machine: &Machine, fetched: &Path) -> Result<Saved, Error> {
    let (path, fetched) = (machine.state.clone(), fetched.to_owned());
    let boot_id = boot_id().unwrap_or_default();
    let called = format!("-name {}", command::guest_name(&machine.name));
    let named = blocking(move || snapshot::adopt(&path, &fetched, &boot_id, &called)).await?;
    let (state_bytes, digest) = named;
    let state = Some(machine.state.clone());
    Ok(Saved { driver: DriverName::Qemu, state, state_bytes, digest })
}

/// Reads the file for a process that is about to be made; an error when this machine, on this host, is
/// not what was saved.
pub(super) async fn read(
    machine: &Machine,
    accel: Accel,
    saved: &Saved,
) -> Result<snapshot::Whole, Error> {
    let path = machine.state.clone();
    let whole = blocking(move || snapshot::open(&path)).await?;
    let unusable = |problem: &str| Error::Unusable {
        path: machine.state.clone(),
        problem: problem.to_owned(),
    };
    let whole =
        whole.ok_or_else(|| unusable("is gone: the guest went on from it, or was removed"))?;
    if whole.digest != saved.digest {
        return Err(unusable("is not the one that was saved last"));
    }
    match whole.meets.differs(&meets(machine, accel, whole.meets.qemu)?) {
        Some(problem) => Err(unusable(&problem)),
        None => Ok(whole),
    }
}

/// Gives a process that waits for it what was saved. The guest is paused then.
pub(super) async fn load(
    process: &Process,
    machine: &Machine,
    whole: &snapshot::Whole,
) -> Result<(), Error> {
    let pid = control::host(process)?.pid;
    let talk = async {
        let mut control = Control::open(&process.control_socket()).await?;
        let qemu = control.version().await?;
        let now = Meets { qemu, ..whole.meets.clone() };
        if let Some(problem) = whole.meets.differs(&now) {
            return Ok(Some(problem));
        }
        control.prepare_migration().await?;
        control.give(STATE, whole.file.as_fd()).await?;
        control.migrate("migrate-incoming", STATE).await?;
        control.paused().await?;
        Ok(None)
    };
    let refused = control::within(LOAD, "resume the guest", pid, talk).await?;
    fault::at(Point::QemuStateLoaded);
    match refused {
        Some(problem) => Err(Error::Unusable { path: machine.state.clone(), problem }),
        None => Ok(()),
    }
}

/// What this machine is, on this host.
fn meets(machine: &Machine, accel: Accel, qemu: [u64; 3]) -> Result<Meets, Error> {
    let mut words = command::hardware(machine, accel);
    let base = &machine.base;
    let base = fs::metadata(base).map_err(|source| file("look at", base, source))?;
    // A guest's own disk holds what differs from it, block by block.
    words.push(format!("image {} of {} bytes from {}", base.ino(), base.len(), base.mtime()));
    if accel == Accel::Kvm {
        words.push(format!("processor {}", processor()));
    }
    Ok(Meets { machine: words, qemu, boot_id: boot_id().unwrap_or_default() })
}

/// What a guest that runs on the processor itself may have seen of it.
fn processor() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let told = ["vendor_id", "cpu family", "model\t", "model name", "stepping", "flags"];
    let first = text.split("\n\n").next().unwrap_or_default();
    let lines = first.lines().filter(|line| told.iter().any(|name| line.starts_with(name)));
    let mut sum = Sha256::new();
    lines.for_each(|line| sum.update(line.as_bytes()));
    sum.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

/// Reading and writing files of this size takes a moment, and longer on a busy disk.
pub(super) async fn blocking<T: Send + 'static>(
    act: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    tokio::task::spawn_blocking(act).await.unwrap_or_else(|lost| {
        Err(Error::Program { program: "a worker thread".to_owned(), source: lost.into() })
    })
}
