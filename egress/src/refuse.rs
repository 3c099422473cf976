//! How a refusal reaches the guest: a TLS alert, an HTTP response, or a reset. Always at once.
//!
//! A refusal is a value with a stable code; the same code goes to the guest and to the audit.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT, CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};
use http_body_util::Full;
use policy::audit::{AuditRecord, Outcome};
use policy::{Code, Denial, Revision};
use serde_json::json;
use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::attempts::Attempt;
use crate::side::GuestSide;
use crate::sniff;

/// The response header that carries the reason code.
const POSTERN_DENY: HeaderName = HeaderName::from_static("postern-deny");
/// How long a refused guest may take to close, and how much it may still send.
const DRAIN_TIME: Duration = Duration::from_secs(1);
const DRAIN_BYTES: usize = 64 * 1024;

/// Why something does not go out.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    /// The decision.
    pub(crate) denial: Denial,
    /// What went wrong, where something did.
    pub(crate) detail: Option<String>,
    /// From where and to where a packet had left, where one had.
    pub(crate) tried: Option<Box<Attempt>>,
}

impl Refusal {
    /// A refusal for a reason that is not a rule's.
    pub(crate) fn because(code: Code, revision: Revision) -> Self {
        Denial::because(code, revision).into()
    }

    /// The same, with what went wrong.
    pub(crate) fn detailed(mut self, detail: impl ToString) -> Self {
        self.detail = Some(policy::audit::shown(&detail.to_string()));
        self
    }

    /// The same, after a packet had left.
    pub(crate) fn after(mut self, attempt: impl Into<Option<Attempt>>) -> Self {
        self.tried = attempt.into().map(Box::new);
        self
    }

    /// The same decision about a flow that was open before it.
    pub(crate) fn changed(denial: Denial) -> Self {
        Denial { code: Code::PolicyChanged, ..denial }.into()
    }

    /// Its code.
    pub(crate) fn code(&self) -> Code {
        self.denial.code
    }

    /// Whether it was denied, or allowed and could not be done. What was denied after a packet had left was
    /// allowed when that did.
    pub(crate) fn outcome(&self) -> Outcome {
        match self.code() {
            _ if self.tried.is_some() => Outcome::Fail,
            Code::Unresolvable
            | Code::UpstreamUnreachable
            | Code::UpstreamUntrusted
            | Code::EgressIpUnavailable => Outcome::Fail,
            _ => Outcome::Deny,
        }
    }
}

impl From<Denial> for Refusal {
    fn from(denial: Denial) -> Self {
        Self { denial, detail: None, tried: None }
    }
}

/// Writes a refusal into a record.
pub(crate) fn note(record: &mut AuditRecord, refusal: &Refusal) {
    let Denial { code, layer, rule, revision } = &refusal.denial;
    record.code = Some(*code);
    record.layer = layer.map(|layer| layer.as_str().to_owned());
    record.rule = rule.as_ref().map(ToString::to_string);
    record.revision = Some(*revision);
    if refusal.detail.is_some() {
        record.detail.clone_from(&refusal.detail);
    }
    if let Some(tried) = &refusal.tried {
        (record.egress, record.dialed) = (Some(tried.egress), Some(tried.remote));
    }
}

/// Ends a connection with a reset, and throws away what is still queued on it.
pub(crate) fn reset(stream: TcpStream) {
    let _ = SockRef::from(&stream).set_linger(Some(Duration::ZERO));
}

/// Tells a TLS client with a fatal alert `access_denied` (RFC 8446, section 6.2), and waits for it
/// to close. False when the guest did not close, and must be reset.
pub(crate) async fn alert(stream: &mut GuestSide) -> bool {
    let alert = sniff::alert_access_denied();
    let gate = Arc::clone(stream.gate());
    let told = gate.within(DRAIN_TIME, stream.write_all(&alert)).await;
    matches!(told, Some(Ok(()))) && linger(stream).await
}

/// Says that this was the last of our answers and waits for the guest to close: a close of ours with
/// unread bytes would be a reset, which overtakes the answer. False when it did not close, or did not
/// acknowledge the answer, and must be reset: the kernel would keep what it was not sent.
pub(crate) async fn linger(stream: &mut GuestSide) -> bool {
    let gate = Arc::clone(stream.gate());
    let ended = async {
        stream.shutdown().await?;
        let mut waste = [0; 2048];
        let mut drained = 0;
        while drained < DRAIN_BYTES {
            match AsyncReadExt::read(stream, &mut waste).await? {
                0 => {
                    stream.acknowledged().await;
                    return Ok(true);
                }
                n => drained += n,
            }
        }
        Ok::<_, io::Error>(false)
    };
    matches!(gate.within(DRAIN_TIME, ended).await, Some(Ok(true)))
}

