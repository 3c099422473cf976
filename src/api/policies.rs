//! Policies of a sandbox, of a tenant, of the platform: read, replaced, added to, explained.
//!
//! A document is read as TOML or JSON and is answered as either. The revision travels as the entity
//! tag: `If-Match` makes a write depend on what was read (RFC 9110 section 13.1.1).

use axum::Json as Answer;
use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use lifecycle::{Holder, PolicyChange};
use policy::document::Rule;
use policy::{Policy, PolicyMode, Revision};
use serde_json::value::RawValue;

use crate::api::body::{Document, Json, Named, aside, joined};
use crate::api::caller::Caller;
use crate::api::{Api, question};
use crate::problem::{ErrorBody, Kind, Problem};
use crate::wire::{Change, Explained, Mode, Question, SetMode, TOML};

/// A sandbox's own policy, as JSON, or as TOML if `accept` asks for it.
#[utoipa::path(
    get, path = "/v1/sandboxes/{name}/policy", tag = "policies",
    params(("name" = String, Path, description = "The sandbox.")),
    responses(
        (status = 200, description = "The document; its revision is the `etag`.", content((Object = "application/json"), (String = "application/toml"))),
        (status = "default", description = "Refused.", body = ErrorBody),
    )
)]
pub(crate) async fn of_sandbox(
    State(api): State<Api>,
    caller: Caller,
    Named(name): Named,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    api.document(&Whose::Sandbox(name).holder(&api, &caller)?, &headers).await
}

/// Replaces a sandbox's own policy. Answers once it is in force and open flows were judged by it.
#[utoipa::path(
    put, path = "/v1/sandboxes/{name}/policy", tag = "policies",
    params(
        ("name" = String, Path, description = "The sandbox."),
        ("if-match" = Option<String>, Header, description = "The revision that was read."),
    ),
    request_body(content((Object = "application/json"), (String = "application/toml"))),
    responses(
        (status = 200, description = "In force.", body = Change),
        (status = "default", description = "Refused; the old one stays.", body = ErrorBody),
    )
)]
pub(crate) async fn set_of_sandbox(
    State(api): State<Api>,
    caller: Caller,
    Named(name): Named,
    headers: HeaderMap,
    document: Document,
) -> Result<Answer<Change>, Problem> {
    api.write(Whose::Sandbox(name), caller, &headers, Wanted::Whole(document)).await
}

/// Adds one rule to a sandbox's own policy.
#[utoipa::path(
    post, path = "/v1/sandboxes/{name}/policy/rules", tag = "policies",
    params(
        ("name" = String, Path, description = "The sandbox."),
        ("if-match" = Option<String>, Header, description = "The revision that was read."),
    ),
    request_body(content = Object, description = "A rule, as in a policy."),
    responses(
        (status = 200, description = "In force.", body = Change),
        (status = "default", description = "Refused; the old one stays.", body = ErrorBody),
    )
)]
pub(crate) async fn add_to_sandbox(
    State(api): State<Api>,
    caller: Caller,
    Named(name): Named,
    headers: HeaderMap,
    Json(rule): Json<Box<RawValue>>,
) -> Result<Answer<Change>, Problem> {
    api.write(Whose::Sandbox(name), caller, &headers, Wanted::Rule(rule)).await
}

/// Puts a sandbox's own policy in another mode and leaves its rules as they are.
#[utoipa::path(
    put, path = "/v1/sandboxes/{name}/policy/mode", tag = "policies",
    params(
        ("name" = String, Path, description = "The sandbox."),
        ("if-match" = Option<String>, Header, description = "The revision that was read."),
    ),
    request_body = SetMode,
    responses(
        (status = 200, description = "In force.", body = Change),
        (status = "default", description = "Refused; the old one stays.", body = ErrorBody),
    )
)]
pub(crate) async fn set_mode_of_sandbox(
    State(api): State<Api>,
    caller: Caller,
    Named(name): Named,
    headers: HeaderMap,
    Json(wanted): Json<SetMode>,
) -> Result<Answer<Change>, Problem> {
    api.write(Whose::Sandbox(name), caller, &headers, Wanted::Mode(wanted.mode)).await
}

/// Says what would happen to a flow of a sandbox, and which rule of which layer decides.
#[utoipa::path(
    post, path = "/v1/sandboxes/{name}/policy/explain", tag = "policies",
    params(("name" = String, Path, description = "The sandbox.")),
    request_body = Question,
    responses(
        (status = 200, description = "What would happen.", body = Explained),
        (status = "default", description = "Refused.", body = ErrorBody),
    )
)]
pub(crate) async fn explain(
    State(api): State<Api>,
    caller: Caller,
    Named(name): Named,
    Json(asked): Json<Question>,
) -> Result<Answer<Explained>, Problem> {
    let found = api.sandbox(&caller, &name)?;
    let in_force = api.0.keeper.in_force(&found);
    question::explained(&in_force, api.0.router.own(), &asked).map(Answer)
}

