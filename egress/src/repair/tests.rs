//! Connections over loopback, whose far side is frozen with a filter that drops what comes to it. Need
//! root.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpListener;
use std::thread;

use nix::sys::socket::send;
use socket2::Domain;

use super::*;

const SOON: Duration = Duration::from_secs(20);
const MUCH: usize = 4 << 20;

/// Which end of a connection is taken: the one that was accepted, or the one that dialled.
#[derive(Clone, Copy, Debug)]
enum Taken {
    Accepted,
    Dialled,
}

/// The end that is taken, and the far side.
#[expect(clippy::disallowed_methods, reason = "to a listener of this test's own")]
fn pair(which: Taken) -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bound");
    let dialled = TcpStream::connect(listener.local_addr().expect("bound")).expect("connected");
    let (accepted, _) = listener.accept().expect("accepted");
    for stream in [&dialled, &accepted] {
        stream.set_nodelay(true).expect("set");
        stream.set_read_timeout(Some(SOON)).expect("set");
        stream.set_write_timeout(Some(SOON)).expect("set");
    }
    match which {
        Taken::Accepted => (accepted, dialled),
        Taken::Dialled => (dialled, accepted),
    }
}

fn freeze(far: &TcpStream) {
    let filter = [SockFilter::new(DROP_ALL, 0, 0, 0)];
    SockRef::from(far).attach_filter(&filter).expect("frozen");
}

fn thaw(far: &TcpStream) {
    SockRef::from(far).detach_filter().expect("thawed");
}

fn rebuilt(checkpoint: &Checkpoint) -> TcpStream {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    socket.set_nonblocking(true).expect("set");
    let stream = TcpStream::from(checkpoint.rebuild(socket).expect("rebuilt"));
    stream.set_nonblocking(false).expect("set");
    stream.set_read_timeout(Some(SOON)).expect("set");
    stream.set_write_timeout(Some(SOON)).expect("set");
    stream
}

/// Reproducible bytes (xorshift).
fn bytes(count: usize, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let words = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.flatten().take(count).collect()
}

/// As much as goes in without anybody reading.
fn fill(stream: &mut TcpStream, bytes: &[u8]) -> usize {
    stream.set_nonblocking(true).expect("set");
    let mut written = 0;
    while let Some(rest) = bytes.get(written..).filter(|rest| !rest.is_empty()) {
        match stream.write(rest) {
            Ok(length) => written += length,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
                break;
            }
        }
    }
    stream.set_nonblocking(false).expect("set");
    written
}

/// Until nothing that was sent is on its way.
fn settled(stream: &TcpStream) {
    while !is_settled(stream) {
        thread::sleep(Duration::from_millis(1));
    }
}

fn gets(stream: &mut TcpStream, expected: &[u8], what: &str) {
    let mut got = vec![0; expected.len()];
    stream.read_exact(&mut got).expect(what);
    assert!(got == expected, "{what}: other bytes");
}

/// Much both ways at once, whole, in segments as large as before.
fn goes_on(near: &mut TcpStream, far: &mut TcpStream) {
    let segment = getsockopt(near, TcpInfo).expect("known").segment;
    assert!(segment > 10_000, "segments of {segment} bytes");
    let (out, back) = (bytes(MUCH, 5), bytes(MUCH, 6));
    thread::scope(|scope| {
        let (mut near_in, mut far_in) =
            (near.try_clone().expect("cloned"), far.try_clone().expect("cloned"));
        scope.spawn(|| near.write_all(&out).expect("sent"));
        scope.spawn(|| far.write_all(&back).expect("sent"));
        let (got_in, got_out) = (&back, &out);
        scope.spawn(move || gets(&mut near_in, got_in, "in"));
        scope.spawn(move || gets(&mut far_in, got_out, "out"));
    });
}

fn ends(stream: &mut TcpStream, what: &str) {
    assert_eq!(stream.read(&mut [0]).expect(what), 0, "{what}");
}

