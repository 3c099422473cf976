//! What is left of a connection after its end: nothing that a cut does not reach or no cap counts.
//!
//! A far side that does not read keeps bytes in our kernel, and so does a guest that acknowledges
//! nothing. Each test is red where a socket is closed and forgotten with bytes still queued on it.

use std::time::Duration;

use egress::Rejudged;
use policy::Code;
use policy::audit::{Kind, Outcome};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use crate::peers::{Tls, soon, until};
use crate::place::{NOWHERE, ORIGIN, Place, SECOND, run};

const RAW: &str = "[[rule]]\nallow = [\"93.184.216.34\"]\nports = [2525]\n";
/// More than the far side's kernel takes without being read, and less than that and ours do.
const LENGTH: usize = 220_000;
/// Drops what a guest is sent with payload, so that it never acknowledges that.
const DEAF: &str = "add table ip t; add chain ip t i { type filter hook input priority 0; }; \
    add rule ip t i tcp flags & syn == 0 ip length > 52 drop";

/// What the far side's kernel had when it was let read, and all that came until the end.
struct Got {
    held: usize,
    all: usize,
}

/// How much has arrived, with what had left before and was still on its way: a processor with much to do
/// delivers late. Its window is full meanwhile, so that nothing more is sent.
async fn arrived(stream: &TcpStream, room: &mut [u8]) -> usize {
    let (mut held, mut same) = (0, 0);
    while same < 5 {
        let now = stream.peek(room).await.unwrap_or(0);
        same = if now == held { same + 1 } else { 0 };
        held = now;
        sleep(Duration::from_millis(20)).await;
    }
    held
}

/// A far side that says at once that it is done, and reads once it is told to.
fn reader(place: &Place) -> (oneshot::Sender<()>, JoinHandle<Got>) {
    let listener = place.origin(ORIGIN, 2525);
    let (go, going) = oneshot::channel();
    let reader = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.expect("accepted");
        stream.shutdown().await.expect("half closed");
        going.await.expect("told");
        let mut room = vec![0; 2 * LENGTH];
        let held = arrived(&stream, &mut room).await;
        let mut all = 0;
        while let Ok(n @ 1..) = stream.read(&mut room).await {
            all += n;
        }
        Got { held, all }
    });
    (go, reader)
}

/// A connection of the guest on which both sides have said that they are done.
async fn done(place: &Place) -> TcpStream {
    let mut stream = soon(place.dial(ORIGIN, 2525)).await.expect("connected");
    soon(stream.write_all(&vec![0; LENGTH])).await.expect("sent");
    stream.shutdown().await.expect("done");
    assert_eq!(soon(stream.read(&mut [0; 8])).await.expect("the far side's end"), 0);
    let meter = place.router.meter(place.slot).expect("attached");
    let all = async {
        while meter.bytes_out() < LENGTH as u64 {
            sleep(Duration::from_millis(1)).await;
        }
    };
    soon(all).await;
    stream
}

#[test]
fn what_a_finished_tunnel_has_queued_arrives() {
    run(RAW, async |place| {
        let (go, reader) = reader(&place);
        go.send(()).expect("waits");
        let _guest = done(&place).await;
        assert_eq!(soon(reader).await.expect("read").all, LENGTH);
        let closed = place.record(|r| r.outcome == Outcome::Closed).await;
        assert_eq!((closed.bytes_out, closed.detail), (Some(LENGTH as u64), None));
    });
}

/// The positive control of what does not arrive is `what_a_finished_tunnel_has_queued_arrives`.
#[test]
fn what_a_finished_tunnel_has_queued_does_not_leave_after_the_write_that_denies_it() {
    run(RAW, async |place| {
        let (go, reader) = reader(&place);
        let _guest = done(&place).await;
        place.write("", 2);
        let Rejudged { checked, cut, closing } = soon(place.rejudge()).await;
        assert_eq!((checked, cut, closing), (1, 1, 0));
        go.send(()).expect("waits");
        let Got { held, all } = soon(reader).await.expect("read");
        assert!(all <= held, "{all} bytes arrived, {held} had left before the write");
    });
}

