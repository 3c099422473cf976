//! What the head of a request claims, and the head that is sent for it. Pure.
//!
//! What was judged is what is sent: target, authority and framing are written anew from the parsed
//! form; fields that speak to the next hop only are left out (RFC 9110, section 7.6.1).

use std::net::SocketAddr;

use dns::Pinned;
use http::header::{
    CONNECTION, CONTENT_LENGTH, EXPECT, HOST, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE,
    TRANSFER_ENCODING, UPGRADE,
};
use http::request::Parts;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, Version};
use policy::name::{Authority, AuthorityHost};
use policy::{Code, canonical_path};

use crate::flows::Basis;
use crate::refuse;

/// The port of `http` (RFC 9110, section 4.2.1).
const HTTP: u16 = 80;

/// Fields of one hop, whatever `connection` says.
const HOP: [HeaderName; 9] = [
    CONNECTION,
    HeaderName::from_static("proxy-connection"),
    HeaderName::from_static("keep-alive"),
    TE,
    TRANSFER_ENCODING,
    UPGRADE,
    HeaderName::from_static("http2-settings"),
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
];

/// Fields that `connection` cannot name away: without them the message means something else.
const END_TO_END: [&str; 12] = [
    "authorization",
    "cache-control",
    "content-encoding",
    "content-length",
    "content-range",
    "content-type",
    "cookie",
    "host",
    "origin",
    "range",
    "set-cookie",
    "trailer",
];

/// Why a head cannot be passed on, whatever the policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fault {
    pub(super) code: Code,
    pub(super) status: StatusCode,
    pub(super) detail: &'static str,
}

/// Whom a request is for, and what of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Claim {
    pub(super) host: AuthorityHost,
    /// Without the query; canonical where there is such a form. One that servers may read in more
    /// than one way is judged as that, and sent as it came.
    pub(super) path: String,
}

impl Claim {
    /// Reads the head of a request that came on a connection to `destination`.
    pub(super) fn read(head: &Parts, destination: SocketAddr) -> Result<Self, Fault> {
        if head.method == Method::CONNECT || head.method == Method::TRACE {
            let detail = "this method is not passed on";
            return Err(Fault {
                status: StatusCode::METHOD_NOT_ALLOWED,
                ..fault(Code::Method, detail)
            });
        }
        framing(&head.headers)?;
        let authority = authority(&head.uri, &head.headers)?;
        let port_differs = authority.port.is_some_and(|port| port != destination.port());
        let address_differs = match authority.host {
            AuthorityHost::Address(address) => address != destination.ip(),
            AuthorityHost::Name(_) => false,
        };
        if port_differs || address_differs {
            return Err(fault(
                Code::NameMismatch,
                "the authority is not where the connection goes",
            ));
        }
        let path = head.uri.path();
        let path = canonical_path(path).unwrap_or_else(|| path.to_owned());
        Ok(Self { host: authority.host, path })
    }

    /// What it is judged by. For an address that is what bytes without a name are judged by: the names
    /// that the sandbox was `told` for it.
    pub(super) fn basis(&self, method: &Method, told: impl FnOnce() -> Pinned) -> Basis {
        match &self.host {
            AuthorityHost::Name(name) => Basis::Request {
                authority: name.clone(),
                method: method.as_str().to_owned(),
                path: self.path.clone(),
            },
            AuthorityHost::Address(_) => Basis::Pinned(told()),
        }
    }

    /// What it is judged by once more when it asks for another protocol.
    pub(super) fn upgrade(&self, told: impl FnOnce() -> Pinned) -> Basis {
        match &self.host {
            AuthorityHost::Name(name) => Basis::Upgrade { authority: name.clone() },
            AuthorityHost::Address(_) => Basis::Pinned(told()),
        }
    }

    /// The head to send, in origin form (RFC 9112, section 3.2.1).
    pub(super) fn outgoing(&self, mut head: Parts, port: u16) -> Result<Parts, Fault> {
        let target = match head.uri.query() {
            Some(query) => format!("{}?{query}", self.path),
            None => self.path.clone(),
        };
        let target = PathAndQuery::try_from(target)
            .map_err(|_| fault(Code::Path, "the path is not one that can be sent"))?;
        let host = match &self.host {
            AuthorityHost::Name(name) => name.to_string(),
            AuthorityHost::Address(address) => {
                SocketAddr::new(*address, HTTP).to_string().trim_end_matches(":80").to_owned()
            }
        };
        let host = if port == HTTP { host } else { format!("{host}:{port}") };
        let host = HeaderValue::try_from(host)
            .map_err(|_| fault(Code::BadName, "the host is not one that can be sent"))?;
        let trailers = tokens(&head.headers, &TE).any(|token| token == "trailers");
        // The one coding that is read (`framing`). Said again, because a body without a length is
        // otherwise taken for none on GET and HEAD.
        let chunked = head.headers.contains_key(TRANSFER_ENCODING);
        strip(&mut head.headers);
        // Answered by us, once the body is wanted (RFC 9110, section 10.1.1).
        head.headers.remove(EXPECT);
        head.headers.insert(HOST, host);
        if chunked {
            head.headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
        }
        if trailers {
            head.headers.insert(TE, HeaderValue::from_static("trailers"));
            head.headers.insert(CONNECTION, HeaderValue::from_static("te"));
        }
        head.uri = Uri::from(target);
        head.version = Version::HTTP_11;
        Ok(head)
    }
}

