//! Flights to sniff: recorded ones, and hellos put together piece by piece.

use std::path::PathBuf;

use egress::sniff::{ClientHello, Sni, Sniffed, Sniffer, sniff};
use policy::Host;

pub(crate) const NAME: &str = "api.example.test";

pub(crate) fn recorded(client: &str) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/hellos");
    std::fs::read(path.join(client).with_extension("bin")).expect("a recorded hello")
}

/// A recorded flight as its one handshake message, and what came behind it.
pub(crate) fn taken_apart(flight: &[u8]) -> (&[u8], &[u8]) {
    let length = usize::from(u16::from_be_bytes([flight[3], flight[4]]));
    flight[5..].split_at(length)
}

pub(crate) fn named() -> Sni {
    Sni::Host(Host::parse(NAME).expect("a name"))
}

pub(crate) fn u16_of(length: usize) -> [u8; 2] {
    u16::try_from(length).expect("a short vector").to_be_bytes()
}

pub(crate) fn vec16(bytes: &[u8]) -> Vec<u8> {
    [&u16_of(bytes.len())[..], bytes].concat()
}

pub(crate) fn record(kind: u8, minor: u8, fragment: &[u8]) -> Vec<u8> {
    [&[kind, 3, minor][..], &vec16(fragment)].concat()
}

pub(crate) fn in_records(message: &[u8], size: usize) -> Vec<u8> {
    message.chunks(size).flat_map(|fragment| record(22, 1, fragment)).collect()
}

/// A ClientHello message with these extensions and nothing remarkable.
pub(crate) fn message(version: [u8; 2], extensions: &[u8]) -> Vec<u8> {
    let mut body = version.to_vec();
    body.extend([7; 32]);
    body.extend([0, 0, 2, 0x13, 0x01, 1, 0]);
    body.extend(vec16(extensions));
    [&[1, 0][..], &vec16(&body)].concat()
}

pub(crate) fn extension(kind: u16, data: &[u8]) -> Vec<u8> {
    [&kind.to_be_bytes()[..], &vec16(data)].concat()
}

pub(crate) fn sni_of(name: &[u8]) -> Vec<u8> {
    extension(0, &vec16(&[&[0][..], &vec16(name)].concat()))
}

pub(crate) fn hello_with(extensions: &[u8]) -> Vec<u8> {
    record(22, 1, &message([3, 3], extensions))
}

pub(crate) fn read(flight: &[u8]) -> ClientHello {
    match sniff(flight) {
        Sniffed::Tls(hello) => hello,
        other => panic!("not a hello: {other:?}"),
    }
}

pub(crate) fn byte_by_byte(flight: &[u8]) -> Sniffed {
    let mut sniffer = Sniffer::new();
    flight.iter().fold(Sniffed::NeedMore, |_, byte| sniffer.feed(&[*byte]))
}
