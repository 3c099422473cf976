//! A small disk of its own for a folder, which a test can fill and free. Ends with this value.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::netns::run;

/// A mounted disk.
#[derive(Debug)]
pub struct Room {
    at: PathBuf,
}

impl Room {
    /// Mounts a disk of so many KiB on this folder, which is made if it is missing.
    ///
    /// # Panics
    /// Without the right to mount.
    #[must_use]
    pub fn small(at: &Path, kib: u32) -> Self {
        std::fs::create_dir_all(at).expect("the folder");
        let size = format!("size={kib}k,mode=750");
        run(Command::new("mount").args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(at));
        Self { at: at.to_owned() }
    }

    /// Leaves not one byte free.
    ///
    /// # Panics
    /// When it cannot be filled.
    pub fn fill(&self) {
        let mut file = File::options().create(true).append(true).open(self.filler()).expect("open");
        while file.write_all(&[b'x'; 4096]).is_ok() {}
        while file.write_all(b"x").is_ok() {}
    }

    /// Gives back what [`Room::fill`] took.
    ///
    /// # Panics
    /// When it was not filled.
    pub fn free(&self) {
        std::fs::remove_file(self.filler()).expect("it was full");
    }

    fn filler(&self) -> PathBuf {
        self.at.join(".filler")
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.at).stderr(Stdio::null()).status();
    }
}
