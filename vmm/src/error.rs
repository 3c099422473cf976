//! What can fail between a description of a machine and a running one. Nothing of a guest is in it.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// A failure of this room.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The tap could not be made or opened.
    #[error("cannot {act} tap {tap}")]
    Tap {
        /// `create` or `attach`.
        act: &'static str,
        /// Its name.
        tap: String,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// A file, directory or socket of the machine.
    #[error("cannot {act} {path}")]
    File {
        /// What was being done, as a verb.
        act: &'static str,
        /// To what.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// A program that is needed is missing or did not start.
    #[error("cannot run {program}")]
    Program {
        /// Its name or path.
        program: String,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// A program ended with a failure.
    #[error("{program} failed: {said}")]
    Failed {
        /// Its name or path.
        program: String,
        /// Its status and the end of what it wrote, at most 2 KiB.
        said: String,
    },
    /// A program took too long and was killed.
    #[error("{program} did not end within {limit:?}")]
    Slow {
        /// Its name or path.
        program: String,
        /// What it was given.
        limit: Duration,
    },
    /// The process would not die.
    #[error("process {pid} is still there {limit:?} after SIGKILL")]
    Survivor {
        /// Its id.
        pid: u32,
        /// How long was waited.
        limit: Duration,
    },
    /// The hypervisor's control socket.
    #[error("cannot {act} over the control socket of process {pid}")]
    Control {
        /// What was being done.
        act: &'static str,
        /// Whose socket.
        pid: u32,
        /// What went wrong.
        #[source]
        source: io::Error,
    },
    /// A file of a saved machine from which it cannot go on.
    #[error("cannot resume from {path}: {problem}")]
    Unusable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it, after its name.
        problem: String,
    },
    /// A machine that cannot sleep, with the reason.
    #[error("cannot sleep: {0}")]
    Sleepless(&'static str),
    /// The process belongs to another driver.
    #[error("a process of driver {0} cannot be handled here: that driver is not configured")]
    OtherDriver(&'static str),
}

/// The end of what a program wrote, after its status where that is known; in one line and without
/// control characters, since it goes to logs and terminals.
pub(crate) fn said(status: Option<std::process::ExitStatus>, output: &[u8]) -> String {
    const LIMIT: usize = 2048;
    let end = output.get(output.len().saturating_sub(LIMIT)..).unwrap_or_default();
    let words = String::from_utf8_lossy(end);
    let escaped = |c: char| match c.is_control() {
        true => c.escape_default().to_string(),
        false => c.to_string(),
    };
    let words: String = words.trim().chars().map(escaped).collect();
    status.map_or_else(|| words.clone(), |status| format!("{status}: {words}"))
}
