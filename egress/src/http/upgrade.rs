//! The one upgrade that is let through: a WebSocket handshake (RFC 6455, section 4), and whether the
//! far side has answered this one. Pure.
//!
//! Whatever else asks for another protocol (`h2c`, TLS) is stripped like any field of one hop.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use http::header::{
    CONNECTION, CONTENT_LENGTH, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_VERSION, TE,
    TRANSFER_ENCODING, UPGRADE,
};
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Version, response};
use sha1::{Digest, Sha1};

use crate::http::head::tokens;

/// What a server that knows the protocol adds to the key (RFC 6455, section 1.3).
const GUID: &[u8] = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11";

/// A handshake that was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Handshake {
    /// What a server that agrees says.
    accept: String,
}

impl Handshake {
    /// The handshake a head asks for, if it asks for one and for nothing else, and by the letter.
    pub(super) fn of(head: &Parts) -> Option<Self> {
        let fields = &head.headers;
        let key = one(fields, &SEC_WEBSOCKET_KEY)?;
        let by_the_letter = head.method == Method::GET
            && head.version == Version::HTTP_11
            && switches(fields)
            && one(fields, &SEC_WEBSOCKET_VERSION)? == "13"
            && !fields.contains_key(CONTENT_LENGTH)
            && !fields.contains_key(TRANSFER_ENCODING)
            && BASE64_STANDARD.decode(key).is_ok_and(|nonce| nonce.len() == 16);
        by_the_letter.then(|| {
            let digest = Sha1::new().chain_update(key).chain_update(GUID).finalize();
            Self { accept: BASE64_STANDARD.encode(digest) }
        })
    }

    /// Whether a response agrees to this handshake.
    pub(super) fn is_accepted(&self, answer: &response::Parts) -> bool {
        answer.status == StatusCode::SWITCHING_PROTOCOLS
            && switches(&answer.headers)
            && one(&answer.headers, &SEC_WEBSOCKET_ACCEPT) == Some(&self.accept)
    }
}

/// Writes the fields of this hop anew, of a handshake or its answer.
pub(super) fn ask(fields: &mut HeaderMap) {
    fields.remove(CONTENT_LENGTH);
    fields.remove(TE);
    fields.insert(UPGRADE, HeaderValue::from_static("websocket"));
    fields.insert(CONNECTION, HeaderValue::from_static("upgrade"));
}

/// Whether these fields say `websocket` and no other protocol.
fn switches(fields: &HeaderMap) -> bool {
    one(fields, &UPGRADE).is_some_and(|protocol| protocol.eq_ignore_ascii_case("websocket"))
        && tokens(fields, &CONNECTION).any(|token| token == "upgrade")
}

/// The value of a field that is there once.
fn one<'a>(fields: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    let mut values = fields.get_all(name).iter();
    let value = values.next()?.to_str().ok()?;
    values.next().is_none().then_some(value)
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    const FIELDS: [(&str, &str); 4] = [
        ("upgrade", "WebSocket"),
        ("connection", "keep-alive, Upgrade"),
        ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
        ("sec-websocket-version", "13"),
    ];

    fn head(fields: &[(&str, &str)]) -> Parts {
        let request = Request::builder().method("GET").uri("/chat");
        let request =
            fields.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        request.body(()).expect("a request").into_parts().0
    }

    #[test]
    fn the_example_of_the_standard_is_a_handshake_and_its_answer_is_accepted() {
        let handshake = Handshake::of(&head(&FIELDS)).expect("a handshake");
        let answer = |status: u16, fields: &[(&str, &str)]| {
            let answer = http::Response::builder().status(status);
            let answer =
                fields.iter().fold(answer, |answer, (name, value)| answer.header(*name, *value));
            answer.body(()).expect("an answer").into_parts().0
        };
        let accept = ("sec-websocket-accept", "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
        let other = ("sec-websocket-accept", "c3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
        let good = [FIELDS[0], FIELDS[1], accept];
        assert!(handshake.is_accepted(&answer(101, &good)));
        assert!(!handshake.is_accepted(&answer(200, &good)));
        assert!(!handshake.is_accepted(&answer(101, &[FIELDS[0], FIELDS[1], other])));
        assert!(!handshake.is_accepted(&answer(101, &[FIELDS[1], accept])));
        assert!(!handshake.is_accepted(&answer(101, &[FIELDS[0], accept])));
    }

    #[test]
    fn what_is_not_exactly_a_handshake_is_none() {
        for (at, instead) in [
            (0, ("upgrade", "h2c")),
            (0, ("upgrade", "websocket, h2c")),
            (1, ("connection", "keep-alive")),
            (2, ("sec-websocket-key", "c2hvcnQ=")),
            (2, ("sec-websocket-key", "not base64")),
            (3, ("sec-websocket-version", "8")),
        ] {
            let mut fields = FIELDS;
            fields[at] = instead;
            assert_eq!(Handshake::of(&head(&fields)), None, "{instead:?}");
        }
        for more in
            [("upgrade", "h2c"), ("sec-websocket-key", FIELDS[2].1), ("content-length", "0")]
        {
            assert_eq!(Handshake::of(&head(&[&FIELDS[..], &[more]].concat())), None, "{more:?}");
        }
        let mut post = head(&FIELDS);
        post.method = Method::POST;
        assert_eq!(Handshake::of(&post), None);
    }
}
