//! Whatever comes where keepalives are looked for: nothing panics, and a cut changes nothing.
#![no_main]

use egress::keepalive::{Events, Frame, Frames};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some((at, bytes)) = input.split_first() else { return };
    let (one, other) = bytes.split_at(usize::from(*at).min(bytes.len()));
    let (mut whole, mut cut) = (Frames::new(), Frames::new());
    let meant = whole.feed(bytes);
    let first = cut.feed(one);
    assert_eq!(meant, cut.feed(other) | first);
    assert_eq!(whole.is_between(), cut.is_between());
    let (mut whole, mut cut) = (Events::new(), Events::new());
    let meant = whole.feed(bytes);
    let first = cut.feed(one);
    assert_eq!(meant, cut.feed(other) | first);
    // What is taken off a connection for a guest is a frame by either reading.
    if let Some(frame) = Frame::read(bytes) {
        let (frame, _) = bytes.split_at(frame.length);
        let mut alone = Frames::new();
        assert!(!alone.feed(frame) && alone.is_between());
    }
});
