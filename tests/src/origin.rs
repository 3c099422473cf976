//! Everything that listens on the internet of a world: HTTP and HTTPS for any name on any address,
//! a server that speaks first, an echo. Each remembers who came and what was said.
//!
//! The same process answers at the addresses of honest origins, of the attacker and of the metadata
//! service, so a request that got through where it should not is seen with all its headers.

use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::header::HeaderValue;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode, Version};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::server::Acceptor;
use sha2::{Digest, Sha256};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::spawn_blocking;
use tokio_rustls::LazyConfigAcceptor;

use crate::ca::Authority;

/// Ports of the origins, on every address of the internet.
pub mod port {
    /// Clear-text HTTP/1.1.
    pub const HTTP: u16 = 80;
    /// HTTPS.
    pub const HTTPS: u16 = 443;
    /// A second HTTP port.
    pub const HTTP_ALT: u16 = 8080;
    /// A second HTTPS port.
    pub const HTTPS_ALT: u16 = 8443;
    /// Echoes what it gets; answers an end of input with its own.
    pub const ECHO: u16 = 7;
    /// Speaks first, like a mail server or a database: [`super::GREETING`], then echoes.
    pub const SERVER_FIRST: u16 = 5432;
}

/// Between two pieces of what is sent in pieces.
pub const PAUSE: Duration = Duration::from_millis(2);

/// What `/pieces` sends, each of these by itself, as a stream of events is sent.
const PIECES: [&[u8]; 4] = [b"data: 1\n\n", b"data: 2\n\n", b"data: 3\n\n", b"data: 4\n\n"];

/// What stands for a folder of served files.
const INDEX: &str = "index.html";

/// How the label of a host begins that speaks HTTP/2, too, to who offers it.
pub const H2: &str = "h2-";

/// What the server on [`port::SERVER_FIRST`] says first.
pub const GREETING: &[u8] = b"READY\r\n";

/// One request that arrived.
#[derive(Clone, Debug)]
pub struct Arrival {
    /// Who it came from, as the origin saw it.
    pub peer: SocketAddr,
    /// The address it came to.
    pub local: SocketAddr,
    /// The name of the TLS handshake, if there was one.
    pub sni: Option<String>,
    /// The `host` header.
    pub host: String,
    /// The method.
    pub method: String,
    /// Target as sent: path and query.
    pub target: String,
    /// All header fields, in order, names in lower case.
    pub headers: Vec<(String, String)>,
}

/// One TCP connection that arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connection {
    /// Who it came from.
    pub peer: SocketAddr,
    /// The address it came to.
    pub local: SocketAddr,
}

/// The memory of all origins, and the files they serve. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Origin {
    requests: Arc<Mutex<Vec<Arrival>>>,
    connections: Arc<Mutex<Vec<Connection>>>,
    files: Arc<Mutex<HashMap<String, PathBuf>>>,
}

impl Origin {
    /// The requests so far that `wanted` picks.
    ///
    /// # Panics
    /// When an origin panicked.
    pub fn requests(&self, wanted: impl Fn(&Arrival) -> bool) -> Vec<Arrival> {
        self.requests.lock().expect("requests").iter().filter(|r| wanted(r)).cloned().collect()
    }

    /// The connections so far to this address.
    ///
    /// # Panics
    /// When an origin panicked.
    #[must_use]
    pub fn connections(&self, to: impl Into<IpAddr>) -> Vec<Connection> {
        let to = to.into();
        let connections = self.connections.lock().expect("connections");
        connections.iter().filter(|c| c.local.ip() == to).copied().collect()
    }

    /// Serves the files below `directory` for this host.
    ///
    /// # Panics
    /// When an origin panicked.
    pub fn serve_files(&self, host: &str, directory: PathBuf) {
        self.files.lock().expect("files").insert(host.to_owned(), directory);
    }

    /// Serves all ports of every address of the calling thread's namespace; ends with its runtime.
    ///
    /// # Errors
    /// When a port cannot be bound.
    pub async fn serve(self, authority: &Authority) -> io::Result<()> {
        let mut two = authority.server();
        two.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        let tls = (Arc::new(authority.server()), Arc::new(two));
        for number in [port::HTTP, port::HTTP_ALT] {
            self.clone()
                .listen(number, |origin, stream, way| async move {
                    origin.speak_http(stream, way, None, false).await;
                })
                .await?;
        }
        for number in [port::HTTPS, port::HTTPS_ALT] {
            let tls = tls.clone();
            self.clone()
                .listen(number, move |origin, stream, way| {
                    let tls = tls.clone();
                    async move {
                        let hello = LazyConfigAcceptor::new(Acceptor::default(), stream).await;
                        let Ok(hello) = hello else { return };
                        let sni = hello.client_hello().server_name().map(str::to_owned);
                        let two = sni.as_deref().is_some_and(|name| name.starts_with(H2));
                        let config = if two { &tls.1 } else { &tls.0 };
                        let Ok(stream) = hello.into_stream(config.clone()).await else { return };
                        let two = stream.get_ref().1.alpn_protocol() == Some(b"h2");
                        origin.speak_http(stream, way, sni, two).await;
                    }
                })
                .await?;
        }
        self.clone().listen(port::ECHO, |_, stream, _| echo(stream)).await?;
        self.listen(port::SERVER_FIRST, |_, mut stream, _| async move {
            if stream.write_all(GREETING).await.is_ok() {
                echo(stream).await;
            }
        })
        .await
    }