/// Removes what is meant for the next hop.
pub(super) fn strip(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = tokens(headers, &CONNECTION)
        .filter(|token| !END_TO_END.contains(&token.as_str()))
        .filter_map(|token| HeaderName::try_from(token).ok())
        .collect();
    for name in named.iter().chain(&HOP) {
        headers.remove(name);
    }
}

/// Whether an answer says once at most how long it is. A far side that says it twice would leave it
/// to the guest which to believe.
pub(super) fn has_one_length(headers: &HeaderMap) -> bool {
    let said = |name| headers.get_all(name).iter().count();
    said(CONTENT_LENGTH) + said(TRANSFER_ENCODING) <= 1
}

/// Exactly one host, and the same in the target where it stands there too (RFC 9112, section 3.2).
fn authority(uri: &Uri, headers: &HeaderMap) -> Result<Authority, Fault> {
    let mut hosts = headers.get_all(HOST).iter();
    let (host, more) = (hosts.next(), hosts.next());
    if more.is_some() {
        return Err(fault(Code::Undecidable, "more than one host field"));
    }
    let host = host.map(HeaderValue::as_bytes).unwrap_or_default();
    if host.is_empty() {
        return Err(fault(Code::NoName, "no host field"));
    }
    let bad = fault(Code::BadName, "the host is neither a name nor an address");
    let host = std::str::from_utf8(host).map_err(|_| bad)?;
    let host = Authority::parse(host).map_err(|_| bad)?;
    if let Some(target) = uri.authority() {
        let target = Authority::parse(target.as_str()).map_err(|_| bad)?;
        let whole = |a: &Authority| (a.host.clone(), a.port.unwrap_or(HTTP));
        if uri.scheme_str() != Some("http") {
            return Err(fault(Code::Protocol, "only http is spoken in clear"));
        }
        if whole(&target) != whole(&host) {
            return Err(fault(Code::NameMismatch, "the target and the host field differ"));
        }
    }
    Ok(host)
}

/// One way to find the end of the body (RFC 9112, section 6.3), or none.
fn framing(headers: &HeaderMap) -> Result<(), Fault> {
    let lengths = headers.get_all(CONTENT_LENGTH).iter().count();
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    let chunked = match (codings.next(), codings.next()) {
        (None, _) => false,
        (Some(one), None) if one.as_bytes().eq_ignore_ascii_case(b"chunked") => true,
        _ => return Err(fault(Code::Undecidable, "a transfer coding other than chunked")),
    };
    if lengths > 1 || (chunked && lengths > 0) {
        return Err(fault(Code::Undecidable, "the length of the body is said twice"));
    }
    Ok(())
}

/// The comma-separated tokens of all fields of a name, in lower case.
pub(super) fn tokens(headers: &HeaderMap, name: &HeaderName) -> impl Iterator<Item = String> {
    headers
        .get_all(name)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(|token| token.trim().to_ascii_lowercase())
}

/// A fault of the guest's, unless the code has a status of its own.
fn fault(code: Code, detail: &'static str) -> Fault {
    let status = match code {
        Code::NoName | Code::BadName | Code::Undecidable | Code::Protocol => {
            StatusCode::BAD_REQUEST
        }
        code => refuse::status(code),
    };
    Fault { code, status, detail }
}

