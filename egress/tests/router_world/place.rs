//! A host, an internet and one guest, each a network namespace, with a router between them.
//!
//! Sockets are made on a thread in the namespace they belong to and used from one runtime. Nothing
//! here touches the namespace the test was started in; everything is removed on drop.

use std::fs::File;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use dns::{Resolver, ResolverConfig};
use egress::{Attachment, Config, Limits, Rejudged, Router};
use nix::sched::{CloneFlags, setns};
use nix::sys::socket::{setsockopt, sockopt};
use policy::{
    AuditRecord, Compiled, Layer, OwnAddresses, Policy, PolicyHandle, Records, Revision, Slot,
    Subject, Trail,
};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::{TcpListener, TcpSocket, TcpStream, UdpSocket};

use crate::peers::{PATIENCE, run_ip, until};

/// The sandbox's egress address; the host has `.9` first, so that it is not the default choice.
pub(crate) const EGRESS: Ipv4Addr = Ipv4Addr::new(93, 184, 216, 10);
/// Where names resolve to, but for `inner.`, `nowhere.`, `own.` and `second.` ones; `both.` ones
/// resolve to it and then to [`SECOND`].
pub(crate) const ORIGIN: Ipv4Addr = Ipv4Addr::new(93, 184, 216, 34);
/// Where `second.` names resolve to.
pub(crate) const SECOND: Ipv4Addr = Ipv4Addr::new(93, 184, 216, 35);
/// The host's own address, to which `own.` names resolve.
pub(crate) const HOST: Ipv4Addr = Ipv4Addr::new(93, 184, 216, 9);
/// A private address, on the internet's side of the host, to which `inner.` names resolve.
pub(crate) const INNER: Ipv4Addr = Ipv4Addr::new(10, 1, 2, 3);
/// An address that no name resolves to and no rule names.
pub(crate) const SINK: Ipv4Addr = Ipv4Addr::new(93, 184, 216, 66);
/// An address that nobody has, to which `nowhere.` names resolve.
pub(crate) const NOWHERE: Ipv4Addr = Ipv4Addr::new(93, 184, 216, 77);
const RESOLVER: Ipv4Addr = Ipv4Addr::new(93, 184, 216, 53);

static COUNT: AtomicUsize = AtomicUsize::new(0);

/// The namespaces of one test.
pub(crate) struct Land {
    prefix: String,
}

/// What a test holds.
pub(crate) struct Place {
    pub(crate) land: Arc<Land>,
    pub(crate) start: Start,
    pub(crate) router: Router,
    pub(crate) policy: PolicyHandle,
    pub(crate) slot: Slot,
    records: Records,
    pub(crate) asked: Arc<Mutex<Vec<String>>>,
}

/// What a router is started with.
pub(crate) struct Start {
    netns: String,
    resolver: Resolver,
    own: OwnAddresses,
    trail: Trail,
    limits: Limits,
}

/// Limits that no machine comes to by standing still.
fn patient() -> Limits {
    let (first_flight, idle) = (Duration::from_secs(60), Duration::from_secs(60));
    let (half_closed, udp_idle) = (Duration::from_secs(30), Duration::from_secs(60));
    Limits { first_flight, idle, half_closed, udp_idle, ..limits() }
}

/// Limits that tests can wait for.
pub(crate) fn limits() -> Limits {
    let (first_flight, idle) = (Duration::from_secs(6), Duration::from_secs(6));
    let (half_closed, udp_idle) = (Duration::from_secs(1), Duration::from_secs(10));
    let (flows, udp_sessions) = (64, 8);
    Limits { flows, udp_sessions, udp_idle, first_flight, idle, half_closed, ..Limits::default() }
}

impl Start {
    async fn router(&self) -> Router {
        self.try_router().await.expect("a router")
    }

