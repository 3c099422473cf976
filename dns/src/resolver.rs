//! The one resolver of the house: asks the upstreams in their order, remembers answers, failures
//! and dead upstreams, and asks once for everybody who waits for the same name.
//!
//! Its sockets are ordinary sockets of the world the calling runtime lives in. It judges nothing:
//! what it finds may be any address at all.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hickory_proto::op::ResponseCode;
use hickory_proto::rr::Name;
use hickory_resolver::Resolver as Client;
use hickory_resolver::config::{self, NameServerConfig, ResolveHosts};
use hickory_resolver::net::{DnsError, NetError};
use hickory_resolver::system_conf::read_system_conf;
use moka::future::Cache;
use policy::Host;

use crate::chain::{self, Family};
use crate::error::Error;
use crate::sockets::Sockets;

/// How long addresses are kept, whatever their TTL says.
const KEPT: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(300));
/// How long it is kept that a name or its addresses do not exist (RFC 2308 section 5).
const ABSENT: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// The same, when the upstream does not say.
const ABSENT_UNSAID: Duration = Duration::from_secs(5);
/// How long a failure to resolve is kept (RFC 9520 section 3.2).
const FAILED: Duration = Duration::from_secs(1);
/// How long an upstream that did not answer is asked last.
const SET_ASIDE: Duration = Duration::from_secs(10);

/// How to resolve.
#[derive(Clone, Debug)]
pub struct ResolverConfig {
    /// Recursive resolvers, the preferred first; empty: those of the system, read once.
    pub upstreams: Vec<SocketAddr>,
    /// From the question to the answer or the failure, whatever happens in between.
    pub timeout: Duration,
    /// How often each upstream is asked within that time, at least once.
    pub attempts: usize,
    /// Answers kept, for all guests together.
    pub cache_entries: u64,
}

impl Default for ResolverConfig {
    fn default() -> Self {
        Self {
            upstreams: Vec::new(),
            timeout: Duration::from_secs(4),
            attempts: 2,
            cache_entries: 65_536,
        }
    }
}

/// Addresses of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// At least one and at most 32, without repeats, in the upstream's order.
    pub addresses: Vec<IpAddr>,
    /// Until when they are good.
    pub until: Instant,
    /// For how long they were, when they came.
    pub lifetime: Duration,
}

impl Answer {
    /// What is left of their time to live.
    #[must_use]
    pub fn ttl(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }
}

/// A resolver. Clones share everything.
#[derive(Clone)]
pub struct Resolver {
    shared: Arc<Shared>,
}

struct Shared {
    upstreams: Vec<Upstream>,
    timeout: Duration,
    attempts: usize,
    known: Cache<(Host, Family), Known>,
}

/// What came of a lookup, and how long that is kept.
#[derive(Clone)]
struct Known {
    result: Result<Arc<Answer>, Error>,
    keep: Duration,
}

struct Upstream {
    address: SocketAddr,
    client: Client<Sockets>,
    sockets: Sockets,
    health: Mutex<Health>,
}

#[derive(Default)]
struct Health {
    answered: Option<Instant>,
    aside_until: Option<Instant>,
}

impl Resolver {
    /// Sets up the clients of the upstreams; nothing is asked yet.
    pub fn new(config: ResolverConfig) -> Result<Self, Error> {
        let addresses =
            if config.upstreams.is_empty() { system_upstreams()? } else { config.upstreams };
        let attempts = config.attempts.max(1);
        let tries = u32::try_from(addresses.len().saturating_mul(attempts)).unwrap_or(u32::MAX);
        let patience = config.timeout / tries.max(1);
        let upstreams = addresses
            .into_iter()
            .map(|address| Upstream::new(address, patience))
            .collect::<Result<_, _>>()?;
        let known = Cache::builder().max_capacity(config.cache_entries).expire_after(Keep).build();
        Ok(Self {
            shared: Arc::new(Shared { upstreams, timeout: config.timeout, attempts, known }),
        })
    }

    /// From the question to the answer or the failure.
    pub(crate) fn timeout(&self) -> Duration {
        self.shared.timeout
    }

    /// What is in memory about this name.
    pub(crate) async fn remembered(
        &self,
        host: &Host,
        family: Family,
    ) -> Option<Result<Arc<Answer>, Error>> {
        let known = self.shared.known.get(&(host.clone(), family)).await;
        known.map(|known| known.result)
    }

    /// Whether the answer about this name is in memory: asking for it now asks nobody.
    #[must_use]
    pub fn knows(&self, host: &Host, family: Family) -> bool {
        self.shared.known.contains_key(&(host.clone(), family))
    }

    /// The addresses of a name, from memory or from an upstream. Equal lookups that are under way
    /// at the same time are one. Every error but a set-up one is possible.
    pub async fn addresses(&self, host: &Host, family: Family) -> Result<Arc<Answer>, Error> {
        let lookup = self.shared.look_up(host, family);
        self.shared.known.get_with((host.clone(), family), lookup).await.result
    }
}

impl Shared {
    async fn look_up(&self, host: &Host, family: Family) -> Known {
        match tokio::time::timeout(self.timeout, self.ask(host, family)).await {
            Ok(known) => known,
            Err(_) => Known::failed(Error::TimedOut { host: host.clone(), within: self.timeout }),
        }
    }

