//! The daemon: the parts put together bottom-up, taken apart top-down. The only place that knows
//! that order. MicroVMs outlive it: stopping it stops no guest, and lets none out.

use std::fs::{self, File, OpenOptions};
use std::future::Future;
use std::path::Path;
use std::time::Duration;

use lifecycle::Keeper;
use nix::fcntl::{Flock, FlockArg};
use policy::{OwnAddresses, Trail};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::api::{self, Api};
use crate::auditlog::AuditLog;
use crate::config::{self, Config};
use crate::error::Error;
use crate::host::Routes;
use crate::{doctor, host, telemetry};

/// How long sandboxes that are being made or removed may take to get there at the end.
const CLOSE: Duration = Duration::from_secs(10);
/// How often the host's addresses are read again: one that was added is ours from then on.
const ADDRESSES: Duration = Duration::from_secs(5);

/// Serves until the process is asked to stop (SIGTERM or SIGINT).
pub async fn serve(config: Config) -> Result<(), Error> {
    let asked = asked_to_stop()?;
    telemetry::count_panics();
    if let Some(file) = config::fault_file() {
        fault::listen(file);
    }
    raise_descriptors();
    let report = doctor::serviceable(&config).await;
    for check in report.checks.iter().filter(|check| check.status == doctor::Status::Warn) {
        tracing::warn!(check = check.name, found = check.found, remedy = check.remedy, "doctor");
    }
    if let Some(unfit) = report.unfit() {
        return Err(Error::Unfit(unfit));
    }
    let _lock = lock(&config.state_dir)?;
    let (trail, records) = Trail::bounded(config.audit.queue);
    let audit = AuditLog::open(&config.audit, records)?;
    let served = guarded(&config, &trail, &audit, asked).await;
    let closing = audit.clone();
    // Joining a thread must not hold up the runtime.
    let _ = tokio::task::spawn_blocking(move || closing.close()).await;
    served
}

/// Everything that needs the audit to be there before and after it.
async fn guarded(
    config: &Config,
    trail: &Trail,
    audit: &AuditLog,
    asked: impl Future<Output = ()>,
) -> Result<(), Error> {
    let made = fs::create_dir_all(&config.run_dir);
    made.map_err(|source| Error::Prepare {
        doing: "making the folder",
        path: config.run_dir.clone(),
        source,
    })?;
    let resolver = dns::Resolver::new(config.resolver()).map_err(|e| Error::Resolver(e.into()))?;
    let own = OwnAddresses::default();
    let routes = Routes::open().map_err(Error::Addresses)?;
    look(&own, &routes.handle()).await.map_err(Error::Addresses)?;
    let sources = match config.egress.addresses.as_slice() {
        [] => host::sources(),
        chosen => chosen.to_vec(),
    };
    let router = egress::Router::start(config.router(), resolver, own.clone(), trail.clone())
        .await
        .map_err(|e| Error::Router(e.into()))?;
    let keeper =
        Keeper::open(config.keeper(sources, config.store()?), router.clone(), trail.clone())
            .await
            .map_err(|e| Error::Keeper(e.into()))?;

    let stop = CancellationToken::new();
    let api = Api::new(config, keeper.clone(), router.clone(), audit.clone(), stop.clone());
    let listeners = api::bind(&config.api).await?;
    for address in listeners.iter().filter_map(api::Listener::address) {
        tracing::info!(%address, "listening");
    }
    tracing::info!(
        socket = %config.api.socket.display(),
        version = env!("CARGO_PKG_VERSION"),
        sandboxes = keeper.list(None).len(),
        "serving"
    );
    let refreshing = tokio::spawn(refresh(own, routes));
    let ended = stop.clone();
    tokio::join!(api::serve(listeners, api.routes(), config.api.connections, stop), async move {
        asked.await;
        ended.cancel();
    });
    tracing::info!("stopping; microVMs keep running");
    api.drained().await;
    refreshing.abort();
    if tokio::time::timeout(CLOSE, keeper.close()).await.is_err() {
        tracing::warn!("journeys cut off: the next daemon undoes what is half made");
    }
    router.close().await;
    if let Err(error) = keeper.closed().await {
        let error = &error as &dyn std::error::Error;
        tracing::warn!(error, "ends of connections may be recorded again by the next daemon");
    }
    let _ = fs::remove_file(&config.api.socket);
    Ok(())
}

/// Every connection of a guest takes several descriptors: all that the process may have are taken.
fn raise_descriptors() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, most)| setrlimit(Resource::RLIMIT_NOFILE, most, most).map(|()| most));
    match raised {
        Ok(most) => tracing::debug!(most, "descriptors"),
        Err(error) => tracing::warn!(%error, "descriptors stay limited as they were"),
    }
}

/// Reads what is this host's, as soon as the kernel says that it changed and now and then besides.
async fn refresh(own: OwnAddresses, mut routes: Routes) {
    let handle = routes.handle();
    let mut tick = tokio::time::interval(ADDRESSES);
    loop {
        tokio::select! {
            _ = tick.tick() => {}
            () = routes.changed() => {}
        }
        // What is told from here on is not in what is read, or not all of it.
        routes.forget();
        if let Err(error) = look(&own, &handle).await {
            tracing::warn!(%error, "this host's addresses could not be read");
        }
    }
}

async fn look(own: &OwnAddresses, handle: &rtnetlink::Handle) -> std::io::Result<()> {
    let networks = host::networks(handle).await?;
    own.replace_all(host::addresses()?, networks);
    Ok(())
}

/// Registered before anything is made, so that a signal at any time leads to an orderly end.
fn asked_to_stop() -> Result<impl Future<Output = ()>, Error> {
    let mut term = signal(SignalKind::terminate()).map_err(Error::Runtime)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(Error::Runtime)?;
    Ok(async move {
        tokio::select! {
            _ = term.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}

/// Keeps a second daemon away from the same state; given back when the process ends, however.
fn lock(state_dir: &Path) -> Result<Flock<File>, Error> {
    let path = state_dir.join("lock");
    let prepare = |doing, source| Error::Prepare { doing, path: path.clone(), source };
    fs::create_dir_all(state_dir).map_err(|e| prepare("making the folder of", e))?;
    let mut options = OpenOptions::new();
    let file = options.write(true).create(true).truncate(false).open(&path);
    let file = file.map_err(|e| prepare("opening", e))?;
    Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| match errno {
        nix::errno::Errno::EWOULDBLOCK => Error::Running(state_dir.to_owned()),
        other => prepare("locking", other.into()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_daemon_on_the_same_state_is_refused_until_the_first_has_ended() {
        let dir = tempfile::tempdir().expect("folder");
        let first = lock(dir.path()).expect("free");
        assert!(matches!(lock(dir.path()), Err(Error::Running(_))));
        drop(first);
        lock(dir.path()).expect("free again");
    }
}
