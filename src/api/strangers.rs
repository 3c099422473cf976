//! Callers over TCP of whom it is not known yet who they are: few from one address and none for long,
//! so that they keep no place from those who may ask. One more takes the place of the one that has
//! kept it longest without saying anything whole; it must never take that of one who is known.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio_util::sync::CancellationToken;

/// From accept to the head of a request that is let in.
pub(crate) const PATIENCE: Duration = Duration::from_secs(3);
/// The part of a listener's places that those from one address may take.
pub(crate) const PART: usize = 4;

/// Those there are, by age. Clones count together.
#[derive(Clone, Debug)]
pub(crate) struct Strangers {
    most: usize,
    all: Arc<Mutex<Door>>,
}

#[derive(Debug, Default)]
struct Door {
    next: u64,
    waiting: BTreeMap<u64, Waiting>,
}

/// One of them, as the others see it.
#[derive(Debug)]
struct Waiting {
    from: IpAddr,
    /// Whether the head of a request of it was read whole.
    heard: bool,
    gone: CancellationToken,
}

/// One of them, counted until it is known or gone.
#[derive(Debug)]
pub(crate) struct Stranger {
    among: Strangers,
    number: u64,
    gone: CancellationToken,
    known: AtomicBool,
}

impl Strangers {
    /// None yet, among so many places.
    pub(crate) fn among(places: usize) -> Self {
        Self { most: places.div_ceil(PART), all: Arc::default() }
    }

    /// One more. Where there are too many of its address, the oldest of them that has said nothing whole
    /// goes; none if there is no such one.
    pub(crate) fn admit(&self, address: IpAddr) -> Option<Stranger> {
        let from = network(address);
        let mut door = self.door();
        let alike = door.waiting.values().filter(|one| one.from == from).count();
        if alike >= self.most && !door.evict(|one| one.from == from) {
            return None;
        }
        let (number, gone) = (door.next, CancellationToken::new());
        door.next += 1;
        door.waiting.insert(number, Waiting { from, heard: false, gone: gone.clone() });
        drop(door);
        Some(Stranger { among: self.clone(), number, gone, known: AtomicBool::new(false) })
    }

    /// Sends the oldest away that has said nothing whole, wherever it came from. False if there is none.
    pub(crate) fn evict(&self) -> bool {
        self.door().evict(|_| true)
    }

    fn door(&self) -> MutexGuard<'_, Door> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Door {
    fn evict(&mut self, may: impl Fn(&Waiting) -> bool) -> bool {
        let oldest = self.waiting.iter().find(|(_, one)| !one.heard && may(one));
        let Some(number) = oldest.map(|(number, _)| *number) else { return false };
        if let Some(one) = self.waiting.remove(&number) {
            one.gone.cancel();
        }
        true
    }
}

impl Stranger {
    /// A request's head of it was read: it is not in anybody's way any more.
    pub(crate) fn heard(&self) {
        if let Some(one) = self.among.door().waiting.get_mut(&self.number) {
            one.heard = true;
        }
    }

    /// It is none any more.
    pub(crate) fn known(&self) {
        if !self.known.swap(true, Ordering::AcqRel) {
            self.among.door().waiting.remove(&self.number);
        }
    }

    /// Ends when it has been one for too long, or another came in its place.
    pub(crate) async fn overdue(&self) {
        tokio::select! {
            () = self.gone.cancelled() => return,
            () = tokio::time::sleep(PATIENCE) => {}
        }
        if self.known.load(Ordering::Acquire) {
            std::future::pending().await
        }
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        self.known();
    }
}

/// Whoever has one IPv6 address has all of its network.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(v4) => v4.into(),
        IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() & !u128::from(u64::MAX)).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_gone(stranger: &Stranger) -> bool {
        stranger.gone.is_cancelled()
    }

    #[test]
    fn one_more_of_an_address_takes_the_place_of_the_oldest_that_said_nothing() {
        let strangers = Strangers::among(8);
        let admit = |text: &str| strangers.admit(text.parse().expect("an address"));
        let (one, two) = (admit("192.0.2.1").expect("one"), admit("192.0.2.1").expect("two"));
        let other = admit("192.0.2.2").expect("of another address");
        one.heard();
        let three = admit("::ffff:192.0.2.1").expect("in the place of the second");
        assert!(!is_gone(&one) && is_gone(&two) && !is_gone(&other));
        three.heard();
        assert!(admit("192.0.2.1").is_none(), "both have said something");
        one.known();
        let four = admit("192.0.2.1").expect("one is known");
        drop(one);
        four.heard();
        assert!(admit("192.0.2.1").is_none(), "counted once");
        let six = [admit("2001:db8::1"), admit("2001:db8::2:1"), admit("2001:db8::ffff:0:0:1")];
        assert!(six[0].as_ref().is_some_and(is_gone), "of the same network");
        assert!(strangers.evict() && is_gone(&other), "the oldest of all");
        drop((two, three, four, six, other));
        assert!(strangers.door().waiting.is_empty());
        assert!(!strangers.evict());
        assert!(Strangers::among(1).admit("192.0.2.1".parse().expect("an address")).is_some());
    }
}
