//! What a guest has sent over HTTP and its far side has not taken, when something else comes: a
//! denial, the slot's end, the next request. It must never leave under a verdict that no longer holds.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use policy::audit::Outcome;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};

use crate::peers::{serve, soon};
use crate::place::{ORIGIN, Place, SECOND, run};
use crate::requests::{canned, exchange};

const BOTH: &str = r#"
[[rule]]
allow = ["web.example.com"]
[[rule]]
allow = ["second.example.com"]
"#;
const SECOND_ONLY: &str = "[[rule]]\nallow = [\"second.example.com\"]\n";
/// More than the sockets between a guest and a far side that does not read hold of it, so that the
/// rest waits in the daemon, and few enough to be taken whole.
const BODY: usize = 220_000;

type Kept = Arc<Mutex<Vec<TcpStream>>>;

/// A far side that answers before it has the body, and reads nothing of it.
fn early(listener: TcpListener) -> Kept {
    let kept = Kept::default();
    let keeping = Arc::clone(&kept);
    serve(listener, move |mut stream| {
        let keeping = Arc::clone(&keeping);
        async move {
            let _ = stream.read(&mut [0; 256]).await;
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
            keeping.lock().expect("unpoisoned").push(stream);
        }
    });
    kept
}

/// A request whose body nobody reads at the far side, and which has left the guest.
async fn post(place: &Place, length: usize) -> TcpStream {
    let mut stream = soon(place.dial(ORIGIN, 80)).await.expect("connected");
    let request =
        format!("POST / HTTP/1.1\r\nHost: web.example.com\r\nContent-Length: {length}\r\n\r\n");
    assert_eq!(exchange(&mut stream, &request).await.0, 200);
    let _ = timeout(Duration::from_millis(500), stream.write_all(&vec![b'x'; length])).await;
    stream
}

/// What waits at a far side, and what it has read once no more comes.
async fn held_and_rest(stream: &mut TcpStream) -> (usize, usize) {
    let mut room = vec![0; 8 << 20];
    let held = stream.peek(&mut room).await.unwrap_or(0);
    let mut all = 0;
    while let Ok(Ok(length @ 1..)) = timeout(Duration::from_secs(1), stream.read(&mut room)).await {
        all += length;
    }
    (held, all)
}

/// The connections that somebody in this process owns.
fn owned(place: &Place) -> usize {
    place.host_sockets(ORIGIN).lines().filter(|line| line.contains("users:")).count()
}

#[test]
fn a_far_side_that_has_not_taken_all_is_open_until_the_guest_is_denied_or_gone() {
    for is_write in [true, false] {
        run(BOTH, async |place| {
            let kept = early(place.origin(ORIGIN, 80));
            let lengths = [BODY, 812_000];
            futures_util::future::join_all(lengths.into_iter().cycle().take(12).map(
                async |length| {
                    let mut stream = post(&place, length).await;
                    let _ = stream.shutdown().await;
                    // Its own connection is over then; one whose body was not taken is reset later.
                    let _ = timeout(Duration::from_millis(500), stream.read(&mut [0; 8])).await;
                },
            ))
            .await;
            let meter = place.router.meter(place.slot).expect("attached");
            let all = place.host_sockets(ORIGIN).lines().count();
            assert!(all <= meter.open(), "{all} connections, of which {} count", meter.open());
            if is_write {
                place.write("", 2);
                soon(place.rejudge()).await;
            } else {
                soon(place.router.detach(place.slot)).await.expect("detached");
            }
            assert_eq!(place.host_sockets(ORIGIN), "");
            assert_eq!((owned(&place), meter.open()), (0, 0));
            let streams = std::mem::take(&mut *kept.lock().expect("unpoisoned"));
            assert_eq!(streams.len(), 12);
            futures_util::future::join_all(streams.into_iter().map(async |mut stream| {
                let (held, all) = held_and_rest(&mut stream).await;
                assert!(held > 0, "it had some");
                assert_eq!(all, held, "more has left");
            }))
            .await;
        });
    }
}

#[test]
fn what_is_queued_for_one_host_does_not_leave_after_its_denial_when_the_guest_has_gone_on() {
    run(BOTH, async |place| {
        let kept = early(place.origin(ORIGIN, 80));
        canned(place.origin(SECOND, 80), "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
        let mut stream = post(&place, BODY).await;
        let second = "GET / HTTP/1.1\r\nHost: second.example.com\r\n\r\n";
        assert_eq!(exchange(&mut stream, second).await.0, 200);
        place.write(SECOND_ONLY, 2);
        soon(place.rejudge()).await;
        let mut far = kept.lock().expect("unpoisoned").pop().expect("one");
        let (held, all) = held_and_rest(&mut far).await;
        assert!(held > 0, "it had some");
        assert_eq!(all, held, "more has left");
    });
}

#[test]
fn what_was_sent_before_the_guest_went_on_arrives_whole_and_is_accounted_whole() {
    run(BOTH, async |place| {
        let kept = early(place.origin(ORIGIN, 80));
        canned(place.origin(SECOND, 80), "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
        let mut stream = post(&place, BODY).await;
        let mut far = kept.lock().expect("unpoisoned").pop().expect("one");
        let second = "GET / HTTP/1.1\r\nHost: second.example.com\r\n\r\n";
        let (next, (_, all)) = tokio::join!(exchange(&mut stream, second), held_and_rest(&mut far));
        assert_eq!((next.0, all), (200, BODY));
        let closed = place.record(|r| r.outcome == Outcome::Closed).await;
        assert_eq!(closed.name.as_deref(), Some("web.example.com"));
        assert!(closed.bytes_out > u64::try_from(BODY).ok(), "{closed:?}");
    });
}

#[test]
fn what_was_sent_before_the_guest_closed_arrives_whole_and_then_the_connection_ends() {
    run(BOTH, async |place| {
        let kept = early(place.origin(ORIGIN, 80));
        let mut stream = post(&place, BODY).await;
        stream.shutdown().await.expect("done");
        let mut far = kept.lock().expect("unpoisoned").pop().expect("one");
        assert_eq!(held_and_rest(&mut far).await.1, BODY);
        let meter = place.router.meter(place.slot).expect("attached");
        soon(async {
            while meter.open() > 0 {
                sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
    });
}
