//! Sandboxes: made, listed, shown, removed, and commands run in them.

use std::convert::Infallible;
use std::time::SystemTime;

use axum::Json as Answer;
use axum::body::Body;
use axum::extract::{FromRequest, Request, State};
use axum::http::{StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use futures_util::{Stream, StreamExt, stream};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use lifecycle::{CreateSpec, Scope, Wish};
use policy::{Policy, PolicyMode};
use serde_json::value::RawValue;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use crate::api::body::{Named, aside};
use crate::api::caller::Caller;
use crate::api::listen::Place;
use crate::api::{Api, body, rest};
use crate::problem::{ErrorBody, Kind, Problem};
use crate::units::{Size, Span};
use crate::wire::{
    Create, DEFAULT_TENANT, Driver, EXEC_PROTOCOL, Exec, Forced, JSON_LINES, Mode, Progress,
    Sandbox, Sandboxes, Step, Traffic,
};

/// Steps that a slow reader of progress may be behind; more are left out.
const STEPS: usize = 64;

/// The sandboxes that the caller may see, by name.
#[utoipa::path(
    get, path = "/v1/sandboxes", tag = "sandboxes",
    responses(
        (status = 200, description = "By name.", body = Sandboxes),
        (status = "default", description = "Refused.", body = ErrorBody),
    )
)]
pub(crate) async fn list(State(api): State<Api>, caller: Caller) -> Answer<Sandboxes> {
    let found = api.0.keeper.list(caller.tenant());
    Answer(Sandboxes {
        sandboxes: found.iter().map(|sandbox| api.shown(&caller, sandbox)).collect(),
    })
}

/// Makes a sandbox and answers once its guest does. With `progress=true` the answer is a stream of
/// JSON lines, the last of which is the sandbox or the error; the status is then always 200.
#[utoipa::path(
    post, path = "/v1/sandboxes", tag = "sandboxes",
    params(("progress" = Option<bool>, Query, description = "Answer with a stream of steps.")),
    request_body = Create,
    responses(
        (status = 201, description = "It runs.", body = Sandbox),
        (status = 200, description = "With `progress=true`.", body = Step, content_type = "application/jsonl"),
        (status = "default", description = "Refused; nothing of it is left.", body = ErrorBody),
    )
)]
pub(crate) async fn create(
    State(api): State<Api>,
    caller: Caller,
    uri: Uri,
    body::Json(wanted): body::Json<Create>,
) -> Result<Response, Problem> {
    let told_of_steps = match body::query(&uri, &["progress"])?.first() {
        Some((key, value)) => body::flag(key, value)?,
        None => false,
    };
    let (spec, turn) = api.spec(&caller, wanted).await?;
    let (actor, name) = (caller.actor(), spec.name.clone());
    let notes = api.notes(&spec);
    if !told_of_steps {
        let made = api.0.keeper.create(spec, &actor, turn, |_| {}).await;
        let made = made.map_err(|error| caller.told(error))?;
        let made = Sandbox { notes, ..api.shown(&caller, &made) };
        return Ok((StatusCode::CREATED, Answer(made)).into_response());
    }
    let (steps, mut told) = mpsc::channel(STEPS);
    tokio::spawn(async move {
        let progress = |step: lifecycle::Progress| {
            let doing = format!("{} {name}", step.doing);
            // A reader that is behind or gone misses a step; the work goes on.
            let _ = steps.try_send(Step::Progress(Progress { doing, at_ms: step.at_ms }));
        };
        let end = match api.0.keeper.create(spec, &actor, turn, progress).await {
            Ok(made) => Step::Sandbox(Box::new(Sandbox { notes, ..api.shown(&caller, &made) })),
            Err(error) => Step::Error(caller.told(error)),
        };
        let _ = steps.send(end).await;
    });
    let steps = stream::poll_fn(move |cx| told.poll_recv(cx));
    Ok(json_lines(steps.map(|step| serde_json::to_string(&step).unwrap_or_default())))
}

/// One sandbox.
#[utoipa::path(
    get, path = "/v1/sandboxes/{name}", tag = "sandboxes",
    params(("name" = String, Path, description = "The sandbox.")),
    responses(
        (status = 200, description = "As it is now.", body = Sandbox),
        (status = "default", description = "Refused.", body = ErrorBody),
    )
)]
pub(crate) async fn show(
    State(api): State<Api>,
    caller: Caller,
    Named(name): Named,
) -> Result<Answer<Sandbox>, Problem> {
    let found = api.sandbox(&caller, &name)?;
    Ok(Answer(api.shown(&caller, &api.0.keeper.show(&found))))
}

