//! The first flight of every client in `data/hellos`, and every trick known against its readers.
#![expect(clippy::expect_used, clippy::indexing_slicing, reason = "tests, and their own bytes")]

use std::path::PathBuf;

use egress::sniff::{
    ClientHello, Ech, Flaw, MAX_FLIGHT, MAX_RECORDS, Sni, Sniffed, Sniffer, alert_access_denied,
    sniff,
};
use policy::{Code, Host};
use proptest::prelude::*;

const NAME: &str = "api.example.test";

/// Client, ECH, ALPN, TLS 1.3. All but one send `NAME`.
const CLIENTS: &[(&str, bool, &[&str], bool)] = &[
    ("chrome99", false, BOTH, true),
    ("chrome110", false, BOTH, true),
    ("chrome124", true, BOTH, true),
    ("chrome131", true, BOTH, true),
    ("chrome131-android", true, BOTH, true),
    ("chrome152", true, BOTH, true),
    ("curl", false, BOTH, true),
    ("edge101", false, BOTH, true),
    ("firefox133", true, BOTH, true),
    ("firefox155", true, BOTH, true),
    ("git-gnutls", false, BOTH, true),
    ("gnutls", false, &[], true),
    ("go", false, BOTH, true),
    ("java", false, BOTH, true),
    ("node", false, BOTH, true),
    ("openssl-default", false, &[], true),
    ("openssl-many-groups", false, &[], true),
    ("openssl-no-sni", false, &[], true),
    ("openssl-psk-early-data", false, &[], true),
    ("openssl-tls12", false, &[], false),
    ("openssl-tls13-h2", false, BOTH, true),
    ("python", false, &[], true),
    ("rustls-classic", false, BOTH, true),
    ("rustls-post-quantum", false, BOTH, true),
    ("rustls-tls12", false, &[], false),
    ("safari153", false, BOTH, true),
    ("safari180-ios", false, BOTH, true),
    ("safari270", false, BOTH, true),
    ("tor145", true, BOTH, true),
];
const BOTH: &[&str] = &["h2", "http/1.1"];

fn recorded(client: &str) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/hellos");
    std::fs::read(path.join(client).with_extension("bin")).expect("a recorded hello")
}

/// A recorded flight as its one handshake message, and what came behind it.
fn taken_apart(flight: &[u8]) -> (&[u8], &[u8]) {
    let length = usize::from(u16::from_be_bytes([flight[3], flight[4]]));
    flight[5..].split_at(length)
}

fn named() -> Sni {
    Sni::Host(Host::parse(NAME).expect("a name"))
}

fn u16_of(length: usize) -> [u8; 2] {
    u16::try_from(length).expect("a short vector").to_be_bytes()
}

fn vec16(bytes: &[u8]) -> Vec<u8> {
    [&u16_of(bytes.len())[..], bytes].concat()
}

fn record(kind: u8, minor: u8, fragment: &[u8]) -> Vec<u8> {
    [&[kind, 3, minor][..], &vec16(fragment)].concat()
}

fn in_records(message: &[u8], size: usize) -> Vec<u8> {
    message.chunks(size).flat_map(|fragment| record(22, 1, fragment)).collect()
}

/// A ClientHello message with these extensions and nothing remarkable.
fn message(version: [u8; 2], extensions: &[u8]) -> Vec<u8> {
    let mut body = version.to_vec();
    body.extend([7; 32]);
    body.extend([0, 0, 2, 0x13, 0x01, 1, 0]);
    body.extend(vec16(extensions));
    [&[1, 0][..], &vec16(&body)].concat()
}

fn extension(kind: u16, data: &[u8]) -> Vec<u8> {
    [&kind.to_be_bytes()[..], &vec16(data)].concat()
}

fn sni_of(name: &[u8]) -> Vec<u8> {
    extension(0, &vec16(&[&[0][..], &vec16(name)].concat()))
}

fn hello_with(extensions: &[u8]) -> Vec<u8> {
    record(22, 1, &message([3, 3], extensions))
}

fn read(flight: &[u8]) -> ClientHello {
    match sniff(flight) {
        Sniffed::Tls(hello) => hello,
        other => panic!("not a hello: {other:?}"),
    }
}

fn byte_by_byte(flight: &[u8]) -> Sniffed {
    let mut sniffer = Sniffer::new();
    flight.iter().fold(Sniffed::NeedMore, |_, byte| sniffer.feed(&[*byte]))
}

