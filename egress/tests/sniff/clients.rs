//! Recorded clients are read for what they sent, however their bytes are cut.

use std::path::PathBuf;

use egress::sniff::{ClientHello, Ech, Sni, Sniffed, Sniffer, alert_access_denied, sniff};

use crate::bytes::{NAME, byte_by_byte, in_records, named, read, record, recorded, taken_apart};

/// Client, ECH, ALPN, TLS 1.3. All but one send `NAME`.
pub(crate) const CLIENTS: &[(&str, bool, &[&str], bool)] = &[
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

/// Attacks D04, D05. Those with `true` behind their name, and all of Chrome's, send GREASE.
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

/// Promise 13. Attacks D01, P06.
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

/// Promise 13. Attacks D02, P06.
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
fn the_refusal_is_the_alert_access_denied_to_a_real_client() {
    let mut client = rustls_client(rustls::DEFAULT_VERSIONS, true, &[]);
    client.read_tls(&mut &alert_access_denied()[..]).expect("bytes");
    let refused = client.process_new_packets().expect_err("an alert");
    assert_eq!(refused, rustls::Error::AlertReceived(rustls::AlertDescription::AccessDenied),);
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
