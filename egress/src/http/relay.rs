//! The far side of an HTTP connection: one connection to it, kept for the next request to the same
//! name, and the bodies of an exchange, which is recorded as ended when both are.
//!
//! A connection is the guest's until its far side has all that was sent or it is reset: it counts as
//! open and can be cut. No request is judged while what an earlier one sent may still leave.

mod body;

use std::io;
use std::net::{Shutdown, SocketAddr};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{Request, StatusCode};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, Connection, SendRequest};
use hyper::ext::on_informational;
use hyper_util::rt::TokioIo;
use policy::Compiled;
use policy::judge::Target;
use socket2::SockRef;
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::account::Account;
use crate::attempts::Attempt;
use crate::buffers;
use crate::dial::Dialed;
use crate::flows::{Flow, Judged};
use crate::guest::{Guest, Passed};
use crate::http::BESIDE;
pub(super) use crate::http::relay::body::Relayed;
use crate::http::wire::{Traffic, Wire};
use crate::limits::Limits;
use crate::meter::Meter;
use crate::ports::Port;
use crate::refuse;
use crate::side::Gate;
use crate::tunnel::Ended;
use crate::unsent::unacknowledged;

/// How long a kept connection may take to be ready for the next request.
const READY: Duration = Duration::from_millis(50);
/// Interim responses (RFC 9110, section 15.2) that may come before the final one. They are not passed
/// on, and reading them without end would leave no time for anybody else.
const INTERIM: usize = 100;

/// How long a far side may take nothing of what is queued for it, while the guest waits to go on.
const STUCK: Duration = Duration::from_secs(5);
/// Pauses between two looks at what is queued: the kernel tells nobody that it has been taken.
const PAUSES: [Duration; 2] = [Duration::from_micros(200), Duration::from_millis(20)];

/// A connection to a far side.
#[derive(Debug)]
pub(super) struct Far {
    pub(super) sender: SendRequest<Relayed>,
    pub(super) dialed: SocketAddr,
    pub(super) egress: SocketAddr,
    /// Whether it has carried a request before.
    pub(super) used: bool,
    pub(super) traffic: Arc<Traffic>,
    /// Counts what passes here.
    pub(super) meter: Meter,
    target: Target,
    policy: Arc<Compiled>,
    /// Whether a request asks for another protocol.
    switching: Arc<AtomicBool>,
    /// The connection, once it has switched, and what was read of it after the answer.
    switched: oneshot::Receiver<Handed>,
}

/// The connections of one guest's connection to far sides: one at a time.
#[derive(Debug, Default)]
pub(super) struct Relay {
    /// Between two requests.
    kept: Mutex<Option<Far>>,
    /// The task of the one dialled last, which has its socket.
    task: Mutex<Option<Task>>,
}

/// A task that has a socket.
#[derive(Debug)]
struct Task {
    reset: CancellationToken,
    /// Dropped when the guest is gone.
    _guest: DropGuard,
    over: JoinHandle<()>,
}

/// What that task has beside its socket.
struct Line {
    /// Registered until the socket is closed, or the tunnel's.
    flow: Arc<Flow>,
    reset: CancellationToken,
    /// The guest is.
    gone: CancellationToken,
    limits: Limits,
    gate: Arc<Gate>,
    traffic: Arc<Traffic>,
    queue: Queue,
    wanted: Arc<AtomicBool>,
    held: Held,
}

/// What a connection has for as long as its socket is open, and a little longer.
#[derive(Debug)]
pub(super) struct Held {
    /// Of the egress address.
    _port: Port,
    /// Of one that was dialled before there was a request.
    _account: Option<Account>,
}

/// A connection on its way from one task to another; reset when it does not get there.
#[derive(Debug)]
struct Handed(Option<(TcpStream, Bytes, Held)>);

/// A look at what is queued, again and again, as long as it becomes less.
struct Queue {
    ours: SocketAddr,
    far: SocketAddr,
    last: Option<u32>,
    since: Instant,
    pause: Duration,
}

/// The account of an exchange, which gets its bytes when it ends: with its last body, because a far
/// side may answer long before it has the whole request. After that the connection rests.
#[derive(Debug)]
pub(super) struct Ending {
    /// What the far side answered.
    pub(super) status: OnceLock<StatusCode>,
    /// How it ended, where that is more than that it did.
    pub(super) detail: OnceLock<&'static str>,
    account: Account,
    judged: Arc<Judged>,
    traffic: Arc<Traffic>,
    before: (u64, u64),
}

impl Far {
    /// What this far side has seen of us, if no record of an earlier request says so.
    pub(super) fn untold(&self) -> Option<Attempt> {
        let Self { egress, dialed: remote, used, .. } = *self;
        (!used).then_some(Attempt { egress, remote })
    }
}

