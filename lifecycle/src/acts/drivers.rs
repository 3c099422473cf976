//! The drivers of this node: which there are, what each can, and what they find of an earlier daemon's.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use vmm::{External, Hypervisor, Process, Qemu};

use crate::acts::{copies, describe};
use crate::cold::ColdBoot;
use crate::config::Config;
use crate::error::Error;
use crate::reason::Reason;
use crate::sandbox::Driver;
use crate::state::State;
use crate::store::Record;
use crate::stuck::{Ask, ROOM};
use crate::threads::aside;

/// Memories of sleeping guests that are written to the disk at once: each holds a thread as long as that
/// takes, and all share the disk with the journal.
const WRITE_BACKS: usize = 2;
/// How often a saved state that cannot be read is tried again, and after which pause.
const READS: usize = 3;
const READ_AGAIN: Duration = Duration::from_millis(100);

/// The folder of the images of snapshots, in that of the state: a folder for each key.
const SNAPSHOTS: &str = "snapshots";

/// The drivers of this node.
#[derive(Debug)]
pub(crate) struct Hypervisors {
    pub(crate) qemu: Qemu,
    pub(crate) external: External,
    image_dir: PathBuf,
    config: Arc<Config>,
    write_backs: Arc<Semaphore>,
}

/// What there is of a sandbox that an earlier daemon had.
#[derive(Debug, Default)]
pub(crate) struct Found {
    pub(crate) process: Option<Process>,
    /// What it was saved as, if it has not run since.
    pub(crate) saved: Option<vmm::Saved>,
    /// Why what it was saved as is of no use, where there is something.
    pub(crate) damage: Option<Reason>,
}

impl Hypervisors {
    pub(crate) fn new(config: &Arc<Config>) -> Self {
        let netns = config.netns.clone();
        Self {
            qemu: Qemu::new(&config.qemu),
            external: External { netns, hooks: config.hooks.clone() },
            image_dir: config.image_dir.clone(),
            config: Arc::clone(config),
            write_backs: Arc::new(Semaphore::new(WRITE_BACKS)),
        }
    }

    /// Refuses a driver that cannot start anything on this node.
    pub(crate) fn check(&self, driver: Driver) -> Result<(), Error> {
        let missing = match driver {
            Driver::External => return Ok(()),
            Driver::Qemu => ["vmlinuz", "initrd.img", "root.ext4"]
                .into_iter()
                .find(|file| !self.image_dir.join(file).is_file()),
        };
        let Some(missing) = missing else { return Ok(()) };
        Err(Error::NoImage(self.image_dir.join(missing)))
    }

    /// Bytes that the disk of a sandbox of this driver can grow to: what its process may write is bounded
    /// by the size of the image's. None of ours for somebody else's.
    pub(crate) async fn disk(&self, driver: Driver) -> u64 {
        match driver {
            Driver::External => 0,
            Driver::Qemu => {
                let base = tokio::fs::metadata(self.image_dir.join("root.ext4")).await;
                base.map_or(0, |base| base.len())
            }
        }
    }

    /// Removes the copies of images that no sandbox was made from. To be called before any is made.
    pub(crate) async fn forget_images(&self) {
        Qemu::forget_images(&copies(&self.config)).await;
    }

    /// Finds out how guests run here, if any can.
    pub(crate) async fn warm(&self) {
        if self.check(Driver::Qemu).is_ok() {
            self.qemu.accel().await;
        }
    }

    /// Has the memory of a guest that was just saved written to the disk, in its turn and waited for by
    /// nobody: the host can have its pages after that. One that was woken meanwhile has none to give.
    pub(crate) fn write_back(&self, machine: vmm::Machine) {
        let (qemu, turns) = (self.qemu.clone(), Arc::clone(&self.write_backs));
        tokio::spawn(async move {
            let Ok(_turn) = turns.acquire().await else { return };
            if !tokio::fs::try_exists(&machine.state).await.unwrap_or(false) {
                return;
            }
            if let Err(error) = qemu.write_back(&machine, false).await {
                let name = &machine.name;
                tracing::warn!(sandbox = %name, %error, "memory of a sleeping guest not written back");
            }
        });
    }

    /// Whether what runs a sandbox is alive.
    pub(crate) fn is_running(&self, record: &Record) -> bool {
        record.process.as_ref().is_some_and(|process| match record.driver {
            Driver::Qemu => self.qemu.is_running(process),
            Driver::External => self.external.is_running(process),
        })
    }

    /// Whether guests of a driver can be put to sleep on this node.
    pub(crate) fn can_sleep(&self, driver: Driver) -> bool {
        match driver {
            Driver::Qemu => self.qemu.can_sleep(),
            Driver::External => self.external.can_sleep(),
        }
    }

