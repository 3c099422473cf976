//! Connections of a guest that falls asleep and wakes. Here it is a namespace, which cannot be stopped: a
//! sleeping one neither hears nor says anything.

use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use egress::{Held, Limits};
use policy::Code;
use policy::audit::Outcome;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};

use crate::peers::{soon, until};
use crate::place::{ORIGIN, Place, limits, run, run_brief, run_within};
use crate::requests::exchange;

pub(crate) const RULES: &str = "[[rule]]\nallow = [\"93.184.216.34\"]\nports = [2525]\n\
    [[rule]]\nallow = [\"web.example.com\"]\n";
/// Fewer bytes are no traffic.
const TRAFFIC: usize = 100_000;
pub(crate) const MINUTE: Duration = Duration::from_secs(60);
const STOPPED: &str = "add table ip stopped; \
    add chain ip stopped i { type filter hook input priority 0; policy drop; }; \
    add chain ip stopped o { type filter hook output priority 0; policy drop; }";

/// Reproducible bytes, one after the other (xorshift).
struct Bytes(u64);

impl Bytes {
    fn fill(&mut self, room: &mut [u8]) {
        for byte in room {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            *byte = self.0.to_le_bytes()[3];
        }
    }
}

/// Writes such bytes until it is told to stop, and then the end. How many.
async fn pour(mut to: impl AsyncWrite + Unpin, seed: u64, stop: Arc<AtomicBool>) -> usize {
    let (mut bytes, mut block, mut total) = (Bytes(seed), vec![0; 20_000], 0);
    // A busy machine may have brought little in all the nights.
    while !stop.load(Relaxed) || total <= TRAFFIC {
        bytes.fill(&mut block);
        to.write_all(&block).await.expect("written");
        total += block.len();
        sleep(Duration::from_millis(1)).await;
    }
    to.shutdown().await.expect("ended");
    total
}

/// Reads to the end and compares. How many.
async fn drain(mut from: impl AsyncRead + Unpin, seed: u64) -> usize {
    let (mut bytes, mut room, mut total) = (Bytes(seed), vec![0; 50_000], 0);
    let mut expected = room.clone();
    loop {
        let length = from.read(&mut room).await.expect("read");
        if length == 0 {
            return total;
        }
        bytes.fill(&mut expected[..length]);
        assert!(room[..length] == expected[..length], "other bytes, after {total}");
        total += length;
    }
}

/// The guest is held and stopped, and its connections are values.
pub(crate) async fn lie_down(place: &Place) -> Held {
    place.router.hold(place.slot).await.expect("held");
    place.in_guest(&["nft", STOPPED]);
    let held = place.router.checkpoint(place.slot).await.expect("kept");
    assert_eq!(place.sockets(), "", "a socket faces a guest that sleeps");
    held
}

/// The connections are back, and the guest goes on.
pub(crate) async fn get_up(place: &Place) -> Held {
    let held = place.router.rebuild(place.slot).await.expect("put back");
    place.in_guest(&["nft", "delete table ip stopped"]);
    place.router.release(place.slot).await.expect("released");
    held
}

pub(crate) fn kept(kept: usize) -> Held {
    Held { kept, ended: 0 }
}

/// Both ends of a connection of the guest to the origin.
pub(crate) async fn connected(place: &Place, origin: &TcpListener) -> (TcpStream, TcpStream) {
    let mut guest = soon(place.dial(ORIGIN, 2525)).await.expect("connected");
    guest.write_all(&[0; 5]).await.expect("sent");
    let (mut far, _) = soon(origin.accept()).await.expect("accepted");
    let mut hello = [0; 5];
    soon(far.read_exact(&mut hello)).await.expect("read");
    far.write_all(&[0; 5]).await.expect("sent");
    soon(guest.read_exact(&mut hello)).await.expect("read");
    (guest, far)
}

pub(crate) async fn passes(from: &mut TcpStream, to: &mut TcpStream) {
    from.write_all(b"still here").await.expect("sent");
    let mut room = [0; 10];
    soon(to.read_exact(&mut room)).await.expect("it came");
    assert_eq!(&room, b"still here");
}

