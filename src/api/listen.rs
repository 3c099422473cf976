//! The listeners, and one HTTP connection after another: bounded in number, in time to the first
//! request, and ended gracefully. Who is at the other end is noted here, from the kernel; of strangers
//! there are few.

use std::convert::Infallible;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt;

use crate::api::caller::Origin;
use crate::api::strangers::{Stranger, Strangers};
use crate::config::Api as Config;
use crate::error::Error;

/// From accept, or the last answer, to the end of the next request's head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// How long open requests may take to end once the daemon stops.
const DRAIN: Duration = Duration::from_secs(5);
/// Pause after an accept that failed for want of resources.
const BACK_OFF: Duration = Duration::from_millis(50);

/// Where callers come in.
#[derive(Debug)]
#[non_exhaustive]
pub enum Listener {
    /// The unix socket.
    Unix(UnixListener),
    /// TCP.
    Tcp(TcpListener),
}

/// A place among a listener's connections, and once it is known whose it is among its tenant's, taken
/// as long as anybody holds it: an upgraded connection outlives its HTTP.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    _held: Arc<OwnedSemaphorePermit>,
    /// Over TCP: it may be anybody, until a request of it was let in.
    stranger: Option<Arc<Stranger>>,
    of_tenant: Arc<OnceLock<OwnedSemaphorePermit>>,
}

impl Place {
    /// It is known now who has it.
    pub(crate) fn known(&self) {
        if let Some(stranger) = &self.stranger {
            stranger.known();
        }
    }

    /// A whole head of a request was read.
    fn heard(&self) {
        if let Some(stranger) = &self.stranger {
            stranger.heard();
        }
    }

    /// Ends when that has not been known for too long.
    async fn overdue(&self) {
        match &self.stranger {
            Some(stranger) => stranger.overdue().await,
            None => std::future::pending().await,
        }
    }

    /// Takes one of a tenant's places for this connection, unless it has one; whether it has one now.
    pub(crate) fn among(&self, places: &Arc<Semaphore>) -> bool {
        if self.of_tenant.get().is_some() {
            return true;
        }
        // Requests of one connection come one after another: nobody else sets it meanwhile.
        Arc::clone(places).try_acquire_owned().is_ok_and(|place| self.of_tenant.set(place).is_ok())
    }
}

/// Opens the configured listeners. A socket file that nobody listens on is replaced.
pub async fn bind(config: &Config) -> Result<Vec<Listener>, Error> {
    let on = config.socket.display().to_string();
    let unix = bind_unix(config).map_err(|source| Error::Listen { on, source })?;
    let mut listeners = vec![Listener::Unix(unix)];
    if let Some(address) = config.listen {
        let tcp = TcpListener::bind(address)
            .await
            .map_err(|source| Error::Listen { on: address.to_string(), source })?;
        listeners.push(Listener::Tcp(tcp));
    }
    Ok(listeners)
}

fn bind_unix(config: &Config) -> io::Result<UnixListener> {
    let path: &Path = &config.socket;
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir)?;
    }
    match fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => {
            if std::os::unix::net::UnixStream::connect(path).is_ok() {
                return Err(io::ErrorKind::AddrInUse.into());
            }
            fs::remove_file(path)?;
        }
        Ok(_) => return Err(io::Error::other("there is a file that is not a socket")),
        Err(_) => {}
    }
    let group = match config.group.as_str() {
        "" => None,
        name => Some(
            nix::unistd::Group::from_name(name)?
                .ok_or_else(|| io::Error::other(format!("there is no group {name:?}")))?
                .gid,
        ),
    };
    // Bound where nobody else can reach it, given its group and mode, and only then put in place.
    let hidden = tempdir_beside(path)?;
    let bound = hidden.join("s");
    let opened = UnixListener::bind(&bound).and_then(|listener| {
        if group.is_some() {
            nix::unistd::chown(&bound, None, group)?;
        }
        fs::set_permissions(&bound, Permissions::from_mode(0o660))?;
        fs::rename(&bound, path)?;
        Ok(listener)
    });
    let _ = fs::remove_file(&bound);
    let _ = fs::remove_dir(&hidden);
    opened
}

