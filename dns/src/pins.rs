//! What a sandbox was told: which names stand for an address. A pin says what the guest meant when
//! it dials an address; it is never a permission, and never where we dial.
//!
//! What a guest looks up pushes out what it was told before, but not what a rule denies some of: that is
//! kept as long as there is room for it, and then it is known that it is missing.
//!
//! A name without an IPv4 address gets one here that means it to this sandbox and nothing to anybody
//! else, for as long as the pin is kept.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Mutex, MutexGuard, PoisonError};

use policy::Host;
use policy::net::SYNTHETIC;

/// Names kept of one address; the oldest is forgotten first, of those that no rule denies some of.
const MAX_NAMES: usize = 8;

/// The pins of one sandbox. They never expire by time: a guest may keep an address as long as it
/// likes. Beyond the capacity the address used least recently is forgotten.
#[derive(Debug)]
pub struct Pins {
    capacity: usize,
    told: Mutex<Told>,
}

/// What an address means to a sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pinned {
    /// The names it was told the address for, the most recent first.
    pub names: Vec<Host>,
    /// Whether no name was forgotten that a rule denied some of by then.
    pub all: bool,
}

#[derive(Debug, Default)]
struct Told {
    pins: HashMap<IpAddr, Pin>,
    /// Addresses by when they were last used. With those of `kept` as many as there are pins.
    by_use: BTreeMap<u64, IpAddr>,
    /// Those that were the next to go, and have a name that a rule denies some of.
    kept: BTreeMap<u64, IpAddr>,
    uses: u64,
    /// The addresses that stand for names; each is pinned.
    standing: HashMap<Host, Ipv4Addr>,
    /// An address was forgotten with a name that a rule denies some of.
    forgot: bool,
}

#[derive(Debug, Default)]
struct Pin {
    used: u64,
    /// Most recently told first.
    names: Vec<Host>,
    /// A name that a rule denies some of is not among them any more.
    forgot: bool,
}

impl Pins {
    /// No pins yet; at most `capacity` addresses, at least one and at most 32768.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self { capacity: capacity.clamp(1, 1 << 15), told: Mutex::default() }
    }

    /// Remembers that the sandbox was told `address` for `host`. `denied`: whether a rule denies some of
    /// a name now.
    pub fn pin(&self, address: IpAddr, host: &Host, denied: impl Fn(&Host) -> bool) {
        let mut told = self.told();
        told.touch(address.to_canonical()).add(host, &denied);
        told.fit(self.capacity, &denied);
    }

    /// An address of [`SYNTHETIC`] that stands for this name alone, pinned to it: the same as long as
    /// it is remembered, and most likely after that, whoever remembers. `denied` as for [`Pins::pin`].
    #[must_use]
    pub fn standing_for(&self, host: &Host, denied: impl Fn(&Host) -> bool) -> Ipv4Addr {
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
        told.fit(self.capacity, &denied);
        address
    }

    /// The names the sandbox was told `address` for. Counts as a use.
    #[must_use]
    pub fn names(&self, address: IpAddr) -> Pinned {
        let (mut told, address) = (self.told(), address.to_canonical());
        let forgot = told.forgot;
        if !told.pins.contains_key(&address) {
            return Pinned { names: Vec::new(), all: !forgot };
        }
        let pin = told.touch(address);
        Pinned { names: pin.names.clone(), all: !(forgot || pin.forgot) }
    }

    fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pin {
    /// Adds a name as the one told last.
    fn add(&mut self, host: &Host, denied: impl Fn(&Host) -> bool) {
        self.names.retain(|name| name != host);
        if self.names.len() >= MAX_NAMES {
            let least = self.names.iter().rposition(|name| !denied(name));
            self.forgot |= least.is_none();
            self.names.remove(least.unwrap_or(self.names.len() - 1));
        }
        self.names.insert(0, host.clone());
    }

    /// Whether it must outlive others.
    fn is_kept(&self, denied: impl Fn(&Host) -> bool) -> bool {
        self.forgot || self.names.iter().any(denied)
    }
}

impl Told {
    /// Forgets the pin used least recently when there are more than `capacity`; of those with a name
    /// that is `denied` only after all others but the one told last.
    fn fit(&mut self, capacity: usize, denied: impl Fn(&Host) -> bool) {
        if self.pins.len() <= capacity {
            return;
        }
        while self.by_use.len() > 1
            && let Some((used, address)) = self.by_use.pop_first()
        {
            if !self.pins.get(&address).is_some_and(|pin| pin.is_kept(&denied)) {
                return self.forget(address, denied);
            }
            // Not looked at again until it is used.
            self.kept.insert(used, address);
        }
        if let Some((_, address)) = self.kept.pop_first() {
            self.forget(address, denied);
        }
    }

    /// Forgets an address that is in no order any more.
    fn forget(&mut self, address: IpAddr, denied: impl Fn(&Host) -> bool) {
        let Some(pin) = self.pins.remove(&address) else { return };
        self.forgot |= pin.is_kept(denied);
        let stood = |name: &Host| self.standing.get(name).is_some_and(|ip| address == *ip);
        if let Some(name) = pin.names.into_iter().find(stood) {
            self.standing.remove(&name);
        }
    }

