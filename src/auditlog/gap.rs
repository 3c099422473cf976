//! What is missing in the audit, told in its place: how many records, of what outcome, over how long.
//! Never more than these numbers for each owner, however much is lost.

use std::time::SystemTime;

use policy::AuditRecord;
use policy::audit::{Kind, Outcome};

use crate::auditlog::files::Owner;

/// Records of one owner that could not be written.
#[derive(Debug)]
pub(crate) struct Gap {
    began: SystemTime,
    counts: [(&'static str, u64); 5],
}

impl Gap {
    /// From now on records are missing.
    pub(crate) fn begin() -> Self {
        let counts = [("deny", 0), ("observe", 0), ("allow", 0), ("closed", 0), ("fail", 0)];
        Self { began: SystemTime::now(), counts }
    }

    /// This one, too.
    pub(crate) fn add(&mut self, record: &AuditRecord) {
        let [deny, observe, allow, closed, fail] = &mut self.counts;
        // Whatever outcome there is has its row.
        let (_, count) = match record.outcome {
            Outcome::Deny => deny,
            Outcome::Observe => observe,
            Outcome::Allow => allow,
            Outcome::Closed => closed,
            Outcome::Fail => fail,
        };
        *count = count.saturating_add(record.count.unwrap_or(1));
    }

    /// The record that stands for them, as JSON.
    pub(crate) fn told(&self, owner: &Owner) -> String {
        let each = self.counts.iter().filter(|(_, count)| *count > 0);
        let each: Vec<String> = each.map(|(what, count)| format!("{count} {what}")).collect();
        let sum = self.counts.iter().map(|(_, count)| count).sum();
        let mut record = lost(sum, &format!("the audit could not be written: {}", each.join(", ")));
        record.tenant.clone_from(owner);
        // None when the clock was set back meanwhile.
        record.micros = record
            .time
            .duration_since(self.began)
            .ok()
            .and_then(|span| u64::try_from(span.as_micros()).ok());
        serde_json::to_string(&record).unwrap_or_default()
    }
}

/// A record that stands for lost ones.
pub(crate) fn lost(count: u64, why: &str) -> AuditRecord {
    let mut record = AuditRecord::new(SystemTime::now(), Kind::Gap, Outcome::Fail);
    record.count = Some(count);
    record.detail = Some(format!("records lost: {why}"));
    record
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_says_how_many_of_what_and_whose() {
        let mut gap = Gap::begin();
        for (outcome, count) in [
            (Outcome::Deny, Some(7)),
            (Outcome::Deny, None),
            (Outcome::Allow, None),
            (Outcome::Observe, Some(4)),
            (Outcome::Closed, None),
            (Outcome::Fail, None),
        ] {
            let mut record = AuditRecord::new(SystemTime::now(), Kind::Dns, outcome);
            record.count = count;
            gap.add(&record);
        }
        let told: AuditRecord =
            serde_json::from_str(&gap.told(&"acme".parse().ok())).expect("a record");
        assert_eq!((told.kind, told.outcome, told.count), (Kind::Gap, Outcome::Fail, Some(15)));
        assert_eq!(told.tenant, "acme".parse().ok());
        assert!(told.micros.is_some());
        let detail = told.detail.expect("why");
        assert!(detail.ends_with(": 8 deny, 4 observe, 1 allow, 1 closed, 1 fail"), "{detail}");
    }
}
