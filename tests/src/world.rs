//! The world in a box: a host where the daemon runs, an internet with honest and hostile addresses,
//! and a capture of everything that crosses the one link between them.
//!
//! ```text
//!   guests ── taps ── (the daemon's namespace) ── daemon ── host ── veth ── internet
//! ```
//! The host forwards packets and has routes to everywhere, as a host with containers has: whatever
//! leaks out of the guests' namespace would arrive and be seen.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::ca::Authority;
use crate::client::PATIENT;
use crate::daemon::{Answer, Daemon, Ran};
use crate::nameserver::Nameserver;
use crate::netns::{DIRECTORY_PREFIX, MACHINE_PREFIX, Netns, run};
use crate::origin::{Arrival, Origin, port};
use crate::poll::eventually;
use crate::wire::{Seen, Wire};

/// The address all allowed traffic leaves from.
pub const EGRESS: Ipv4Addr = Ipv4Addr::new(93, 184, 216, 10);
/// The IPv6 address of the host that allowed traffic leaves from, where a world is told so.
pub const EGRESS_V6: Ipv6Addr = Ipv6Addr::new(0x2606, 0x2800, 0x220, 0, 0, 0, 0, 0x10);
/// A second address of the host, used for its own traffic and never for guests'.
pub const HOST: Ipv4Addr = Ipv4Addr::new(93, 184, 216, 11);
/// What the host's kernel chooses where nobody else does: a socket that was not bound to [`EGRESS`] is
/// seen to leave from here.
pub const UNBOUND: Ipv4Addr = Ipv4Addr::new(93, 184, 216, 12);
/// The upstream resolver.
pub const UPSTREAM: Ipv4Addr = Ipv4Addr::new(9, 9, 9, 9);
/// A public resolver that a guest may try on its own.
pub const PUBLIC_RESOLVER: Ipv4Addr = Ipv4Addr::new(8, 8, 8, 8);
/// The cloud's metadata service: there, and reachable from the host.
pub const METADATA: Ipv4Addr = Ipv4Addr::new(169, 254, 169, 254);
/// A private neighbour of the host: there, and reachable from the host.
pub const NEIGHBOUR: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 5);
/// Port of a service of the host itself that listens on all its addresses; the internet has an HTTP
/// server on the same port.
pub const HOST_SERVICE: u16 = port::HTTP_ALT;

const GATEWAY: Ipv4Addr = Ipv4Addr::new(93, 184, 216, 1);
const GATEWAY_V6: &str = "2606:2800:220::1";
const UPLINK_MAC: [u8; 6] = [0x02, 0x05, 0x7e, 0, 0, 0x10];
/// What the internet of a world is: every address in here is local to it.
const INTERNET: [&str; 7] = [
    "151.101.0.0/16",
    "45.66.0.0/16",
    "9.9.9.9/32",
    "8.8.8.8/32",
    "169.254.169.254/32",
    "10.0.0.0/8",
    "192.0.2.0/24",
];

/// The same, for IPv6.
const INTERNET_V6: &str = "2a04:4e42::/32";

/// A name on the internet and the address it truly has, used by one test only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Site {
    /// Its name.
    pub name: String,
    /// Its address.
    pub ip: Ipv4Addr,
}

/// A place in the capture of the uplink.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mark(usize);

impl Site {
    /// A socket address of it.
    #[must_use]
    pub fn at(&self, port: u16) -> SocketAddr {
        (self.ip, port).into()
    }
}

/// One world. Dropping it removes it.
#[derive(Debug)]
pub struct World {
    daemon: Mutex<Daemon>,
    /// What crosses the uplink of the host.
    pub wire: Wire,
    /// The memory of the internet's servers.
    pub origin: Origin,
    /// The memory of the upstream resolver.
    pub names: Nameserver,
    /// Who signs the origins.
    pub authority: Authority,
    /// The guests' namespace, made by the daemon.
    pub taps: Netns,
    /// Where the daemon runs.
    pub host: Netns,
    /// Everything outside.
    pub internet: Netns,
    dir: PathBuf,
    guests: AtomicUsize,
    sites: AtomicU32,
}

impl World {
    /// A world with a running daemon.
    #[must_use]
    pub fn new() -> Self {
        Self::with("")
    }

    /// The same with more configuration, in TOML; its keys win.
    #[must_use]
    pub fn with(more: &str) -> Self {
        let world = Self::without_daemon(more);
        world.daemon().start(&world.host);
        world
    }