    /// The pin of this address, made if need be, as the one used most recently.
    fn touch(&mut self, address: IpAddr) -> &mut Pin {
        self.uses += 1;
        let pin = self.pins.entry(address).or_default();
        self.by_use.remove(&pin.used);
        self.kept.remove(&pin.used);
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

    /// No rule denies anything.
    fn none(_: &Host) -> bool {
        false
    }

    /// Promise 26. Attack C07.
    #[test]
    fn a_name_that_a_rule_denies_outlives_others_of_its_address_and_its_loss_is_known() {
        let (pins, denied) = (Pins::new(4), |name: &Host| name.as_str().len() == 14);
        pins.pin(address(1), &host(3), denied);
        for n in 10..40 {
            pins.pin(address(1), &host(n), denied);
        }
        let told = pins.names(address(1));
        assert_eq!((told.names.len(), told.names.last(), told.all), (8, Some(&host(3)), true));
        for n in 0..8 {
            pins.pin(address(1), &host(n), denied);
        }
        assert!(pins.names(address(1)).all, "as many as there is room for");
        pins.pin(address(1), &host(40), denied);
        let told = pins.names(address(1));
        assert_eq!((told.names.first(), told.all), (Some(&host(40)), false));
        assert!(pins.names(address(2)).all, "and of no other address");
    }

    /// Promise 26. Attack C07. By more addresses than are kept.
    #[test]
    fn an_address_with_a_denied_name_outlives_others_and_its_loss_is_known() {
        let (pins, denied) = (Pins::new(20), |name: &Host| *name == host(1));
        pins.pin(address(1), &host(1), denied);
        for n in 2..200 {
            pins.pin(address(n), &host(2), denied);
            assert_eq!(pins.names(address(n)).names, [host(2)], "what was told last is known");
        }
        let told = pins.names(address(1));
        assert_eq!((told.names, told.all), (vec![host(1)], true));
        assert!(pins.names(address(2)).all, "forgotten, and of no matter");
        for n in 2..20 {
            pins.pin(address(n), &host(1), denied);
        }
        for n in 100..200 {
            pins.pin(address(n), &host(2), denied);
            assert!(pins.names(address(n)).all, "one place is enough for what is told last");
        }
        for n in 1..20 {
            assert_eq!(pins.names(address(n)).names, [host(1)], "however many at once");
        }
        for n in 2..22 {
            pins.pin(address(n), &host(1), denied);
        }
        assert!(!pins.names(address(250)).all, "one more than there is room for");
        assert!(!pins.names(address(21)).all);
    }

    #[test]
    fn the_name_told_last_comes_first_and_names_are_capped() {
        let pins = Pins::new(4);
        for n in 0..20 {
            pins.pin(address(1), &host(n), none);
        }
        pins.pin(address(1), &host(15), none);
        let names = pins.names(address(1)).names;
        assert_eq!(names.len(), MAX_NAMES);
        assert_eq!(names[..3], [host(15), host(19), host(18)]);
    }

    #[test]
    fn an_address_in_use_outlives_newer_ones() {
        let pins = Pins::new(2);
        pins.pin(address(1), &host(1), none);
        pins.pin(address(2), &host(2), none);
        assert_eq!(pins.names(address(1)).names, [host(1)]);
        pins.pin(address(3), &host(3), none);
        assert_eq!(pins.names(address(1)).names, [host(1)]);
        assert_eq!(pins.names(address(2)).names, []);
    }

    #[test]
    fn a_mapped_address_is_the_address_it_maps() {
        let pins = Pins::new(2);
        pins.pin("::ffff:192.0.2.1".parse().expect("address"), &host(1), none);
        assert_eq!(pins.names(address(1)).names, [host(1)]);
    }

    #[test]
    fn an_address_stands_for_one_name_as_long_as_it_is_pinned() {
        let pins = Pins::new(3);
        let first = pins.standing_for(&host(1), none);
        assert!(SYNTHETIC.contains(&first));
        let second = pins.standing_for(&host(2), none);
        assert_ne!(first, second);
        assert_eq!(pins.standing_for(&host(1), none), first);
        assert_eq!(pins.names(first.into()).names, [host(1)]);
        // A real address more does not take it away; being used least does.
        pins.pin(address(1), &host(3), none);
        assert_eq!(pins.names(first.into()).names, [host(1)]);
        pins.pin(address(2), &host(3), none);
        assert_eq!(pins.names(second.into()).names, []);
        assert_eq!(pins.told().standing.len(), 1);
        assert_eq!(
            pins.standing_for(&host(2), none),
            second,
            "the same again, for whoever kept it"
        );
    }

    #[test]
    fn addresses_that_stand_for_names_are_bounded_and_never_two_names_of_one() {
        let pins = Pins::new(500);
        for n in 0..5_000 {
            let name = Host::parse(&format!("n{n}.example.com")).expect("host");
            let address = pins.standing_for(&name, none);
            assert_eq!(pins.names(address.into()).names, [name]);
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
                    pins.pin(address(n), &host(name), none);
                    let mut names = known.unwrap_or_default();
                    names.retain(|known| *known != host(name));
                    names.insert(0, host(name));
                    model.insert(0, (n, names));
                    model.truncate(capacity);
                } else {
                    prop_assert_eq!(pins.names(address(n)).names, known.clone().unwrap_or_default());
                    if let Some(names) = known { model.insert(0, (n, names)); }
                }
                let told = pins.told();
                prop_assert_eq!(told.pins.len(), model.len());
                prop_assert_eq!(told.by_use.len(), model.len());
            }
        }
    }
}
