//! The bounded queue by which audit records leave whoever decides, shared fairly: a tenant's record
//! is taken while fewer of that tenant wait than there is room left. So one tenant alone fills half
//! of it at most, and there is always room for one of whom few wait.
//!
//! Recording never blocks and never fails: what finds no room is counted as missing, by tenant.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use crate::audit::{AuditRecord, Kind, Outcome, rfc3339};
use crate::id::{SandboxName, TenantName};

/// Whose records; none for what is no tenant's.
pub type Owner = Option<TenantName>;

/// Where records are handed in. Clones share one queue.
#[derive(Clone, Debug)]
pub struct Trail(Arc<Queue>);

/// Where they are taken out again, in the order in which they came.
#[derive(Debug)]
pub struct Records(Arc<Queue>);

#[derive(Debug)]
struct Queue {
    capacity: usize,
    waiting: Mutex<Waiting>,
    arrived: Condvar,
}

#[derive(Debug, Default)]
struct Waiting {
    records: VecDeque<AuditRecord>,
    /// How many of them are whose.
    each: HashMap<Owner, usize>,
    missing: BTreeMap<Owner, Gap>,
    /// Whether the reader sleeps until one arrives.
    asleep: bool,
}

impl Trail {
    /// A trail that holds at most `capacity` unread records, and its reading end.
    #[must_use]
    pub fn bounded(capacity: usize) -> (Self, Records) {
        let waiting = Mutex::default();
        let queue = Arc::new(Queue { capacity, waiting, arrived: Condvar::new() });
        (Self(Arc::clone(&queue)), Records(queue))
    }

    /// Hands in one record. Never waits for the reader.
    pub fn record(&self, record: AuditRecord) {
        let mut waiting = self.0.waiting();
        let room = self.0.capacity - waiting.records.len();
        let own = waiting.each.get(&record.tenant).copied().unwrap_or_default();
        if own < room {
            waiting.each.insert(record.tenant.clone(), own + 1);
            waiting.records.push_back(record);
            if std::mem::take(&mut waiting.asleep) {
                self.0.arrived.notify_one();
            }
        } else {
            let gap = Gap::of(&record);
            add_gap(&mut waiting.missing, record.tenant, gap);
        }
    }
}

impl Records {
    /// The next record, if there is one now.
    #[must_use]
    pub fn take(&self) -> Option<AuditRecord> {
        self.0.waiting().take()
    }

    /// The next record, waited for so long.
    #[must_use]
    pub fn take_within(&self, limit: Duration) -> Option<AuditRecord> {
        let mut waiting = self.0.waiting();
        waiting.asleep = waiting.records.is_empty();
        let arrived = self.0.arrived.wait_timeout_while(waiting, limit, |waiting| waiting.asleep);
        let (mut waiting, _) = arrived.unwrap_or_else(PoisonError::into_inner);
        waiting.asleep = false;
        waiting.take()
    }

    /// Takes those that are there now.
    pub fn drain(&self) -> impl Iterator<Item = AuditRecord> {
        std::iter::from_fn(|| self.take())
    }

    /// What found no room since this was last asked, by whose it was.
    #[must_use]
    pub fn take_missing(&self) -> BTreeMap<Owner, Gap> {
        std::mem::take(&mut self.0.waiting().missing)
    }
}

impl Queue {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiting {
    fn take(&mut self) -> Option<AuditRecord> {
        let record = self.records.pop_front()?;
        if let Some(own) = self.each.get_mut(&record.tenant) {
            *own -= 1;
            if *own == 0 {
                self.each.remove(&record.tenant);
            }
        }
        Some(record)
    }
}

/// Records of one tenant that are missing in the audit. Never more than these numbers, however many.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gap {
    #[serde(with = "rfc3339")]
    first: SystemTime,
    #[serde(with = "rfc3339")]
    last: SystemTime,
    /// The sandbox that all of them are about, if it is one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    sandbox: Option<SandboxName>,
    /// How many decisions they stood for, by outcome.
    counts: BTreeMap<Outcome, u64>,
}

impl Gap {
    /// One record is missing.
    #[must_use]
    pub fn of(record: &AuditRecord) -> Self {
        Self {
            first: record.time,
            last: record.time,
            sandbox: record.sandbox.clone(),
            counts: BTreeMap::from([(record.outcome, record.count.unwrap_or(1))]),
        }
    }

    /// Those of another one, too.
    pub fn add(&mut self, other: Self) {
        self.first = self.first.min(other.first);
        self.last = self.last.max(other.last);
        self.sandbox = self.sandbox.take().filter(|name| other.sandbox.as_ref() == Some(name));
        for (outcome, count) in other.counts {
            let sum = self.counts.entry(outcome).or_default();
            *sum = sum.saturating_add(count);
        }
    }