impl Relay {
    /// Returns once nothing can leave any more of what was sent before: the far side has it, or its
    /// connection is reset, because it takes nothing or does not work any more.
    pub(super) async fn settle(&self, patience: Duration) {
        let kept = lock(&self.kept).take();
        if let Some(mut far) = kept
            && far.rest(patience.min(STUCK)).await
        {
            self.keep(far);
            return;
        }
        self.reset().await;
    }

    /// The kept connection, if it leads to what was let through, under the policy that let it
    /// through; otherwise it is reset. To be called after [`Relay::settle`], so that nothing is lost by
    /// that. An end of ours would keep the port for a minute (TIME-WAIT, RFC 9293, section 3.3.2), and
    /// all sandboxes share the ports of an egress address.
    pub(super) async fn take(&self, passed: &Passed) -> Option<Far> {
        let mut far = lock(&self.kept).take()?;
        if far.target == *passed.permit.target() && Arc::ptr_eq(&far.policy, &passed.policy) {
            far.used = true;
            return Some(far);
        }
        // Before it is dropped, which would end it.
        self.reset().await;
        None
    }

    async fn reset(&self) {
        let task = lock(&self.task).take();
        if let Some(task) = task {
            task.reset.cancel();
            task.end().await;
        }
    }

    /// Keeps a connection for the next request.
    pub(super) fn keep(&self, far: Far) {
        *lock(&self.kept) = Some(far);
    }

    /// Returns once the last connection is closed, which it is when all that was sent has been taken.
    pub(super) async fn finish(&self) {
        drop(lock(&self.kept).take());
        let task = lock(&self.task).take();
        if let Some(task) = task {
            task.end().await;
        }
    }

    /// Speaks HTTP on a connection, whose own account, if it has one, is open until it ends; it is reset
    /// when the guest's is cut.
    pub(super) async fn over(
        &self,
        dialed: Dialed,
        account: Option<Account>,
        passed: &Passed,
        guest: &Guest,
        flow: &Arc<Flow>,
    ) -> io::Result<Far> {
        let meter = guest.meter.towards(&passed.judged.place(dialed.remote));
        let wire = Wire::metered(dialed.stream, meter.clone());
        let traffic = wire.traffic();
        let most = buffers::heap(flow.rank());
        let (sender, connection) = http1::Builder::new()
            .max_header_size(most)
            .max_buf_size(most + BESIDE)
            .handshake(TokioIo::new(wire))
            .await
            .map_err(io::Error::other)?;
        let (give, switched) = oneshot::channel();
        let switching = Arc::new(AtomicBool::new(false));
        let (reset, gone) = (CancellationToken::new(), CancellationToken::new());
        let line = Line {
            flow: Arc::clone(flow),
            reset: reset.clone(),
            gone: gone.clone(),
            limits: guest.limits,
            gate: Arc::clone(&guest.gate),
            traffic: Arc::clone(&traffic),
            queue: Queue::new(dialed.egress, dialed.remote),
            wanted: Arc::clone(&switching),
            held: Held { _port: dialed.port, _account: account },
        };
        let task = tokio::spawn(line.carry(connection, give));
        *lock(&self.task) = Some(Task { reset, _guest: gone.drop_guard(), over: task });
        Ok(Far {
            sender,
            dialed: dialed.remote,
            egress: dialed.egress,
            used: false,
            traffic,
            meter,
            target: passed.permit.target().clone(),
            policy: Arc::clone(&passed.policy),
            switching,
            switched,
        })
    }
}

impl Task {
    async fn end(self) {
        let Self { reset: _reset, _guest: guest, over } = self;
        drop(guest);
        // A panic has closed its socket, too.
        let _ = over.await;
    }
}

impl Line {
    /// Runs a connection to its end, and keeps its socket until the far side has all that was sent.
    async fn carry(
        mut self,
        mut connection: Connection<TokioIo<Wire<TcpStream>>, Relayed>,
        give: oneshot::Sender<Handed>,
    ) {
        let Limits { idle, half_closed, .. } = self.limits;
        let patience = idle.min(half_closed);
        let mut stop = pin!(async {
            tokio::select! {
                biased;
                _ = self.flow.cut() => {}
                () = self.reset.cancelled() => {}
            }
        });
        let whole = tokio::select! {
            biased;
            () = &mut stop => false,
            // A far side that takes no more may keep it from noticing that the guest is gone.
            () = self.traffic.quiet_for(idle, &self.gate) => false,
            () = async {
                self.gone.cancelled().await;
                self.traffic.quiet_for(patience, &self.gate).await;
            } => false,
            ended = &mut connection => ended.is_ok(),
        };
        let parts = connection.into_parts();
        let stream = parts.io.into_inner().into_stream();
        if whole && self.wanted.load(Relaxed) {
            // Fails only when nobody waits for it any more.
            let _ = give.send(Handed(Some((stream, parts.read_buf, self.held))));
        } else {
            if whole {
                // Our end, if it has not been sent yet. Fails on a connection that is gone.
                let _ = SockRef::from(&stream).shutdown(Shutdown::Write);
            }
            let taken = whole
                && tokio::select! {
                    biased;
                    () = &mut stop => false,
                    taken = self.queue.shrinks_to(1, patience) => taken,
                };
            if !taken {
                refuse::reset(stream);
            }
        }
        self.traffic.end();
    }
}

