//! Where benches happen: a host with the daemon, a yard with the peers, an internet that both reach
//! by a link of their own, and guests of each. No capture, no log of requests: nothing that grows.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::mpsc;
use std::time::Duration;

use policy::Slot;
use serde_json::{Value, json};
use world::daemon::{Daemon, program};
use world::nameserver::Nameserver;
use world::netns::{DIRECTORY_PREFIX, MACHINE_PREFIX, Netns, run};
use world::poll::eventually;

use crate::machine::Machine;
use crate::origin::{self, Held};

/// What the daemon's guests leave from.
pub(crate) const EGRESS: Ipv4Addr = Ipv4Addr::new(93, 184, 216, 10);
/// Where the name of the load leads.
pub(crate) const SITE: Ipv4Addr = Ipv4Addr::new(151, 101, 0, 1);
/// The name of the load.
pub(crate) const NAME: &str = "bulk.example.com";
/// The upstream resolver.
pub(crate) const UPSTREAM: Ipv4Addr = Ipv4Addr::new(9, 9, 9, 9);

/// One stage. Dropping it ends all that runs on it.
#[derive(Debug)]
pub(crate) struct Stage {
    daemon: Daemon,
    child: Child,
    pub(crate) held: Held,
    pub(crate) names: Nameserver,
    pub(crate) taps: Netns,
    pub(crate) yard: Netns,
    pub(crate) host: Netns,
    pub(crate) internet: Netns,
    pub(crate) dir: PathBuf,
}

/// An answer of the API.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) json: Value,
}

impl Stage {
    /// With a daemon of `threads` worker threads.
    pub(crate) fn new(threads: usize, more: &str) -> Self {
        let (host, yard) = (Netns::new("host"), Netns::new("yard"));
        let (internet, taps) = (Netns::new("net"), Netns::to_be("taps"));
        link(&host, &internet, "216");
        link(&yard, &internet, "217");
        for range in ["151.101.0.0/16", "45.66.0.0/16", "9.9.9.9/32", "8.8.8.8/32"] {
            internet.ip(&format!("route add local {range} dev lo"));
        }
        internet.ip("route add 10.77.0.0/16 via 93.184.217.10");
        yard.run(|| {
            std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").expect("the yard forwards");
        });
        let (held, names) = (origin::start(&internet), Nameserver::default());
        names.set(NAME, &[IpAddr::from(SITE)]);
        resolve(&internet, &names);
        let dir = PathBuf::from(format!("{DIRECTORY_PREFIX}-{}", host.number()));
        std::fs::create_dir_all(&dir).expect("the stage's folder");
        let config = format!(
            "state_dir = \"{0}/state\"\nrun_dir = \"{0}/run\"\n\
             [api]\nsocket = \"{0}/postern.sock\"\n\
             [guests]\nnetns = \"{1}\"\nslot_rest = \"1s\"\n{more}\n\
             [egress]\naddresses = [\"{EGRESS}\"]\n\
             [dns]\nupstreams = [\"{UPSTREAM}:53\"]\n\
             [audit]\ndir = \"{0}/audit\"\n",
            dir.display(),
            taps.name()
        );
        let daemon = Daemon::new(&dir, &config);
        let child = serve(&host, &dir, threads);
        let stage = Self { daemon, child, held, names, taps, yard, host, internet, dir };
        eventually("the daemon answers", Duration::from_secs(30), || {
            UnixStream::connect(stage.daemon.socket()).ok()?;
            (stage.api("GET", "/v1/health", "", "").status == 200).then_some(())
        });
        stage
    }

    /// The daemon's process.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// A guest of the daemon with this policy (TOML), and its sandbox's name.
    pub(crate) fn guest(&self, name: &str, policy: &str) -> Machine {
        let created = self.create(name, policy);
        assert_eq!(created.status, 201, "{}", created.json);
        let tap = created.json["tap"].as_str().expect("a tap");
        Machine::behind_router(&self.taps, Slot::of_tap(tap).expect("a slot"))
    }

    /// Asks for a sandbox.
    pub(crate) fn create(&self, name: &str, policy: &str) -> Answer {
        let policy: Value = toml::from_str(policy).expect("TOML");
        let wanted = json!({ "name": name, "driver": "external", "policy": policy });
        self.api("POST", "/v1/sandboxes", "application/json", &wanted.to_string())
    }

