//! Places at which a test can end the daemon, make it panic, or hold it up, between two steps, and the
//! clock on the wall, which a test can set.
//!
//! Only builds with debug assertions can be struck or set, and only after [`listen`]; in a release build
//! a place is nothing and the clock is the system's. Never decides anything, and never knows what a step
//! does.
#![forbid(unsafe_code)]

use std::time::SystemTime;

/// What somebody asked of the daemon when it comes to a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum On {
    /// A sandbox is made.
    Create,
    /// The same, by the driver `qemu` only.
    CreateQemu,
    /// A sandbox is removed.
    Remove,
    /// The same, by the driver `qemu` only.
    RemoveQemu,
    /// A sandbox goes to sleep, by the driver `qemu` only.
    SaveQemu,
    /// It wakes up, likewise.
    ResumeQemu,
    /// A sandbox is put to sleep.
    Standby,
    /// A sandbox that sleeps is woken.
    Resume,
    /// A sandbox of which only the disk is left begins anew.
    Boot,
    /// The same, of one that slept while its daemon died.
    ResumeAfterDeath,
    /// A sandbox that sleeps is put into the store.
    Suspend,
    /// It is got back from there.
    Fetch,
    /// A snapshot of a sandbox is taken.
    Snapshot,
    /// A snapshot is removed.
    Forget,
    /// A sandbox is made of a snapshot.
    Clone,
    /// A sandbox goes back to a snapshot.
    Rollback,
    /// A policy is written.
    Policy,
    /// Records are written to the audit.
    Audit,
    /// A daemon starts and finds what another left.
    Start,
    /// A guest connects.
    Connect,
}

macro_rules! points {
    ($($name:ident $on:ident,)*) => {
        /// The points, in the order in which they are come to.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[expect(missing_docs, reason = "the names say what has just been done, or is `To` be done")]
        pub enum Point { $($name,)* }

        impl Point {
            /// All there are.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// Its name, as a test writes it.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$name => stringify!($name),)* }
            }

            /// When it is come to.
            #[must_use]
            pub const fn on(self) -> On {
                match self { $(Self::$name => On::$on,)* }
            }
        }
    };
}

points! {
    SandboxToInsert Create,
    SandboxInserted Create,
    TapToMake Create,
    TapMade Create,
    FenceToRaise Create,
    LinkPrepared Create,
    RulesLoaded Create,
    SocketsOpened Create,
    LinkRaised Create,
    FenceRaised Create,
    ProcessToStart Create,
    FolderMade Create,
    QemuFolderMade CreateQemu,
    QemuDiskMade CreateQemu,
    QemuSocketsMade CreateQemu,
    QemuGroupsMade CreateQemu,
    QemuSpawned CreateQemu,
    QemuReady CreateQemu,
    ProcessStarted Create,
    AgentToGreet Create,
    AgentGreeted Create,
    RunningNoted Create,
    QemuPaused SaveQemu,
    QemuStateBegun SaveQemu,
    QemuStateWritten SaveQemu,
    QemuStateNamed SaveQemu,
    QemuStateLoaded ResumeQemu,
    QemuStateConsumed ResumeQemu,
    QemuUnpaused ResumeQemu,
    GuestToHold Standby,
    GuestHeld Standby,
    GuestToPause Standby,
    GuestPaused Standby,
    ConnectionsToKeep Standby,
    ConnectionsKept Standby,
    GuestToSave Standby,
    GuestSaved Standby,
    TapToOpen Resume,
    TapOpened Resume,
    FenceToCheck Resume,
    FenceChecked Resume,
    GuestToLoad Resume,
    GuestLoaded Resume,
    ConnectionsToRebuild Resume,
    ConnectionsRebuilt Resume,
    EndsToTell ResumeAfterDeath,
    EndsTold ResumeAfterDeath,
    GuestToResume Resume,
    GuestResumed Resume,
    GuestToRelease Resume,
    GuestReleased Resume,
    GuestToRefresh Resume,
    GuestRefreshed Resume,
    ToBeginAnew Boot,
    BegunAnew Boot,
    GuestToStore Suspend,
    FileStored Suspend,
    ListStored Suspend,
    GuestStored Suspend,
    LocalToDrop Suspend,
    LocalDropped Suspend,
    GuestToFetch Fetch,
    FileFetched Fetch,
    FetchedNamed Fetch,
    FetchNoted Fetch,
    GuestFetched Fetch,
    ListForgotten Fetch,
    GuestToCopy Snapshot,
    SnapshotToNote Snapshot,
    SnapshotNoted Snapshot,
    GuestCopied Snapshot,
    SnapshotToForget Forget,
    SnapshotForgotten Forget,
    CloneToInsert Clone,
    CloneInserted Clone,
    GuestToRewind Rollback,
    RewindToNote Rollback,
    RewindNoted Rollback,
    GuestRewound Rollback,
    ProcessToStop Remove,
    QemuKilled RemoveQemu,
    ProcessStopped Remove,
    FenceToLower Remove,
    ConnectionsSevered Remove,
    LinkLowered Remove,
    RulesRemoved Remove,
    FenceLowered Remove,
    TapToDelete Remove,
    TapDeleted Remove,
    MemoryToDrop Remove,
    MemoryDropped Remove,
    FilesToRemove Remove,
    RunFilesRemoved Remove,
    FilesRemoved Remove,
    SandboxToForget Remove,
    SandboxForgotten Remove,
    HandleToDrop Remove,
    PolicyCompiled Policy,
    PolicyToWrite Policy,
    PolicyWritten Policy,
    PolicySwapped Policy,
    PolicyJudged Policy,
    AuditToAppend Audit,
    AuditHalfAppended Audit,
    AuditAppended Audit,
    AuditRotated Audit,
    AuditTrimmed Audit,
    OrphanFenceLowered Start,
    OrphansSwept Start,
    SandboxTakenUp Start,
    ConnectionTaken Connect,
    ConnectionDecided Connect,
}

