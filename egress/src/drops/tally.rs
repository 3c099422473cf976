//! Equal drops put together, in bounded room however many a guest invents.

use std::borrow::Cow;
use std::collections::HashMap;
use std::net::SocketAddr;

use policy::Slot;

use crate::drops::frame::Dropped;
use crate::fence::Reason;

/// Kinds of drops told apart in one window; what is beyond is counted without its destination, and
/// there can be at most one such kind for each slot and reason.
const KINDS: usize = 4096;

type Kind = (Slot, Reason, Cow<'static, str>, Option<SocketAddr>);

/// Counts drops that are alike: same slot, reason, protocol, destination.
#[derive(Debug, Default)]
pub struct Tally {
    counted: HashMap<Kind, Dropped>,
}

impl Tally {
    /// Adds one. It comes back when it is the first of its kind in this window, to be reported at
    /// once; otherwise it is counted.
    pub fn add(&mut self, mut dropped: Dropped) -> Option<Dropped> {
        let kind = |d: &Dropped| (d.slot, d.reason, d.protocol.clone(), d.destination);
        if let Some(known) = self.counted.get_mut(&kind(&dropped)) {
            known.count = known.count.saturating_add(dropped.count);
            return None;
        }
        if self.counted.len() < KINDS {
            self.counted.insert(kind(&dropped), Dropped { count: 0, ..dropped.clone() });
            return Some(dropped);
        }
        (dropped.protocol, dropped.source, dropped.destination) = ("other".into(), None, None);
        let known = self.counted.entry(kind(&dropped));
        let known = known.or_insert_with(|| Dropped { count: 0, ..dropped.clone() });
        known.count = known.count.saturating_add(dropped.count);
        None
    }

    /// Ends the window: what was counted in it and not reported yet.
    pub fn take(&mut self) -> impl Iterator<Item = Dropped> + use<> {
        std::mem::take(&mut self.counted).into_values().filter(|dropped| dropped.count > 0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn dropped(slot: u16, port: u16) -> Dropped {
        Dropped {
            slot: Slot::new(slot).expect("in range"),
            reason: Reason::Udp,
            protocol: "udp".into(),
            source: None,
            destination: Some(SocketAddr::from(([192, 0, 2, 1], port))),
            count: 1,
        }
    }

    #[test]
    fn the_first_of_a_kind_is_reported_at_once_and_the_rest_with_their_count() {
        let mut tally = Tally::default();
        assert_eq!(tally.add(dropped(1, 5)), Some(dropped(1, 5)));
        assert_eq!(tally.add(dropped(1, 5)), None);
        assert_eq!(tally.add(dropped(1, 5)), None);
        assert_eq!(tally.add(dropped(1, 6)), Some(dropped(1, 6)));
        let late: Vec<Dropped> = tally.take().collect();
        assert_eq!(late, [Dropped { count: 2, ..dropped(1, 5) }]);
        assert_eq!(tally.add(dropped(1, 5)), Some(dropped(1, 5)), "a new window");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]
        #[test]
        fn nothing_is_lost_and_room_is_bounded(
            ports in proptest::collection::vec((1_u16..4, any::<u16>()), 0..20_000),
        ) {
            let mut tally = Tally::default();
            let mut seen = 0;
            for (slot, port) in &ports {
                seen += tally.add(dropped(*slot, *port)).map_or(0, |first| first.count);
                prop_assert!(tally.counted.len() <= KINDS + 3);
            }
            seen += tally.take().map(|late| late.count).sum::<u64>();
            prop_assert_eq!(seen, ports.len() as u64);
        }
    }
}
