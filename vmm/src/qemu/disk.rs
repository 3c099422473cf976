//! The guest's disk: a private overlay over the image's root, which is never written.

use std::fs::{self, OpenOptions, Permissions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
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
    let output = Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"])
        .arg(base)
        .arg(overlay)
        .output()
        .await
        .map_err(|source| Error::Program { program: program(), source })?;
    if output.status.success() {
        // Nobody but us opens a guest's disk; its process gets it open.
        return fs::set_permissions(overlay, Permissions::from_mode(0o600))
            .map_err(|source| file("protect", overlay, source));
    }
    Err(Error::Failed { program: program(), said: said(Some(output.status), &output.stderr) })
}

/// Opens a file of the machine for its process.
pub(super) fn open(path: &Path, write: bool) -> Result<OwnedFd, Error> {
    let opened = OpenOptions::new().read(true).write(write).open(path);
    opened.map(OwnedFd::from).map_err(|source| file("open", path, source))
}