    /// How many decisions there is no record of.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.values().fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// The record that stands for them: its time is that of the last one, `micros` how long before
    /// that the first one was.
    #[must_use]
    pub fn record(&self, owner: &Owner, why: &str) -> AuditRecord {
        let each = self.counts.iter().map(|(outcome, count)| format!("{count} {outcome}"));
        let each = each.collect::<Vec<_>>().join(", ");
        AuditRecord {
            tenant: owner.clone(),
            sandbox: self.sandbox.clone(),
            count: Some(self.count()),
            detail: Some(format!("records lost: {why}: {each}")),
            ..AuditRecord::new(self.last, Kind::Gap, Outcome::Fail)
        }
        .took(self.last.duration_since(self.first).unwrap_or_default())
    }
}

/// Adds a gap to those of its owner.
pub fn add_gap<K: Ord>(gaps: &mut BTreeMap<K, Gap>, whose: K, gap: Gap) {
    match gaps.get_mut(&whose) {
        Some(known) => known.add(gap),
        None => {
            gaps.insert(whose, gap);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(name: &str) -> Owner {
        name.parse().ok()
    }

    fn of(tenant: &str, second: u64) -> AuditRecord {
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(second);
        AuditRecord {
            tenant: owner(tenant),
            sandbox: "one".parse().ok(),
            ..AuditRecord::new(time, Kind::Dns, Outcome::Deny)
        }
    }

    #[test]
    fn a_full_trail_counts_what_it_lost_and_never_blocks() {
        let (trail, records) = Trail::bounded(1);
        (0..3).for_each(|second| trail.record(of("acme", second)));
        let missing = records.take_missing();
        assert_eq!(
            missing.into_iter().map(|(owner, gap)| (owner, gap.count())).collect::<Vec<_>>(),
            [(owner("acme"), 2)]
        );
        assert!(records.take_missing().is_empty());
        assert_eq!(records.drain().count(), 1);
    }

    /// Promise 50. Attack K10.
    #[test]
    fn who_records_much_finds_no_room_before_who_records_little() {
        const CAPACITY: usize = 1000;
        let (trail, records) = Trail::bounded(CAPACITY);
        for second in 0..10_000 {
            trail.record(of("loud", second));
            trail.record(of("louder", second));
        }
        for second in 0..100 {
            trail.record(of("quiet", second));
            trail.record(of("", second));
        }
        let missing = records.take_missing();
        assert!(missing.keys().eq([&owner("loud"), &owner("louder")]), "{missing:?}");
        let taken: Vec<AuditRecord> = records.drain().collect();
        let taken = |whose: &str| taken.iter().filter(|one| one.tenant == owner(whose)).count();
        assert_eq!((taken("quiet"), taken("")), (100, 100));
        assert_eq!((taken("loud"), taken("louder")), (CAPACITY / 3 + 1, CAPACITY / 3));
        for (whose, gap) in missing {
            let whose = whose.expect("a tenant");
            assert_eq!(gap.count() + taken(whose.as_str()) as u64, 10_000, "{whose}");
        }
        // What was read is room again.
        (0..CAPACITY as u64).for_each(|second| trail.record(of("loud", second)));
        assert_eq!(records.drain().count(), CAPACITY / 2);
        assert!(records.0.waiting().each.is_empty());
    }

    #[test]
    fn a_reader_wakes_when_a_record_arrives() {
        let (trail, records) = Trail::bounded(4);
        assert_eq!(records.take_within(Duration::from_millis(1)), None);
        let reader = std::thread::spawn(move || records.take_within(Duration::from_secs(60)));
        std::thread::sleep(Duration::from_millis(50));
        trail.record(of("acme", 7));
        assert_eq!(reader.join().expect("no panic"), Some(of("acme", 7)));
    }

    #[test]
    fn a_gap_says_how_many_of_what_and_whose_and_over_what_time() {
        let mut gap = Gap::of(&of("acme", 40));
        for (outcome, count, second) in [
            (Outcome::Deny, Some(7), 30),
            (Outcome::Allow, None, 50),
            (Outcome::Observe, Some(4), 45),
        ] {
            gap.add(Gap::of(&AuditRecord { outcome, count, ..of("acme", second) }));
        }
        let told = gap.record(&owner("acme"), "the disk was full");
        assert_eq!((told.kind, told.outcome, told.count), (Kind::Gap, Outcome::Fail, Some(13)));
        assert_eq!((told.tenant, told.time), (owner("acme"), of("acme", 50).time));
        assert_eq!(told.micros, Some(20_000_000));
        assert_eq!(told.sandbox, "one".parse().ok());
        let detail = told.detail.expect("why");
        assert_eq!(detail, "records lost: the disk was full: 1 allow, 4 observe, 8 deny");
        let kept = serde_json::to_string(&gap).expect("JSON");
        assert_eq!(serde_json::from_str::<Gap>(&kept).expect("a gap"), gap);
        gap.add(Gap::of(&AuditRecord { sandbox: "two".parse().ok(), ..of("acme", 41) }));
        gap.add(Gap::of(&of("acme", 42)));
        assert_eq!(gap.record(&None, "").sandbox, None, "not of one alone");
    }
}