#[test]
fn every_recorded_client_is_read_for_what_it_sent() {
    for &(client, ech, alpn, tls13) in CLIENTS {
        let sni = if client == "openssl-no-sni" { Sni::Absent } else { named() };
        let alpn = alpn.iter().map(|protocol| protocol.as_bytes().into()).collect();
        let expected = ClientHello { sni, ech: ech.then_some(Ech::Outer), alpn, tls13 };
        assert_eq!(read(&recorded(client)), expected, "{client}");
    }
}

#[test]
fn every_recorded_hello_is_in_the_table() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/hellos");
    let files = std::fs::read_dir(path).expect("the hellos").count();
    assert_eq!(files, CLIENTS.len());
}

#[test]
fn a_hello_reads_the_same_wherever_its_segments_are_cut() {
    for (client, ..) in CLIENTS {
        let flight = recorded(client);
        let hello = 5 + taken_apart(&flight).0.len();
        let whole = sniff(&flight);
        for cut in 0..=flight.len() {
            let mut sniffer = Sniffer::new();
            let first = sniffer.feed(&flight[..cut]);
            assert_eq!(first == Sniffed::NeedMore, cut < hello, "{client} at {cut}");
            assert_eq!(sniffer.feed(&flight[cut..]), whole, "{client} at {cut}");
            assert_eq!(sniffer.into_flight(), flight, "{client} at {cut}");
        }
        assert_eq!(byte_by_byte(&flight), whole, "{client}");
    }
}

#[test]
fn a_hello_reads_the_same_wherever_its_records_are_cut() {
    for (client, ..) in CLIENTS {
        let flight = recorded(client);
        let (message, rest) = taken_apart(&flight);
        let whole = sniff(&flight);
        for cut in 1..message.len() {
            let (first, second) = message.split_at(cut);
            let parts = [record(22, 1, first), record(22, 3, second), rest.to_vec()].concat();
            assert_eq!(sniff(&parts), whole, "{client} at {cut}");
            let mut sniffer = Sniffer::new();
            assert_eq!(sniffer.feed(&parts[..5 + cut]), Sniffed::NeedMore);
            assert_eq!(sniffer.feed(&parts[5 + cut..]), whole, "{client} at {cut}");
        }
        let crumbs = in_records(message, 1);
        assert_eq!(sniff(&crumbs), whole, "{client}");
        assert_eq!(byte_by_byte(&crumbs), whole, "{client}");
    }
}

#[test]
fn what_follows_the_hello_in_its_flight_is_kept_and_not_judged() {
    let flight = recorded("openssl-psk-early-data");
    let (message, rest) = taken_apart(&flight);
    assert_eq!(rest[0], 20, "a change_cipher_spec, then early data");
    assert_eq!(sniff(&flight), sniff(&flight[..5 + message.len()]));
    let mut sniffer = Sniffer::new();
    let verdict = sniffer.feed(&flight);
    assert_eq!(sniffer.feed(b"more"), verdict);
    assert_eq!(sniffer.into_flight(), [&flight[..], b"more"].concat());
}

#[test]
fn a_name_is_a_host_name_or_nothing() {
    // D12, D14 to D17
    let cases: &[(&[u8], Result<&str, Code>)] = &[
        (b"API.Example.TEST", Ok(NAME)),
        (b"a_b.example.test", Ok("a_b.example.test")),
        (b"evil.test\0.example.test", Err(Code::BadName)),
        (b"evil.test\n.example.test", Err(Code::BadName)),
        (b"evil.test .example.test", Err(Code::BadName)),
        (b"evil.test/.example.test", Err(Code::BadName)),
        (b"*.example.test", Err(Code::BadName)),
        (b"b\xc3\xbccher.example", Err(Code::BadName)),
        (b"\xff\xfe.example", Err(Code::BadName)),
        (b"xn--example-.org", Err(Code::BadName)),
        (b"a..example.test", Err(Code::BadName)),
        (b".example.test", Err(Code::BadName)),
        (b".", Err(Code::BadName)),
        (&[b'a'; 64], Err(Code::BadName)),
        (&[b'a'; 300], Err(Code::BadName)),
        (b"1.2.3.4", Err(Code::NoName)),
        (b"127.1", Err(Code::NoName)),
        (b"2130706433", Err(Code::NoName)),
        (b"0x7f000001", Err(Code::NoName)),
        (b"0177.0.0.1", Err(Code::NoName)),
        (b"::1", Err(Code::NoName)),
        (b"[::1]", Err(Code::NoName)),
    ];
    for (name, expected) in cases {
        let hello = read(&hello_with(&sni_of(name)));
        let got = hello.sni.host().map(Host::as_str);
        assert_eq!(got, *expected, "{}", name.escape_ascii());
    }
}

