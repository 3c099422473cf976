//! The guest's console and QEMU's own words, into logs that cannot grow without bound: a guest can have
//! much said in either.
//!
//! While no daemon reads, QEMU drops what it would write; the guest is never blocked by its logs.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::net::UnixStream;
use tokio::net::unix::pipe;

use crate::hypervisor::Process;

/// Bytes of a log, and of the one before it, with `.1` behind its name.
const LIMIT: u64 = 512 * 1024;

/// Copies in the background until the process ends or another reader takes over.
pub(super) fn follow(process: &Process) {
    let (socket, console) = (process.console_socket(), process.console_log());
    let (fifo, words) = (process.words_fifo(), process.words_log());
    let name = process.name.clone();
    tokio::spawn(async move {
        let console = async { copy(UnixStream::connect(socket).await?, console).await };
        let words = async { copy(pipe::OpenOptions::new().open_receiver(fifo)?, words).await };
        let (console, words) = tokio::join!(console, words);
        for (what, ended) in [("console", console), ("words", words)] {
            if let Err(error) = ended {
                tracing::warn!(sandbox = %name, what, %error, "no longer read");
            }
        }
    });
}

async fn copy(mut stream: impl AsyncRead + Unpin, log: PathBuf) -> io::Result<()> {
    let mut log = Log::open(log)?;
    let mut portion = vec![0; 4096];
    loop {
        match stream.read(&mut portion).await {
            Ok(0) => return Ok(()),
            Ok(length) => log.append(portion.get(..length).unwrap_or_default())?,
            // A killed process resets its sockets.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(()),
            Err(error) => return Err(error),
        }
    }
}

struct Log {
    path: PathBuf,
    file: File,
    length: u64,
}

impl Log {
    fn open(path: PathBuf) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).mode(0o600).open(&path)?;
        let length = file.metadata()?.len();
        Ok(Self { path, file, length })
    }

    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.length >= LIMIT {
            let mut before = self.path.clone().into_os_string();
            before.push(".1");
            fs::rename(&self.path, before)?;
            *self = Self::open(std::mem::take(&mut self.path))?;
        }
        self.file.write_all(bytes)?;
        self.length += u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chatty_guest_fills_two_files_and_no_more() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("console.log");
        let mut log = Log::open(path.clone()).expect("made");
        for round in 0..1000_u32 {
            log.append(&[b'a' + u8::try_from(round % 26).expect("small"); 4096]).expect("written");
        }
        let sizes: u64 = fs::read_dir(dir.path())
            .expect("listed")
            .map(|entry| entry.expect("there").metadata().expect("known").len())
            .sum();
        assert!(sizes <= 2 * (LIMIT + 4096), "{sizes}");
        let end = fs::read(&path).expect("readable");
        assert_eq!(end.last(), Some(&b'l'), "the newest words are kept");
        assert_eq!(Log::open(path).expect("again").length, end.len() as u64, "and counted again");
    }
}
