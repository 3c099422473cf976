//! A guest: a sandbox of the daemon with driver `external`, and a namespace that is the machine
//! behind its tap. What runs in it sees what a program in a microVM would see.

use std::net::Ipv4Addr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use policy::Slot;
use policy::net::{GATEWAY_IP, GUEST_IP, GUEST_MAC, GUEST_PREFIX};
use serde_json::Value;

use crate::client;
use crate::daemon::{Answer, Ran};
use crate::netns::Netns;
use crate::pump::Pump;
use crate::world::{Site, World};

/// How a response starts that only says to go on.
const INTERIM: &[u8] = b"HTTP/1.1 100";

/// A running guest. Dropping it removes the sandbox.
#[derive(Debug)]
pub struct Guest<'w> {
    /// The sandbox's name.
    pub name: String,
    /// Its slot on this host.
    pub slot: Slot,
    /// What `create` answered.
    pub created: Value,
    /// The machine: its card is `eth0`.
    pub netns: Netns,
    /// The cable, for frames that no honest kernel would send.
    pub cable: Pump,
    world: &'w World,
}

/// What `curl` in a guest got.
#[derive(Clone, Debug)]
pub struct Curl {
    /// Its exit code: 0, 6 no such name, 7 no connection, 28 timeout, 35 TLS, 56 reset.
    pub code: i32,
    /// The HTTP status; 0 without one.
    pub status: u16,
    /// The response's header.
    pub head: String,
    /// Its body.
    pub body: Vec<u8>,
    /// What curl said.
    pub stderr: String,
    /// How long it took.
    pub took: Duration,
}

impl Curl {
    /// The body as text.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The body as JSON; null if it is not.
    #[must_use]
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }
}

/// A policy that allows these sites, each on 443 by TLS and 80 by HTTP.
#[must_use]
pub fn allow(sites: &[&Site]) -> String {
    let names: Vec<String> = sites.iter().map(|site| format!("{:?}", site.name)).collect();
    format!("[[rule]]\nallow = [{}]\n", names.join(", "))
}

impl World {
    /// A new guest whose sandbox layer is this policy.
    ///
    /// # Panics
    /// When it cannot be created.
    pub fn guest(&self, policy: &str) -> Guest<'_> {
        self.guest_of("default", policy)
    }

    /// The same for a tenant.
    ///
    /// # Panics
    /// When it cannot be created.
    pub fn guest_of(&self, tenant: &str, policy: &str) -> Guest<'_> {
        let name = self.fresh_name();
        let created = self.create(&name, tenant, policy);
        assert_eq!(created.status, 201, "{}", created.text);
        Guest::behind(self, &name, created.json)
    }
}

impl<'w> Guest<'w> {
    /// A machine on the tap of a sandbox that exists: `created` is what `create` or `show` answered.
    ///
    /// # Panics
    /// When the tap is not there.
    #[must_use]
    pub fn behind(world: &'w World, name: &str, created: Value) -> Self {
        let tap = created["tap"].as_str().unwrap_or_else(|| panic!("no tap in {created}"));
        let slot = Slot::of_tap(tap).expect("a tap of a slot");
        assert_eq!(created["netns"], world.taps.name(), "the daemon uses the world's namespace");
        let netns = Netns::new(name);
        let sandbox = world.taps.run(|| vmm::tap::attach(slot).expect("attach to the tap"));
        let card = netns.run(|| vmm::tap::create(slot, None).expect("the guest's card"));
        let cable = Pump::between(sandbox, card);
        let mac = GUEST_MAC.map(|byte| format!("{byte:02x}")).join(":");
        netns.ip(&format!("link set {tap} name eth0 address {mac}"));
        netns.ip(&format!("addr add {GUEST_IP}/{GUEST_PREFIX} dev eth0"));
        netns.ip("link set eth0 up");
        netns.ip(&format!("route add default via {GATEWAY_IP}"));
        let etc = Path::new("/etc/netns").join(netns.name());
        std::fs::create_dir_all(&etc).expect("the guest's /etc");
        std::fs::write(etc.join("resolv.conf"), format!("nameserver {GATEWAY_IP}\n"))
            .expect("the guest's resolv.conf");
        Self { name: name.to_owned(), slot, created, netns, cable, world }
    }

    /// Runs `act` as a program in the guest.
    pub fn run<T: Send>(&self, act: impl FnOnce() -> T + Send) -> T {
        self.netns.run(act)
    }

    /// The same for what is done [`client::at_once`].
    pub fn at_once<T: Send>(&self, act: impl Fn() -> T + Sync) -> T {
        client::at_once(|| self.run(&act))
    }

    /// A command in the guest.
    #[must_use]
    pub fn command(&self, program: &str) -> Command {
        self.netns.command(program)
    }

    /// `curl <words>` in the guest, trusting the world's authority, at most half a minute.
    ///
    /// # Panics
    /// When curl cannot be run.
    pub fn curl(&self, words: &[&str]) -> Curl {
        let ca = self.world.dir().join("ca.pem");
        let mut curl = self.command("curl");
        curl.args(["-sS", "-i", "-m", "30", "--cacert"]).arg(ca);
        curl.args(["-w", "%{stderr}\n%{http_code} %{time_total}"]).args(words);
        let output = curl.output().expect("run curl");
        let ran = Ran::of(&output);
        let (stderr, figures) = ran.stderr.rsplit_once('\n').unwrap_or(("", &ran.stderr));
        let (status, took) = figures.split_once(' ').unwrap_or_default();
        let (mut head, mut body) = (&[][..], &output.stdout[..]);
        while head.is_empty() || head.starts_with(INTERIM) {
            let end = body.windows(4).position(|four| four == b"\r\n\r\n");
            let Some(end) = end else { break };
            (head, body) = body.split_at(end + 4);
        }
        Curl {
            code: ran.code,
            status: status.parse().unwrap_or(0),
            head: String::from_utf8_lossy(head).into_owned(),
            body: body.to_vec(),
            stderr: stderr.to_owned(),
            took: Duration::from_secs_f64(took.parse().unwrap_or(0.0)),
        }
    }

    /// Proves that the way to an allowed site works, at this moment and for this guest: the positive
    /// control of a refusal.
    ///
    /// # Panics
    /// When it does not.
    pub fn reaches(&self, site: &Site) {
        let got = self.curl(&[&format!("https://{}/control", site.name)]);
        assert_eq!(got.status, 200, "control: {} {}", site.name, got.stderr);
    }

    /// The address that stands for it on the host's side of its tap.
    #[must_use]
    pub fn internal(&self) -> Ipv4Addr {
        self.slot.address()
    }

    /// Replaces its policy (TOML), and gives the answer.
    pub fn set_policy(&self, policy: &str) -> Answer {
        let toml = ["-H", "content-type: application/toml", "--data-binary", policy];
        self.world.api("PUT", &format!("/v1/sandboxes/{}/policy", self.name), &toml)
    }

    /// The first record about it with these fields; waits for it.
    pub fn event(&self, fields: &[(&str, &str)]) -> Value {
        self.world.event(&self.name, fields)
    }
}

impl Drop for Guest<'_> {
    fn drop(&mut self) {
        self.cable.unplug();
        let daemon = self.world.daemon();
        if daemon.pid().is_none() {
            return;
        }
        let audit = daemon.request("GET", &format!("/v1/events?sandbox={}", self.name), &[]);
        let removal = daemon.request("DELETE", &format!("/v1/sandboxes/{}", self.name), &[]);
        drop(daemon);
        if std::thread::panicking() {
            eprintln!("the audit of {}:\n{}", self.name, audit.attempt());
        }
        removal.attempt();
    }
}
