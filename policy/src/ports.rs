//! For a question: the port that decides it when 443 and 80 do not.
//!
//! Rules name up to 32 ranges each, and many rules may stand over one name: trying every port would be
//! quadratic in what a tenant writes. This notes every range once, in sets. Pure; never decides.

use std::sync::Arc;

use crate::compile::LayerIndex;
use crate::document::{Effect, Layer, Protocol};
use crate::name::Host;
use crate::reading::carries;

/// A set of ports, a bit each.
struct Ports(Vec<u64>);

impl Ports {
    fn none() -> Self {
        Self(vec![0; 1 << 10])
    }

    fn add(&mut self, (first, last): (u16, u16)) {
        let (from, to) = (usize::from(first) / 64, usize::from(last) / 64);
        let words = self.0.iter_mut().enumerate().take(to + 1).skip(from);
        for (at, word) in words {
            let above = if at == from { u64::MAX << (first % 64) } else { u64::MAX };
            let below = if at == to { u64::MAX >> (63 - last % 64) } else { u64::MAX };
            *word |= above & below;
        }
    }
}

/// A port at which the name could pass, by the rules that name ports; or else the first that a rule
/// denies. None when no rule over the name has ports: then it is the same on all but 443 and 80. With
/// `waive`, layers in mode observe refuse nothing.
pub(crate) fn telling(
    layers: &[Option<Arc<LayerIndex>>; 3],
    host: &Host,
    waive: bool,
) -> Option<u16> {
    let each = || layers.iter().flatten();
    let mut with_ports = false;
    each().for_each(|index| index.named(host, |one| with_ports |= !one.terms.ports.is_empty()));
    if !with_ports {
        return None;
    }
    let (mut always, mut denied, mut lets) = (Ports::none(), Ports::none(), Vec::new());
    for index in each() {
        let open = index.default == Effect::Allow || (waive && index.observes);
        let mut own = Ports::none();
        index.named(host, |clause| {
            let terms = &clause.terms;
            match clause.effect {
                _ if !carries(clause, Protocol::Tcp) => {}
                Effect::Allow => {
                    // Without ports it is about 443 and 80 only.
                    terms.ports.iter().for_each(|range| own.add(range));
                    if index.layer == Layer::Platform && terms.conditions.always {
                        terms.ports.iter().for_each(|range| always.add(range));
                    }
                }
                Effect::Deny if terms.conditions.needs_requests() || (waive && index.observes) => {}
                Effect::Deny if terms.ports.is_empty() => denied.add((1, u16::MAX)),
                Effect::Deny => terms.ports.iter().for_each(|range| denied.add(range)),
            }
        });
        if !open {
            lets.push(own);
        }
    }
    let shut = |at: usize| denied.0.get(at).copied().unwrap_or_default();
    let open = |at: usize| {
        let layer = |set: &Ports| set.0.get(at).copied().unwrap_or_default();
        // There is no port 0.
        let ports = if at == 0 { !1 } else { u64::MAX };
        (lets.iter().map(layer).fold(ports, |all, own| all & own) | layer(&always)) & !shut(at)
    };
    first(open).or_else(|| first(shut))
}

/// The first port of a set that is given in words.
fn first(words: impl Fn(usize) -> u64) -> Option<u16> {
    let (at, word) = (0..1 << 10).map(|at| (at, words(at))).find(|(_, word)| *word != 0)?;
    u16::try_from(at * 64).ok()?.checked_add(u16::try_from(word.trailing_zeros()).ok()?)
}