/// A tenant's policy.
#[utoipa::path(
    get, path = "/v1/tenants/{tenant}/policy", tag = "policies",
    params(("tenant" = String, Path, description = "The tenant.")),
    responses(
        (status = 200, description = "The document; its revision is the `etag`.", content((Object = "application/json"), (String = "application/toml"))),
        (status = "default", description = "Refused.", body = ErrorBody),
    )
)]
pub(crate) async fn of_tenant(
    State(api): State<Api>,
    caller: Caller,
    Named(tenant): Named,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    api.document(&Whose::Tenant(tenant).holder(&api, &caller)?, &headers).await
}

/// Replaces a tenant's policy.
#[utoipa::path(
    put, path = "/v1/tenants/{tenant}/policy", tag = "policies",
    params(
        ("tenant" = String, Path, description = "The tenant."),
        ("if-match" = Option<String>, Header, description = "The revision that was read."),
    ),
    request_body(content((Object = "application/json"), (String = "application/toml"))),
    responses(
        (status = 200, description = "In force.", body = Change),
        (status = "default", description = "Refused; the old one stays.", body = ErrorBody),
    )
)]
pub(crate) async fn set_of_tenant(
    State(api): State<Api>,
    caller: Caller,
    Named(tenant): Named,
    headers: HeaderMap,
    document: Document,
) -> Result<Answer<Change>, Problem> {
    api.write(Whose::Tenant(tenant), caller, &headers, Wanted::Whole(document)).await
}

/// Adds one rule to a tenant's policy.
#[utoipa::path(
    post, path = "/v1/tenants/{tenant}/policy/rules", tag = "policies",
    params(
        ("tenant" = String, Path, description = "The tenant."),
        ("if-match" = Option<String>, Header, description = "The revision that was read."),
    ),
    request_body(content = Object, description = "A rule, as in a policy."),
    responses(
        (status = 200, description = "In force.", body = Change),
        (status = "default", description = "Refused; the old one stays.", body = ErrorBody),
    )
)]
pub(crate) async fn add_to_tenant(
    State(api): State<Api>,
    caller: Caller,
    Named(tenant): Named,
    headers: HeaderMap,
    Json(rule): Json<Box<RawValue>>,
) -> Result<Answer<Change>, Problem> {
    api.write(Whose::Tenant(tenant), caller, &headers, Wanted::Rule(rule)).await
}

/// Puts a tenant's policy in another mode and leaves its rules as they are.
#[utoipa::path(
    put, path = "/v1/tenants/{tenant}/policy/mode", tag = "policies",
    params(
        ("tenant" = String, Path, description = "The tenant."),
        ("if-match" = Option<String>, Header, description = "The revision that was read."),
    ),
    request_body = SetMode,
    responses(
        (status = 200, description = "In force.", body = Change),
        (status = "default", description = "Refused; the old one stays.", body = ErrorBody),
    )
)]
pub(crate) async fn set_mode_of_tenant(
    State(api): State<Api>,
    caller: Caller,
    Named(tenant): Named,
    headers: HeaderMap,
    Json(wanted): Json<SetMode>,
) -> Result<Answer<Change>, Problem> {
    api.write(Whose::Tenant(tenant), caller, &headers, Wanted::Mode(wanted.mode)).await
}

/// The platform's policy, over everything on the node. Not for a tenant's token.
#[utoipa::path(
    get, path = "/v1/platform/policy", tag = "policies",
    responses(
        (status = 200, description = "The document; its revision is the `etag`.", content((Object = "application/json"), (String = "application/toml"))),
        (status = "default", description = "Refused.", body = ErrorBody),
    )
)]
pub(crate) async fn of_platform(
    State(api): State<Api>,
    caller: Caller,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    if caller.tenant().is_some() {
        return Err(not_for_tokens());
    }
    api.document(&Holder::Platform, &headers).await
}

/// Replaces the platform's policy. Only over the unix socket.
#[utoipa::path(
    put, path = "/v1/platform/policy", tag = "policies",
    params(("if-match" = Option<String>, Header, description = "The revision that was read.")),
    request_body(content((Object = "application/json"), (String = "application/toml"))),
    responses(
        (status = 200, description = "In force.", body = Change),
        (status = "default", description = "Refused; the old one stays.", body = ErrorBody),
    )
)]
pub(crate) async fn set_of_platform(
    State(api): State<Api>,
    caller: Caller,
    headers: HeaderMap,
    document: Document,
) -> Result<Answer<Change>, Problem> {
    api.write(Whose::Platform, caller, &headers, Wanted::Whole(document)).await
}

/// Adds one rule to the platform's policy. Only over the unix socket.
#[utoipa::path(
    post, path = "/v1/platform/policy/rules", tag = "policies",
    params(("if-match" = Option<String>, Header, description = "The revision that was read.")),
    request_body(content = Object, description = "A rule, as in a policy."),
    responses(
        (status = 200, description = "In force.", body = Change),
        (status = "default", description = "Refused; the old one stays.", body = ErrorBody),
    )
)]
pub(crate) async fn add_to_platform(
    State(api): State<Api>,
    caller: Caller,
    headers: HeaderMap,
    Json(rule): Json<Box<RawValue>>,
) -> Result<Answer<Change>, Problem> {
    api.write(Whose::Platform, caller, &headers, Wanted::Rule(rule)).await
}