/// The positive control of what does not arrive is `what_a_finished_tunnel_has_queued_arrives`.
#[test]
fn what_a_finished_tunnel_has_queued_does_not_leave_after_the_detach() {
    run(RAW, async |place| {
        let (go, reader) = reader(&place);
        let _guest = done(&place).await;
        soon(place.router.detach(place.slot)).await.expect("detached");
        go.send(()).expect("waits");
        let Got { held, all } = soon(reader).await.expect("read");
        assert!(all <= held, "{} bytes of a removed guest left", all - held);
    });
}

#[test]
fn a_refused_guest_that_acknowledges_nothing_leaves_no_connection_behind() {
    run(RAW, async |place| {
        place.in_guest(&["nft", DEAF]);
        let tls = Tls::new(&["evil.example.com"]);
        for _ in 0..8 {
            let stream = soon(place.dial(ORIGIN, 443)).await.expect("connected");
            let hello = tls.client(stream, "evil.example.com");
            let answered = tokio::time::timeout(Duration::from_millis(50), hello).await;
            assert!(answered.is_err(), "the alert was to be dropped");
        }
        for _ in 0..8 {
            let refused = place.record(|r| r.kind == Kind::Connection).await;
            assert_eq!(
                (refused.outcome, refused.protocol.as_deref()),
                (Outcome::Deny, Some("tls"))
            );
        }
        let meter = place.router.meter(place.slot).expect("attached");
        let ended = async {
            while meter.open() > 0 {
                sleep(Duration::from_millis(5)).await;
            }
        };
        soon(ended).await;
        assert_eq!(place.sockets(), "", "no cap counts these");
    });
}

#[test]
fn what_we_closed_is_not_kept_for_a_guest_that_acknowledges_nothing() {
    run(RAW, async |place| {
        let listener = place.guest_listener(1007);
        let (ours, theirs) =
            tokio::join!(soon(place.router.connect(place.slot, 1007)), soon(listener.accept()));
        let (mut ours, _theirs) = (ours.expect("ours"), theirs.expect("theirs"));
        place.in_guest(&["nft", DEAF]);
        ours.write_all(b"last words").await.expect("sent");
        drop(ours);
        // The control: it is, for a while.
        until(|| place.sockets().contains("FIN-WAIT-1")).await;
        until(|| !place.sockets().contains("FIN-WAIT-1")).await;
    });
}

/// Promise 18. A write that denies the address comes while the guest says its first word: what was
/// dialled by the policy before is not taken for it.
#[test]
fn what_was_dialled_for_a_silent_guest_serves_no_policy_that_denies_its_address() {
    let rules = "[[rule]]\nallow = [\"both.example.com\"]\nports = [2525]\n";
    run(rules, async |place| {
        let (listener, other) = (place.origin(ORIGIN, 2525), place.origin(SECOND, 2525));
        crate::ask(&place, [169, 254, 100, 1].into(), "both.example.com").await;
        let speak = async |policy: &str, revision| {
            let mut guest = soon(place.dial(SECOND, 2525)).await.expect("connected");
            let (mut far, _) = soon(listener.accept()).await.expect("dialled");
            // In force, and before the open connections are judged again.
            place.write(policy, revision);
            guest.write_all(b"EHLO me\r\n").await.expect("sent");
            let mut word = [0; 16];
            let heard = soon(far.read(&mut word)).await.unwrap_or_default();
            place.write(rules, revision + 1);
            (guest, word[..heard].to_vec())
        };
        let (_open, heard) = speak(rules, 2).await;
        assert_eq!(heard, b"EHLO me\r\n", "the control");
        let denied = format!("{rules}[[rule]]\ndeny = [\"{ORIGIN}\"]\nports = [2525]\n");
        let (mut guest, heard) = speak(&denied, 4).await;
        assert_eq!(heard, b"");
        assert!(soon(guest.read_u8()).await.is_err(), "it is told");
        let record = place.record(|r| r.kind == Kind::Connection && r.code.is_some()).await;
        assert_eq!((record.outcome, record.code), (Outcome::Deny, Some(Code::Rule)));
        // A connection that begins under that policy goes where it may.
        place.write(&denied, 6);
        let _guest = soon(place.dial(SECOND, 2525)).await.expect("connected");
        soon(other.accept()).await.expect("dialled elsewhere");
    });
}

