//! Far sides that a rule does not let wake a guest: `wake_on_data = false`. What they say waits, as much of it
//! as there is room for, and is there in the morning.

use std::time::Duration;

use egress::Wanted;
use futures_util::{SinkExt, StreamExt};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};
use tokio_tungstenite::accept_async;
use tokio_tungstenite::tungstenite::Message;

use crate::asleep::{RULES, connected, get_up, is_reset, is_wanted, kept, lie_down, passes};
use crate::peers::soon;
use crate::place::{ORIGIN, run};
use crate::upgrades::websocket;

/// The same rules, with that said of each.
fn unwoken() -> String {
    RULES.replace("[[rule]]\n", "[[rule]]\nwake_on_data = false\n")
}

/// Attack P41. Promises 41, 74.
#[test]
fn bytes_that_may_not_wake_a_guest_wait_as_far_as_there_is_room_and_are_whole_in_the_morning() {
    for (rules, wakes) in [(RULES.to_owned(), true), (unwoken(), false)] {
        run(&rules, async move |place| {
            let origin = place.origin(ORIGIN, 2525);
            let (mut guest, mut far) = connected(&place, &origin).await;
            for night in 0..2 {
                assert_eq!(lie_down(&place).await, kept(1));
                far.write_all(b"!").await.expect("sent");
                assert_eq!(is_wanted(&place).await, wakes, "night {night}");
                let (block, mut sent) = (vec![night; 1 << 16], 1);
                while let Ok(written) = timeout(Duration::from_millis(300), far.write(&block)).await
                {
                    sent += written.expect("taken");
                }
                assert!(sent < 64 << 20, "its far side is held: {sent} bytes");
                assert_eq!(is_wanted(&place).await, wakes, "night {night}: no more does");
                assert_eq!(get_up(&place).await, kept(1));
                let mut came = vec![0; sent];
                timeout(Duration::from_secs(30), guest.read_exact(&mut came))
                    .await
                    .expect("in time")
                    .expect("whole");
                assert!(came[0] == b'!' && came[1..].iter().all(|byte| *byte == night));
                passes(&mut guest, &mut far).await;
                passes(&mut far, &mut guest).await;
            }
        });
    }
}

/// Attack P41. Promise 74. Not even where the guest spoke last.
#[test]
fn the_end_of_a_far_side_that_may_not_wake_a_guest_is_told_in_the_morning() {
    for (rules, wakes) in [(RULES.to_owned(), true), (unwoken(), false)] {
        run(&rules, async move |place| {
            let origin = place.origin(ORIGIN, 2525);
            for by_reset in [false, true] {
                let (mut guest, mut far) = connected(&place, &origin).await;
                passes(&mut guest, &mut far).await;
                lie_down(&place).await;
                if by_reset {
                    far.set_zero_linger().expect("set");
                }
                drop(far);
                assert_eq!(is_wanted(&place).await, wakes, "by reset: {by_reset}");
                get_up(&place).await;
                match by_reset {
                    true => assert!(is_reset(&mut guest).await),
                    false => assert_eq!(soon(guest.read(&mut [0])).await.expect("the end"), 0),
                }
            }
        });
    }
}

/// Promises 18, 74. What waits is told as soon as the policy lets it, and no sooner.
#[test]
fn the_latest_policy_in_force_says_whether_a_sleeping_guest_is_woken() {
    run(RULES, async |place| {
        let origin = place.origin(ORIGIN, 2525);
        let (mut guest, mut far) = connected(&place, &origin).await;
        lie_down(&place).await;
        place.write(&unwoken(), 2);
        assert_eq!(place.rejudge().await.cut, 0);
        far.write_all(b"news").await.expect("sent");
        assert!(!is_wanted(&place).await, "of the policy in force it may not");
        place.write(RULES, 3);
        assert_eq!(place.rejudge().await.cut, 0);
        assert!(is_wanted(&place).await, "what came before wakes it now");
        get_up(&place).await;
        let mut news = [0; 4];
        soon(guest.read_exact(&mut news)).await.expect("whole");
        assert_eq!(&news, b"news");

        // An end that waits is told, too.
        place.write(&unwoken(), 4);
        place.rejudge().await;
        passes(&mut guest, &mut far).await;
        lie_down(&place).await;
        drop(far);
        assert!(!is_wanted(&place).await);
        place.write(RULES, 5);
        place.rejudge().await;
        assert!(is_wanted(&place).await);
        get_up(&place).await;
        assert_eq!(soon(guest.read(&mut [0])).await.expect("the end"), 0);
    });
}