#[test]
fn a_hello_without_a_name_has_none() {
    // D06
    for flight in [hello_with(&[]), hello_with(&extension(0x1a1a, &[]))] {
        assert_eq!(read(&flight).sni, Sni::Absent);
    }
    // TLS 1.2 allows a hello that ends before the extensions.
    let mut body = message([3, 3], &[]);
    body.truncate(body.len() - 2);
    body[3] -= 2;
    assert_eq!(read(&record(22, 1, &body)).sni.host(), Err(Code::NoName));
}

#[test]
fn a_name_list_holds_exactly_one_host_name() {
    // D07
    let host = [&[0][..], &vec16(NAME.as_bytes())].concat();
    let other = [&[0][..], &vec16(b"evil.test")].concat();
    let unknown = [&[1][..], &vec16(b"x")].concat();
    for list in [
        vec![],
        [&host[..], &other].concat(),
        [&host[..], &host].concat(),
        [&unknown[..], &host].concat(),
        [&host[..], &unknown].concat(),
        unknown,
    ] {
        let flight = hello_with(&extension(0, &vec16(&list)));
        assert_eq!(sniff(&flight), Sniffed::Undecidable(Flaw::NameList), "{list:?}");
    }
    let twice = [sni_of(NAME.as_bytes()), extension(0x2a2a, &[]), sni_of(b"evil.test")].concat();
    assert_eq!(sniff(&hello_with(&twice)), Sniffed::Undecidable(Flaw::DuplicateExtension));
    let twice = [extension(0x2a2a, &[]), extension(0x2a2a, &[])].concat();
    assert_eq!(sniff(&hello_with(&twice)), Sniffed::Undecidable(Flaw::DuplicateExtension));
}

#[test]
fn a_length_that_lies_is_never_believed() {
    // D09: one byte too many or too few at each place that has a length.
    let good = hello_with(&sni_of(NAME.as_bytes()));
    assert_eq!(read(&good).sni, named());
    let sni = good.len() - sni_of(NAME.as_bytes()).len();
    // handshake, session, suites, compression, extensions, extension, list, name
    for at in [8, 43, 45, 48, 50, sni + 3, sni + 5, sni + 8] {
        for change in [1, 0xff, 0x80] {
            let mut flight = good.clone();
            flight[at] = flight[at].wrapping_add(change);
            // A longer message is only known to be short when its next record does not come.
            let verdict = sniff(&flight);
            let waits = at == 8 && verdict == Sniffed::NeedMore;
            assert!(waits || matches!(verdict, Sniffed::Undecidable(_)), "{at}: {verdict:?}");
        }
    }
    let trailing = record(22, 1, &[&good[5..], &[0][..]].concat());
    assert_eq!(sniff(&trailing), Sniffed::Undecidable(Flaw::Malformed));
    let data = [&vec16(&[&[0][..], &vec16(NAME.as_bytes())].concat())[..], &[0]].concat();
    let inner = hello_with(&extension(0, &data));
    assert_eq!(sniff(&inner), Sniffed::Undecidable(Flaw::Malformed));
}

#[test]
fn only_tls_1_2_and_later_are_read() {
    // D11, D20
    for version in [[3, 0], [3, 1], [3, 2], [3, 4], [2, 0], [0xfe, 0xfd]] {
        let flight = record(22, 1, &message(version, &sni_of(NAME.as_bytes())));
        assert_eq!(sniff(&flight), Sniffed::Undecidable(Flaw::Version), "{version:?}");
    }
    let offering = |versions: &[u8]| {
        let length = u8::try_from(versions.len()).expect("a short list");
        hello_with(&extension(43, &[&[length][..], versions].concat()))
    };
    assert!(read(&offering(&[0x1a, 0x1a, 3, 4, 3, 3])).tls13);
    assert!(read(&offering(&[3, 4])).tls13);
    assert!(!read(&offering(&[3, 3, 3, 2])).tls13);
    assert_eq!(sniff(&offering(&[3, 2, 3, 1])), Sniffed::Undecidable(Flaw::Version));
    assert_eq!(sniff(&offering(&[0x1a, 0x1a])), Sniffed::Undecidable(Flaw::Version));
    assert_eq!(sniff(&offering(&[])), Sniffed::Undecidable(Flaw::Malformed));
    assert_eq!(sniff(&offering(&[3, 4, 3])), Sniffed::Undecidable(Flaw::Malformed));
    assert_eq!(sniff(&[0x80, 0x2e, 1, 0, 2, 0, 0x15]), Sniffed::Undecidable(Flaw::Sslv2));
    assert_eq!(sniff(&[0x80, 0x2e, 1, 3, 1]), Sniffed::Undecidable(Flaw::Sslv2));
}

