//! What follows from an act that was done, and from one that failed. Pure, like the machine itself; never
//! says what comes next.

use crate::machine::made::Left;
use crate::machine::{Act, Goal, Machine, TAKEOVER_TRIES, TRIES};

impl Machine {
    /// The act was done.
    pub(crate) const fn done(&mut self, act: Act) {
        self.tries = 0;
        let made = &mut self.made;
        match act {
            Act::MakeTap => made.tap = true,
            Act::RaiseFence => made.fence = true,
            Act::StartProcess => {
                made.process = true;
                made.files = true;
                made.memory = true;
                made.open = false;
            }
            Act::GreetAgent => {
                made.greeted = true;
                made.cold = false;
                made.fresh = false;
            }
            Act::BeginAnew => made.fresh = true,
            Act::Hold => made.held = true,
            Act::Pause => made.paused = true,
            Act::Checkpoint => {
                made.kept = true;
                made.held = true;
                // What was to be told with them was told to nobody.
                made.owed |= made.saved;
            }
            Act::Save => {
                made.process = false;
                made.paused = false;
                made.saved = true;
                made.open = false;
                made.checked = false;
                self.woken = true;
            }
            Act::Store => {
                made.saved = false;
                made.stored = true;
                made.strewn = true;
            }
            Act::Copy => self.copies = false,
            Act::Rewind => {
                (made.saved, made.cold, made.fresh) = (false, false, false);
                (made.stored, made.strewn, made.over) = (true, true, true);
                // What may be there of its fence goes, and its connections with it.
                (made.fence, made.held, made.stale) = (true, false, false);
                (made.kept, made.checked) = (false, false);
                // Its guest believes in those that it had then.
                (made.owed, made.told) = (true, false);
                self.woken = true;
                self.turn(Goal::Run);
            }
            Act::DropLocal => made.strewn = false,
            Act::Fetch => {
                made.saved = true;
                made.stored = false;
                made.strewn = false;
            }
            Act::OpenTap => made.open = true,
            Act::CheckFence => made.checked = true,
            Act::Prepare => {
                made.process = true;
                made.paused = true;
                made.open = false;
            }
            Act::Rebuild => made.kept = false,
            Act::Unpause => {
                made.saved = false;
                made.paused = false;
                made.stale |= self.woken;
                (made.owed, made.told) = (false, false);
            }
            Act::TellEnds => made.told = true,
            Act::Refresh => made.stale = false,
            Act::Release => made.held = false,
            Act::Discard => {
                made.process = false;
                made.paused = false;
                made.open = false;
                made.told = false;
                // Some may have been put back, whatever came of it.
                made.kept = false;
                self.left = Left::Nothing;
            }
            Act::StopProcess => {
                made.process = false;
                made.greeted = false;
                if matches!(self.left, Left::Process) {
                    self.left = Left::Network;
                }
            }
            Act::LowerFence => (made.fence, made.over) = (false, false),
            Act::DeleteTap => made.tap = false,
            Act::DropMemory => made.memory = false,
            Act::RemoveFiles => made.files = false,
        }
        if matches!(self.goal, Goal::Run) && self.next().is_none() {
            self.woken = false;
        }
    }

    /// The act failed. Making turns round and undoes; undoing is tried again, then left behind. The
    /// fence of a sandbox that ran before is tried for longer: it is shut in meanwhile. Falling asleep
    /// turns round, too, and so does waking as long as nothing has run.
    pub(crate) fn failed(&mut self, act: Act) {
        match act {
            Act::RaiseFence if self.is_asleep() => self.again_or(Self::back_to_sleep),
            Act::LowerFence | Act::BeginAnew if self.begins_anew() => {
                self.again_or(Self::back_to_sleep);
            }
            Act::StartProcess | Act::GreetAgent if self.made.cold => {
                self.made.process = true;
                self.back_to_sleep();
            }
            Act::RaiseFence if self.made.greeted && self.tries < TAKEOVER_TRIES => self.tries += 1,
            Act::MakeTap | Act::RaiseFence | Act::StartProcess | Act::GreetAgent => {
                // It may have got half way, so it is undone too.
                self.goal = if self.made.greeted { Goal::Fail } else { Goal::Remove };
                match act {
                    Act::MakeTap => self.made.tap = true,
                    Act::RaiseFence => self.made.fence = true,
                    _ => {
                        self.made.process = true;
                        self.made.files = true;
                        self.made.memory = true;
                    }
                }
                self.tries = 0;
            }
            Act::Checkpoint if self.is_asleep() => self.again_or(|it| it.done(act)),
            Act::Hold | Act::Pause | Act::Checkpoint | Act::Save => {
                match act {
                    Act::Hold => self.made.held = true,
                    Act::Pause => self.made.paused = true,
                    Act::Checkpoint => self.made.kept = true,
                    _ => {}
                }
                self.turn(Goal::Run);
            }
            Act::OpenTap | Act::CheckFence => self.again_or(Self::back_to_sleep),
            // It sleeps as it did.
            Act::Copy => self.copies = false,
            Act::Rewind => self.rewinds = false,
            // It is here as it was.
            Act::Store => self.turn(Goal::Sleep),
            Act::DropLocal => self.again_or(|it| it.done(act)),
            Act::Fetch => {
                self.made.strewn = true;
                self.back_to_sleep();
            }
            Act::Prepare => {
                // There may be a process, which ends first.
                self.made.process = true;
                self.back_to_sleep();
            }
            Act::Unpause if self.is_asleep() => self.again_or(Self::back_to_sleep),
            Act::Unpause => self.again_or(Self::lost),
            Act::BeginAnew => self.back_to_sleep(),
            // Its guest runs, and is worth more than what it misses.
            Act::Rebuild | Act::TellEnds | Act::Release => self.again_or(|it| it.done(act)),
            Act::Refresh => self.done(act),
            Act::Discard
            | Act::StopProcess
            | Act::LowerFence
            | Act::DeleteTap
            | Act::DropMemory
            | Act::RemoveFiles => {
                if self.forced && matches!(act, Act::StopProcess) {
                    self.tries = TRIES;
                }
                self.again_or(|it| {
                    it.done(act);
                    it.left = it.left.max(match act {
                        Act::Discard | Act::StopProcess => Left::Process,
                        Act::LowerFence | Act::DeleteTap => Left::Network,
                        _ => Left::Nothing,
                    });
                    if it.begins_anew() {
                        it.back_to_sleep();
                    }
                });
            }
        }
    }

    /// The act is tried again, a few times.
    fn again_or(&mut self, give_up: impl FnOnce(&mut Self)) {
        self.tries += 1;
        if self.tries >= TRIES {
            give_up(self);
        }
    }

    /// The act failed, and would again.
    pub(crate) fn failed_for_good(&mut self, act: Act) {
        self.tries = u8::MAX - 1;
        self.failed(act);
    }
}
