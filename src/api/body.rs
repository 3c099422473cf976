//! Paths, bodies and queries, read whole or refused whole: the size, the content type, every key.

use std::time::Duration;

use axum::RequestExt;
use axum::body::Body;
use axum::extract::{FromRequest, FromRequestParts, Path, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, Uri, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use policy::Policy;
use serde::de::DeserializeOwned;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::timeout;

use crate::input;
use crate::problem::{Kind, Problem};
use crate::wire::BODY_LIMIT;

/// From the end of a request's head to the end of its body.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// A JSON body.
#[derive(Debug)]
pub(crate) struct Json<T>(pub(crate) T);

/// A JSON body, or none at all, which says nothing.
#[derive(Debug)]
pub(crate) struct Perhaps<T>(pub(crate) T);

/// The name in a path, not yet checked.
#[derive(Debug)]
pub(crate) struct Named(pub(crate) String);

/// A policy that is not read yet, as TOML or JSON by its content type.
#[derive(Debug)]
pub(crate) struct Document {
    format: ContentType,
    text: String,
}

impl Document {
    /// Reads it, which takes long where it is large.
    pub(crate) fn policy(&self) -> Result<Policy, Problem> {
        let policy = match self.format {
            ContentType::Json => Policy::from_json(&self.text),
            ContentType::Toml => Policy::from_toml(&self.text),
        };
        policy.map_err(Problem::from)
    }

    /// A refusal of the policy, with the line of its field in this document.
    pub(crate) fn located(&self, problem: Problem) -> Problem {
        let line =
            problem.field.as_deref().filter(|field| field.starts_with("rule[")).and_then(|field| {
                match self.format {
                    ContentType::Json => Policy::line_in_json(&self.text, field),
                    ContentType::Toml => Policy::line_in_toml(&self.text, field),
                }
            });
        let line = problem.line.or(line);
        problem.at(line)
    }
}

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Json<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, _state: &S) -> Result<Self, Problem> {
        match content_type(request.headers())? {
            ContentType::Json => input::json(&text(request).await?).map(Self),
            ContentType::Toml => Err(unsupported("application/toml", "application/json")),
        }
    }
}

impl<T: DeserializeOwned + Default, S: Send + Sync> FromRequest<S> for Perhaps<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        let headers = request.headers();
        let none = headers.get(header::CONTENT_LENGTH).is_none_or(|length| length == "0");
        if none && !headers.contains_key(header::TRANSFER_ENCODING) {
            return Ok(Self(T::default()));
        }
        Json::from_request(request, state).await.map(|Json(sent)| Self(sent))
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Named {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        let name = Path::from_request_parts(parts, state).await;
        name.map(|Path(name)| Self(name)).map_err(|_| {
            Problem::invalid("path", parts.uri.path(), "is not UTF-8")
                .fix("GET /v1/openapi.json lists the paths")
        })
    }
}

impl<S: Send + Sync> FromRequest<S> for Document {
    type Rejection = Problem;

    async fn from_request(request: Request, _state: &S) -> Result<Self, Problem> {
        let format = content_type(request.headers())?;
        Ok(Self { format, text: text(request).await? })
    }
}

/// Does work that takes long where no guest waits for it.
pub(crate) async fn aside<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Problem> {
    joined(spawn_blocking(work)).await
}

/// What a task came to.
pub(crate) async fn joined<T>(task: JoinHandle<T>) -> Result<T, Problem> {
    match task.await {
        Ok(done) => Ok(done),
        Err(lost) if lost.is_panic() => Err(lifecycle::Error::Panicked.into()),
        Err(_) => Err(lifecycle::Error::Stopping.into()),
    }
}

#[derive(Clone, Copy, Debug)]
enum ContentType {
    Json,
    Toml,
}

fn content_type(headers: &HeaderMap) -> Result<ContentType, Problem> {
    let sent = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let sent = sent.unwrap_or_default();
    let essence = sent.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    match essence.as_str() {
        "application/json" => Ok(ContentType::Json),
        "application/toml" | "text/toml" => Ok(ContentType::Toml),
        _ => Err(unsupported(sent, "application/json, or application/toml for a policy")),
    }
}

fn unsupported(sent: &str, offered: &str) -> Problem {
    let mut problem = Problem::invalid("content-type", sent, "is not read here");
    problem.code = Kind::UnsupportedMediaType;
    problem.fix(format!("send {offered}"))
}

async fn text(request: Request<Body>) -> Result<String, Problem> {
    let too_large = || {
        Problem::new(Kind::TooLarge, format!("the body is larger than {BODY_LIMIT} bytes"))
            .fix("send less")
    };
    let body = request.with_limited_body().into_body();
    let read = timeout(BODY_TIMEOUT, Limited::new(body, BODY_LIMIT).collect()).await;
    let read = read.map_err(|_elapsed| {
        Problem::new(Kind::Invalid, format!("the body did not arrive within {BODY_TIMEOUT:?}"))
            .fix("send it at once")
    })?;
    let read = read.map_err(|error| {
        if error.downcast_ref::<LengthLimitError>().is_some() {
            too_large()
        } else {
            Problem::new(Kind::Invalid, "the body ended early").fix("send it whole")
        }
    })?;
    String::from_utf8(read.to_bytes().into()).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        Problem::new(Kind::Invalid, format!("the body is not UTF-8 from byte {at} on"))
            .fix("encode it as UTF-8")
    })
}

/// The pairs of a query. A key that is not `known`, or comes twice, is refused.
pub(crate) fn query(uri: &Uri, known: &[&str]) -> Result<Vec<(String, String)>, Problem> {
    let pairs = axum::extract::Query::<Vec<(String, String)>>::try_from_uri(uri)
        .map_err(|_| Problem::invalid("query", uri.query().unwrap_or_default(), "cannot be read"))?
        .0;
    for (i, (key, _)) in pairs.iter().enumerate() {
        if !known.contains(&key.as_str()) {
            let fix = input::meant(key, known.iter().copied()).map_or_else(
                || format!("use {}", known.join(", ")),
                |word| format!("did you mean `{word}`?"),
            );
            return Err(Problem::invalid(key.as_str(), key, "is not a key of this query").fix(fix));
        }
        if pairs.iter().take(i).any(|(earlier, _)| earlier == key) {
            return Err(Problem::invalid(key.as_str(), key, "is given twice").fix("give it once"));
        }
    }
    Ok(pairs)
}

/// `true` or `false`.
pub(crate) fn flag(field: &str, text: &str) -> Result<bool, Problem> {
    text.parse()
        .map_err(|_| Problem::invalid(field, text, "is not a choice").fix("use `true` or `false`"))
}

#[cfg(test)]
mod tests {
    use futures_util::stream;

    use super::*;

    #[tokio::test]
    async fn a_body_that_never_ends_is_refused() {
        let endless = stream::pending::<Result<Vec<u8>, std::io::Error>>();
        tokio::time::pause();
        let problem = text(Request::new(Body::from_stream(endless))).await.expect_err("no end");
        assert!(problem.message.contains("30s"), "{problem}");
    }
}
