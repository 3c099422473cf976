//! Callers who take more than their part: strangers at the door, tenants with many questions.

use std::net::Ipv4Addr;

use http::Method;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

use crate::api::strangers::{PART, PATIENCE};
use crate::auditlog::MOST_OPEN;

use super::*;

/// A caller who says nothing, from an address of loopback.
async fn silent(daemon: &Daemon, from: u8) -> TcpStream {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.bind((Ipv4Addr::new(127, 0, 0, from), 0).into()).expect("bound");
    socket.connect(daemon.tcp.parse().expect("an address")).await.expect("connected")
}

/// Whether it was closed, or is within this time.
async fn closed(caller: &mut TcpStream, within: Duration) -> bool {
    let read = tokio::time::timeout(within, caller.read(&mut [0])).await;
    read.is_ok_and(|read| !matches!(read, Ok(1..)))
}

/// Attack K11.
#[tokio::test(flavor = "multi_thread")]
async fn silent_strangers_of_one_address_make_way_for_another_and_keep_no_place_for_long() {
    let daemon = Daemon::start().await;
    let part = PLACES / PART;
    let mut strangers = Vec::new();
    for _ in 0..PLACES + 1 {
        strangers.push(silent(&daemon, 2).await);
    }
    let acme = daemon.bearer(Some(OF_ACME));
    let listed = tokio::time::timeout(PATIENCE, acme.get::<wire::Sandboxes>("/v1/sandboxes"));
    listed.await.expect("while they are there").expect("answered");
    let silent = strangers.len() - part;
    for (n, stranger) in strangers.iter_mut().enumerate().take(silent) {
        assert!(closed(stranger, PATIENCE / 2).await, "{n} is in the way of later ones");
    }
    for stranger in strangers.iter_mut().skip(silent) {
        assert!(closed(stranger, 2 * PATIENCE).await, "too long");
    }
    daemon.end().await;
}

/// Attack K11. As behind something that ends TLS, where all callers have one address.
#[tokio::test(flavor = "multi_thread")]
async fn a_token_is_heard_from_the_address_that_silent_strangers_come_from() {
    let daemon = Daemon::start().await;
    let mut strangers = Vec::new();
    // Every place there is, and then those of the address that the client below has.
    for from in [2, 3, 4, 5, 1] {
        for _ in 0..PLACES / PART {
            strangers.push(silent(&daemon, from).await);
        }
    }
    let acme = daemon.bearer(Some(OF_ACME));
    let listed = tokio::time::timeout(PATIENCE / 2, acme.get::<wire::Sandboxes>("/v1/sandboxes"));
    listed.await.expect("while they are there").expect("answered");
    assert!(!closed(strangers.last_mut().expect("one"), Duration::ZERO).await, "control");
    daemon.end().await;
}

/// Who was let in may be slower: it is known who it is.
#[tokio::test(flavor = "multi_thread")]
async fn a_caller_who_was_let_in_is_no_stranger_any_more() {
    let daemon = Daemon::start().await;
    let mut caller = silent(&daemon, 1).await;
    let head = format!(
        "GET /v1/health HTTP/1.1\r\nhost: {}\r\nauthorization: Bearer {OF_ACME}\r\n\r\n",
        daemon.tcp
    );
    for _ in 0..2 {
        caller.write_all(head.as_bytes()).await.expect("asked");
        let mut answer = [0; 4096];
        let read = caller.read(&mut answer).await.expect("answered");
        assert!(answer[..read].starts_with(b"HTTP/1.1 200"), "{:?}", &answer[..read]);
        tokio::time::sleep(PATIENCE + Duration::from_secs(1)).await;
    }
    drop(caller);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_asks_the_audit_no_more_at_once_than_one_may() {
    let daemon = Daemon::start().await;
    let (acme, none) = (daemon.bearer(Some(OF_ACME)), Content::Nothing);
    let whose = "acme".parse().expect("a name");
    let open: Vec<_> = (0..MOST_OPEN).map_while(|_| daemon.audit.reader(Some(&whose))).collect();
    assert_eq!(open.len(), MOST_OPEN, "control");
    for path in ["/v1/events", "/v1/events?follow=true"] {
        let problem = refusal(&acme, Method::GET, path, &[], none.clone()).await;
        assert_eq!((problem.code, problem.field.as_deref()), (Kind::Busy, Some("tenant")));
        assert!(problem.fix.is_some_and(|fix| fix.contains("close")), "{path}");
    }
    let head = format!(
        "GET /v1/events HTTP/1.1\r\nhost: {}\r\nauthorization: Bearer {OF_ACME}\r\n\r\n",
        daemon.tcp
    );
    let mut caller = silent(&daemon, 1).await;
    caller.write_all(head.as_bytes()).await.expect("asked");
    let mut answer = [0; 4096];
    let read = caller.read(&mut answer).await.expect("answered");
    let answer = String::from_utf8_lossy(&answer[..read]);
    assert!(answer.starts_with("HTTP/1.1 429") && answer.contains("retry-after: 1"), "{answer}");
    for client in [&daemon.local, &daemon.bearer(Some(OF_ALL))] {
        client.send(Method::GET, "/v1/events", HeaderMap::new(), none.clone()).await.expect("told");
    }
    drop(open);
    acme.send(Method::GET, "/v1/events", HeaderMap::new(), none).await.expect("told again");
    daemon.end().await;
}