    pub(crate) async fn try_router(&self) -> Result<Router, egress::Error> {
        let netns = self.netns.clone();
        let config = Config {
            netns,
            divert_port: 15_001,
            nflog_group: 7,
            slots: 16,
            look: Duration::from_secs(1),
            limits: self.limits,
            names: dns::Names::default(),
        };
        let (resolver, own) = (self.resolver.clone(), self.own.clone());
        Router::start(config, resolver, own, self.trail.clone()).await
    }
}

/// Builds a place with this policy, where times are over soon, and runs a test in it.
pub(crate) fn run_brief<F: Future<Output = ()>>(rules: &str, test: impl FnOnce(Place) -> F + Send) {
    run_within(limits(), rules, test);
}

/// Builds a place with this policy and runs a test in it.
pub(crate) fn run<F: Future<Output = ()>>(rules: &str, test: impl FnOnce(Place) -> F + Send) {
    run_within(patient(), rules, test);
}

/// The same with other limits.
pub(crate) fn run_within<F: Future<Output = ()>>(
    limits: Limits,
    rules: &str,
    test: impl FnOnce(Place) -> F + Send,
) {
    let land = Arc::new(Land::new());
    std::thread::scope(|scope| {
        let ended = scope.spawn(|| {
            land.enter('h').expect("the host's namespace");
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(2)
                .enable_all()
                .build()
                .expect("a runtime");
            runtime.block_on(async {
                let place = Place::new(Arc::clone(&land), limits, rules).await;
                test(place).await;
            });
        });
        if let Err(panic) = ended.join() {
            std::panic::resume_unwind(panic);
        }
    });
}

impl Place {
    async fn new(land: Arc<Land>, limits: Limits, rules: &str) -> Self {
        let asked = Arc::default();
        let upstream = land.made('i', || std::net::UdpSocket::bind((RESOLVER, 53)));
        tokio::spawn(name_server(adopt(upstream), Arc::clone(&asked)));
        let resolver = Resolver::new(ResolverConfig {
            upstreams: vec![SocketAddr::from((RESOLVER, 53))],
            timeout: Duration::from_secs(30),
            ..ResolverConfig::default()
        });
        let own = OwnAddresses::new([EGRESS, HOST].map(IpAddr::from));
        let (trail, records) = Trail::bounded(10_000);
        let resolver = resolver.expect("a resolver");
        let start = Start { netns: format!("{}w", land.prefix), resolver, own, trail, limits };
        let router = start.router().await;
        let slot = Slot::new(1).expect("in range");
        land.ip("w", "link add pt1 type veth peer name eth0");
        land.ip("w", &format!("link set eth0 netns {}g", land.prefix));
        land.made('g', || match std::fs::write("/proc/sys/net/ipv6/conf/eth0/disable_ipv6", "1") {
            // A kernel without IPv6 has it off.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            written => written,
        });
        land.ip("g", "link set eth0 address 02:00:00:00:00:02");
        land.ip("g", "addr add 169.254.100.2/30 dev eth0");
        land.ip("g", "link set eth0 up");
        land.ip("g", "route add default via 169.254.100.1");
        let policy = PolicyHandle::new(compiled(rules, 1));
        let place = Self { land, start, router, policy, slot, records, asked };
        place.attach().await.expect("attached");
        place.settle().await;
        place
    }

    /// Waits until the guest is answered: its kernel takes a while to see that its link is up.
    async fn settle(&self) {
        let question = b"\0\x01\x01\0\0\x01\0\0\0\0\0\0\x05local\0\0\x01\0\x01";
        let socket = self.datagrams();
        let mut answer = [0; 512];
        loop {
            socket.send_to(question, "169.254.100.1:53").await.expect("sent");
            let wait = tokio::time::timeout(Duration::from_millis(20), socket.recv(&mut answer));
            if wait.await.is_ok() {
                break;
            }
        }
        while self.records.take_within(Duration::from_millis(20)).is_some() {}
    }

    pub(crate) async fn attach(&self) -> Result<(), egress::Error> {
        self.attach_at(self.slot).await
    }

