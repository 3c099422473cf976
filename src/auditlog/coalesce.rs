//! Equal refusals within a second become one record with a count, and so do those that one sandbox
//! provokes beyond a number of different ones: no guest fills the audit with what it makes up. Pure:
//! time is an argument.
//!
//! The first is written at once, so that a follower sees it; those after it are held until the
//! window ends. Nothing of which a packet left is ever held: each has its own egress port.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant, SystemTime};

use policy::audit::Outcome;
use policy::{AuditRecord, SandboxName};

/// Different refusals of one sandbox in a window that are told one by one.
const EACH: usize = 50;

/// The refusals of the current window, by what makes them equal.
#[derive(Debug)]
pub(crate) struct Coalescer {
    window: Duration,
    capacity: usize,
    held: HashMap<String, Held>,
    /// How many of them are of which sandbox.
    of: HashMap<SandboxName, usize>,
    order: VecDeque<(Instant, String)>,
}

#[derive(Debug)]
struct Held {
    latest: AuditRecord,
    repeats: u64,
}

impl Coalescer {
    /// Holds at most `capacity` different refusals, each for `window`.
    #[must_use]
    pub(crate) fn new(window: Duration, capacity: usize) -> Self {
        Self { window, capacity, held: HashMap::new(), of: HashMap::new(), order: VecDeque::new() }
    }

    /// Takes a record; hands back what is to be written now.
    pub(crate) fn push(
        &mut self,
        mut record: AuditRecord,
        now: Instant,
        out: &mut Vec<AuditRecord>,
    ) {
        let Some(mut alike) = key(&record) else { return out.push(record) };
        let told = |name| self.of.get(name).is_some_and(|told| *told >= EACH);
        if !self.held.contains_key(&alike) && record.sandbox.as_ref().is_some_and(told) {
            record = outline(record);
            alike = key(&record).unwrap_or_default();
        }
        let key = alike;
        if let Some(held) = self.held.get_mut(&key) {
            held.repeats += record.count.unwrap_or(1);
            held.latest = record;
            return;
        }
        if self.held.len() >= self.capacity {
            self.end_oldest(out);
        }
        if let Some(sandbox) = &record.sandbox {
            *self.of.entry(sandbox.clone()).or_default() += 1;
        }
        self.order.push_back((now + self.window, key.clone()));
        self.held.insert(key, Held { latest: record.clone(), repeats: 0 });
        out.push(record);
    }

    /// Hands back what windows that ended by `now` had held.
    pub(crate) fn end(&mut self, now: Instant, out: &mut Vec<AuditRecord>) {
        while self.order.front().is_some_and(|(end, _)| *end <= now) {
            self.end_oldest(out);
        }
    }

    /// Hands back everything held.
    pub(crate) fn end_all(&mut self, out: &mut Vec<AuditRecord>) {
        while !self.order.is_empty() {
            self.end_oldest(out);
        }
    }

    fn end_oldest(&mut self, out: &mut Vec<AuditRecord>) {
        let ended = self.order.pop_front().and_then(|(_, key)| self.held.remove(&key));
        let sandbox = ended.as_ref().and_then(|held| held.latest.sandbox.clone());
        if let Some(sandbox) = sandbox
            && let Some(told) = self.of.get_mut(&sandbox)
        {
            *told -= 1;
            if *told == 0 {
                self.of.remove(&sandbox);
            }
        }
        if let Some(Held { mut latest, repeats }) = ended
            && repeats > 0
        {
            latest.count = (repeats > 1).then_some(repeats);
            out.push(latest);
        }
    }
}

/// What is kept of a refusal that is not told by itself: whose, of what kind, and why.
fn outline(record: AuditRecord) -> AuditRecord {
    AuditRecord {
        sandbox: record.sandbox,
        tenant: record.tenant,
        incarnation: record.incarnation,
        code: record.code,
        count: record.count,
        detail: Some("more different refusals than are told one by one".to_owned()),
        ..AuditRecord::new(record.time, record.kind, record.outcome)
    }
}

/// What two equal refusals share; none for a record that must stand alone.
fn key(record: &AuditRecord) -> Option<String> {
    if record.outcome != Outcome::Deny
        || record.kind == policy::audit::Kind::Control
        || record.egress.is_some()
    {
        return None;
    }
    let alike = AuditRecord {
        time: SystemTime::UNIX_EPOCH,
        flow: None,
        micros: None,
        count: None,
        bytes_in: None,
        bytes_out: None,
        ..record.clone()
    };
    serde_json::to_string(&alike).ok()
}

#[cfg(test)]
mod tests {
    use policy::Code;
    use policy::audit::Kind;
    use proptest::prelude::*;

    use super::*;

