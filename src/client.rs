//! One conversation with the daemon: a request over the unix socket, or over TCP with a token.
//!
//! Knows the shapes of answers and errors, nothing of commands or terminals.

use std::fmt;
use std::path::PathBuf;
use std::pin::Pin;
use std::str::FromStr;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};

use crate::error::Error;
use crate::problem::ErrorBody;
use crate::wire::TOML;

/// The longest line of a stream that is read, in bytes.
const LINE_LIMIT: usize = 1 << 20;

/// Where the daemon listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// Its unix socket.
    Socket(PathBuf),
    /// `host:port` over TCP.
    Tcp(String),
}

/// How to reach the daemon. Makes one connection a request.
#[derive(Clone)]
pub struct Client {
    endpoint: Endpoint,
    token: Option<String>,
}

/// What to send.
#[derive(Clone, Debug)]
pub enum Content {
    /// Nothing.
    Nothing,
    /// JSON.
    Json(Bytes),
    /// A policy as TOML.
    Toml(Bytes),
}

/// An answer that is not an error.
#[derive(Debug)]
pub struct Answer(Response<Incoming>);

impl FromStr for Endpoint {
    type Err = &'static str;

    /// Reads `http://host:port`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const WRONG: &str = "is not an address of a daemon; write `http://host:port`";
        let rest = text.strip_prefix("http://").ok_or(WRONG)?;
        let authority: http::uri::Authority =
            rest.trim_end_matches('/').parse().map_err(|_| WRONG)?;
        if authority.port_u16().is_none() || authority.as_str().contains('@') {
            return Err(WRONG);
        }
        Ok(Self::Tcp(authority.as_str().to_owned()))
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Socket(path) => path.display().fmt(f),
            Self::Tcp(authority) => write!(f, "http://{authority}"),
        }
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let token = self.token.as_ref().map(|_| "...");
        f.debug_struct("Client").field("endpoint", &self.endpoint).field("token", &token).finish()
    }
}

impl Content {
    /// A value as JSON.
    pub fn json(value: &impl Serialize) -> Result<Self, Error> {
        let text = serde_json::to_vec(value).map_err(|e| broken("preparing the request", e))?;
        Ok(Self::Json(text.into()))
    }
}

impl Client {
    /// A client of this daemon.
    #[must_use]
    pub fn new(endpoint: Endpoint, token: Option<String>) -> Self {
        Self { endpoint, token }
    }

    /// Sends a request and waits for the head of the answer; an error answer is an error.
    pub async fn send(
        &self,
        method: Method,
        path: &str,
        headers: HeaderMap,
        content: Content,
    ) -> Result<Answer, Error> {
        let request = self.request(method, path, headers, content)?;
        let mut sender = self.connect().await?;
        let answer = sender.send_request(request).await;
        let answer = answer.map_err(|e| broken("waiting for the answer", e))?;
        if answer.status().is_success() || answer.status() == StatusCode::SWITCHING_PROTOCOLS {
            return Ok(Answer(answer));
        }
        let status = answer.status();
        let text = Answer(answer).text().await?;
        match serde_json::from_str::<ErrorBody>(&text) {
            Ok(refusal) => Err(refusal.error.into()),
            Err(_) => Err(Error::Answer(format!("{status} without a reason"))),
        }
    }

    /// Asks for one JSON value.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, Error> {
        self.send(Method::GET, path, HeaderMap::new(), Content::Nothing).await?.json().await
    }

    /// Sends JSON, gets JSON.
    pub async fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T, Error> {
        let content = Content::json(body)?;
        self.send(Method::POST, path, HeaderMap::new(), content).await?.json().await
    }

    /// Sends JSON and turns the connection into a stream of this protocol.
    pub async fn upgrade(
        &self,
        path: &str,
        protocol: &'static str,
        body: &impl Serialize,
    ) -> Result<TokioIo<Upgraded>, Error> {
        let mut headers = HeaderMap::new();
        headers.insert(header::CONNECTION, header::HeaderValue::from_static("upgrade"));
        headers.insert(header::UPGRADE, header::HeaderValue::from_static(protocol));
        let answer = self.send(Method::POST, path, headers, Content::json(body)?).await?;
        if answer.0.status() != StatusCode::SWITCHING_PROTOCOLS {
            return Err(Error::Answer(format!("{} to an upgrade", answer.0.status())));
        }
        let upgraded = hyper::upgrade::on(answer.0).await;
        upgraded.map(TokioIo::new).map_err(|e| broken("upgrading the connection", e))
    }

    fn request(
        &self,
        method: Method,
        path: &str,
        headers: HeaderMap,
        content: Content,
    ) -> Result<Request<Full<Bytes>>, Error> {
        let host = match &self.endpoint {
            Endpoint::Socket(_) => "localhost",
            Endpoint::Tcp(authority) => authority,
        };
        let (kind, body) = match content {
            Content::Nothing => (None, Bytes::new()),
            Content::Json(text) => (Some("application/json"), text),
            Content::Toml(text) => (Some(TOML), text),
        };
        let mut request = Request::builder().method(method).uri(path).header(header::HOST, host);
        if let Some(kind) = kind {
            request = request.header(header::CONTENT_TYPE, kind);
        }
        if let Some(token) = &self.token {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        let mut request =
            request.body(Full::new(body)).map_err(|e| broken("preparing the request", e))?;
        request.headers_mut().extend(headers);
        Ok(request)
    }

    async fn connect(&self) -> Result<http1::SendRequest<Full<Bytes>>, Error> {
        let at = |source| Error::Connect { at: self.endpoint.to_string(), source };
        let stream: Pin<Box<dyn Stream>> = match &self.endpoint {
            Endpoint::Socket(path) => Box::pin(UnixStream::connect(path).await.map_err(at)?),
            Endpoint::Tcp(authority) => {
                #[expect(
                    clippy::disallowed_methods,
                    reason = "to the daemon, from the operator's machine: no guest's traffic"
                )]
                let stream = TcpStream::connect(authority).await.map_err(at)?;
                Box::pin(stream)
            }
        };
        let (sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|e| broken("beginning a conversation", e))?;
        // Its errors reach us through the request.
        tokio::spawn(connection.with_upgrades());
        Ok(sender)
    }
}

