//! The guests' network namespace and the one thread that lives in it.
//!
//! A socket keeps the namespace it was made in, so whatever belongs to a guest is made on this
//! thread. Nothing here ever touches the namespace the daemon was started in, and a namespace with
//! an interface that is neither lo nor a tap of ours is refused: guests must have no way out.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use futures_util::TryStreamExt;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::statfs::{NSFS_MAGIC, statfs};
use policy::Slot;
use rtnetlink::packet_route::link::{LinkAttribute, LinkFlags, LinkMessage};
use rtnetlink::packet_route::route::{RouteProtocol, RouteScope, RouteType};
use rtnetlink::packet_route::rule::RuleAction;
use rtnetlink::{Handle, LinkUnspec, RouteMessageBuilder};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::error::Error;

/// Mark of diverted packets, the preference of the rule that finds them, and its table.
pub const MARK: u32 = 1;
/// Mark of packets that a slot's fence refuses and the base answers.
pub const REFUSED: u32 = 2;
/// Mark of frames beyond what their guest may send; they go no further.
pub const EXCESS: u32 = 3;
/// Mark of datagrams that a slot's fence lets as far as the relay.
pub const RELAYED: u32 = 4;
const PREFERENCE: u32 = 100;
const TABLE: u32 = 100;

/// The index of lo, which the kernel makes first in every namespace.
const LOOPBACK: u32 = 1;

const NETNS_DIR: &str = "/run/netns";

/// Interfaces that some kernel modules put into every new namespace. They lead nowhere while down.
const FALLBACK_LINKS: [&str; 9] =
    ["tunl0", "gre0", "gretap0", "erspan0", "ip_vti0", "ip6_vti0", "sit0", "ip6tnl0", "ip6gre0"];

/// Settings of the whole namespace, and of every interface that will be made in it.
const SYSCTLS: [(&str, &str); 20] = [
    ("net/ipv4/ip_forward", "0"),
    // Every refusal is answered: neither its guest's limit nor the one of all guests together, which
    // one of them could use up, is for any type of error.
    ("net/ipv4/icmp_ratemask", "0"),
    // A cookie would open connections by acknowledgements alone, past the fence's rate of new ones. Each
    // guest's queue is its own, and takes what it has room for.
    ("net/ipv4/tcp_syncookies", "0"),
    ("net/ipv4/tcp_max_syn_backlog", "4096"),
    // A guest that takes no segment more does not keep a closed connection for long: three seconds
    // and not a quarter of an hour.
    ("net/ipv4/tcp_orphan_retries", "3"),
    // As far as a socket to a guest may grow each way: `buffers` bounds those that are many.
    ("net/ipv4/tcp_rmem", "4096 131072 4194304"),
    ("net/ipv4/tcp_wmem", "4096 16384 4194304"),
    ("net/ipv4/conf/all/rp_filter", "0"),
    ("net/ipv4/conf/default/rp_filter", "0"),
    ("net/ipv4/conf/all/arp_ignore", "1"),
    ("net/ipv4/conf/default/arp_ignore", "1"),
    ("net/ipv4/conf/all/send_redirects", "0"),
    ("net/ipv4/conf/default/send_redirects", "0"),
    ("net/ipv4/conf/all/accept_redirects", "0"),
    ("net/ipv4/conf/default/accept_redirects", "0"),
    ("net/ipv4/conf/all/accept_source_route", "0"),
    ("net/ipv6/conf/all/forwarding", "0"),
    ("net/ipv6/conf/all/disable_ipv6", "1"),
    ("net/ipv6/conf/default/disable_ipv6", "1"),
    ("net/ipv6/conf/lo/disable_ipv6", "1"),
];

/// The guests' network namespace. Clones share its thread, which ends with the last of them.
#[derive(Clone, Debug)]
pub struct World {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    netns: String,
    runtime: tokio::runtime::Handle,
    netlink: Handle,
    _alive: oneshot::Sender<()>,
}