pub(crate) async fn is_reset(stream: &mut TcpStream) -> bool {
    match soon(stream.read(&mut [0])).await {
        Err(error) => error.kind() == ErrorKind::ConnectionReset,
        Ok(_) => false,
    }
}

/// Whether anybody wants something of the guest by now; for where nobody is to. See [`wakes`].
pub(crate) async fn is_wanted(place: &Place) -> bool {
    timeout(Duration::from_millis(200), place.router.wanted(place.slot)).await.is_ok()
}

/// Waits until somebody wants something of the guest.
pub(crate) async fn wakes(place: &Place) {
    soon(place.router.wanted(place.slot)).await.expect("attached");
}

/// Promise 41.
#[test]
fn streams_both_ways_lose_and_double_nothing_over_many_nights() {
    run(RULES, async |place| {
        let (origin, listener) = (place.origin(ORIGIN, 2525), place.guest_listener(1007));
        let (guest, far) = connected(&place, &origin).await;
        let (ours, theirs) =
            tokio::join!(soon(place.router.connect(place.slot, 1007)), soon(listener.accept()));
        let (ours, theirs) = (ours.expect("ours"), theirs.expect("theirs").0);
        let stop = Arc::new(AtomicBool::new(false));
        let (guest, far) = (guest.into_split(), far.into_split());
        let (ours, theirs) = (tokio::io::split(ours), theirs.into_split());
        let pouring = [
            tokio::spawn(pour(guest.1, 1, Arc::clone(&stop))),
            tokio::spawn(pour(far.1, 2, Arc::clone(&stop))),
            tokio::spawn(pour(ours.1, 3, Arc::clone(&stop))),
            tokio::spawn(pour(theirs.1, 4, Arc::clone(&stop))),
        ];
        let draining = [
            tokio::spawn(drain(far.0, 1)),
            tokio::spawn(drain(guest.0, 2)),
            tokio::spawn(drain(theirs.0, 3)),
            tokio::spawn(drain(ours.0, 4)),
        ];
        for night in 0..12 {
            sleep(Duration::from_millis(40 + 7 * night)).await;
            assert_eq!(lie_down(&place).await, kept(2));
            sleep(Duration::from_millis(20)).await;
            assert_eq!(get_up(&place).await, kept(2));
        }
        sleep(Duration::from_millis(200)).await;
        stop.store(true, Relaxed);
        for (pouring, draining) in pouring.into_iter().zip(draining) {
            let poured = soon(pouring).await;
            let drained = soon(draining).await;
            let poured = poured.expect("no panic");
            assert_eq!(poured, drained.expect("no panic"));
            assert!(poured > TRAFFIC, "{poured} bytes are no traffic");
        }
        let closed = place.record(|r| r.outcome == Outcome::Closed).await;
        assert_eq!(closed.detail, None);
    });
}

#[test]
fn an_idle_connection_outlasts_a_night_longer_than_all_patience() {
    run_brief(RULES, async |place| {
        let origin = place.origin(ORIGIN, 2525);
        let (mut guest, mut far) = connected(&place, &origin).await;
        let (mut half, mut other) = connected(&place, &origin).await;
        half.shutdown().await.expect("half closed");
        assert_eq!(soon(other.read(&mut [0])).await.expect("the end"), 0);
        let (mut listening, mut done) = connected(&place, &origin).await;
        done.shutdown().await.expect("half closed");
        assert_eq!(soon(listening.read(&mut [0])).await.expect("the end"), 0);
        // Silent, and neither judged nor refused.
        let mut silent = soon(place.dial(ORIGIN, 80)).await.expect("connected");
        place.has_open(4).await;

        assert_eq!(lie_down(&place).await, kept(4));
        sleep(limits().idle + Duration::from_millis(500)).await;
        assert_eq!(get_up(&place).await, kept(4));
        passes(&mut guest, &mut far).await;
        passes(&mut far, &mut guest).await;
        passes(&mut other, &mut half).await;
        other.shutdown().await.expect("ended");
        assert_eq!(soon(half.read(&mut [0])).await.expect("the end"), 0);
        passes(&mut listening, &mut done).await;
        listening.shutdown().await.expect("ended");
        assert_eq!(soon(done.read(&mut [0])).await.expect("the end"), 0);
        for _ in 0..2 {
            let closed = place.record(|r| r.outcome == Outcome::Closed).await;
            assert_eq!(closed.detail, None, "both ended in order");
        }
        let web = place.origin(ORIGIN, 80);
        let request = "GET / HTTP/1.1\r\nHost: web.example.com\r\n\r\n";
        silent.write_all(request.as_bytes()).await.expect("sent");
        soon(web.accept()).await.expect("it is judged now");
    });
}

