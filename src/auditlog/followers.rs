//! Who follows the audit: each with a queue of its own, into which only what it asked for is put. A tenant
//! that is loud, or slow, costs nobody but its own followers a line.
//!
//! Never holds the writer up: a queue that is full loses its oldest lines, and its reader is told.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use policy::AuditRecord;
use tokio::sync::Notify;

use crate::auditlog::filter::Filter;

/// Lines a follower may be behind.
pub(crate) const BEHIND: usize = 4096;
/// The same in bytes of JSON.
const BEHIND_BYTES: usize = 1 << 20;

/// One record with its JSON.
#[derive(Clone, Debug)]
pub(crate) struct Line {
    /// The group with which it was written; none if it could not be.
    pub(crate) group: Option<u64>,
    pub(crate) record: AuditRecord,
    pub(crate) json: String,
}

/// All followers there are.
#[derive(Debug, Default)]
pub(crate) struct Followers(Mutex<All>);

#[derive(Debug, Default)]
struct All {
    queues: Vec<Weak<Queue>>,
    /// Whether nothing will be written any more.
    closed: bool,
}

/// One follower's end. Whoever drops it follows no more.
#[derive(Debug)]
pub(crate) struct Following(Arc<Queue>);

#[derive(Debug)]
struct Queue {
    filter: Filter,
    waiting: Mutex<Waiting>,
    arrived: Notify,
}

#[derive(Debug, Default)]
struct Waiting {
    lines: VecDeque<Arc<Line>>,
    bytes: usize,
    /// Whether lines before the first one are missing.
    missed: bool,
    closed: bool,
}

/// What comes next for a follower.
#[derive(Debug)]
pub(crate) enum Next {
    Line(Arc<Line>),
    /// It was too slow: lines are missing here.
    Missed,
    /// Nothing comes any more.
    End,
}

impl Followers {
    /// From now on, what passes this is queued.
    pub(crate) fn follow(&self, filter: Filter) -> Following {
        let mut all = locked(&self.0);
        let waiting = Mutex::new(Waiting { closed: all.closed, ..Waiting::default() });
        let queue = Arc::new(Queue { filter, waiting, arrived: Notify::new() });
        all.queues.retain(|queue| queue.strong_count() > 0);
        all.queues.push(Arc::downgrade(&queue));
        Following(queue)
    }

    /// Queues a line for all who asked for it.
    pub(crate) fn show(&self, line: Line) {
        let line = Arc::new(line);
        let mut all = locked(&self.0);
        all.queues.retain(|queue| {
            let Some(queue) = queue.upgrade() else { return false };
            if queue.filter.passes(&line.record) {
                queue.push(Arc::clone(&line));
            }
            true
        });
    }

    /// Nothing comes any more.
    pub(crate) fn close(&self) {
        let mut all = locked(&self.0);
        all.closed = true;
        for queue in all.queues.drain(..).filter_map(|queue| queue.upgrade()) {
            locked(&queue.waiting).closed = true;
            queue.arrived.notify_one();
        }
    }
}

impl Queue {
    fn push(&self, line: Arc<Line>) {
        let mut waiting = locked(&self.waiting);
        waiting.bytes += line.json.len();
        waiting.lines.push_back(line);
        while waiting.lines.len() > BEHIND || waiting.bytes > BEHIND_BYTES {
            let Some(oldest) = waiting.lines.pop_front() else { break };
            waiting.bytes -= oldest.json.len();
            waiting.missed = true;
        }
        drop(waiting);
        self.arrived.notify_one();
    }

    fn take(&self) -> Option<Next> {
        let mut waiting = locked(&self.waiting);
        if std::mem::take(&mut waiting.missed) {
            return Some(Next::Missed);
        }
        match waiting.lines.pop_front() {
            Some(line) => {
                waiting.bytes -= line.json.len();
                Some(Next::Line(line))
            }
            None => waiting.closed.then_some(Next::End),
        }
    }
}

impl Following {
    /// What comes next, waited for. Dropping the future loses nothing.
    pub(crate) async fn next(&mut self) -> Next {
        loop {
            if let Some(next) = self.0.take() {
                return next;
            }
            self.0.arrived.notified().await;
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use policy::audit::{Kind, Outcome};

    use super::*;

    fn line(tenant: &str, json: &str) -> Line {
        let mut record = AuditRecord::new(SystemTime::UNIX_EPOCH, Kind::Dns, Outcome::Deny);
        record.tenant = tenant.parse().ok();
        Line { group: None, record, json: json.to_owned() }
    }

    fn of(tenant: &str) -> Filter {
        Filter { tenant: tenant.parse().ok(), ..Filter::default() }
    }

    /// The lines that wait, and whether the follower is told that some are missing.
    async fn rest(following: &mut Following) -> (Vec<String>, bool) {
        let (mut lines, mut missed) = (Vec::new(), false);
        loop {
            match following.next().await {
                Next::Line(line) => lines.push(line.json.clone()),
                Next::Missed => {
                    assert!(lines.is_empty() && !missed, "once, before those that are left");
                    missed = true;
                }
                Next::End => return (lines, missed),
            }
        }
    }

    /// Promise 50.
    #[tokio::test]
    async fn a_loud_tenant_costs_only_its_own_followers_lines() {
        let followers = Followers::default();
        let mut quiet = followers.follow(of("quiet"));
        let mut loud = followers.follow(of("loud"));
        followers.show(line("quiet", "first"));
        (0..=BEHIND).for_each(|n| followers.show(line("loud", &n.to_string())));
        followers.show(line("quiet", "last"));
        followers.close();
        let (lines, missed) = rest(&mut quiet).await;
        assert_eq!((lines, missed), (vec!["first".to_owned(), "last".to_owned()], false));
        let (lines, missed) = rest(&mut loud).await;
        assert!(missed);
        let newest: Vec<String> = (1..=BEHIND).map(|n| n.to_string()).collect();
        assert_eq!(lines, newest, "the newest stay");
    }

    #[tokio::test]
    async fn a_follower_holds_no_more_than_so_many_bytes_and_who_left_holds_nothing() {
        let followers = Followers::default();
        let mut slow = followers.follow(Filter::default());
        let long = "x".repeat(BEHIND_BYTES / 10);
        (0..100).for_each(|_| followers.show(line("loud", &long)));
        let gone = followers.follow(Filter::default());
        drop(gone);
        followers.show(line("loud", "short"));
        assert_eq!(locked(&followers.0).queues.len(), 1);
        followers.close();
        let (lines, missed) = rest(&mut slow).await;
        assert!(missed && lines.iter().map(String::len).sum::<usize>() <= BEHIND_BYTES);
        assert_eq!(lines.last().map(String::as_str), Some("short"));
        let mut late = followers.follow(Filter::default());
        assert!(matches!(late.next().await, Next::End));
    }
}