#[test]
fn what_was_dialled_for_a_silent_guest_is_closed_once_it_names_another_host() {
    let rules =
        "[[rule]]\nallow = [\"mail.example.com\", \"nowhere.example.com\"]\nports = [2525]\n";
    run(rules, async |place| {
        let listener = place.origin(ORIGIN, 2525);
        // Nobody answers at the other host, and nobody says that it is not there.
        let card = format!("neigh add {NOWHERE} lladdr 02:00:00:00:00:77 dev wan nud permanent");
        place.land.ip("h", &card);
        crate::ask(&place, [169, 254, 100, 1].into(), "mail.example.com").await;
        let stream = soon(place.dial(ORIGIN, 2525)).await.expect("connected");
        let (mut far, _) = soon(listener.accept()).await.expect("dialled");
        let tls = Tls::new(&["nowhere.example.com"]);
        let mut guest = std::pin::pin!(tls.client(stream, "nowhere.example.com"));
        let mut word = [0; 8];
        let end = tokio::select! {
            end = soon(far.read(&mut word)) => end.expect("an ordinary end"),
            told = &mut guest => panic!("{:?}", told.err()),
        };
        assert_eq!(end, 0);
        let told = tokio::time::timeout(Duration::from_millis(500), &mut guest).await;
        assert!(told.is_err(), "it was open while the other host was dialled");
    });
}

/// A far side that takes one connection must not see two because the guest was slow to speak.
#[test]
fn a_request_of_a_guest_that_was_silent_goes_over_what_was_dialled_for_its_silence() {
    let rules = "[[rule]]\nallow = [\"web.example.com\"]\nports = [2525]\n";
    run(rules, async |place| {
        let listener = place.origin(ORIGIN, 2525);
        crate::ask(&place, [169, 254, 100, 1].into(), "web.example.com").await;
        let mut guest = soon(place.dial(ORIGIN, 2525)).await.expect("connected");
        let (mut far, _) = soon(listener.accept()).await.expect("dialled for its silence");
        drop(listener);
        for path in ["/first", "/second"] {
            let request = format!("GET {path} HTTP/1.1\r\nHost: web.example.com:2525\r\n\r\n");
            guest.write_all(request.as_bytes()).await.expect("sent");
            let mut heard = Vec::new();
            while !heard.ends_with(b"\r\n\r\n") {
                heard.push(soon(far.read_u8()).await.expect("a request"));
            }
            let asked = format!("GET {path} HTTP/1.1\r\n");
            assert!(heard.starts_with(asked.as_bytes()), "{:?}", String::from_utf8_lossy(&heard));
            far.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").await.expect("sent");
            let mut answer = Vec::new();
            while !answer.ends_with(b"\r\n\r\nok") {
                answer.push(soon(guest.read_u8()).await.expect("an answer"));
            }
            assert!(answer.starts_with(b"HTTP/1.1 200"), "{:?}", String::from_utf8_lossy(&answer));
        }
        let mut first = None;
        for _ in 0..2 {
            let told = place.record(|r| r.kind != Kind::Dns && r.outcome == Outcome::Closed).await;
            assert_eq!((told.kind, told.name.as_deref()), (Kind::Request, Some("web.example.com")));
            assert!(told.egress.is_some() && told.bytes_out > Some(0), "{told:?}");
            first = told.egress;
        }
        drop(guest);
        let told = place.record(|r| r.outcome == Outcome::Closed).await;
        assert_eq!(
            (told.kind, told.egress),
            (Kind::Connection, first),
            "it ends after its requests"
        );
    });
}