impl World {
    /// Enters the namespace of this name below /run/netns, making it first where it is missing,
    /// and sets it up. What is already as it should be is left alone.
    ///
    /// # Errors
    /// When the namespace cannot be made, entered or set up (this needs root), and when it has an
    /// interface that is neither lo nor a tap of ours.
    pub async fn enter(netns: &str) -> Result<Self, Error> {
        let name = netns.to_owned();
        let (alive, ended) = oneshot::channel::<()>();
        let (ready, entered) = oneshot::channel();
        thread::Builder::new()
            .name("guests-world".to_owned())
            .spawn(move || live(&name, ready, ended))
            .map_err(|source| failed(netns, "start a thread for", source))?;
        let (runtime, netlink) =
            entered.await.map_err(|_| Error::WorldEnded(netns.to_owned()))??;
        let inner = Inner { netns: netns.to_owned(), runtime, netlink, _alive: alive };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The namespace's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.inner.netns
    }

    /// Runs a short closure on the thread in the namespace. It must not block for long: it holds
    /// up everything else that runs there.
    ///
    /// # Errors
    /// When the thread has ended, or the closure panicked.
    pub async fn run<T: Send + 'static>(
        &self,
        act: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Error> {
        self.run_async(async { act() }).await
    }

    /// Runs a future on the thread in the namespace and waits for its value.
    ///
    /// # Errors
    /// When the thread has ended, or the future panicked.
    pub async fn run_async<F>(&self, future: F) -> Result<F::Output, Error>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        self.spawn(future).await.map_err(|_| Error::WorldEnded(self.inner.netns.clone()))
    }

    /// Starts a future on the thread in the namespace.
    pub fn spawn<F>(&self, future: F) -> JoinHandle<F::Output>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        self.inner.runtime.spawn(future)
    }

    /// Puts back the policy rule and the route of diverted packets; whether one of them was gone.
    pub(crate) async fn assure_ways(&self) -> Result<bool, Error> {
        ways(self.netlink(), LOOPBACK).await
    }

    /// The rtnetlink handle of the namespace; it may be used from any thread.
    pub(crate) fn netlink(&self) -> &Handle {
        &self.inner.netlink
    }
}

type Entered = (tokio::runtime::Handle, Handle);

/// The life of the thread: enter, set up, report, and serve until the last `World` is dropped.
fn live(netns: &str, ready: oneshot::Sender<Result<Entered, Error>>, ended: oneshot::Receiver<()>) {
    let runtime = match enter(netns) {
        Ok(runtime) => runtime,
        Err(error) => return drop(ready.send(Err(error))),
    };
    runtime.block_on(async move {
        let entered = set_up(netns).await;
        if ready.send(entered.map(|netlink| (tokio::runtime::Handle::current(), netlink))).is_ok() {
            let _ = ended.await;
        }
    });
}

fn enter(netns: &str) -> Result<Runtime, Error> {
    let at = |step| move |source| failed(netns, step, source);
    if netns.is_empty() || netns.starts_with('.') || netns.contains(['/', '\0']) {
        let invalid = io::Error::new(io::ErrorKind::InvalidInput, "not a name for a namespace");
        return Err(failed(netns, "name", invalid));
    }
    let path = Path::new(NETNS_DIR).join(netns);
    if is_namespace(&path) {
        let file = File::open(&path).map_err(at("open"))?;
        setns(file, CloneFlags::CLONE_NEWNET).map_err(|e| at("enter")(e.into()))?;
    } else {
        make(&path).map_err(at("make"))?;
    }
    Builder::new_current_thread().enable_all().build().map_err(at("start a runtime in"))
}

fn is_namespace(path: &Path) -> bool {
    statfs(path).is_ok_and(|found| found.filesystem_type() == NSFS_MAGIC)
}

/// Makes a namespace, moves this thread into it and names it, as `ip netns add` does: a bind mount
/// in a shared directory, so that other programs of the host can enter it.
fn make(path: &Path) -> io::Result<()> {
    fs::create_dir_all(NETNS_DIR)?;
    let none = None::<&str>;
    let share = || mount(none, NETNS_DIR, none, MsFlags::MS_SHARED | MsFlags::MS_REC, none);
    if share().is_err() {
        mount(Some(NETNS_DIR), NETNS_DIR, none, MsFlags::MS_BIND | MsFlags::MS_REC, none)?;
        share()?;
    }
    OpenOptions::new().write(true).create(true).truncate(false).mode(0o000).open(path)?;
    unshare(CloneFlags::CLONE_NEWNET)?;
    let own = PathBuf::from("/proc/thread-self/ns/net");
    let bound = mount(Some(&own), path, none, MsFlags::MS_BIND, none);
    if bound.is_err() {
        let _ = fs::remove_file(path);
    }
    Ok(bound?)
}

