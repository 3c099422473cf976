//! Sleep and life of sandboxes: standby, resume, leases, renewal, and connections to a guest's ports.

use std::time::Duration;

use axum::Json as Answer;
use axum::extract::{FromRequest, Request, State};
use axum::response::Response;
use hyper_util::rt::TokioIo;
use lifecycle::{Wake, WantedTerms};

use crate::api::Api;
use crate::api::body::{self, Named};
use crate::api::caller::Caller;
use crate::api::sandboxes::{switching, upgraded};
use crate::problem::{ErrorBody, Problem};
use crate::units::Span;
use crate::wire::{
    Awake, CONNECT_PROTOCOL, ColdBoot, Connect, KeepAwake, OnIdle, Renew, Resume, Sandbox, Standby,
};

/// Puts a sandbox to sleep, idle or not; answers once it is. Its memory, its processes and its connections
/// are kept. It is woken at the time that is given, if any; of one that sleeps that time is changed, or
/// taken back.
#[utoipa::path(
    post, path = "/v1/sandboxes/{name}/standby", tag = "sandboxes",
    params(("name" = String, Path, description = "The sandbox.")),
    request_body = Option<Standby>,
    responses(
        (status = 200, description = "It sleeps.", body = Sandbox),
        (status = "default", description = "Refused, or it stayed awake.", body = ErrorBody),
    )
)]
pub(crate) async fn standby(
    State(api): State<Api>,
    caller: Caller,
    Named(name): Named,
    body::Perhaps(wanted): body::Perhaps<Standby>,
) -> Result<Answer<Sandbox>, Problem> {
    let found = api.sandbox(&caller, &name)?;
    let wake = match (wanted.wake_at, wanted.wake_in) {
        (None, None) => None,
        (Some(at), None) => Some(Wake::At(at.time())),
        (None, Some(span)) => Some(Wake::In(span.0)),
        (Some(at), Some(_)) => {
            let problem = "is given together with `wake_in`";
            return Err(
                Problem::invalid("wake_at", &at.to_string(), problem).fix("give one of the two")
            );
        }
    };
    let slept = api.0.keeper.standby(&found, wake, &caller.actor()).await;
    slept.map(|slept| Answer(api.shown(&caller, &slept))).map_err(|error| caller.told(error))
}

/// Puts a sandbox to sleep and into the object store; answers once it is there, and nowhere else. Who wants
/// something of it meanwhile keeps it here.
#[utoipa::path(
    post, path = "/v1/sandboxes/{name}/suspend", tag = "sandboxes",
    params(("name" = String, Path, description = "The sandbox.")),
    responses(
        (status = 200, description = "It is in the store.", body = Sandbox),
        (status = "default", description = "Refused, or it is not.", body = ErrorBody),
    )
)]
pub(crate) async fn suspend(
    State(api): State<Api>,
    caller: Caller,
    Named(name): Named,
) -> Result<Answer<Sandbox>, Problem> {
    let found = api.sandbox(&caller, &name)?;
    let slept = api.0.keeper.suspend(&found, &caller.actor()).await;
    slept.map(|slept| Answer(api.shown(&caller, &slept))).map_err(|error| caller.told(error))
}

/// Wakes a sandbox; answers once it runs. Good for one that does. With `cold`, one that has failed boots from
/// its disk.
#[utoipa::path(
    post, path = "/v1/sandboxes/{name}/resume", tag = "sandboxes",
    params(("name" = String, Path, description = "The sandbox.")),
    request_body = Option<Resume>,
    responses(
        (status = 200, description = "It runs.", body = Sandbox),
        (status = "default", description = "Refused, or it sleeps on.", body = ErrorBody),
    )
)]
pub(crate) async fn resume(
    State(api): State<Api>,
    caller: Caller,
    Named(name): Named,
    body::Perhaps(how): body::Perhaps<Resume>,
) -> Result<Answer<Sandbox>, Problem> {
    let found = api.sandbox(&caller, &name)?;
    let woken = match how.cold {
        true => api.0.keeper.resume_cold(&found, &caller.actor()).await,
        false => api.0.keeper.resume(&found, &caller.actor()).await,
    };
    woken.map(|woken| Answer(api.shown(&caller, &woken))).map_err(|error| caller.told(error))
}

/// Keeps a sandbox from being idle for a time, and wakes it if it sleeps.
#[utoipa::path(
    post, path = "/v1/sandboxes/{name}/keep-awake", tag = "sandboxes",
    params(("name" = String, Path, description = "The sandbox.")),
    request_body = KeepAwake,
    responses(
        (status = 200, description = "It runs, and is not idle until then.", body = Sandbox),
        (status = "default", description = "Refused.", body = ErrorBody),
    )
)]
pub(crate) async fn keep_awake(
    State(api): State<Api>,
    caller: Caller,
    Named(name): Named,
    body::Json(lease): body::Json<KeepAwake>,
) -> Result<Answer<Sandbox>, Problem> {
    let found = api.sandbox(&caller, &name)?;
    let kept = api.0.keeper.keep_awake(&found, lease.span.0, &caller.actor()).await;
    kept.map(|kept| Answer(api.shown(&caller, &kept))).map_err(|error| caller.told(error))
}

