//! Who is asking: a peer of the unix socket, known by its kernel credentials, or the bearer of a
//! token over TCP. No request gets past [`admit`] without one of the two.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::extract::{FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::http::uri::Authority;
use axum::http::{HeaderMap, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use lifecycle::Actor;
use policy::TenantName;
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityScheme};

use crate::api::Api;
use crate::api::listen::Place;
use crate::config::{Config, Reach, Token};
use crate::error::chain;
use crate::problem::{Kind, Problem};

/// Where a connection came from; set by the listener, never by the request.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Origin {
    /// The unix socket.
    Unix { uid: u32, pid: Option<i32> },
    /// TCP.
    Tcp { from: SocketAddr },
}

/// Who asks, and for whom it may ask.
#[derive(Clone, Debug)]
pub(crate) struct Caller {
    who: String,
    reach: Reach,
    local: bool,
}

/// Policy writes of a tenant at once: one under way, and one that waits for it.
const WRITES: usize = 2;
/// Policies of a tenant's new sandboxes that are read at once. Others wait: many are often made together.
const BIRTHS: usize = 1;
/// Questions of a tenant to the accounts at once: each reads as many rows as there are of it.
const QUESTIONS: usize = 1;

/// What is needed to tell callers over TCP.
#[derive(Debug)]
pub(crate) struct Door {
    tokens: Vec<Token>,
    hosts: Vec<String>,
    /// Places among the connections of one tenant, for each that has a token.
    places: HashMap<String, Arc<Semaphore>>,
    most: usize,
    /// Places among the policy writes of a tenant, the same way. The operator has no need of one.
    writes: HashMap<TenantName, Arc<Semaphore>>,
    /// Turns among the policies of its new sandboxes.
    births: HashMap<TenantName, Arc<Semaphore>>,
    /// Places among its questions to the accounts.
    questions: HashMap<TenantName, Arc<Semaphore>>,
}

impl Caller {
    pub(crate) fn actor(&self) -> Actor {
        Actor::new(&*self.who, self.is_operator())
    }

    /// The only tenant it acts for, if there is only one.
    pub(crate) fn tenant(&self) -> Option<&TenantName> {
        match &self.reach {
            Reach::All => None,
            Reach::Tenant(tenant) => Some(tenant),
        }
    }

    pub(crate) fn sees(&self, tenant: &TenantName) -> bool {
        self.tenant().is_none_or(|own| own == tenant)
    }

    /// Whether it may know everything about the node: it acts for all tenants.
    pub(crate) fn is_operator(&self) -> bool {
        self.tenant().is_none()
    }

    /// What it is told of a failure: the operator also what caused it, which may name paths and
    /// devices of the node; others find a word in the log for it.
    pub(crate) fn told(&self, error: lifecycle::Error) -> Problem {
        let (full, cause) = (error.full(), chain(&error));
        let problem = Problem::from(error);
        if problem.code == Kind::Failed {
            tracing::error!(error = cause, caller = self.who, "request failed");
        }
        match full {
            Some(full) if self.is_operator() => Problem { message: full.into(), ..problem },
            Some(_) if problem.fix.is_none() => {
                problem.fix("ask the operator: the log of the daemon says more")
            }
            _ => problem,
        }
    }

    /// What it is told of why a sandbox is as it is.
    pub(crate) fn reason(&self, reason: &lifecycle::Reason) -> String {
        if self.is_operator() { reason.full() } else { reason.told() }.to_owned()
    }

    /// Whether it came over the unix socket.
    pub(crate) fn is_local(&self) -> bool {
        self.local
    }
}

impl Door {
    pub(crate) fn new(config: &Config) -> Self {
        let most = config.tenants.connections;
        let api = &config.api;
        let whose = api.token.iter().map(|token| String::from(token.tenant.clone()));
        let places = whose.map(|whose| (whose, Arc::new(Semaphore::new(most)))).collect();
        let each_tenant = |most| {
            let tenants = api.token.iter().filter_map(|token| match &token.tenant {
                Reach::Tenant(tenant) => Some(tenant.clone()),
                Reach::All => None,
            });
            tenants.map(|tenant| (tenant, Arc::new(Semaphore::new(most)))).collect()
        };
        let (writes, births) = (each_tenant(WRITES), each_tenant(BIRTHS));
        let questions = each_tenant(QUESTIONS);
        let (tokens, hosts) = (api.token.clone(), api.hosts.clone());
        Self { tokens, hosts, places, most, writes, births, questions }
    }

    /// Takes the place of the caller's tenant among the questions to the accounts; the operator needs none.
    pub(crate) fn place_to_ask(
        &self,
        caller: &Caller,
    ) -> Result<Option<OwnedSemaphorePermit>, Problem> {
        let places = caller.tenant().and_then(|tenant| self.questions.get(tenant));
        let place = places.map(|places| Arc::clone(places).try_acquire_owned()).transpose();
        place.map_err(|_| {
            Problem::new(Kind::Busy, "a question of this tenant to the accounts is under way")
                .fix("wait for its answer")
        })
    }

