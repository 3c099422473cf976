//! The end of a TCP connection of ours: when the kernel has nothing of it left to send.
//!
//! A socket that is dropped earlier lives on in the kernel without an owner: no cut reaches it, no cap
//! counts it, and what is queued on it still leaves. Of a connection that goes on, `unsent` tells what is
//! queued; it asks the host's world only, and so nothing of a guest's side.

use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::sleep;

/// Pauses between two looks: the kernel tells nobody of this change of state.
const PAUSES: [Duration; 2] = [Duration::from_millis(1), PAUSE];
/// The longer one.
pub(crate) const PAUSE: Duration = Duration::from_millis(50);

/// Returns once the far side has acknowledged all that was sent, our end included, or has reset the
/// connection. Both sides must have said that they are done; never returns before.
///
/// The socket has reached the state CLOSED of RFC 9293 by then, or handed TIME-WAIT over to the
/// kernel, and has no far side any more (`getpeername(2)`, `ENOTCONN`).
pub(crate) async fn acknowledged(stream: &TcpStream) {
    let [mut pause, longest] = PAUSES;
    while stream.peer_addr().is_ok() {
        sleep(pause).await;
        pause = (pause * 2).min(longest);
    }
}
