//! Clear-text HTTP: every request is judged, and what was judged is what is sent.

use world::client::{self, End, PATIENT};
use world::origin::{pattern, sum};
use world::{Guest, Site, World, allow};

fn say(guest: &Guest<'_>, to: &Site, text: &str) -> client::Reply {
    guest.run(|| client::exchange(to.at(80), &[text.as_bytes()], PATIENT))
}

fn statuses(reply: &client::Reply) -> Vec<u16> {
    let text = reply.text();
    let lines = text.split("HTTP/1.").skip(1);
    lines.filter_map(|line| line.get(2..5)?.parse().ok()).collect()
}

/// Promise 12. A connection is not a permit.
#[test]
fn a_second_request_to_a_denied_host_on_the_same_connection_is_refused() {
    let world = World::shared();
    let (api, sink) = (world.site("api"), world.attacker());
    let guest = world.guest(&allow(&[&api]));
    let requests = format!(
        "GET /one HTTP/1.1\r\nHost: {api}\r\n\r\n\
         GET /two HTTP/1.1\r\nHost: {sink}\r\n\r\n\
         GET /three HTTP/1.1\r\nHost: {api}\r\nConnection: close\r\n\r\n",
        api = api.name,
        sink = sink.name,
    );
    let reply = say(&guest, &api, &requests);
    assert_eq!(statuses(&reply).get(..2), Some(&[200, 403][..]), "{}", reply.text());
    let targets: Vec<String> = world.requests(&api.name).into_iter().map(|r| r.target).collect();
    assert_eq!(targets.first().map(String::as_str), Some("/one"));
    assert!(world.requests(&sink.name).is_empty());
    assert_eq!(world.sent_to(sink.ip), []);
    guest.event(&[("kind", "request"), ("outcome", "deny"), ("name", &sink.name)]);
}

/// Promise 12. What two parsers could read in two ways is refused, not forwarded.
#[test]
fn an_ambiguous_request_is_refused_and_never_forwarded() {
    let world = World::shared();
    let (api, sink) = (world.site("api"), world.attacker());
    let guest = world.guest(&allow(&[&api]));
    let host = format!("Host: {}\r\n", api.name);
    let smuggled = format!("GET /smuggled HTTP/1.1\r\n{host}\r\n");
    let cases = [
        ("no host", "GET / HTTP/1.1\r\n\r\n".to_owned()),
        ("empty host", "GET / HTTP/1.1\r\nHost: \r\n\r\n".to_owned()),
        ("two hosts", format!("GET / HTTP/1.1\r\n{host}Host: {}\r\n\r\n", sink.name)),
        ("other authority", format!("GET http://{}/ HTTP/1.1\r\n{host}\r\n", sink.name)),
        (
            "name in target only",
            format!("GET http://{}/ HTTP/1.1\r\nHost: {}\r\n\r\n", api.name, sink.name),
        ),
        (
            "two lengths",
            format!(
                "POST / HTTP/1.1\r\n{host}Content-Length: 0\r\nContent-Length: 44\r\n\r\n{smuggled}"
            ),
        ),
        (
            "strange coding",
            format!(
                "POST / HTTP/1.1\r\n{host}Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n{smuggled}"
            ),
        ),
        (
            "signed length",
            format!("POST / HTTP/1.1\r\n{host}Content-Length: +3\r\n\r\nabc{smuggled}"),
        ),
        ("space before colon", format!("GET / HTTP/1.1\r\n{host}X-A : b\r\n\r\n")),
        ("connect", format!("CONNECT {0}:443 HTTP/1.1\r\nHost: {0}:443\r\n\r\n", api.name)),
        ("trace", format!("TRACE / HTTP/1.1\r\n{host}\r\n")),
        ("h2c preface", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_owned()),
        ("http 0.9", "GET /\r\n\r\n".to_owned()),
    ];
    for (name, text) in &cases {
        let reply = guest.run(|| {
            client::exchange_until(api.at(80), &[text.as_bytes()], PATIENT, client::has_head)
        });
        let first = statuses(&reply).first().copied();
        assert!(first.is_none_or(|status| status >= 400), "{name}: {}", reply.text());
        assert!(first.is_some() || reply.end != End::Open, "{name} is answered or cut");
        let forwarded = world.requests(&api.name);
        assert!(forwarded.is_empty(), "{name}: {forwarded:?}");
    }
    assert_eq!(world.sent_to(sink.ip), []);
    let got = guest.curl(&[&format!("http://{}/control", api.name)]);
    assert_eq!(got.status, 200, "control: {}", got.stderr);
}

