//! Any bytes as a frame the fence dropped: no panic, and the slot and reason are those of our rule.
#![no_main]

use egress::drops;
use egress::fence::Reason;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let (ethernet, packet) = bytes.split_at(bytes.len().min(14));
    let dropped = drops::read("pt7 spoof", ethernet, packet).expect("the prefix is ours");
    assert_eq!((dropped.slot.number(), dropped.reason, dropped.count), (7, Reason::Spoof, 1));
    assert!(dropped.protocol.len() <= 16);
    let Ok(prefix) = std::str::from_utf8(bytes) else { return };
    if let Some(named) = drops::read(prefix, ethernet, packet) {
        assert_eq!(prefix, format!("{} {}", named.slot.tap(), named.reason));
    }
});