    /// What the process of a sandbox has had of processors, if it is ours.
    pub(crate) fn processor(&self, record: &Record) -> Option<Duration> {
        record.process.as_ref()?.host.as_ref()?.processor()
    }

    /// Looks whether a guest stands still because its disk found no room, and lets it go on where that may
    /// help: whether it stood still, and was let go on. None for one whose disk is not ours. To be dropped
    /// before the guest is paused.
    pub(crate) fn look_at(
        &self,
        record: &Record,
        ask: Ask,
    ) -> Option<impl Future<Output = Result<(bool, bool), vmm::Error>> + Send + use<>> {
        let process = record.process.clone().filter(|_| record.driver == Driver::Qemu)?;
        let (qemu, disk) = (self.qemu.clone(), describe(&self.config, record).disk);
        Some(async move {
            let again = match ask {
                Ask::Whether => false,
                Ask::WithRoom => aside(move || free(&disk))
                    .await
                    .is_ok_and(|free| free.is_some_and(|free| free >= ROOM)),
                Ask::Anyway => true,
            };
            Ok((qemu.stuck(&process, again).await?, again))
        })
    }

    /// Takes up what an earlier daemon started; false when it is gone.
    pub(crate) async fn adopt(&self, record: &Record) -> bool {
        let Some(process) = &record.process else { return false };
        match record.driver {
            Driver::Qemu => self.qemu.adopt(process).await,
            Driver::External => self.external.adopt(process).await,
        }
    }

    /// Looks for what an earlier daemon left of a sandbox that it was saving or waking, or that slept.
    pub(crate) async fn find(&self, record: &Record) -> Found {
        match record.driver {
            Driver::Qemu => {
                let machine = describe(&self.config, record);
                let noted = record.process.clone().filter(|process| self.qemu.is_running(process));
                let process = noted.or_else(|| self.qemu.find(&machine));
                match self.looked_for(&machine).await {
                    Ok(saved) => Found { process, saved, damage: None },
                    // What the journal has of it is enough to leave it asleep, as long as the file is there.
                    Err(error)
                        if !matches!(error, vmm::Error::Unusable { .. })
                            && record.saved.is_some()
                            && tokio::fs::try_exists(&machine.state).await.unwrap_or(true) =>
                    {
                        let (name, error) = (&record.name, crate::error::chain(&error));
                        tracing::error!(sandbox = %name, error, "what was saved is left for later");
                        Found { process, saved: record.saved.clone(), damage: None }
                    }
                    Err(error) => {
                        let full = crate::error::chain(&error);
                        let damage = Reason::told_as(full, "what was saved of it is damaged");
                        Found { process, saved: None, damage: Some(damage) }
                    }
                }
            }
            // Nobody but its owner knows. One that was being woken may run, and whoever resumes one that
            // runs does nothing.
            Driver::External
                if matches!(
                    record.state,
                    State::Standby | State::Suspending | State::Suspended
                ) =>
            {
                Found { saved: record.saved.clone(), ..Found::default() }
            }
            Driver::External => {
                let machine = describe(&self.config, record);
                Found { process: Some(self.external.find(&machine)), ..Found::default() }
            }
        }
    }

    /// Whether a sandbox may boot from its disk alone: that is allowed, and the disk is there.
    pub(crate) async fn may_boot(&self, record: &Record) -> bool {
        record.driver == Driver::Qemu
            && record.terms.cold_boot == ColdBoot::Allowed
            && tokio::fs::try_exists(&describe(&self.config, record).disk).await.unwrap_or(false)
    }

    /// The files of a sandbox that was saved, by their names in the object store.
    pub(crate) fn files(&self, record: &Record) -> Vec<vault::File> {
        let machine = describe(&self.config, record);
        let file = |name, path| vault::File { name, path };
        vec![
            file("state", machine.state),
            file("memory", machine.memory),
            file("disk", machine.disk),
        ]
    }

    /// Where these are got back to: the state has its name only when all is there.
    pub(crate) fn files_to_fetch(&self, record: &Record) -> Vec<vault::File> {
        let mut files = self.files(record);
        files.iter_mut().filter(|file| file.name == "state").for_each(|file| {
            file.path.set_extension("fetched");
        });
        files
    }

    /// Keeps the image of a sandbox for who goes on from what is stored under this key.
    pub(crate) async fn keep_image(&self, record: &Record, key: &str) -> Result<(), vmm::Error> {
        let (own, kept) = (describe(&self.config, record), self.image_of(key));
        let Some(image) = own.base.parent().map(Path::to_owned) else { return Ok(()) };
        let keeper = vmm::Machine {
            image,
            kernel: kept.join("vmlinuz"),
            initrd: kept.join("initrd.img"),
            base: kept.join("root.ext4"),
            ..own
        };
        self.qemu.keep_image(&keeper).await
    }