#[test]
fn records_are_of_a_kind_a_version_and_a_length_that_clients_send() {
    // D02
    let whole = message([3, 3], &sni_of(NAME.as_bytes()));
    let (head, tail) = whole.split_at(20);
    for minor in 0..=4 {
        assert_eq!(read(&record(22, minor, &whole)).sni, named());
    }
    let between = |inserted: &[u8]| {
        sniff(&[&record(22, 1, head)[..], inserted, &record(22, 3, tail)].concat())
    };
    assert_eq!(between(&[]), sniff(&record(22, 1, &whole)));
    let alert = record(21, 3, &[1, 0]);
    let change = record(20, 3, &[1]);
    let cases: &[(&[u8], Flaw)] = &[
        (&alert, Flaw::RecordType),
        (&change, Flaw::RecordType),
        (&record(23, 3, b"x"), Flaw::RecordType),
        (&record(22, 3, &[]), Flaw::RecordLength),
        (&[22, 3, 3, 0x40, 0x01], Flaw::RecordLength),
        (&record(22, 5, b"x"), Flaw::RecordVersion),
        (&[22, 2, 0, 0, 1, 0], Flaw::RecordVersion),
        (b"GET / ", Flaw::RecordType),
    ];
    for &(inserted, flaw) in cases {
        assert_eq!(between(inserted), Sniffed::Undecidable(flaw), "{inserted:?}");
    }
    assert_eq!(sniff(&alert), Sniffed::Undecidable(Flaw::RecordType));
    assert_eq!(sniff(&change), Sniffed::Undecidable(Flaw::RecordType));
    assert_eq!(sniff(&record(22, 3, &[])), Sniffed::Undecidable(Flaw::RecordLength));
    assert_eq!(sniff(&record(22, 3, &[2])), Sniffed::Undecidable(Flaw::NotClientHello));
}

#[test]
fn a_hello_has_a_bound_in_bytes_records_and_parts() {
    // D04: a name behind a large key share is found...
    let share = extension(51, &[0; 4000]);
    let far = [share, sni_of(NAME.as_bytes())].concat();
    assert_eq!(read(&in_records(&message([3, 3], &far), 1400)).sni, named());
    // ...up to a bound.
    assert_eq!(sniff(&record(22, 1, &[1, 1, 0, 0])), Sniffed::Undecidable(Flaw::TooLong));
    let padded = |size| {
        let fill = extension(21, &vec![0; size]);
        in_records(&message([3, 3], &fill), 1 << 14)
    };
    assert!(matches!(sniff(&padded(MAX_FLIGHT - 200)), Sniffed::Tls(_)));
    assert_eq!(sniff(&padded(MAX_FLIGHT - 70)), Sniffed::Undecidable(Flaw::TooLong));
    let crumbs = |length: u16| {
        let fill = extension(21, &vec![0; usize::from(length)]);
        let message = message([3, 3], &fill);
        (message.len(), sniff(&in_records(&message, 1)))
    };
    let (records, verdict) = crumbs(MAX_RECORDS - 51);
    assert_eq!(records, usize::from(MAX_RECORDS));
    assert!(matches!(verdict, Sniffed::Tls(_)));
    assert_eq!(crumbs(MAX_RECORDS - 50).1, Sniffed::Undecidable(Flaw::TooManyRecords));
    let many = (0..129).flat_map(|kind| extension(0x8000 + kind, &[])).collect::<Vec<_>>();
    assert_eq!(sniff(&hello_with(&many)), Sniffed::Undecidable(Flaw::TooMany));
    let alpn = extension(16, &vec16(&[1, b'x'].repeat(17)));
    assert_eq!(sniff(&hello_with(&alpn)), Sniffed::Undecidable(Flaw::TooMany));
    let alpn = extension(16, &vec16(&[1, b'x'].repeat(16)));
    assert_eq!(read(&hello_with(&alpn)).alpn.len(), 16);
}

