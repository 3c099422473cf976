//! What only keeps a connection open, in clear: it passes and is counted, keeps no guest from being idle,
//! and wakes none. A far side that pings a guest that sleeps is answered.

use std::time::Duration;

use egress::{Limits, Meter};
use futures_util::{SinkExt, StreamExt};
use policy::audit::Outcome;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::sleep;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::{WebSocketStream, accept_async};

use crate::asleep::{get_up, is_wanted, kept, lie_down, wakes};
use crate::peers::{soon, until};
use crate::place::{ORIGIN, Place, limits, run, run_within};
use crate::requests::RULES;
use crate::upgrades::websocket;

type Socket = WebSocketStream<TcpStream>;

/// For what takes its time before the guest sleeps.
fn patient() -> Limits {
    let minute = Duration::from_secs(60);
    Limits { idle: minute, half_closed: minute, ..limits() }
}

/// Both ends of a WebSocket, of which the first is the guest's.
async fn pair(place: &Place) -> (Socket, Socket) {
    let origin = place.origin(ORIGIN, 80);
    let accept = async { accept_async(origin.accept().await.expect("a connection").0).await };
    let (guest, far) = tokio::join!(soon(websocket(place)), soon(accept));
    (guest.expect("a handshake"), far.expect("a handshake"))
}

async fn hears(socket: &mut Socket, what: &Message) {
    assert_eq!(&soon(socket.next()).await.expect("a message").expect("whole"), what);
}

async fn says(socket: &mut Socket, what: &Message) {
    soon(socket.send(what.clone())).await.expect("sent");
}

/// All that was counted once nothing more is, for longer than a busy machine keeps a count that is due:
/// bytes are counted after they were passed on. The clock has moved on by then.
async fn settled(meter: &Meter) -> u64 {
    let (mut bytes, mut same) = (0, 0);
    while same < 10 {
        let now = meter.bytes_in() + meter.bytes_out();
        same = if now == bytes { same + 1 } else { 0 };
        bytes = now;
        sleep(Duration::from_millis(20)).await;
    }
    bytes
}

/// Whether what was done kept the guest from being idle; and how many bytes of it were counted.
async fn busy(place: &Place, what: impl Future<Output = ()>) -> (bool, u64) {
    let meter = place.router.meter(place.slot).expect("attached");
    let (bytes, last) = (settled(&meter).await, meter.last());
    what.await;
    until(|| meter.bytes_in() + meter.bytes_out() > bytes).await;
    let counted = settled(&meter).await - bytes;
    (meter.last() > last, counted)
}

/// Attack P41. Promises 62, 68.
#[test]
fn pings_and_pongs_pass_both_ways_and_keep_no_guest_from_being_idle() {
    run(RULES, async |place| {
        let (mut guest, mut far) = pair(&place).await;
        let (ping, pong) = (Message::Ping("there?".into()), Message::Pong("there?".into()));
        let pings = async {
            says(&mut far, &ping).await;
            hears(&mut guest, &ping).await;
            // It is answered as soon as it is asked for more.
            guest.flush().await.expect("flushed");
            hears(&mut far, &pong).await;
            says(&mut guest, &ping).await;
            hears(&mut far, &ping).await;
            far.flush().await.expect("flushed");
            hears(&mut guest, &pong).await;
        };
        let frames = 2 * (2 + 6) + 2 * (2 + 4 + 6);
        assert_eq!(busy(&place, pings).await, (false, frames));
        for (from_far, text) in [(true, "to it"), (false, "of it")] {
            let text = Message::text(text);
            let (from, to) = if from_far { (&mut far, &mut guest) } else { (&mut guest, &mut far) };
            let said = async {
                says(from, &text).await;
                hears(to, &text).await;
            };
            assert!(busy(&place, said).await.0, "control: {text}");
        }
    });
}

