//! What a sandbox was told: which names stand for an address. A pin says what the guest meant when
//! it dials an address; it is never a permission, and never where we dial.
//!
//! A name without an IPv4 address gets one here that means it to this sandbox and nothing to anybody
//! else, for as long as the pin is kept.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Mutex, MutexGuard, PoisonError};

use policy::Host;
use policy::net::SYNTHETIC;

/// Names kept of one address; the oldest is forgotten first.
const MAX_NAMES: usize = 8;

/// The pins of one sandbox. They never expire by time: a guest may keep an address as long as it
/// likes. Beyond the capacity the address used least recently is forgotten.
#[derive(Debug)]
pub struct Pins {
    capacity: usize,
    told: Mutex<Told>,
}

#[derive(Debug, Default)]
struct Told {
    pins: HashMap<IpAddr, Pin>,
    /// Addresses by when they were last used; as many as there are pins.
    by_use: BTreeMap<u64, IpAddr>,
    uses: u64,
    /// The addresses that stand for names; each is pinned.
    standing: HashMap<Host, Ipv4Addr>,
}

#[derive(Debug, Default)]
struct Pin {
    used: u64,
    /// Most recently told first.
    names: Vec<Host>,
}

impl Pins {
    /// No pins yet; at most `capacity` addresses, at least one and at most 32768.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self { capacity: capacity.clamp(1, 1 << 15), told: Mutex::default() }
    }

    /// Remembers that the sandbox was told `address` for `host`.
    pub fn pin(&self, address: IpAddr, host: &Host) {
        let mut told = self.told();
        let names = &mut told.touch(address.to_canonical()).names;
        names.retain(|name| name != host);
        names.insert(0, host.clone());
        names.truncate(MAX_NAMES);
        told.fit(self.capacity);
    }

    /// An address of [`SYNTHETIC`] that stands for this name alone, pinned to it: the same as long as
    /// it is remembered, and most likely after that, whoever remembers.
    #[must_use]
    pub fn standing_for(&self, host: &Host) -> Ipv4Addr {
        let mut told = self.told();
        if let Some(&address) = told.standing.get(host) {
            told.touch(address.into());
            return address;
        }
        let mut digest = DefaultHasher::new();
        host.hash(&mut digest);
        // Fewer are ever taken than there are, so that one is found; network and broadcast are none.
        let hosts = u64::from(u32::MAX >> SYNTHETIC.prefix_len()) - 1;
        let mut at = digest.finish() % hosts;
        let address = loop {
            let offset = u32::try_from(at + 1).unwrap_or(1);
            let address = Ipv4Addr::from_bits(SYNTHETIC.addr().to_bits() | offset);
            if !told.pins.contains_key(&address.into()) {
                break address;
            }
            at = (at + 1) % hosts;
        };
        told.touch(address.into()).names = vec![host.clone()];
        told.standing.insert(host.clone(), address);
        told.fit(self.capacity);
        address
    }

    /// The names the sandbox was told `address` for, the most recent first. Counts as a use.
    #[must_use]
    pub fn names(&self, address: IpAddr) -> Vec<Host> {
        let (mut told, address) = (self.told(), address.to_canonical());
        if !told.pins.contains_key(&address) {
            return Vec::new();
        }
        told.touch(address).names.clone()
    }

    fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Told {
    /// Forgets the pin used least recently when there are more than `capacity`.
    fn fit(&mut self, capacity: usize) {
        if self.pins.len() > capacity
            && let Some((_, oldest)) = self.by_use.pop_first()
            && let Some(pin) = self.pins.remove(&oldest)
        {
            let stood = |name: &Host| self.standing.get(name).is_some_and(|ip| oldest == *ip);
            if let Some(name) = pin.names.into_iter().find(stood) {
                self.standing.remove(&name);
            }
        }
    }

    /// The pin of this address, made if need be, as the one used most recently.
    fn touch(&mut self, address: IpAddr) -> &mut Pin {
        self.uses += 1;
        let pin = self.pins.entry(address).or_default();
        self.by_use.remove(&pin.used);
        pin.used = self.uses;
        self.by_use.insert(pin.used, address);
        pin
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use proptest::prelude::*;

    use super::*;

    fn host(n: u8) -> Host {
        Host::parse(&format!("n{n}.example.com")).expect("host")
    }
    fn address(n: u8) -> IpAddr {
        Ipv4Addr::new(192, 0, 2, n).into()
    }

    #[test]
    fn the_name_told_last_comes_first_and_names_are_capped() {
        let pins = Pins::new(4);
        for n in 0..20 {
            pins.pin(address(1), &host(n));
        }
        pins.pin(address(1), &host(15));
        let names = pins.names(address(1));
        assert_eq!(names.len(), MAX_NAMES);
        assert_eq!(names[..3], [host(15), host(19), host(18)]);
    }

    #[test]
    fn an_address_in_use_outlives_newer_ones() {
        let pins = Pins::new(2);
        pins.pin(address(1), &host(1));
        pins.pin(address(2), &host(2));
        assert_eq!(pins.names(address(1)), [host(1)]);
        pins.pin(address(3), &host(3));
        assert_eq!(pins.names(address(1)), [host(1)]);
        assert_eq!(pins.names(address(2)), []);
    }

    #[test]
    fn a_mapped_address_is_the_address_it_maps() {
        let pins = Pins::new(2);
        pins.pin("::ffff:192.0.2.1".parse().expect("address"), &host(1));
        assert_eq!(pins.names(address(1)), [host(1)]);
    }

    #[test]
    fn an_address_stands_for_one_name_as_long_as_it_is_pinned() {
        let pins = Pins::new(3);
        let first = pins.standing_for(&host(1));
        assert!(SYNTHETIC.contains(&first));
        let second = pins.standing_for(&host(2));
        assert_ne!(first, second);
        assert_eq!(pins.standing_for(&host(1)), first);
        assert_eq!(pins.names(first.into()), [host(1)]);
        // A real address more does not take it away; being used least does.
        pins.pin(address(1), &host(3));
        assert_eq!(pins.names(first.into()), [host(1)]);
        pins.pin(address(2), &host(3));
        assert_eq!(pins.names(second.into()), []);
        assert_eq!(pins.told().standing.len(), 1);
        assert_eq!(pins.standing_for(&host(2)), second, "the same again, for whoever kept it");
    }

    #[test]
    fn addresses_that_stand_for_names_are_bounded_and_never_two_names_of_one() {
        let pins = Pins::new(500);
        for n in 0..5_000 {
            let name = Host::parse(&format!("n{n}.example.com")).expect("host");
            let address = pins.standing_for(&name);
            assert_eq!(pins.names(address.into()), [name]);
        }
        let told = pins.told();
        assert_eq!((told.pins.len(), told.standing.len(), told.by_use.len()), (500, 500, 500));
    }

    proptest! {
        #[test]
        fn pins_are_an_exact_bounded_lru(
            capacity in 1..6_usize,
            steps in prop::collection::vec((any::<bool>(), 0..10_u8, 0..4_u8), 0..200),
        ) {
            let pins = Pins::new(capacity);
            let mut model: Vec<(u8, Vec<Host>)> = Vec::new();
            for (write, n, name) in steps {
                let known = model.iter().position(|(address, _)| *address == n).map(|at| model.remove(at).1);
                if write {
                    pins.pin(address(n), &host(name));
                    let mut names = known.unwrap_or_default();
                    names.retain(|known| *known != host(name));
                    names.insert(0, host(name));
                    model.insert(0, (n, names));
                    model.truncate(capacity);
                } else {
                    prop_assert_eq!(pins.names(address(n)), known.clone().unwrap_or_default());
                    if let Some(names) = known { model.insert(0, (n, names)); }
                }
                let told = pins.told();
                prop_assert_eq!(told.pins.len(), model.len());
                prop_assert_eq!(told.by_use.len(), model.len());
            }
        }
    }
}
