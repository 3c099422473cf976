//! Hellos as browsers send them: curl-cffi, installed by pip through the router, speaks TLS as Chrome,
//! Firefox and Safari do.

use world::daemon::Ran;

use crate::guest::{Program, lab};
use crate::programs::serve_wheels;

/// Fetches `URL` as `BROWSER`, where the guest installed curl-cffi.
const FETCH: &str = "PYTHONPATH=/opt/cffi python3 -c 'from curl_cffi import requests; \
    r = requests.get(\"https://HOST/from-a-browser\", impersonate=\"BROWSER\", \
    verify=\"/etc/ssl/certs/world.pem\"); print(r.status_code, r.text)'";

/// Prints the length of a browser's hello and which of these are in it: the post-quantum key share
/// X25519MLKEM768, the extension of an encrypted ClientHello, a GREASE cipher suite.
const LOOK: &str = "
import socket, threading, sys
from curl_cffi import requests
server = socket.create_server(('127.0.0.1', 0))
def get():
    try: requests.get('https://127.0.0.1:%d/' % server.getsockname()[1], impersonate=sys.argv[1], timeout=60)
    except Exception: pass
thread = threading.Thread(target=get)
thread.start()
stream, _ = server.accept()
hello = b''
while len(hello) < 5 or len(hello) < 5 + int.from_bytes(hello[3:5], 'big'): hello += stream.recv(65536)
stream.close()
thread.join()
start = 44 + hello[43]
suites = hello[start + 2:start + 2 + int.from_bytes(hello[start:start + 2], 'big')]
grease = any(a == b and a & 15 == 10 for a, b in zip(suites[::2], suites[1::2]))
print(len(hello), b'\\x11\\xec' in hello, b'\\xfe\\x0d' in hello, grease)
";

fn install() {
    let lab = lab();
    serve_wheels(lab);
    let line = format!(
        "[ -d /opt/cffi/curl_cffi ] || pip install -q --no-cache-dir --disable-pip-version-check \
         --cert /etc/ssl/certs/world.pem \
         --target /opt/cffi --index-url https://{}/simple/ curl-cffi",
        lab.index.name
    );
    let _turn = lab.turn();
    lab.sh(&line).ok();
}

fn holds(browser: &str) -> Ran {
    install();
    let line = FETCH.replace("BROWSER", browser);
    let program = Program {
        line: &line,
        says: "200 {",
        unknown: "Could not resolve host",
        refused: "ACCESS_DENIED",
        port: 443,
    };
    program.holds(lab(), &lab().api);
    let look = format!("PYTHONPATH=/opt/cffi python3 - {browser}");
    lab().machine.feed(&look, LOOK.as_bytes()).ok()
}

/// Promise 24. A hello of 1.8 kB: post-quantum, GREASE, the extension of an encrypted ClientHello.
#[test]
fn chrome() {
    let hello = holds("chrome").stdout;
    assert!(hello.trim().ends_with("True True True"), "{hello}");
    assert!(hello.split(' ').next().and_then(|n| n.parse().ok()).is_some_and(|n: u32| n > 1500));
}

/// Promise 24. Post-quantum, and the extension of an encrypted ClientHello.
#[test]
fn firefox() {
    let hello = holds("firefox").stdout;
    assert!(hello.trim().ends_with("True True False"), "{hello}");
}

/// Promise 24. GREASE.
#[test]
fn safari() {
    let hello = holds("safari").stdout;
    assert!(hello.trim().ends_with("True"), "{hello}");
}