/// Attack P41. Promises 41, 62, 68. The far side notices nothing, and what is meant wakes the guest.
#[test]
fn a_far_side_that_pings_a_sleeping_guest_is_answered_and_wakes_it_by_what_it_means() {
    run(RULES, async |place| {
        let (mut guest, mut far) = pair(&place).await;
        let text = Message::text("before");
        says(&mut far, &text).await;
        hears(&mut guest, &text).await;
        for night in 0..3 {
            assert_eq!(lie_down(&place).await, kept(1));
            for n in 0..20_u8 {
                let payload = vec![n; usize::from(n) * 6];
                says(&mut far, &Message::Ping(payload.clone().into())).await;
                hears(&mut far, &Message::Pong(payload.into())).await;
            }
            // Cut in two, and two at once.
            far.get_mut().write_all(&[0x89, 3, b'a']).await.expect("sent");
            sleep(Duration::from_millis(60)).await;
            far.get_mut().write_all(b"bc\x89\x01d\x89\x00").await.expect("sent");
            for payload in ["abc", "d", ""] {
                hears(&mut far, &Message::Pong(payload.into())).await;
            }
            says(&mut far, &Message::Pong("unasked".into())).await;
            assert!(!is_wanted(&place).await, "night {night}: it may sleep on");
            let news = Message::text("news");
            says(&mut far, &news).await;
            wakes(&place).await;
            get_up(&place).await;
            hears(&mut guest, &Message::Pong("unasked".into())).await;
            hears(&mut guest, &news).await;
            let large = Message::binary(vec![night; 200_000]);
            says(&mut guest, &large).await;
            hears(&mut far, &large).await;
            let ping = Message::Ping("awake".into());
            says(&mut far, &ping).await;
            hears(&mut guest, &ping).await;
            guest.flush().await.expect("flushed");
            hears(&mut far, &Message::Pong("awake".into())).await;
        }
    });
}

/// Attack P41. Nothing is said for a guest in the middle of what it says itself, nor to what is no frame.
#[test]
fn a_guest_is_woken_by_a_ping_that_cannot_be_answered_for_it() {
    run(RULES, async |place| {
        let (mut guest, mut far) = pair(&place).await;
        // A text of five bytes, of which two have come.
        guest.get_mut().write_all(&[0x81, 0x85, 0, 0, 0, 0, b'h', b'a']).await.expect("sent");
        sleep(Duration::from_millis(100)).await;
        lie_down(&place).await;
        says(&mut far, &Message::Ping("?".into())).await;
        wakes(&place).await;
        get_up(&place).await;
        hears(&mut guest, &Message::Ping("?".into())).await;
        guest.get_mut().write_all(b"llo").await.expect("sent");
        hears(&mut far, &Message::text("hallo")).await;
        guest.flush().await.expect("flushed");
        hears(&mut far, &Message::Pong("?".into())).await;
        lie_down(&place).await;
        far.get_mut().write_all(&[0x89, 0xff]).await.expect("sent");
        // No server masks its frames.
        wakes(&place).await;
        get_up(&place).await;
    });
}

/// Attack P41. Promises 41, 68. Nothing can be said any more for a guest that has said that it is done.
#[test]
fn a_ping_for_a_sleeping_guest_that_is_done_waits_for_it_and_ends_nothing() {
    run_within(patient(), RULES, async |place| {
        let (mut guest, mut far) = pair(&place).await;
        guest.get_mut().shutdown().await.expect("done");
        assert_eq!(soon(far.get_mut().read(&mut [0])).await.expect("told"), 0);
        assert_eq!(lie_down(&place).await, kept(1));
        for text in ["?", "!"] {
            says(&mut far, &Message::Ping(text.into())).await;
        }
        assert!(!is_wanted(&place).await, "it may sleep on");
        assert_eq!(get_up(&place).await, kept(1));
        far.get_mut().write_all(&[0x81, 2, b'h', b'i']).await.expect("sent");
        let mut came = [0; 10];
        soon(guest.get_mut().read_exact(&mut came)).await.expect("whole");
        assert_eq!(&came, b"\x89\x01?\x89\x01!\x81\x02hi");
        // More than is kept for it.
        lie_down(&place).await;
        let ping = Message::Ping(vec![b'?'; 125].into());
        for _ in 0..64 {
            says(&mut far, &ping).await;
        }
        wakes(&place).await;
        get_up(&place).await;
        let mut came = vec![0; 64 * 127];
        soon(guest.get_mut().read_exact(&mut came)).await.expect("whole");
        assert!(came.chunks(127).all(|frame| frame.starts_with(&[0x89, 125, b'?'])));
        far.get_mut().shutdown().await.expect("done");
        assert_eq!(soon(guest.get_mut().read(&mut [0])).await.expect("the end"), 0);
        let closed = place.record(|r| r.outcome == Outcome::Closed).await;
        assert_eq!(closed.detail, None, "in order");
    });
}

