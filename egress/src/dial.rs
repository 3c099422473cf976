//! The only place that opens a connection to the outside.
//!
//! It needs a permit, resolves the judged name itself, has every address judged before it is
//! dialled, and binds the sandbox's egress address. It never dials an address of this host, and
//! never one that the guest chose unless an address rule names it.

use std::future::Future;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use dns::{Asker, Family};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use nix::errno::Errno;
use nix::sys::socket::{setsockopt, sockopt};
use policy::judge::Target;
use policy::{Code, Compiled, Dialable, Host, OwnAddresses, Permit, Protocol, Revision, Slot};
use socket2::{Domain, Socket, TcpKeepalive, Type};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::{sleep, timeout};

use crate::attempts::{Attempt, Attempts};
use crate::buffers;
use crate::limits::Limits;
use crate::ports::{Port, Ports};
use crate::refuse::Refusal;
use crate::room;

/// Between two attempts (RFC 8305, section 5: Connection Attempt Delay).
const STAGGER: Duration = Duration::from_millis(250);
/// How long IPv4 waits for IPv6 answers (RFC 8305, section 3: Resolution Delay).
const RESOLUTION_DELAY: Duration = Duration::from_millis(50);
/// Addresses of one name that are tried.
const ATTEMPTS: usize = 8;
/// What may wait in one socket for datagrams, in bytes of payload.
const DATAGRAMS: usize = 64 << 10;
/// Datagrams that can have come to a socket before it was connected: more than it has room for.
const STRANGE: usize = 1 << 14;
/// Quiet time after which the far side is probed.
const KEEPALIVE: Duration = Duration::from_secs(60);

/// Dials for one sandbox.
#[derive(Clone, Debug)]
pub(crate) struct Dialer {
    asker: Asker,
    own: OwnAddresses,
    v4: Option<Ipv4Addr>,
    v6: Option<Ipv6Addr>,
    patience: Duration,
    user_timeout: Duration,
    slot: Slot,
    ports: Ports,
}

/// A socket for datagrams to and from one place outside.
#[derive(Debug)]
pub(crate) struct Datagrams {
    /// It, connected: it hears nobody else.
    pub(crate) socket: UdpSocket,
    /// Where to.
    pub(crate) remote: SocketAddr,
    /// From where: the egress address, and the port the kernel chose.
    pub(crate) egress: SocketAddr,
    /// That port, to be held as long as the socket and a little longer.
    pub(crate) port: Port,
}

/// A connection to the outside.
#[derive(Debug)]
pub(crate) struct Dialed {
    /// It.
    pub(crate) stream: TcpStream,
    /// Where to.
    pub(crate) remote: SocketAddr,
    /// From where: the egress address, and the port the kernel chose.
    pub(crate) egress: SocketAddr,
    /// That port, to be held as long as the socket and a little longer.
    pub(crate) port: Port,
}

impl Dialed {
    /// What the far side has seen of it, whatever becomes of it here.
    pub(crate) fn attempt(&self) -> Attempt {
        Attempt { egress: self.egress, remote: self.remote }
    }
}

impl Dialer {
    /// A dialer for the guest in a slot, that leaves from these addresses, the first of each family.
    pub(crate) fn new(
        slot: Slot,
        asker: Asker,
        own: OwnAddresses,
        egress: &[IpAddr],
        ports: Ports,
        limits: &Limits,
    ) -> Self {
        let v4 =
            egress.iter().find_map(|ip| if let IpAddr::V4(ip) = ip { Some(*ip) } else { None });
        let v6 =
            egress.iter().find_map(|ip| if let IpAddr::V6(ip) = ip { Some(*ip) } else { None });
        let Limits { connect: patience, user_timeout, .. } = *limits;
        Self { asker, own, v4, v6, patience, user_timeout, slot, ports }
    }

    /// The addresses that a permit is for and that may be dialled, in the order of RFC 8305 within the
    /// families that the sandbox has an egress address of.
    pub(crate) async fn candidates(
        &self,
        policy: &Compiled,
        permit: &Permit,
    ) -> Result<Vec<Dialable>, Refusal> {
        let because = |code| Refusal::because(code, permit.revision());
        if self.v4.is_none() && self.v6.is_none() {
            return Err(because(Code::EgressIpUnavailable));
        }
        let addresses = match permit.target() {
            Target::Address(address) => vec![*address],
            Target::Name(name) => self.resolve(permit, name).await.map_err(|error| {
                let code = if error.is_limit() { Code::Limit } else { Code::Unresolvable };
                because(code).detailed(error)
            })?,
        };
        let mut denial = None;
        let mut dialable = Vec::new();
        for address in addresses {
            match policy.judge_address(permit, address, &self.own) {
                Ok(one) if dialable.len() < ATTEMPTS => dialable.push(one),
                Ok(_) => break,
                Err(why) => denial = Some(why),
            }
        }
        if dialable.is_empty() {
            return Err(denial.map_or_else(|| because(Code::Unresolvable), Refusal::from));
        }
        Ok(dialable)
    }

