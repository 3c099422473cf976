//! What can go wrong in this room: failures of the machine, never refusals of a guest.
//! A variant says what was being done and to what; the cause is its source.

use std::io;

use policy::Slot;

/// A failure of the guests' world, its fence or its router.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Another daemon has the guests' namespace.
    #[error("another daemon serves the network namespace {0}: give each its own")]
    Taken(String),
    /// The guests' namespace could not be claimed.
    #[error("cannot claim the network namespace {netns}")]
    Claim {
        /// Its name.
        netns: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The namespace could not be made, entered or set up.
    #[error("cannot {step} network namespace {netns:?}")]
    Namespace {
        /// Its name.
        netns: String,
        /// What was being done.
        step: &'static str,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// The guests' world must have no way out but our process.
    #[error(
        "network namespace {netns:?} has the interface {link:?}, which is neither lo nor a tap of ours"
    )]
    Uplink {
        /// The namespace.
        netns: String,
        /// The interface that must not be there.
        link: String,
    },
    /// The thread that lives in the namespace is gone: the daemon is ending.
    #[error("the thread in network namespace {0:?} has ended")]
    WorldEnded(String),
    /// A kernel setting could not be written.
    #[error("cannot write {value:?} to {path}")]
    Sysctl {
        /// The file below /proc/sys.
        path: String,
        /// What it should hold.
        value: &'static str,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// A link, address, neighbour, route or rule could not be read or changed.
    #[error("cannot {act} of {link}")]
    Link {
        /// What was being done.
        act: &'static str,
        /// The interface.
        link: String,
        /// Why it failed.
        #[source]
        source: rtnetlink::Error,
    },
    /// There is no tap of this slot in the namespace.
    #[error("there is no interface {}", .0.tap())]
    NoTap(Slot),
    /// Nothing is attached to this slot.
    #[error("no sandbox is attached to slot {0}")]
    Vacant(Slot),
    /// The slot is taken.
    #[error("a sandbox is attached to slot {0} already")]
    Occupied(Slot),
    /// Traffic leaves from one address of a family, and the choice is not ours.
    #[error("slot {0} was given more than one egress address of a family")]
    EgressAddresses(Slot),
    /// A socket that faces a guest could not be made.
    #[error("cannot make the {what} of slot {slot}")]
    Socket {
        /// Which.
        what: &'static str,
        /// Whose.
        slot: Slot,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// A port of a guest cannot be connected to.
    #[error("cannot connect to port {port} of the guest in slot {slot}")]
    Connect {
        /// The guest.
        slot: Slot,
        /// Its port.
        port: u16,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// There are as many connections to the guest as there may be.
    #[error("too many connections to the guest in slot {0} are open")]
    Busy(Slot),
    /// The runtime ended while a slot was being changed.
    #[error("the change of slot {0} was interrupted")]
    Interrupted(Slot),
    /// The netfilter socket failed.
    #[error("cannot {0} the netfilter socket")]
    Netfilter(&'static str, #[source] io::Error),
    /// The kernel refused one operation; nothing of its batch was done.
    #[error("the kernel refused to {operation}{}", note(.detail))]
    Refused {
        /// The operation.
        operation: String,
        /// What the kernel says about it, or empty.
        detail: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// What the kernel holds is not what was meant: someone else edits these rules.
    #[error("the fence differs from what was meant at {at}: meant {meant}, found {found}")]
    Differs {
        /// Chain and rule.
        at: String,
        /// What should be there.
        meant: String,
        /// What is there.
        found: String,
    },
}

fn note(detail: &str) -> String {
    if detail.is_empty() { String::new() } else { format!(" ({detail})") }
}

impl Error {
    /// The error number of the kernel at the root of it, where there is one.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Namespace { source, .. }
            | Self::Sysctl { source, .. }
            | Self::Netfilter(_, source)
            | Self::Socket { source, .. }
            | Self::Connect { source, .. }
            | Self::Refused { source, .. } => source.raw_os_error(),
            Self::Link { source: rtnetlink::Error::NetlinkError(message), .. } => {
                Some(-message.raw_code())
            }
            _ => None,
        }
    }
}