    /// One request to the API over a connection of its own.
    pub(crate) fn api(&self, method: &str, path: &str, kind: &str, body: &str) -> Answer {
        let mut stream = UnixStream::connect(self.daemon.socket()).expect("the API");
        let kind =
            if kind.is_empty() { String::new() } else { format!("content-type: {kind}\r\n") };
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\n{kind}content-length: {}\r\nconnection: close\r\n\r\n{body}",
            body.len()
        );
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a time limit");
        stream.write_all(request.as_bytes()).expect("ask the API");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("an answer of the API");
        let status = text.get(9..12).and_then(|status| status.parse().ok()).unwrap_or(0);
        let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
        Answer { status, json: serde_json::from_str(body).unwrap_or_default() }
    }

    /// The name for its one microVM, by which that is found and ended.
    pub(crate) fn machine_name(&self) -> String {
        format!("{MACHINE_PREFIX}-{}", self.host.number())
    }

    /// The program `postern` as a client of this daemon.
    pub(crate) fn command(&self, words: &[&str]) -> Command {
        self.daemon.command(words)
    }

    /// A connection to a port of a guest, through the daemon.
    pub(crate) fn connect(&self, name: &str, port: u16) -> UnixStream {
        let mut stream = UnixStream::connect(self.daemon.socket()).expect("the API");
        let body = json!({ "port": port }).to_string();
        let request = format!(
            "POST /v1/sandboxes/{name}/connect HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\n\
             upgrade: postern-connect\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(request.as_bytes()).expect("ask the API");
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte).expect("an answer of the API");
            head.push(byte[0]);
        }
        assert!(head.starts_with(b"HTTP/1.1 101"), "{}", String::from_utf8_lossy(&head));
        stream
    }

    /// Replaces the policy (TOML) of a sandbox.
    pub(crate) fn set_policy(&self, name: &str, policy: &str) -> Answer {
        self.api("PUT", &format!("/v1/sandboxes/{name}/policy"), "application/toml", policy)
    }

    /// A peer in the yard, in the foreground.
    pub(crate) fn peer(&self, program: &str, words: &[&str]) -> Peer {
        let log = File::create(self.dir.join(format!("{program}.log"))).expect("a peer's log");
        let mut command = self.yard.bare_command(program);
        command.args(words).stdout(log.try_clone().expect("a descriptor")).stderr(log);
        Peer(command.spawn().unwrap_or_else(|e| panic!("{program}: {e}; see `make setup-bench`")))
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the daemon's log ends:\n{}", self.daemon.log_end());
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// A running peer. It ends on drop, with its children.
#[derive(Debug)]
pub(crate) struct Peer(Child);

impl Peer {
    pub(crate) fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let pid = nix::unistd::Pid::from_raw(i32::try_from(self.0.id()).unwrap_or(0));
        // A parent that is asked ends its children; what is left goes with the yard.
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM);
        let _ = self.0.wait();
    }
}

fn serve(host: &Netns, dir: &std::path::Path, threads: usize) -> Child {
    let log = File::create(dir.join("daemon.log")).expect("the daemon's log");
    let mut command: Command = host.bare_command("env");
    command.arg(format!("TOKIO_WORKER_THREADS={threads}")).arg(program());
    command.arg("serve").arg("--config").arg(dir.join("postern.toml"));
    command.stdout(log.try_clone().expect("a descriptor")).stderr(log);
    command.spawn().expect("start the daemon")
}

fn link(near: &Netns, internet: &Netns, net: &str) {
    let mut link = Command::new("ip");
    link.args(["link", "add", "uplink", "netns", near.name(), "type", "veth", "peer", "name"]);
    run(link.arg(format!("core{net}")).args(["netns", internet.name()]));
    near.ip(&format!("addr add 93.184.{net}.10/28 dev uplink"));
    near.ip("link set uplink up");
    internet.ip(&format!("addr add 93.184.{net}.1/28 dev core{net}"));
    internet.ip(&format!("link set core{net} up"));
    near.ip(&format!("route add default via 93.184.{net}.1"));
}

/// The upstream resolver, on a thread of its own.
fn resolve(internet: &Netns, names: &Nameserver) {
    let (names, (listening, ready)) = (names.clone(), mpsc::channel());
    internet.spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(async move {
            names.serve(&[UPSTREAM, Ipv4Addr::new(8, 8, 8, 8)]).await.expect("listen");
            let _ = listening.send(());
            std::future::pending::<()>().await;
        });
    });
    ready.recv().expect("the resolver listens");
}