trait Stream: AsyncRead + AsyncWrite + Send {}
impl<T: AsyncRead + AsyncWrite + Send> Stream for T {}

impl Answer {
    /// The entity tag: for a policy, its revision.
    #[must_use]
    pub fn etag(&self) -> Option<&str> {
        self.0.headers().get(header::ETAG)?.to_str().ok()
    }

    /// The whole body as text.
    pub async fn text(self) -> Result<String, Error> {
        let body = self.0.into_body().collect().await;
        let body = body.map_err(|e| broken("reading the answer", e))?.to_bytes();
        String::from_utf8(body.into()).map_err(|e| broken("reading the answer", e))
    }

    /// The whole body as JSON.
    pub async fn json<T: DeserializeOwned>(self) -> Result<T, Error> {
        let text = self.text().await?;
        serde_json::from_str(&text).map_err(|e| broken("understanding the answer", e))
    }

    /// The body line by line, as the lines come.
    #[must_use]
    pub fn lines(self) -> Lines {
        Lines { body: self.0.into_body(), read: BytesMut::new(), ended: false }
    }
}

/// Lines of a streamed answer.
#[derive(Debug)]
pub struct Lines {
    body: Incoming,
    read: BytesMut,
    ended: bool,
}

impl Lines {
    /// The next line without its end; none when the stream has ended.
    pub async fn next(&mut self) -> Result<Option<String>, Error> {
        loop {
            if let Some(end) = self.read.iter().position(|byte| *byte == b'\n') {
                let mut line = self.read.split_to(end + 1);
                line.truncate(end);
                return Ok(Some(String::from_utf8_lossy(&line).into_owned()));
            }
            if self.ended {
                let rest = self.read.split();
                let rest = String::from_utf8_lossy(&rest).into_owned();
                return Ok(Some(rest).filter(|rest| !rest.is_empty()));
            }
            match self.body.frame().await {
                Some(Ok(frame)) => {
                    let bytes = frame.into_data().unwrap_or_default();
                    self.read.extend_from_slice(&bytes);
                }
                Some(Err(error)) => return Err(broken("reading the answer", error)),
                None => self.ended = true,
            }
            if self.read.len() > LINE_LIMIT && !self.read.contains(&b'\n') {
                return Err(Error::Answer("a line of more than 1 MiB".into()));
            }
        }
    }
}

fn broken(
    doing: &'static str,
    source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
) -> Error {
    Error::Conversation { doing, source: source.into() }
}

/// The pairs of a query that have a value, percent-encoded.
#[must_use]
pub fn query(pairs: &[(&str, &Option<String>)]) -> String {
    let given = pairs.iter().filter_map(|(key, value)| Some((key, value.as_ref()?)));
    given.map(|(key, value)| format!("{key}={}", escaped(value))).collect::<Vec<_>>().join("&")
}

/// Percent-encodes all but the unreserved characters (RFC 3986 section 2.3).
fn escaped(text: &str) -> String {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-._~".contains(byte);
    let one = |byte: u8| match plain(&byte) {
        true => char::from(byte).to_string(),
        false => format!("%{byte:02X}"),
    };
    text.bytes().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_is_named_by_http_host_and_port() {
        assert_eq!("http://10.0.0.1:7070/".parse(), Ok(Endpoint::Tcp("10.0.0.1:7070".into())));
        for bad in ["10.0.0.1:7070", "https://a:1", "http://a", "http://u@a:1", "http://"] {
            assert!(bad.parse::<Endpoint>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_token_is_never_shown() {
        let client = Client::new(Endpoint::Tcp("a:1".into()), Some("hunter2".into()));
        assert!(!format!("{client:?}").contains("hunter2"));
    }
}
