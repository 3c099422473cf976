//! One record a decision: what is written of it. No secret and no query value is ever part of one.

use std::fmt;
use std::net::SocketAddr;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use crate::id::{Revision, SandboxName, Subject, TenantName};
use crate::reason::Code;

/// What kind of decision a record is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A question of a guest to its resolver.
    Dns,
    /// A connection, written when it is decided (`open`) and again when it ends.
    Connection,
    /// One HTTP request.
    Request,
    /// Frames the fence dropped.
    Frame,
    /// A change of policy, of a sandbox or of an assignment.
    Control,
    /// Records that are missing: `count` of them, the last one at `time`, the first one `micros`
    /// before that.
    Gap,
}

/// How it was decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// Let through; for a connection, written before its first payload byte leaves.
    Allow,
    /// Let through because a layer of its policy is in mode observe; enforced, it would have been
    /// refused with `code`, by `layer` and `rule`.
    Observe,
    /// Refused, with `code`.
    Deny,
    /// Allowed, but it could not be done, with `code`; or refused only after a packet had left, from `egress`.
    Fail,
    /// An allowed connection ended; bytes and duration are final.
    Closed,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Allow => "allow",
            Self::Observe => "observe",
            Self::Deny => "deny",
            Self::Fail => "fail",
            Self::Closed => "closed",
        })
    }
}

/// One line of the audit. Fields that do not apply are left out of the JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AuditRecord {
    /// When it was decided, RFC 3339 in UTC.
    #[serde(with = "rfc3339")]
    pub time: SystemTime,
    /// What kind of decision.
    pub kind: Kind,
    /// How it was decided.
    pub outcome: Outcome,
    /// The sandbox; none for a control record about the node.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub sandbox: Option<SandboxName>,
    /// Its tenant.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub tenant: Option<TenantName>,
    /// Its incarnation.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub incarnation: Option<u64>,
    /// A number that joins the records of one connection.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub flow: Option<u64>,
    /// `tcp`, `udp`, `tls`, `http`, `dns`, `arp`, ...
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub protocol: Option<String>,
    /// The name that was judged, canonical; or what was sent instead of one, shortened and escaped.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub name: Option<String>,
    /// Where the guest aimed: evidence, not authority.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub destination: Option<SocketAddr>,
    /// Where we dialled.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub dialed: Option<SocketAddr>,
    /// The egress address and port, from `getsockname`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub egress: Option<SocketAddr>,
    /// Why it was refused or failed, or would have been refused.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub code: Option<Code>,
    /// The layer whose rule decided: `platform`, `tenant`, `sandbox`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub layer: Option<String>,
    /// The rule that decided, e.g. `rule[0] allow "api.github.com"`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub rule: Option<String>,
    /// The policy revision it was judged by.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub revision: Option<Revision>,
    /// Request method, where we see it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub method: Option<String>,
    /// Request path without its query, where we see it; DNS: the record type.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub path: Option<String>,
    /// Response status, where we see it; DNS: the response code.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub status: Option<u16>,
    /// Payload bytes from the guest to the far side.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub bytes_out: Option<u64>,
    /// Payload bytes from the far side to the guest.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub bytes_in: Option<u64>,
    /// How long it lived, or how long the decision took once the guest had said enough, in
    /// microseconds.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub micros: Option<u64>,
    /// How many equal decisions this record stands for, if more than one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub count: Option<u64>,
    /// A control record: what was done, by whom. A failure: what went wrong.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub detail: Option<String>,
    /// What its tenant is told in place of `detail`, where that names what is the node's alone: its
    /// paths, processes, devices and addresses, and who its operator is.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub told: Option<String>,
}

impl AuditRecord {
    /// A record about nobody in particular, with only the required fields.
    #[must_use]
    pub fn new(time: SystemTime, kind: Kind, outcome: Outcome) -> Self {
        Self {
            time,
            kind,
            outcome,
            sandbox: None,
            tenant: None,
            incarnation: None,
            flow: None,
            protocol: None,
            name: None,
            destination: None,
            dialed: None,
            egress: None,
            code: None,
            layer: None,
            rule: None,
            revision: None,
            method: None,
            path: None,
            status: None,
            bytes_out: None,
            bytes_in: None,
            micros: None,
            count: None,
            detail: None,
            told: None,
        }
    }

    /// The same record about this subject.
    #[must_use]
    pub fn about(mut self, subject: &Subject) -> Self {
        self.sandbox = Some(subject.sandbox.clone());
        self.tenant = Some(subject.tenant.clone());
        self.incarnation = Some(subject.incarnation);
        self
    }

    /// Sets the detail, and what its tenant is told in its place where that is something else.
    #[must_use]
    pub fn saying(mut self, detail: &str, told: &str) -> Self {
        self.detail = Some(detail.to_owned());
        self.told = (told != detail).then(|| told.to_owned());
        self
    }

    /// The same record as its tenant may see it.
    #[must_use]
    pub fn for_tenant(mut self) -> Self {
        if let Some(told) = self.told.take() {
            self.detail = Some(told);
        }
        self
    }

    /// Sets how long it took.
    #[must_use]
    pub fn took(mut self, duration: Duration) -> Self {
        self.micros = u64::try_from(duration.as_micros()).ok();
        self
    }
}

/// Guest-chosen text made fit for a record: at most 253 characters, control characters escaped.
#[must_use]
pub fn shown(text: &str) -> String {
    text.chars().take(253).flat_map(|c| c.escape_debug()).collect()
}

pub(crate) mod rfc3339 {
    use std::time::SystemTime;

    use serde::de::Error as _;
    use serde::{Deserialize, Deserializer, Serializer};
    use time::OffsetDateTime;
    use time::format_description::BorrowedFormatItem;
    use time::format_description::well_known::Rfc3339;
    use time::macros::format_description;

    /// RFC 3339 in UTC, always as long, so that lines align and sort as text.
    const MICROSECONDS: &[BorrowedFormatItem<'_>] =
        format_description!("[year]-[month]-[day]T[hour]:[minute]:[second].[subsecond digits:6]Z");

    pub(crate) fn serialize<S: Serializer>(time: &SystemTime, s: S) -> Result<S::Ok, S::Error> {
        let text = OffsetDateTime::from(*time).format(MICROSECONDS);
        s.serialize_str(&text.map_err(serde::ser::Error::custom)?)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<SystemTime, D::Error> {
        let text = String::deserialize(d)?;
        OffsetDateTime::parse(&text, &Rfc3339).map(Into::into).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_survives_json() {
        let mut record = AuditRecord::new(SystemTime::UNIX_EPOCH, Kind::Connection, Outcome::Deny);
        record.code = Some(Code::NoRule);
        let json = serde_json::to_string(&record).expect("json");
        assert!(json.contains("\"time\":\"1970-01-01T00:00:00.000000Z\""), "{json}");
        assert_eq!(serde_json::from_str::<AuditRecord>(&json).expect("json"), record);
    }

    #[test]
    fn shown_text_cannot_break_a_line_or_flood_it() {
        assert_eq!(shown("a\r\n\u{1b}[2Jb"), "a\\r\\n\\u{1b}[2Jb");
        assert!(shown(&"x".repeat(100_000)).len() <= 253);
    }
}