#[test]
fn an_encrypted_hello_is_noted_with_its_kind() {
    // D19
    let outer = [&[0, 0, 1, 0, 1, 9][..], &vec16(&[1; 32]), &vec16(&[2; 64])].concat();
    assert_eq!(read(&hello_with(&extension(0xfe0d, &outer))).ech, Some(Ech::Outer));
    assert_eq!(read(&hello_with(&extension(0xfe0d, &[1]))).ech, Some(Ech::Inner));
    for data in [&[][..], &[2], &[1, 0], &outer[..outer.len() - 1]] {
        let flight = hello_with(&extension(0xfe0d, data));
        assert_eq!(sniff(&flight), Sniffed::Undecidable(Flaw::Malformed), "{data:?}");
    }
}

#[test]
fn http_is_told_by_its_request_line_and_nothing_else_is() {
    // D10
    let cases: &[(&[u8], Sniffed)] = &[
        (b"", Sniffed::NeedMore),
        (b"G", Sniffed::NeedMore),
        (b"GET", Sniffed::NeedMore),
        (b"GET ", Sniffed::NeedMore),
        (b"GET /", Sniffed::Http),
        (b"get /", Sniffed::Http),
        (b"GET http", Sniffed::Http),
        (b"GET HTTP", Sniffed::Http),
        (b"GET ht", Sniffed::NeedMore),
        (b"GET hx", Sniffed::Other),
        (b"OPTIONS *", Sniffed::Http),
        (b"M-SEARCH *", Sniffed::Http),
        (b"CONNECT evil.test:443 HTTP/1.1", Sniffed::Http),
        (b"\r\n\r\nGET /", Sniffed::Http),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", Sniffed::Http2),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0", Sniffed::Http2),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r", Sniffed::NeedMore),
        (b"PRI * HTTP/1.1", Sniffed::Http),
        (b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n", Sniffed::Other),
        (b"EHLO example.test\r\n", Sniffed::Other),
        (b"0032git-upload-pack /project.git\0", Sniffed::Other),
        (b"*1\r\n$4\r\nPING\r\n", Sniffed::Other),
        (b"GET\t/", Sniffed::Other),
        (b" GET /", Sniffed::Other),
        (&[0x16, 0x01], Sniffed::Other),
        (&[0x16], Sniffed::NeedMore),
        (&[0x80, 0x2e], Sniffed::NeedMore),
        (&[0x80, 0x2e, 0x02], Sniffed::Other),
        (&[0x80, 0x2e, 0x01, 0x00, 0x03], Sniffed::Other),
        (&[0, 0, 0, 8, 4, 0xd2, 0x16, 0x2f], Sniffed::Other),
        (&[b'A'; 32], Sniffed::NeedMore),
        (&[b'A'; 33], Sniffed::Other),
    ];
    for (flight, expected) in cases {
        assert_eq!(sniff(flight), *expected, "{}", flight.escape_ascii());
        assert_eq!(byte_by_byte(flight), *expected, "{}", flight.escape_ascii());
    }
}

#[test]
fn the_refusal_is_the_alert_access_denied_to_a_real_client() {
    let mut client = rustls_client(rustls::DEFAULT_VERSIONS, true, &[]);
    client.read_tls(&mut &alert_access_denied()[..]).expect("bytes");
    let refused = client.process_new_packets().expect_err("an alert");
    assert_eq!(refused, rustls::Error::AlertReceived(rustls::AlertDescription::AccessDenied),);
}

/// Every byte of some hellos changed in five ways: where both read a name, it is the same name.
#[test]
fn a_changed_hello_never_yields_another_name_than_rustls_reads() {
    let mut agreed = 0;
    for client in ["go", "curl", "rustls-classic", "openssl-tls12", "chrome131-android"] {
        let good = recorded(client);
        for at in 0..good.len() {
            for change in [1, 0xff, 2, 0x20, 0x80] {
                let mut flight = good.clone();
                flight[at] = flight[at].wrapping_add(change);
                agreed += usize::from(agrees_with_rustls(&flight));
            }
        }
    }
    assert!(agreed > 1000, "both read only {agreed} of the changed hellos");
}

