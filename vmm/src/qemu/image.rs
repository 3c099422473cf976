//! The image that a machine was made from, kept for as long as the machine: its disk is above that one and no
//! other, and its kernel has the modules that are in it.
//!
//! By links, which cost nothing: an image that is built anew has new files. Where it cannot be linked, on
//! another file system, it is copied once and the copy linked. Never writes to an image.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use tokio::process::Command;

use crate::error::{Error, said};
use crate::hypervisor::Machine;
use crate::qemu::{asleep, file, remove_file};

/// Links what the machine is made from, as far as it has not its own yet.
pub(super) async fn keep(machine: &Machine) -> Result<(), Error> {
    for own in [&machine.kernel, &machine.initrd, &machine.base] {
        let Some(name) = own.file_name() else { continue };
        let there = machine.image.join(name);
        if own.exists() {
            continue;
        }
        // The file itself, not a name for it. What the image has not is told of by who opens it.
        let Ok(there) = fs::canonicalize(&there) else { continue };
        if let Some(dir) = own.parent() {
            make_dir(dir)?;
        }
        if fs::hard_link(&there, own).is_ok() {
            continue;
        }
        let copy = copied(&there, &machine.copies).await?;
        fs::hard_link(&copy, own).map_err(|source| file("link", own, source))?;
    }
    Ok(())
}

/// The copy of a file of an image: of its very content, made where there is none.
async fn copied(there: &Path, copies: &Path) -> Result<PathBuf, Error> {
    let found = fs::metadata(there).map_err(|source| file("look at", there, source))?;
    let name = there.file_name().unwrap_or_default().to_string_lossy();
    let (mtime, nanos) = (found.mtime(), found.mtime_nsec());
    let copy = copies.join(format!("{name}-{}-{}-{mtime}.{nanos}", found.ino(), found.len()));
    if copy.exists() {
        return Ok(copy);
    }
    make_dir(copies)?;
    // Two may copy at once; each has its own until it is whole.
    let whole = tempfile_in(copies, &copy);
    let program = || "cp".to_owned();
    let output = Command::new("cp")
        .args(["--reflink=auto", "--sparse=always", "--"])
        .arg(there)
        .arg(&whole)
        .output()
        .await
        .map_err(|source| Error::Program { program: program(), source })?;
    if !output.status.success() {
        remove_file(&whole);
        return Err(Error::Failed {
            program: program(),
            said: said(Some(output.status), &output.stderr),
        });
    }
    let name_it = || {
        fs::File::open(&whole)?.sync_all()?;
        fs::rename(&whole, &copy)
    };
    name_it().map_err(|source| file("copy the image to", &copy, source))?;
    Ok(copy)
}

/// Where this copy is made: nobody else's name.
fn tempfile_in(copies: &Path, copy: &Path) -> PathBuf {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = copy.file_name().unwrap_or_default().to_string_lossy();
    copies.join(format!(".{name}.{}.{number}", std::process::id()))
}

/// Removes copies to which no machine has a link, and those that were never whole.
pub(super) async fn forget(copies: &Path) {
    let copies = copies.to_owned();
    let look = move || {
        for entry in fs::read_dir(copies).into_iter().flatten().flatten() {
            if entry.metadata().is_ok_and(|found| found.is_file() && found.nlink() <= 1) {
                remove_file(&entry.path());
            }
        }
        Ok(())
    };
    // What stays is looked at by the next start.
    let _ = asleep::blocking(look).await;
}

fn make_dir(path: &Path) -> Result<(), Error> {
    let made: io::Result<()> = fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.map_err(|source| file("make", path, source))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(dir: &Path) -> Machine {
        let own = dir.join("own");
        Machine {
            name: "demo".parse().expect("a name"),
            tenant: "acme".parse().expect("a name"),
            slot: policy::Slot::new(1).expect("in range"),
            memory_mib: 128,
            vcpus: 1,
            image: dir.join("image"),
            copies: dir.join("copies"),
            kernel: own.join("vmlinuz"),
            initrd: own.join("initrd.img"),
            cmdline: String::new(),
            base: own.join("root.ext4"),
            disk: own.join("disk"),
            memory: own.join("memory"),
            state: own.join("state"),
            run_dir: own.join("run"),
            uid: 64_001,
        }
    }

    fn build(dir: &Path, content: &str) {
        fs::create_dir_all(dir.join("image")).expect("a folder");
        for name in ["vmlinuz", "initrd.img", "root.ext4"] {
            // As the image is built: a new file under the old name.
            let new = dir.join("image").join(format!("{name}.new"));
            fs::write(&new, content).expect("written");
            fs::rename(new, dir.join("image").join(name)).expect("named");
        }
    }

    /// Promise 66.
    #[tokio::test]
    async fn an_image_that_is_built_anew_leaves_a_machine_the_one_it_was_made_from() {
        let dir = tempfile::tempdir().expect("a folder");
        let machine = machine(dir.path());
        build(dir.path(), "old");
        keep(&machine).await.expect("kept");
        build(dir.path(), "new");
        keep(&machine).await.expect("it is there");
        for own in [&machine.kernel, &machine.initrd, &machine.base] {
            assert_eq!(fs::read_to_string(own).expect("there"), "old");
        }
        let other = dir.path().join("image/root.ext4");
        assert_eq!(fs::read_to_string(other).expect("there"), "new", "control");
        assert!(!machine.copies.exists(), "nothing was copied");
    }

    #[tokio::test]
    async fn an_image_of_another_file_system_is_copied_once_and_forgotten_with_the_last_machine() {
        let dir = tempfile::tempdir().expect("a folder");
        // A file system of its own, as far as links go.
        let far = tempfile::tempdir_in("/dev/shm").expect("a folder");
        let own = machine(dir.path());
        let first = Machine { image: far.path().join("image"), ..own };
        build(far.path(), "old");
        let linked = fs::hard_link(first.image.join("vmlinuz"), dir.path().join("link"));
        assert!(linked.is_err(), "control: it cannot be linked");
        keep(&first).await.expect("kept");
        let second = Machine { kernel: dir.path().join("b/vmlinuz"), ..first.clone() };
        keep(&second).await.expect("kept");
        let inode = |path: &Path| fs::metadata(path).expect("there").ino();
        assert_eq!(inode(&first.kernel), inode(&second.kernel), "one copy");
        let copies = || fs::read_dir(&first.copies).expect("a folder").count();
        forget(&first.copies).await;
        assert_eq!(copies(), 3, "they are in use");
        fs::remove_dir_all(dir.path().join("own")).expect("removed");
        forget(&first.copies).await;
        assert_eq!(copies(), 1, "the second machine's");
    }
}
