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

use crate::accept;

/// Port of the domain name system (RFC 1035, section 4.2.1).
pub(crate) const PORT: u16 = 53;
/// Larger questions do not exist (RFC 1035, section 2.3.4, with one label list and EDNS options).
const LARGEST: usize = 1500;
/// Questions of one guest that may be open at a time; further ones are dropped, and asked again.
const OPEN: usize = 128;
/// Pause after a receive that failed; the next datagram is another one.
const PAUSE: Duration = Duration::from_millis(1);

/// A datagram of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Envelope {
    guest: SockaddrIn,
    asked: Ipv4Addr,
}

/// The socket to which the fence diverts one slot's questions. Must be made in the guests' world.
pub(crate) fn socket(slot: Slot) -> io::Result<std::net::UdpSocket> {
    let socket = accept::facing(slot, Type::DGRAM, Protocol::UDP)?;
    setsockopt(&socket, sockopt::Ipv4PacketInfo, &true)?;
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
        let (length, envelope) = match receive(&socket, &mut buffer).await {
            Ok(received) => received,
            Err(error) => {
                tracing::debug!(%error, "question");
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        while open.try_join_next().is_some() {}
        let question = match buffer.get(..length) {
            Some(question) if open.len() < OPEN => question.to_vec(),
            _ => continue,
        };
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

async fn receive(socket: &UdpSocket, buffer: &mut [u8]) -> io::Result<(usize, Envelope)> {
    socket
        .async_io(Interest::READABLE, || {
            let mut control = nix::cmsg_space!(libc::in_pktinfo);
            let mut parts = [IoSliceMut::new(&mut *buffer)];
            let flags = MsgFlags::MSG_DONTWAIT;
            let message =
                recvmsg::<SockaddrIn>(socket.as_raw_fd(), &mut parts, Some(&mut control), flags)?;
            let asked = message.cmsgs()?.find_map(|control| match control {
                ControlMessageOwned::Ipv4PacketInfo(info) => {
                    Some(Ipv4Addr::from(u32::from_be(info.ipi_addr.s_addr)))
                }
                _ => None,
            });
            let cut_off = message.flags.contains(MsgFlags::MSG_TRUNC);
            match (message.address, asked) {
                (Some(guest), Some(asked)) if !cut_off => {
                    Ok((message.bytes, Envelope { guest, asked }))
                }
                _ => Err(io::ErrorKind::InvalidData.into()),
            }
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