/// Removes a sandbox; answers once nothing of it is left. By force, which is the operator's: also where
/// what runs it does not end; everything else goes, and its slot is nobody's.
#[utoipa::path(
    delete, path = "/v1/sandboxes/{name}", tag = "sandboxes",
    params(
        ("name" = String, Path, description = "The sandbox."),
        ("force" = Option<bool>, Query, description = "Give up what does not end. Only over the unix socket."),
    ),
    responses(
        (status = 204, description = "Gone."),
        (status = 200, description = "With `force=true`: gone but for what is told.", body = Forced),
        (status = "default", description = "Refused.", body = ErrorBody),
    )
)]
pub(crate) async fn remove(
    State(api): State<Api>,
    caller: Caller,
    Named(name): Named,
    uri: Uri,
) -> Result<Response, Problem> {
    let force = match body::query(&uri, &["force"])?.first() {
        Some((key, value)) => body::flag(key, value)?,
        None => false,
    };
    let found = api.sandbox(&caller, &name)?;
    if force {
        if !caller.is_local() {
            return Err(Problem::new(Kind::Forbidden, "to remove by force is not for this token")
                .fix("ask on the node itself, over the unix socket"));
        }
        let left = api.0.keeper.force(&found, &caller.actor()).await;
        let left = left.map_err(|error| caller.told(error))?;
        return Ok(Answer(Forced { left }).into_response());
    }
    let removed = api.0.keeper.remove(&found, &caller.actor()).await;
    removed.map_err(|error| caller.told(error))?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// Runs a command in a running guest. The request asks for an upgrade to `postern-exec`; once
/// upgraded, both directions carry the frames of the guest's agent: a kind (1 byte), a length
/// (4 bytes, big endian), a payload. To the guest: 3 standard input, 4 its end. From the guest:
/// 131 standard output, 132 standard error, 133 the exit status as JSON, 130 the reason why it
/// could not run.
#[utoipa::path(
    post, path = "/v1/sandboxes/{name}/exec", tag = "sandboxes",
    params(
        ("name" = String, Path, description = "The sandbox."),
        ("upgrade" = String, Header, description = "`postern-exec`"),
    ),
    request_body = Exec,
    responses(
        (status = 101, description = "The command runs; frames follow."),
        (status = "default", description = "Refused.", body = ErrorBody),
    )
)]
pub(crate) async fn exec(
    State(api): State<Api>,
    caller: Caller,
    Named(name): Named,
    mut request: Request,
) -> Result<Response, Problem> {
    let (upgrade, place) = upgraded(&mut request, EXEC_PROTOCOL, "postern exec")?;
    let body::Json(Exec { argv, env, cwd, user }) = body::Json::from_request(request, &api).await?;
    let command = agent::Exec { argv, env, cwd, user };
    // Asked last: while a body is on its way, the name may become somebody else's.
    let found = api.sandbox(&caller, &name)?;
    let guest = api.0.keeper.exec(&found, &command, &caller.actor()).await;
    let (guest, call) = guest.map_err(|error| caller.told(error))?;
    let (stop, name) = (api.0.stop.clone(), found.name().clone());
    api.0.relays.spawn(async move {
        let relayed = stop.run_until_cancelled(async {
            relay(TokioIo::new(upgrade.await.map_err(std::io::Error::other)?), guest).await
        });
        if let Some(Err(error)) = relayed.await {
            tracing::debug!(%error, sandbox = %name, "exec ended early");
        }
        drop((place, call));
    });
    Ok(switching(EXEC_PROTOCOL))
}

/// The connection of a request that asks for this protocol on it (RFC 9110, section 7.8), and the place
/// that it has. `command` is what does so for people.
pub(crate) fn upgraded(
    request: &mut Request,
    protocol: &str,
    command: &str,
) -> Result<(OnUpgrade, Option<Place>), Problem> {
    let upgrade = request.extensions_mut().remove::<OnUpgrade>();
    let place = request.extensions_mut().remove::<Place>();
    let asked = request.headers().get(header::UPGRADE).and_then(|value| value.to_str().ok());
    let asks = asked.is_some_and(|asked| asked.eq_ignore_ascii_case(protocol));
    let upgrade = upgrade.filter(|_| asks).ok_or_else(|| {
        Problem::new(Kind::UpgradeRequired, "this needs a connection of its own").fix(format!(
            "send `connection: upgrade` and `upgrade: {protocol}`, or use `{command}`"
        ))
    })?;
    Ok((upgrade, place))
}

