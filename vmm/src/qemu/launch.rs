//! From an argv to a process that owns nothing but what it was given.
//!
//! The daemon is a program of many threads and must not run its own code between fork and exec, so
//! a few lines of shell and three small tools step down: control group, limits, session, network,
//! user.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use command_fds::{CommandFdExt, FdMapping};
use fault::Point;
use nix::fcntl::OFlag;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use tokio::process::{Child, Command};
use tokio::time::timeout;

use crate::error::{Error, said};
use crate::hypervisor::{DriverName, HostProcess, Machine, Process};
use crate::qemu::accel::Accel;
use crate::qemu::{command, control, file, remove_file};

/// How long QEMU may take to make its machine on a busy host.
const LIMIT: Duration = Duration::from_secs(20);
/// Bytes a file of the process may grow beyond the size of its disk.
const SLACK: u64 = 64 << 20;

/// Arguments: KiB, control groups, `--`, command. Descriptors the daemon itself inherited are closed;
/// joining a group before becoming the hypervisor leaves no page uncounted; no core dump may hold a
/// guest's memory; when memory is short the kernel takes a guest before the daemon. Bash, because
/// other shells cannot close a descriptor beyond 9.
const STEP_DOWN: &str = r#"set -eu
for fd in /proc/self/fd/*; do
    fd=${fd##*/}
    if ((fd > 10)); then exec {fd}>&-; fi
done
ulimit -c 0 -n 256 -f "$1"
shift
while [ "$1" != -- ]; do echo 0 >"$1/cgroup.procs"; shift; done
shift
echo 800 >/proc/self/oom_score_adj
cd /
exec "$@"
"#;

/// A session of its own, so that no terminal and no daemon takes it along; a network of its own
/// without a link, so that a guest that broke out of QEMU still has its tap and nothing else.
const ALONE: [&str; 6] = ["setsid", "unshare", "--net", "--ipc", "--uts", "--"];

/// What the process gets, open.
#[derive(Debug)]
pub(super) struct Given {
    pub(super) tap: OwnedFd,
    pub(super) control: OwnedFd,
    pub(super) console: OwnedFd,
    pub(super) base: OwnedFd,
    pub(super) disk: OwnedFd,
    pub(super) kernel: OwnedFd,
    pub(super) initrd: OwnedFd,
    pub(super) memory: OwnedFd,
}

/// Starts the process and returns when it answers on its control socket.
pub(super) async fn launch(
    argv: Vec<OsString>,
    machine: &Machine,
    accel: Accel,
    groups: &[PathBuf],
    given: Given,
) -> Result<HostProcess, Error> {
    let program = || argv.first().map_or_else(String::new, |it| it.to_string_lossy().into_owned());
    let failed = |source| Error::Program { program: program(), source };
    let process = Process::new(DriverName::Qemu, machine, None);
    let words = fifo(&process.words_fifo())?;
    let mut child = {
        let mut command = Command::new("bash");
        command.args(["-c", STEP_DOWN, "bash", &file_limit(&machine.base)?.to_string()]);
        command.args(groups).arg("--").args(ALONE).args(user(machine.uid, accel)).args(&argv);
        command
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .stdin(Stdio::null())
            .stdout(words.try_clone().map_err(failed)?)
            .stderr(words.try_clone().map_err(failed)?)
            .fd_mappings(mappings(given))
            .map_err(|collision| failed(std::io::Error::other(collision)))?;
        // The command holds our copies of what is given: it must not outlive this block.
        command.spawn().map_err(failed)?
    };
    let started = child.id().and_then(|pid| HostProcess::identify(pid, groups.to_vec()));
    fault::at(Point::QemuSpawned);
    let socket = process.control_socket();
    let ready = tokio::select! {
        ready = timeout(LIMIT, control::ready(&socket)) => Some(ready),
        _ended = child.wait() => None,
    };
    match (started, ready) {
        (Some(host), Some(Ok(Ok(())))) => {
            fault::at(Point::QemuReady);
            reap(child, host.pid);
            Ok(host)
        }
        (_, Some(Err(_elapsed))) => {
            end(child).await;
            Err(Error::Slow { program: program(), limit: LIMIT })
        }
        _ => {
            end(child).await;
            Err(Error::Failed { program: program(), said: said(None, &read(words)) })
        }
    }
}

/// Notices the end of our own child: nobody else can, and it would stay a zombie.
fn reap(mut child: Child, pid: u32) {
    tokio::spawn(async move {
        match child.wait().await {
            Ok(status) => tracing::info!(pid, %status, "microVM ended"),
            Err(error) => tracing::warn!(pid, %error, "microVM's end not seen"),
        }
    });
}

async fn end(mut child: Child) {
    if let Err(error) = child.kill().await {
        tracing::warn!(%error, "failed process not killed");
    }
}

/// Everything a superuser has is given up; a KVM guest keeps the group that may open `/dev/kvm`.
fn user(uid: u32, accel: Accel) -> Vec<String> {
    let kvm = match accel {
        Accel::Kvm => fs::metadata("/dev/kvm").ok().map(|device| device.gid()),
        Accel::Tcg => None,
    };
    let groups = kvm.map_or_else(|| "--clear-groups".to_owned(), |gid| format!("--groups={gid}"));
    let ids = [format!("--reuid={uid}"), format!("--regid={uid}"), groups];
    let none = ["--no-new-privs", "--inh-caps=-all", "--ambient-caps=-all", "--bounding-set=-all"];
    let none = none.into_iter().map(str::to_owned);
    std::iter::once("setpriv".to_owned()).chain(ids).chain(none).chain(["--".to_owned()]).collect()
}

fn mappings(given: Given) -> Vec<FdMapping> {
    [
        (given.tap, command::TAP),
        (given.control, command::CONTROL),
        (given.console, command::CONSOLE),
        (given.base, command::BASE),
        (given.disk, command::DISK),
        (given.kernel, command::KERNEL),
        (given.initrd, command::INITRD),
        (given.memory, command::MEMORY),
    ]
    .map(|(parent_fd, child_fd)| FdMapping { parent_fd, child_fd })
    .into()
}

/// No file of the process grows beyond its disk, whatever a guest that broke out of QEMU writes.
fn file_limit(base: &Path) -> Result<u64, Error> {
    let size = fs::metadata(base).map_err(|source| file("look at", base, source))?.len();
    Ok((size + size / 64 + SLACK) / 1024)
}

/// A pipe whose both ends are the process's, so that it stays when the daemon ends. It never blocks:
/// what does not fit is dropped.
fn fifo(path: &Path) -> Result<File, Error> {
    remove_file(path);
    let mode = Mode::S_IRUSR | Mode::S_IWUSR;
    mkfifo(path, mode).map_err(|source| file("make", path, source.into()))?;
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(OFlag::O_NONBLOCK.bits());
    options.open(path).map_err(|source| file("open", path, source))
}

/// What is in a pipe: all there is before a read would have to wait.
fn read(mut pipe: File) -> Vec<u8> {
    let mut words = Vec::new();
    let _would_wait = pipe.read_to_end(&mut words);
    words
}