    /// Waits until so many of the guest's connections are open with us: it is connected a moment before
    /// they are taken.
    pub(crate) async fn has_open(&self, connections: usize) {
        let meter = self.router.meter(self.slot).expect("attached");
        until(|| meter.open() == connections).await;
    }

    /// Makes a tap for another slot, which nobody holds.
    pub(crate) fn make_tap(&self, slot: Slot) {
        self.land.ip("w", &format!("tuntap add {} mode tap", slot.tap()));
    }

    /// Who the guest is.
    pub(crate) fn subject(&self) -> Subject {
        Subject {
            sandbox: "demo".parse().expect("a name"),
            tenant: "acme".parse().expect("a name"),
            incarnation: 1,
            slot: self.slot,
        }
    }

    pub(crate) async fn attach_at(&self, slot: Slot) -> Result<(), egress::Error> {
        let attachment = Attachment {
            subject: Arc::new(Subject { slot, ..self.subject() }),
            policy: self.policy.clone(),
            egress: vec![EGRESS.into()],
        };
        self.router.attach(attachment).await
    }

    /// A daemon that dies, as far as one process can show it, and the next one: the router's sockets
    /// are gone, its rules and the tap are not.
    pub(crate) async fn restart(self) -> Self {
        let Self { land, start, router, policy, slot, records, asked } = self;
        drop(router);
        // Its sockets close when its tasks have been let go, which a dead process needs not wait for.
        let deadline = Instant::now() + PATIENCE;
        let router = loop {
            match start.try_router().await {
                Err(_) if Instant::now() < deadline => {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                started => break started.expect("a router"),
            }
        };
        let place = Self { land, start, router, policy, slot, records, asked };
        place.attach().await.expect("attached");
        place
    }

    /// Lets the host's sockets have these ports only, unless they ask for others.
    pub(crate) fn ports_of_the_host(&self, first: u16, last: u16) {
        let range = format!("{first} {last}");
        self.land.made('h', || std::fs::write("/proc/sys/net/ipv4/ip_local_port_range", range));
    }

    /// Takes the sandbox's egress address from the host.
    pub(crate) fn lose_egress(&self) {
        self.land.ip("h", &format!("addr del {EGRESS}/24 dev wan"));
    }

    /// Judges the guest's open connections again, by the policy in force now, and lets its fence
    /// follow.
    pub(crate) async fn rejudge(&self) -> Rejudged {
        let judged = self.router.rejudge(&[self.slot]).await;
        self.router.refence(&[self.slot]).await.expect("the fence");
        judged
    }

    /// Puts another policy in force.
    pub(crate) fn write(&self, rules: &str, revision: u64) {
        self.policy.store(compiled(rules, revision));
    }

    /// A connection of the guest.
    pub(crate) async fn dial(&self, address: Ipv4Addr, port: u16) -> io::Result<TcpStream> {
        let socket = self.land.made('g', || {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
            socket.set_nonblocking(true)?;
            Ok(std::net::TcpStream::from(socket))
        });
        TcpSocket::from_std_stream(socket).connect(SocketAddr::from((address, port))).await
    }

    /// A datagram socket of the guest.
    pub(crate) fn datagrams(&self) -> UdpSocket {
        adopt(self.land.made('g', || std::net::UdpSocket::bind("0.0.0.0:0")))
    }

    /// A socket of the guest that sends datagrams as they are written, ports and all.
    pub(crate) fn guest_headers(&self) -> Socket {
        self.land.made('g', || Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::UDP)))
    }

    /// A listener in the guest.
    pub(crate) fn guest_listener(&self, port: u16) -> TcpListener {
        listening(self.land.made('g', move || std::net::TcpListener::bind(("0.0.0.0", port))))
    }

    /// A listener on the internet.
    pub(crate) fn origin(&self, address: Ipv4Addr, port: u16) -> TcpListener {
        listening(self.land.made('i', move || std::net::TcpListener::bind((address, port))))
    }

    /// A datagram socket on the internet.
    pub(crate) fn origin_datagrams(&self, address: Ipv4Addr, port: u16) -> UdpSocket {
        adopt(self.land.made('i', move || std::net::UdpSocket::bind((address, port))))
    }

    /// A datagram socket on the host.
    pub(crate) fn host_datagrams(&self, address: Ipv4Addr, port: u16) -> UdpSocket {
        adopt(self.land.made('h', move || std::net::UdpSocket::bind((address, port))))
    }

    /// A connection of another program of the host, from the egress address.
    pub(crate) fn host_dials(&self, to: (Ipv4Addr, u16)) -> Socket {
        self.land.made('h', move || {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
            // The port towards this far side only, as all that dial do.
            setsockopt(&socket, sockopt::IpBindAddressNoPort, &true)?;
            socket.bind(&SocketAddr::from((EGRESS, 0)).into())?;
            socket.connect(&SocketAddr::from(to).into())?;
            Ok(socket)
        })
    }

    /// A listener on the host.
    pub(crate) fn host_listener(&self, address: Ipv4Addr, port: u16) -> TcpListener {
        listening(self.land.made('h', move || std::net::TcpListener::bind((address, port))))
    }

    /// Waits for a record; names the ones that came instead when it does not.
    pub(crate) async fn record(&self, wanted: impl Fn(&AuditRecord) -> bool) -> AuditRecord {
        let deadline = Instant::now() + PATIENCE;
        let mut others = Vec::new();
        while Instant::now() < deadline {
            match self.records.take() {
                Some(record) if wanted(&record) => return record,
                Some(record) => others.push(record),
                None => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
        panic!("no such record, but {others:#?}");
    }

    /// The records that have come and were not waited for.
    pub(crate) fn recorded(&self) -> Vec<AuditRecord> {
        self.records.drain().collect()
    }

    /// What `nft` reads in the guests' namespace.
    pub(crate) fn nft(&self) -> String {
        self.within(&["nft", "list", "ruleset"])
    }

    /// What somebody else does to the rules in the guests' namespace.
    pub(crate) fn edit(&self, words: &str) {
        let words: Vec<&str> = std::iter::once("nft").chain(words.split(' ')).collect();
        self.within(&words);
    }

    /// The connected UDP sockets of the guests' namespace, as `ss` lists them.
    pub(crate) fn datagram_sockets(&self) -> String {
        self.within(&["ss", "-Hun", "dst", &self.slot.address().to_string()])
    }

    /// The host's TCP sockets towards an address outside, and whose they are, as `ss` lists them.
    pub(crate) fn host_sockets(&self, to: Ipv4Addr) -> String {
        let netns = format!("{}h", self.land.prefix);
        let command = ["netns", "exec", &netns, "ss", "-Htnp", "dst", &to.to_string()];
        let out = Command::new("ip").args(command).output().expect("it runs");
        String::from_utf8(out.stdout).expect("utf-8")
    }

    /// The TCP sockets towards the guest, as `ss` lists them.
    pub(crate) fn sockets(&self) -> String {
        self.within(&["ss", "-Htan", "dst", &self.slot.address().to_string()])
    }

    /// A command in the guest.
    pub(crate) fn in_guest(&self, command: &[&str]) {
        let netns = format!("{}g", self.land.prefix);
        let out = Command::new("ip").args(["netns", "exec", &netns]).args(command).output();
        let out = out.expect("it runs");
        assert!(out.status.success(), "{command:?}: {}", String::from_utf8_lossy(&out.stderr));
    }

    fn within(&self, command: &[&str]) -> String {
        let netns = ["netns", "exec", &self.start.netns];
        let out = Command::new("ip").args(netns).args(command).output().expect("it runs");
        assert!(out.status.success(), "{command:?}: {}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout).expect("utf-8")
    }
}

pub(crate) fn compiled(rules: &str, revision: u64) -> Compiled {
    let policy = Policy::from_toml(rules).expect("a policy");
    Compiled::new(&[(Layer::Sandbox, &policy)], Revision(revision))
}

fn adopt(socket: std::net::UdpSocket) -> UdpSocket {
    socket.set_nonblocking(true).expect("a socket");
    UdpSocket::from_std(socket).expect("a runtime")
}

fn listening(listener: std::net::TcpListener) -> TcpListener {
    listener.set_nonblocking(true).expect("a socket");
    TcpListener::from_std(listener).expect("a runtime")
}

/// Answers every A question and says what it was asked.
async fn name_server(socket: UdpSocket, asked: Arc<Mutex<Vec<String>>>) {
    let mut buffer = [0; 1500];
    while let Ok((length, peer)) = socket.recv_from(&mut buffer).await {
        let query = &buffer[..length];
        let (mut at, mut labels) = (12, Vec::new());
        while query[at] != 0 {
            let end = at + 1 + usize::from(query[at]);
            labels.push(String::from_utf8_lossy(&query[at + 1..end]).into_owned());
            at = end;
        }
        asked.lock().expect("unpoisoned").push(labels.join(".").to_lowercase());
        let wants_a = query[at + 1..at + 3] == [0, 1];
        let mut answer = query[..2].to_vec();
        answer.extend([0x81, 0x80, 0, 1, 0, 0, 0, 0, 0, 0]);
        answer.extend(&query[12..at + 5]);
        if wants_a {
            let addresses: &[Ipv4Addr] = match labels[0].to_lowercase().as_str() {
                "inner" => &[INNER],
                "second" => &[SECOND],
                "both" => &[ORIGIN, SECOND],
                "own" => &[HOST],
                "nowhere" => &[NOWHERE],
                _ => &[ORIGIN],
            };
            answer[7] = u8::try_from(addresses.len()).expect("few");
            for address in addresses {
                answer.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4]);
                answer.extend(address.octets());
            }
        }
        socket.send_to(&answer, peer).await.expect("sent");
    }
}

