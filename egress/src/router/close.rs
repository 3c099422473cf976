//! The end of the router while its guests go on: every connection is cut, so that what it came to is
//! recorded. Takes no fence and no tap away: they shut the guests in until the next daemon comes.

use std::sync::Arc;

use tokio::time::timeout;

use crate::guest::Guest;
use crate::router::{DRAIN, Router};

impl Router {
    /// Takes no more connections and cuts those that are open. Returns once each has had its last
    /// record, or after two seconds.
    pub async fn close(&self) {
        let guests: Vec<Arc<Guest>> = {
            let mut seats = self.shared.seats();
            let each = seats.values_mut().map(|seat| {
                seat.listening.abort_all();
                seat.guest.flows.shut();
                Arc::clone(&seat.guest)
            });
            each.collect()
        };
        let gone = async {
            for guest in &guests {
                guest.flows.empty().await;
            }
        };
        if timeout(DRAIN, gone).await.is_err() {
            tracing::warn!("connections outlive the router: their last records are missing");
        }
    }
}
