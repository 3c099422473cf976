//! The control API: HTTP/1.1 with JSON under `/v1`, described by OpenAPI made from this code.
//!
//! Decides who may ask, reads what is asked whole, calls the keeper, and answers; nothing else. A
//! caller with a tenant's token neither sees nor touches what is not that tenant's.

mod snapshots;
mod sandboxes;
mod rest;
mod policies;
mod usage;
mod metrics;
mod events;
mod node;
mod question;
mod body;
mod listen;
mod strangers;
mod caller;
mod answer;

use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::middleware::from_fn_with_state;
use lifecycle::{Found, Keeper};
use policy::{SandboxName, TenantName};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::api::caller::Security;
use crate::auditlog::AuditLog;
use crate::config::{Config, Qemu};
use crate::problem::{Kind, Problem};

pub use listen::{Listener, bind, serve};

/// What the handlers work with. Clones share it.
#[derive(Clone, Debug)]
pub struct Api(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    keeper: Keeper,
    router: egress::Router,
    audit: AuditLog,
    defaults: Qemu,
    door: caller::Door,
    started: Instant,
    stop: CancellationToken,
    relays: TaskTracker,
}

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Postern",
        description = "What a microVM may reach, under which name, from which address.",
        license(name = "Apache-2.0", identifier = "Apache-2.0")
    ),
    security(("token" = []), ()),
    modifiers(&Security)
)]
struct Described;

impl Api {
    /// Handlers over these parts; they end what they are at when `stop` is cancelled.
    #[must_use]
    pub fn new(
        config: &Config,
        keeper: Keeper,
        router: egress::Router,
        audit: AuditLog,
        stop: CancellationToken,
    ) -> Self {
        Self(Arc::new(Shared {
            keeper,
            router,
            audit,
            defaults: config.qemu.clone(),
            door: caller::Door::new(config),
            started: Instant::now(),
            stop,
            relays: TaskTracker::new(),
        }))
    }

    /// Everything that is served, ready to be handed to [`serve`].
    pub fn routes(&self) -> Router {
        let (routes, _) = paths().split_for_parts();
        routes
            .fallback(answer::no_such_path)
            .method_not_allowed_fallback(answer::no_such_method)
            .layer(from_fn_with_state(self.clone(), caller::admit))
            .with_state(self.clone())
    }

    /// Waits until upgraded connections, which no HTTP server knows of any more, have ended.
    pub async fn drained(&self) {
        self.0.relays.close();
        self.0.relays.wait().await;
    }

    /// The sandbox of this name, if the caller may see it; one of another tenant does not exist. Whatever
    /// is done is done to this one: the name may be somebody else's a moment later.
    fn sandbox(&self, caller: &caller::Caller, name: &str) -> Result<Found, Problem> {
        let absent = || {
            Problem::new(Kind::NotFound, "is no sandbox of this node")
                .given(name)
                .fix("`postern ls` lists those there are")
        };
        let name: SandboxName = label("name", name)?;
        let found = self.0.keeper.find(&name).map_err(|_| absent())?;
        if caller.sees(found.tenant()) { Ok(found) } else { Err(absent()) }
    }
}

/// The OpenAPI description of everything under `/v1`.
#[must_use]
pub fn description() -> utoipa::openapi::OpenApi {
    paths().split_for_parts().1
}

fn paths() -> OpenApiRouter<Api> {
    OpenApiRouter::with_openapi(Described::openapi())
        .routes(routes!(sandboxes::list, sandboxes::create))
        .routes(routes!(sandboxes::show, sandboxes::remove))
        .routes(routes!(sandboxes::exec))
        .routes(routes!(rest::standby))
        .routes(routes!(rest::suspend))
        .routes(routes!(rest::resume))
        .routes(routes!(rest::keep_awake))
        .routes(routes!(rest::renew))
        .routes(routes!(rest::connect))
        .routes(routes!(snapshots::list))
        .routes(routes!(snapshots::show, snapshots::remove))
        .routes(routes!(snapshots::take))
        .routes(routes!(snapshots::clone))
        .routes(routes!(snapshots::roll_back))
        .routes(routes!(policies::of_sandbox, policies::set_of_sandbox))
        .routes(routes!(policies::add_to_sandbox))
        .routes(routes!(policies::set_mode_of_sandbox))
        .routes(routes!(policies::explain))
        .routes(routes!(policies::of_tenant, policies::set_of_tenant))
        .routes(routes!(policies::add_to_tenant))
        .routes(routes!(policies::set_mode_of_tenant))
        .routes(routes!(policies::of_platform, policies::set_of_platform))
        .routes(routes!(policies::add_to_platform))
        .routes(routes!(usage::usage))
        .routes(routes!(metrics::metrics))
        .routes(routes!(events::events))
        .routes(routes!(node::health))
        .routes(routes!(node::openapi))
}

/// A name in a path or query.
fn label<T: std::str::FromStr<Err = policy::id::LabelError>>(
    field: &str,
    text: &str,
) -> Result<T, Problem> {
    text.parse().map_err(|_| {
        Problem::invalid(field, text, "is not a name")
            .fix("use 1 to 40 of a-z, 0-9 and '-', starting and ending with a letter or digit")
    })
}

fn tenant(text: &str) -> Result<TenantName, Problem> {
    label("tenant", text)
}

#[cfg(test)]
mod tests;
