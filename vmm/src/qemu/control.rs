//! QEMU's control socket, QMP: one JSON object a line, a greeting first.
//!
//! The other side may be a process a guest broke out into: lines are bounded, so is the time.

use std::io;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::error::Error;

/// How long one conversation may take.
const LIMIT: Duration = Duration::from_secs(2);
/// Bytes read in one conversation.
const BYTES: u64 = 64 * 1024;

/// Presses the guest's power button.
pub(super) async fn power_down(socket: &Path, pid: u32) -> Result<(), Error> {
    timeout(LIMIT, execute(socket, "system_powerdown"))
        .await
        .unwrap_or_else(|elapsed| Err(elapsed.into()))
        .map_err(|source| Error::Control { act: "press the power button", pid, source })
}

/// Returns when the machine is made. The greeting alone says too little: it comes from another
/// thread, perhaps before QEMU has found the disk unreadable.
pub(super) async fn ready(socket: &Path) -> io::Result<()> {
    execute(socket, "query-status").await
}

async fn execute(socket: &Path, command: &str) -> io::Result<()> {
    let stream = UnixStream::connect(socket).await?;
    let (reader, mut writer) = stream.into_split();
    let mut lines = BufReader::new(reader.take(BYTES)).lines();
    for command in ["qmp_capabilities", command] {
        let request = json!({ "execute": command });
        writer.write_all(format!("{request}\n").as_bytes()).await?;
        loop {
            let line = lines.next_line().await?.ok_or(io::ErrorKind::UnexpectedEof)?;
            let said: Value = serde_json::from_str(&line)?;
            if said.get("return").is_some() {
                break;
            }
            if let Some(error) = said.get("error") {
                return Err(io::Error::other(error.to_string()));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn against(answer: &'static str) -> Result<(), Error> {
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
        let answer = "{\"QMP\":{}}\n{\"return\":{}}\n{\"event\":\"POWERDOWN\"}\n{\"return\":{}}\n";
        assert!(against(answer).await.is_ok());
    }

    #[tokio::test]
    async fn an_error_garbage_or_a_flood_is_a_failure() {
        let refused = "{\"QMP\":{}}\n{\"return\":{}}\n{\"error\":{\"class\":\"GenericError\"}}\n";
        assert!(against(refused).await.is_err());
        assert!(against("hello\n").await.is_err());
        let flood: &'static str = Box::leak(" ".repeat(100_000).into_boxed_str());
        assert!(against(flood).await.is_err());
    }
}
