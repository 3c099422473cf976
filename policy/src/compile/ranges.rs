//! The ports that one rule or one layer names, in order and disjoint: found by halving, however many
//! ranges a tenant writes. Never holds a port that no range names.

use crate::document::PortRange;

/// Ranges of ports: first and last, in order, none next to another.
#[derive(Debug, Default)]
pub(crate) struct Ranges(Box<[(u16, u16)]>);

impl Ranges {
    pub(crate) fn of<'r>(ranges: impl IntoIterator<Item = &'r PortRange>) -> Self {
        let mut all: Vec<_> = ranges.into_iter().map(|r| (r.first(), r.last())).collect();
        all.sort_unstable();
        all.dedup_by(|next, kept| {
            let meet = next.0 <= kept.1.saturating_add(1);
            if meet {
                kept.1 = kept.1.max(next.1);
            }
            meet
        });
        Self(all.into())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn contains(&self, port: u16) -> bool {
        let below = self.0.partition_point(|(first, _)| *first <= port);
        let last = below.checked_sub(1).and_then(|at| self.0.get(at));
        last.is_some_and(|(_, last)| port <= *last)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u16, u16)> {
        self.0.iter().copied()
    }
}
