//! Programs that people run in sandboxes, unchanged, in a real Debian guest. Each says in its own words
//! why it was refused; those words are part of the test.

use std::path::Path;
use std::process::Command;

use serde_json::json;
use world::netns::run;

use crate::guest::{Lab, Program, lab};
use crate::outside::{README, port};

/// Promise 24. curl with HTTP/1.1.
#[test]
fn curl_with_http_1() {
    let program = Program {
        line: "curl -sSf --http1.1 -w '%{http_version}' https://HOST/from-curl",
        says: "}\n1.1",
        unknown: "Could not resolve host",
        refused: "access denied",
        port: 443,
    };
    program.holds(lab(), &lab().api);
}

/// Promise 24. curl with HTTP/2, inside TLS that nobody opens.
#[test]
fn curl_with_http_2() {
    let program = Program {
        line: "curl -sSf --http2 -w '%{http_version}' https://HOST/from-curl",
        says: "}\n2",
        unknown: "Could not resolve host",
        refused: "access denied",
        port: 443,
    };
    program.holds(lab(), &lab().api);
}

/// Promise 24. git over HTTPS, with GnuTLS.
#[test]
fn git_over_https() {
    let program = Program {
        line: "rm -rf /opt/clone && git clone -q https://HOST/repository.git /opt/clone && \
               cat /opt/clone/README",
        says: README,
        unknown: "Could not resolve host",
        refused: "Access was denied",
        port: 443,
    };
    program.holds(lab(), &lab().forge);
}

/// Promise 24. git over SSH, from a real sshd.
#[test]
fn git_over_ssh() {
    let program = Program {
        line: "rm -rf /opt/clone && export GIT_SSH_COMMAND='ssh -i /opt/key \
               -o StrictHostKeyChecking=accept-new' && \
               git clone -q ssh://root@HOST/srv/repository.git /opt/clone && cat /opt/clone/README",
        says: README,
        unknown: "Could not resolve hostname",
        refused: "onnection reset by",
        port: port::SSH,
    };
    program.holds(lab(), &lab().forge);
}

/// Promise 24. pip installs what it finds in an index, with what that depends on.
#[test]
fn pip_installs_from_an_index() {
    serve_wheels(lab());
    let program = Program {
        line: "rm -rf /opt/pip && pip install --no-cache-dir --disable-pip-version-check --retries 1 \
               --cert /etc/ssl/certs/world.pem --target /opt/pip --index-url https://HOST/simple/ pycparser",
        says: "Successfully installed pycparser",
        unknown: "ame or service not known",
        refused: "ACCESS_DENIED",
        port: 443,
    };
    program.holds(lab(), &lab().index);
}

/// Promise 24. npm installs what it finds in a registry, with what that depends on.
#[test]
fn npm_installs_from_a_registry() {
    serve_packages(lab());
    let program = Program {
        line: "rm -rf /opt/npm && mkdir /opt/npm && cd /opt/npm && \
               export NODE_EXTRA_CA_CERTS=/etc/ssl/certs/world.pem && \
               npm install --no-audit --no-fund --no-update-notifier --fetch-retries 0 \
               --cache /opt/npm/cache --registry https://HOST/ greeting && node -p 'require(\"greeting\")'",
        says: "hello from a dependency",
        unknown: "ENOTFOUND",
        refused: "access denied",
        port: 443,
    };
    program.holds(lab(), &lab().registry);
}

/// Promise 24. apt updates and installs, in clear text, request by request.
#[test]
fn apt_updates_and_installs_from_a_mirror() {
    serve_mirror(lab());
    let program = Program {
        line: "echo 'deb [trusted=yes] http://HOST/ ./' >/opt/apt.list && \
               set -- -o Dir::Etc::SourceList=/opt/apt.list -o Dir::Etc::SourceParts=/dev/null && \
               apt-get \"$@\" -o APT::Update::Error-Mode=any update && \
               apt-get \"$@\" install -y greeting && cat /opt/greeting",
        says: "hello from a package",
        unknown: "Could not resolve",
        refused: "403  Forbidden",
        port: 80,
    };
    program.holds(lab(), &lab().mirror);
}

/// Promise 24. Python with requests.
#[test]
fn python_with_requests() {
    let program = Program {
        line: "REQUESTS_CA_BUNDLE=/etc/ssl/certs/world.pem python3 -c 'import requests; \
               print(requests.get(\"https://HOST/from-requests\").text)'",
        says: "\"peer\"",
        unknown: "ame or service not known",
        refused: "ACCESS_DENIED",
        port: 443,
    };
    program.holds(lab(), &lab().api);
}

/// Promise 24. Node.js: `fetch` is undici.
#[test]
fn node_with_fetch() {
    let program = Program {
        line: "NODE_EXTRA_CA_CERTS=/etc/ssl/certs/world.pem node -e \
               'fetch(\"https://HOST/from-node\").then(r => r.text()).then(console.log)'",
        says: "\"peer\"",
        unknown: "ENOTFOUND",
        refused: "access denied",
        port: 443,
    };
    program.holds(lab(), &lab().api);
}