    fn refusal(name: u8, count: Option<u64>) -> AuditRecord {
        let mut record = AuditRecord::new(SystemTime::now(), Kind::Dns, Outcome::Deny);
        record.name = Some(format!("n{name}.example"));
        record.code = Some(Code::NoRule);
        record.count = count;
        record
    }

    fn total(records: &[AuditRecord]) -> u64 {
        records.iter().map(|record| record.count.unwrap_or(1)).sum()
    }

    #[test]
    fn equal_refusals_within_a_window_become_two_records() {
        let start = Instant::now();
        let mut coalescer = Coalescer::new(Duration::from_secs(1), 8);
        let mut out = Vec::new();
        for _ in 0..100 {
            coalescer.push(refusal(1, None), start, &mut out);
        }
        assert_eq!(out.len(), 1, "the first at once");
        coalescer.end(start + Duration::from_millis(999), &mut out);
        assert_eq!(out.len(), 1);
        coalescer.end(start + Duration::from_secs(1), &mut out);
        assert_eq!(out.iter().map(|r| r.count).collect::<Vec<_>>(), [None, Some(99)]);
        coalescer.push(refusal(1, None), start + Duration::from_secs(2), &mut out);
        assert_eq!(out.len(), 3, "a new window");
    }

    #[test]
    fn what_was_let_through_is_never_held() {
        let mut coalescer = Coalescer::new(Duration::from_secs(1), 8);
        let mut out = Vec::new();
        for outcome in [Outcome::Allow, Outcome::Closed, Outcome::Fail] {
            for _ in 0..2 {
                let record = AuditRecord::new(SystemTime::now(), Kind::Connection, outcome);
                coalescer.push(record, Instant::now(), &mut out);
            }
        }
        assert_eq!(out.len(), 6);
    }

    #[test]
    fn one_sandbox_cannot_fill_the_audit_with_different_refusals() {
        let now = Instant::now();
        let mut coalescer = Coalescer::new(Duration::from_secs(1), 4096);
        let mut out = Vec::new();
        let of = |sandbox: &str, path: u32| AuditRecord {
            sandbox: Some(sandbox.parse().expect("a name")),
            path: Some(format!("/{path}")),
            ..refusal(1, None)
        };
        for path in 0..5000 {
            coalescer.push(of("loud", path), now, &mut out);
        }
        coalescer.push(of("quiet", 1), now, &mut out);
        let quiet = out.last().expect("told");
        assert_eq!(quiet.path.as_deref(), Some("/1"));
        coalescer.end_all(&mut out);
        assert!(out.len() <= EACH + 3, "{}", out.len());
        assert_eq!(total(&out), 5001);
        assert!(coalescer.of.is_empty());
        let later = now + Duration::from_secs(2);
        coalescer.push(of("loud", 9), later, &mut out);
        assert_eq!(out.last().and_then(|record| record.path.as_deref()), Some("/9"));
    }

    /// Promise 23. A far side knows the port.
    #[test]
    fn a_refusal_after_a_packet_had_left_is_told_by_itself() {
        let now = Instant::now();
        let mut coalescer = Coalescer::new(Duration::from_secs(1), 4096);
        let mut out = Vec::new();
        let of = |path: usize, egress: Option<&str>| AuditRecord {
            sandbox: Some("loud".parse().expect("a name")),
            path: Some(format!("/{path}")),
            egress: egress.map(|text| text.parse().expect("an address")),
            ..refusal(1, None)
        };
        for path in 0..=EACH {
            coalescer.push(of(path, None), now, &mut out);
        }
        let joined = out.len();
        coalescer.push(of(EACH, None), now, &mut out);
        assert_eq!(out.len(), joined, "control: of others one more is only counted");
        for port in ["192.0.2.1:40000", "192.0.2.1:40000", "192.0.2.1:40001"] {
            coalescer.push(of(EACH, Some(port)), now, &mut out);
        }
        let told = out.iter().filter_map(|record| record.egress).count();
        assert_eq!(told, 3);
    }

    proptest! {
        #[test]
        fn no_refusal_is_lost_and_no_more_than_the_cap_is_held(
            names in prop::collection::vec((0u8..20, prop::option::of(1u64..5), 0u64..400), 0..200)
        ) {
            let mut now = Instant::now();
            let mut coalescer = Coalescer::new(Duration::from_secs(1), 4);
            let mut out = Vec::new();
            let mut given = 0;
            for (name, count, gap) in names {
                now += Duration::from_millis(gap);
                given += count.unwrap_or(1);
                coalescer.push(refusal(name, count), now, &mut out);
                coalescer.end(now, &mut out);
                prop_assert!(coalescer.held.len() <= 4);
                prop_assert_eq!(coalescer.held.len(), coalescer.order.len());
            }
            coalescer.end_all(&mut out);
            prop_assert_eq!(total(&out), given);
        }
    }
}