/// Promise 12. A server may ignore a length beside chunks (RFC 9112, section 6.1); we refuse it, and
/// what came behind it goes nowhere.
#[test]
fn a_request_with_a_length_and_chunks_is_refused_with_all_that_is_behind_it() {
    let world = World::shared();
    let api = world.site("api");
    let guest = world.guest(&allow(&[&api]));
    let host = format!("Host: {}\r\n", api.name);
    let body = |framing: &str| {
        format!(
            "POST /outer HTTP/1.1\r\n{host}{framing}\r\n0\r\n\r\n\
             GET /smuggled HTTP/1.1\r\n{host}Connection: close\r\n\r\n"
        )
    };
    let both = body("Content-Length: 4\r\nTransfer-Encoding: chunked\r\n");
    let reply = say(&guest, &api, &both);
    assert_eq!((reply.end, statuses(&reply)), (End::Closed, vec![400]), "{}", reply.text());
    assert!(world.requests(&api.name).is_empty());
    let reply = say(&guest, &api, &body("Transfer-Encoding: chunked\r\n"));
    assert_eq!(statuses(&reply), [200, 200], "the control: {}", reply.text());
}

/// Promise 12. Hop-by-hop fields end here; what the far side needs to authenticate does not.
#[test]
fn hop_by_hop_fields_are_removed_and_end_to_end_fields_are_kept() {
    let world = World::shared();
    let api = world.site("api");
    let guest = world.guest(&allow(&[&api]));
    let got = guest.curl(&[
        "-H",
        "Connection: close, x-hop, authorization",
        "-H",
        "X-Hop: 1",
        "-H",
        "Authorization: Bearer own",
        "-H",
        "Upgrade: h2c",
        "-H",
        "X-End: 1",
        &format!("http://{}/", api.name),
    ]);
    assert_eq!(got.status, 200, "{}", got.stderr);
    let requests = world.requests(&api.name);
    let names: Vec<&str> = requests[0].headers.iter().map(|(name, _)| &**name).collect();
    for (name, kept) in
        [("x-hop", false), ("upgrade", false), ("authorization", true), ("x-end", true)]
    {
        assert_eq!(names.contains(&name), kept, "{name} in {names:?}");
    }
}

/// Promise 14. Bodies arrive whole, however they are framed and announced.
#[test]
fn a_body_arrives_whole_with_a_length_in_chunks_and_after_a_hundred_continue() {
    let world = World::shared();
    let api = world.site("api");
    let guest = world.guest(&allow(&[&api]));
    let body = pattern(1_500_000);
    let file = world.dir().join("body");
    std::fs::write(&file, &body).expect("write");
    let (data, url) = (format!("@{}", file.display()), format!("http://{}/sum", api.name));
    for field in ["Expect:", "Expect: 100-continue", "Transfer-Encoding: chunked"] {
        let got = guest.curl(&["-H", field, "--data-binary", &data, &url]);
        assert_eq!(got.text(), sum(&body), "{field}: {} {}", got.head, got.stderr);
    }
}

/// Promise 12. A rule that names methods and paths is kept, request by request.
#[test]
fn a_rule_with_methods_and_paths_is_kept_request_by_request() {
    let world = World::shared();
    let api = world.site("api");
    let rule = format!(
        "[[rule]]\nallow = [\"{}\"]\nports = [80]\nmethods = [\"GET\"]\npaths = [\"/v1/**\"]\n",
        api.name
    );
    let guest = world.guest(&rule);
    for (method, path, status, code) in [
        ("GET", "/v1/models", 200, ""),
        ("POST", "/v1/models", 403, "method"),
        ("GET", "/v2/models", 403, "path"),
        ("GET", "/v1/../v2/models", 403, "path"),
        ("GET", "/v1/%2e%2e/v2/models", 403, "path"),
    ] {
        let url = format!("http://{}{path}", api.name);
        let got = guest.curl(&["--path-as-is", "-X", method, &url]);
        assert_eq!(got.status, status, "{method} {path}: {}", got.stderr);
        assert!(got.head.contains(code), "{method} {path}: {}", got.head);
    }
    let seen: Vec<String> =
        world.requests(&api.name).into_iter().map(|r| r.method + " " + &r.target).collect();
    assert_eq!(seen, ["GET /v1/models"]);
}

/// Attack E20. Servers that know path parameters read `/admin;x` as `/admin`: a rule that denies that
/// keeps it in, however it is written.
#[test]
fn parameters_of_a_path_do_not_pass_a_rule_that_denies_the_path() {
    let world = World::shared();
    let api = world.site("api");
    let rules = format!(
        "[[rule]]\nallow = [{0:?}]\nports = [80]\n\
         [[rule]]\ndeny = [{0:?}]\npaths = [\"/admin\", \"/admin/**\"]\n",
        api.name
    );
    let guest = world.guest(&rules);
    let ask = |path: &str| {
        let host = format!("Host: {}\r\n", api.name);
        let request = format!("GET {path} HTTP/1.1\r\n{host}Connection: close\r\n\r\n");
        statuses(&say(&guest, &api, &request))
    };
    for path in ["/admin", "/admin;", "/admin;x", "/admin;x/secret", "/;/admin", "/admin%3bx/a"] {
        assert_eq!(ask(path), [403], "{path}");
    }
    assert!(world.requests(&api.name).is_empty());
    for path in ["/administrator", "/a;x/admin", "/a;admin"] {
        assert_eq!(ask(path), [200], "the control: {path}");
    }
    guest.event(&[
        ("kind", "request"),
        ("outcome", "deny"),
        ("code", "rule"),
        ("path", "/admin;x"),
    ]);
}