/// Promise 24. Go: rclone is a program that uses the HTTP client of its library.
#[test]
fn go_with_net_http() {
    let program = Program {
        line: "rclone copyurl --config /dev/null --retries 1 --low-level-retries 1 --stdout \
               https://HOST/from-go",
        says: "\"peer\"",
        unknown: "no such host",
        refused: "access denied",
        port: 443,
    };
    program.holds(lab(), &lab().api);
}

/// Promise 24. openssl sees the origin's own certificate: nobody stands between.
#[test]
fn openssl_s_client() {
    let program = Program {
        line: "openssl s_client -connect HOST:443 -servername HOST -verify_return_error \
               </dev/null 2>&1",
        says: "issuer=CN = the world's authority",
        unknown: "ame or service not known",
        refused: "access denied",
        port: 443,
    };
    program.holds(lab(), &lab().api);
}

/// Promise 24. psql, with TLS that it verifies, from a real PostgreSQL.
#[test]
fn psql_over_tls() {
    let program = Program {
        line: "psql 'host=HOST port=5433 user=postgres dbname=postgres sslmode=verify-full \
               sslrootcert=/etc/ssl/certs/world.pem' -Atc \"select 'over ' || version from pg_stat_ssl \
               where pid = pg_backend_pid()\"",
        says: "over TLSv1.3",
        unknown: "could not translate host name",
        refused: "server closed the connection",
        port: port::POSTGRES,
    };
    program.holds(lab(), &lab().database);
}

/// An index of the wheels beside the image, as pip reads it (PEP 503).
pub(crate) fn serve_wheels(lab: &Lab) {
    let world = &lab.machine.world;
    let (www, wheels) = (world.dir().join("www/index"), crate::guest::wheels());
    for wheel in std::fs::read_dir(wheels).expect("the wheels") {
        let path = wheel.expect("a wheel").path();
        let file = path.file_name().expect("a name").to_string_lossy().into_owned();
        let project = file.split('-').next().unwrap_or_default().replace('_', "-");
        let folder = www.join("simple").join(project);
        std::fs::create_dir_all(&folder).expect("a folder");
        std::fs::copy(&path, folder.join(&file)).expect("a copy");
        write(&folder.join("index.html"), &format!("<!doctype html><a href=\"{file}\">{file}</a>"));
    }
    world.origin.serve_files(&lab.index.name, www);
}

/// A registry with a package and the one it needs, as npm reads it.
fn serve_packages(lab: &Lab) {
    let world = &lab.machine.world;
    let www = world.dir().join("www/registry");
    let packages = [
        ("greeting", json!({ "needed": "*" }), "module.exports = require('needed')"),
        ("needed", json!({}), "module.exports = 'hello from a dependency'"),
    ];
    for (name, needs, code) in packages {
        let work = www.join("work").join(name);
        std::fs::create_dir_all(work.join("package")).expect("a folder");
        let mut manifest = json!({ "name": name, "version": "1.0.0", "dependencies": needs });
        write(&work.join("package/package.json"), &manifest.to_string());
        write(&work.join("package/index.js"), code);
        let tarball = format!("{name}-1.0.0.tgz");
        let mut tar = Command::new("tar");
        run(tar.arg("-czf").arg(www.join(&tarball)).arg("-C").arg(work).arg("package"));
        let url = format!("https://{}/{tarball}", lab.registry.name);
        manifest["dist"] = json!({ "tarball": url });
        let listed = json!({
            "name": name, "dist-tags": { "latest": "1.0.0" }, "versions": { "1.0.0": manifest },
        });
        write(&www.join(name), &listed.to_string());
    }
    world.origin.serve_files(&lab.registry.name, www);
}

/// A flat repository with one package, as apt reads it.
fn serve_mirror(lab: &Lab) {
    let world = &lab.machine.world;
    let www = world.dir().join("www/mirror");
    let tree = world.dir().join("greeting");
    std::fs::create_dir_all(tree.join("DEBIAN")).expect("a folder");
    std::fs::create_dir_all(tree.join("opt")).expect("a folder");
    std::fs::create_dir_all(&www).expect("a folder");
    let control = "Package: greeting\nVersion: 1\nArchitecture: all\nMaintainer: a <a@example.com>\n\
                   Description: a greeting\n";
    write(&tree.join("DEBIAN/control"), control);
    write(&tree.join("opt/greeting"), "hello from a package\n");
    let package = www.join("greeting.deb");
    run(Command::new("dpkg-deb").args(["--root-owner-group", "--build"]).arg(&tree).arg(&package));
    let bytes = std::fs::read(&package).expect("the package");
    let entry = format!(
        "{control}Filename: ./greeting.deb\nSize: {}\nSHA256: {}\n",
        bytes.len(),
        world::origin::sum(&bytes)
    );
    write(&www.join("Packages"), &entry);
    let release = format!(
        "Date: Thu, 01 Jan 2026 00:00:00 UTC\nSHA256:\n {} {} Packages\n",
        world::origin::sum(entry.as_bytes()),
        entry.len()
    );
    write(&www.join("Release"), &release);
    world.origin.serve_files(&lab.mirror.name, www);
}

fn write(path: &Path, text: &str) {
    std::fs::write(path, text).expect("write a file");
}
