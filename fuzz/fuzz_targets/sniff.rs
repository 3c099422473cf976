//! A first flight of any bytes: no panic, and the verdict of the whole is the verdict of its bytes one
//! by one. The first byte says where else to cut it.
#![no_main]

use egress::sniff::{Sniffed, Sniffer, sniff};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((&cut, flight)) = data.split_first() else { return };
    let whole = sniff(flight);

    let mut sniffer = Sniffer::new();
    let bytes = flight.iter().fold(Sniffed::NeedMore, |_, byte| sniffer.feed(&[*byte]));
    assert_eq!(bytes, whole);
    assert_eq!(sniffer.into_flight(), flight);

    let mut sniffer = Sniffer::new();
    let (first, second) = flight.split_at(flight.len() * usize::from(cut) / 256);
    let early = sniffer.feed(first);
    let late = sniffer.feed(second);
    assert!(late == whole && (early == whole || early == Sniffed::NeedMore));

    if let Sniffed::Tls(hello) = whole
        && let Ok(host) = hello.sni.host()
    {
        assert!(host.as_str().is_ascii() && host.as_str().len() <= 253);
        assert!(flight.len() > host.as_str().len());
    }
});
