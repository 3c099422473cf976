//! How refusals and failures leave: always the same JSON, always the status of their kind.

use axum::Json;
use axum::http::{HeaderValue, Method, Uri, header};
use axum::response::{IntoResponse, Response};

use crate::problem::{ErrorBody, Kind, Problem};
use crate::wire::EXEC_PROTOCOL;

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let kind = self.code;
        let mut response = (kind.status(), Json(ErrorBody { error: self })).into_response();
        let headers = response.headers_mut();
        match kind {
            Kind::Unauthorized => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            Kind::UpgradeRequired => {
                headers.insert(header::UPGRADE, HeaderValue::from_static(EXEC_PROTOCOL));
            }
            Kind::Busy => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
            }
            _ => {}
        }
        response
    }
}

/// In the words for whoever is not the operator.
impl From<lifecycle::Error> for Problem {
    fn from(error: lifecycle::Error) -> Self {
        use lifecycle::Error as E;
        // What several may have waited for.
        if let E::Shared(shared) = &error {
            match &**shared {
                E::NoRoom { doing, .. } => return no_room(doing),
                E::Invalid(field) => return Self::from(E::Invalid(field.clone())),
                E::Share(field) => return Self::from(E::Share(field.clone())),
                E::NoSnapshot(name) => return no_snapshot(name),
                E::SnapshotExists(name) => {
                    return Self::from(E::SnapshotExists(name.clone()));
                }
                &E::Reserve { free, reserve } => return Self::from(E::Reserve { free, reserve }),
                wrong @ E::WrongState { .. } => {
                    return Self::new(Kind::Conflict, wrong.to_string());
                }
                _ => {}
            }
        }
        match error {
            E::Policy(refused) => refused.into(),
            E::Invalid(field) => {
                let problem = Self::invalid(field.field, "", field.problem).fix(field.fix);
                Self { value: Some(field.value.into()), ..problem }
            }
            E::NotFound(name) => {
                Self::new(Kind::NotFound, "is no sandbox of this node").given(&name)
            }
            E::NoSnapshot(name) => no_snapshot(&name),
            E::SnapshotExists(name) => Self::invalid("snapshot", name.as_str(), "is taken")
                .fix("choose another name, or remove that snapshot")
                .of(Kind::Conflict),
            E::Exists(name) => Self::invalid("name", name.as_str(), "is taken")
                .fix("choose another name, or remove that sandbox")
                .of(Kind::Conflict),
            E::Conflict { current, .. } => {
                Self::new(Kind::RevisionMoved, format!("the policy is at revision {current}"))
                    .fix("read it again and repeat the change")
            }
            E::Unreadable { .. } => Self::new(Kind::Conflict, error.to_string())
                .fix("write it anew, whole: until then nothing leaves what is under it"),
            E::WrongState { .. } => Self::new(Kind::Conflict, error.to_string()),
            E::Quota { tenant, limit } => {
                let problem = format!("has {limit} sandboxes, as many as one tenant may have");
                Self::invalid("tenant", tenant.as_str(), problem)
                    .fix("remove one, or have `tenants.sandboxes` raised")
                    .of(Kind::Quota)
            }
            E::Share(field) => {
                let problem = Self::invalid(field.field, "", field.problem).fix(field.fix);
                Self { value: Some(field.value.into()), ..problem }.of(Kind::Quota)
            }
            E::Reserve { .. } => {
                let problem = Self::new(Kind::Storage, error.told()).fix(
                    "free some room there, remove a sandbox, or have `limits.state_reserve` lowered",
                );
                Self { field: Some("limits.state_reserve".into()), ..problem }
            }
            E::Returning { .. } => {
                let fix = "free some room there, remove or suspend another sandbox, or have \
                           `limits.state_reserve` lowered; it stays in the store until then";
                let problem = Self::new(Kind::Storage, error.told()).fix(fix);
                Self { field: Some("limits.state_reserve".into()), ..problem }
            }
            E::Resting(tenant) => {
                let problem = "had so many sandboxes of late that as many slots rest after them as \
                               are free";
                Self::invalid("tenant", tenant.as_str(), problem)
                    .fix("wait for as long as `guests.slot_rest`, or reuse sandboxes")
                    .of(Kind::Quota)
            }
            E::NoImage(_) => Self::invalid("driver", "qemu", error.told())
                .fix("build it with `make image` and point `qemu.image` at it, or use `external`"),
            E::NoRoom { doing, .. } => no_room(doing),
            E::Port { .. } => Self::new(Kind::Unavailable, error.to_string())
                .fix("see whether a program of the guest listens there"),
            E::Late { .. } => Self::new(Kind::Unavailable, error.to_string()).fix("ask again"),
            E::Agent { .. } | E::Full(_) | E::Stopping => {
                Self::new(Kind::Unavailable, error.told())
            }
            failed => Self::new(Kind::Failed, failed.told()),
        }
    }
}

/// Nor is one of another tenant.
pub(crate) fn no_snapshot(name: &str) -> Problem {
    Problem::new(Kind::NotFound, "is no snapshot of this node")
        .given(name)
        .fix("`postern snapshots` lists those there are")
}

fn no_room(doing: &str) -> Problem {
    let problem = format!("{doing} failed: the disk with the state is full");
    Problem::new(Kind::Unavailable, problem).fix("free some room there and ask again")
}

pub(crate) async fn no_such_path(uri: Uri) -> Problem {
    Problem::new(Kind::NotFound, "no such path")
        .given(uri.path())
        .fix("GET /v1/openapi.json lists the paths")
}

pub(crate) async fn no_such_method(method: Method) -> Problem {
    Problem::new(Kind::MethodNotAllowed, "this path has no such method")
        .given(method.as_str())
        .fix("the header `allow` lists those it has")
}
