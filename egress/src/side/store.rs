//! The room for bytes of sleeping guests that no socket holds, shared fairly among their tenants.
//!
//! A quarter of it is for all slots, in even parts. Of the rest the guests of a tenant hold together no
//! more than is left: whoever wants all gets half, and of what is left others get half. Never gives a
//! guest what is the even part of another, whoever they belong to.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use policy::TenantName;

/// What the connections of one sleeping guest may hold of its bytes, and those of all.
const OF_ONE: usize = 8 << 20;
const OF_ALL: usize = 512 << 20;
/// The part that is divided evenly: one of so many.
const EVEN: usize = 4;

/// The room of this node. Clones are the same.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    even: usize,
    common: usize,
    /// What guests hold beyond their even parts, by tenant.
    taken: Arc<Mutex<HashMap<TenantName, usize>>>,
}

/// What one guest holds of it; given back when dropped.
#[derive(Debug)]
pub(crate) struct Share {
    store: Store,
    /// None for a guest of no slot, which is bounded as one.
    tenant: Option<TenantName>,
    held: usize,
}

impl Store {
    /// All free, for guests in slots 1 to `slots`.
    pub(crate) fn new(slots: u16) -> Self {
        let slots = usize::from(slots.max(1));
        let even = OF_ALL / EVEN / slots;
        Self { even, common: OF_ALL - even * slots, taken: Arc::default() }
    }

    /// Nothing yet, for a guest of this tenant.
    pub(crate) fn share(&self, tenant: Option<&TenantName>) -> Share {
        Share { store: self.clone(), tenant: tenant.cloned(), held: 0 }
    }

    /// Every change is whole before the next can panic.
    fn taken(&self) -> MutexGuard<'_, HashMap<TenantName, usize>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Share {
    /// Holds this many bytes more, if there is room.
    pub(super) fn take(&mut self, bytes: usize) -> bool {
        let wanted = self.held.saturating_add(bytes);
        let may = wanted <= OF_ONE && self.take_beyond(wanted);
        if may {
            self.held = wanted;
        }
        may
    }

    fn take_beyond(&self, wanted: usize) -> bool {
        let Some(tenant) = &self.tenant else { return true };
        let more = self.beyond(wanted) - self.beyond(self.held);
        if more == 0 {
            return true;
        }
        let mut taken = self.store.taken();
        let all = taken.values().sum::<usize>() + more;
        let own = taken.get(tenant).copied().unwrap_or_default() + more;
        let may = own <= self.store.common.saturating_sub(all);
        if may {
            taken.insert(tenant.clone(), own);
        }
        may
    }

    /// Gives this many back.
    pub(super) fn free(&mut self, bytes: usize) {
        let left = self.held.saturating_sub(bytes);
        let less = self.beyond(self.held) - self.beyond(left);
        self.held = left;
        let mut taken = self.store.taken();
        if let Some(tenant) = &self.tenant
            && let Some(own) = taken.get_mut(tenant)
        {
            *own = own.saturating_sub(less);
            if *own == 0 {
                taken.remove(tenant);
            }
        }
    }

    /// What is more than an even part.
    fn beyond(&self, held: usize) -> usize {
        held.saturating_sub(self.store.even)
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.free(self.held);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOTS: u16 = 1024;
    const PIECE: usize = 64 << 10;

    /// Guests of one tenant that hold as much as they get.
    fn full(store: &Store, tenant: &str, guests: usize) -> Vec<Share> {
        let tenant = tenant.parse().expect("a name");
        let mut shares: Vec<_> = (0..guests).map(|_| store.share(Some(&tenant))).collect();
        shares.iter_mut().for_each(|share| while share.take(PIECE) {});
        shares
    }

    fn sum(shares: &[Share]) -> usize {
        shares.iter().map(|share| share.held).sum()
    }

    /// Promise 41. As many guests as there may be.
    #[test]
    fn what_guests_of_one_tenant_hold_asleep_leaves_as_much_to_others() {
        let store = Store::new(SLOTS);
        let loud = full(&store, "loud", usize::from(SLOTS) - 2);
        assert!(sum(&loud) > OF_ALL / 2, "control: {}", sum(&loud));
        let second = full(&store, "second", 1);
        assert_eq!(sum(&second), OF_ONE, "all that one guest may");
        let third = full(&store, "third", 1);
        assert_eq!(sum(&third), OF_ONE);
        assert!(sum(&loud) + sum(&second) + sum(&third) <= OF_ALL);
    }

    /// Promise 41.
    #[test]
    fn whatever_tenants_hold_each_guest_has_its_even_part() {
        let store = Store::new(SLOTS);
        let names = (1..=usize::from(SLOTS)).map(|n| format!("t{n}"));
        let held: Vec<_> = names.flat_map(|name| full(&store, &name, 1)).collect();
        let even = OF_ALL / EVEN / usize::from(SLOTS);
        assert!(held.iter().all(|share| share.held >= even), "{held:?}");
        assert!(sum(&held) <= OF_ALL, "{}", sum(&held));
    }

    #[test]
    fn what_is_given_back_can_be_had_again_and_leaves_nothing() {
        let store = Store::new(SLOTS);
        let mut held = full(&store, "one", 60);
        assert!(!held[59].take(PIECE), "control: {}", sum(&held));
        held[0].free(2 * PIECE);
        assert!(held[59].take(PIECE));
        let before = sum(&held);
        drop(held);
        assert!(store.taken().is_empty());
        assert_eq!(sum(&full(&store, "another", 60)), before + PIECE);
        let mut share = store.share(None);
        assert!(share.take(OF_ONE) && !share.take(1));
    }
}
