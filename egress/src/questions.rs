//! Questions of one slot's guest over UDP, asked of whatever address, answered from that address.
//!
//! Bytes only: what a question means and whether it is answered is the dns room's.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

use nix::libc;
use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, SockaddrIn, recvmsg, sendmsg, setsockopt,
    sockopt,
};
use policy::Slot;
use socket2::{Protocol, Type};
use tokio::io::Interest;
use tokio::net::UdpSocket;
use tokio::task::JoinSet;

use crate::facing;

/// Port of the domain name system (RFC 1035, section 4.2.1).
pub(crate) const PORT: u16 = 53;
/// Larger questions do not exist (RFC 1035, section 2.3.4, with one label list and EDNS options).
const LARGEST: usize = 1500;
/// Questions of one frame that are answered. A guest may leave it to us to cut a frame into datagrams
/// (UDP segmentation offload), up to 128 of them, and the fence has counted one. A kernel on the way may
/// have joined a few that came apart, such as those of a stub for both families.
const JOINED: usize = 4;
/// Questions of one guest that may be open at a time; further ones are dropped and counted, and asked again.
const OPEN: usize = 128;
/// Pause after a receive that failed; the next datagram is another one.
const PAUSE: Duration = Duration::from_millis(1);

/// Where datagrams of a guest came from and went to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Envelope {
    guest: SockaddrIn,
    asked: Ipv4Addr,
}

/// What came at once: datagrams of one length, but for the last, each of which may be a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Received {
    /// Bytes in all, of which the buffer has what it has room for.
    length: usize,
    /// Bytes of one, never 0.
    each: usize,
    envelope: Envelope,
}

/// The socket to which the fence diverts one slot's questions. Must be made in the guests' world.
pub(crate) fn socket(slot: Slot) -> io::Result<std::net::UdpSocket> {
    let socket = facing::socket(slot, Type::DGRAM, Protocol::UDP)?;
    setsockopt(&socket, sockopt::Ipv4PacketInfo, &true)?;
    // Otherwise the kernel cuts a frame up, and each part costs as much as a frame.
    setsockopt(&socket, sockopt::UdpGroSegment, &true)?;
    socket.bind(&SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, PORT).into())?;
    Ok(socket.into())
}

/// Answers questions until it is dropped.
pub(crate) async fn serve(socket: UdpSocket, guest: Arc<dns::Guest>) {
    let socket = Arc::new(socket);
    // Dropped, and so ended, with this future: no socket of the slot outlives its detach.
    let mut open = JoinSet::new();
    let mut buffer = [0; LARGEST];
    loop {
        let received = match receive(&socket, &mut buffer).await {
            Ok(received) => received,
            Err(error) => {
                tracing::debug!(%error, "question");
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        while open.try_join_next().is_some() {}
        let mut questions = received.questions(&buffer);
        questions.truncate(OPEN.saturating_sub(open.len()));
        let (taken, envelope) = (questions.len(), received.envelope);
        if let Some(dropped) = received.count().checked_sub(taken).filter(|dropped| *dropped > 0) {
            guest.dropped(dropped);
        }
        for question in questions {
            let question = question.to_vec();
            let (guest, socket) = (Arc::clone(&guest), Arc::clone(&socket));
            open.spawn(async move {
                let asked = SocketAddr::from((envelope.asked, PORT));
                if let Some(answer) = guest.answer(&question, asked, dns::Transport::Udp).await
                    && let Err(error) = reply(&socket, &answer, envelope).await
                {
                    tracing::debug!(%error, "answer");
                }
            });
        }
    }
}

impl Received {
    /// How many there are.
    fn count(&self) -> usize {
        self.length.div_ceil(self.each).max(1)
    }

    /// The first of them, those that the buffer has whole.
    fn questions<'a>(&self, buffer: &'a [u8]) -> Vec<&'a [u8]> {
        let part = |at: usize| {
            let begin = at * self.each;
            buffer.get(begin..(begin + self.each).min(self.length))
        };
        (0..self.count().min(JOINED)).map_while(part).collect()
    }
}

async fn receive(socket: &UdpSocket, buffer: &mut [u8]) -> io::Result<Received> {
    socket
        .async_io(Interest::READABLE, || {
            let mut control = nix::cmsg_space!(libc::in_pktinfo, i32);
            let mut parts = [IoSliceMut::new(&mut *buffer)];
            // The length of all of it, whatever there is room for (udp(7)).
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_TRUNC;
            let message =
                recvmsg::<SockaddrIn>(socket.as_raw_fd(), &mut parts, Some(&mut control), flags)?;
            let (mut asked, mut each) = (None, None);
            for control in message.cmsgs()? {
                match control {
                    ControlMessageOwned::Ipv4PacketInfo(info) => {
                        asked = Some(Ipv4Addr::from(u32::from_be(info.ipi_addr.s_addr)));
                    }
                    ControlMessageOwned::UdpGroSegments(length) => {
                        each = usize::try_from(length).ok();
                    }
                    _ => {}
                }
            }
            let (Some(guest), Some(asked)) = (message.address, asked) else {
                return Err(io::ErrorKind::InvalidData.into());
            };
            let length = message.bytes;
            let each = each.unwrap_or(length).max(1);
            Ok(Received { length, each, envelope: Envelope { guest, asked } })
        })
        .await
}

