//! The scene "asleep and awake": with nothing to do the microVM ends and is files; its connections, one
//! each way, stay open, and a byte on one of them brings it back as it was. Shows times, never asserts them.

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use comfy_table::{Table, presets::UTF8_FULL_CONDENSED};
use serde_json::Value;
use world::origin::port::ECHO;
use world::poll;

use crate::{AGENT, Demo};

/// How long anything of it may take where KVM cannot be used.
const PATIENCE: Duration = Duration::from_secs(90);

/// In the guest: a server that answers in capitals, and a client that keeps one connection, says on it what
/// is written to `/run/say` and notes what it heard, and from which port it asked.
const PROGRAMS: &str = "cat >/root/server.py <<'E'\n\
    import socket\n\
    server = socket.create_server(('0.0.0.0', 7000))\n\
    while True:\n\
    \x20   peer, _ = server.accept()\n\
    \x20   while said := peer.recv(100): peer.sendall(said.upper())\n\
    E\n\
    cat >/root/client.py <<'E'\n\
    import os, socket, sys\n\
    out = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n\
    os.mkfifo('/run/say')\n\
    while True:\n\
    \x20   for line in open('/run/say'):\n\
    \x20       out.sendall(line.encode())\n\
    \x20       heard = b''\n\
    \x20       while not heard.endswith(b'\\n'): heard += out.recv(100) or sys.exit(1)\n\
    \x20       with open('/run/new', 'w') as f: f.write(f'{out.getsockname()[1]} {heard.decode()}')\n\
    \x20       os.rename('/run/new', '/run/heard')\n\
    E\n\
    setsid python3 /root/server.py >/dev/null 2>&1 </dev/null &\n\
    setsid python3 /root/client.py $0 $1 >/dev/null 2>&1 </dev/null &\n\
    until grep -q :1B58 /proc/net/tcp && test -p /run/say; do sleep 0.2; done";

/// One row of the table.
struct Step {
    what: &'static str,
    outcome: String,
    took: Duration,
    as_promised: bool,
}

/// A connection from outside to a port of the guest.
struct Inward(Child);

impl Inward {
    /// Says a line and gives the answer.
    fn say(&mut self, line: &str) -> String {
        let to = self.0.stdin.as_mut().expect("a pipe");
        to.write_all(line.as_bytes()).and_then(|()| to.flush()).expect("said");
        let mut answer = vec![0; line.len()];
        self.0.stdout.as_mut().expect("a pipe").read_exact(&mut answer).expect("an answer");
        String::from_utf8_lossy(&answer).trim().to_owned()
    }
}

impl Drop for Inward {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Demo {
    /// Plays the scene; gives whether all of it was as promised.
    pub(crate) fn asleep(&self) -> bool {
        let echo = self.world.site("echo");
        self.show(&["policy", "allow", AGENT, &echo.ip.to_string(), "--port", &ECHO.to_string()]);
        self.say("the guest: a server, and a client with a connection to the outside");
        let words = [&echo.ip.to_string(), &ECHO.to_string()];
        self.postern(&["exec", AGENT, "--", "sh", "-c", PROGRAMS, words[0], words[1]]).ok();
        let mut command = self.world.daemon().command(&["connect", AGENT, "7000"]);
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut inward = Inward(child.expect("run postern"));
        let mut steps = Vec::new();
        let mut step = |what, began: Instant, outcome: String, as_promised| {
            steps.push(Step { what, outcome, took: began.elapsed(), as_promised });
        };

        let began = Instant::now();
        let (asked, port) = (inward.say("hello\n"), self.outward("one"));
        let open = asked == "HELLO" && port.is_some();
        step("a connection each way is opened", began, format!("{asked}; {}", told(port)), open);

        let pid = self.shown()["pid"].as_u64().unwrap_or_default();
        let resident = resident_mib(pid);
        self.say("nothing to do: it sleeps after 15 s");
        let began = Instant::now();
        let shown = poll::eventually("it sleeps", PATIENCE, || {
            Some(self.shown()).filter(|shown| shown["state"] == "standby")
        });
        let gone = !Path::new(&format!("/proc/{pid}")).exists() && shown["pid"].is_null();
        let outcome = format!(
            "{}; it kept {resident} MiB resident",
            if gone { "gone" } else { "STILL THERE" }
        );
        step("idle: its process is", began, outcome, gone && resident > 0);

        self.say("a byte on the connection from outside");
        let began = Instant::now();
        let answer = inward.say("still there?\n");
        let right = answer == "STILL THERE?";
        step("a byte on the connection from outside wakes it", began, answer, right);

        self.say("the guest: goes on with its connection to the outside");
        let began = Instant::now();
        let same = self.outward("two");
        step("its own connection goes on", began, told(same), open && same == port);

        self.show(&["standby", AGENT]);
        let began = Instant::now();
        let uptime = self.guest("cut -d. -f1 /proc/uptime").stdout.trim().to_owned();
        let woken = !uptime.is_empty() && self.shown()["wakes"] == 2;
        step("a command wakes it", began, format!("up for {uptime} s, of its own time"), woken);

        let mut table = Table::new();
        table.load_style(UTF8_FULL_CONDENSED);
        table.set_header(["asleep and awake", "what came of it", "ms", ""]);
        for step in &steps {
            let verdict = if step.as_promised { "as promised" } else { "NOT AS PROMISED" };
            let took = step.took.as_millis().to_string();
            table.add_row([step.what, &step.outcome, &took, verdict]);
        }
        println!("{table}");
        steps.iter().all(|step| step.as_promised)
    }

    /// Has the guest say a word on its connection; gives the port it says it from, if it was answered.
    fn outward(&self, word: &str) -> Option<u16> {
        let line = format!(
            "echo {word} >/run/say; for i in $(seq 100); do grep -q {word} /run/heard && break; \
             sleep 0.1; done; cat /run/heard"
        );
        let heard = self.guest(&line).stdout;
        let (port, said) = heard.trim().split_once(' ')?;
        port.parse().ok().filter(|_| said == word)
    }

    fn shown(&self) -> Value {
        self.world.api("GET", &format!("/v1/sandboxes/{AGENT}"), &[]).json
    }
}

/// From which port the guest's connection was heard.
fn told(port: Option<u16>) -> String {
    port.map_or("NOT ANSWERED".to_owned(), |port| format!("answered, from port {port}"))
}

/// What a process keeps in memory (proc(5), `VmRSS`).
fn resident_mib(pid: u64) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().split(' ').next()?.parse::<u64>().ok());
    kib.unwrap_or_default() / 1024
}