/// Promise 41. A socket that was put back does not know that the guest is done.
#[test]
fn a_guest_that_is_done_is_so_after_every_night() {
    run_within(Limits { half_closed: MINUTE, ..limits() }, RULES, async |place| {
        let origin = place.origin(ORIGIN, 2525);
        let (mut guest, mut far) = connected(&place, &origin).await;
        guest.shutdown().await.expect("half closed");
        assert_eq!(soon(far.read(&mut [0])).await.expect("the end"), 0);
        for _ in 0..3 {
            assert_eq!(lie_down(&place).await, kept(1));
            assert_eq!(get_up(&place).await, kept(1));
            passes(&mut far, &mut guest).await;
        }
        far.shutdown().await.expect("ended");
        assert_eq!(soon(guest.read(&mut [0])).await.expect("the end"), 0);
        let closed = place.record(|r| r.outcome == Outcome::Closed).await;
        assert_eq!(closed.detail, None, "both ended in order");
    });
}

#[test]
fn what_comes_for_a_sleeper_wakes_it_and_is_given_to_it() {
    run(RULES, async |place| {
        let origin = place.origin(ORIGIN, 2525);
        let (mut guest, mut far) = connected(&place, &origin).await;
        lie_down(&place).await;
        assert!(!is_wanted(&place).await, "nobody has said anything");
        far.write_all(b"good morning").await.expect("sent");
        soon(place.router.wanted(place.slot)).await.expect("wanted");
        get_up(&place).await;
        let mut room = [0; 12];
        soon(guest.read_exact(&mut room)).await.expect("read");
        assert_eq!(&room, b"good morning");

        place.router.hold(place.slot).await.expect("held");
        far.write_all(b"wait").await.expect("sent");
        soon(place.router.wanted(place.slot)).await.expect("wanted, before it is stopped");
        let early = timeout(Duration::from_millis(100), guest.read(&mut room)).await;
        assert!(early.is_err(), "it is held");
        place.router.abort(place.slot).await.expect("aborted");
        soon(guest.read_exact(&mut room[..4])).await.expect("read");
        passes(&mut guest, &mut far).await;
    });
}

/// The far side's last byte came after the guest's: nobody waits for anything.
#[test]
fn the_end_of_a_far_side_is_told_in_the_morning_and_wakes_only_who_waits_for_an_answer() {
    run(RULES, async |place| {
        let origin = place.origin(ORIGIN, 2525);
        for by_reset in [false, true] {
            for asked in [false, true] {
                let (mut guest, mut far) = connected(&place, &origin).await;
                if asked {
                    passes(&mut guest, &mut far).await;
                }
                lie_down(&place).await;
                if by_reset {
                    far.set_zero_linger().expect("set");
                }
                drop(far);
                match asked {
                    true => wakes(&place).await,
                    false => assert!(!is_wanted(&place).await, "by reset: {by_reset}"),
                }
                get_up(&place).await;
                match by_reset {
                    true => assert!(is_reset(&mut guest).await),
                    false => assert_eq!(soon(guest.read(&mut [0])).await.expect("the end"), 0),
                }
            }
        }
    });
}