/// Everything datapath needs of the namespace as a whole; each step may be repeated.
async fn set_up(netns: &str) -> Result<Handle, Error> {
    let (connection, netlink, _) =
        rtnetlink::new_connection().map_err(|source| failed(netns, "open rtnetlink in", source))?;
    tokio::spawn(connection);

    let lo = refuse_uplinks(netns, &netlink).await?;
    for (name, value) in SYSCTLS {
        sysctl(name, value)?;
    }
    let link = |act| move |source| Error::Link { act, link: "lo".to_owned(), source };
    netlink
        .link()
        .set(LinkUnspec::new_with_index(lo).up().build())
        .execute()
        .await
        .map_err(link("set the state"))?;
    ways(&netlink, lo).await?;
    Ok(netlink)
}

/// The policy rule and the local route by which diverted packets arrive; what is there stays. Whether
/// one of them was not.
async fn ways(netlink: &Handle, lo: u32) -> Result<bool, Error> {
    let link = |act| move |source| Error::Link { act, link: "lo".to_owned(), source };
    let rule = netlink
        .rule()
        .add()
        .v4()
        .fw_mark(MARK)
        .table_id(TABLE)
        .priority(PREFERENCE)
        .action(RuleAction::ToTable)
        .execute()
        .await;
    let no_rule = added(rule).map_err(link("add the policy rule"))?;
    let everything = RouteMessageBuilder::<std::net::Ipv4Addr>::new()
        .output_interface(lo)
        .table_id(TABLE)
        .kind(RouteType::Local)
        .scope(RouteScope::Host)
        .protocol(RouteProtocol::Static)
        .build();
    let route = netlink.route().add(everything).execute().await;
    let no_route = added(route).map_err(link("add the local route"))?;
    Ok(no_rule || no_route)
}

/// Whether something was added that was not there.
fn added(done: Result<(), rtnetlink::Error>) -> Result<bool, rtnetlink::Error> {
    match done {
        Ok(()) => Ok(true),
        Err(error) => if_there(error).map(|()| false),
    }
}

/// The index of lo, after a look at every interface.
async fn refuse_uplinks(netns: &str, netlink: &Handle) -> Result<u32, Error> {
    let links: Vec<LinkMessage> =
        netlink.link().get().execute().try_collect().await.map_err(|source| Error::Link {
            act: "list the interfaces",
            link: netns.to_owned(),
            source,
        })?;
    let mut lo = 1;
    for link in &links {
        let name = name_of(link).unwrap_or_default();
        let idle_fallback =
            FALLBACK_LINKS.contains(&name) && !link.header.flags.contains(LinkFlags::Up);
        if link.header.flags.contains(LinkFlags::Loopback) {
            lo = link.header.index;
        } else if Slot::of_tap(name).is_none() && !idle_fallback {
            return Err(Error::Uplink { netns: netns.to_owned(), link: name.to_owned() });
        }
    }
    Ok(lo)
}

/// The name in a link message.
pub(crate) fn name_of(link: &LinkMessage) -> Option<&str> {
    link.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::IfName(name) => Some(name.as_str()),
        _ => None,
    })
}

/// Turns "it is already there" into success.
pub(crate) fn if_there(error: rtnetlink::Error) -> Result<(), rtnetlink::Error> {
    match &error {
        rtnetlink::Error::NetlinkError(message)
            if message.raw_code() == -(nix::errno::Errno::EEXIST as i32) =>
        {
            Ok(())
        }
        _ => Err(error),
    }
}

/// Writes one setting of the calling thread's namespace; IPv6 may be missing from the kernel.
pub(crate) fn sysctl(name: &str, value: &'static str) -> Result<(), Error> {
    let path = format!("/proc/sys/{name}");
    match fs::write(&path, value) {
        Err(source) if source.kind() == io::ErrorKind::NotFound && name.starts_with("net/ipv6") => {
            Ok(())
        }
        written => written.map_err(|source| Error::Sysctl { path, value, source }),
    }
}

fn failed(netns: &str, step: &'static str, source: io::Error) -> Error {
    Error::Namespace { netns: netns.to_owned(), step, source }
}

/// Takes the calling thread's namespace for this daemon: names of this kind belong to a network
/// namespace, and to a process for as long as it lives.
pub(crate) fn claim() -> io::Result<UnixListener> {
    UnixListener::bind_addr(&UnixAddr::from_abstract_name("postern")?)
}
