//! `make demo`: a microVM behind Postern, in a world of network namespaces: what gets out, what does
//! not, how fast it is refused and what the audit says; then it sleeps and wakes. Everything in it is real but the internet.
//! It checks what it shows and ends with 1 when something is not as it should be.
#![forbid(unsafe_code)]
#![expect(
    clippy::print_stdout,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a demonstration: it prints, and what does not hold ends it"
)]

mod asleep;

use std::process::Stdio;
use std::time::{Duration, Instant};

use comfy_table::{Table, presets::UTF8_FULL_CONDENSED};
use serde_json::Value;
use world::daemon::Ran;
use world::world::{EGRESS, METADATA};
use world::{Site, World, poll};

const AGENT: &str = "agent";
const CURL: &str =
    "curl -sS -m 10 --cacert /root/ca.pem -o /dev/null -w '%{http_code} %{time_total}'";

/// One thing the guest tried.
struct Row {
    tried: &'static str,
    outcome: String,
    reason: String,
    /// Milliseconds until the guest knew.
    guest_ms: f64,
    /// Microseconds the router took to refuse, by the audit.
    router_us: Option<u64>,
    as_promised: bool,
}

struct Demo {
    world: World,
    began: Instant,
    rows: Vec<Row>,
}

fn main() {
    let image = std::env::args().nth(1).unwrap_or_else(|| "target/image".to_owned());
    let image = std::fs::canonicalize(&image).expect("the guest image: run `make image`");
    let began = Instant::now();
    println!(
        "[ 0.0 s] making a world: a host, an internet with an API and an attacker, a capture between them"
    );
    let world = World::with(&format!("[qemu]\nimage = {:?}\n", image.display().to_string()));
    let mut demo = Demo { world, began, rows: Vec::new() };
    let silent = demo.run();
    let kept = silent && demo.rows.iter().all(|row| row.as_promised);
    drop(demo);
    if !kept {
        std::process::exit(1);
    }
}

impl Demo {
    /// Plays all scenes; gives whether nothing crossed the wire that should not have.
    fn run(&mut self) -> bool {
        let (api, attacker) = (self.world.site("api"), self.world.attacker());
        self.show(&["create", "neighbour", "--driver", "external"]);
        self.show(&["create", AGENT, "--allow", &api.name]);
        let neighbour = self.postern(&["show", "neighbour", "--json"]).json();
        let neighbour = format!("198.18.0.{}", neighbour["slot"]);
        let ca = self.world.authority.pem().as_bytes().to_vec();
        let put = ["exec", AGENT, "--", "sh", "-c", "cat > /root/ca.pem"];
        self.world.daemon().cli_with_input(&put, &ca).ok();

        self.allowed(&api);
        self.redirected(&api, &attacker);
        let denied =
            format!("{CURL} --resolve {0}:443:{1} https://{0}/", attacker.name, attacker.ip);
        self.refused("TLS to a host no rule names", &denied, "no-rule", "tls");
        let denied = format!("{CURL} https://{}/", attacker.ip);
        self.refused("TLS to a bare address", &denied, "no-name", "tls");
        let denied = format!("{CURL} -H 'host: {}' http://{}/", attacker.name, attacker.ip);
        self.refused("HTTP to a host no rule names", &denied, "no-rule", "http");
        let denied = format!("{CURL} http://{METADATA}/latest/meta-data/");
        self.refused("the cloud's metadata address", &denied, "private-address", "http");
        let denied = format!("{CURL} http://{neighbour}/");
        self.refused("another guest's address", &denied, "private-address", "");
        self.refused("QUIC to the allowed API", &udp(&api.ip.to_string(), 443), "quic", "udp");
        self.refused("DNS of a denied name", &lookup(&attacker.name), "no-rule", "dns");

        let silent = self.table(&attacker);
        self.asleep() && silent
    }

    /// Runs `postern <words>` before the eyes of whoever watches.
    fn show(&self, words: &[&str]) {
        self.say(&format!("$ postern {}", words.join(" ")));
        let mut command = self.world.daemon().command(words);
        let status = command.stdin(Stdio::null()).status().expect("run postern");
        assert!(
            status.success(),
            "postern {} failed\n{}",
            words.join(" "),
            self.world.daemon().log()
        );
    }

    fn postern(&self, words: &[&str]) -> Ran {
        self.world.cli(words)
    }

    /// Runs a shell line in the guest.
    fn guest(&self, line: &str) -> Ran {
        self.postern(&["exec", AGENT, "--", "sh", "-c", line])
    }

    fn allowed(&mut self, api: &Site) {
        self.say("the guest: curl to the allowed API");
        let ran = self.guest(&format!("{CURL} https://{}/hello", api.name));
        let (status, guest_ms) = figures(&ran.stdout);
        let arrived = self.world.requests(&api.name);
        let peer = arrived.last().map(|arrival| arrival.peer.ip());
        self.rows.push(Row {
            tried: "curl to the allowed API",
            outcome: format!(
                "{status}; the API saw {}",
                peer.map_or("nobody".to_owned(), |ip| ip.to_string())
            ),
            reason: String::new(),
            guest_ms,
            router_us: None,
            as_promised: status == 200 && peer == Some(EGRESS.into()),
        });
    }

