//! Snapshots over HTTP: taken of a sandbox, listed, removed, and sandboxes made of them.
//!
//! Never tells a tenant of another one's, and never gives a clone more than whoever makes it may give.

use axum::Json as Answer;
use axum::extract::State;
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use lifecycle::{Scope, Wish};
use policy::{Policy, SandboxName, SnapshotName};

use crate::api::answer::no_snapshot;
use crate::api::body::{self, Named};
use crate::api::caller::Caller;
use crate::api::sandboxes::rfc3339;
use crate::api::{Api, label, rest};
use crate::problem::{ErrorBody, Problem};
use crate::wire::{MakeClone, RollBack, Sandbox, Snapshot, Snapshots, TakeSnapshot};

/// The snapshots that the caller may see, by name: of all sandboxes, or of one, there or not.
#[utoipa::path(
    get, path = "/v1/snapshots", tag = "snapshots", operation_id = "list_snapshots",
    params(("sandbox" = Option<String>, Query, description = "Of sandboxes of this name only.")),
    responses(
        (status = 200, description = "By name.", body = Snapshots),
        (status = "default", description = "Refused.", body = ErrorBody),
    )
)]
pub(crate) async fn list(
    State(api): State<Api>,
    caller: Caller,
    uri: Uri,
) -> Result<Answer<Snapshots>, Problem> {
    let of: Option<SandboxName> = match body::query(&uri, &["sandbox"])?.first() {
        Some((key, value)) => Some(label(key, value)?),
        None => None,
    };
    let found = api.0.keeper.snapshots(caller.tenant(), of.as_ref()).await;
    let found = found.map_err(|error| caller.told(error))?;
    Ok(Answer(Snapshots { snapshots: found.iter().map(shown).collect() }))
}

/// One snapshot.
#[utoipa::path(
    get, path = "/v1/snapshots/{name}", tag = "snapshots", operation_id = "show_snapshot",
    params(("name" = String, Path, description = "The snapshot.")),
    responses(
        (status = 200, description = "As it was taken.", body = Snapshot),
        (status = "default", description = "Refused.", body = ErrorBody),
    )
)]
pub(crate) async fn show(
    State(api): State<Api>,
    caller: Caller,
    Named(name): Named,
) -> Result<Answer<Snapshot>, Problem> {
    Ok(Answer(shown(&api.snapshot(&caller, &name).await?)))
}

/// Takes a snapshot of a sandbox: its memory, its processes and its disk as they are at one moment. It sleeps
/// for that and goes on as it was, with its connections; answered once the snapshot is durable.
#[utoipa::path(
    post, path = "/v1/sandboxes/{name}/snapshots", tag = "snapshots", operation_id = "take_snapshot",
    params(("name" = String, Path, description = "The sandbox.")),
    request_body = TakeSnapshot,
    responses(
        (status = 201, description = "It is there.", body = Snapshot),
        (status = "default", description = "Refused; there is none, and the sandbox is as it was.", body = ErrorBody),
    )
)]
pub(crate) async fn take(
    State(api): State<Api>,
    caller: Caller,
    Named(name): Named,
    body::Json(wanted): body::Json<TakeSnapshot>,
) -> Result<Response, Problem> {
    let found = api.sandbox(&caller, &name)?;
    let taken = api.0.keeper.snapshot(&found, wanted.name, &caller.actor()).await;
    let taken = taken.map_err(|error| caller.told(error))?;
    Ok((StatusCode::CREATED, Answer(shown(&taken))).into_response())
}

/// Removes a snapshot. What was made of it goes on.
#[utoipa::path(
    delete, path = "/v1/snapshots/{name}", tag = "snapshots", operation_id = "remove_snapshot",
    params(("name" = String, Path, description = "The snapshot.")),
    responses(
        (status = 204, description = "Gone."),
        (status = "default", description = "Refused.", body = ErrorBody),
    )
)]
pub(crate) async fn remove(
    State(api): State<Api>,
    caller: Caller,
    Named(name): Named,
) -> Result<StatusCode, Problem> {
    let found = api.snapshot(&caller, &name).await?;
    let removed = api.0.keeper.remove_snapshot(&found, &caller.actor()).await;
    removed.map_err(|error| caller.told(error))?;
    Ok(StatusCode::NO_CONTENT)
}