const TWO: &str = "[[rule]]\nallow = [\"web.example.com\"]\n\
    [[rule]]\nallow = [\"late.example.com\"]\nwake_on_data = false\n";

/// Asks for something of this host; the far side has the request then.
async fn ask(guest: &mut TcpStream, web: &TcpListener, host: &str) -> TcpStream {
    let request = format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n");
    guest.write_all(request.as_bytes()).await.expect("asked");
    let (mut far, _) = soon(web.accept()).await.expect("accepted");
    soon(far.read(&mut [0; 4096])).await.expect("it is asked");
    far
}

/// Promise 74. Each request of a connection by its own rule.
#[test]
fn an_answer_wakes_by_the_rule_of_its_request() {
    run(TWO, async |place| {
        let web = place.origin(ORIGIN, 80);
        let mut guest = soon(place.dial(ORIGIN, 80)).await.expect("connected");
        for (host, wakes) in
            [("late.example.com", false), ("web.example.com", true), ("late.example.com", false)]
        {
            let mut far = ask(&mut guest, &web, host).await;
            assert_eq!(lie_down(&place).await, kept(1));
            far.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
                .await
                .expect("answered");
            assert_eq!(is_wanted(&place).await, wakes, "{host}");
            get_up(&place).await;
            let mut came = Vec::new();
            while !came.ends_with(b"ok") {
                came.push(soon(guest.read_u8()).await.expect("an answer"));
            }
        }
    });
}

/// Attack P41. Promises 68, 74. Its pings are answered until it says something: that is before them in the line.
#[test]
fn a_websocket_that_may_not_wake_a_guest_is_kept_open_and_heard_in_the_morning() {
    run(&unwoken(), async |place| {
        let origin = place.origin(ORIGIN, 80);
        let accept = async { accept_async(origin.accept().await.expect("a connection").0).await };
        let (guest, far) = tokio::join!(soon(websocket(&place)), soon(accept));
        let (mut guest, mut far) = (guest.expect("a handshake"), far.expect("a handshake"));
        lie_down(&place).await;
        far.send(Message::Ping("?".into())).await.expect("sent");
        let pong = soon(far.next()).await.expect("a message").expect("whole");
        assert_eq!(pong, Message::Pong("?".into()));
        far.send(Message::text("news")).await.expect("sent");
        assert!(!is_wanted(&place).await);
        sleep(Duration::from_millis(50)).await;
        get_up(&place).await;
        let news = soon(guest.next()).await.expect("a message").expect("whole");
        assert_eq!(news, Message::text("news"));
        far.send(Message::text("more")).await.expect("sent");
        let more = soon(guest.next()).await.expect("a message").expect("whole");
        assert_eq!(more, Message::text("more"), "while it is awake, at once");
    });
}

/// Promise 75. Whoever was let to a port of it counts for more than a far side, whichever came first.
#[test]
fn it_is_told_whether_a_far_side_or_a_caller_wants_a_sleeping_guest() {
    run(RULES, async |place| {
        let (origin, listener) = (place.origin(ORIGIN, 2525), place.guest_listener(1007));
        let (mut guest, mut far) = connected(&place, &origin).await;
        let (ours, theirs) =
            tokio::join!(soon(place.router.connect(place.slot, 1007)), soon(listener.accept()));
        let (mut ours, mut theirs) = (ours.expect("ours"), theirs.expect("theirs").0);
        for _ in 0..2 {
            lie_down(&place).await;
            far.write_all(b"!").await.expect("sent");
            let by = soon(place.router.wanted_by(place.slot, Wanted::Data)).await;
            assert_eq!(by.expect("attached"), Wanted::Data);
            let caller = place.router.wanted_by(place.slot, Wanted::Caller);
            assert!(timeout(Duration::from_millis(100), caller).await.is_err());
            // It is taken when the guest is there.
            let said = tokio::spawn(async move {
                ours.write_all(b"?").await.expect("sent");
                ours
            });
            let by = soon(place.router.wanted_by(place.slot, Wanted::Caller)).await;
            assert_eq!(by.expect("attached"), Wanted::Caller);
            get_up(&place).await;
            ours = soon(said).await.expect("no panic");
            assert_eq!(soon(theirs.read_u8()).await.expect("read"), b'?');
            assert_eq!(soon(guest.read_u8()).await.expect("read"), b'!');
        }
    });
}