/// Comes to a point: nothing happens, unless a test has armed it.
#[inline]
pub fn at(point: Point) {
    #[cfg(debug_assertions)]
    debug::at(point);
    #[cfg(not(debug_assertions))]
    let _ = point;
}

/// Whether this point is armed, for a step that has to be half done before it can be struck.
#[must_use]
pub fn armed(point: Point) -> bool {
    #[cfg(debug_assertions)]
    return debug::armed(point).is_some();
    #[cfg(not(debug_assertions))]
    {
        let _ = point;
        false
    }
}

/// From now on a point is armed while the file holds its name and `die`, `panic` or `stall`. When it
/// strikes, the file is renamed to the same with `.struck` behind; a stall ends when that is removed.
/// Nothing in a release build.
pub fn listen(file: std::path::PathBuf) {
    #[cfg(debug_assertions)]
    debug::listen(file);
    #[cfg(not(debug_assertions))]
    drop(file);
}

/// What the clock on the wall says: for what is recorded and shown, and never for what is decided. A test
/// sets it by the seconds in the file of [`listen`] with `.clock` behind.
#[must_use]
pub fn wall_clock() -> SystemTime {
    #[cfg(debug_assertions)]
    return debug::wall_clock();
    #[cfg(not(debug_assertions))]
    SystemTime::now()
}

#[cfg(debug_assertions)]
mod debug {
    use std::fs;
    use std::path::PathBuf;
    use std::sync::OnceLock;
    use std::time::{Duration, SystemTime};

    use crate::Point;

    static FILE: OnceLock<PathBuf> = OnceLock::new();

    /// How often it is looked whether a stall is over.
    const LOOK: Duration = Duration::from_millis(10);

    pub(crate) fn listen(file: PathBuf) {
        let _ = FILE.set(file);
    }

    /// What is to happen there.
    pub(crate) fn armed(point: Point) -> Option<String> {
        let text = fs::read_to_string(FILE.get()?).ok()?;
        let (name, act) = text.split_once(' ')?;
        (name == point.name()).then(|| act.trim().to_owned())
    }

    /// The system's, moved by what a test has set.
    pub(crate) fn wall_clock() -> SystemTime {
        let set = FILE.get().and_then(|file| fs::read_to_string(file.with_extension("clock")).ok());
        let seconds: i64 = set.and_then(|text| text.trim().parse().ok()).unwrap_or_default();
        let by = Duration::from_secs(seconds.unsigned_abs());
        let now = SystemTime::now();
        if seconds < 0 { now - by } else { now + by }
    }

    pub(crate) fn at(point: Point) {
        let (Some(act), Some(file)) = (armed(point), FILE.get()) else { return };
        // Once: two tasks that come to it together are not both struck.
        let struck = file.with_extension("struck");
        if fs::rename(file, &struck).is_err() {
            return;
        }
        match act.as_str() {
            // No destructor runs and nothing is flushed, as with SIGKILL.
            "die" => std::process::abort(),
            "panic" => panic!("struck at {}", point.name()),
            "stall" => {
                while struck.exists() {
                    std::thread::sleep(LOOK);
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_point_that_is_armed_strikes_and_only_once() {
        let dir = tempfile_dir();
        let file = dir.join("fault");
        listen(file.clone());
        let struck = |point| std::panic::catch_unwind(|| at(point)).is_err();
        assert!(!struck(Point::TapMade), "nothing is armed");
        std::fs::write(&file, "TapMade panic").expect("arm");
        assert!(!struck(Point::TapToMake));
        assert!(struck(Point::TapMade));
        assert!(!struck(Point::TapMade), "once");
        let mark = dir.join("fault.struck");
        assert!(mark.exists());
        std::fs::remove_file(&mark).expect("forget");
        std::fs::write(&file, "TapMade stall").expect("arm");
        std::thread::scope(|scope| {
            let stalled = scope.spawn(|| at(Point::TapMade));
            while !mark.exists() {
                std::thread::yield_now();
            }
            assert!(!stalled.is_finished(), "held up");
            std::fs::remove_file(&mark).expect("release");
        });
        std::fs::remove_dir_all(dir).expect("clean");
    }

    fn tempfile_dir() -> std::path::PathBuf {
        let dir = std::env::temp_dir().join(format!("postern-fault-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("folder");
        dir
    }
}