    /// Opens a connection to the first of these that answers, for the `rank`-th one of the guest.
    /// `revision` is that of their permit. What is left in `attempts` sent a packet and came to nothing,
    /// beside the one that a refusal speaks of.
    pub(crate) async fn dial(
        &self,
        candidates: Vec<Dialable>,
        revision: Revision,
        rank: usize,
        attempts: &Attempts,
    ) -> Result<Dialed, Refusal> {
        match race(candidates, |one| self.connect(one, rank, attempts)).await {
            Ok(dialed) => {
                attempts.won(dialed.attempt());
                Ok(dialed)
            }
            Err(error) => {
                let refusal = Refusal::because(failure(&error), revision).detailed(error);
                Err(refusal.after(attempts.last()))
            }
        }
    }

    /// Opens the way for datagrams that a permit is for; only permits for addresses are. Nothing is
    /// sent.
    pub(crate) fn datagrams(
        &self,
        policy: &Compiled,
        permit: &Permit,
    ) -> Result<Datagrams, Refusal> {
        let because = |code| Refusal::because(code, permit.revision());
        let (Target::Address(address), Protocol::Udp) = (permit.target(), permit.protocol()) else {
            return Err(because(Code::Protocol));
        };
        let remote = policy.judge_address(permit, *address, &self.own)?.address();
        let from = self.source(remote).ok_or_else(|| because(Code::EgressIpUnavailable))?;
        let port = self.ports.take(self.slot, from, None);
        port.and_then(|port| Self::connected(from, remote, port))
            .map_err(|error| because(failure(&error)).detailed(error))
    }

    /// The kernel chooses the port, at random, among those that the egress address has left: two
    /// sessions never share one.
    fn connected(from: IpAddr, remote: SocketAddr, port: Port) -> io::Result<Datagrams> {
        let socket = std::net::UdpSocket::bind((from, 0))?;
        room::check(&socket)?;
        socket.set_nonblocking(true)?;
        // Before it is connected, so that nothing comes in unbounded.
        setsockopt(&socket, sockopt::RcvBuf, &DATAGRAMS)?;
        setsockopt(&socket, sockopt::RxqOvfl, &1)?;
        setsockopt(&socket, sockopt::Ipv4RecvErr, &true)?;
        socket.connect(remote)?;
        // Nothing has been sent, so what is here came from anybody while it was bound.
        let strange = (0..STRANGE).take_while(|_| socket.recv(&mut [0]).is_ok()).count();
        if strange > 0 {
            tracing::debug!(%remote, strange, "datagrams from before");
        }
        let egress = socket.local_addr()?;
        Ok(Datagrams { socket: UdpSocket::from_std(socket)?, remote, egress, port })
    }

    /// The egress address of the family of a destination.
    fn source(&self, to: SocketAddr) -> Option<IpAddr> {
        match to.ip() {
            IpAddr::V4(_) => self.v4.map(IpAddr::from),
            IpAddr::V6(_) => self.v6.map(IpAddr::from),
        }
    }

    /// Addresses of a name, families alternating, IPv6 first (RFC 8305, section 4). Where the sandbox
    /// can leave by one family only, those of the other are found when there are no others: to dial
    /// them then says why not.
    async fn resolve(&self, permit: &Permit, name: &Host) -> Result<Vec<IpAddr>, dns::Error> {
        let ask = async |family| {
            let answer = self.asker.addresses(permit, name, family).await;
            answer.map(|answer| answer.addresses.clone())
        };
        let only = async |family, other| match ask(family).await {
            Err(none @ dns::Error::NoAddresses { .. }) => ask(other).await.map_err(|_| none),
            answer => answer,
        };
        match (self.v4, self.v6) {
            (_, None) => only(Family::V4, Family::V6).await,
            (None, _) => only(Family::V6, Family::V4).await,
            _ => {
                let mut v6 = Box::pin(ask(Family::V6));
                let mut v4 = Box::pin(ask(Family::V4));
                let (v6, v4) = tokio::select! {
                    six = &mut v6 => (six, v4.await),
                    four = &mut v4 => match (four, timeout(RESOLUTION_DELAY, &mut v6).await) {
                        (four @ Ok(_), Err(_)) => (Ok(Vec::new()), four),
                        (four, Err(_)) => (v6.await, four),
                        (four, Ok(six)) => (six, four),
                    },
                };
                match (v6, v4) {
                    (Err(_), Err(error)) => Err(error),
                    (v6, v4) => Ok(alternate(v6.unwrap_or_default(), v4.unwrap_or_default())),
                }
            }
        }
    }

