//! The bodies of an exchange on their way: they keep its account open until they are over, and an answer may
//! be an event stream. Never holds more of one than a frame, and of a stream what waits for a sleeping guest.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::HeaderMap;
use hyper::body::{Body, Frame, Incoming, SizeHint};

use crate::http::events::EventStream;
use crate::http::relay::Ending;
use crate::meter::Meter;
use crate::side::Kept;

/// A body of an exchange, on its way.
#[derive(Debug)]
pub(in crate::http) struct Relayed {
    body: Incoming,
    events: Option<Box<EventStream>>,
    hold: Hold,
}

/// What keeps an exchange from being over.
#[derive(Debug)]
struct Hold {
    ending: Arc<Ending>,
    /// Whether it is the request's, which is over when hyper has written it.
    out: bool,
}

impl Relayed {
    /// Of a request, of which more is under way than hyper has written.
    pub(in crate::http) fn request(body: Incoming, ending: &Arc<Ending>) -> Self {
        Self { body, events: None, hold: Hold { ending: Arc::clone(ending), out: true } }
    }

    /// An answer with this head, which may be an event stream; what waits of one then is kept there.
    pub(in crate::http) fn answer(
        fields: &HeaderMap,
        body: Incoming,
        ending: &Arc<Ending>,
        meter: &Meter,
        kept: Kept,
    ) -> Self {
        let events = EventStream::of(fields, meter, kept, &ending.traffic).map(Box::new);
        Self { body, events, hold: Hold { ending: Arc::clone(ending), out: false } }
    }

    /// The body, which is no longer one of its exchange.
    pub(in crate::http) fn into_body(self) -> Incoming {
        self.body
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if self.out {
            let ending = Arc::clone(&self.ending);
            self.ending.traffic.keep_until_written(ending);
        }
    }
}

impl Body for Relayed {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let this = &mut *self;
        let polled = loop {
            if let Some(due) = this.events.as_mut().and_then(|events| events.due()) {
                break Poll::Ready(due.map(Ok));
            }
            let polled = Pin::new(&mut this.body).poll_frame(cx);
            let Some(events) = &mut this.events else { break polled };
            let frame = match polled {
                Poll::Ready(Some(Ok(frame))) => Some(frame),
                Poll::Ready(None) => None,
                Poll::Pending if events.poll_morning(cx).is_ready() => continue,
                polled => break polled,
            };
            if let Some(passed) = events.pass(frame) {
                break Poll::Ready(passed.map(Ok));
            }
        };
        if self.hold.out && polled.is_ready() {
            self.hold.ending.traffic.owe();
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream() && self.events.as_ref().is_none_or(|events| events.is_empty())
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
