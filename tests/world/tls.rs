//! The first flight of TLS, cut in every way a network or an attacker cuts it.

use std::io::{Read, Write};
use std::net::TcpStream;

use world::client::{self, ACCESS_DENIED, PATIENT};
use world::{World, allow};

/// Promise 13. Attacks D01, P06. The verdict does not depend on how the bytes were cut.
#[test]
fn a_client_hello_sent_byte_by_byte_is_read_like_a_whole_one() {
    let world = World::shared();
    let (api, sink) = (world.site("api"), world.attacker());
    let guest = world.guest(&allow(&[&api]));
    guest.run(|| {
        let mut tls = client::tls(&world.authority, &api.name);
        let mut stream = client::connect(api.at(443), PATIENT).expect("connect");
        let mut hello = Vec::new();
        tls.write_tls(&mut hello).expect("a ClientHello");
        for byte in hello.chunks(1) {
            stream.write_all(byte).expect("one byte");
        }
        let request =
            format!("GET /bytewise HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", api.name);
        let mut tls = rustls::Stream::<_, TcpStream>::new(&mut tls, &mut stream);
        tls.write_all(request.as_bytes()).expect("the handshake ends well");
        let mut reply = [0; 15];
        tls.read_exact(&mut reply).expect("an answer");
        assert_eq!(&reply, b"HTTP/1.1 200 OK");
    });
    let hello = client::client_hello(&world.authority, &sink.name);
    let bytes: Vec<&[u8]> = hello.chunks(1).collect();
    let reply = guest.run(|| client::exchange(sink.at(443), &bytes, PATIENT));
    assert_eq!(reply.alert(), Some(ACCESS_DENIED), "{reply:?}");
    assert_eq!(world.sent_to(sink.ip), []);
}

/// Promise 13. Attacks D02, P06. Nor on how the handshake was cut into records.
#[test]
fn a_client_hello_in_many_records_is_read_like_one() {
    let world = World::shared();
    let (api, sink) = (world.site("api"), world.attacker());
    let guest = world.guest(&allow(&[&api]));
    for size in [1, 7, 100] {
        let hello = client::client_hello(&world.authority, &sink.name);
        let records = in_records_of(&hello, size);
        let reply = guest.run(|| client::exchange(sink.at(443), &[&records], PATIENT));
        assert_eq!(reply.alert(), Some(ACCESS_DENIED), "{size}: {reply:?}");
        // The far side reads records of this size too: it answers with a ServerHello.
        let hello = client::client_hello(&world.authority, &api.name);
        let records = in_records_of(&hello, size);
        let reply = guest.run(|| {
            client::exchange_until(api.at(443), &[&records], PATIENT, client::has_handshake)
        });
        assert!(client::has_handshake(&reply.bytes), "{size}: {reply:?}");
    }
    assert_eq!(world.sent_to(sink.ip), []);
}

fn in_records_of(hello: &[u8], size: usize) -> Vec<u8> {
    let (head, handshake) = hello.split_at(5);
    let records = handshake.chunks(size).flat_map(|piece| {
        let length = u16::try_from(piece.len()).expect("a short piece").to_be_bytes();
        [&head[..3], &length, piece].concat()
    });
    records.collect()
}

/// Promise 13. Attacks D09, D12, D20. A hello that lies about a length, or says two names, is no hello.
#[test]
fn a_malformed_client_hello_is_refused_and_the_far_side_hears_nothing() {
    let world = World::shared();
    let (api, sink) = (world.site("api"), world.attacker());
    let guest = world.guest(&allow(&[&api]));
    let good = client::client_hello(&world.authority, &api.name);
    let name_at =
        good.windows(api.name.len()).position(|w| w == api.name.as_bytes()).expect("its name");
    let with = |at: usize, byte: u8| {
        let mut hello = good.clone();
        hello[at] = byte;
        hello
    };
    let cases = [
        ("a NUL in the name", with(name_at + 2, 0)),
        ("a name longer than its list", with(name_at - 1, 255)),
        ("a handshake longer than its record", with(6, 1)),
        ("a handshake shorter than its content", with(8, 3)),
        ("a version of TLS that never was", with(1, 9)),
        ("an SSL 2 hello", vec![0x80, 0x2e, 1, 3, 1, 0, 21, 0, 0, 0, 16]),
    ];
    for (name, hello) in &cases {
        // Some of these are an unfinished hello: the end of input makes it a malformed one.
        let finished = || {
            let mut stream = client::connect(sink.at(443), PATIENT).expect("connect");
            stream.write_all(hello).expect("write");
            let _ = stream.shutdown(std::net::Shutdown::Write);
            client::read_to_end(&mut stream, &mut Vec::new(), PATIENT)
        };
        let end = guest.at_once(finished);
        assert_ne!(end, client::End::Open, "{name}");
    }
    assert_eq!(world.sent_to(sink.ip), []);
    assert_eq!(world.sent_to(api.ip), []);
    guest.reaches(&api);
}
