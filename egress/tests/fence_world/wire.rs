//! A guest for these tests: a namespace of its own behind a veth pair whose other end is the tap.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use egress::world::World;
use nix::ifaddrs::getifaddrs;
use nix::sched::{CloneFlags, setns};
use nix::sys::socket::{LinkAddr, SockaddrLike, bind};
use policy::Slot;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

/// How long anything may take on a busy machine: longer than it ever stands still.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
pub(crate) const GUEST: [u8; 6] = policy::net::GUEST_MAC;
pub(crate) const GATEWAY: [u8; 6] = policy::net::GATEWAY_MAC;

/// A name that no other test has, now or on this machine.
pub(crate) fn unique(what: &str) -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("fencetest-{what}-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// A namespace that is removed with this value.
pub(crate) struct Netns(pub(crate) String);

impl Drop for Netns {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.0]).status();
    }
}

impl Netns {
    /// Runs a command in it and returns what it printed.
    pub(crate) fn exec(&self, command: &str) -> String {
        run(&format!("ip netns exec {} {command}", self.0))
    }

    /// Runs a closure on a thread in it.
    pub(crate) fn within<T: Send + 'static>(&self, act: impl FnOnce() -> T + Send + 'static) -> T {
        let path = format!("/run/netns/{}", self.0);
        let entered = thread::spawn(move || {
            setns(File::open(path).expect("a namespace"), CloneFlags::CLONE_NEWNET).expect("root");
            act()
        });
        entered.join().expect("no panic")
    }
}

/// Runs a command line without quoting; it must succeed.
pub(crate) fn run(line: &str) -> String {
    let mut words = line.split_whitespace();
    let command = words.next().expect("a command");
    let output = Command::new(command).args(words).output().expect("it is installed");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{line}: {said}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A world of its own.
pub(crate) async fn world() -> (World, Netns) {
    let netns = Netns(unique("world"));
    let world = World::enter(&netns.0).await.expect("root, and a kernel with namespaces");
    (world, netns)
}

/// A guest at a slot: `eth0` in its namespace, `pt<n>` in the world's, which stays down.
pub(crate) fn guest(world: &Netns, slot: Slot) -> Netns {
    let guest = Netns(unique("guest"));
    let (tap, at) = (slot.tap(), &guest.0);
    run(&format!("ip netns add {at}"));
    guest.exec("sysctl -eqw net.ipv6.conf.all.disable_ipv6=1 net.ipv6.conf.default.disable_ipv6=1");
    run(&format!("ip link add {tap} netns {} type veth peer name eth0 netns {at}", world.0));
    guest.exec("ip link set eth0 address 02:00:00:00:00:02 up");
    guest.exec("ip link set lo up");
    guest.exec("ip address add 169.254.100.2/30 dev eth0");
    guest.exec("ip route add default via 169.254.100.1");
    guest
}

/// Waits until the guest's end sends: a carrier is noticed a little after it is there.
pub(crate) fn wait_for_carrier(guest: &Netns) {
    let deadline = Instant::now() + PATIENCE;
    while !guest.exec("ip -o link show eth0").contains("state UP") {
        assert!(Instant::now() < deadline, "no carrier");
    }
}

/// The guest's end of the wire, frame by frame.
pub(crate) struct Wire(Socket);

impl Wire {
    /// Opens `eth0` of this namespace.
    pub(crate) fn of(netns: &Netns) -> Self {
        netns.within(|| {
            let all = Protocol::from(i32::from(0x0003_u16.to_be()));
            let socket = Socket::new(Domain::PACKET, Type::RAW, Some(all)).expect("root");
            let eth0 = getifaddrs()
                .expect("interfaces")
                .filter(|found| found.interface_name == "eth0")
                .find_map(|found| found.address?.as_link_addr().copied())
                .expect("eth0");
            bind_link(&socket, &eth0);
            socket.set_read_timeout(Some(Duration::from_millis(50))).expect("a timeout");
            Self(socket)
        })
    }

    pub(crate) fn send(&mut self, frame: &[u8]) {
        let sent = self.0.write(frame).expect("the wire takes it");
        assert_eq!(sent, frame.len());
    }

    /// The first frame that `wanted` says something about, within so long.
    pub(crate) fn find<T>(
        &mut self,
        patience: Duration,
        mut wanted: impl FnMut(&[u8]) -> Option<T>,
    ) -> Option<T> {
        let deadline = Instant::now() + patience;
        let mut buffer = [0; 2048];
        while Instant::now() < deadline {
            match self.0.read(&mut buffer) {
                Ok(len) => {
                    if let Some(found) = wanted(&buffer[..len]) {
                        return Some(found);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => panic!("the wire broke: {error}"),
            }
        }
        None
    }
}

fn bind_link(socket: &Socket, address: &LinkAddr) {
    use std::os::fd::AsRawFd;
    assert!(address.len() > 0);
    bind(socket.as_raw_fd(), address).expect("eth0 is up");
}

/// A socket that answers for any address, in the calling thread's namespace.
pub(crate) fn transparent(kind: Type, port: u16) -> Socket {
    let socket = Socket::new(Domain::IPV4, kind, None).expect("a socket");
    socket.set_ip_transparent_v4(true).expect("root");
    socket.bind(&SockAddr::from(SocketAddr::from(([0, 0, 0, 0], port)))).expect("a free port");
    socket.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    if kind == Type::STREAM {
        socket.listen(64).expect("a listener");
    }
    socket
}

/// Connects from a fixed source port, waiting at most `patience`.
pub(crate) fn connect(from: u16, to: SocketAddr, patience: Duration) -> io::Result<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.bind(&SockAddr::from(SocketAddr::from(([0, 0, 0, 0], from))))?;
    socket.connect_timeout(&SockAddr::from(to), patience)?;
    Ok(socket)
}
