#!/usr/bin/env python3
"""Writes the ClientHello of every TLS client that this machine has to hellos/<client>.bin.

Each client connects to a listener on loopback, which reads one first flight and hangs up. Browsers are
those that the Python package curl_cffi speaks like; run with an interpreter that has it. Clients that
are not installed are left out. `rustls-*` and `openssl-psk` come from elsewhere: see README.md.
"""
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import threading

NAME = "api.example.test"
HERE = pathlib.Path(__file__).parent / "hellos"

GO = """package main
import ("crypto/tls"; "os")
func main() { tls.Dial("tcp", os.Args[1], &tls.Config{ServerName: "%s", NextProtos: []string{"h2", "http/1.1"}}) }
""" % NAME
JAVA = """import javax.net.ssl.*; import java.util.*;
class Hello { public static void main(String[] a) throws Exception {
SSLSocket s = (SSLSocket) SSLSocketFactory.getDefault().createSocket("127.0.0.1", Integer.parseInt(a[0]));
SSLParameters p = s.getSSLParameters(); p.setServerNames(List.of(new SNIHostName("%s")));
p.setApplicationProtocols(new String[]{"h2", "http/1.1"}); s.setSSLParameters(p); s.startHandshake(); } }
""" % NAME
NODE = "require('tls').connect({host:'127.0.0.1',port:%d,servername:'%s',ALPNProtocols:['h2','http/1.1']}).on('error',()=>{})"
PYTHON = """import socket, ssl
ssl.create_default_context().wrap_socket(socket.create_connection(("127.0.0.1", %d)), server_hostname="%s")"""
BROWSER = """import sys
from curl_cffi import requests, CurlOpt
requests.get("https://%s:%d/", impersonate="%s", timeout=5, curl_options={CurlOpt.RESOLVE: ["%s:%d:127.0.0.1"]})"""
BROWSERS = ["chrome99", "chrome110", "chrome124", "chrome131", "chrome152", "chrome131_android", "edge101",
            "safari153", "safari180_ios", "safari270", "firefox133", "firefox155", "tor145"]


def clients(port, scratch):
    openssl = ["openssl", "s_client", "-connect", f"127.0.0.1:{port}"]
    named = openssl + ["-servername", NAME]
    yield "openssl-default", named
    yield "openssl-tls12", named + ["-tls1_2"]
    yield "openssl-tls13-h2", named + ["-tls1_3", "-alpn", "h2,http/1.1"]
    yield "openssl-no-sni", openssl + ["-noservername"]
    yield "openssl-many-groups", named + ["-groups", "X25519:P-256:P-384:P-521:X448:ffdhe2048"]
    yield "curl", ["curl", "-sk", "--resolve", f"{NAME}:{port}:127.0.0.1", f"https://{NAME}:{port}/"]
    yield "git-gnutls", ["git", "-c", f"http.curloptResolve={NAME}:{port}:127.0.0.1", "ls-remote", f"https://{NAME}:{port}/x"]
    yield "gnutls", ["gnutls-cli", "--sni-hostname", NAME, "-p", str(port), "127.0.0.1"]
    yield "node", ["node", "-e", NODE % (port, NAME)]
    yield "python", ["python3", "-c", PYTHON % (port, NAME)]
    (scratch / "hello.go").write_text(GO)
    yield "go", ["go", "run", str(scratch / "hello.go"), f"127.0.0.1:{port}"]
    (scratch / "Hello.java").write_text(JAVA)
    yield "java", ["java", str(scratch / "Hello.java"), str(port)]
    for browser in BROWSERS:
        yield browser.replace("_", "-"), [sys.executable, "-c", BROWSER % (NAME, port, browser, NAME, port)]


def first_flight(listener, into):
    stream, _ = listener.accept()
    with stream:
        flight = b""
        while len(flight) < 5 or len(flight) < 5 + int.from_bytes(flight[3:5], "big"):
            more = stream.recv(65536)
            if not more:
                return
            flight += more
    into.append(flight)


def main():
    HERE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, socket.create_server(("127.0.0.1", 0)) as listener:
        for name, command in clients(listener.getsockname()[1], pathlib.Path(scratch)):
            if not shutil.which(command[0]):
                print(f"{name}: not installed")
                continue
            got = []
            reader = threading.Thread(target=first_flight, args=(listener, got), daemon=True)
            reader.start()
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as client:
                reader.join(60)
                client.kill()
                problem = client.stderr.read()
            if reader.is_alive():
                sys.exit(f"{name}: no hello: {problem.decode()}")
            if got:
                (HERE / f"{name}.bin").write_bytes(got[0])
                print(f"{name}: {len(got[0])} bytes")


main()