    async fn connect(&self, to: Dialable, rank: usize, attempts: &Attempts) -> io::Result<Dialed> {
        let to = to.address();
        let from = self.source(to).ok_or(io::ErrorKind::AddrNotAvailable)?;
        let mut port = self.ports.take(self.slot, from, Some(to))?;
        let socket = Socket::new(Domain::for_address(to), Type::STREAM.nonblocking(), None)?;
        room::check(&socket)?;
        // The port is chosen at connect, when the far side is known, so that 28,000 ports are
        // 28,000 connections to each far side and not in all. An address we do not have is an error
        // here already: no free bind, no transparency.
        setsockopt(&socket, sockopt::IpBindAddressNoPort, &true)?;
        socket.bind(&SocketAddr::new(from, 0).into())?;
        socket.set_tcp_nodelay(true)?;
        // Before the handshake, which says how far the window can grow (RFC 7323, section 2).
        buffers::bound(&socket, rank);
        let probes = TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE / 4);
        socket.set_tcp_keepalive(&probes)?;
        socket.set_tcp_user_timeout(Some(self.user_timeout))?;
        match socket.connect(&to.into()) {
            Err(error) if error.raw_os_error() != Some(Errno::EINPROGRESS as i32) => {
                return Err(match error.kind() {
                    // The address is ours, or `bind` had said so: what is missing is a port.
                    io::ErrorKind::AddrNotAvailable => io::Error::new(
                        io::ErrorKind::AddrInUse,
                        "every port of the egress address is taken towards this destination",
                    ),
                    _ => error,
                });
            }
            // Its first packet is on its way, from a port that is known now.
            _ => {}
        }
        let stream = TcpStream::from_std(socket.into())?;
        let egress = stream.local_addr()?;
        attempts.add(Attempt { egress, remote: to });
        port.known(egress);
        timeout(self.patience, stream.writable())
            .await
            .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))?;
        if let Some(error) = stream.take_error()? {
            return Err(error);
        }
        Ok(Dialed { stream, remote: to, egress, port })
    }
}

/// What a failed dial is called.
fn failure(error: &io::Error) -> Code {
    match error.kind() {
        io::ErrorKind::AddrNotAvailable => Code::EgressIpUnavailable,
        io::ErrorKind::AddrInUse => Code::Limit,
        _ if room::is_exhausted(error) => Code::Limit,
        _ => Code::UpstreamUnreachable,
    }
}

/// Starts one attempt after the other, the next as soon as one fails or has taken its time; the
/// first to succeed wins and the others are dropped.
async fn race<A, T, F>(targets: Vec<A>, attempt: impl Fn(A) -> F) -> io::Result<T>
where
    F: Future<Output = io::Result<T>>,
{
    let mut targets = targets.into_iter();
    let mut open = FuturesUnordered::new();
    let mut failed = io::Error::from(io::ErrorKind::NotFound);
    loop {
        open.extend(targets.next().map(&attempt));
        let more = targets.len() > 0;
        tokio::select! {
            ended = open.next() => match ended {
                Some(Ok(won)) => return Ok(won),
                Some(Err(error)) => failed = error,
                None => return Err(failed),
            },
            () = sleep(STAGGER), if more => {}
        }
    }
}

fn alternate(first: Vec<IpAddr>, second: Vec<IpAddr>) -> Vec<IpAddr> {
    let (mut first, mut second) = (first.into_iter(), second.into_iter());
    let mut all = Vec::with_capacity(first.len() + second.len());
    while first.len() + second.len() > 0 {
        all.extend(first.next());
        all.extend(second.next());
    }
    all
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    /// Attempts that end after a while with success or not.
    async fn outcome((id, after, ok): (u8, u64, bool)) -> io::Result<u8> {
        sleep(Duration::from_millis(after)).await;
        if ok { Ok(id) } else { Err(io::ErrorKind::ConnectionRefused.into()) }
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_address_costs_one_stagger_and_a_refusing_one_nothing() {
        let begun = Instant::now();
        let won = race(vec![(1, 60_000, false), (2, 10, true)], outcome).await.expect("the second");
        assert_eq!((won, begun.elapsed()), (2, Duration::from_millis(260)));

        let begun = Instant::now();
        let won = race(vec![(1, 5, false), (2, 10, true)], outcome).await.expect("the second");
        assert_eq!((won, begun.elapsed()), (2, Duration::from_millis(15)));
    }

    #[tokio::test(start_paused = true)]
    async fn when_all_fail_the_last_failure_is_told() {
        let error = race(vec![(1, 5, false), (2, 900, false)], outcome).await.expect_err("none");
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_first_address_still_wins_when_it_is_first_to_answer() {
        let won = race(vec![(1, 300, true), (2, 400, true)], outcome).await.expect("the first");
        assert_eq!(won, 1);
    }

    #[test]
    fn families_alternate() {
        let [a, b, c] = [1, 2, 3].map(|n| IpAddr::from([203, 0, 113, n]));
        let six = IpAddr::V6(Ipv6Addr::LOCALHOST);
        assert_eq!(alternate(vec![six], vec![a, b, c]), [six, a, b, c]);
        assert_eq!(alternate(vec![], vec![a]), [a]);
    }
}