fn tempdir_beside(path: &Path) -> io::Result<std::path::PathBuf> {
    use std::os::unix::fs::DirBuilderExt;
    let name = format!(".postern-{}", std::process::id());
    let dir = path.with_file_name(name);
    // A daemon that died here, with the number this one has now, left it.
    match fs::remove_dir_all(&dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    fs::DirBuilder::new().mode(0o700).create(&dir)?;
    Ok(dir)
}

/// Serves at most `most` connections a listener until `stop` is cancelled and what was open then has
/// ended, or five seconds passed.
pub async fn serve(listeners: Vec<Listener>, app: Router, most: usize, stop: CancellationToken) {
    let connections = TaskTracker::new();
    let doors = TaskTracker::new();
    for listener in listeners {
        // Each listener has places of its own: strangers on TCP cannot take the operator's.
        let (app, open) = (app.clone(), Arc::new(Semaphore::new(most)));
        let strangers = Strangers::among(most);
        let (stop, connections) = (stop.clone(), connections.clone());
        doors.spawn(async move {
            while let Some(accepted) = stop.run_until_cancelled(listener.accept()).await {
                match accepted {
                    Ok((io, origin)) => {
                        let stranger = match origin {
                            Origin::Unix { .. } => None,
                            Origin::Tcp { from } => match strangers.admit(from.ip()) {
                                Some(stranger) => Some(Arc::new(stranger)),
                                None => continue,
                            },
                        };
                        // Known callers keep theirs; who came last is the last to go for it.
                        if open.available_permits() == 0 && stranger.is_some() {
                            strangers.evict();
                        }
                        let place = Arc::clone(&open).acquire_owned();
                        let Some(Ok(place)) = stop.run_until_cancelled(place).await else { break };
                        let held = Arc::new(place);
                        let place = Place { _held: held, stranger, of_tenant: Arc::default() };
                        connections.spawn(one(io, origin, place, app.clone(), stop.clone()));
                    }
                    Err(error) => {
                        tracing::warn!(%error, "accepting a caller failed");
                        tokio::time::sleep(BACK_OFF).await;
                    }
                }
            }
        });
    }
    doors.close();
    doors.wait().await;
    connections.close();
    if tokio::time::timeout(DRAIN, connections.wait()).await.is_err() {
        tracing::warn!(open = connections.len(), "callers cut off at the end");
    }
}

trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

impl Listener {
    async fn accept(&self) -> io::Result<(Box<dyn Stream>, Origin)> {
        match self {
            Self::Unix(listener) => {
                let (stream, _) = listener.accept().await?;
                let peer = stream.peer_cred()?;
                Ok((Box::new(stream), Origin::Unix { uid: peer.uid(), pid: peer.pid() }))
            }
            Self::Tcp(listener) => {
                let (stream, from) = listener.accept().await?;
                stream.set_nodelay(true)?;
                Ok((Box::new(stream), Origin::Tcp { from }))
            }
        }
    }

    /// The address, for a TCP listener.
    pub fn address(&self) -> Option<std::net::SocketAddr> {
        match self {
            Self::Unix(_) => None,
            Self::Tcp(listener) => listener.local_addr().ok(),
        }
    }
}

async fn one(
    io: Box<dyn Stream>,
    origin: Origin,
    place: Place,
    app: Router,
    stop: CancellationToken,
) {
    let served = place.clone();
    let service = service_fn(move |mut request: hyper::Request<Incoming>| {
        request.extensions_mut().insert(origin);
        served.heard();
        request.extensions_mut().insert(served.clone());
        let app = app.clone();
        async move {
            let answer = app.oneshot(request.map(Body::new)).await;
            Ok::<_, Infallible>(answer.unwrap_or_else(|never| match never {}))
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .serve_connection(TokioIo::new(io), service)
        .with_upgrades();
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = place.overdue() => return,
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a caller's connection ended");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(dir: &Path, group: &str) -> Config {
        Config { socket: dir.join("run/api.sock"), group: group.into(), ..Config::default() }
    }

    #[test]
    fn what_a_daemon_of_the_same_number_left_is_no_hindrance() {
        let folder = tempfile::tempdir().expect("folder");
        let socket = folder.path().join("postern.sock");
        let left = tempdir_beside(&socket).expect("made");
        fs::write(left.join("s"), "").expect("write");
        let made = tempdir_beside(&socket).expect("made again");
        assert_eq!(fs::read_dir(made).expect("folder").count(), 0);
    }

    #[tokio::test]
    async fn a_socket_left_by_a_dead_daemon_is_replaced_and_a_live_one_is_not() {
        let dir = tempfile::tempdir().expect("folder");
        let config = at(dir.path(), "");
        drop(bind(&config).await.expect("first"));
        assert!(config.socket.exists(), "left behind");
        let live = bind(&config).await.expect("replaced");
        let mode = fs::metadata(&config.socket).expect("socket").permissions().mode();
        assert_eq!(mode & 0o777, 0o660);
        let refused = bind(&config).await.expect_err("in use");
        assert!(matches!(refused, Error::Listen { .. }));
        drop(live);
        let beside = fs::read_dir(dir.path().join("run")).expect("folder").count();
        assert_eq!(beside, 1, "nothing but the socket");
    }

    #[tokio::test]
    async fn a_file_in_the_way_and_an_unknown_group_are_refused_and_left_alone() {
        let dir = tempfile::tempdir().expect("folder");
        assert!(bind(&at(dir.path(), "no-such-group-here")).await.is_err());
        let config = at(dir.path(), "");
        fs::write(&config.socket, "precious").expect("file");
        assert!(bind(&config).await.is_err());
        assert_eq!(fs::read_to_string(&config.socket).expect("file"), "precious");
    }
}
