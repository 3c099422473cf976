//! The single steps of a journey: what each is called, where a test can strike it, what it means for
//! the journal. Never says when one comes: that is the machine's.

use fault::Point;

/// One thing to do. Every one that undoes may be asked for when there is nothing to undo.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    MakeTap,
    RaiseFence,
    StartProcess,
    GreetAgent,
    /// Deliver nothing more to the guest, and wait a moment until what was sent is acknowledged.
    Hold,
    Pause,
    /// Turn the connections with the guest into values.
    Checkpoint,
    /// Write down what is not memory; the process ends.
    Save,
    /// Put a copy of all that it is into the store.
    Copy,
    /// Become another incarnation of what the store has of an earlier moment. What it is now is over then.
    Rewind,
    /// Put all that it is into the store.
    Store,
    /// Give up the files of what the store has.
    DropLocal,
    /// Get them back from there.
    Fetch,
    OpenTap,
    CheckFence,
    /// Make the process again from what was written down: it stands still.
    Prepare,
    /// Turn the values into connections with the guest again.
    Rebuild,
    /// Reset connections that have ended, which the guest has not heard.
    TellEnds,
    /// Let the guest go on. What was written down is given up first: memory is ahead of it then.
    Unpause,
    /// Deliver to the guest again.
    Release,
    /// Tell the guest the time, and give it fresh entropy.
    Refresh,
    /// Become another incarnation, since nothing is left of what it was but its disk.
    BeginAnew,
    /// End a process that was made from what was written down and has not run.
    Discard,
    StopProcess,
    LowerFence,
    DeleteTap,
    /// Give up the memory of a guest that has ended, which is of no use to anybody.
    DropMemory,
    RemoveFiles,
}

impl Act {
    /// What is being done, for progress and errors.
    pub(crate) const fn doing(self) -> &'static str {
        match self {
            Self::MakeTap => "making the tap of",
            Self::RaiseFence => "raising the fence around",
            Self::StartProcess => "starting the microVM of",
            Self::GreetAgent => "waiting for the guest of",
            Self::Hold => "holding the connections of",
            Self::Pause => "pausing the microVM of",
            Self::Checkpoint => "keeping the connections of",
            Self::Save => "saving the microVM of",
            Self::Copy => "taking a snapshot of",
            Self::Rewind => "taking back",
            Self::Store => "putting into the store",
            Self::DropLocal => "dropping the local files of",
            Self::Fetch => "fetching from the store",
            Self::OpenTap => "opening the tap of",
            Self::CheckFence => "checking the fence around",
            Self::Prepare => "loading the microVM of",
            Self::Rebuild => "rebuilding the connections of",
            Self::TellEnds => "ending the lost connections of",
            Self::Unpause => "resuming the microVM of",
            Self::Release => "releasing the connections of",
            Self::Refresh => "telling the time to the guest of",
            Self::BeginAnew => "beginning anew with",
            Self::Discard => "giving up the loaded microVM of",
            Self::StopProcess => "stopping the microVM of",
            Self::LowerFence => "lowering the fence around",
            Self::DeleteTap => "deleting the tap of",
            Self::DropMemory => "dropping the memory of",
            Self::RemoveFiles => "removing the files of",
        }
    }

    /// Where a test can end the daemon before it is done, and after.
    pub(crate) const fn points(self) -> (Point, Point) {
        match self {
            Self::MakeTap => (Point::TapToMake, Point::TapMade),
            Self::RaiseFence => (Point::FenceToRaise, Point::FenceRaised),
            Self::StartProcess => (Point::ProcessToStart, Point::ProcessStarted),
            Self::GreetAgent => (Point::AgentToGreet, Point::AgentGreeted),
            Self::Hold => (Point::GuestToHold, Point::GuestHeld),
            Self::Pause => (Point::GuestToPause, Point::GuestPaused),
            Self::Checkpoint => (Point::ConnectionsToKeep, Point::ConnectionsKept),
            Self::Save => (Point::GuestToSave, Point::GuestSaved),
            Self::Copy => (Point::GuestToCopy, Point::GuestCopied),
            Self::Rewind => (Point::GuestToRewind, Point::GuestRewound),
            Self::Store => (Point::GuestToStore, Point::GuestStored),
            Self::DropLocal => (Point::LocalToDrop, Point::LocalDropped),
            Self::Fetch => (Point::GuestToFetch, Point::GuestFetched),
            Self::OpenTap => (Point::TapToOpen, Point::TapOpened),
            Self::CheckFence => (Point::FenceToCheck, Point::FenceChecked),
            Self::Prepare => (Point::GuestToLoad, Point::GuestLoaded),
            Self::Rebuild => (Point::ConnectionsToRebuild, Point::ConnectionsRebuilt),
            Self::TellEnds => (Point::EndsToTell, Point::EndsTold),
            Self::Unpause => (Point::GuestToResume, Point::GuestResumed),
            Self::Release => (Point::GuestToRelease, Point::GuestReleased),
            Self::Refresh => (Point::GuestToRefresh, Point::GuestRefreshed),
            Self::BeginAnew => (Point::ToBeginAnew, Point::BegunAnew),
            Self::Discard | Self::StopProcess => (Point::ProcessToStop, Point::ProcessStopped),
            Self::LowerFence => (Point::FenceToLower, Point::FenceLowered),
            Self::DeleteTap => (Point::TapToDelete, Point::TapDeleted),
            Self::DropMemory => (Point::MemoryToDrop, Point::MemoryDropped),
            Self::RemoveFiles => (Point::FilesToRemove, Point::FilesRemoved),
        }
    }

    /// Whether it makes something of a sandbox that was not there; the others move what is there, or undo.
    pub(crate) const fn makes(self) -> bool {
        matches!(self, Self::MakeTap | Self::RaiseFence | Self::StartProcess | Self::GreetAgent)
    }

    /// Whether it is part of falling asleep, of which another daemon must know that it was begun.
    pub(crate) const fn puts_to_sleep(self) -> bool {
        matches!(self, Self::Hold | Self::Pause | Self::Checkpoint | Self::Save)
    }

    /// Whether it cannot be done without the guest's process, which was there before.
    pub(crate) const fn needs_its_process(self) -> bool {
        matches!(
            self,
            Self::Pause
                | Self::Save
                | Self::Rebuild
                | Self::TellEnds
                | Self::Unpause
                | Self::Refresh
        )
    }
}
