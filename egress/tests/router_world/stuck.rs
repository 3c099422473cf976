//! What a guest has said before it fell asleep, and its far side has not taken yet: it is with us, and the
//! guest may wait for its room.

use std::time::Duration;

use egress::Limits;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::asleep::{MINUTE, RULES, connected, get_up, is_wanted, kept, lie_down};
use crate::peers::soon;
use crate::place::{ORIGIN, Place, limits, run_within};

/// Promise 41. A far side that pauses for longer than the guest is awake, as a reader does who turns a page,
/// gets the rest all the same.
#[test]
fn a_far_side_that_takes_again_what_a_sleeper_has_said_wakes_it() {
    let patient = Limits { idle: MINUTE, half_closed: MINUTE, ..limits() };
    run_within(patient, RULES, async |place| {
        let origin = place.origin(ORIGIN, 2525);
        let (guest, far) = connected(&place, &origin).await;
        rest_is_taken(&place, guest, far).await;
    });
    run_within(patient, RULES, async |place| {
        let listener = place.guest_listener(1007);
        let called = place.router.connect(place.slot, 1007);
        let (ours, theirs) = tokio::join!(soon(called), soon(listener.accept()));
        rest_is_taken(&place, theirs.expect("theirs").0, ours.expect("ours")).await;
    });
    run_within(patient, RULES, async |place| {
        let origin = place.origin(ORIGIN, 80);
        let mut guest = soon(place.dial(ORIGIN, 80)).await.expect("connected");
        let head = "PUT / HTTP/1.1\r\nHost: web.example.com\r\nContent-Length: 99999999\r\n\r\n";
        guest.write_all(head.as_bytes()).await.expect("sent");
        let (mut far, _) = soon(origin.accept()).await.expect("accepted");
        let mut came = Vec::new();
        while !came.ends_with(b"\r\n\r\n") {
            came.push(soon(far.read_u8()).await.expect("a head"));
        }
        rest_is_taken(&place, guest, far).await;
    });
}

async fn rest_is_taken(place: &Place, mut guest: TcpStream, mut far: impl AsyncRead + Unpin) {
    let (flood, mut sent) = (vec![7; 1 << 16], 0);
    while let Ok(written) = timeout(Duration::from_millis(200), guest.write(&flood)).await {
        sent += written.expect("written");
    }
    assert_eq!(lie_down(place).await, kept(1));
    assert!(!is_wanted(place).await, "control: nobody takes anything");
    let (mut got, mut room) = (0, vec![0; 1 << 16]);
    while let Ok(read) = timeout(Duration::from_millis(500), far.read(&mut room)).await {
        got += read.expect("read");
    }
    assert!(got < sent, "control: {got} of {sent} bytes had left us");
    assert!(
        is_wanted(place).await,
        "{got} of {sent} bytes are there, the rest waits for it to wake"
    );
    get_up(place).await;
    while got < sent {
        got += soon(far.read(&mut room)).await.expect("the rest");
    }
    guest.write_all(b"still here").await.expect("there is room again");
    soon(far.read_exact(&mut room[..10])).await.expect("it came");
    assert_eq!(&room[..10], b"still here");
}