    /// Takes a place among the policy writes of the caller's tenant; the operator needs none.
    pub(crate) fn place_to_write(
        &self,
        caller: &Caller,
    ) -> Result<Option<OwnedSemaphorePermit>, Problem> {
        let places = caller.tenant().and_then(|tenant| self.writes.get(tenant));
        let place = places.map(|places| Arc::clone(places).try_acquire_owned()).transpose();
        place.map_err(|_| {
            let problem = "a policy write of this tenant is under way, and another one waits";
            Problem::new(Kind::Busy, problem)
                .fix("wait for an answer, or put the rules of several writes into one")
        })
    }

    /// Waits for a turn to have the policy of a new sandbox read; the operator needs none.
    pub(crate) async fn turn_to_make(&self, caller: &Caller) -> Option<OwnedSemaphorePermit> {
        let turns = caller.tenant().and_then(|tenant| self.births.get(tenant))?;
        // Nobody closes it.
        Arc::clone(turns).acquire_owned().await.ok()
    }

    /// Counts a connection among those of its caller's tenant.
    fn seat(&self, caller: &Caller, place: Option<&Place>) -> Result<(), Problem> {
        let whose = String::from(caller.reach.clone());
        let places = self.places.get(&whose).filter(|_| !caller.local);
        let Some((place, places)) = place.zip(places) else { return Ok(()) };
        if place.among(places) {
            return Ok(());
        }
        let problem = format!("has {} connections to the API open, as many as it may", self.most);
        let problem = Problem::invalid("tenant", &whose, problem).of(Kind::Quota);
        Err(problem.fix("close some, or have `tenants.connections` raised"))
    }

    fn caller(&self, origin: Option<Origin>, request: &Request) -> Result<Caller, Problem> {
        match origin {
            Some(Origin::Unix { uid, pid }) => {
                let pid = pid.map(|pid| format!(" pid={pid}")).unwrap_or_default();
                Ok(Caller { who: format!("uid={uid}{pid}"), reach: Reach::All, local: true })
            }
            Some(Origin::Tcp { from }) => {
                self.check_host(request)?;
                let token = self.bearer(request.headers()).ok_or_else(|| {
                    Problem::new(Kind::Unauthorized, "no known token was given")
                        .fix("send `Authorization: Bearer <token>`, or set POSTERN_TOKEN")
                })?;
                let who = format!("token={} from={from}", token.name);
                Ok(Caller { who, reach: token.tenant.clone(), local: false })
            }
            None => Err(Problem::new(Kind::Unauthorized, "it is not known who asks")),
        }
    }

    /// Against DNS rebinding: a page of a foreign site reaches us under that site's name, so only
    /// addresses and the names that the operator listed are answered.
    fn check_host(&self, request: &Request) -> Result<(), Problem> {
        let sent = request.headers().get_all(header::HOST);
        let mut sent = sent.iter().map(|value| value.to_str().unwrap_or_default());
        let (first, more) = (sent.next().unwrap_or_default(), sent.next().is_some());
        let uri = request.uri().authority().map_or(first, Authority::as_str);
        let known = |text: &str| {
            text.parse::<Authority>().is_ok_and(|authority| {
                let host = authority.host();
                let literal = host.trim_start_matches('[').trim_end_matches(']');
                literal.parse::<std::net::IpAddr>().is_ok()
                    || self.hosts.iter().any(|own| own.eq_ignore_ascii_case(host))
            })
        };
        if more || !known(first) || !known(uri) {
            let mut problem = Problem::invalid("host", first, "is not a name of this node");
            problem.code = Kind::Misdirected;
            return Err(problem.fix("ask by address, or add the name to `api.hosts`"));
        }
        Ok(())
    }

    /// The token that is borne. Every digest is compared, each in constant time.
    fn bearer(&self, headers: &HeaderMap) -> Option<&Token> {
        let sent = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
        let (scheme, secret) = sent.split_once(' ')?;
        if !scheme.eq_ignore_ascii_case("bearer") {
            return None;
        }
        let digest = Sha256::digest(secret.trim().as_bytes());
        let mut found = None;
        for token in &self.tokens {
            if bool::from(token.sha256.0.ct_eq(digest.as_slice())) {
                found = Some(token);
            }
        }
        found
    }
}

/// Lets a request in only together with its [`Caller`].
pub(crate) async fn admit(State(api): State<Api>, mut request: Request, next: Next) -> Response {
    let origin = request.extensions().get::<Origin>().copied();
    let door = &api.0.door;
    let admitted = door.caller(origin, &request).and_then(|caller| {
        let place = request.extensions().get::<Place>();
        door.seat(&caller, place)?;
        if let Some(place) = place {
            place.known();
        }
        Ok(caller)
    });
    match admitted {
        Ok(caller) => {
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        // Who is not let in keeps no place from others.
        Err(problem) => ([(header::CONNECTION, "close")], problem).into_response(),
    }
}

impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Problem> {
        let caller = parts.extensions.get::<Self>().cloned();
        caller.ok_or_else(|| Problem::new(Kind::Unauthorized, "it is not known who asks"))
    }
}

/// Tells the description how callers over TCP are known.
pub(crate) struct Security;

impl utoipa::Modify for Security {
    fn modify(&self, openapi: &mut utoipa::openapi::OpenApi) {
        let components = openapi.components.get_or_insert_default();
        let bearer = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
        components.add_security_scheme("token", bearer);
    }
}