#[cfg(test)]
mod tests {
    use http::Request;
    use policy::Host;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_sent_claims_what_was_judged(
            host in "[a-zA-Z0-9._:\\[\\]-]{0,24}",
            target in "(http://[a-z.:0-9]{1,12})?/[!-~]{0,32}",
            hop in "[!-~ ]{0,24}",
        ) {
            let request = Request::builder().uri(&target).header("host", &host).header("connection", &hop);
            let Ok(request) = request.body(()) else { return Ok(()) };
            let (head, ()) = request.into_parts();
            let destination = SocketAddr::from(([203, 0, 113, 5], 80));
            let Ok(claim) = Claim::read(&head, destination) else { return Ok(()) };
            let sent = claim.outgoing(head, 80).expect("what was read can be sent");
            prop_assert!(sent.uri.authority().is_none());
            prop_assert_eq!(Claim::read(&sent, destination), Ok(claim));
        }
    }

    fn head(method: &str, target: &str, fields: &[(&str, &str)]) -> Parts {
        let mut request = Request::builder().method(method).uri(target);
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        request.body(()).expect("a request").into_parts().0
    }

    fn read(target: &str, fields: &[(&str, &str)]) -> Result<Claim, Code> {
        let destination = SocketAddr::from(([203, 0, 113, 5], 80));
        Claim::read(&head("GET", target, fields), destination).map_err(|fault| fault.code)
    }

    #[test]
    fn a_request_has_exactly_one_authority() {
        let claim = read("/a", &[("host", "API.example.com:80")]).expect("a claim");
        assert_eq!(
            claim.basis(&Method::GET, Pinned::default),
            Basis::Request {
                authority: Host::parse("api.example.com").expect("a name"),
                method: "GET".to_owned(),
                path: "/a".to_owned(),
            }
        );
        assert_eq!(read("/", &[]), Err(Code::NoName));
        assert_eq!(read("/", &[("host", "")]), Err(Code::NoName));
        assert_eq!(
            read("/", &[("host", "a.example"), ("host", "a.example")]),
            Err(Code::Undecidable)
        );
        for bad in ["a.example, b.example", "u@a.example", "a b", "a.example:99999", "a.example:"] {
            assert_eq!(read("/", &[("host", bad)]), Err(Code::BadName), "{bad}");
        }
    }

    #[test]
    fn the_target_and_the_host_field_must_agree() {
        let read = |target, host| read(target, &[("host", host)]).map(|claim| claim.path);
        assert_eq!(read("http://a.example/x", "a.example"), Ok("/x".to_owned()));
        assert_eq!(read("http://a.example:80/x", "A.EXAMPLE"), Ok("/x".to_owned()));
        assert_eq!(read("http://b.example/x", "a.example"), Err(Code::NameMismatch));
        assert_eq!(read("http://a.example:81/x", "a.example"), Err(Code::NameMismatch));
        assert_eq!(read("https://a.example/x", "a.example"), Err(Code::Protocol));
        assert_eq!(read("http://u@a.example/x", "a.example"), Err(Code::BadName));
    }

    #[test]
    fn an_authority_elsewhere_than_the_connection_is_a_mismatch() {
        assert_eq!(read("/", &[("host", "a.example:8080")]), Err(Code::NameMismatch));
        assert_eq!(read("/", &[("host", "203.0.113.6")]), Err(Code::NameMismatch));
        let claim = read("/", &[("host", "203.0.113.5")]).expect("a claim");
        let names = vec![Host::parse("a.example").expect("a name")];
        let told = || Pinned { names: names.clone(), all: true };
        assert_eq!(claim.basis(&Method::GET, told), Basis::Pinned(told()));
        assert_eq!(claim.upgrade(told), Basis::Pinned(told()));
    }

    #[test]
    fn ambiguous_framing_is_refused() {
        let with = |fields: &[(&'static str, &'static str)]| {
            read("/", &[&[("host", "a.example")], fields].concat()).map(|_| ())
        };
        assert_eq!(with(&[("transfer-encoding", "Chunked")]), Ok(()));
        assert_eq!(with(&[("content-length", "5")]), Ok(()));
        for bad in [
            &[("transfer-encoding", "chunked"), ("content-length", "5")][..],
            &[("transfer-encoding", "gzip, chunked")],
            &[("transfer-encoding", "chunked"), ("transfer-encoding", "chunked")],
            &[("transfer-encoding", "identity")],
            &[("content-length", "5"), ("content-length", "5")],
        ] {
            assert_eq!(with(bad), Err(Code::Undecidable), "{bad:?}");
        }
    }

    #[test]
    fn connect_and_trace_are_not_passed_on() {
        for (method, target) in [("CONNECT", "a.example:443"), ("TRACE", "/")] {
            let head = head(method, target, &[("host", "a.example")]);
            let fault = Claim::read(&head, ([203, 0, 113, 5], 80).into()).expect_err(method);
            assert_eq!(fault.status, StatusCode::METHOD_NOT_ALLOWED);
        }
    }

    #[test]
    fn what_is_sent_is_written_anew() {
        let fields = [
            ("host", "A.Example"),
            ("connection", "x-hop, Authorization, upgrade"),
            ("x-hop", "1"),
            ("authorization", "Bearer t"),
            ("upgrade", "websocket"),
            ("te", "trailers, deflate"),
            ("expect", "100-continue"),
            ("proxy-authorization", "Basic x"),
            ("x-kept", "2"),
        ];
        let head = head("GET", "http://a.example/x/../%61?q=%20", &fields);
        let claim = Claim::read(&head, ([203, 0, 113, 5], 80).into()).expect("a claim");
        let sent = claim.outgoing(head, 8080).expect("a head");
        assert_eq!(sent.uri, "/a?q=%20");
        assert_eq!(sent.headers[HOST], "a.example:8080");
        assert_eq!(
            (&sent.headers[TE], &sent.headers[CONNECTION]),
            (&"trailers".parse().expect("v"), &"te".parse().expect("v"))
        );
        assert!(sent.headers.contains_key("authorization") && sent.headers.contains_key("x-kept"));
        for gone in ["x-hop", "upgrade", "expect", "proxy-authorization"] {
            assert!(!sent.headers.contains_key(gone), "{gone}");
        }
    }
}