/// Lets a sandbox live on: its time begins anew, up to its longest life. Does not wake it.
#[utoipa::path(
    post, path = "/v1/sandboxes/{name}/renew", tag = "sandboxes",
    params(("name" = String, Path, description = "The sandbox.")),
    request_body = Renew,
    responses(
        (status = 200, description = "It lives on.", body = Sandbox),
        (status = "default", description = "Refused.", body = ErrorBody),
    )
)]
pub(crate) async fn renew(
    State(api): State<Api>,
    caller: Caller,
    Named(name): Named,
    body::Json(wanted): body::Json<Renew>,
) -> Result<Answer<Sandbox>, Problem> {
    let found = api.sandbox(&caller, &name)?;
    let ttl = wanted.ttl.map(|span| span.0);
    let renewed = api.0.keeper.renew(&found, ttl, &caller.actor()).await;
    renewed.map(|renewed| Answer(api.shown(&caller, &renewed))).map_err(|error| caller.told(error))
}

/// Connects to a TCP port of a guest, which is woken for it. The request asks for an upgrade to
/// `postern-connect`; once upgraded, bytes pass both ways as they are, and each side ends by itself. The
/// connection survives the guest's sleep; its bytes wake it.
#[utoipa::path(
    post, path = "/v1/sandboxes/{name}/connect", tag = "sandboxes",
    params(
        ("name" = String, Path, description = "The sandbox."),
        ("upgrade" = String, Header, description = "`postern-connect`"),
    ),
    request_body = Connect,
    responses(
        (status = 101, description = "It is open; bytes follow."),
        (status = "default", description = "Refused.", body = ErrorBody),
    )
)]
pub(crate) async fn connect(
    State(api): State<Api>,
    caller: Caller,
    Named(name): Named,
    mut request: Request,
) -> Result<Response, Problem> {
    let (upgrade, place) = upgraded(&mut request, CONNECT_PROTOCOL, "postern connect")?;
    let body::Json(Connect { port }) = body::Json::from_request(request, &api).await?;
    let found = api.sandbox(&caller, &name)?;
    let guest = api.0.keeper.connect(&found, port, &caller.actor()).await;
    let mut guest = guest.map_err(|error| caller.told(error))?;
    let stop = api.0.stop.clone();
    api.0.relays.spawn(async move {
        let relayed = stop.run_until_cancelled(async {
            let mut caller = TokioIo::new(upgrade.await.map_err(std::io::Error::other)?);
            tokio::io::copy_bidirectional(&mut caller, &mut guest).await
        });
        if let Some(Err(error)) = relayed.await {
            tracing::debug!(%error, sandbox = %found.name(), port, "connection ended early");
        }
        drop(place);
    });
    Ok(switching(CONNECT_PROTOCOL))
}

/// What is asked for of a new sandbox's rest and life; the spans are `idle_after`, `ttl` and `max_life`.
pub(crate) fn wanted(
    when_idle: Option<OnIdle>,
    [idle_after, ttl, max_life]: [Option<Span>; 3],
    boot: Option<ColdBoot>,
) -> WantedTerms {
    WantedTerms {
        on_idle: when_idle.map(on_idle),
        idle_after: idle_after.map(|span| span.0),
        ttl: ttl.map(|span| span.0),
        max_life: max_life.map(|span| span.0),
        cold_boot: boot.map(cold_boot),
    }
}

fn on_idle(wanted: OnIdle) -> lifecycle::OnIdle {
    match wanted {
        OnIdle::Standby => lifecycle::OnIdle::Standby,
        OnIdle::Suspend => lifecycle::OnIdle::Suspend,
        OnIdle::Delete => lifecycle::OnIdle::Delete,
        OnIdle::Never => lifecycle::OnIdle::Never,
    }
}

fn cold_boot(wanted: ColdBoot) -> lifecycle::ColdBoot {
    match wanted {
        ColdBoot::Allowed => lifecycle::ColdBoot::Allowed,
        ColdBoot::Refused => lifecycle::ColdBoot::Refused,
    }
}

pub(crate) fn shown(on_idle: lifecycle::OnIdle) -> OnIdle {
    match on_idle {
        lifecycle::OnIdle::Standby => OnIdle::Standby,
        lifecycle::OnIdle::Suspend => OnIdle::Suspend,
        lifecycle::OnIdle::Delete => OnIdle::Delete,
        lifecycle::OnIdle::Never => OnIdle::Never,
    }
}

pub(crate) fn awake(one: &lifecycle::Awake) -> Awake {
    Awake { by: one.by.to_owned(), seconds: one.left.map(seconds) }
}

/// Whole seconds, the last one begun counted.
pub(crate) fn seconds(span: Duration) -> u64 {
    span.as_secs() + u64::from(span.subsec_nanos() > 0)
}