/// Makes a sandbox that goes on from a snapshot, of the same tenant, memory and processors: another incarnation,
/// with entropy and a clock of its own, and none of the connections that its parent had. Its policy is its own:
/// what is given, or an empty one, which denies everything. Answered once it runs.
#[utoipa::path(
    post, path = "/v1/snapshots/{name}/clone", tag = "snapshots", operation_id = "clone_snapshot",
    params(("name" = String, Path, description = "The snapshot.")),
    request_body = MakeClone,
    responses(
        (status = 201, description = "It runs.", body = Sandbox),
        (status = "default", description = "Refused; nothing of it is left.", body = ErrorBody),
    )
)]
pub(crate) async fn clone(
    State(api): State<Api>,
    caller: Caller,
    Named(name): Named,
    body::Json(wanted): body::Json<MakeClone>,
) -> Result<Response, Problem> {
    let of = api.snapshot(&caller, &name).await?;
    let wish = Wish {
        name: wanted.name.clone(),
        tenant: of.tenant.clone(),
        driver: lifecycle::Driver::Qemu,
        memory_mib: of.memory_mib,
        vcpus: of.vcpus,
    };
    let room = api.0.keeper.check_room(&wish).await;
    room.map_err(|error| caller.told(error))?;
    let (policy, turn) = api.policy_of_new(&caller, wanted.policy).await?;
    let terms = rest::wanted(
        wanted.on_idle,
        [wanted.idle_after, wanted.ttl, wanted.max_life],
        wanted.cold_boot,
    );
    let scope = Scope::Sandbox(wanted.name.clone());
    let notes = lifecycle::notes(&policy, &Policy::default(), &scope, api.0.router.own());
    let made =
        api.0.keeper.clone_of(&of, wanted.name, (policy, terms), &caller.actor(), turn).await;
    let made = made.map_err(|error| caller.told(error))?;
    let made = Sandbox { notes, ..api.shown(&caller, &made) };
    Ok((StatusCode::CREATED, Answer(made)).into_response())
}

/// Takes a sandbox back to a snapshot of its own size and tenant, and answers once it runs: as another incarnation,
/// with the memory, processes and disk of then. Its connections of now are ended on both sides; its policy stays.
#[utoipa::path(
    post, path = "/v1/sandboxes/{name}/rollback", tag = "snapshots", operation_id = "roll_back",
    params(("name" = String, Path, description = "The sandbox.")),
    request_body = RollBack,
    responses(
        (status = 200, description = "It runs, as it was then.", body = Sandbox),
        (status = "default", description = "Refused, and it is as it was; or its incarnation has moved, and it sleeps, with the reason.", body = ErrorBody),
    )
)]
pub(crate) async fn roll_back(
    State(api): State<Api>,
    caller: Caller,
    Named(name): Named,
    body::Json(wanted): body::Json<RollBack>,
) -> Result<Answer<Sandbox>, Problem> {
    let found = api.sandbox(&caller, &name)?;
    let to = api.snapshot(&caller, wanted.snapshot.as_str()).await?;
    let back = api.0.keeper.roll_back(&found, &to, &caller.actor()).await;
    back.map(|back| Answer(api.shown(&caller, &back))).map_err(|error| caller.told(error))
}

impl Api {
    /// The snapshot of this name, if the caller may see it; one of another tenant does not exist.
    pub(crate) async fn snapshot(
        &self,
        caller: &Caller,
        name: &str,
    ) -> Result<lifecycle::Snapshot, Problem> {
        let wanted: SnapshotName = label("name", name)?;
        let found = self.0.keeper.find_snapshot(&wanted).await;
        let found = found.map_err(|error| caller.told(error))?;
        if caller.sees(&found.tenant) { Ok(found) } else { Err(no_snapshot(name)) }
    }
}

fn shown(snapshot: &lifecycle::Snapshot) -> Snapshot {
    Snapshot {
        name: snapshot.name.clone(),
        tenant: snapshot.tenant.clone(),
        sandbox: snapshot.sandbox.clone(),
        incarnation: snapshot.incarnation,
        memory_mib: snapshot.memory_mib,
        vcpus: snapshot.vcpus,
        bytes: snapshot.bytes(),
        created: rfc3339(snapshot.created()),
    }
}
