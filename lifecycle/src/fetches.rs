//! What comes back from the object store: in turns of its own, since it takes as long as the store does, and
//! only where it leaves free what is kept for the journal. What several are getting at once is counted
//! together. Never gets anything itself.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use policy::TenantName;

use crate::error::Error;
use crate::threads::{aside, locked};
use crate::turns::{Place, Turns};

/// Sandboxes that are got back at once: each is bound by the store and the disk, and holds a few times 8 MiB.
const FETCHES: usize = 2;

/// The fetches of a node. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Fetches {
    turns: Turns,
    /// Bytes that those under way may yet write, by device.
    promised: Arc<Mutex<HashMap<u64, u64>>>,
    state_dir: PathBuf,
    reserve: u64,
}

/// Room that is held for one; it is free again when this is dropped.
#[derive(Debug)]
pub(crate) struct Promise {
    promised: Arc<Mutex<HashMap<u64, u64>>>,
    needs: HashMap<u64, u64>,
}

impl Fetches {
    /// Where so many bytes are kept for the journal on the disk of its folder.
    pub(crate) fn new(state_dir: &Path, reserve: u64) -> Self {
        let (turns, promised) = (Turns::new(FETCHES), Arc::default());
        Self { turns, promised, state_dir: state_dir.to_owned(), reserve }
    }

    /// A place in the line of those that are to be got back.
    pub(crate) fn ask(&self, tenant: &TenantName) -> Place {
        self.turns.ask(tenant)
    }

    /// Holds room for these files, each with the bytes it needs; its folder is there.
    ///
    /// # Errors
    /// [`Error::Returning`] when a disk has less.
    pub(crate) async fn hold(&self, files: Vec<(PathBuf, u64)>) -> Result<Promise, Error> {
        let this = self.clone();
        aside(move || this.hold_now(&files)).await?
    }

    fn hold_now(&self, files: &[(PathBuf, u64)]) -> Result<Promise, Error> {
        let own = device(&self.state_dir).ok();
        let mut needs = HashMap::<u64, (u64, &Path)>::new();
        for (file, bytes) in files {
            let folder = file.parent().unwrap_or(file);
            // What cannot be asked is found out by who writes.
            let Ok(disk) = device(folder) else { continue };
            let need = needs.entry(disk).or_insert((0, folder));
            need.0 = need.0.saturating_add(*bytes);
        }
        let mut promised = locked(&self.promised);
        for (disk, (needs, folder)) in &needs {
            let Ok(held) = nix::sys::statvfs::statvfs(*folder) else { continue };
            let free = held.blocks_available().saturating_mul(held.fragment_size());
            let free = free.saturating_sub(promised.get(disk).copied().unwrap_or_default());
            let reserve = if own == Some(*disk) { self.reserve } else { 0 };
            if free < reserve.saturating_add(*needs) {
                return Err(Error::Returning { needs: *needs, free, reserve });
            }
        }
        let needs: HashMap<u64, u64> =
            needs.into_iter().map(|(disk, need)| (disk, need.0)).collect();
        for (disk, needs) in &needs {
            *promised.entry(*disk).or_default() += needs;
        }
        Ok(Promise { promised: Arc::clone(&self.promised), needs })
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        let mut promised = locked(&self.promised);
        for (disk, needs) in &self.needs {
            if let Some(all) = promised.get_mut(disk) {
                *all = all.saturating_sub(*needs);
            }
        }
        promised.retain(|_, all| *all > 0);
    }
}

fn device(path: &Path) -> io::Result<u64> {
    Ok(fs::metadata(path)?.dev())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Promise 77.
    #[tokio::test]
    async fn what_comes_back_leaves_what_is_kept_for_the_journal_all_together() {
        let dir = tempfile::tempdir().unwrap();
        let free = nix::sys::statvfs::statvfs(dir.path()).unwrap();
        let free = free.blocks_available() * free.fragment_size();
        let files = |bytes: u64| {
            let file = |name: &str| (dir.path().join(name), bytes / 2);
            vec![file("memory"), file("disk")]
        };
        // Others write to this disk meanwhile: a quarter of it is as good as any.
        let some = free / 4;
        let fetches = Fetches::new(dir.path(), some);
        let one = fetches.hold(files(some)).await.unwrap();
        let refused = fetches.hold(files(3 * some)).await.unwrap_err();
        let Error::Returning { needs, reserve, .. } = &refused else { panic!("{refused:?}") };
        assert_eq!((*needs, *reserve), (3 * some / 2 * 2, some));
        let two = fetches.hold(files(some)).await.unwrap();
        let third = fetches.hold(files(some + some / 2)).await;
        assert!(matches!(third, Err(Error::Returning { .. })), "together they are too many");
        drop((one, two));
        assert!(locked(&fetches.promised).is_empty());
        fetches.hold(files(some + some / 2)).await.unwrap();
        let without = Fetches::new(dir.path(), 0);
        without.hold(files(3 * some)).await.unwrap();
    }
}