impl Queue {
    fn new(ours: SocketAddr, far: SocketAddr) -> Self {
        let [pause, _] = PAUSES;
        Self { ours, far, last: None, since: Instant::now(), pause }
    }

    /// Whether no more than this is queued.
    fn is_down_to(&mut self, most: u32) -> io::Result<bool> {
        let queued = unacknowledged(self.ours, self.far)?;
        if self.last != Some(queued) {
            (self.last, self.since) = (Some(queued), Instant::now());
        }
        Ok(queued <= most)
    }

    /// Whether it comes down to this; not, if the far side takes nothing for as long as that.
    async fn shrinks_to(&mut self, most: u32, patience: Duration) -> bool {
        loop {
            match self.is_down_to(most) {
                Ok(true) => return true,
                Ok(false) if self.since.elapsed() < patience => self.wait().await,
                Ok(false) | Err(_) => return false,
            }
        }
    }

    async fn wait(&mut self) {
        let [_, longest] = PAUSES;
        sleep(self.pause).await;
        self.pause = (self.pause * 2).min(longest);
    }
}

impl Drop for Handed {
    fn drop(&mut self) {
        if let Some((stream, _, held)) = self.0.take() {
            refuse::reset(stream);
            drop(held);
        }
    }
}

impl Far {
    /// Whether the last exchange is over and the far side has all that was sent; not, if it takes
    /// nothing for as long as `patience`, or is not ready for another though it has all.
    async fn rest(&mut self, patience: Duration) -> bool {
        let mut queue = Queue::new(self.egress, self.dialed);
        loop {
            // Ready first, and written, and then taken: each holds once it does.
            let ready = match timeout(READY, self.sender.ready()).await {
                Ok(Ok(())) => true,
                Ok(Err(_)) => return false,
                Err(_) => false,
            };
            let written = self.traffic.is_written();
            match queue.is_down_to(0) {
                Ok(true) if written => return ready,
                Ok(_) if queue.since.elapsed() < patience => queue.wait().await,
                Ok(_) | Err(_) => return false,
            }
        }
    }

    /// Whether the next request asks for another protocol: the connection is handed over then, if
    /// it ends by the answer.
    pub(super) fn may_switch(&self, may: bool) {
        self.switching.store(may, Relaxed);
    }

    /// The connection after the answer that it is no longer HTTP's. None when it was lost.
    pub(super) async fn into_switched(self) -> Option<(TcpStream, Bytes, Held)> {
        let mut handed = self.switched.await.ok()?;
        handed.0.take()
    }

    /// A request as it is sent here.
    pub(super) fn request(
        &self,
        head: Parts,
        body: Incoming,
        ending: &Arc<Ending>,
    ) -> Request<Relayed> {
        let mut request = Request::from_parts(head, Relayed::request(body, ending));
        let (traffic, seen) = (Arc::clone(&self.traffic), AtomicUsize::new(0));
        on_informational(&mut request, move |_| {
            if seen.fetch_add(1, Relaxed) == INTERIM {
                traffic.stop();
            }
        });
        request
    }
}

impl Ending {
    /// Of an exchange on this connection that begins now.
    pub(super) fn new(far: &Far, account: Account, passed: &Passed) -> Arc<Self> {
        Arc::new(Self {
            status: OnceLock::new(),
            detail: OnceLock::new(),
            account,
            judged: Arc::clone(&passed.judged),
            traffic: Arc::clone(&far.traffic),
            before: far.traffic.totals(),
        })
    }

    /// Adds what a tunnel carried that came of it.
    pub(super) fn tunnelled(&self, ended: Ended) {
        self.traffic.add(ended.bytes_in, ended.bytes_out);
        if let Some(detail) = ended.why.detail() {
            // Set once: there is one tunnel to an exchange.
            let _ = self.detail.set(detail);
        }
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        let (read, written) = self.traffic.totals();
        self.account.record.detail = self.detail.get().map(|&detail| detail.to_owned());
        self.account.record.status = self.status.get().map(StatusCode::as_u16);
        self.account.record.bytes_in = Some(read - self.before.0);
        self.account.record.bytes_out = Some(written - self.before.1);
        self.account.flow().rest(&self.judged);
    }
}

/// Never held over an await; its values are whole at every step.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
