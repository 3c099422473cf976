//! About the node itself: how it is, and what it can be asked.

use axum::Json;
use axum::extract::State;

use crate::api::Api;
use crate::api::caller::Caller;
use crate::problem::ErrorBody;
use crate::telemetry;
use crate::wire::Health;

/// How the daemon is.
#[utoipa::path(
    get, path = "/v1/health", tag = "node",
    responses(
        (status = 200, description = "It serves.", body = Health),
        (status = "default", description = "Refused.", body = ErrorBody),
    )
)]
pub(crate) async fn health(State(api): State<Api>, caller: Caller) -> Json<Health> {
    let of_node = caller.is_operator();
    let status = if api.0.stop.is_cancelled() { "stopping" } else { "ok" };
    Json(Health {
        status: status.into(),
        version: env!("CARGO_PKG_VERSION").into(),
        uptime_seconds: api.0.started.elapsed().as_secs(),
        sandboxes: api.0.keeper.list(caller.tenant()).len(),
        audit_lost: of_node.then(|| api.0.audit.dropped()),
        panics: of_node.then(telemetry::panics),
        stuck_slots: of_node.then(|| api.0.keeper.stuck_slots()),
    })
}

/// This description.
#[utoipa::path(
    get, path = "/v1/openapi.json", tag = "node",
    responses(
        (status = 200, description = "OpenAPI 3.1.", body = Object),
        (status = "default", description = "Refused.", body = ErrorBody),
    )
)]
pub(crate) async fn openapi(_caller: Caller) -> Json<utoipa::openapi::OpenApi> {
    Json(crate::api::description())
}
