//! The guest's disk: a private overlay over the image's root, which is never written.

use std::fs::OpenOptions;
use std::os::fd::OwnedFd;
use std::path::Path;

use tokio::process::Command;

use crate::error::{Error, said};
use crate::qemu::file;

/// Makes the overlay unless it is there.
pub(super) async fn make_overlay(base: &Path, overlay: &Path) -> Result<(), Error> {
    if overlay.exists() {
        return Ok(());
    }
    let program = || "qemu-img".to_owned();
    // Nobody but us ever opens a guest's disk, so it is made so; its process gets it open.
    let output = Command::new("bash")
        .args(["-c", "umask 077; exec qemu-img create -q -f qcow2 -F raw -b \"$1\" \"$2\"", "bash"])
        .arg(base)
        .arg(overlay)
        .output()
        .await
        .map_err(|source| Error::Program { program: program(), source })?;
    if output.status.success() {
        return Ok(());
    }
    Err(Error::Failed { program: program(), said: said(Some(output.status), &output.stderr) })
}

/// Opens a file of the machine for its process.
pub(super) fn open(path: &Path, write: bool) -> Result<OwnedFd, Error> {
    let opened = OpenOptions::new().read(true).write(write).open(path);
    opened.map(OwnedFd::from).map_err(|source| file("open", path, source))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// There is no step after it that would make it so.
    #[tokio::test]
    async fn a_guests_disk_is_made_for_nobody_else_to_read() {
        let dir = tempfile::tempdir().expect("a folder");
        let (base, overlay) = (dir.path().join("root.ext4"), dir.path().join("disk.qcow2"));
        std::fs::write(&base, [0; 4096]).expect("a base");
        make_overlay(&base, &overlay).await.expect("made");
        let mode = std::fs::metadata(&overlay).expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{mode:o}");
    }
}
