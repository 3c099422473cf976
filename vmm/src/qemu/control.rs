//! QEMU's control socket, QMP: one JSON object a line, a greeting first.
//!
//! The other side may be a process a guest broke out into: lines are bounded, so is the time. What it
//! answers is believed only about its own guest.

use std::io;
use std::io::IoSlice;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;
use std::time::Duration;

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Interest, Lines, Take};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::time::timeout;

use crate::error::{Error, said};
use crate::hypervisor::{HostProcess, Process};

/// How long one conversation may take.
const LIMIT: Duration = Duration::from_secs(2);
/// Bytes read in one conversation.
const BYTES: u64 = 64 * 1024;

/// What a machine is at, as far as it matters here (QAPI, `RunState`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    /// Its guest runs.
    Running,
    /// Stopped between two instructions, by us or by a save.
    Paused,
    /// Stopped by QEMU, since its disk found no room for what it wrote. That is kept, and written when it
    /// goes on.
    Stuck,
    /// It waits for the state of a saved machine.
    Incoming,
    /// Anything else: shut down, broken, between two of these.
    Other,
}

/// A conversation. QEMU has one at a time: the next waits until this is dropped.
#[derive(Debug)]
pub(super) struct Control {
    lines: Lines<BufReader<Take<OwnedReadHalf>>>,
    writer: OwnedWriteHalf,
    /// How the last migration that was told of ended; none while it has not.
    migrated: Option<bool>,
}

/// Presses the guest's power button; false when nobody would see it, since the guest does not run.
pub(super) async fn power_down(socket: &Path, pid: u32) -> Result<bool, Error> {
    let press = async {
        let mut control = Control::open(socket).await?;
        let runs = control.status().await? == Status::Running;
        if runs {
            control.execute(json!({ "execute": "system_powerdown" })).await?;
        }
        Ok(runs)
    };
    within(LIMIT, "press the power button", pid, press).await
}

/// Returns when the machine is made. The greeting alone says too little: it comes from another
/// thread, perhaps before QEMU has found the disk unreadable.
pub(super) async fn ready(socket: &Path) -> io::Result<()> {
    Control::open(socket).await?.status().await.map(drop)
}

/// Bounds a conversation with this process, which was to do this.
pub(super) async fn within<T>(
    limit: Duration,
    act: &'static str,
    pid: u32,
    talk: impl Future<Output = io::Result<T>>,
) -> Result<T, Error> {
    let done = timeout(limit, talk).await.unwrap_or_else(|elapsed| Err(elapsed.into()));
    done.map_err(|source| Error::Control { act, pid, source })
}

/// The process on this host that a driver's [`Process`] has.
pub(super) fn host(process: &Process) -> Result<&HostProcess, Error> {
    process.host.as_ref().ok_or(Error::OtherDriver(process.driver.as_str()))
}

impl Control {
    pub(super) async fn open(socket: &Path) -> io::Result<Self> {
        let (reader, writer) = UnixStream::connect(socket).await?.into_split();
        let lines = BufReader::new(reader.take(BYTES)).lines();
        let mut control = Self { lines, writer, migrated: None };
        control.execute(json!({ "execute": "qmp_capabilities" })).await?;
        Ok(control)
    }

    pub(super) async fn execute(&mut self, request: Value) -> io::Result<Value> {
        self.writer.write_all(format!("{request}\n").as_bytes()).await?;
        self.answer().await
    }

    /// Gives it an open file under this name.
    pub(super) async fn give(&mut self, name: &str, file: BorrowedFd<'_>) -> io::Result<()> {
        let request = json!({ "execute": "getfd", "arguments": { "fdname": name } });
        let request = format!("{request}\n");
        let files = [file.as_raw_fd()];
        let send = |stream: &UnixStream| {
            let rights = [ControlMessage::ScmRights(&files)];
            let bytes = [IoSlice::new(request.as_bytes())];
            let fd = stream.as_raw_fd();
            Ok(sendmsg::<()>(fd, &bytes, &rights, MsgFlags::MSG_NOSIGNAL, None)?)
        };
        let stream: &UnixStream = self.writer.as_ref();
        let sent = stream.async_io(Interest::WRITABLE, || send(stream)).await?;
        // A line this short is taken whole by a socket that holds nothing yet.
        if sent != request.len() {
            return Err(io::ErrorKind::WriteZero.into());
        }
        self.answer().await.map(drop)
    }

    pub(super) async fn status(&mut self) -> io::Result<Status> {
        let answer = self.execute(json!({ "execute": "query-status" })).await?;
        Ok(match answer.get("status").and_then(Value::as_str) {
            Some("running") => Status::Running,
            Some("paused" | "postmigrate") => Status::Paused,
            Some("io-error") => Status::Stuck,
            Some("inmigrate") => Status::Incoming,
            _ => Status::Other,
        })
    }

    /// Its own version: major, minor, micro.
    pub(super) async fn version(&mut self) -> io::Result<[u64; 3]> {
        let answer = self.execute(json!({ "execute": "query-version" })).await?;
        let part = |name: &str| answer.get("qemu")?.get(name)?.as_u64();
        let parts = [part("major"), part("minor"), part("micro")];
        let [Some(major), Some(minor), Some(micro)] = parts else {
            return Err(io::Error::other("it does not say its version"));
        };
        Ok([major, minor, micro])
    }

