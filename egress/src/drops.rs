//! Frames the fence refused, as values for the audit: samples from nflog, put together and counted.
//!
//! The fence's own counters are exact; these say who tried to reach what. Every byte here was chosen
//! by a guest: nothing is trusted but the prefix, which our rule wrote, and everything is capped.

mod tally;
mod frame;

use std::io;
use std::time::Duration;

use netlink_packet_core::{NetlinkMessage, NetlinkPayload};
use netlink_packet_netfilter::nflog::{
    ConfigCmd, ConfigMode, PacketNla, Timeout, ULogMessage, config_request,
};
use netlink_packet_netfilter::{NetfilterMessage, NetfilterMessageInner, NetfilterProtoFamily};
use netlink_sys::protocols::NETLINK_NETFILTER;
use netlink_sys::{AsyncSocket, AsyncSocketExt, SocketAddr, TokioSocket};
use tokio::sync::mpsc;

pub use frame::{Dropped, read};
pub use tally::Tally;

use crate::error::Error;
use crate::world::World;

/// Values waiting for the router; more are lost, since the counters hold the truth.
const QUEUE: usize = 1024;
/// How long the kernel gathers samples before it hands them over.
const GATHER: Duration = Duration::from_millis(50);
/// How long equal drops are counted before they are reported.
const WINDOW: Duration = Duration::from_secs(1);
const DATAGRAM: usize = 64 << 10;

/// Listens to the samples of this nflog group until the receiver is dropped. The first drop of its
/// kind comes at once; equal ones come together once a second, with their count.
///
/// # Errors
/// When the group cannot be bound, e.g. because another process has it.
pub async fn listen(world: &World, group: u16) -> Result<mpsc::Receiver<Dropped>, Error> {
    let (sender, receiver) = mpsc::channel(QUEUE);
    let socket = world.run_async(bind(group)).await??;
    world.spawn(report(socket, sender));
    Ok(receiver)
}

async fn bind(group: u16) -> Result<TokioSocket, Error> {
    let at = |step| move |error: io::Error| Error::Netfilter(step, error);
    let mut socket = TokioSocket::new(NETLINK_NETFILTER).map_err(at("open"))?;
    socket.socket_mut().bind_auto().map_err(at("bind"))?;
    socket.socket_mut().set_no_enobufs(true).map_err(at("set up"))?;
    let wanted =
        vec![ConfigCmd::Bind.into(), ConfigMode::PACKET_MAX.into(), Timeout::from(GATHER).into()];
    let request = config_request(NetfilterProtoFamily::Unspec, group, wanted);
    let mut bytes = vec![0; request.buffer_len()];
    request.serialize(&mut bytes);
    socket.send_to(&bytes, &SocketAddr::new(0, 0)).await.map_err(at("send to"))?;
    let mut answer = Vec::with_capacity(DATAGRAM);
    socket.recv(&mut answer).await.map_err(at("read"))?;
    match NetlinkMessage::<NetfilterMessage>::deserialize(&answer).map(|answer| answer.payload) {
        Ok(NetlinkPayload::Error(error)) if error.raw_code() != 0 => Err(at(
            "bind the nflog group (does another daemon use this namespace?) of",
        )(error.to_io())),
        _ => Ok(socket),
    }
}

async fn report(socket: TokioSocket, sender: mpsc::Sender<Dropped>) {
    let mut tally = Tally::default();
    let mut window = tokio::time::interval(WINDOW);
    let mut datagram = Vec::with_capacity(DATAGRAM);
    loop {
        datagram.clear();
        tokio::select! {
            () = sender.closed() => return,
            _ = window.tick() => {
                for dropped in tally.take() {
                    let _ = sender.try_send(dropped);
                }
            }
            read = socket.recv(&mut datagram) => match read {
                Ok(_) => {
                    for dropped in samples(&datagram) {
                        if let Some(first) = tally.add(dropped) {
                            let _ = sender.try_send(first);
                        }
                    }
                }
                Err(error) => tracing::warn!(%error, "nflog.read"),
            }
        }
    }
}

/// The samples in one datagram of the kernel.
fn samples(mut datagram: &[u8]) -> Vec<Dropped> {
    let mut found = Vec::new();
    while let Ok(message) = NetlinkMessage::<NetfilterMessage>::deserialize(datagram) {
        let len = usize::try_from(message.header.length).unwrap_or(usize::MAX);
        datagram = datagram.get(len.next_multiple_of(4)..).unwrap_or_default();
        if let NetlinkPayload::InnerMessage(NetfilterMessage {
            inner: NetfilterMessageInner::ULog(ULogMessage::Packet(attributes)),
            ..
        }) = message.payload
        {
            found.extend(sample(&attributes));
        }
        if len == 0 {
            break;
        }
    }
    found
}

fn sample(attributes: &[PacketNla]) -> Option<Dropped> {
    let (mut prefix, mut ethernet, mut packet) = (None, &[][..], &[][..]);
    for attribute in attributes {
        match attribute {
            PacketNla::Prefix(text) => prefix = text.to_str().ok(),
            PacketNla::HwHeader(bytes) => ethernet = bytes,
            PacketNla::Payload(bytes) => packet = bytes,
            _ => {}
        }
    }
    read(prefix?, ethernet, packet)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn no_datagram_makes_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
            let _ = samples(&bytes);
        }
    }
}
