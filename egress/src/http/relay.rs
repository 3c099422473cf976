//! The far side of an HTTP connection: one connection to it, kept for the next request to the same
//! name, and a body that records how its exchange ended.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use policy::Compiled;
use policy::judge::Target;
use tokio::time::timeout;

use crate::account::Account;
use crate::dial::Dialed;
use crate::flows::Flow;
use crate::guest::{Guest, Passed};
use crate::http::HEAD_BYTES;
use crate::http::wire::{Traffic, Wire};
use crate::refuse;

/// How long a kept connection may take to be ready for the next request.
const READY: Duration = Duration::from_millis(50);

/// A connection to a far side.
#[derive(Debug)]
pub(super) struct Far {
    pub(super) sender: SendRequest<Incoming>,
    pub(super) dialed: std::net::SocketAddr,
    pub(super) egress: std::net::SocketAddr,
    /// Whether it has carried a request before.
    pub(super) used: bool,
    pub(super) traffic: Arc<Traffic>,
    target: Target,
    policy: Arc<Compiled>,
}

/// The connection that is kept between two requests.
#[derive(Debug, Default)]
pub(super) struct Relay {
    kept: Mutex<Option<Far>>,
}

/// The body of a response, on its way to the guest.
#[derive(Debug)]
pub(super) struct Relayed {
    body: Incoming,
    _ending: Ending,
}

/// The account of an exchange, which gets its bytes when it ends. Between two exchanges nothing of
/// the connection is let through.
#[derive(Debug)]
pub(super) struct Ending {
    pub(super) account: Account,
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
            .handshake(TokioIo::new(wire))
            .await
            .map_err(io::Error::other)?;
        let cut = flow.signal();
        tokio::spawn(async move {
            let cut = tokio::select! {
                biased;
                () = cut => true,
                _ = &mut connection => false,
            };
            if cut {
                refuse::reset(connection.into_parts().io.into_inner().into_stream());
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
        })
    }
}

impl Ending {
    /// Of an exchange on this connection that begins now.
    pub(super) fn new(far: &Far, account: Account) -> Self {
        Self { account, traffic: Arc::clone(&far.traffic), before: far.traffic.totals() }
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        let (read, written) = self.traffic.totals();
        self.account.record.bytes_in = Some(read - self.before.0);
        self.account.record.bytes_out = Some(written - self.before.1);
        self.account.flow().note(None);
    }
}

impl Relayed {
    pub(super) fn new(body: Incoming, ending: Ending) -> Self {
        Self { body, _ending: ending }
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