/// The status that goes with a code.
pub(crate) fn status(code: Code) -> StatusCode {
    match code {
        Code::NameMismatch => StatusCode::MISDIRECTED_REQUEST,
        Code::Unresolvable | Code::UpstreamUnreachable | Code::UpstreamUntrusted => {
            StatusCode::BAD_GATEWAY
        }
        Code::EgressIpUnavailable | Code::SecretUnavailable | Code::Limit | Code::Asleep => {
            StatusCode::SERVICE_UNAVAILABLE
        }
        _ => StatusCode::FORBIDDEN,
    }
}

/// The response to a refused request: a JSON body an agent can act on, or text for a person.
pub(crate) fn response(
    refusal: &Refusal,
    status: StatusCode,
    host: &str,
    text: bool,
) -> Response<Full<Bytes>> {
    let Denial { code, layer, rule, revision } = &refusal.denial;
    let (kind, body) = if text {
        let rule = rule.as_ref().map(|rule| format!(" ({rule})")).unwrap_or_default();
        let body = format!("Refused by Postern: {code}\n{host}: {}{rule}.\n", code.meaning());
        ("text/plain; charset=utf-8", body)
    } else {
        let error = json!({"error": {
            "code": code.as_str(),
            "message": code.meaning(),
            "host": host,
            "rule": rule.as_ref().map(ToString::to_string),
            "layer": layer.map(|layer| layer.as_str()),
            "revision": revision.0,
            "docs": "docs/operator.md#troubleshooting-by-code",
        }});
        ("application/json", format!("{error}\n"))
    };
    let mut response = Response::new(Full::from(body));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(POSTERN_DENY, HeaderValue::from_static(code.as_str()));
    response
}

/// Whether an `accept` asks for text and not for JSON: a person, then.
pub(crate) fn wants_text(asked: &HeaderMap) -> bool {
    let accepts =
        |what| asked.get_all(ACCEPT).iter().any(|v| v.to_str().is_ok_and(|v| v.contains(what)));
    accepts("text/") && !accepts("json")
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    fn asking(accept: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(ACCEPT, HeaderValue::from_static(accept))])
    }

    async fn body(asked: &HeaderMap) -> (Response<()>, String) {
        let refusal = Refusal::because(Code::NoRule, Revision(7));
        let response = response(&refusal, StatusCode::FORBIDDEN, "evil.example", wants_text(asked));
        let (parts, body) = response.into_parts();
        let bytes = body.collect().await.expect("infallible").to_bytes();
        (Response::from_parts(parts, ()), String::from_utf8(bytes.to_vec()).expect("utf-8"))
    }

    #[tokio::test]
    async fn an_agent_gets_json_and_a_browser_gets_text() {
        for asked in [HeaderMap::new(), asking("*/*"), asking("text/html, application/json")] {
            let (response, body) = body(&asked).await;
            assert_eq!(response.headers()["postern-deny"], "no-rule");
            let json: serde_json::Value = serde_json::from_str(&body).expect("json");
            assert_eq!(json["error"]["code"], "no-rule");
            assert_eq!(json["error"]["host"], "evil.example");
            assert_eq!(json["error"]["revision"], 7);
        }
        let (response, body) = body(&asking("text/html,*/*;q=0.8")).await;
        assert!(response.headers()[CONTENT_TYPE].to_str().expect("ascii").starts_with("text/"));
        assert!(body.contains("no-rule") && body.contains("evil.example"), "{body}");
    }

    #[test]
    fn trouble_on_the_far_side_is_a_failure_and_a_rule_is_a_denial_unless_a_packet_had_left() {
        let outcome = |code| Refusal::because(code, Revision(0)).outcome();
        assert_eq!(outcome(Code::UpstreamUnreachable), Outcome::Fail);
        assert_eq!(outcome(Code::Rule), Outcome::Deny);
        let far = std::net::SocketAddr::from(([192, 0, 2, 1], 443));
        let tried = Attempt { egress: far, remote: far };
        let after = |code| Refusal::because(code, Revision(0)).after(tried).outcome();
        assert_eq!((after(Code::Rule), after(Code::Limit)), (Outcome::Fail, Outcome::Fail));
        assert_eq!(status(Code::NameMismatch), 421);
        assert_eq!(status(Code::Unresolvable), 502);
    }
}
