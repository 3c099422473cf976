//! Servers of others on the internet of a place, each with a log of one line a request: method,
//! target, host, and the length of the body, which is `-` where the server cannot say.

use std::cell::Cell;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tempfile::TempDir;
use tokio::time::sleep;

use crate::peers::soon;
use crate::place::Place;

/// A kind of server: its name, its port, and how it is started on files of its own.
#[derive(Clone, Copy)]
pub(crate) struct Kind {
    name: &'static str,
    port: u16,
    /// The name and text of its file; `@` stands for its directory, `%` for its port.
    file: (&'static str, &'static str),
    command: &'static str,
}

/// A server that runs until it is dropped.
pub(crate) struct Server {
    pub(crate) name: &'static str,
    pub(crate) port: u16,
    dir: TempDir,
    child: Child,
    taken: Cell<usize>,
}

const WSGI: &str = r#"
def app(environ, start):
    body = environ["wsgi.input"].read()
    target = environ.get("RAW_URI") or environ.get("REQUEST_URI") or "-"
    host = environ.get("HTTP_HOST", "-")
    with open("@/log", "a") as log:
        log.write("\t".join([environ["REQUEST_METHOD"], target, host, str(len(body))]) + "\n")
    start("200 OK", [("Content-Length", "0")])
    return []
"#;

pub(crate) const SERVERS: [Kind; 6] = [
    Kind {
        name: "nginx",
        port: 8001,
        file: (
            "nginx.conf",
            r#"
daemon off; master_process off; user root; pid @/pid; error_log @/error;
events {}
http {
  log_format line '$request_method	$request_uri	$http_host	-';
  access_log @/log line;
  client_body_temp_path @/body; proxy_temp_path @/p; fastcgi_temp_path @/f; uwsgi_temp_path @/u; scgi_temp_path @/s;
  map $status $counts { ~^[45] 0; default 1; }
  server { listen %; access_log @/log line if=$counts; location / { return 200; } }
}
"#,
        ),
        command: "nginx -p @ -c @/nginx.conf",
    },
    Kind {
        name: "haproxy",
        port: 8002,
        file: (
            "haproxy.cfg",
            r#"
global
  log stdout format raw local0
defaults
  mode http
  timeout client 5s
  timeout http-request 5s
  option http-buffer-request
frontend f
  bind :%
  log global
  log-format "%[capture.req.method]\t%[capture.req.uri]\t%[capture.req.hdr(0)]\t-"
  declare capture request len 200
  http-request capture req.hdr(host) id 0
  http-request return status 200
"#,
        ),
        command: "haproxy -db -f @/haproxy.cfg",
    },
    Kind {
        name: "node",
        port: 8003,
        file: (
            "server.js",
            r#"
const fs = require("fs");
require("http").createServer((request, response) => {
  let length = 0;
  request.on("data", (piece) => { length += piece.length; });
  request.on("end", () => {
    fs.appendFileSync("@/log", [request.method, request.url, request.headers.host, length].join("\t") + "\n");
    response.end();
  });
}).listen(%);
"#,
        ),
        command: "node @/server.js",
    },
    Kind {
        name: "http.server",
        port: 8004,
        file: (
            "server.py",
            r#"
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def __getattr__(self, name):
        if name.startswith("do_"):
            return self.serve
        raise AttributeError(name)

    def serve(self):
        length = self.headers.get("content-length")
        if length:
            length = str(len(self.rfile.read(int(length))))
        # It knows no chunks: what it does not read is no request.
        chunked = self.headers.get("transfer-encoding")
        with open("@/log", "a") as log:
            log.write("\t".join([self.command, self.path, self.headers.get("host", "-"), "-" if chunked else length or "0"]) + "\n")
        self.send_response(200)
        self.send_header("content-length", "0")
        if chunked:
            self.send_header("connection", "close")
        self.end_headers()

    def log_message(self, *_):
        pass

Handler.protocol_version = "HTTP/1.1"
ThreadingHTTPServer(("", %), Handler).serve_forever()
"#,
        ),
        command: "/usr/bin/python3 @/server.py",
    },
    Kind {
        name: "gunicorn",
        port: 8005,
        file: ("app.py", WSGI),
        command: "/usr/bin/gunicorn --chdir @ -b 0.0.0.0:% -w 1 --threads 4 app:app",
    },
    Kind {
        name: "waitress",
        port: 8006,
        file: ("app.py", WSGI),
        command: "/usr/bin/waitress-serve --listen=0.0.0.0:% app:app",
    },
];

