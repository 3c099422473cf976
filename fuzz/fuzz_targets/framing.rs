//! Requests of any bytes: no panic, the verdict does not depend on how they are cut, and a head that is
//! accepted is one for another parser too, with the same end. The first byte says where to cut.
#![no_main]

use egress::framing::{Body, Flaw, Head, HeadReader, Length};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((&cut, bytes)) = data.split_first() else { return };
    let cut = bytes.len() * usize::from(cut) / 256;
    let whole = HeadReader::default().read(bytes);
    let mut reader = HeadReader::default();
    let early = reader.read(&bytes[..cut]);
    assert!(early == Ok(None) || early == whole);
    if early == Ok(None) {
        assert_eq!(reader.read(bytes), whole);
    }
    if let Ok(Some(head)) = whole {
        agrees(bytes, head);
        body(&bytes[head.end..], head.length, cut);
    }
    body(bytes, Length::Chunked, cut);
});

fn agrees(bytes: &[u8], head: Head) {
    let mut fields = [httparse::EMPTY_HEADER; 100];
    let mut other = httparse::Request::new(&mut fields);
    let end = other.parse(&bytes[head.blank..]);
    assert_eq!(end, Ok(httparse::Status::Complete(head.end - head.blank)));
    assert_eq!(other.version, Some(u8::from(!head.last)));
    let named = |name: &str| other.headers.iter().filter(|f| f.name.eq_ignore_ascii_case(name)).count();
    let (lengths, codings) = (named("content-length"), named("transfer-encoding"));
    assert!(lengths + codings <= 1);
    assert_eq!(head.length == Length::Chunked, codings == 1);
    assert_eq!(head.upgrade, named("upgrade") > 0);
}

/// How many bytes are of the body, and whether it is over there.
fn read(length: Length, pieces: &[&[u8]]) -> Result<(usize, bool), Flaw> {
    let Some(mut body) = Body::new(length) else { return Ok((0, true)) };
    let mut used = 0;
    for piece in pieces {
        used += body.read(piece)?;
    }
    Ok((used, body.is_over()))
}

fn body(bytes: &[u8], length: Length, cut: usize) {
    let cut = cut.min(bytes.len());
    let whole = read(length, &[bytes]);
    assert_eq!(read(length, &[&bytes[..cut], &bytes[cut..]]), whole);
    if let Ok((used, over)) = whole {
        assert!(used == bytes.len() || over);
    }
}