#[test]
fn a_call_wakes_a_sleeper_and_waits_for_it() {
    run(RULES, async |place| {
        let listener = place.guest_listener(1007);
        lie_down(&place).await;
        let (router, slot) = (place.router.clone(), place.slot);
        let call = tokio::spawn(async move { router.connect(slot, 1007).await });
        soon(place.router.wanted(place.slot)).await.expect("wanted");
        get_up(&place).await;
        let mut ours = soon(call).await.expect("no panic").expect("connected");
        let (mut theirs, _) = soon(listener.accept()).await.expect("accepted");
        ours.write_all(b"!").await.expect("sent");
        assert_eq!(soon(theirs.read_u8()).await.expect("read"), b'!');

        lie_down(&place).await;
        let router = place.router.clone();
        let call = tokio::spawn(async move { router.connect(slot, 1007).await });
        soon(place.router.wanted(place.slot)).await.expect("wanted");
        place.in_guest(&["nft", "delete table ip stopped"]);
        soon(place.router.detach(place.slot)).await.expect("detached");
        assert!(soon(call).await.expect("no panic").is_err());
    });
}

#[test]
fn a_policy_that_moves_at_night_cuts_at_once_and_the_guest_hears_it_in_the_morning() {
    run(RULES, async |place| {
        let origin = place.origin(ORIGIN, 2525);
        let (mut guest, mut far) = connected(&place, &origin).await;
        lie_down(&place).await;
        place.write("", 2);
        let judged = soon(place.rejudge()).await;
        assert_eq!((judged.cut, judged.closing), (1, 0));
        assert!(is_reset(&mut far).await, "before anybody wakes");
        let closed = place.record(|r| r.outcome == Outcome::Closed).await;
        assert_eq!(closed.code, Some(Code::PolicyChanged));
        place.in_guest(&["nft", "delete table ip stopped"]);
        place.router.rebuild(place.slot).await.expect("put back");
        assert!(is_reset(&mut guest).await, "it has said nothing, and is told");
        place.router.release(place.slot).await.expect("released");
    });
}

#[test]
fn a_detach_at_night_ends_every_connection_and_leaves_nothing() {
    run(RULES, async |place| {
        let origin = place.origin(ORIGIN, 2525);
        let (_guest, mut far) = connected(&place, &origin).await;
        lie_down(&place).await;
        let detached = soon(place.router.detach(place.slot)).await.expect("detached");
        assert_eq!(detached.cut, 1);
        assert!(is_reset(&mut far).await);
        assert_eq!(place.sockets(), "");
        for gone in [
            place.router.hold(place.slot).await.map(drop),
            place.router.checkpoint(place.slot).await.map(drop),
            place.router.rebuild(place.slot).await.map(drop),
            place.router.release(place.slot).await,
            place.router.abort(place.slot).await,
            place.router.wanted(place.slot).await,
        ] {
            assert!(matches!(gone, Err(egress::Error::Vacant(_))), "{gone:?}");
        }
    });
}

#[test]
fn every_step_may_come_again_or_never() {
    run(RULES, async |place| {
        let origin = place.origin(ORIGIN, 2525);
        let (mut guest, mut far) = connected(&place, &origin).await;
        let (router, slot) = (&place.router, place.slot);
        let active = router.activity(slot).expect("attached");
        sleep(Duration::from_millis(20)).await;
        passes(&mut far, &mut guest).await;
        // It is counted once it has been given to the guest.
        until(|| router.activity(slot).is_some_and(|now| now.last > active.last)).await;
        assert_eq!(router.activity(slot).expect("attached").open, 1);
        router.release(slot).await.expect("nothing to release");
        assert_eq!(router.rebuild(slot).await.expect("nothing is kept"), kept(0));
        for _ in 0..2 {
            assert!(router.hold(slot).await.expect("held"));
        }
        router.release(slot).await.expect("released");
        passes(&mut far, &mut guest).await;
        place.in_guest(&["nft", STOPPED]);
        assert_eq!(router.checkpoint(slot).await.expect("without a hold"), kept(1));
        assert_eq!(router.checkpoint(slot).await.expect("again"), kept(0));
        router.release(slot).await.expect("not while it sleeps");
        assert_eq!(place.sockets(), "");
        assert_eq!(router.rebuild(slot).await.expect("put back"), kept(1));
        assert_eq!(router.rebuild(slot).await.expect("again"), kept(0));
        place.in_guest(&["nft", "delete table ip stopped"]);
        for _ in 0..2 {
            router.abort(slot).await.expect("aborted");
        }
        passes(&mut far, &mut guest).await;
        passes(&mut guest, &mut far).await;
    });
}