    /// Forgets the images of what is stored under keys that nobody has any more.
    pub(crate) async fn drop_image(&self, key: &str) {
        match tokio::fs::remove_dir_all(self.image_of(key)).await {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(key, %error, "image of a snapshot not removed");
            }
            _ => {}
        }
    }

    /// The keys of which images are kept.
    pub(crate) async fn image_keys(&self) -> Vec<String> {
        let mut keys = Vec::new();
        let Ok(mut found) = tokio::fs::read_dir(self.config.state_dir.join(SNAPSHOTS)).await else {
            return keys;
        };
        while let Ok(Some(entry)) = found.next_entry().await {
            keys.extend(entry.file_name().into_string().ok());
        }
        keys
    }

    fn image_of(&self, key: &str) -> PathBuf {
        self.config.state_dir.join(SNAPSHOTS).join(key)
    }

    /// Refuses a copy of a sandbox's files where it would leave less of the disk than is kept for the journal,
    /// were it not packed. One that leaves this node takes nothing here.
    pub(crate) async fn check_room(&self, record: &Record) -> Result<(), Error> {
        if !self.config.store.url.is_empty() {
            return Ok(());
        }
        let mut copy = 0_u64;
        for file in self.files(record) {
            let held = tokio::fs::metadata(&file.path).await.map_or(0, |held| held.blocks());
            copy = copy.saturating_add(held.saturating_mul(512));
        }
        let (dir, reserve) = (self.config.state_dir.clone(), self.config.state_reserve);
        match aside(move || free(&dir)).await? {
            Some(free) if free < reserve.saturating_add(copy) => {
                Err(Error::Reserve { free: free.saturating_sub(copy), reserve })
            }
            _ => Ok(()),
        }
    }

    /// Makes the places of the files of a sandbox that are to be got back, and its image where it is another's;
    /// nothing is there then.
    pub(crate) async fn make_way(&self, record: &Record, key: &str) -> Result<(), vmm::Error> {
        let made = self.make_places(record).await;
        let path = describe(&self.config, record).disk;
        made.map_err(|source| vmm::Error::File { act: "make the place of", path, source })?;
        let kept = self.image_of(key);
        if !tokio::fs::try_exists(&kept).await.unwrap_or(false) {
            return Ok(());
        }
        let machine = vmm::Machine { image: kept, ..describe(&self.config, record) };
        // Whichever it was made from, its disk is above this one from here on.
        for own in [&machine.kernel, &machine.initrd, &machine.base] {
            match tokio::fs::remove_file(own).await {
                Err(source) if source.kind() != io::ErrorKind::NotFound => {
                    return Err(vmm::Error::File { act: "remove", path: own.clone(), source });
                }
                _ => {}
            }
        }
        self.qemu.keep_image(&machine).await
    }

    async fn make_places(&self, record: &Record) -> io::Result<()> {
        self.drop_local(record).await?;
        for file in self.files(record) {
            let Some(dir) = file.path.parent() else { continue };
            tokio::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).await?;
        }
        Ok(())
    }

    /// Makes what was got back the saved state of a sandbox.
    pub(crate) async fn restore(&self, record: &Record) -> Result<vmm::Saved, vmm::Error> {
        let machine = describe(&self.config, record);
        let fetched = machine.state.with_extension("fetched");
        self.qemu.restore(&machine, &fetched).await
    }

    /// Removes the files of a sandbox that the store has: first its state, without which the others are none.
    pub(crate) async fn drop_local(&self, record: &Record) -> io::Result<()> {
        let files = self.files(record).into_iter().chain(self.files_to_fetch(record));
        for file in files {
            match tokio::fs::remove_file(&file.path).await {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// Whether what a sandbox was saved as was used up. What cannot be read now is there, and nothing has run
    /// from it.
    pub(crate) async fn is_used_up(&self, record: &Record) -> bool {
        match record.driver {
            Driver::Qemu => {
                matches!(self.qemu.saved(&describe(&self.config, record)).await, Ok(None))
            }
            Driver::External => record.saved.is_none(),
        }
    }

    /// What a machine was saved as; tried again where the file only cannot be read now.
    async fn looked_for(&self, machine: &vmm::Machine) -> Result<Option<vmm::Saved>, vmm::Error> {
        let mut found = self.qemu.saved(machine).await;
        for _ in 0..READS {
            if matches!(found, Ok(_) | Err(vmm::Error::Unusable { .. })) {
                break;
            }
            tokio::time::sleep(READ_AGAIN).await;
            found = self.qemu.saved(machine).await;
        }
        found
    }
}

/// Bytes that are free on the disk of a folder; none where that cannot be asked: who writes finds out.
pub(crate) fn free(dir: &Path) -> Option<u64> {
    let held = nix::sys::statvfs::statvfs(dir).ok()?;
    Some(held.blocks_available().saturating_mul(held.fragment_size()))
}
