//! The audit over HTTP: what was decided, and what is being decided now.

use std::time::SystemTime;

use axum::extract::State;
use axum::http::Uri;
use axum::response::Response;
use futures_util::stream;
use policy::audit::{Kind as RecordKind, Outcome};
use policy::{Code, TenantName};
use serde::de::DeserializeOwned;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::api::caller::Caller;
use crate::api::sandboxes::json_lines;
use crate::api::{Api, body};
use crate::auditlog::filter::Filter;
use crate::auditlog::{Cursor, MOST_OPEN};
use crate::input;
use crate::problem::{ErrorBody, Kind, Problem};
use crate::units::Span;

/// The most records of the past in one answer.
const MOST: usize = 10_000;
/// Records of the past unless asked otherwise.
const USUAL: usize = 1_000;

const KEYS: &[&str] = &[
    "follow", "limit", "since", "until", "sandbox", "tenant", "code", "outcome", "kind", "name",
    "egress", "before",
];

/// The newest records that match, oldest first, one JSON object a line; with `follow=true` the
/// stream goes on with what is decided from then on, without a gap.
#[utoipa::path(
    get, path = "/v1/events", tag = "audit",
    params(
        ("follow" = Option<bool>, Query, description = "Go on with new records."),
        ("limit" = Option<usize>, Query, description = "Records of the past, at most 10000; 1000 if not given, none when following without `since`."),
        ("since" = Option<String>, Query, description = "RFC 3339, or how long ago: `10m`."),
        ("until" = Option<String>, Query, description = "RFC 3339, or how long ago."),
        ("sandbox" = Option<String>, Query, description = "Of this sandbox."),
        ("tenant" = Option<String>, Query, description = "Of this tenant."),
        ("code" = Option<String>, Query, description = "With this reason, e.g. `no-rule`."),
        ("outcome" = Option<String>, Query, description = "`allow`, `observe`, `deny`, `fail` or `closed`."),
        ("kind" = Option<String>, Query, description = "`dns`, `connection`, `request`, `frame`, `control` or `gap`."),
        ("name" = Option<String>, Query, description = "About this host name."),
        ("before" = Option<String>, Query, description = "Only what an earlier answer said it had not looked at, in its words."),
        ("egress" = Option<String>, Query, description = "That left from this address, or address and port."),
    ),
    responses(
        (status = 200, description = "Audit records.", body = Object, content_type = "application/jsonl"),
        (status = "default", description = "Refused.", body = ErrorBody),
    )
)]
pub(crate) async fn events(
    State(api): State<Api>,
    caller: Caller,
    uri: Uri,
) -> Result<Response, Problem> {
    let asked = Asked::read(&uri, &caller, fault::wall_clock())?;
    let unread = |error: std::io::Error| {
        tracing::error!(%error, "audit not readable");
        Problem::new(Kind::Failed, "the audit could not be read").fix("see the log of the daemon")
    };
    let audit = &api.0.audit;
    let reader = audit.reader(caller.tenant()).ok_or_else(|| too_many(&caller))?;
    if !asked.follow {
        let found =
            audit.query(reader, asked.filter, asked.limit, asked.before).await.map_err(unread)?;
        return Ok(json_lines(stream::iter(found)));
    }
    let follow = audit.follow(reader, asked.filter, asked.limit).await.map_err(unread)?;
    let stop = api.0.stop.clone();
    Ok(json_lines(stream::unfold((follow, stop), |(mut follow, stop)| async move {
        let line = stop.run_until_cancelled(follow.next()).await??;
        Some((line, (follow, stop)))
    })))
}

fn too_many(caller: &Caller) -> Problem {
    let whose = caller.tenant().map(TenantName::as_str).unwrap_or_default();
    let problem = format!("has {MOST_OPEN} questions to the audit open, as many as it may");
    Problem::invalid("tenant", whose, problem)
        .of(Kind::Busy)
        .fix("read their answers to the end, or close them, and ask again")
}

struct Asked {
    follow: bool,
    limit: usize,
    before: Option<Cursor>,
    filter: Filter,
}