impl Land {
    fn new() -> Self {
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        let land = Self { prefix: format!("er{}x{n}", std::process::id()) };
        for role in ["h", "i", "g"] {
            run_ip(&["netns", "add", &format!("{}{role}", land.prefix)]);
            land.ip(role, "link set lo up");
        }
        land.ip("h", &format!("link add wan type veth peer name in netns {}", land.internet()));
        for address in [HOST, EGRESS] {
            land.ip("h", &format!("addr add {address}/24 dev wan"));
        }
        for address in [ORIGIN, SECOND, SINK, RESOLVER] {
            land.ip("i", &format!("addr add {address}/24 dev in"));
        }
        land.ip("h", "link set wan up");
        land.ip("i", "link set in up");
        land.ip("i", &format!("addr add {INNER}/32 dev in"));
        land.ip("h", &format!("route add {INNER}/32 dev wan"));
        land
    }

    pub(crate) fn ip(&self, role: &str, words: &str) {
        let netns = format!("{}{role}", self.prefix);
        let mut args = vec!["-n", &netns];
        args.extend(words.split(' '));
        run_ip(&args);
    }

    /// The internet's namespace.
    pub(crate) fn internet(&self) -> String {
        format!("{}i", self.prefix)
    }

    fn enter(&self, role: char) -> io::Result<()> {
        let file = File::open(format!("/run/netns/{}{role}", self.prefix))?;
        Ok(setns(file, CloneFlags::CLONE_NEWNET)?)
    }

    /// Makes something in a namespace.
    fn made<T: Send>(&self, role: char, make: impl FnOnce() -> io::Result<T> + Send) -> T {
        std::thread::scope(|scope| {
            let made = scope.spawn(|| {
                self.enter(role)?;
                make()
            });
            made.join().expect("no panic").expect("a socket")
        })
    }
}

impl Drop for Land {
    fn drop(&mut self) {
        for role in ["g", "w", "i", "h"] {
            let netns = format!("{}{role}", self.prefix);
            let _ = Command::new("ip").args(["netns", "del", &netns]).output();
        }
    }
}
