//! Where a rule lets any protocol through, bytes pass unread: but no request and no ClientHello among
//! them whose name is denied, however it is written and however long the guest waits before it.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use egress::Limits;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::time::sleep;

use crate::ask;
use crate::peers::{serve, soon};
use crate::place::{ORIGIN, Place, limits, run_brief, run_within};

const PORT: u16 = 2525;
const BY_ADDRESS: &str =
    "[[rule]]\nallow = [\"93.184.216.34\"]\n[[rule]]\ndeny = [\"evil.example.com\"]\n";
const BY_NAME: &str = "[[rule]]\nallow = [\"mail.example.com\"]\nports = [2525]\n";
/// What no server of the web understands, and what the far side says to it.
const NOISE: &[u8] = b"\0\0\0\x08";
const ECHO: &[u8] = b"OK\r\n";

/// All that a far side has read; it answers everything.
fn keep(listener: TcpListener) -> Arc<Mutex<Vec<u8>>> {
    let kept = Arc::<Mutex<Vec<u8>>>::default();
    let keeping = Arc::clone(&kept);
    serve(listener, move |mut stream| {
        let keeping = Arc::clone(&keeping);
        async move {
            let mut room = [0; 4096];
            while let Ok(n @ 1..) = stream.read(&mut room).await {
                keeping.lock().expect("unpoisoned").extend(&room[..n]);
                let _ = stream.write_all(ECHO).await;
            }
        }
    });
    kept
}

/// A ClientHello with this server name, in a record of this version.
fn hello(name: &str, version: [u8; 2]) -> Vec<u8> {
    let config = rustls::ClientConfig::builder()
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
    let name = name.to_owned().try_into().expect("a name");
    let mut client = rustls::ClientConnection::new(config.into(), name).expect("a client");
    let mut flight = Vec::new();
    client.write_tls(&mut flight).expect("memory");
    flight[1..3].copy_from_slice(&version);
    flight
}

fn request(line: &str) -> Vec<u8> {
    format!("{line}\r\nHost: evil.example.com\r\n\r\n").into_bytes()
}

/// What comes back to these words, up to the end, a reset, or as much as the far side says to one.
async fn said(place: &Place, port: u16, words: &[u8]) -> Vec<u8> {
    let mut stream = soon(place.dial(ORIGIN, port)).await.expect("connected");
    let _ = stream.write_all(words).await;
    let mut back = Vec::new();
    while back != ECHO && soon(stream.read_buf(&mut back)).await.is_ok_and(|n| n > 0) {}
    back
}

/// Promise 39. Attacks D11, E27. Each is what some server answers as a request to the denied name or as its
/// ClientHello; one is plain, and was always read.
#[test]
fn what_only_some_servers_read_does_not_pass_as_other_bytes() {
    run_brief(BY_ADDRESS, async |place| {
        for port in [80, 443, PORT] {
            let kept = keep(place.origin(ORIGIN, port));
            for line in ["GET / HTTP/1.1", "GET  / HTTP/1.1", "GET x://evil.example.com/ HTTP/1.1"]
            {
                let back = said(&place, port, &request(line)).await;
                assert!(back.starts_with(b"HTTP/1.1 4"), "{port}: {line}: {back:?}");
            }
            for version in [[3, 1], [2, 1], [4, 0]] {
                let back = said(&place, port, &hello("evil.example.com", version)).await;
                assert_eq!(back.first(), Some(&0x15), "{port}: {version:?}: {back:?}");
            }
            assert_eq!(*kept.lock().expect("unpoisoned"), b"", "{port}");
            assert_eq!(said(&place, port, NOISE).await, ECHO, "the control");
            assert_eq!(*kept.lock().expect("unpoisoned"), NOISE, "{port}");
        }
    });
}

/// Promise 39. Neither side says anything for longer than a first flight may take;
/// what the guest says then is judged as ever.
#[test]
fn a_guest_that_waited_for_its_server_is_judged_by_what_it_says_in_the_end() {
    let first_flight = Duration::from_secs(1);
    run_within(Limits { first_flight, ..limits() }, BY_NAME, async |place| {
        let kept = keep(place.origin(ORIGIN, PORT));
        ask(&place, policy::net::GATEWAY_IP, "mail.example.com").await;
        let (request, hello) = (request("GET / HTTP/1.1"), hello("evil.example.com", [3, 1]));
        let mut streams = Vec::new();
        for words in [NOISE, &request, &hello] {
            streams.push((soon(place.dial(ORIGIN, PORT)).await.expect("connected"), words));
        }
        sleep(2 * first_flight).await;
        for (stream, words) in &mut streams {
            stream.write_all(words).await.expect("sent");
            let mut back = [0; 4];
            soon(stream.read_exact(&mut back)).await.expect("an answer");
            let read = kept.lock().expect("unpoisoned").clone();
            assert_eq!(read, NOISE, "{back:?}");
            assert_eq!(back == ECHO, *words == NOISE, "{back:?}");
        }
    });
}