const STREAM: &str = "HTTP/1.1 200 OK\r\nContent-Type: TEXT/event-stream; charset=utf-8\r\n\
     Transfer-Encoding: chunked\r\n\r\n";
const PLAIN: &str =
    "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n";
const ASKED: &[u8] = b"GET /events HTTP/1.1\r\nHost: web.example.com\r\n\r\n";

/// Both ends of an answer that has begun so, of which the first is the guest's.
async fn answered(place: &Place, head: &str) -> (TcpStream, TcpStream) {
    answered_by(&place.origin(ORIGIN, 80), place, head).await
}

async fn answered_by(origin: &TcpListener, place: &Place, head: &str) -> (TcpStream, TcpStream) {
    let mut guest = soon(place.dial(ORIGIN, 80)).await.expect("connected");
    guest.write_all(ASKED).await.expect("asked");
    let (mut far, _) = soon(origin.accept()).await.expect("accepted");
    let mut asked = vec![0; 4096];
    soon(far.read(&mut asked)).await.expect("it is asked");
    far.write_all(head.as_bytes()).await.expect("answered");
    let mut came = Vec::new();
    while !came.ends_with(b"\r\n\r\n") {
        came.push(soon(guest.read_u8()).await.expect("a head"));
    }
    (guest, far)
}

async fn chunk(far: &mut TcpStream, text: &str) {
    let chunk = format!("{:x}\r\n{text}\r\n", text.len());
    far.write_all(chunk.as_bytes()).await.expect("sent");
}

/// Reads so many bytes of chunks and gives what they say.
async fn told(guest: &mut TcpStream, length: usize) -> String {
    let mut told = String::new();
    while told.len() < length {
        let mut size = String::new();
        while !size.ends_with("\r\n") {
            size.push(char::from(soon(guest.read_u8()).await.expect("a chunk")));
        }
        let size = usize::from_str_radix(size.trim(), 16).expect("its size");
        let mut bytes = vec![0; size + 2];
        soon(guest.read_exact(&mut bytes)).await.expect("whole");
        told.push_str(std::str::from_utf8(&bytes[..size]).expect("text"));
    }
    told
}

/// Attack P41. Promises 62, 68.
#[test]
fn comments_of_an_event_stream_pass_and_keep_no_guest_from_being_idle() {
    for (head, is_stream) in [(STREAM, true), (PLAIN, false)] {
        run(RULES, async move |place| {
            let (mut guest, mut far) = answered(&place, head).await;
            let comments = async {
                for _ in 0..3 {
                    chunk(&mut far, ": ping\n\n").await;
                    assert_eq!(told(&mut guest, 8).await, ": ping\n\n");
                }
            };
            let (is_busy, bytes) = busy(&place, comments).await;
            assert_eq!((is_busy, bytes), (!is_stream, 3 * (8 + 5)), "{head}");
            let event = async {
                chunk(&mut far, "data: x\n\n").await;
                assert_eq!(told(&mut guest, 9).await, "data: x\n\n");
            };
            assert!(busy(&place, event).await.0, "control");
            far.write_all(b"0\r\n\r\n").await.expect("ended");
            let mut end = [0; 5];
            soon(guest.read_exact(&mut end)).await.expect("it ends");
            // The next answer of the connection is looked at anew.
            let next = async {
                guest.write_all(ASKED).await.expect("asked");
                soon(far.read(&mut [0; 4096])).await.expect("it is asked");
                far.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 300\r\n\r\n")
                    .await
                    .expect("sent");
                sleep(Duration::from_millis(100)).await;
            };
            next.await;
            let body = async { far.write_all(&[b':'; 300]).await.expect("sent") };
            assert!(busy(&place, body).await.0, "and is no event stream");
        });
    }
}

