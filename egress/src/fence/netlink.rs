//! The netfilter socket of the thread that lives in the guests' namespace.
//!
//! It is kept: closing one makes the kernel wait until everything that was removed before is freed,
//! which takes 10 ms. After an error it is not used again, since what is still queued on it would be
//! taken for the answer to something else.

use std::cell::RefCell;
use std::io;

use netlink_sys::protocols::NETLINK_NETFILTER;
use netlink_sys::{Socket, SocketAddr};
use nix::sys::socket::{setsockopt, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};

use crate::error::Error;
use crate::fence::batch::Batch;
use crate::fence::decode::{Message, messages, outcome};

/// The default of 208 KiB refuses a large batch with EMSGSIZE.
const BUFFER: usize = 8 << 20;
/// The kernel answers at once; this only keeps a lost answer from being waited for for ever.
const PATIENCE_SECONDS: i64 = 5;
/// The kernel sizes the parts of a dump by the reader's buffer, up to this.
const PART: usize = 32 << 10;

const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLM_F_DUMP_INTR: u16 = 0x10;
const NLM_F_MULTI: u16 = 0x02;

thread_local! {
    static KEPT: RefCell<Option<Netfilter>> = const { RefCell::new(None) };
}

/// Talks to the kernel over the calling thread's socket, in the thread's namespace.
pub(crate) fn with_netfilter<T>(
    talk: impl FnOnce(&Netfilter) -> Result<T, Error>,
) -> Result<T, Error> {
    let socket = KEPT.take().map_or_else(Netfilter::open, Ok)?;
    let answer = talk(&socket)?;
    KEPT.set(Some(socket));
    Ok(answer)
}

pub(crate) struct Netfilter(Socket);

impl Netfilter {
    fn open() -> Result<Self, Error> {
        let at = |step| move |error: io::Error| Error::Netfilter(step, error);
        let mut socket = Socket::new(NETLINK_NETFILTER).map_err(at("open"))?;
        socket.bind_auto().map_err(at("bind"))?;
        socket.set_ext_ack(true).map_err(at("set up"))?;
        socket.set_cap_ack(true).map_err(at("set up"))?;
        let patience = TimeVal::seconds(PATIENCE_SECONDS);
        setsockopt(&socket, sockopt::SndBufForce, &BUFFER)
            .and_then(|()| setsockopt(&socket, sockopt::RcvBufForce, &BUFFER))
            .and_then(|()| setsockopt(&socket, sockopt::ReceiveTimeout, &patience))
            .map_err(|errno| at("set up")(errno.into()))?;
        Ok(Self(socket))
    }

    /// Does everything of a batch, or nothing.
    pub(crate) fn commit(&self, batch: Batch) -> Result<(), Error> {
        if batch.is_empty() {
            return Ok(());
        }
        let (bytes, last, operations) = batch.finish();
        self.send(&bytes)?;
        loop {
            let part = self.receive()?;
            for answer in messages(&part).filter(|answer| answer.kind == NLMSG_ERROR) {
                let (errno, detail) = outcome(answer);
                if errno != 0 {
                    let operation =
                        usize::try_from(answer.seq).ok().and_then(|n| operations.get(n));
                    let operation = operation.cloned().unwrap_or_default();
                    let source = io::Error::from_raw_os_error(errno);
                    return Err(Error::Refused { operation, detail, source });
                }
                if answer.seq == last {
                    return Ok(());
                }
            }
        }
    }

    /// Asks one question and hands each message of the answer to `take`. What is not there is an
    /// empty answer. Returns false when the rules changed meanwhile, so that it must be asked again.
    pub(crate) fn ask(
        &self,
        question: &[u8],
        what: &str,
        mut take: impl FnMut(Message<'_>),
    ) -> Result<bool, Error> {
        self.send(question)?;
        let mut steady = true;
        loop {
            let part = self.receive()?;
            for answer in messages(&part) {
                steady &= answer.flags & NLM_F_DUMP_INTR == 0;
                match answer.kind {
                    NLMSG_DONE => return Ok(steady),
                    NLMSG_ERROR => {
                        let (errno, detail) = outcome(answer);
                        if errno == nix::errno::Errno::ENOENT as i32 {
                            return Ok(steady);
                        }
                        let source = io::Error::from_raw_os_error(errno);
                        return Err(Error::Refused { operation: what.to_owned(), detail, source });
                    }
                    _ => take(answer),
                }
                if answer.flags & NLM_F_MULTI == 0 {
                    return Ok(steady);
                }
            }
        }
    }

    fn send(&self, bytes: &[u8]) -> Result<(), Error> {
        let kernel = SocketAddr::new(0, 0);
        let sent = self.0.send_to(bytes, &kernel, 0);
        sent.map(drop).map_err(|error| Error::Netfilter("send to", error))
    }

    fn receive(&self) -> Result<Vec<u8>, Error> {
        let mut part = Vec::with_capacity(PART);
        self.0.recv(&mut part, 0).map_err(|error| Error::Netfilter("read", error))?;
        Ok(part)
    }
}