    /// Asks the upstreams in turn until one knows.
    async fn ask(&self, host: &Host, family: Family) -> Known {
        let name = match Name::from_labels(host.as_str().split('.').map(str::as_bytes)) {
            Ok(name) => name,
            Err(source) => {
                return Known::failed(Error::Unanswered {
                    host: host.clone(),
                    source: source.into(),
                });
            }
        };
        let mut last = NetError::NoConnections;
        for _ in 0..self.attempts {
            for upstream in self.in_turn() {
                let asked = Instant::now();
                let error = match upstream.client.lookup(name.clone(), family.record_type()).await {
                    Ok(lookup) => {
                        upstream.answered();
                        let (addresses, ttl) = chain::reachable(&name, family, lookup.answers());
                        return Known::found(host, family, addresses, ttl);
                    }
                    Err(error) => error,
                };
                if let NetError::Dns(DnsError::NoRecordsFound(none)) = &error {
                    upstream.answered();
                    match none.response_code {
                        ResponseCode::NXDomain => {
                            let absent = Error::NoSuchName { host: host.clone() };
                            return Known::absent(absent, none.negative_ttl);
                        }
                        ResponseCode::NoError => {
                            let absent = Error::NoAddresses { host: host.clone(), family };
                            return Known::absent(absent, none.negative_ttl);
                        }
                        _ => {}
                    }
                }
                // That is nobody's fault whom it was to ask.
                if upstream.sockets.were_refused(asked) {
                    return Known::failed(Error::Exhausted { host: host.clone() });
                }
                if let NetError::Timeout | NetError::Io(_) | NetError::NoConnections = error {
                    upstream.unanswered(asked, &error);
                }
                last = error;
            }
        }
        Known::failed(match last {
            NetError::Timeout => Error::TimedOut { host: host.clone(), within: self.timeout },
            source => Error::Unanswered { host: host.clone(), source },
        })
    }

    /// The upstreams in their order, those that lately did not answer at the end.
    fn in_turn(&self) -> Vec<&Upstream> {
        let now = Instant::now();
        let mut upstreams: Vec<_> = self.upstreams.iter().collect();
        upstreams.sort_by_cached_key(|upstream| upstream.is_aside(now));
        upstreams
    }
}

impl Upstream {
    fn new(address: SocketAddr, patience: Duration) -> Result<Self, Error> {
        let mut server = NameServerConfig::udp_and_tcp(address.ip());
        for connection in &mut server.connections {
            connection.port = address.port();
        }
        let servers = config::ResolverConfig::from_parts(None, vec![], vec![server]);
        let sockets = Sockets::default();
        let mut builder = Client::builder_with_config(servers, sockets.clone());
        let options = builder.options_mut();
        // The cache, the order and the tries are ours; the host's own /etc/hosts is not the guests'.
        options.cache_size = 0;
        options.attempts = 0;
        options.timeout = patience;
        options.num_concurrent_reqs = 1;
        options.use_hosts_file = ResolveHosts::Never;
        options.preserve_intermediates = true;
        options.max_active_requests = 1024;
        // Beside a random port and id, an answer must repeat random letter case to be believed; one
        // that does not is asked for again over TCP.
        options.case_randomization = true;
        let client =
            builder.build().map_err(|source| Error::Client { upstream: address, source })?;
        Ok(Self { address, client, sockets, health: Mutex::default() })
    }

    fn is_aside(&self, now: Instant) -> bool {
        self.health().aside_until.is_some_and(|until| until > now)
    }

    fn answered(&self) {
        *self.health() = Health { answered: Some(Instant::now()), aside_until: None };
    }

    /// It did not answer what it was asked at `asked`. If it answered anything since, it is the
    /// name that is dead, which a guest may have chosen, and not the upstream.
    fn unanswered(&self, asked: Instant, error: &NetError) {
        let mut health = self.health();
        if health.answered.is_some_and(|answered| answered >= asked) {
            return;
        }
        if health.aside_until.replace(Instant::now() + SET_ASIDE).is_none() {
            tracing::warn!(upstream = %self.address, %error, "upstream resolver set aside");
        }
    }

    fn health(&self) -> MutexGuard<'_, Health> {
        self.health.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    fn found(host: &Host, family: Family, addresses: Vec<IpAddr>, ttl: u32) -> Self {
        if addresses.is_empty() {
            return Self::absent(Error::NoAddresses { host: host.clone(), family }, None);
        }
        let keep = Duration::from_secs(ttl.into()).clamp(KEPT.0, KEPT.1);
        let until = Instant::now() + keep;
        Self { result: Ok(Arc::new(Answer { addresses, until, lifetime: keep })), keep }
    }

    fn absent(error: Error, ttl: Option<u32>) -> Self {
        let keep = ttl.map_or(ABSENT_UNSAID, |ttl| Duration::from_secs(ttl.into()));
        Self { result: Err(error), keep: keep.clamp(ABSENT.0, ABSENT.1) }
    }

    fn failed(error: Error) -> Self {
        Self { result: Err(error), keep: FAILED }
    }
}

struct Keep;

impl moka::Expiry<(Host, Family), Known> for Keep {
    fn expire_after_create(
        &self,
        _: &(Host, Family),
        known: &Known,
        _: Instant,
    ) -> Option<Duration> {
        Some(known.keep)
    }
}

fn system_upstreams() -> Result<Vec<SocketAddr>, Error> {
    let (config, _) = read_system_conf().map_err(Error::System)?;
    let mut upstreams = Vec::new();
    for server in config.name_servers() {
        let port = server.connections.first().map_or(53, |connection| connection.port);
        let upstream = SocketAddr::new(server.ip, port);
        if !upstreams.contains(&upstream) {
            upstreams.push(upstream);
        }
    }
    if upstreams.is_empty() { Err(Error::NoUpstreams) } else { Ok(upstreams) }
}

impl fmt::Debug for Resolver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let upstreams: Vec<_> = self.shared.upstreams.iter().map(|one| one.address).collect();
        f.debug_struct("Resolver").field("upstreams", &upstreams).finish_non_exhaustive()
    }
}