#[test]
fn an_idle_connection_is_taken_without_a_word_and_goes_on() {
    for which in [Taken::Accepted, Taken::Dialled] {
        let (mut near, mut far) = pair(which);
        near.write_all(b"before").expect("sent");
        gets(&mut far, b"before", "before");
        settled(&near);
        let checkpoint = take(&near).expect("taken");
        drop(near);
        far.set_read_timeout(Some(Duration::from_millis(50))).expect("set");
        let silent = far.read(&mut [0]).expect_err("silence");
        assert_eq!(silent.kind(), ErrorKind::WouldBlock, "{which:?}");
        far.set_read_timeout(Some(SOON)).expect("set");
        let mut near = rebuilt(&checkpoint);
        goes_on(&mut near, &mut far);
        near.shutdown(Shutdown::Write).expect("ended");
        ends(&mut far, "our end");
        far.shutdown(Shutdown::Write).expect("ended");
        ends(&mut near, "its end");
    }
}

#[test]
fn what_was_unread_and_unacknowledged_and_unsent_is_neither_lost_nor_doubled() {
    for which in [Taken::Accepted, Taken::Dialled] {
        for (in_flight, queued) in [(1, 0), (900, 0), (10_000, 0), (3_000_000, 0), (1, 1_000_000)] {
            let (mut near, mut far) = pair(which);
            let (out, back) = (bytes(in_flight + queued, 1), bytes(40_000, 2));
            let unread = fill(&mut far, &back);
            settled(&far);
            // With a full window some of it has not been sent at all.
            let first = if queued > 0 { fill(&mut near, &out) } else { 0 };
            freeze(&far);
            let unacknowledged = first + fill(&mut near, out.get(first..).expect("in range"));
            let checkpoint = take(&near).expect("taken");
            assert!(checkpoint.unread.len() == unread && unread > 0, "{checkpoint:?}");
            assert!(!checkpoint.queued.is_empty(), "{checkpoint:?}");
            drop(near);
            let mut near = rebuilt(&checkpoint);
            thaw(&far);
            gets(&mut near, back.get(..unread).expect("in range"), "unread");
            gets(&mut far, out.get(..unacknowledged).expect("in range"), "unacknowledged");
            goes_on(&mut near, &mut far);
        }
    }
}

/// The far side acknowledged, and its acknowledgement was lost with the process that held the tap.
#[test]
fn what_the_far_side_has_already_is_not_given_to_it_again() {
    for sent in [1, 5000, 60_000] {
        let (mut near, mut far) = pair(Taken::Accepted);
        let out = bytes(sent, 3);
        // What it says is lost, what it hears is not.
        SockRef::from(&near).attach_filter(&[SockFilter::new(DROP_ALL, 0, 0, 0)]).expect("deaf");
        let sent = fill(&mut near, &out);
        let mut got = vec![0; sent.min(5000)];
        far.read_exact(&mut got).expect("it has it");
        let checkpoint = take(&near).expect("taken");
        assert_eq!(checkpoint.queued.len(), sent);
        drop(near);
        let mut near = rebuilt(&checkpoint);
        gets(&mut far, out.get(got.len()..sent).expect("in range"), "the rest");
        goes_on(&mut near, &mut far);
    }
}

