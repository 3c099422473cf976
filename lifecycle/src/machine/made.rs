//! What there is of a sandbox, as facts: each says what exists or may exist. Never what is wanted.

/// Which things of a sandbox exist, or may exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Made {
    pub(crate) tap: bool,
    pub(crate) fence: bool,
    pub(crate) process: bool,
    pub(crate) files: bool,
    /// Its memory, which is kept while it may run again.
    pub(crate) memory: bool,
    pub(crate) greeted: bool,
    /// Nothing is delivered to it.
    pub(crate) held: bool,
    pub(crate) paused: bool,
    /// Its connections are values.
    pub(crate) kept: bool,
    /// What is not memory was written down whole: there is no process, or one that has not run.
    pub(crate) saved: bool,
    /// The store has all of it, and the journal says so; nothing of it has run since.
    pub(crate) stored: bool,
    /// What it was is over, with its connections: it goes on from what the store has.
    pub(crate) over: bool,
    /// There may be files of it here beside what the store has.
    pub(crate) strewn: bool,
    /// Nothing of it is left but its disk, from which it boots: whatever process there is, is none yet.
    pub(crate) cold: bool,
    /// It is another incarnation already, of which nobody has heard.
    pub(crate) fresh: bool,
    /// We have its tap open, for the process that is to come.
    pub(crate) open: bool,
    /// Its fence was looked at since it fell asleep.
    pub(crate) checked: bool,
    /// It does not know how long it slept.
    pub(crate) stale: bool,
    /// Connections of it have ended that are no values, and it has not heard that.
    pub(crate) owed: bool,
    /// The process that is to run will hear it.
    pub(crate) told: bool,
}

impl Made {
    pub(crate) const NOTHING: Self = Self {
        tap: false,
        fence: false,
        process: false,
        files: false,
        memory: false,
        greeted: false,
        held: false,
        paused: false,
        kept: false,
        saved: false,
        stored: false,
        over: false,
        strewn: false,
        cold: false,
        fresh: false,
        open: false,
        checked: false,
        stale: false,
        owed: false,
        told: false,
    };
    pub(crate) const ANYTHING: Self =
        Self { tap: true, fence: true, process: true, files: true, memory: true, ..Self::NOTHING };
    pub(crate) const RUNNING: Self = Self { greeted: true, ..Self::ANYTHING };
}

/// What of a sandbox could not be undone and is left behind; more, the further down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Left {
    Nothing,
    /// Its tap or parts of its fence, which need nothing of the sandbox to be taken away later.
    Network,
    /// Perhaps its process: while it is, the sandbox is not gone.
    Process,
}
