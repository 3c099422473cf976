//! The guest's memory: a sparse file that its process maps shared, so that saving it copies nothing.
//!
//! Belongs to the process's user alone, because QEMU opens it again by the name of the descriptor that it
//! was given. Never read here.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, fchown};
use std::path::Path;

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

use crate::error::Error;
use crate::hypervisor::Machine;
use crate::qemu::{file, remove_file};

/// Makes the file anew, all zeros, and opens it for the process.
pub(super) fn make(machine: &Machine) -> Result<OwnedFd, Error> {
    let path = &machine.memory;
    remove_file(path);
    let make = || {
        if let Some(dir) = path.parent() {
            fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        }
        let memory =
            OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)?;
        memory.set_len(machine.memory_bytes())?;
        fchown(&memory, Some(machine.uid), Some(machine.uid))?;
        Ok(memory.into())
    };
    make().map_err(|source| file("make", path, source)).inspect_err(|_| remove_file(path))
}

/// Opens the memory of a machine that was saved for its next process. What is wrong with it, if it
/// cannot be that.
pub(super) fn open(machine: &Machine) -> Result<OwnedFd, Error> {
    let path = &machine.memory;
    let unusable = |problem: String| Error::Unusable { path: path.clone(), problem };
    let memory = match File::options().read(true).write(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(unusable("the guest's memory is gone".to_owned()));
        }
        opened => opened.map_err(|source| file("open", path, source))?,
    };
    let found = memory.metadata().map_err(|source| file("look at", path, source))?;
    if !found.is_file() || found.len() != machine.memory_bytes() {
        let problem = "is not a file of the size of the guest's memory".to_owned();
        return Err(unusable(problem));
    }
    if found.uid() != machine.uid {
        let give = fchown(&memory, Some(machine.uid), Some(machine.uid));
        give.map_err(|source| file("give away", path, source))?;
    }
    Ok(memory.into())
}

/// Writes it back, after which the kernel can take its pages whenever it needs room; with `drop` it takes
/// them now. Blocks for as long as the disk takes.
pub(super) fn write_back(path: &Path, drop: bool) -> Result<(), Error> {
    let memory = File::open(path).map_err(|source| file("open", path, source))?;
    memory.sync_data().map_err(|source| file("write back", path, source))?;
    if drop {
        posix_fadvise(&memory, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)
            .map_err(|source| file("drop", path, source.into()))?;
    }
    Ok(())
}
