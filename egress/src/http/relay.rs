//! The far side of an HTTP connection: one connection to it, kept for the next request to the same
//! name, and the bodies of an exchange, which is recorded as ended when both are.

use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{Request, StatusCode};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::client::conn::http1::{self, SendRequest};
use hyper::ext::on_informational;
use hyper_util::rt::TokioIo;
use policy::Compiled;
use policy::judge::Target;
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::account::Account;
use crate::dial::Dialed;
use crate::flows::{Flow, Judged};
use crate::guest::{Guest, Passed};
use crate::http::wire::{Traffic, Wire};
use crate::http::{BUFFER, HEAD_BYTES};
use crate::refuse;
use crate::tunnel::Ended;

/// How long a kept connection may take to be ready for the next request.
const READY: Duration = Duration::from_millis(50);
/// Interim responses (RFC 9110, section 15.2) that may come before the final one. They are not passed
/// on, and reading them without end would leave no time for anybody else.
const INTERIM: usize = 100;

/// A connection to a far side.
#[derive(Debug)]
pub(super) struct Far {
    pub(super) sender: SendRequest<Relayed>,
    pub(super) dialed: std::net::SocketAddr,
    pub(super) egress: std::net::SocketAddr,
    /// Whether it has carried a request before.
    pub(super) used: bool,
    pub(super) traffic: Arc<Traffic>,
    target: Target,
    policy: Arc<Compiled>,
    /// Whether a request asks for another protocol.
    switching: Arc<AtomicBool>,
    /// The connection, once it has switched, and what was read of it after the answer.
    switched: oneshot::Receiver<(TcpStream, Bytes)>,
}

/// The connection that is kept between two requests.
#[derive(Debug, Default)]
pub(super) struct Relay {
    kept: Mutex<Option<Far>>,
}

/// A body of an exchange, on its way.
#[derive(Debug)]
pub(super) struct Relayed {
    body: Incoming,
    _ending: Arc<Ending>,
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

impl Relay {
    /// The kept connection, if it leads to what was let through, under the policy that let it
    /// through, and still works.
    pub(super) async fn take(&self, passed: &Passed) -> Option<Far> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut far = kept.filter(|far| {
            far.target == *passed.permit.target() && Arc::ptr_eq(&far.policy, &passed.policy)
        })?;
        far.used = true;
        matches!(timeout(READY, far.sender.ready()).await, Ok(Ok(()))).then_some(far)
    }

    /// Keeps a connection for the next request.
    pub(super) fn keep(&self, far: Far) {
        *self.kept.lock().unwrap_or_else(PoisonError::into_inner) = Some(far);
    }
}

impl Far {
    /// Speaks HTTP on a connection; it is reset when the guest's is cut.
    pub(super) async fn over(
        dialed: Dialed,
        passed: &Passed,
        guest: &Guest,
        flow: &Flow,
    ) -> io::Result<Self> {
        let wire = Wire::metered(dialed.stream, guest.meter.clone());
        let traffic = wire.traffic();
        let (sender, mut connection) = http1::Builder::new()
            .max_header_size(HEAD_BYTES)
            .max_buf_size(BUFFER)
            .handshake(TokioIo::new(wire))
            .await
            .map_err(io::Error::other)?;
        let (held, idle, quiet) = (flow.hold(), guest.limits.idle, Arc::clone(&traffic));
        let (give, switched) = oneshot::channel();
        let switching = Arc::new(AtomicBool::new(false));
        let wanted = Arc::clone(&switching);
        tokio::spawn(async move {
            let cut = tokio::select! {
                biased;
                () = held.cut() => true,
                // A far side that takes no more may keep it from noticing that the guest is gone.
                () = quiet.quiet_for(idle) => true,
                _ = &mut connection => false,
            };
            let parts = connection.into_parts();
            let stream = parts.io.into_inner().into_stream();
            if cut {
                refuse::reset(stream);
            } else if wanted.load(Relaxed) {
                // Fails only when nobody waits for it any more.
                let _ = give.send((stream, parts.read_buf));
            }
        });
        Ok(Self {
            sender,
            dialed: dialed.remote,
            egress: dialed.egress,
            used: false,
            traffic,
            target: passed.permit.target().clone(),
            policy: Arc::clone(&passed.policy),
            switching,
            switched,
        })
    }

    /// Whether the next request asks for another protocol: the connection is handed over then, if
    /// it ends by the answer.
    pub(super) fn may_switch(&self, may: bool) {
        self.switching.store(may, Relaxed);
    }

    /// The connection after the answer that it is no longer HTTP's. None when it was lost.
    pub(super) async fn into_switched(self) -> Option<(TcpStream, Bytes)> {
        self.switched.await.ok()
    }

    /// A request as it is sent here.
    pub(super) fn request(
        &self,
        head: Parts,
        body: Incoming,
        ending: &Arc<Ending>,
    ) -> Request<Relayed> {
        let mut request = Request::from_parts(head, Relayed::new(body, ending));
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

impl Relayed {
    pub(super) fn new(body: Incoming, ending: &Arc<Ending>) -> Self {
        Self { body, _ending: Arc::clone(ending) }
    }

    /// The body, which is no longer one of its exchange.
    pub(super) fn into_body(self) -> Incoming {
        self.body
    }
}

impl Body for Relayed {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