    /// The world that tests share which leave it as it was, apart from guests and sites of their own.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<World> = OnceLock::new();
        SHARED.get_or_init(Self::new)
    }

    /// A world whose daemon is configured but has not been started.
    ///
    /// # Panics
    /// When the world cannot be built, e.g. without root.
    #[must_use]
    pub fn without_daemon(more: &str) -> Self {
        let (host, internet, taps) = (Netns::new("host"), Netns::new("net"), Netns::to_be("taps"));
        link(&host, &internet);
        let authority = Authority::new();
        let (origin, names) = (Origin::default(), Nameserver::default());
        serve(&internet, &origin, &names, &authority);
        tripwire(&host);
        let wire = Wire::tapped(&internet);
        let dir = PathBuf::from(format!("{DIRECTORY_PREFIX}-{}", host.number()));
        std::fs::create_dir_all(&dir).expect("the world's folder");
        std::fs::write(dir.join("ca.pem"), authority.pem()).expect("write the authority");
        let daemon = Daemon::new(&dir, &Self::configuration(&dir, taps.name(), more));
        Self {
            daemon: Mutex::new(daemon),
            wire,
            origin,
            names,
            authority,
            taps,
            host,
            internet,
            dir,
            guests: AtomicUsize::new(0),
            sites: AtomicU32::new(0),
        }
    }

    /// The daemon's configuration, with the keys of `more` added or replaced.
    fn configuration(dir: &Path, taps: &str, more: &str) -> String {
        let dir = dir.display();
        let base = format!(
            "state_dir = \"{dir}/state\"\nrun_dir = \"{dir}/run\"\n\
             [api]\nsocket = \"{dir}/postern.sock\"\n\
             [guests]\nnetns = \"{taps}\"\nslot_rest = \"1s\"\n\
             [egress]\naddresses = [\"{EGRESS}\"]\n\
             [dns]\nupstreams = [\"{UPSTREAM}:53\"]\n\
             [audit]\ndir = \"{dir}/audit\"\n\
             [log]\nfilter = \"debug\"\n"
        );
        let mut config: toml::Table = base.parse().expect("TOML");
        for (section, keys) in more.parse::<toml::Table>().expect("TOML") {
            match (config.get_mut(&section), keys) {
                (Some(toml::Value::Table(known)), toml::Value::Table(keys)) => known.extend(keys),
                (_, keys) => drop(config.insert(section, keys)),
            }
        }
        config.to_string()
    }

    /// Waits until what an earlier daemon left half made or half removed is undone, which no daemon
    /// waits for before it answers.
    ///
    /// # Panics
    /// When that is not over in time.
    pub fn undone(&self) {
        eventually("what was begun is undone", PATIENT, || {
            let listed = self.api("GET", "/v1/sandboxes", &[]).json;
            let states = listed["sandboxes"].as_array().expect("sandboxes").iter();
            let mut states = states.filter_map(|one| one["state"].as_str());
            (!states.any(|state| ["creating", "deleting"].contains(&state))).then_some(())
        });
    }

    /// The daemon, for those who stop and start it.
    pub fn daemon(&self) -> MutexGuard<'_, Daemon> {
        self.daemon.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Runs `postern <words>`.
    pub fn cli(&self, words: &[&str]) -> Ran {
        let mut command = self.daemon().command(words);
        Ran::of(&command.stdin(std::process::Stdio::null()).output().expect("run postern"))
    }

    /// The world's own folder.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// A new honest site, in the table of the upstream resolver.
    pub fn site(&self, label: &str) -> Site {
        self.place(label, "example.com", Ipv4Addr::new(151, 101, 0, 0))
    }

    /// A new honest name that has this one IPv6 address and no other.
    pub fn site_v6(&self, label: &str) -> (String, Ipv6Addr) {
        let n = self.sites.fetch_add(1, Ordering::Relaxed) + 1;
        let name = format!("{label}-{n}.example.com");
        let low = u16::try_from(n).unwrap_or(u16::MAX);
        let ip = Ipv6Addr::new(0x2a04, 0x4e42, 0, 0, 0, 0, 0, low);
        self.names.set(&name, &[ip.into()]);
        (name, ip)
    }

    /// A new address and name of the attacker, who can see all that is sent there.
    pub fn attacker(&self) -> Site {
        self.place("sink", "attacker.net", Ipv4Addr::new(45, 66, 0, 0))
    }

    fn place(&self, label: &str, zone: &str, base: Ipv4Addr) -> Site {
        let n = self.sites.fetch_add(1, Ordering::Relaxed) + 1;
        let name = format!("{label}-{n}.{zone}");
        let ip = Ipv4Addr::from_bits(base.to_bits() + n);
        self.names.set(&name, &[ip.into()]);
        Site { name, ip }
    }

    /// The name for a sandbox with a microVM: one in a world, by which it is found and ended.
    #[must_use]
    pub fn machine_name(&self) -> String {
        format!("{MACHINE_PREFIX}-{}", self.host.number())
    }

    /// A sandbox name that nobody used in this world.
    pub fn fresh_name(&self) -> String {
        format!("g{}", self.guests.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// Frames that left the host so far for this address, but for those from [`HOST`]. Whatever was
    /// sent before this call is counted: a marker packet is sent behind it and waited for.
    pub fn sent_to(&self, address: impl Into<IpAddr>) -> Vec<Seen> {
        let address = address.into();
        self.sent(|seen| seen.is_to(address))
    }

    /// The same for the frames that `wanted` picks.
    pub fn sent(&self, wanted: impl Fn(&Seen) -> bool) -> Vec<Seen> {
        self.sent_since(Mark(0), wanted)
    }

    /// The same for the frames behind a mark.
    pub fn sent_since(&self, mark: Mark, wanted: impl Fn(&Seen) -> bool) -> Vec<Seen> {
        self.mark();
        let ours = |seen: &Seen| seen.mac == UPLINK_MAC && !seen.is_from(HOST);
        self.wire.frames_since(mark.0, |seen| ours(seen) && wanted(seen))
    }

    /// The same for the frames before a mark.
    pub fn sent_until(&self, mark: Mark, wanted: impl Fn(&Seen) -> bool) -> Vec<Seen> {
        let ours = |seen: &Seen| seen.mac == UPLINK_MAC && !seen.is_from(HOST);
        self.wire.frames_until(mark.0, |seen| ours(seen) && wanted(seen))
    }

    /// Waits until all that the host has sent is in the capture.
    ///
    /// # Panics
    /// When the marker is not seen: then the capture is broken, and silence proves nothing.
    pub fn settle(&self) {
        self.mark();
    }

    /// The same, and gives the place of the marker: what was sent before this call is before it, and what
    /// is sent after it is behind it.
    ///
    /// # Panics
    /// As [`World::settle`].
    pub fn mark(&self) -> Mark {
        static MARKER: AtomicU32 = AtomicU32::new(20_000);
        let port = u16::try_from(20_000 + MARKER.fetch_add(1, Ordering::Relaxed) % 40_000);
        let marker = SocketAddr::from((Ipv4Addr::new(192, 0, 2, 1), port.expect("a port")));
        // Each processor has a queue of its own for what its frames have yet to arrive, so that a
        // marker overtakes what another one has sent.
        let from: Vec<u16> = self.host.run(|| {
            let own = sched_getaffinity(Pid::from_raw(0)).expect("its processors");
            let processors = (0..CpuSet::count()).filter(|at| own.is_set(*at).unwrap_or(false));
            let sent = processors.map(|at| {
                let mut one = CpuSet::new();
                one.set(at).expect("a processor");
                sched_setaffinity(Pid::from_raw(0), &one).expect("goes there");
                let socket = UdpSocket::bind((HOST, 0)).expect("bind the marker");
                socket.send_to(b"marker", marker).expect("send the marker");
                socket.local_addr().expect("its address").port()
            });
            sent.collect()
        });
        eventually("the capture sees the marker", PATIENT, || {
            let at =
                |from: &u16| self.wire.position(|seen| seen.ports == Some((*from, marker.port())));
            from.iter().map(at).collect::<Option<Vec<_>>>()?.into_iter().max().map(Mark)
        })
    }

    /// Requests that origins got for this host name.
    pub fn requests(&self, host: &str) -> Vec<Arrival> {
        self.origin.requests(|request| request.host.split(':').next() == Some(host))
    }

    /// One request to the API; see [`Daemon::request`].
    pub fn api(&self, method: &str, path: &str, more: &[&str]) -> Answer {
        let asked = self.daemon().request(method, path, more);
        asked.answer()
    }

    /// Asks for a sandbox of the driver `external`; the policy is TOML.
    ///
    /// # Panics
    /// When the policy is not TOML.
    pub fn create(&self, name: &str, tenant: &str, policy: &str) -> Answer {
        let policy: Value = toml::from_str(policy).expect("TOML");
        let wanted =
            json!({ "name": name, "tenant": tenant, "driver": "external", "policy": policy });
        self.api("POST", "/v1/sandboxes", &["--json", &wanted.to_string()])
    }

    /// The audit of a sandbox so far, oldest first.
    pub fn events(&self, sandbox: &str) -> Vec<Value> {
        self.records(&format!("sandbox={sandbox}"))
    }

    /// The audit so far that matches this query, oldest first.
    ///
    /// # Panics
    /// When the query is refused, or a line is not JSON.
    pub fn records(&self, query: &str) -> Vec<Value> {
        let answer = self.api("GET", &format!("/v1/events?limit=10000&{query}"), &[]);
        assert_eq!(answer.status, 200, "{}", answer.text);
        let lines = answer.text.lines().filter(|line| !line.is_empty());
        lines.map(|line| serde_json::from_str(line).expect("JSON lines")).collect()
    }

    /// The first record about `sandbox` that has all these fields; waits for it.
    ///
    /// # Panics
    /// When there is none in time.
    pub fn event(&self, sandbox: &str, fields: &[(&str, &str)]) -> Value {
        let text = |record: &Value, field: &str| match &record[field] {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        self.event_that(sandbox, &format!("with {fields:?}"), |record| {
            fields.iter().all(|(key, value)| text(record, key) == *value)
        })
    }

    /// The first record about `sandbox` that is `wanted`; waits for it.
    ///
    /// # Panics
    /// When there is none in time.
    pub fn event_that(&self, sandbox: &str, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        eventually(&format!("a record of {sandbox} {what}"), PATIENT, || {
            self.events(sandbox).into_iter().find(&wanted)
        })
    }
}

impl Default for World {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let daemon = self.daemon.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        if std::thread::panicking() {
            eprintln!("the daemon's log ends:\n{}", daemon.log_end());
        }
        if daemon.pid().is_some() {
            daemon.kill();
        }
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// The one link, with routes for everything in both directions.
fn link(host: &Netns, internet: &Netns) {
    let mac = UPLINK_MAC.map(|byte| format!("{byte:02x}")).join(":");
    run(std::process::Command::new("ip").args(["link", "add", "uplink", "address", &mac]).args([
        "netns",
        host.name(),
        "type",
        "veth",
        "peer",
        "name",
        "core",
        "netns",
        internet.name(),
    ]));
    for address in [format!("{EGRESS}/28"), format!("{HOST}/28"), format!("{UNBOUND}/32")] {
        host.ip(&format!("addr add {address} dev uplink"));
    }
    host.ip(&format!("addr add {EGRESS_V6}/64 dev uplink nodad"));
    host.ip("link set uplink up");
    internet.ip(&format!("addr add {GATEWAY}/28 dev core"));
    internet.ip(&format!("addr add {GATEWAY_V6}/64 dev core nodad"));
    internet.ip("link set core up");
    host.ip(&format!("route add default via {GATEWAY} src {UNBOUND}"));
    host.ip(&format!("-6 route add default via {GATEWAY_V6}"));
    for range in INTERNET {
        internet.ip(&format!("route add local {range} dev lo"));
    }
    internet.ip(&format!("-6 route add local {INTERNET_V6} dev lo"));
    // What leaks would be answered.
    for range in ["169.254.100.0/24", "198.18.0.0/15"] {
        internet.ip(&format!("route add {range} via {EGRESS}"));
    }
    host.run(|| {
        let keys =
            ["ipv4/ip_forward", "ipv6/conf/all/forwarding", "ipv4/conf/all/promote_secondaries"];
        for key in keys {
            std::fs::write(format!("/proc/sys/net/{key}"), "1").expect("set on the host");
        }
    });
}

/// Starts all servers of the internet; they listen when this returns. The resolver has a thread of
/// its own, so that no bulk transfer makes it late.
fn serve(internet: &Netns, origin: &Origin, names: &Nameserver, authority: &Authority) {
    let (origin, names, authority) = (origin.clone(), names.clone(), authority.clone());
    run_server(internet, async move { origin.serve(&authority).await });
    run_server(internet, async move { names.serve(&[UPSTREAM, PUBLIC_RESOLVER]).await });
}

/// Runs a server that has set itself up on the calling runtime once `setup` is ready.
fn run_server(internet: &Netns, setup: impl Future<Output = io::Result<()>> + Send + 'static) {
    let (listening, ready) = std::sync::mpsc::channel();
    internet.spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(async move {
            setup.await.expect("the server listens");
            let _ = listening.send(());
            std::future::pending::<()>().await;
        });
    });
    ready.recv().expect("the server listens");
}

/// A service of the host that greets whoever reaches it.
fn tripwire(host: &Netns) {
    let listener = host.run(|| std::net::TcpListener::bind((Ipv4Addr::UNSPECIFIED, HOST_SERVICE)));
    let listener = listener.expect("the host's own service");
    std::thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            let _ = io::Write::write_all(&mut stream, b"HOST SERVICE\r\n");
        }
    });
}