#[test]
fn a_far_side_that_is_done_still_gets_everything_and_our_end() {
    for which in [Taken::Accepted, Taken::Dialled] {
        let (near, mut far) = pair(which);
        far.write_all(b"last words").expect("sent");
        far.shutdown(Shutdown::Write).expect("ended");
        while near.peek(&mut [0; 16]).expect("peeked") < 10 {}
        settled(&far);
        let checkpoint = take(&near).expect("taken");
        assert!(checkpoint.far_is_done());
        drop(near);
        let mut near = rebuilt(&checkpoint);
        gets(&mut near, b"last words", "unread");
        let answer = bytes(MUCH, 7);
        thread::scope(|scope| {
            scope.spawn(|| near.write_all(&answer).expect("sent"));
            gets(&mut far, &answer, "an answer");
        });
        near.shutdown(Shutdown::Write).expect("ended");
        ends(&mut far, "our end");
        while !is_ended(&near) {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn our_end_is_said_again_whether_it_was_heard_or_not() {
    for (which, heard) in
        [(Taken::Accepted, true), (Taken::Accepted, false), (Taken::Dialled, false)]
    {
        let (mut near, mut far) = pair(which);
        if !heard {
            freeze(&far);
        }
        near.write_all(b"all").expect("sent");
        near.shutdown(Shutdown::Write).expect("ended");
        if heard {
            settled(&near);
        }
        let checkpoint = take(&near).expect("taken");
        assert_eq!((checkpoint.done, checkpoint.queued.is_empty()), (true, heard));
        drop(near);
        let mut near = rebuilt(&checkpoint);
        if !heard {
            thaw(&far);
        }
        gets(&mut far, b"all", "all");
        ends(&mut far, "our end");
        let answer = bytes(MUCH, 8);
        thread::scope(|scope| {
            scope.spawn(|| {
                far.write_all(&answer).expect("sent");
                far.shutdown(Shutdown::Write).expect("ended");
            });
            gets(&mut near, &answer, "an answer");
        });
        ends(&mut near, "its end");
    }
}

#[test]
fn a_connection_that_both_have_ended_is_finished() {
    let (mut near, mut far) = pair(Taken::Accepted);
    far.shutdown(Shutdown::Write).expect("ended");
    ends(&mut near, "its end");
    freeze(&far);
    near.write_all(b"all").expect("sent");
    near.shutdown(Shutdown::Write).expect("ended");
    let checkpoint = take(&near).expect("taken");
    assert!(checkpoint.far_is_done() && checkpoint.done);
    drop(near);
    let near = rebuilt(&checkpoint);
    thaw(&far);
    gets(&mut far, b"all", "all");
    ends(&mut far, "our end");
    while !is_ended(&near) {
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_connection_that_is_over_or_has_urgent_data_is_not_taken() {
    let (near, far) = pair(Taken::Accepted);
    SockRef::from(&far).set_linger(Some(Duration::ZERO)).expect("set");
    drop(far);
    while !is_ended(&near) {}
    assert_eq!(take(&near).expect_err("reset").kind(), ErrorKind::NotConnected);

    let (mut near, mut far) = pair(Taken::Accepted);
    far.write_all(b"before").expect("sent");
    let fd = std::os::fd::AsRawFd::as_raw_fd(&far);
    send(fd, b"!", MsgFlags::MSG_OOB).expect("sent");
    far.write_all(b"after").expect("sent");
    settled(&far);
    assert_eq!(take(&near).expect_err("urgent").kind(), ErrorKind::InvalidData);
    // It is as it was, but for the urgent byte, which now counts.
    gets(&mut near, b"before!after", "the rest");
    goes_on(&mut near, &mut far);
}

#[test]
fn a_connection_that_is_not_wanted_any_more_is_reset_where_it_was() {
    let (mut near, mut far) = pair(Taken::Accepted);
    near.write_all(b"lost").expect("sent");
    settled(&near);
    near.shutdown(Shutdown::Write).expect("ended");
    let checkpoint = take(&near).expect("taken").emptied();
    drop(near);
    assert_eq!(checkpoint.bytes(), 0);
    let near = rebuilt(&checkpoint);
    SockRef::from(&near).set_linger(Some(Duration::ZERO)).expect("set");
    drop(near);
    let mut room = [0; 16];
    // Its end was heard; a reset shows when something is written.
    let ended = loop {
        let _ = far.read(&mut room);
        match far.write_all(b"x") {
            Ok(()) => thread::sleep(Duration::from_millis(1)),
            Err(error) => break error.kind(),
        }
    };
    assert!(matches!(ended, ErrorKind::ConnectionReset | ErrorKind::BrokenPipe), "{ended}");
}
