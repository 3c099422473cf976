//! What this host offers to QEMU guests and lacks, for `postern doctor`. Changes nothing.

use std::path::{Path, PathBuf};

use serde::Serialize;
use tokio::process::Command;

use crate::cgroup::Layout;
use crate::qemu::accel::Choice;

/// The findings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The program that was looked for.
    pub binary: PathBuf,
    /// Its version, as it says itself; none when it does not run.
    pub version: Option<String>,
    /// Programs that are needed to start a guest and are not there.
    pub missing_programs: Vec<&'static str>,
    /// What guests run on, and why.
    pub accel: Choice,
    /// The version of control groups in use: 2, 1, or 0 for none.
    pub cgroup_version: u8,
    /// What cannot be limited here: `memory`, `cpu`, `pids`.
    pub cgroup_missing: Vec<&'static str>,
    /// The directory of the guest image.
    pub image: PathBuf,
    /// Its files that are not there.
    pub image_missing: Vec<&'static str>,
}

impl Report {
    /// Whether a guest can be started.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        self.version.is_some() && self.missing_programs.is_empty() && self.image_missing.is_empty()
    }
}

pub(super) async fn look(binary: &Path, accel: Choice, image: &Path) -> Report {
    let layout = Layout::find();
    let mut missing_programs = Vec::new();
    for program in ["bash", "qemu-img", "setpriv", "setsid", "unshare"] {
        if first_line(Path::new(program)).await.is_none() {
            missing_programs.push(program);
        }
    }
    let files = ["vmlinuz", "initrd.img", "root.ext4"];
    Report {
        binary: binary.to_owned(),
        version: first_line(binary).await,
        missing_programs,
        accel,
        cgroup_version: layout.version(),
        cgroup_missing: layout.missing(),
        image: image.to_owned(),
        image_missing: files.into_iter().filter(|file| !image.join(file).exists()).collect(),
    }
}

async fn first_line(program: &Path) -> Option<String> {
    let output = Command::new(program).arg("--version").output().await.ok()?;
    let text = String::from_utf8_lossy(&output.stdout);
    output.status.success().then(|| text.lines().next().unwrap_or_default().to_owned())
}
