//! The clock by which hyper waits for a guest: it stands while the guest sleeps.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use hyper::rt::{Sleep, Timer};

use crate::side::Gate;

/// Waits that begin anew when the guest wakes.
#[derive(Clone, Debug)]
pub(super) struct AwakeTimer(pub(super) Arc<Gate>);

struct Wait(Pin<Box<dyn Future<Output = ()> + Send + Sync>>);

impl Timer for AwakeTimer {
    fn sleep(&self, duration: Duration) -> Pin<Box<dyn Sleep>> {
        let gate = Arc::clone(&self.0);
        let begun = tokio::time::Instant::now();
        Box::pin(Wait(Box::pin(async move { gate.quiet(duration, || begun).await })))
    }

    fn sleep_until(&self, deadline: Instant) -> Pin<Box<dyn Sleep>> {
        self.sleep(deadline.saturating_duration_since(self.now()))
    }

    fn now(&self) -> Instant {
        tokio::time::Instant::now().into_std()
    }
}

impl Future for Wait {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.0.as_mut().poll(cx)
    }
}

impl Sleep for Wait {}
