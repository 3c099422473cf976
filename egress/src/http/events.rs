//! An answer that is an event stream: its comments keep nobody busy and wake nobody.
//!
//! Every byte of it passes, in order. While the guest sleeps comments wait, as far as its share has room; what
//! has none goes on to the guest as what is meant does, and wakes it.

use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::HeaderMap;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use hyper::body::Frame;
use tokio_util::sync::ReusableBoxFuture;

use crate::http::wire::Traffic;
use crate::keepalive::Events;
use crate::meter::Meter;
use crate::side::Kept;

/// What is known of such an answer.
#[derive(Debug)]
pub(super) struct EventStream {
    events: Events,
    kept: Kept,
    /// Something of it is on its way to the guest, which does not take it now: what follows goes behind it,
    /// and the far side is read no further than that has room.
    passed: bool,
    /// What the body goes on with behind what waited: more of it, trailers, or its end.
    then: Option<Option<Frame<Bytes>>>,
    /// The guest's next morning.
    morning: Option<ReusableBoxFuture<'static, ()>>,
    meter: Meter,
    traffic: Arc<Traffic>,
}

impl EventStream {
    /// Of an answer with this head, if it is one that can be read.
    pub(super) fn of(
        fields: &HeaderMap,
        meter: &Meter,
        kept: Kept,
        traffic: &Arc<Traffic>,
    ) -> Option<Self> {
        let kind = fields.get(CONTENT_TYPE)?.to_str().ok()?;
        let kind = kind.split(';').next().unwrap_or_default().trim();
        if !kind.eq_ignore_ascii_case("text/event-stream") || fields.contains_key(CONTENT_ENCODING)
        {
            return None;
        }
        traffic.look_at(true);
        Some(Self {
            events: Events::new(),
            kept,
            passed: false,
            then: None,
            morning: None,
            meter: meter.clone(),
            traffic: Arc::clone(traffic),
        })
    }

    /// What is to go to the guest before anything more is read.
    pub(super) fn due(&mut self) -> Option<Option<Frame<Bytes>>> {
        if let Some(then) = self.then.take() {
            return Some(then);
        }
        let waited = if self.kept.gate().is_delivering() { self.waited() } else { None };
        waited.map(|data| Some(Frame::data(data)))
    }

    /// Ready once the guest is awake, and may be given what waits.
    pub(super) fn poll_morning(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.kept.is_empty() && !self.passed {
            return Poll::Pending;
        }
        let gate = self.kept.gate();
        let morning = self.morning.get_or_insert_with(|| {
            let gate = Arc::clone(gate);
            ReusableBoxFuture::new(async move {
                gate.awake().await;
            })
        });
        ready!(morning.poll(cx));
        self.morning = None;
        self.passed = false;
        Poll::Ready(())
    }

    /// What the body's next frame, or its end, means for the guest: that is passed on to it now, or nothing.
    pub(super) fn pass(&mut self, frame: Option<Frame<Bytes>>) -> Option<Option<Frame<Bytes>>> {
        let frame = match frame.map(Frame::into_data) {
            Some(Ok(data)) if self.waits(&data) => return None,
            Some(Ok(data)) => Some(Frame::data(data)),
            Some(Err(other)) => Some(other),
            None => None,
        };
        match self.waited() {
            None => Some(frame),
            Some(data) => {
                self.then = Some(frame);
                Some(Some(Frame::data(data)))
            }
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.kept.is_empty() && self.then.is_none()
    }

    /// Whether these wait, as they only keep it open, and there is room.
    fn waits(&mut self, bytes: &[u8]) -> bool {
        let meant = self.events.feed(bytes);
        if meant {
            self.meter.touch();
        }
        let delivering = self.kept.gate().is_delivering();
        self.passed &= !delivering;
        let waits = !meant && !delivering && !self.passed && self.kept.push(bytes);
        self.passed |= !delivering && !waits;
        waits
    }

    fn waited(&mut self) -> Option<Bytes> {
        (!self.kept.is_empty()).then(|| self.kept.take().into())
    }
}

impl Drop for EventStream {
    fn drop(&mut self) {
        self.traffic.look_at(false);
    }
}
