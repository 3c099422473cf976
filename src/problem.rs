//! Why something was refused, in one form for the API, the command line and the configuration:
//! the field, what was given, what is wrong, what to write instead.
//!
//! Values shown are shortened and escaped. Never put a secret in one.

use std::borrow::Cow;
use std::fmt;

use policy::PolicyError;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The kind of refusal: stable, one HTTP status each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
#[schema(example = "invalid")]
pub enum Kind {
    /// 400: something given is not valid; nothing changed.
    Invalid,
    /// 401: no token, or one that is not known.
    Unauthorized,
    /// 403: known, but not allowed to do this.
    Forbidden,
    /// 404: no such thing, or not this tenant's.
    NotFound,
    /// 405: the path exists, the method does not.
    MethodNotAllowed,
    /// 409: it exists already, or its state does not allow this.
    Conflict,
    /// 412: the revision moved since it was read.
    RevisionMoved,
    /// 413: the body is larger than 1 MiB.
    TooLarge,
    /// 415: the content type is not one of those offered.
    UnsupportedMediaType,
    /// 421: the `Host` header names another host.
    Misdirected,
    /// 426: this path speaks only after an HTTP upgrade.
    UpgradeRequired,
    /// 429: the tenant has as much of the node as one may have.
    Quota,
    /// 429: the tenant has as much under way as one may; `retry-after` says when to ask again.
    Busy,
    /// 500: it was tried and failed; the log of the daemon says more.
    Failed,
    /// 503: the node cannot take it now.
    Unavailable,
    /// 507: the disk has less room than is kept for the journal.
    Storage,
}

impl Kind {
    /// The HTTP status.
    #[must_use]
    pub const fn status(self) -> http::StatusCode {
        use http::StatusCode as S;
        match self {
            Self::Invalid => S::BAD_REQUEST,
            Self::Unauthorized => S::UNAUTHORIZED,
            Self::Forbidden => S::FORBIDDEN,
            Self::NotFound => S::NOT_FOUND,
            Self::MethodNotAllowed => S::METHOD_NOT_ALLOWED,
            Self::Conflict => S::CONFLICT,
            Self::RevisionMoved => S::PRECONDITION_FAILED,
            Self::TooLarge => S::PAYLOAD_TOO_LARGE,
            Self::UnsupportedMediaType => S::UNSUPPORTED_MEDIA_TYPE,
            Self::Misdirected => S::MISDIRECTED_REQUEST,
            Self::UpgradeRequired => S::UPGRADE_REQUIRED,
            Self::Quota | Self::Busy => S::TOO_MANY_REQUESTS,
            Self::Failed => S::INTERNAL_SERVER_ERROR,
            Self::Unavailable => S::SERVICE_UNAVAILABLE,
            Self::Storage => S::INSUFFICIENT_STORAGE,
        }
    }
}

/// One refusal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema, thiserror::Error)]
pub struct Problem {
    /// The kind of refusal.
    pub code: Kind,
    /// What is wrong, for a person.
    #[schema(value_type = String, example = "is not a host name")]
    pub message: Box<str>,
    /// The field at fault, e.g. `rule[2].allow[0]`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(value_type = Option<String>, example = "rule[0].allow[0]")]
    pub field: Option<Box<str>>,
    /// The line of the document, from 1, where it is known.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub line: Option<usize>,
    /// What was given, shortened and escaped.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(value_type = Option<String>)]
    pub value: Option<Box<str>>,
    /// What to do instead.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(value_type = Option<String>)]
    pub fix: Option<Box<str>>,
    /// Where it is explained.
    #[schema(value_type = String, example = "docs/api.md#errors")]
    pub docs: Cow<'static, str>,
}

/// The body of every answer that is not a success.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// The refusal.
    pub error: Problem,
}

impl Problem {
    /// A refusal of this kind.
    #[must_use]
    pub fn new(code: Kind, message: impl Into<Box<str>>) -> Self {
        Self {
            code,
            message: message.into(),
            field: None,
            line: None,
            value: None,
            fix: None,
            docs: Cow::Borrowed("docs/api.md#errors"),
        }
    }

    /// A field whose value is not valid.
    #[must_use]
    pub fn invalid(field: impl Into<Box<str>>, value: &str, message: impl Into<Box<str>>) -> Self {
        let problem = Self::new(Kind::Invalid, message).given(value);
        Self { field: Some(field.into()), ..problem }
    }

    /// The same with what was given.
    #[must_use]
    pub fn given(mut self, value: &str) -> Self {
        self.value = Some(shortened(value).into());
        self
    }

    /// The same as another kind of refusal.
    #[must_use]
    pub fn of(mut self, code: Kind) -> Self {
        self.code = code;
        self
    }

    /// The same with what to do instead.
    #[must_use]
    pub fn fix(mut self, fix: impl Into<Box<str>>) -> Self {
        self.fix = Some(fix.into());
        self
    }

    /// The same with a line.
    #[must_use]
    pub fn at(mut self, line: Option<usize>) -> Self {
        self.line = line;
        self
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(line) = self.line {
            write!(f, "line {line}: ")?;
        }
        if let Some(field) = self.field.as_deref().filter(|field| !field.is_empty()) {
            write!(f, "{field}: ")?;
        }
        if let Some(value) = &self.value {
            write!(f, "\"{value}\" ")?;
        }
        f.write_str(&self.message)?;
        self.fix.as_ref().map_or(Ok(()), |fix| write!(f, "; {fix}"))
    }
}

impl From<PolicyError> for Problem {
    fn from(error: PolicyError) -> Self {
        Self {
            field: Some(error.field.into()),
            line: error.line,
            value: error.value.map(Into::into),
            fix: Some(error.fix.into()),
            docs: Cow::Borrowed("docs/policy.md"),
            ..Self::new(Kind::Invalid, error.problem)
        }
    }
}

/// A given value made fit to be shown: at most 60 characters, control characters escaped.
#[must_use]
pub fn shortened(text: &str) -> String {
    let mut shown: String = text.chars().take(60).flat_map(char::escape_debug).collect();
    if text.chars().nth(60).is_some() {
        shown.push('…');
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_reads_like_a_sentence() {
        let problem = Problem::invalid("dns.timeout", "5 parsecs", "is not a duration")
            .fix("write it as `5s`")
            .at(Some(3));
        assert_eq!(
            problem.to_string(),
            "line 3: dns.timeout: \"5 parsecs\" is not a duration; write it as `5s`"
        );
    }

    #[test]
    fn a_shown_value_is_short_and_cannot_break_a_line() {
        assert_eq!(shortened("a\n\u{1b}b"), "a\\n\\u{1b}b");
        assert_eq!(shortened(&"x".repeat(61)).chars().count(), 61);
        assert_eq!(shortened(&"x".repeat(60)).chars().count(), 60);
    }
}
