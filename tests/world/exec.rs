//! Commands in a guest whose agent lies, and callers who keep them running.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use policy::net::{AGENT_PORT, GUEST_IP};
use world::client::PATIENT;
use world::poll::eventually;
use world::{Guest, World};

/// One frame of the agent's: kind, length, payload.
fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("short").to_be_bytes();
    [&[kind], &length[..], payload].concat()
}

fn hello(version: u16) -> Vec<u8> {
    frame(129, format!("{{\"version\":{version},\"boot_id\":\"x\"}}").as_bytes())
}

/// An agent in the guest that says this to whoever connects, and then nothing.
fn agent(guest: &Guest<'_>, says: Vec<u8>) {
    let listener = guest.run(|| TcpListener::bind((GUEST_IP, AGENT_PORT)).expect("listen"));
    std::thread::spawn(move || {
        let mut open: Vec<TcpStream> = Vec::new();
        while let Ok((mut stream, _)) = listener.accept() {
            // Whoever refuses what it hears may be gone already.
            let _ = stream.write_all(&says);
            open.push(stream);
        }
    });
}

/// Asks for a command on a connection of its own, and waits for the first line of the answer.
fn exec(world: &World, name: &str) -> (UnixStream, String) {
    let mut caller = UnixStream::connect(world.daemon().socket()).expect("connect");
    caller.set_read_timeout(Some(PATIENT)).expect("a limit");
    let body = "{\"argv\":[\"id\"]}";
    let request = format!(
        "POST /v1/sandboxes/{name}/exec HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\n\
         upgrade: postern-exec\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    caller.write_all(request.as_bytes()).expect("sent");
    let mut line = Vec::new();
    while !line.ends_with(b"\r\n") {
        let mut byte = [0];
        caller.read_exact(&mut byte).expect("an answer");
        line.extend(byte);
    }
    (caller, String::from_utf8_lossy(&line).into_owned())
}

#[test]
fn an_agent_that_does_not_speak_the_protocol_is_an_error_and_not_a_hang() {
    let world = World::shared();
    for says in [
        hello(2),
        frame(133, b"{\"code\":0}"),
        frame(129, b"{}"),
        frame(7, b""),
        vec![129, 0xff, 0xff, 0xff, 0xff],
        b"HTTP/1.1 200 OK\r\n\r\n".to_vec(),
        vec![],
    ] {
        let guest = world.guest("");
        agent(&guest, says.clone());
        let began = Instant::now();
        let (_caller, line) = exec(world, &guest.name);
        assert!(line.contains("503"), "{says:?}: {line}");
        assert!(began.elapsed() < PATIENT, "{says:?}: {:?}", began.elapsed());
    }
}

/// A command that runs takes its caller's place, so that nobody holds more than the operator allowed.
#[test]
fn a_running_command_counts_as_a_connection_of_its_caller() {
    let world = World::with("[api]\nconnections = 2\n");
    let guest = world.guest("");
    agent(&guest, hello(1));
    let running: Vec<UnixStream> = (0..2)
        .map(|_| {
            let (caller, line) = exec(&world, &guest.name);
            assert!(line.contains("101"), "{line}");
            caller
        })
        .collect();
    let mut third = UnixStream::connect(world.daemon().socket()).expect("connect");
    third.write_all(b"GET /v1/health HTTP/1.1\r\nhost: localhost\r\n\r\n").expect("sent");
    third.set_read_timeout(Some(Duration::from_millis(500))).expect("a limit");
    assert!(third.read(&mut [0; 12]).is_err(), "answered beyond the limit");
    drop(running);
    let answered = || third.read(&mut [0; 12]).is_ok_and(|read| read > 0).then_some(());
    eventually("a place is free again", PATIENT, answered);
}