#[test]
fn requests_and_their_answers_go_on_after_a_night() {
    run_brief(RULES, async |place| {
        let web = place.origin(ORIGIN, 80);
        let mut guest = soon(place.dial(ORIGIN, 80)).await.expect("connected");
        let request = "GET / HTTP/1.1\r\nHost: web.example.com\r\n\r\n";
        guest.write_all(request.as_bytes()).await.expect("sent");
        let (mut far, _) = soon(web.accept()).await.expect("accepted");
        let mut head = vec![0; 4096];
        let length = soon(far.read(&mut head)).await.expect("asked");
        assert!(length > 0);
        // While it waits for the answer.
        assert_eq!(lie_down(&place).await, kept(1));
        assert!(!is_wanted(&place).await);
        far.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 40000\r\n\r\n").await.expect("sent");
        far.write_all(&[b'a'; 20_000]).await.expect("sent");
        soon(place.router.wanted(place.slot)).await.expect("the answer wakes it");
        get_up(&place).await;
        let mut answer = Vec::new();
        while answer.len() < 20_000 {
            soon(guest.read_buf(&mut answer)).await.expect("read");
        }
        // In the middle of it.
        assert_eq!(lie_down(&place).await, kept(1));
        far.write_all(&[b'b'; 20_000]).await.expect("sent");
        soon(place.router.wanted(place.slot)).await.expect("more wakes it");
        get_up(&place).await;
        let end = answer.windows(4).position(|four| four == b"\r\n\r\n").expect("a head") + 4;
        while answer.len() < end + 40_000 {
            soon(guest.read_buf(&mut answer)).await.expect("read");
        }
        let body = [vec![b'a'; 20_000], vec![b'b'; 20_000]].concat();
        assert!(answer[end..] == body, "the whole answer, once");
        // Between two requests, for longer than any is waited for.
        assert_eq!(lie_down(&place).await, kept(1));
        sleep(limits().idle + Duration::from_millis(500)).await;
        assert_eq!(get_up(&place).await, kept(1));
        let asking = tokio::spawn(async move { exchange(&mut guest, request).await.0 });
        soon(far.read(&mut head)).await.expect("asked, on the kept connection");
        far.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").await.expect("sent");
        assert_eq!(soon(asking).await.expect("no panic"), 204);
    });
}

/// Promise 41.
#[test]
fn what_cannot_be_kept_is_reset_on_both_sides_and_the_audit_says_why() {
    let patient = Limits { idle: MINUTE, half_closed: MINUTE, ..limits() };
    run_within(patient, RULES, async |place| {
        let origin = place.origin(ORIGIN, 2525);
        let flood = vec![7; 1 << 16];
        let mut open = Vec::new();
        for _ in 0..12 {
            // Its far side takes nothing, so that what it has sent stays with us.
            let (mut guest, far) = connected(&place, &origin).await;
            let mut sent = 0;
            while let Ok(written) = timeout(Duration::from_millis(200), guest.write(&flood)).await {
                sent += written.expect("written");
            }
            open.push((guest, far, sent));
        }
        let held = lie_down(&place).await;
        assert!(held.kept > 0 && held.ended > 0 && held.kept + held.ended == 12, "{held:?}");
        get_up(&place).await;
        let mut whole = 0;
        for (mut guest, mut far, sent) in open {
            let ended = tokio::spawn(async move {
                let _ = guest.shutdown().await;
                guest.read(&mut [0]).await.map(|length| assert_eq!(length, 0))
            });
            let mut got = 0;
            let mut room = vec![0; 1 << 20];
            let all = loop {
                match soon(far.read(&mut room)).await {
                    Ok(0) => break true,
                    Ok(length) => got += length,
                    Err(_) => break false,
                }
            };
            drop(far);
            let in_order = soon(ended).await.expect("no panic").is_ok();
            assert_eq!(all, in_order, "both sides hear the same");
            assert!(!all || got == sent, "{got} of {sent} bytes");
            whole += usize::from(all);
        }
        assert_eq!(whole, held.kept);
        let lost = Some("it could not be kept while the sandbox slept");
        for _ in 0..held.ended {
            place.record(|r| r.outcome == Outcome::Closed && r.detail.as_deref() == lost).await;
        }
    });
}
