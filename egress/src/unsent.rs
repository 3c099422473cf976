//! What the kernel still holds of a TCP connection of ours: what its far side has not acknowledged, and
//! after its end the connection itself.
//!
//! Asked through the kernel's socket diagnosis (`sock_diag(7)`) by both its addresses, in the
//! namespace of whoever asks, which must be the thread's for good. Only truthful while the caller
//! knows that the connection is its own.

use std::cell::Cell;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use netlink_sys::protocols::NETLINK_SOCK_DIAG;
use netlink_sys::{Socket, SocketAddr as Kernel};
use nix::errno::Errno;
use nix::libc::{AF_INET, AF_INET6, NLMSG_ERROR};

use crate::sever::{IDENTITY, about, answers, errno};

/// Where `struct inet_diag_msg` says the state, when its timer ends in milliseconds, and how much is
/// queued to be sent.
const STATE: usize = 1;
const EXPIRES: usize = 52;
const QUEUED: usize = 60;
/// States of `net/tcp_states.h`.
const TIME_WAIT: u8 = 6;
const CLOSE: u8 = 7;
const LISTEN: u8 = 10;

/// What is left of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Left {
    /// Nothing: its port is free.
    Nothing,
    /// TIME-WAIT, for so long.
    TimeWait(Duration),
    /// More than that: it is open, or its end is under way.
    More,
}

thread_local! {
    /// What this thread asks by: to make one costs several times what an answer does, and every
    /// request on a kept connection asks.
    static ASKING: Cell<Option<Socket>> = const { Cell::new(None) };
}

/// Bytes that the far side has not acknowledged; the end of what we send is one. None of a connection
/// that is gone, of which nothing can leave any more.
///
/// # Errors
/// When the kernel cannot be asked.
pub(crate) fn unacknowledged(ours: SocketAddr, far: SocketAddr) -> io::Result<u32> {
    match told(ours, far)? {
        Some(body) => number(&body, QUEUED),
        None => Ok(0),
    }
}

/// What is left of a connection whose socket we have closed.
///
/// # Errors
/// When the kernel cannot be asked.
pub(crate) fn left(ours: SocketAddr, far: SocketAddr) -> io::Result<Left> {
    let Some(body) = told(ours, far)? else { return Ok(Left::Nothing) };
    Ok(match body.get(STATE) {
        // Somebody who listens at our port: told where there is no connection.
        Some(&(CLOSE | LISTEN)) => Left::Nothing,
        Some(&TIME_WAIT) => Left::TimeWait(Duration::from_millis(number(&body, EXPIRES)?.into())),
        _ => Left::More,
    })
}

fn number(body: &[u8], at: usize) -> io::Result<u32> {
    let bytes = body.get(at..).and_then(|rest| rest.first_chunk().copied());
    bytes.map(u32::from_ne_bytes).ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

/// What the kernel says of a connection (`struct inet_diag_msg`); none of one that is gone.
fn told(ours: SocketAddr, far: SocketAddr) -> io::Result<Option<Vec<u8>>> {
    let mut identity = [0; IDENTITY];
    let mut fill = |at: usize, bytes: &[u8]| {
        let room = identity.get_mut(at..at + bytes.len());
        room.into_iter().for_each(|room| room.copy_from_slice(bytes));
    };
    for (address, port_at, at) in [(ours, 0, 4), (far, 2, 20)] {
        fill(port_at, &address.port().to_be_bytes());
        match address.ip() {
            IpAddr::V4(ip) => fill(at, &ip.octets()),
            IpAddr::V6(ip) => fill(at, &ip.octets()),
        }
    }
    // Whatever its cookie.
    fill(40, &[0xff; 8]);
    let family = if far.is_ipv4() { AF_INET } else { AF_INET6 };
    let socket = ASKING.take().map_or_else(asking, Ok)?;
    socket.send(&about(family, &identity), 0)?;
    let answers = answers(&socket)?;
    // Not before: one that has yet to answer would give its answer to the next question.
    ASKING.set(Some(socket));
    match answers.into_iter().next() {
        Some((kind, body)) if i32::from(kind) == NLMSG_ERROR => match errno(&body) {
            gone if gone == Errno::ENOENT as i32 => Ok(None),
            errno => Err(io::Error::from_raw_os_error(errno)),
        },
        Some((_, body)) => Ok(Some(body)),
        None => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

fn asking() -> io::Result<Socket> {
    let socket = Socket::new(NETLINK_SOCK_DIAG)?;
    socket.connect(&Kernel::new(0, 0))?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    #[expect(clippy::disallowed_methods, reason = "to a listener of this test's own")]
    async fn connected(address: SocketAddr) -> TcpStream {
        TcpStream::connect(address).await.expect("connected")
    }

    #[tokio::test]
    async fn what_a_far_side_has_not_taken_is_told_and_nothing_of_a_connection_that_is_gone() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
        let mut ours = connected(listener.local_addr().expect("bound")).await;
        let (mut far, _) = listener.accept().await.expect("accepted");
        let (here, there) = (ours.local_addr().expect("known"), ours.peer_addr().expect("known"));
        assert_eq!(unacknowledged(here, there).expect("told"), 0);
        let full = Duration::from_millis(200);
        let mut sent = 0;
        let block = [0; 1 << 16];
        while let Ok(written) = tokio::time::timeout(full, ours.write(&block)).await {
            sent += written.expect("sent");
        }
        let queued = unacknowledged(here, there).expect("told");
        assert!(queued > 0 && usize::try_from(queued).expect("fits") <= sent, "{queued} of {sent}");
        let mut room = vec![0; sent];
        far.read_exact(&mut room).await.expect("read");
        while unacknowledged(here, there).expect("told") > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        crate::refuse::reset(ours);
        assert_eq!(unacknowledged(here, there).expect("told"), 0, "gone");
    }

    #[tokio::test]
    async fn the_side_that_ends_a_connection_first_has_its_port_taken_for_a_while() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
        for first in [true, false] {
            let ours = connected(listener.local_addr().expect("bound")).await;
            let (far, _) = listener.accept().await.expect("accepted");
            let (here, there) =
                (ours.local_addr().expect("known"), ours.peer_addr().expect("known"));
            assert_eq!(left(here, there).expect("told"), Left::More, "open");
            let (one, mut two) = if first { (ours, far) } else { (far, ours) };
            drop(one);
            assert_eq!(two.read(&mut [0]).await.expect("its end"), 0);
            drop(two);
            let left = left(here, there).expect("told");
            match first {
                true => assert!(
                    matches!(left, Left::TimeWait(left) if left > Duration::from_secs(50)),
                    "{left:?}"
                ),
                false => assert_eq!(left, Left::Nothing),
            }
        }
    }
}