async fn reply(socket: &UdpSocket, answer: &[u8], envelope: Envelope) -> io::Result<()> {
    let from = libc::in_addr { s_addr: u32::from(envelope.asked).to_be() };
    let info = libc::in_pktinfo { ipi_ifindex: 0, ipi_spec_dst: from, ipi_addr: from };
    socket
        .async_io(Interest::WRITABLE, || {
            let parts = [IoSlice::new(answer)];
            let control = [ControlMessage::Ipv4PacketInfo(&info)];
            let flags = MsgFlags::MSG_DONTWAIT;
            sendmsg(socket.as_raw_fd(), &parts, &control, flags, Some(&envelope.guest))?;
            Ok(())
        })
        .await
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use dns::{Asker, Names, Pins, Resolver, ResolverConfig};
    use policy::{
        AuditRecord, Code, Compiled, Layer, OwnAddresses, Policy, PolicyHandle, Revision, Subject,
        Trail,
    };

    use super::*;

    /// A resolver that says nothing keeps as many open as may be asked of it; what comes at once with no
    /// room for it is not answered.
    #[tokio::test]
    async fn each_question_is_answered_or_counted() {
        const SILENT: usize = 64;
        const AT_ONCE: usize = 200;
        let silent = std::net::UdpSocket::bind("127.0.0.1:0").expect("bound");
        let upstreams = vec![silent.local_addr().expect("bound")];
        let resolver = Resolver::new(ResolverConfig { upstreams, ..ResolverConfig::default() });
        let (trail, records) = Trail::bounded(1000);
        let policy = Policy::from_toml("[[rule]]\nallow = [\"a.b\"]\n").expect("a policy");
        let policy = Compiled::new(&[(Layer::Sandbox, &policy)], Revision(1));
        let subject = Subject {
            sandbox: "demo".parse().expect("a name"),
            tenant: "acme".parse().expect("a name"),
            incarnation: 1,
            slot: Slot::new(1).expect("in range"),
        };
        let guest = Arc::new(dns::Guest::new(
            Arc::new(subject),
            PolicyHandle::new(policy),
            Arc::new(Pins::new(8)),
            OwnAddresses::new([IpAddr::from(Ipv4Addr::LOCALHOST)]),
            Asker::new(resolver.expect("a resolver"), Names::default()),
            false,
            trail,
        ));
        let ours = std::net::UdpSocket::bind("127.0.0.1:0").expect("bound");
        setsockopt(&ours, sockopt::Ipv4PacketInfo, &true).expect("set");
        ours.set_nonblocking(true).expect("set");
        let to = ours.local_addr().expect("bound");
        let ours = UdpSocket::from_std(ours).expect("a socket");
        let known = Arc::downgrade(&guest);
        let serving = tokio::spawn(serve(ours, guest));
        let asking = UdpSocket::bind("127.0.0.1:0").await.expect("bound");
        asking.connect(to).await.expect("connected");
        let ask = async |label: u8, times| {
            let mut question = *b"\0\x01\x01\0\0\x01\0\0\0\0\0\0\x01?\x01b\0\0\x01\0\x01";
            question[13] = label;
            for _ in 0..times {
                asking.send(&question).await.expect("sent");
            }
        };
        let mut answers = 0;
        let mut answered = async || {
            let mut room = [0; 512];
            let wait = Duration::from_millis(500);
            while tokio::time::timeout(wait, asking.recv(&mut room)).await.is_ok() {
                answers += 1;
            }
            answers
        };
        ask(b'a', SILENT).await;
        assert_eq!(answered().await, 0, "control: the resolver says nothing");
        ask(b'x', AT_ONCE).await;
        let answers = answered().await;
        serving.abort();
        // Its sums are told when nobody has it any more.
        while known.strong_count() > 0 {
            tokio::task::yield_now().await;
        }
        let counted = |of: AuditRecord| of.code.filter(|why| *why == Code::Limit).and(of.count);
        let counted: u64 = records.drain().filter_map(counted).sum();
        assert!(answers > 0 && answers < AT_ONCE, "control: {answers}");
        assert_eq!(answers + usize::try_from(counted).expect("few"), AT_ONCE);
    }

    #[test]
    fn of_what_came_at_once_the_first_are_questions_and_the_rest_is_counted() {
        let buffer: Vec<u8> = (0..100).collect();
        let envelope =
            Envelope { guest: SockaddrIn::new(10, 0, 0, 1, 5), asked: Ipv4Addr::LOCALHOST };
        for (length, each, count, lengths) in [
            (30, 30, 1, vec![30]),
            (0, 1, 1, vec![0]),
            (60, 30, 2, vec![30, 30]),
            (70, 30, 3, vec![30, 30, 10]),
            (64_000, 20, 3200, vec![20; 4]),
            (64_000, 40, 1600, vec![40, 40]),
            (101, 101, 1, vec![]),
            (110, 60, 2, vec![60]),
        ] {
            let received = Received { length, each, envelope };
            let found: Vec<_> = received.questions(&buffer).iter().map(|one| one.len()).collect();
            assert_eq!((received.count(), found), (count, lengths), "{length} in parts of {each}");
        }
    }
}