    /// Sets up both ends of a migration alike: memory is a file of its own and not part of it, and a
    /// guest whose address and card are as they were has nothing to announce to its only neighbour.
    pub(super) async fn prepare_migration(&mut self) -> io::Result<()> {
        let on = |name: &str| json!({ "capability": name, "state": true });
        let capabilities = json!({ "capabilities": [on("x-ignore-shared"), on("events")] });
        let set =
            |command: &str, arguments: Value| json!({ "execute": command, "arguments": arguments });
        self.execute(set("migrate-set-capabilities", capabilities)).await?;
        let quiet = json!({ "announce-rounds": 0 });
        self.execute(set("migrate-set-parameters", quiet)).await.map(drop)
    }

    /// Runs `migrate` or `migrate-incoming` through a file that was given, to its end.
    pub(super) async fn migrate(&mut self, command: &str, file: &str) -> io::Result<()> {
        self.migrated = None;
        let arguments = json!({ "uri": format!("fd:{file}") });
        self.execute(json!({ "execute": command, "arguments": arguments })).await?;
        loop {
            match self.migrated {
                Some(true) => return Ok(()),
                Some(false) => return Err(self.why().await),
                None => {
                    let message = self.message().await?;
                    self.note(&message);
                }
            }
        }
    }

    /// Waits until it rests, which it does a moment after the end of a migration is told. One that was
    /// stopped before rests as that, whatever else stops it.
    pub(super) async fn paused(&mut self) -> io::Result<()> {
        const AGAIN: Duration = Duration::from_millis(1);
        const TRIES: u32 = 200;
        for _ in 0..TRIES {
            match self.status().await? {
                Status::Paused | Status::Stuck => return Ok(()),
                Status::Other => tokio::time::sleep(AGAIN).await,
                status => return Err(io::Error::other(format!("its guest is {status:?}"))),
            }
        }
        Err(io::Error::other("its guest is not paused"))
    }

    /// Why a migration failed.
    async fn why(&mut self) -> io::Error {
        let answer = self.execute(json!({ "execute": "query-migrate" })).await;
        match answer {
            Ok(answer) => match answer.get("error-desc").and_then(Value::as_str) {
                Some(why) => io::Error::other(said(None, why.as_bytes())),
                None => io::Error::other("it does not say why"),
            },
            Err(error) => error,
        }
    }

    /// The answer to what was asked last; events before it are noted.
    async fn answer(&mut self) -> io::Result<Value> {
        loop {
            let mut message = self.message().await?;
            if let Some(answer) = message.get_mut("return") {
                return Ok(answer.take());
            }
            if let Some(error) = message.get("error") {
                let why = error.get("desc").and_then(Value::as_str).unwrap_or("it refused");
                return Err(io::Error::other(said(None, why.as_bytes())));
            }
            self.note(&message);
        }
    }

    async fn message(&mut self) -> io::Result<Value> {
        let line = self.lines.next_line().await?.ok_or(io::ErrorKind::UnexpectedEof)?;
        Ok(serde_json::from_str(&line)?)
    }

    fn note(&mut self, message: &Value) {
        if message.get("event").and_then(Value::as_str) != Some("MIGRATION") {
            return;
        }
        match message.get("data").and_then(|data| data.get("status")).and_then(Value::as_str) {
            Some("completed") => self.migrated = Some(true),
            Some("failed" | "cancelled") => self.migrated = Some(false),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUNS: &str = "{\"QMP\":{}}\n{\"return\":{}}\n{\"return\":{\"status\":\"running\"}}\n";

    async fn against(answer: String) -> Result<bool, Error> {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("qmp.sock");
        let listener = tokio::net::UnixListener::bind(&path).expect("bound");
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.expect("asked");
            let _ = stream.write_all(answer.as_bytes()).await;
            let _ = stream.read_to_end(&mut Vec::new()).await;
        });
        power_down(&path, 1).await
    }

    #[tokio::test]
    async fn events_between_answers_are_passed_over() {
        let answer = format!("{RUNS}{{\"event\":\"POWERDOWN\"}}\n{{\"return\":{{}}}}\n");
        assert!(matches!(against(answer).await, Ok(true)));
        let asleep = RUNS.replace("running", "paused");
        assert!(matches!(against(asleep).await, Ok(false)), "nobody would see it");
    }

    #[tokio::test]
    async fn a_guest_whose_disk_finds_no_room_rests_and_sees_no_power_button() {
        let stopped = RUNS.replace("running", "io-error");
        assert!(matches!(against(stopped).await, Ok(false)));
    }

    #[tokio::test]
    async fn an_error_garbage_or_a_flood_is_a_failure() {
        let refused = format!("{RUNS}{{\"error\":{{\"class\":\"GenericError\"}}}}\n");
        assert!(against(refused).await.is_err());
        assert!(against("hello\n".to_owned()).await.is_err());
        assert!(against(" ".repeat(100_000)).await.is_err());
        assert!(
            against("{\"QMP\":{}}\n{\"return\":{}}\n{\"return\":7}\n".to_owned()).await.is_ok()
        );
    }
}