impl Server {
    /// Starts one on the internet of this place.
    pub(crate) fn start(place: &Place, kind: Kind) -> Self {
        let Kind { name, port, file, command } = kind;
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().to_str().expect("utf-8").to_owned();
        let fill = |text: &str| text.replace('@', &path).replace('%', &port.to_string());
        // `%` has a meaning of its own in some of these files.
        let text = match name {
            "haproxy" => file.1.replace('@', &path).replace("bind :%", &format!("bind :{port}")),
            _ => fill(file.1),
        };
        std::fs::write(dir.path().join(file.0), text).expect("written");
        let log = std::fs::File::create(dir.path().join("log")).expect("made");
        let command = fill(command);
        let internet = place.land.internet();
        let mut words = vec!["netns", "exec", &internet];
        words.extend(command.split(' '));
        let out = if name == "haproxy" { Stdio::from(log) } else { Stdio::null() };
        let error = std::fs::File::create(dir.path().join("stderr")).expect("made");
        let child = Command::new("ip")
            .args(words)
            .current_dir(dir.path())
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(error)
            .process_group(0)
            .spawn()
            .expect("ip runs");
        Self { name, port, dir, child, taken: Cell::new(0) }
    }

    /// Waits until it serves.
    pub(crate) async fn ready(&self, place: &Place) {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let answer = crate::corpus::say(
                place,
                self.port,
                b"GET /ready HTTP/1.1\r\nHost: web.example.com\r\nConnection: close\r\n\r\n",
            );
            let answer = soon(answer).await;
            if answer.starts_with("HTTP/1.1 200") {
                break;
            }
            let why = std::fs::read_to_string(self.dir.path().join("stderr"));
            assert!(Instant::now() < deadline, "{} is not there: {why:?} {answer}", self.name);
            sleep(Duration::from_millis(50)).await;
        }
        assert_eq!(self.requests(1, 0).await.len(), 1, "{}: its log", self.name);
    }

    /// What it has read since it was last asked, once that is this much; or less, where it has refused
    /// some, and has had its time.
    pub(crate) async fn requests(&self, wanted: usize, refused: usize) -> Vec<Vec<String>> {
        let begun = Instant::now();
        loop {
            let text = std::fs::read_to_string(self.log()).unwrap_or_default();
            // haproxy has a line for a connection on which no request came, too.
            let whole = |line: &&str| line.ends_with('\n') && !line.starts_with('-');
            let lines = text.split_inclusive('\n').filter(whole);
            let new: Vec<&str> = lines.skip(self.taken.get()).collect();
            let patience = if new.len().saturating_add(refused) < wanted { 5_000 } else { 100 };
            if new.len() >= wanted || begun.elapsed() > Duration::from_millis(patience) {
                self.taken.set(self.taken.get() + new.len());
                let words = |line: &&str| line.trim_end().split('\t').map(str::to_owned).collect();
                return new.iter().map(words).collect();
            }
            sleep(Duration::from_millis(2)).await;
        }
    }

    /// How many requests it has read beyond all that was asked about.
    pub(crate) async fn surplus(&self) -> usize {
        self.requests(usize::MAX, usize::MAX).await.len()
    }

    fn log(&self) -> PathBuf {
        self.dir.path().join("log")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Ok(group) = i32::try_from(self.child.id()) {
            let _ = killpg(Pid::from_raw(group), Signal::SIGKILL);
        }
        let _ = self.child.wait();
    }
}