/// Whether both read a name; fails when they read different ones, or when only we do.
fn agrees_with_rustls(flight: &[u8]) -> bool {
    let mut acceptor = rustls::server::Acceptor::default();
    acceptor.read_tls(&mut &*flight).expect("bytes");
    let Ok(Some(accepted)) = acceptor.accept() else { return false };
    let theirs = accepted.client_hello().server_name().map(str::to_owned);
    let Sniffed::Tls(ours) = sniff(flight) else { return false };
    let Ok(ours) = ours.sni.host() else { return false };
    let theirs = theirs.and_then(|name| Host::parse(&name).ok());
    assert_eq!(Some(ours), theirs.as_ref(), "{}", flight.escape_ascii());
    true
}

fn rustls_client(
    versions: &[&'static rustls::SupportedProtocolVersion],
    post_quantum: bool,
    alpn: &[&str],
) -> rustls::ClientConnection {
    let mut provider = rustls::crypto::aws_lc_rs::default_provider();
    if !post_quantum {
        provider.kx_groups = vec![rustls::crypto::aws_lc_rs::kx_group::X25519];
    }
    let mut config = rustls::ClientConfig::builder_with_provider(provider.into())
        .with_protocol_versions(versions)
        .expect("versions")
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
    config.alpn_protocols = alpn.iter().map(|protocol| protocol.as_bytes().to_vec()).collect();
    let name = NAME.try_into().expect("a name");
    rustls::ClientConnection::new(config.into(), name).expect("a client")
}

/// How the three files `rustls-*` of `data/hellos` were made.
#[test]
#[ignore = "writes files of the source tree"]
fn write_the_hellos_of_rustls() {
    let both = rustls::DEFAULT_VERSIONS;
    for (client, mut connection) in [
        ("rustls-classic", rustls_client(both, false, BOTH)),
        ("rustls-post-quantum", rustls_client(both, true, BOTH)),
        ("rustls-tls12", rustls_client(&[&rustls::version::TLS12], false, &[])),
    ] {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/hellos");
        let mut flight = Vec::new();
        connection.write_tls(&mut flight).expect("a hello");
        std::fs::write(path.join(client).with_extension("bin"), flight).expect("a file");
    }
}

/// Bytes that get somewhere: anything, something that begins like TLS, or a damaged real hello.
fn flights() -> impl Strategy<Value = Vec<u8>> {
    let anything = prop::collection::vec(any::<u8>(), 0..200);
    let framed = (0u8..6, prop::collection::vec(any::<u8>(), 0..300)).prop_map(|(minor, body)| {
        let message = [&[1, 0][..], &vec16(&body)].concat();
        record(22, minor, &message)
    });
    let extended = prop::collection::vec(
        (prop::sample::select(vec![0u16, 16, 43, 0xfe0d, 7]), prop::collection::vec(0u8..6, 0..12)),
        0..5,
    )
    .prop_map(|list| {
        let data: Vec<u8> = list.iter().flat_map(|(kind, data)| extension(*kind, data)).collect();
        hello_with(&data)
    });
    let damaged = (
        prop::sample::select(CLIENTS),
        prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        1usize..2000,
    )
        .prop_map(|((client, ..), changes, size)| {
            let mut flight = in_records(taken_apart(&recorded(client)).0, size);
            for (at, value) in changes {
                let at = at.index(flight.len());
                flight[at] = value;
            }
            flight
        });
    let text = "[\r\n]{0,3}[A-Za-z-]{1,9} [/*hx ][ -~]{0,20}".prop_map(String::into_bytes);
    prop_oneof![anything, framed, extended, damaged, text]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn a_verdict_depends_on_the_bytes_and_not_on_their_segments(
        flight in flights(),
        cuts in prop::collection::vec(1usize..400, 1..20),
    ) {
        let whole = sniff(&flight);
        prop_assert_eq!(&byte_by_byte(&flight), &whole);
        let mut sniffer = Sniffer::new();
        let mut rest = &flight[..];
        let mut last = sniffer.feed(&[]);
        for cut in cuts.iter().cycle() {
            if rest.is_empty() { break; }
            let (segment, more) = rest.split_at((*cut).min(rest.len()));
            last = sniffer.feed(segment);
            rest = more;
        }
        prop_assert_eq!(&last, &whole);
        prop_assert_eq!(sniffer.into_flight(), flight);
    }

    #[test]
    fn a_damaged_flight_never_yields_another_name_than_rustls_reads(flight in flights()) {
        agrees_with_rustls(&flight);
    }
}
