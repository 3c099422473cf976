//! "Would this pass?": a destination as a person writes it, made into the flow that is judged.
//! Pure: the answer is that of the code that decides.

use std::net::IpAddr;

use http::Uri;
use policy::explain::{Outcome, explain};
use policy::name::{Authority, AuthorityHost};
use policy::{Compiled, Evidence, Flow, Host, OwnAddresses, Protocol};

use crate::problem::Problem;
use crate::wire::{Explained, Question, Transport};

/// Judges what was asked, and tells how.
pub(crate) fn explained(
    in_force: &Compiled,
    own: &OwnAddresses,
    asked: &Question,
) -> Result<Explained, Problem> {
    let bad = |message: &str| {
        Problem::invalid("destination", &asked.destination, message)
            .fix("write `https://host/path`, `http://host/path`, `ws://host/path`, `host:port` or `address:port`")
    };
    let (scheme, rest) = match asked.destination.split_once("://") {
        Some((scheme @ ("http" | "https" | "ws" | "wss"), rest)) => (Some(scheme), rest),
        Some(_) => return Err(bad("has an unknown scheme")),
        None => (None, asked.destination.as_str()),
    };
    let (authority, tail) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    let authority = Authority::parse(authority).map_err(|error| bad(&error.to_string()))?;
    let clear = matches!(scheme, Some("http" | "ws"));
    let port = authority.port.unwrap_or(if clear { 80 } else { 443 });
    let written = tail.parse::<Uri>().ok().map(|uri| uri.path().to_owned());
    let path = asked.path.clone().or(written).unwrap_or_else(|| "/".into());
    if !path.starts_with('/') {
        return Err(Problem::invalid("path", &path, "is not a path").fix("begin it with `/`"));
    }
    let method = asked.method.as_deref().unwrap_or("GET");
    if scheme.is_some_and(|scheme| scheme.starts_with("ws")) && method != "GET" {
        return Err(Problem::invalid("method", method, "does not begin a WebSocket")
            .fix("leave it out, or ask for `http`"));
    }
    let (destination, name) = match &authority.host {
        AuthorityHost::Name(host) => (None, Some(host)),
        AuthorityHost::Address(address) => (Some(IpAddr::clone(address)), None),
    };
    let protocol = match asked.protocol {
        Transport::Tcp => Protocol::Tcp,
        Transport::Udp => Protocol::Udp,
    };
    let evidence = match (name, scheme, port) {
        (None, ..) => Evidence::Address,
        (Some(host), _, _) if protocol == Protocol::Udp => pinned(host),
        (Some(sni), Some("https" | "wss"), _) | (Some(sni), None, 443) => {
            Evidence::Tls { sni, ech: false }
        }
        (Some(authority), Some(_), _) | (Some(authority), None, 80) => {
            Evidence::Request { authority, method, path: &path }
        }
        (Some(host), None, _) => pinned(host),
    };
    let judge = |evidence| explain(in_force, &Flow { protocol, port, destination, evidence }, own);
    let mut told = judge(evidence);
    // As the router does: the request first, then what it asks for.
    if let (Some("ws"), Evidence::Request { authority, .. }) = (scheme, evidence)
        && told.verdict == Outcome::Pass
    {
        told = judge(Evidence::Upgrade(authority));
    }
    Ok(Explained {
        allowed: told.verdict == Outcome::Pass,
        explanation: serde_json::to_value(&told).unwrap_or_default(),
    })
}

/// As if the sandbox had been told this name, and no other, for where it connects to.
fn pinned(host: &Host) -> Evidence<'_> {
    Evidence::Pinned { names: std::slice::from_ref(host), all: true }
}

#[cfg(test)]
mod tests {
    use policy::{Layer, Policy, Revision};

    use super::*;

    fn ask(destination: &str, method: Option<&str>) -> Result<Explained, Problem> {
        let policy = Policy::from_toml(
            "[[rule]]\nallow = [\"api.example.com\"]\n[[rule]]\nallow = [\"db.example.com\"]\nports = [5432]\n\
             [[rule]]\nallow = [\"203.0.113.0/24\"]\nports = [9]\n\
             [[rule]]\nallow = [\"0.0.0.0/0\", \"198.51.100.0/24\"]\nports = [7]\n\
             [[rule]]\nallow = [\"web.example.com\"]\nports = [80]\nmethods = [\"GET\"]\n",
        )
        .expect("valid");
        let compiled = Compiled::new(&[(Layer::Sandbox, &policy)], Revision(1));
        let question = Question {
            destination: destination.into(),
            method: method.map(Into::into),
            path: None,
            protocol: Transport::Tcp,
        };
        let own = OwnAddresses::new(["198.51.100.9".parse().expect("address")]);
        explained(&compiled, &own, &question)
    }

    #[test]
    fn a_destination_is_judged_as_the_flow_it_would_be() {
        for (destination, method, allowed) in [
            ("https://api.example.com/", None, true),
            ("https://API.example.com./x?y#z", None, true),
            ("api.example.com", None, true),
            ("api.example.com:443", None, true),
            ("api.example.com:8443", None, false),
            ("http://api.example.com", None, true),
            ("https://other.example.com/", None, false),
            ("db.example.com:5432", None, true),
            ("203.0.113.7:9", None, true),
            ("203.0.113.7:443", None, false),
            ("8.8.8.8:7", None, true),
            ("10.2.3.4:7", None, false),
            ("127.0.0.1:7", None, false),
            ("198.51.100.7:7", None, true),
            ("198.51.100.9:7", None, false),
            ("http://web.example.com/", None, true),
            ("http://web.example.com/", Some("DELETE"), false),
            ("ws://api.example.com/chat", None, true),
            ("ws://api.example.com:8080/chat", None, false),
            ("ws://web.example.com/", None, false),
            ("ws://other.example.com/", None, false),
            ("ws://203.0.113.7:9/", None, true),
            ("wss://api.example.com/chat", Some("GET"), true),
            ("wss://web.example.com/", None, false),
        ] {
            let told = ask(destination, method).expect(destination);
            assert_eq!(told.allowed, allowed, "{destination}: {}", told.explanation);
        }
    }

    #[test]
    fn a_websocket_is_judged_as_the_stream_that_it_becomes_and_begins_with_get() {
        let told = ask("ws://web.example.com/", None).expect("asked");
        assert_eq!(told.explanation["code"], "undecidable", "{}", told.explanation);
        let told = ask("ws://api.example.com/", None).expect("asked");
        assert_eq!(told.explanation["mode"], "raw", "{}", told.explanation);
        let problem = ask("ws://api.example.com/", Some("POST")).expect_err("refused");
        assert_eq!(problem.field.as_deref(), Some("method"));
    }

    #[test]
    fn what_is_no_destination_is_refused_with_its_field() {
        for bad in ["", "ftp://a.example", "https://", "a b", "host:99999", "http://[::1"] {
            let problem = ask(bad, None).expect_err(bad);
            assert_eq!(problem.field.as_deref(), Some("destination"), "{bad}");
            assert!(problem.fix.is_some());
        }
    }
}