/// The answer after which the connection is this protocol's.
pub(crate) fn switching(protocol: &'static str) -> Response {
    let headers = [(header::CONNECTION, "upgrade"), (header::UPGRADE, protocol)];
    (StatusCode::SWITCHING_PROTOCOLS, headers).into_response()
}

/// Passes frames on as they are until either side is done. A caller that went away takes the
/// command with it: the agent ends what nobody reads.
async fn relay(
    caller: impl AsyncRead + AsyncWrite,
    guest: impl AsyncRead + AsyncWrite,
) -> std::io::Result<()> {
    let (mut from_caller, mut to_caller) = tokio::io::split(caller);
    let (mut from_guest, mut to_guest) = tokio::io::split(guest);
    let down = async {
        tokio::io::copy(&mut from_guest, &mut to_caller).await?;
        to_caller.shutdown().await
    };
    let up = async {
        tokio::io::copy(&mut from_caller, &mut to_guest).await?;
        Ok(())
    };
    tokio::select! { ended = down => ended, ended = up => ended }
}

/// An answer of one JSON value a line, as they come.
pub(crate) fn json_lines<S>(lines: S) -> Response
where
    S: Stream<Item = String> + Send + 'static,
{
    let lines = lines.map(|line| Ok::<_, Infallible>(line + "\n"));
    ([(header::CONTENT_TYPE, JSON_LINES)], Body::from_stream(lines)).into_response()
}

impl Api {
    /// What is asked for, checked, and its turn among its tenant's new sandboxes, which lasts until its
    /// policy is ready to judge.
    async fn spec(
        &self,
        caller: &Caller,
        wanted: Create,
    ) -> Result<(CreateSpec, Option<OwnedSemaphorePermit>), Problem> {
        let own = caller.tenant();
        let tenant = match wanted.tenant.or_else(|| own.cloned()) {
            Some(tenant) => tenant,
            None => crate::api::tenant(DEFAULT_TENANT)?,
        };
        if !caller.sees(&tenant) {
            return Err(Problem::invalid("tenant", tenant.as_str(), "is not this token's tenant")
                .fix("leave it out")
                .of(Kind::Forbidden));
        }
        let driver = match wanted.driver {
            Driver::Qemu => lifecycle::Driver::Qemu,
            Driver::External => lifecycle::Driver::External,
        };
        let memory_mib = mebibytes(wanted.memory.unwrap_or(self.0.defaults.memory))?;
        let vcpus = wanted.vcpus.unwrap_or(self.0.defaults.vcpus);
        let name = wanted.name;
        let wish = Wish { name: name.clone(), tenant: tenant.clone(), driver, memory_mib, vcpus };
        let room = self.0.keeper.check_room(&wish).await;
        room.map_err(|error| caller.told(error))?;
        let (policy, turn) = self.policy_of_new(caller, wanted.policy).await?;
        let terms = rest::wanted(
            wanted.on_idle,
            [wanted.idle_after, wanted.ttl, wanted.max_life],
            wanted.cold_boot,
        );
        Ok((CreateSpec { name, tenant, driver, memory_mib, vcpus, policy, terms }, turn))
    }

    /// The policy that is given for a new sandbox, read, and its turn among its tenant's.
    pub(crate) async fn policy_of_new(
        &self,
        caller: &Caller,
        policy: Option<Box<RawValue>>,
    ) -> Result<(Policy, Option<OwnedSemaphorePermit>), Problem> {
        let Some(policy) = policy else { return Ok((Policy::default(), None)) };
        let turn = self.0.door.turn_to_make(caller).await;
        // It goes along, since reading goes on when the caller goes away.
        let read = aside(move || (Policy::from_json(policy.get()), turn));
        let (read, turn) = read.await?;
        let read = read.map_err(|refused| {
            let problem = Problem::from(refused);
            let field = problem.field.as_deref().filter(|field| !field.is_empty());
            let field = field.map_or("policy".into(), |field| format!("policy.{field}"));
            Problem { field: Some(field.into()), line: None, ..problem }
        })?;
        Ok((read, turn))
    }

    /// What whoever makes it may not expect of its policy.
    fn notes(&self, spec: &CreateSpec) -> Vec<String> {
        let scope = Scope::Sandbox(spec.name.clone());
        lifecycle::notes(&spec.policy, &Policy::default(), &scope, self.0.router.own())
    }

