//! Callers over TCP of whom it is not known yet who they are: few from one address and none for long,
//! so that they keep no place from those who may ask.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// From accept to the head of a request that is let in.
pub(crate) const PATIENCE: Duration = Duration::from_secs(3);
/// The part of a listener's places that those from one address may take.
pub(crate) const PART: usize = 4;

/// How many there are of each address, or IPv6 network of 64 bits. Clones count together.
#[derive(Clone, Debug)]
pub(crate) struct Strangers {
    most: usize,
    from: Arc<Mutex<HashMap<IpAddr, usize>>>,
}

/// One of them, counted until it is known or gone.
#[derive(Debug)]
pub(crate) struct Stranger {
    among: Strangers,
    from: IpAddr,
    known: AtomicBool,
}

impl Strangers {
    /// None yet, among so many places.
    pub(crate) fn among(places: usize) -> Self {
        Self { most: places.div_ceil(PART), from: Arc::default() }
    }

    /// One more; none if there are too many of its address.
    pub(crate) fn admit(&self, address: IpAddr) -> Option<Stranger> {
        let from = network(address);
        let mut all = self.all();
        let count = all.entry(from).or_default();
        (*count < self.most).then(|| {
            *count += 1;
            Stranger { among: self.clone(), from, known: AtomicBool::new(false) }
        })
    }

    fn all(&self) -> MutexGuard<'_, HashMap<IpAddr, usize>> {
        self.from.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Stranger {
    /// It is none any more.
    pub(crate) fn known(&self) {
        if self.known.swap(true, Ordering::AcqRel) {
            return;
        }
        let mut all = self.among.all();
        if let Some(count) = all.get_mut(&self.from) {
            *count -= 1;
            if *count == 0 {
                all.remove(&self.from);
            }
        }
    }

    /// Ends when it has been one for too long.
    pub(crate) async fn overdue(&self) {
        tokio::time::sleep(PATIENCE).await;
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

    #[test]
    fn those_of_one_address_take_their_part_until_they_are_known_or_gone() {
        let strangers = Strangers::among(8);
        let admit = |text: &str| strangers.admit(text.parse().expect("an address"));
        let (one, two) = (admit("192.0.2.1").expect("one"), admit("192.0.2.1").expect("two"));
        assert!(admit("192.0.2.1").is_none() && admit("::ffff:192.0.2.1").is_none());
        assert!(admit("192.0.2.2").is_some());
        let six = [admit("2001:db8::1"), admit("2001:db8::2:1")];
        assert!(admit("2001:db8::ffff:0:0:1").is_none(), "of the same network");
        assert!(admit("2001:db8:0:1::1").is_some());
        one.known();
        let three = admit("192.0.2.1").expect("one is known");
        drop(one);
        assert!(admit("192.0.2.1").is_none(), "counted once");
        drop((two, three, six));
        assert!(strangers.all().is_empty());
        assert!(Strangers::among(1).admit("192.0.2.1".parse().expect("an address")).is_some());
    }
}
