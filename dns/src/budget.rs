//! What one sandbox may cost: questions a second, and audit records of refusals a second. What is over
//! either is counted, and the count is recorded. The rate is decided on time handed in, without a clock.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use policy::audit::{AuditRecord, Kind, Outcome};
use policy::{Code, Subject, Trail};

/// Questions a second that a sandbox may ask for long.
pub(crate) const RATE: u32 = 200;
/// Questions that it may ask at once.
pub(crate) const BURST: u32 = 400;
/// Audit records a second of what was not answered; the rest is summed up. What was is told each by its
/// name, so that none hides behind others: their rate bounds those.
pub(crate) const RECORDS: u32 = 100;

/// A token bucket, kept as the time at which it will be full again.
#[derive(Debug)]
pub(crate) struct Bucket {
    full_at: Instant,
}

impl Bucket {
    /// A full bucket.
    pub(crate) fn new(now: Instant) -> Self {
        Self { full_at: now }
    }

    /// Takes what costs `price` of time, if the bucket, which is full after `most`, holds it.
    pub(crate) fn take(&mut self, now: Instant, price: Duration, most: Duration) -> bool {
        let had = self.has(now, price, most);
        if had {
            self.full_at = self.full_at.max(now) + price;
        }
        had
    }

    /// Whether it could be taken.
    pub(crate) fn has(&self, now: Instant, price: Duration, most: Duration) -> bool {
        self.full_at.saturating_duration_since(now) + price <= most
    }

    /// Whether nothing is missing.
    pub(crate) fn is_full(&self, now: Instant) -> bool {
        self.full_at <= now
    }
}

/// Takes one question of what a sandbox may ask.
pub(crate) fn question(bucket: &mut Bucket, now: Instant) -> bool {
    let token = Duration::from_secs(1) / RATE;
    bucket.take(now, token, token * BURST)
}

/// Hands records to the trail, of refusals at most [`RECORDS`] in a second, and the sums of the others.
#[derive(Debug)]
pub(crate) struct Ledger {
    subject: Arc<Subject>,
    trail: Trail,
    second: Instant,
    written: u32,
    /// At most one entry for each outcome and code.
    sums: HashMap<(Outcome, Option<Code>), u64>,
}

impl Ledger {
    pub(crate) fn new(subject: Arc<Subject>, trail: Trail, now: Instant) -> Self {
        Self { subject, trail, second: now, written: 0, sums: HashMap::new() }
    }

    /// Records a decision, or counts it when this second has had its records.
    pub(crate) fn write(&mut self, now: Instant, record: AuditRecord) {
        self.turn(now);
        let passed = matches!(record.outcome, Outcome::Allow | Outcome::Observe);
        if !passed && self.written >= RECORDS {
            return self.add(record.outcome, record.code, 1);
        }
        self.written += u32::from(!passed);
        self.trail.record(record.about(&self.subject));
    }

    /// Counts questions that were dropped unread.
    pub(crate) fn dropped(&mut self, now: Instant, count: u64) {
        self.turn(now);
        self.add(Outcome::Deny, Some(Code::Limit), count);
    }

    fn add(&mut self, outcome: Outcome, code: Option<Code>, count: u64) {
        *self.sums.entry((outcome, code)).or_default() += count;
    }

    fn turn(&mut self, now: Instant) {
        if now.saturating_duration_since(self.second) >= Duration::from_secs(1) {
            self.second = now;
            self.written = 0;
            self.sum_up();
        }
    }

    fn sum_up(&mut self) {
        for ((outcome, code), count) in self.sums.drain() {
            let mut record = AuditRecord::new(fault::wall_clock(), Kind::Dns, outcome);
            record.protocol = Some("dns".into());
            record.code = code;
            record.count = Some(count);
            self.trail.record(record.about(&self.subject));
        }
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        self.sum_up();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_served_then_the_rate() {
        let start = Instant::now();
        let mut bucket = Bucket::new(start);
        let taken =
            |bucket: &mut Bucket, now| (0..10_000).filter(|_| question(bucket, now)).count();
        assert_eq!(taken(&mut bucket, start), BURST as usize);
        let later = start + Duration::from_millis(500);
        assert_eq!(taken(&mut bucket, later), RATE as usize / 2);
        assert_eq!(taken(&mut bucket, later + Duration::from_secs(3600)), BURST as usize);
    }

    #[test]
    fn a_flood_of_refusals_is_a_bounded_number_of_records_and_hides_nothing_that_passed() {
        let subject = Subject {
            sandbox: "s".parse().expect("name"),
            tenant: "t".parse().expect("name"),
            incarnation: 1,
            slot: policy::Slot::new(1).expect("slot"),
        };
        let (trail, records) = Trail::bounded(10_000);
        let start = Instant::now();
        let mut ledger = Ledger::new(Arc::new(subject), trail, start);
        for _ in 0..500 {
            for outcome in [Outcome::Deny, Outcome::Allow] {
                ledger.write(start, AuditRecord::new(fault::wall_clock(), Kind::Dns, outcome));
            }
            ledger.dropped(start, 1);
        }
        drop(ledger);
        let records: Vec<_> = records.drain().collect();
        assert_eq!(records.len(), RECORDS as usize + 500 + 2, "a sum for each code");
        let sum = |outcome| {
            let of = records.iter().filter(|record| record.outcome == outcome);
            of.map(|record| record.count.unwrap_or(1)).sum::<u64>()
        };
        assert_eq!((sum(Outcome::Allow), sum(Outcome::Deny)), (500, 1000));
        assert!(
            records.iter().all(|record| record.outcome == Outcome::Deny || record.count.is_none())
        );
    }
}