    async fn listen<F, S>(self, number: u16, serve: F) -> io::Result<()>
    where
        F: Fn(Self, TcpStream, Connection) -> S + Clone + Send + 'static,
        S: Future<Output = ()> + Send + 'static,
    {
        let v4 = TcpListener::bind((Ipv4Addr::UNSPECIFIED, number)).await?;
        for listener in [v4, v6_listener(number)?] {
            let (origin, serve) = (self.clone(), serve.clone());
            tokio::spawn(async move {
                while let Ok((stream, peer)) = listener.accept().await {
                    let Ok(local) = stream.local_addr() else { continue };
                    // As servers do: what waits for a timer here is not our own.
                    let _ = stream.set_nodelay(true);
                    let way = Connection { peer, local };
                    origin.connections.lock().expect("connections").push(way);
                    tokio::spawn(serve(origin.clone(), stream, way));
                }
            });
        }
        Ok(())
    }

    async fn speak_http<S>(self, stream: S, way: Connection, sni: Option<String>, two: bool)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let service = service_fn(move |request| {
            let (origin, sni) = (self.clone(), sni.clone());
            async move { Ok::<_, Infallible>(origin.respond(request, way, sni).await) }
        });
        let stream = TokioIo::new(stream);
        let _ = if two {
            let server = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
            server.serve_connection(stream, service).await
        } else {
            hyper::server::conn::http1::Builder::new().serve_connection(stream, service).await
        };
    }

    async fn respond(
        &self,
        request: Request<Incoming>,
        way: Connection,
        sni: Option<String>,
    ) -> Response<BoxBody<Bytes, Infallible>> {
        let in_pieces = request.uri().path() == "/pieces";
        let whole = self.whole(request, way, sni).await;
        if in_pieces { answer_in_pieces() } else { whole.map(BodyExt::boxed) }
    }

    async fn whole(
        &self,
        request: Request<Incoming>,
        way: Connection,
        sni: Option<String>,
    ) -> Response<Full<Bytes>> {
        let (head, body) = request.into_parts();
        let text = |value: &HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
        let authority = || head.uri.authority().map(ToString::to_string);
        let host = head.headers.get("host").map(text).or_else(authority).unwrap_or_default();
        self.requests.lock().expect("requests").push(Arrival {
            peer: way.peer,
            local: way.local,
            sni,
            host: host.clone(),
            method: head.method.to_string(),
            target: match head.version {
                Version::HTTP_2 => head.uri.path().to_owned(),
                _ => head.uri.to_string(),
            },
            headers: head.headers.iter().map(|(n, v)| (n.to_string(), text(v))).collect(),
        });
        let path = head.uri.path();
        if let Some(count) = path.strip_prefix("/bytes/").and_then(|n| n.parse().ok()) {
            let bytes = spawn_blocking(move || pattern(count)).await.unwrap_or_default();
            return Response::new(Full::new(bytes.into()));
        }
        if path == "/sum" {
            let body = body.collect().await.map(http_body_util::Collected::to_bytes);
            let sum = spawn_blocking(move || sum(&body.unwrap_or_default())).await;
            return Response::new(Full::new(sum.unwrap_or_default().into()));
        }
        let name = host.split(':').next().unwrap_or_default().to_owned();
        let files = self.files.lock().expect("files").get(&name).cloned();
        if let Some(directory) = files {
            let mut file = directory.join(path.trim_start_matches('/'));
            if file.is_dir() {
                file.push(INDEX);
            }
            let mut response = Response::new(Full::default());
            match std::fs::read(&file) {
                Ok(content) => *response.body_mut() = Full::new(content.into()),
                Err(_) => *response.status_mut() = StatusCode::NOT_FOUND,
            }
            if file.ends_with(INDEX) {
                let html = HeaderValue::from_static("text/html");
                response.headers_mut().insert("content-type", html);
            }
            return response;
        }
        let seen = serde_json::json!({ "peer": way.peer, "local": way.local, "host": host });
        Response::new(Full::new(format!("{seen}\n").into()))
    }
}

fn answer_in_pieces() -> Response<BoxBody<Bytes, Infallible>> {
    let each = stream::unfold(PIECES.into_iter(), |mut left| async move {
        let piece = left.next()?;
        tokio::time::sleep(PAUSE).await;
        Some((Ok(Frame::data(Bytes::from_static(piece))), left))
    });
    let mut response = Response::new(StreamBody::new(each).boxed());
    response.headers_mut().insert("content-length", pieces().len().into());
    response
}

/// All that `/pieces` sends.
#[must_use]
pub fn pieces() -> Vec<u8> {
    PIECES.concat()
}

/// Listens by IPv6 alone, beside a listener by IPv4.
fn v6_listener(number: u16) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::IPV6, Type::STREAM, Some(Protocol::TCP))?;
    socket.set_only_v6(true)?;
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&SocketAddr::from((Ipv6Addr::UNSPECIFIED, number)).into())?;
    socket.listen(1024)?;
    TcpListener::from_std(socket.into())
}

async fn echo(mut stream: TcpStream) {
    let mut buffer = vec![0; 1 << 16];
    while let Ok(length) = stream.read(&mut buffer).await {
        if length == 0 || stream.write_all(&buffer[..length]).await.is_err() {
            break;
        }
    }
    let _ = stream.shutdown().await;
}

/// `count` bytes that do not repeat within 64 KiB blocks: what `/bytes/<count>` sends.
#[must_use]
pub fn pattern(count: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut bytes = Vec::with_capacity(count + 8);
    while bytes.len() < count {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(count);
    bytes
}

/// SHA-256 in hexadecimal: what `/sum` answers.
#[must_use]
pub fn sum(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    Sha256::digest(bytes).iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}
