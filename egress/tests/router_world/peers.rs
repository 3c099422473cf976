//! Origins on the internet and clients in the guest: TLS, HTTP, and bytes.

use std::net::SocketAddr;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustls::pki_types::{PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// Far sides see these peers, in order.
pub(crate) type Peers = Arc<Mutex<Vec<SocketAddr>>>;

/// Both ends of TLS for a few names.
pub(crate) struct Tls {
    connector: TlsConnector,
    acceptor: TlsAcceptor,
}

impl Tls {
    pub(crate) fn new(names: &[&str]) -> Self {
        let names: Vec<String> = names.iter().map(ToString::to_string).collect();
        let made = rcgen::generate_simple_self_signed(names).expect("a certificate");
        let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).expect("a key");
        let mut roots = RootCertStore::empty();
        roots.add(made.cert.der().clone()).expect("a root");
        let client = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
        let server = ServerConfig::builder()
            .with_no_client_auth()
            .with_single_cert(vec![made.cert.der().clone()], key)
            .expect("a server");
        Self { connector: Arc::new(client).into(), acceptor: Arc::new(server).into() }
    }

    /// Speaks TLS on a connection, under a name.
    pub(crate) async fn client(
        &self,
        stream: TcpStream,
        name: &str,
    ) -> std::io::Result<TlsStream<TcpStream>> {
        let name = ServerName::try_from(name.to_owned()).expect("a name");
        self.connector.connect(name, stream).await
    }

    /// Echoes what TLS clients send.
    pub(crate) fn echo(&self, listener: TcpListener) -> Peers {
        let acceptor = self.acceptor.clone();
        serve(listener, move |stream| {
            let acceptor = acceptor.clone();
            async move {
                let Ok(stream) = acceptor.accept(stream).await else { return };
                let (mut from, mut to) = tokio::io::split(stream);
                let _ = tokio::io::copy(&mut from, &mut to).await;
                let _ = to.shutdown().await;
            }
        })
    }
}

/// Accepts, notes the peer, and serves.
pub(crate) fn serve<F: Future<Output = ()> + Send + 'static>(
    listener: TcpListener,
    with: impl Fn(TcpStream) -> F + Send + 'static,
) -> Peers {
    let peers = Peers::default();
    let seen = Arc::clone(&peers);
    tokio::spawn(async move {
        while let Ok((stream, peer)) = listener.accept().await {
            seen.lock().expect("unpoisoned").push(peer);
            tokio::spawn(with(stream));
        }
    });
    peers
}

/// Accepts whatever comes, and keeps it open.
pub(crate) fn sink(listener: TcpListener) -> Peers {
    serve(listener, |mut stream| async move {
        let mut waste = [0; 1024];
        while stream.read(&mut waste).await.is_ok_and(|n| n > 0) {}
    })
}

/// How many connections a far side has seen.
pub(crate) fn count(peers: &Peers) -> usize {
    peers.lock().expect("unpoisoned").len()
}

/// How long anything may take on a busy machine: longer than it ever stands still.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Everything a future gives, or a panic when it has not given it for [`PATIENCE`].
pub(crate) async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.expect("in time")
}

/// Waits until this holds, looked at every few milliseconds.
pub(crate) async fn until(mut holds: impl FnMut() -> bool) {
    soon(async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

/// Has the host's networks changed.
pub(crate) fn run_ip(args: &[&str]) {
    let out = Command::new("ip").args(args).output().expect("ip runs");
    assert!(out.status.success(), "ip {args:?}: {}", String::from_utf8_lossy(&out.stderr));
}
