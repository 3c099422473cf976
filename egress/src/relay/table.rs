//! The sessions of one slot, and which of them makes room for another: the one that has been silent
//! longest, if it has been silent for a while. A session in use is never taken for a new one.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::relay::Key;
use crate::relay::session::Session;

/// A session that spoke within this time keeps its place.
const IN_USE: Duration = Duration::from_secs(2);

/// The sessions of one slot, never more than the cap.
#[derive(Debug)]
pub(crate) struct Table {
    cap: usize,
    open: HashMap<Key, Arc<Session>>,
    /// Before this nothing can make room, so nobody needs to look for it.
    busy_until: Option<Instant>,
}

impl Table {
    pub(crate) fn new(cap: usize) -> Self {
        Self { cap, open: HashMap::new(), busy_until: None }
    }

    pub(crate) fn find(&self, key: Key) -> Option<Arc<Session>> {
        self.open.get(&key).cloned()
    }

    /// Makes room for one more; false where every session is in use.
    pub(crate) fn make_room(&mut self, now: Instant) -> bool {
        if self.open.len() < self.cap {
            return true;
        }
        if self.busy_until.is_some_and(|until| now < until) {
            return false;
        }
        let oldest = self.open.iter().min_by_key(|(_, session)| session.last());
        let Some((&key, last)) = oldest.map(|(key, session)| (key, session.last())) else {
            return false;
        };
        if now.saturating_duration_since(last) < IN_USE {
            self.busy_until = Some(last + IN_USE);
            return false;
        }
        if let Some(session) = self.open.remove(&key) {
            session.evict();
        }
        true
    }

    pub(crate) fn insert(&mut self, key: Key, session: &Arc<Session>) {
        self.open.insert(key, Arc::clone(session));
    }

    /// Forgets a session that has ended, unless its place was taken already.
    pub(crate) fn remove(&mut self, key: Key, session: &Arc<Session>) {
        if self.open.get(&key).is_some_and(|held| Arc::ptr_eq(held, session)) {
            self.open.remove(&key);
            self.busy_until = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddrV4};

    use tokio::net::UdpSocket;
    use tokio::time::advance;

    use super::*;
    use crate::flows::Flows;
    use crate::meter::Meter;
    use crate::ports::Ports;

    async fn session(flows: &Arc<Flows>) -> Arc<Session> {
        let near = UdpSocket::bind("127.0.0.1:0").await.expect("a socket");
        let far = UdpSocket::bind("127.0.0.1:0").await.expect("a socket");
        far.connect(near.local_addr().expect("bound")).await.expect("connected");
        let flow = flows.register().expect("room");
        let ports = Ports::new(1);
        let slot = policy::Slot::new(1).expect("in range");
        let port = ports.take(slot, Ipv4Addr::LOCALHOST.into(), None).expect("free");
        Arc::new(Session::new((near, far), port, Arc::new(flow), Meter::new()))
    }

    fn key(source: u16) -> Key {
        Key { source, to: SocketAddrV4::new(Ipv4Addr::new(192, 0, 2, 1), 3478) }
    }

    #[tokio::test(start_paused = true)]
    async fn the_one_that_was_silent_longest_makes_room_and_none_that_is_in_use() {
        let mut table = Table::new(2);
        let flows = Flows::new(8, Meter::new());
        let sessions = [session(&flows).await, session(&flows).await, session(&flows).await];
        for (n, session) in (1..=2).zip(&sessions) {
            assert!(table.make_room(Instant::now()));
            table.insert(key(n), session);
        }
        assert!(!table.make_room(Instant::now()), "both are new");
        advance(Duration::from_millis(1900)).await;
        sessions[0].send(b"x");
        assert!(!table.make_room(Instant::now()), "the other was new just now");
        advance(Duration::from_millis(200)).await;
        assert!(table.make_room(Instant::now()));
        assert!(table.find(key(1)).is_some() && table.find(key(2)).is_none());
        assert!(sessions[1].is_evicted() && !sessions[0].is_evicted());
        sessions[2].send(b"x");
        table.insert(key(2), &sessions[2]);
        table.remove(key(2), &sessions[1]);
        assert!(table.find(key(2)).is_some(), "the place is another's by now");
        assert!(!table.make_room(Instant::now()));
        table.remove(key(1), &sessions[0]);
        assert!(table.make_room(Instant::now()));
    }
}