    pub(crate) fn shown(&self, caller: &Caller, sandbox: &lifecycle::Sandbox) -> Sandbox {
        // Which slot is the next one tells how many others there are.
        let whole = caller.is_operator();
        let meter = self.0.router.meter(sandbox.slot);
        let traffic = meter.map_or_else(Traffic::default, |meter| Traffic {
            open_flows: u64::try_from(meter.open()).unwrap_or(u64::MAX),
            bytes_out: meter.bytes_out(),
            bytes_in: meter.bytes_in(),
        });
        let longest = sandbox.awake.first();
        Sandbox {
            name: sandbox.name.clone(),
            tenant: sandbox.tenant.clone(),
            state: sandbox.state.as_str().to_owned(),
            reason: sandbox.reason.as_ref().map(|reason| caller.reason(reason)),
            driver: match sandbox.driver {
                lifecycle::Driver::Qemu => Driver::Qemu,
                lifecycle::Driver::External => Driver::External,
            },
            slot: whole.then(|| sandbox.slot.number()),
            tap: whole.then(|| sandbox.tap.clone()),
            netns: whole.then(|| sandbox.netns.clone()),
            guest_ip: policy::net::GUEST_IP.into(),
            egress: sandbox.egress.clone(),
            memory_mib: sandbox.memory_mib,
            vcpus: sandbox.vcpus,
            incarnation: sandbox.incarnation,
            revision: sandbox.revision,
            mode: match sandbox.mode {
                PolicyMode::Enforce => Mode::Enforce,
                PolicyMode::Observe => Mode::Observe,
            },
            closed_by: sandbox.closed_by.clone(),
            pid: sandbox.pid.filter(|_| whole),
            on_idle: rest::shown(sandbox.on_idle),
            idle_after: sandbox.idle_after.map(Span),
            awake: longest.map(|one| one.why.to_owned()),
            awake_by: sandbox.awake.iter().map(rest::awake).collect(),
            idle_in: longest.and_then(|one| one.left).map(rest::seconds),
            wakes_in: sandbox.wakes_in.map(rest::seconds),
            wakes_because: sandbox.wakes_because.map(str::to_owned),
            wake_at: sandbox.wake_at.and_then(rfc3339),
            expires_in: sandbox.expires_in.map(rest::seconds),
            wakes: sandbox.wakes,
            cold_boots: sandbox.cold_boots,
            cold_reason: sandbox.cold_reason.as_ref().map(|reason| caller.reason(reason)),
            created: sandbox.created.and_then(rfc3339),
            traffic,
            notes: Vec::new(),
        }
    }
}

fn mebibytes(memory: Size) -> Result<u32, Problem> {
    let whole = memory.0.is_multiple_of(1 << 20).then_some(memory.0 >> 20);
    whole.and_then(|mib| u32::try_from(mib).ok()).ok_or_else(|| {
        Problem::invalid("memory", &memory.to_string(), "is not a number of MiB")
            .fix("write it as `256M`")
    })
}

pub(crate) fn rfc3339(time: SystemTime) -> Option<String> {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).ok()?;
    let time = OffsetDateTime::from_unix_timestamp(since.as_secs().try_into().ok()?).ok()?;
    time.format(&Rfc3339).ok()
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, duplex};

    use super::*;

    #[tokio::test]
    async fn frames_pass_both_ways_and_whoever_goes_takes_the_other_along() {
        for guest_goes in [true, false] {
            let (mut caller, ours) = duplex(64);
            let (mut guest, theirs) = duplex(64);
            let relaying = tokio::spawn(relay(ours, theirs));
            caller.write_all(b"to the guest").await.expect("sent");
            guest.write_all(b"to the caller").await.expect("sent");
            let mut got = [0; 13];
            caller.read_exact(&mut got).await.expect("arrived");
            assert_eq!(&got, b"to the caller");
            guest.read_exact(&mut got[..12]).await.expect("arrived");
            assert_eq!(&got[..12], b"to the guest");
            let mut left = if guest_goes {
                guest.write_all(b"last").await.expect("sent");
                drop(guest);
                caller
            } else {
                drop(caller);
                guest
            };
            let mut rest = Vec::new();
            left.read_to_end(&mut rest).await.expect("the end");
            assert_eq!(rest, if guest_goes { &b"last"[..] } else { b"" });
            relaying.await.expect("no panic").expect("no error");
        }
    }
}