/// Attack P41. Promises 41, 62, 68.
#[test]
fn comments_of_an_event_stream_wake_no_guest_and_are_there_when_it_wakes() {
    run(RULES, async |place| {
        let (mut guest, mut far) = answered(&place, STREAM).await;
        chunk(&mut far, "data: first\n\n").await;
        told(&mut guest, 13).await;
        for _ in 0..2 {
            assert_eq!(lie_down(&place).await, kept(1));
            for _ in 0..20 {
                chunk(&mut far, ": ping\n\n").await;
                sleep(Duration::from_millis(5)).await;
            }
            assert!(!is_wanted(&place).await, "it may sleep on");
            chunk(&mut far, "data: x\n\n").await;
            wakes(&place).await;
            get_up(&place).await;
            let expected = format!("{}data: x\n\n", ": ping\n\n".repeat(20));
            assert_eq!(told(&mut guest, expected.len()).await, expected);
        }
        // What waits goes before the end, with what comes there.
        lie_down(&place).await;
        chunk(&mut far, ": last\n\n").await;
        assert!(!is_wanted(&place).await);
        far.write_all(b"0\r\n\r\n").await.expect("ended");
        wakes(&place).await;
        get_up(&place).await;
        assert_eq!(told(&mut guest, 8).await, ": last\n\n");
        let mut end = [0; 5];
        soon(guest.read_exact(&mut end)).await.expect("it ends");
        assert_eq!(&end, b"0\r\n\r\n");
    });
}

/// Attack P41. Promises 41, 68. Nothing else needs to come.
#[test]
fn comments_that_waited_are_given_to_a_guest_as_soon_as_it_is_awake() {
    run(RULES, async |place| {
        let (mut guest, mut far) = answered(&place, STREAM).await;
        for _ in 0..2 {
            assert_eq!(lie_down(&place).await, kept(1));
            for _ in 0..20 {
                chunk(&mut far, ": ping\n\n").await;
            }
            assert!(!is_wanted(&place).await, "it may sleep on");
            get_up(&place).await;
            assert_eq!(told(&mut guest, 20 * 8).await, ": ping\n\n".repeat(20));
            chunk(&mut far, ": awake\n\n").await;
            assert_eq!(told(&mut guest, 9).await, ": awake\n\n");
        }
    });
}

/// Attack P41. Promises 37, 41. They are divided as all is that the daemon holds of connections, and who
/// has more of them is woken; no byte is lost.
#[test]
fn comments_for_a_sleeper_with_many_streams_wait_within_what_is_divided_among_them() {
    run_within(patient(), RULES, async |place| {
        let (origin, mut streams) = (place.origin(ORIGIN, 80), Vec::new());
        for _ in 0..48 {
            streams.push(answered_by(&origin, &place, STREAM).await);
        }
        assert_eq!(lie_down(&place).await, kept(48));
        for (_, far) in &mut streams {
            chunk(far, ": ping\n\n").await;
        }
        assert!(!is_wanted(&place).await, "control: a few keep nobody awake");
        let text = format!(":{}\n", "x".repeat(3998));
        for (_, far) in &mut streams {
            for _ in 0..15 {
                chunk(far, &text).await;
            }
        }
        wakes(&place).await;
        get_up(&place).await;
        let expected = format!(": ping\n\n{}", text.repeat(15));
        for (guest, _) in &mut streams {
            assert!(told(guest, expected.len()).await == expected);
        }
    });
}