impl Asked {
    fn read(uri: &Uri, caller: &Caller, now: SystemTime) -> Result<Self, Problem> {
        let mut follow = false;
        let (mut limit, mut before) = (None, None);
        let mut filter = Filter::default();
        for (key, value) in body::query(uri, KEYS)? {
            match key.as_str() {
                "follow" => follow = body::flag(&key, &value)?,
                "limit" => limit = Some(count(&value)?),
                "since" => filter.since = Some(moment(&key, &value, now)?),
                "until" => filter.until = Some(moment(&key, &value, now)?),
                "sandbox" => filter.sandbox = Some(crate::api::label(&key, &value)?),
                "tenant" => filter.tenant = Some(crate::api::label(&key, &value)?),
                "code" => {
                    let known = Code::ALL.iter().map(|code| code.as_str());
                    filter.code = Some(choice::<Code>(&key, &value, known)?);
                }
                "outcome" => {
                    let known = ["allow", "observe", "deny", "fail", "closed"];
                    filter.outcome = Some(choice::<Outcome>(&key, &value, known)?);
                }
                "kind" => {
                    let known = ["dns", "connection", "request", "frame", "control", "gap"];
                    filter.kind = Some(choice::<RecordKind>(&key, &value, known)?);
                }
                "before" => before = Some(cursor(&value)?),
                "name" => filter.name = Some(value.to_lowercase()),
                _ => {
                    let read = value.parse().map_err(|wrong: &str| {
                        let (problem, fix) = wrong.split_once("; ").unwrap_or((wrong, ""));
                        Problem::invalid(key.as_str(), &value, problem).fix(fix)
                    });
                    filter.egress = Some(read?);
                }
            }
        }
        if let Some(own) = caller.tenant() {
            if filter.tenant.as_ref().is_some_and(|tenant| tenant != own) {
                return Err(Problem::invalid("tenant", "", "is not this token's tenant")
                    .fix("leave it out")
                    .of(Kind::Forbidden));
            }
            filter.tenant = Some(own.clone());
        }
        let usual = if follow && filter.since.is_none() { 0 } else { USUAL };
        if follow && before.is_some() {
            let problem = "goes back, and `follow` goes on";
            return Err(Problem::invalid("before", "", problem).fix("leave one of them out"));
        }
        Ok(Self { follow, limit: limit.unwrap_or(usual), before, filter })
    }
}

fn count(text: &str) -> Result<usize, Problem> {
    text.parse().ok().filter(|limit| *limit <= MOST).ok_or_else(|| {
        Problem::invalid("limit", text, "is not a number of records").fix("use 0 to 10000")
    })
}

fn cursor(text: &str) -> Result<Cursor, Problem> {
    text.parse().map_err(|()| {
        Problem::invalid("before", text, "is not where an answer stopped")
            .fix("repeat what an answer said, as `7-0`")
    })
}

pub(crate) fn moment(field: &str, text: &str, now: SystemTime) -> Result<SystemTime, Problem> {
    let ago = |span: Span| now.checked_sub(span.0);
    let read = match text.parse() {
        Ok(span) => ago(span),
        Err(_) => OffsetDateTime::parse(text, &Rfc3339).ok().map(SystemTime::from),
    };
    read.ok_or_else(|| {
        Problem::invalid(field, text, "is not a time")
            .fix("write it as `2026-01-31T12:00:00Z`, or how long ago as `10m`")
    })
}

pub(crate) fn choice<T: DeserializeOwned>(
    field: &str,
    text: &str,
    known: impl IntoIterator<Item = &'static str> + Clone,
) -> Result<T, Problem> {
    serde_json::from_value(text.into()).map_err(|_| {
        let fix = input::meant(text, known.clone()).map_or_else(
            || format!("use {}", known.into_iter().collect::<Vec<_>>().join(", ")),
            |word| format!("did you mean `{word}`?"),
        );
        Problem::invalid(field, text, "is not one of the choices").fix(fix)
    })
}