    fn redirected(&mut self, api: &Site, attacker: &Site) {
        self.say("the guest: the allowed name, sent to the attacker's address");
        let line =
            format!("{CURL} --resolve {0}:443:{1} https://{0}/forged", api.name, attacker.ip);
        let (status, guest_ms) = figures(&self.guest(&line).stdout);
        let silent = self.world.sent_to(attacker.ip).is_empty();
        let true_api =
            self.world.requests(&api.name).last().is_some_and(|a| a.local.ip() == api.ip);
        self.rows.push(Row {
            tried: "the allowed name at a forged address",
            outcome: format!("{status}; went to the true API, the forged address saw nothing"),
            reason: String::new(),
            guest_ms,
            router_us: None,
            as_promised: status == 200 && silent && true_api,
        });
    }

    fn refused(&mut self, tried: &'static str, line: &str, code: &str, protocol: &str) {
        self.say(&format!("the guest: {tried}"));
        let known = self.world.events(AGENT).len();
        let ran = self.guest(line);
        let (status, guest_ms) = figures(&ran.stdout);
        // A name that was asked for on the way is not what is looked for.
        let wanted = |record: &Value| {
            record["outcome"] == "deny" && (record["kind"] == "dns") == (protocol == "dns")
        };
        let record = poll::eventually("its record", Duration::from_secs(5), || {
            self.world.events(AGENT).into_iter().skip(known).find(wanted)
        });
        let reason = record["code"].as_str().unwrap_or_default().to_owned();
        let outcome = match (status, protocol) {
            (200..=399, _) => "NOT REFUSED".to_owned(),
            (0, "tls") => "TLS alert 49".to_owned(),
            (0, "udp") => "ICMP admin-prohibited".to_owned(),
            (0, "dns") => "NXDOMAIN".to_owned(),
            (0, _) => "reset".to_owned(),
            (status, _) => format!("HTTP {status}"),
        };
        self.rows.push(Row {
            tried,
            outcome,
            as_promised: !(200..=399).contains(&status) && reason == code,
            reason,
            guest_ms,
            router_us: record["micros"].as_u64(),
        });
    }

    fn table(&self, attacker: &Site) -> bool {
        let mut table = Table::new();
        table.load_style(UTF8_FULL_CONDENSED);
        table.set_header([
            "the guest tried",
            "what came of it",
            "reason",
            "guest, ms",
            "router, ms",
            "",
        ]);
        for row in &self.rows {
            table.add_row([
                row.tried.to_owned(),
                row.outcome.clone(),
                row.reason.clone(),
                format!("{:.1}", row.guest_ms),
                row.router_us.map_or_else(String::new, |us| format!("{:.2}", us as f64 / 1000.0)),
                if row.as_promised { "as promised" } else { "NOT AS PROMISED" }.to_owned(),
            ]);
        }
        self.say("the audit of it all: $ postern events --sandbox agent");
        print!("{}", self.postern(&["events", "--sandbox", AGENT]).stdout);
        let forged = self.world.sent_to(attacker.ip).len() + self.world.sent_to(METADATA).len();
        self.say("what came of it");
        println!("{table}");
        println!(
            "frames of the guest on the uplink towards the attacker or the metadata service: {forged}"
        );
        println!("the guest's times are those of an emulated CPU where KVM cannot be used");
        forged == 0
    }

    fn say(&self, what: &str) {
        println!("[{:4.1} s] {what}", self.began.elapsed().as_secs_f64());
    }
}

impl Drop for Demo {
    /// A microVM outlives its daemon, also that of a demonstration that failed.
    fn drop(&mut self) {
        self.world.cli(&["rm", AGENT, "neighbour"]);
    }
}

/// `200 0.031` to (200, 31 ms).
fn figures(text: &str) -> (u16, f64) {
    let mut words = text.split_whitespace();
    let mut next = || words.next().unwrap_or_default();
    (next().parse().unwrap_or(0), next().parse::<f64>().unwrap_or(0.0) * 1000.0)
}

/// Sends a datagram from a connected socket and waits for the error; prints as curl does.
fn udp(address: &str, port: u16) -> String {
    python(&format!(
        "s=socket.socket(socket.AF_INET,socket.SOCK_DGRAM); s.settimeout(5); s.connect(('{address}',{port}))\n\
         t=time.time(); s.send(b'x'*1200)\n\
         try: s.recv(1); print(200, time.time()-t)\n\
         except OSError as e: print(200 if isinstance(e, TimeoutError) else 0, time.time()-t)"
    ))
}

fn lookup(name: &str) -> String {
    python(&format!(
        "t=time.time()\n\
         try: socket.getaddrinfo('{name}',443); print(200, time.time()-t)\n\
         except OSError: print(0, time.time()-t)"
    ))
}

fn python(code: &str) -> String {
    format!("python3 - <<'EOF'\nimport socket,time\n{code}\nEOF")
}
