//! Any bytes: no panic, no dependence on segments, and never another name than rustls reads.

use egress::sniff::{Sniffed, Sniffer, sniff};
use policy::Host;
use proptest::prelude::*;

use crate::bytes::{
    byte_by_byte, extension, hello_with, in_records, record, recorded, taken_apart, vec16,
};
use crate::clients::CLIENTS;

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
    let text = "[\r\n\t ]{0,3}\u{feff}?[!0\"A-Za-z-]{1,9}[ \t]{0,2}[/*hx ]?[ -~\0]{0,20}( HTTP/1.1)?[\r\n]{0,2}";
    let text = text.prop_map(String::into_bytes);
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
