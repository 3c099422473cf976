//! What a call leaves at a guest that answers at its own pace: one connection, or none. Over loopback, and
//! never by how fast anything is.

use std::io::Write;
use std::net::{SocketAddr, TcpListener};

use socket2::{Domain, Type};

use super::*;

fn caller() -> Socket {
    Socket::new(Domain::IPV4, Type::STREAM.nonblocking(), None).expect("a socket")
}

/// Were it called again, the first connection would be, to the guest, a caller who says nothing.
#[tokio::test]
async fn an_answer_that_came_while_patience_ended_is_taken() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("listening");
    let to = listener.local_addr().expect("its address");
    let called = once(caller(), to, Duration::ZERO).await.expect("no error").expect("it answered");
    let (theirs, from) = listener.accept().expect("accepted");
    assert_eq!(called.local_addr().expect("ours"), from);
    // It takes what it is sent: nothing is left of having waited.
    (&theirs).write_all(b"hello").expect("sent");
    called.readable().await.expect("readable");
    let mut heard = [0; 5];
    assert_eq!(called.try_read(&mut heard).expect("read"), 5);
}

#[expect(clippy::disallowed_methods, reason = "to a listener of this test's own")]
#[tokio::test]
async fn a_guest_that_does_not_answer_in_time_has_no_connection_of_it_later() {
    let full = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    full.bind(&"127.0.0.1:0".parse::<SocketAddr>().expect("any").into()).expect("bound");
    full.listen(0).expect("listening");
    let listener = TcpListener::from(full);
    let to = listener.local_addr().expect("its address");
    let filling = std::net::TcpStream::connect(to).expect("the only place");
    let called = once(caller(), to, Duration::from_millis(20)).await.expect("no error");
    assert!(called.is_none());
    let (_, first) = listener.accept().expect("the one that filled it");
    assert_eq!(first, filling.local_addr().expect("its address"));
    listener.set_nonblocking(true).expect("set");
    // Longer than a SYN is repeated after.
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    assert!(listener.accept().is_err(), "a caller who has gone is still here");
}

#[tokio::test]
async fn a_refusal_is_an_error_at_once() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("listening");
    let to = listener.local_addr().expect("its address");
    drop(listener);
    let called = once(caller(), to, Duration::from_secs(30)).await;
    assert_eq!(called.expect_err("refused").kind(), io::ErrorKind::ConnectionRefused);
}
