//! For a question: the port that decides it when 443 and 80 do not.
//!
//! Rules name up to 32 ranges each, and many rules may stand over one name: trying every port would be
//! quadratic in what a tenant writes. This passes over all ranges once, in order. Pure; never decides.

use std::sync::Arc;

use crate::compile::LayerIndex;
use crate::document::{Effect, Layer, Protocol};
use crate::name::Host;
use crate::reading::carries;

/// What begins or ends at a port.
#[derive(Clone, Copy)]
enum What {
    /// A rule of this layer that lets through.
    Lets(usize),
    /// A rule of the platform that lets through whatever the others lack.
    Always,
    Denies,
}

/// A port at which the name could pass, by the rules that name ports; or else the first that a rule
/// denies. None when no rule over the name has ports: then it is the same on all but 443 and 80. With
/// `waive`, layers in mode observe refuse nothing.
pub(crate) fn telling(
    layers: &[Option<Arc<LayerIndex>>; 3],
    host: &Host,
    waive: bool,
) -> Option<u16> {
    let mut changes: Vec<(u32, i32, What)> = Vec::new();
    let mut lets = [1, 1, 1];
    let (mut always, mut denies, mut with_ports) = (0, 0, false);
    for (at, index) in layers.iter().enumerate() {
        let Some(index) = index else { continue };
        if let Some(own) = lets.get_mut(at) {
            *own = i32::from(index.default == Effect::Allow || (waive && index.observes));
        }
        index.named(host, |clause| {
            let conditions = &clause.conditions;
            with_ports |= !conditions.ports.is_empty();
            let what = match clause.effect {
                _ if !carries(clause, Protocol::Tcp) => return,
                // Without ports it is about 443 and 80 only.
                Effect::Allow if conditions.ports.is_empty() => return,
                Effect::Deny if conditions.needs_requests() || (waive && index.observes) => return,
                Effect::Deny => What::Denies,
                Effect::Allow => What::Lets(at),
            };
            if conditions.ports.is_empty() {
                denies += 1;
            }
            for range in &conditions.ports {
                let (first, after) = (u32::from(range.first()), u32::from(range.last()) + 1);
                changes.extend([(first, 1, what), (after, -1, what)]);
                if index.layer == Layer::Platform && conditions.always {
                    changes.extend([(first, 1, What::Always), (after, -1, What::Always)]);
                }
            }
        });
    }
    if !with_ports {
        return None;
    }
    // The first port of all stands for those that no rule names.
    changes.push((1, 0, What::Denies));
    changes.sort_unstable_by_key(|(port, ..)| *port);
    let mut denied = None;
    for here in changes.chunk_by(|(one, ..), (other, ..)| one == other) {
        for (_, by, what) in here {
            match what {
                What::Lets(at) => lets.get_mut(*at).into_iter().for_each(|count| *count += by),
                What::Always => always += by,
                What::Denies => denies += by,
            }
        }
        let port = here.first().and_then(|(port, ..)| u16::try_from(*port).ok());
        match port {
            Some(_) if denies > 0 => denied = denied.or(port),
            Some(_) if always > 0 || lets.iter().all(|count| *count > 0) => return port,
            _ => {}
        }
    }
    denied
}
