//! DNS over a stream of the guest: messages with a length before them (RFC 1035 section 4.2.2,
//! RFC 7766), pipelined, answered in the order in which answers are ready.
//!
//! Never holds more than one partial message and a bounded number of questions of a stream.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::{Buf as _, Bytes, BytesMut};
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::task::coop::consume_budget;
use tokio::time::{Instant, sleep_until, timeout};

use crate::guest::{Guest, Transport};
use crate::question::MAX_QUERY;

/// Questions of one stream that are answered at the same time.
const PIPELINE: usize = 16;
/// How long a stream may bring no whole question, or take no answer.
const IDLE: Duration = Duration::from_secs(10);

impl Guest {
    /// Serves one stream of the guest, which it opened to `asked`, until the guest ends it, idles
    /// for 10 s, or sends what is no DNS message.
    ///
    /// # Errors
    /// The stream's own, `TimedOut` when the guest takes no answers, `InvalidData` for a message
    /// longer than any query.
    pub async fn serve_stream<S>(&self, stream: S, asked: SocketAddr) -> io::Result<()>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        self.serve(stream, asked, IDLE).await
    }

    async fn serve<S>(&self, stream: S, asked: SocketAddr, idle: Duration) -> io::Result<()>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let (mut reader, mut writer) = tokio::io::split(stream);
        let mut received = BytesMut::new();
        let mut answers = FuturesUnordered::new();
        let mut idle_at = Instant::now() + idle;
        let mut open = true;
        loop {
            while answers.len() < PIPELINE
                && let Some(query) = next_message(&mut received)?
            {
                idle_at = Instant::now() + idle;
                answers.push(async move { self.answer(&query, asked, Transport::Tcp).await });
            }
            if !open && answers.is_empty() {
                return Ok(());
            }
            tokio::select! {
                Some(answer) = answers.next() => {
                    // Answers that need nobody, and none at all, are ready at once, without end.
                    consume_budget().await;
                    if let Some(framed) = answer.and_then(framed) {
                        timeout(idle, writer.write_all(&framed)).await??;
                    }
                }
                read = reader.read_buf(&mut received), if open && answers.len() < PIPELINE => {
                    open = read? > 0;
                }
                () = sleep_until(idle_at), if answers.is_empty() => return Ok(()),
            }
        }
    }
}

/// Takes the next whole message off the front; none until it is all there.
fn next_message(received: &mut BytesMut) -> io::Result<Option<Bytes>> {
    let Some(&length) = received.first_chunk() else { return Ok(None) };
    let length = usize::from(u16::from_be_bytes(length));
    if length > MAX_QUERY {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "longer than any DNS query"));
    }
    if received.len() < 2 + length {
        return Ok(None);
    }
    received.advance(2);
    Ok(Some(received.split_to(length).freeze()))
}

fn framed(answer: Vec<u8>) -> Option<Vec<u8>> {
    let mut framed = u16::try_from(answer.len()).ok()?.to_be_bytes().to_vec();
    framed.extend_from_slice(&answer);
    Some(framed)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use policy::{OwnAddresses, PolicyHandle, Slot, Subject, Trail};
    use proptest::prelude::*;
    use tokio::io::duplex;

    use super::*;
    use crate::allowance::Names;
    use crate::asker::Asker;
    use crate::pins::Pins;
    use crate::resolver::{Resolver, ResolverConfig};

    const ASKED: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(policy::net::GATEWAY_IP), 53);
    const SHORT: Duration = Duration::from_millis(200);

    /// A guest that may ask for nothing.
    fn guest() -> Guest {
        recorded(Trail::bounded(1).0)
    }

    fn recorded(trail: Trail) -> Guest {
        let subject = Arc::new(Subject {
            sandbox: "s".parse().expect("name"),
            tenant: "t".parse().expect("name"),
            incarnation: 1,
            slot: Slot::new(1).expect("slot"),
        });
        let upstreams = vec![ASKED];
        let resolver = Resolver::new(ResolverConfig { upstreams, ..ResolverConfig::default() });
        let (pins, own) = (Arc::new(Pins::new(1)), OwnAddresses::default());
        let asker = Asker::new(resolver.expect("resolver"), Names::default());
        Guest::new(subject, PolicyHandle::default(), pins, own, asker, false, trail)
    }

    #[tokio::test]
    async fn a_guest_that_sends_no_whole_question_is_let_go() {
        for bytes in [&[][..], &[0, 40, 1, 2, 3]] {
            let (mut client, server) = duplex(64);
            client.write_all(bytes).await.expect("write");
            let start = Instant::now();
            guest().serve(server, ASKED, SHORT).await.expect("idle is no error");
            assert!(start.elapsed() >= SHORT);
        }
    }

    #[tokio::test]
    async fn a_guest_that_takes_no_answers_is_let_go() {
        let (mut client, server) = duplex(128);
        // For the root, type A: denied and answered, with 90 bytes and more.
        let query = b"\0\x11\xab\xcd\x01\0\0\x01\0\0\0\0\0\0\0\0\x01\0\x01";
        let guest = guest();
        let flood = async { while client.write_all(query).await.is_ok() {} };
        let serve = async { guest.serve(server, ASKED, SHORT).await };
        let (served, ()) = tokio::join!(serve, flood);
        assert_eq!(served.expect_err("stuck").kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn a_flood_of_messages_leaves_time_for_others() {
        let (trail, records) = Trail::bounded(1000);
        {
            let guest = recorded(trail);
            let empty_messages = tokio::io::join(tokio::io::repeat(0), tokio::io::sink());
            let mut served = std::pin::pin!(guest.serve(empty_messages, ASKED, SHORT));
            assert!(futures_util::poll!(&mut served).is_pending());
        }
        let read = records.drain().map(|record| record.count.unwrap_or(1)).sum::<u64>();
        assert!((1..300).contains(&read), "{read} at one go");
    }

    proptest! {
        #[test]
        fn messages_come_out_as_they_went_in_however_they_are_cut(
            messages in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..64), 0..10),
            cuts in prop::collection::vec(1..40_usize, 1..20),
        ) {
            let sent: Vec<u8> = messages.iter().flat_map(|message| framed(message.clone()).expect("short")).collect();
            let (mut received, mut read) = (BytesMut::new(), Vec::new());
            let (mut rest, mut cuts) = (sent.as_slice(), cuts.into_iter().cycle());
            while !rest.is_empty() {
                let (now, later) = rest.split_at(cuts.next().expect("endless").min(rest.len()));
                received.extend_from_slice(now);
                while let Some(message) = next_message(&mut received).expect("short") {
                    read.push(message.to_vec());
                }
                rest = later;
            }
            prop_assert_eq!(read, messages);
        }
    }
}
