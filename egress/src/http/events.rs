//! An answer that is an event stream: its comments keep nobody busy and wake nobody.
//!
//! Every byte of it passes, in order. While the guest sleeps comments wait, up to a bound, for what is meant.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use hyper::body::Frame;

use crate::http::wire::Traffic;
use crate::keepalive::Events;
use crate::meter::Meter;
use crate::side::Gate;

/// Bytes of comments that wait for a guest that sleeps.
const KEPT: usize = 64 * 1024;

/// What is known of such an answer.
#[derive(Debug)]
pub(super) struct EventStream {
    events: Events,
    kept: BytesMut,
    /// What the body goes on with behind that: trailers, or its end.
    then: Option<Option<Frame<Bytes>>>,
    meter: Meter,
    gate: Arc<Gate>,
    traffic: Arc<Traffic>,
}

impl EventStream {
    /// Of an answer with this head, if it is one that can be read.
    pub(super) fn of(
        fields: &HeaderMap,
        meter: &Meter,
        gate: &Arc<Gate>,
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
            kept: BytesMut::new(),
            then: None,
            meter: meter.clone(),
            gate: Arc::clone(gate),
            traffic: Arc::clone(traffic),
        })
    }

    /// What the body's next frame, or its end, means for the guest: that is passed on to it now, or nothing.
    pub(super) fn pass(&mut self, frame: Option<Frame<Bytes>>) -> Option<Option<Frame<Bytes>>> {
        let frame = match frame.map(Frame::into_data) {
            Some(Ok(data)) => return self.take(data).map(|data| Some(Frame::data(data))),
            Some(Err(other)) => Some(other),
            None => None,
        };
        match self.rest() {
            None => Some(frame),
            Some(data) => {
                self.then = Some(frame);
                Some(Some(Frame::data(data)))
            }
        }
    }

    /// What was to come behind what waited.
    pub(super) fn then(&mut self) -> Option<Option<Frame<Bytes>>> {
        self.then.take()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.kept.is_empty() && self.then.is_none()
    }

    /// Takes the next bytes; gives what is to go to the guest now, if anything is.
    fn take(&mut self, bytes: Bytes) -> Option<Bytes> {
        let meant = self.events.feed(&bytes);
        if meant {
            self.meter.touch();
        }
        let waits = !meant && !self.gate.is_delivering();
        if self.kept.is_empty() && !waits {
            return Some(bytes);
        }
        self.kept.extend_from_slice(&bytes);
        if waits && self.kept.len() <= KEPT {
            return None;
        }
        self.rest()
    }

    fn rest(&mut self) -> Option<Bytes> {
        let kept = std::mem::take(&mut self.kept);
        (!kept.is_empty()).then(|| kept.freeze())
    }
}

impl Drop for EventStream {
    fn drop(&mut self) {
        self.traffic.look_at(false);
    }
}