/// Whose policy a request means, as its path says.
#[derive(Debug)]
enum Whose {
    Sandbox(String),
    Tenant(String),
    Platform,
}

/// What a write asks for.
#[derive(Debug)]
enum Wanted {
    Whole(Document),
    Rule(Box<RawValue>),
    Mode(Mode),
}

impl Whose {
    /// Who that is, if the caller may write its policy.
    fn holder(&self, api: &Api, caller: &Caller) -> Result<Holder, Problem> {
        match self {
            Self::Sandbox(name) => api.sandbox(caller, name).map(Holder::Sandbox),
            Self::Tenant(name) => {
                let tenant = crate::api::tenant(name)?;
                let unseen = || Problem::new(Kind::NotFound, "no such tenant").given(name);
                caller.sees(&tenant).then_some(Holder::Tenant(tenant)).ok_or_else(unseen)
            }
            Self::Platform => {
                caller.is_local().then_some(Holder::Platform).ok_or_else(not_for_tokens)
            }
        }
    }
}

impl Api {
    async fn document(&self, of: &Holder, headers: &HeaderMap) -> Result<Response, Problem> {
        let (policy, revision) = self.0.keeper.policy(of)?;
        let tag = [(header::ETAG, format!("\"{revision}\""))];
        let accept = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok());
        if accept.is_some_and(|accept| accept.contains("toml")) {
            let text = aside(move || policy.to_toml()).await?;
            return Ok((tag, [(header::CONTENT_TYPE, TOML)], text).into_response());
        }
        Ok((tag, Answer(aside(move || policy.to_json()).await?)).into_response())
    }

    /// Does a write to its end, even when its caller goes away meanwhile: for as long it takes one of
    /// its tenant's places.
    async fn write(
        &self,
        whose: Whose,
        caller: Caller,
        headers: &HeaderMap,
        wanted: Wanted,
    ) -> Result<Answer<Change>, Problem> {
        let expected = if_match(headers)?;
        let place = self.0.door.place_to_write(&caller)?;
        let api = self.clone();
        let written = tokio::spawn(async move {
            let written = api.write_now(&whose, &caller, expected, wanted).await;
            drop(place);
            written
        });
        joined(written).await.flatten().map(|change| Answer(shown(change)))
    }

    async fn write_now(
        &self,
        whose: &Whose,
        caller: &Caller,
        expected: Option<Revision>,
        wanted: Wanted,
    ) -> Result<PolicyChange, Problem> {
        let (keeper, actor) = (&self.0.keeper, caller.actor());
        // Whose it is comes last: while a document is read, a name may become somebody else's.
        let holder = || whose.holder(self, caller);
        let told = |error| caller.told(error);
        match wanted {
            Wanted::Whole(document) => {
                let (policy, document) = aside(move || (document.policy(), document)).await?;
                let set = keeper.set_policy(&holder()?, policy?, expected, &actor).await;
                set.map_err(|error| document.located(told(error)))
            }
            Wanted::Rule(rule) => {
                let rule = aside(move || read_rule(&rule)).await??;
                keeper.add_rule(&holder()?, rule, expected, &actor).await.map_err(told)
            }
            Wanted::Mode(mode) => {
                let mode = match mode {
                    Mode::Enforce => PolicyMode::Enforce,
                    Mode::Observe => PolicyMode::Observe,
                };
                keeper.set_mode(&holder()?, mode, expected, &actor).await.map_err(told)
            }
        }
    }
}

fn not_for_tokens() -> Problem {
    Problem::new(Kind::Forbidden, "the platform's policy is not for this token")
        .fix("ask on the node itself, over the unix socket")
}

/// A rule is read as the only one of a document, so that it is checked like any other.
fn read_rule(rule: &RawValue) -> Result<Rule, Problem> {
    let alone = format!("{{\"rule\":[{rule}]}}");
    let policy = Policy::from_json(&alone).map_err(|refused| {
        let problem = Problem::from(refused);
        let field = problem.field.as_deref().unwrap_or_default();
        let field = field.strip_prefix("rule[0]").unwrap_or(field).trim_start_matches('.');
        Problem { field: Some(field.into()), line: None, ..problem }
    })?;
    policy
        .rules()
        .first()
        .cloned()
        .ok_or_else(|| Problem::invalid("", "", "is not a rule").fix("send one JSON object"))
}

fn if_match(headers: &HeaderMap) -> Result<Option<Revision>, Problem> {
    let Some(sent) = headers.get(header::IF_MATCH) else { return Ok(None) };
    let sent = sent.to_str().unwrap_or_default();
    if sent == "*" {
        return Ok(None);
    }
    let number = sent.trim_matches('"').parse().map_err(|_| {
        Problem::invalid("if-match", sent, "is not a revision")
            .fix("send the `etag` of the policy that was read")
    })?;
    Ok(Some(Revision(number)))
}

fn shown(change: PolicyChange) -> Change {
    Change {
        revision: change.revision,
        sandboxes: change.sandboxes,
        checked: change.checked,
        cut: change.cut,
        closing: change.closing,
        notes: change.notes,
    }
}
