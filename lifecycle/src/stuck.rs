//! A guest that its hypervisor has stopped, because its disk found no room for what it wrote: when that is
//! looked for, and when it is let go on again.
//!
//! Pure: takes instants and what was found. Looked for where the processors of a guest stand still, which they
//! do then; nobody is told of it otherwise.

use std::time::Duration;

use tokio::time::Instant;

/// The pause between two looks at a guest whose processors stand still.
const LOOK: Duration = Duration::from_secs(5);
/// The pause after a guest was let go on, and the longest to which it grows.
const AGAIN: Duration = Duration::from_secs(1);
const LONGEST_AGAIN: Duration = Duration::from_secs(60);
/// With less free than this on its disk it would be stopped again at once.
pub(crate) const ROOM: u64 = 4 << 20;

/// What is to be asked of the hypervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ask {
    /// Whether the guest is stopped.
    Whether,
    /// The same; and to let it go on where there is room.
    WithRoom,
    /// And to let it go on whatever the disk says: it may be another limit than its room.
    Anyway,
}

/// What is known of one guest.
#[derive(Clone, Debug)]
pub(crate) struct Stuck {
    /// It was stopped when it was looked at last.
    is: bool,
    next: Instant,
    pause: Duration,
    /// It is let go on whatever the disk says, this time.
    anyway: bool,
    /// When it was let go on last whatever the disk said, or found stopped at first.
    tried: Instant,
}

impl Stuck {
    /// Of a guest that begins to run now.
    pub(crate) const fn new(now: Instant) -> Self {
        Self { is: false, next: now, pause: AGAIN, anyway: false, tried: now }
    }

    /// What is to be asked now, of a guest whose processors stand still or do not.
    pub(crate) fn due(&mut self, now: Instant, still: bool) -> Option<Ask> {
        if now < self.next || !(self.is || still) {
            return None;
        }
        if !self.is {
            self.next = now + LOOK;
            return Some(Ask::Whether);
        }
        self.next = now + self.pause;
        self.anyway = now >= self.tried + LONGEST_AGAIN;
        if !self.anyway {
            return Some(Ask::WithRoom);
        }
        self.tried = now;
        Some(Ask::Anyway)
    }

    /// It was looked at: whether it was stopped then, and was let go on. Gives what has changed: whether it is.
    pub(crate) fn found(&mut self, now: Instant, is: bool, let_go: bool) -> Option<bool> {
        let before = std::mem::replace(&mut self.is, is);
        match (before, is) {
            (false, true) => (self.tried, self.next) = (now, now + self.pause),
            // There was room, and it has stopped anew.
            (true, true) if let_go && !self.anyway => {
                self.pause = (self.pause * 2).min(LONGEST_AGAIN)
            }
            (true, false) => (self.pause, self.next) = (AGAIN, now + LOOK),
            _ => {}
        }
        (before != is).then_some(is)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Promise 76.
    #[tokio::test(start_paused = true)]
    async fn a_stopped_guest_is_let_go_on_as_soon_as_there_is_room_and_less_and_less_often() {
        let mut stuck = Stuck::new(Instant::now());
        assert_eq!(stuck.due(Instant::now(), false), None, "it works");
        assert_eq!(stuck.due(Instant::now(), true), Some(Ask::Whether));
        assert_eq!(stuck.due(Instant::now(), true), None, "not all the time");
        assert_eq!(stuck.found(Instant::now(), true, false), Some(true));
        // Without room it is only looked at, now and then, but for once a minute.
        let (mut looks, mut anyway) = (0, 0);
        for _ in 0..1200 {
            tokio::time::advance(Duration::from_millis(500)).await;
            match stuck.due(Instant::now(), true) {
                Some(Ask::WithRoom) => {
                    looks += 1;
                    assert_eq!(stuck.found(Instant::now(), true, false), None);
                }
                Some(Ask::Anyway) => {
                    anyway += 1;
                    assert_eq!(stuck.found(Instant::now(), true, true), None);
                }
                other => assert_eq!(other, None),
            }
        }
        assert!((5..=10).contains(&anyway) && looks > 500, "{looks} {anyway}");
        assert_eq!(stuck.found(Instant::now(), false, false), Some(false));
        assert_eq!(stuck.found(Instant::now(), false, false), None);
        // With room it is let go on at once; stopped each time, less and less often.
        tokio::time::advance(LOOK).await;
        assert_eq!(stuck.due(Instant::now(), true), Some(Ask::Whether));
        stuck.found(Instant::now(), true, false);
        let (mut began, mut pauses) = (Instant::now(), Vec::new());
        while pauses.len() < 8 {
            tokio::time::advance(Duration::from_millis(100)).await;
            if stuck.due(Instant::now(), true).is_some() {
                pauses.push(began.elapsed().as_secs());
                began = Instant::now();
                stuck.found(Instant::now(), true, true);
            }
        }
        assert_eq!(pauses, [1, 1, 2, 4, 8, 16, 32, 60]);
    }
}
