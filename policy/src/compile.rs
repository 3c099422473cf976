//! Layers of policies put together into one value that is judged in time independent of their size.
//!
//! Only indexing a layer takes long where its policy is large. It is done once for its scope; what
//! is in force for a sandbox shares the layers above it with all others.

mod layer;
mod ranges;

use std::sync::Arc;

use arc_swap::ArcSwap;

use crate::document::{Effect, Layer, Policy, Protocol};
use crate::id::Revision;
use crate::name::Host;

pub use layer::Reach;
pub(crate) use layer::{Clause, LayerIndex, Shown, Terms};

/// The policy of one layer, ready to judge. Clones share it.
#[derive(Clone, Debug)]
pub struct CompiledLayer(Arc<LayerIndex>);

impl CompiledLayer {
    /// Indexes a policy.
    #[must_use]
    pub fn new(layer: Layer, policy: &Policy) -> Self {
        Self(Arc::new(LayerIndex::new(layer, [policy])))
    }
}

/// Policies of one sandbox, in their layers, ready to judge. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Compiled {
    layers: [Option<Arc<LayerIndex>>; 3],
    revision: Revision,
}

impl Compiled {
    /// Compiles layers. A layer that is absent lets everything through that the others let through;
    /// with no layer at all everything is denied. A layer given twice has the rules of both; it
    /// denies by default, and is enforced, if either does and is.
    #[must_use]
    pub fn new(layers: &[(Layer, &Policy)], revision: Revision) -> Self {
        let index = |wanted: Layer| {
            let given = layers.iter().filter(|(layer, _)| *layer == wanted);
            let mut policies = given.map(|(_, policy)| *policy).peekable();
            policies.peek()?;
            Some(Arc::new(LayerIndex::new(wanted, policies)))
        };
        Self { layers: Layer::ALL.map(index), revision }
    }

    /// Puts layers together that are compiled already, at most one of each kind: cheap, however large
    /// they are. What is absent means the same as to [`Compiled::new`].
    #[must_use]
    pub fn of(layers: &[CompiledLayer], revision: Revision) -> Self {
        let given = |wanted: Layer| {
            let found = layers.iter().find(|CompiledLayer(index)| index.layer == wanted);
            found.map(|CompiledLayer(index)| Arc::clone(index))
        };
        Self { layers: Layer::ALL.map(given), revision }
    }

    /// The revision this was compiled from.
    #[must_use]
    pub fn revision(&self) -> Revision {
        self.revision
    }

    /// Whether a connection to this port could be let through by some name, whatever it is. If not,
    /// there is no need to wait for its name.
    #[must_use]
    pub fn names_port(&self, port: u16) -> bool {
        let each = || self.layers.iter().flatten();
        each().any(|index| index.layer == Layer::Platform && index.names_port(port))
            || each().all(|index| {
                index.observes || index.default == Effect::Allow || index.names_port(port)
            })
    }

    /// Whether a rule denies some of this name, on whatever port: one that names it, or a zone that it is
    /// in. A rule about every name is about none.
    #[must_use]
    pub fn denies_some_of(&self, host: &Host) -> bool {
        self.layers.iter().flatten().any(|index| index.denies_some_of(host))
    }

    /// The outermost layer with a rule that denies names on this port; with `waive`, one that is enforced.
    pub(crate) fn denies_names_at(
        &self,
        protocol: Protocol,
        port: u16,
        waive: bool,
    ) -> Option<Layer> {
        let mut enforced = self.layers.iter().flatten().filter(|index| !(waive && index.observes));
        enforced.find(|index| index.denies_names_at(protocol, port)).map(|index| index.layer)
    }

    /// Whether a layer records what it refuses instead of refusing it.
    #[must_use]
    pub fn observes(&self) -> bool {
        self.layers.iter().flatten().any(|index| index.observes)
    }

    /// Whether something below this name may pass, whatever is said of the name itself. Only if not,
    /// a resolver may be told that the name does not exist: it would conclude that nothing below it
    /// does (RFC 8020). Rules with ports and requests count as if they let through.
    #[must_use]
    pub fn passes_below(&self, host: &Host) -> bool {
        let each = || self.layers.iter().flatten();
        let lets = |index: &Arc<LayerIndex>| index.observes || index.lets_below(host);
        each().next().is_some()
            && !each().any(|index| !index.observes && index.shuts_below(host))
            && (each().all(lets) || each().any(|index| index.always_lets_below(host)))
    }

    /// Where rules let datagrams go, in order and without repetitions: all that any layer names, so
    /// more than [`Compiled::judge`] lets through and never less. IPv4 only, as guests are.
    #[must_use]
    pub fn datagrams(&self) -> Vec<Reach> {
        let mut all: Vec<Reach> = self
            .layers
            .iter()
            .flatten()
            .flat_map(|index| index.datagrams.iter().copied())
            .collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// The layers in their order, outermost first; none for an absent one.
    pub(crate) fn layers(&self) -> &[Option<Arc<LayerIndex>>; 3] {
        &self.layers
    }
}

/// The policy in force for one sandbox. Clones see the same; readers never wait.
#[derive(Clone, Debug, Default)]
pub struct PolicyHandle(Arc<ArcSwap<Compiled>>);

impl PolicyHandle {
    /// A handle that holds this policy.
    #[must_use]
    pub fn new(compiled: Compiled) -> Self {
        Self(Arc::new(ArcSwap::from_pointee(compiled)))
    }

    /// The policy in force now.
    #[must_use]
    pub fn load(&self) -> Arc<Compiled> {
        self.0.load_full()
    }

    /// Puts another in force; returns once every later `load` sees it.
    pub fn store(&self, compiled: Compiled) {
        self.0.store(Arc::new(compiled));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names_port(layers: &[(Layer, &str)], port: u16) -> bool {
        let policies: Vec<(Layer, Policy)> = layers
            .iter()
            .map(|(layer, text)| (*layer, Policy::from_toml(text).expect("a policy")))
            .collect();
        let layers: Vec<(Layer, &Policy)> = policies.iter().map(|(l, p)| (*l, p)).collect();
        Compiled::new(&layers, Revision(1)).names_port(port)
    }

    #[test]
    fn a_port_is_named_when_every_layer_names_it_or_the_platform_does() {
        let mail = "[[rule]]\nallow = [\"a.example\"]\nports = [\"20-25\", 26, 2525]\n";
        for (port, named) in [(19, false), (20, true), (26, true), (27, false), (2525, true)] {
            assert_eq!(names_port(&[(Layer::Sandbox, mail)], port), named, "{port}");
        }
        assert!(!names_port(&[(Layer::Tenant, ""), (Layer::Sandbox, mail)], 25));
        assert!(names_port(&[(Layer::Tenant, "default = \"allow\""), (Layer::Sandbox, mail)], 25));
        assert!(names_port(&[(Layer::Platform, mail), (Layer::Sandbox, "")], 25));
    }

    #[test]
    fn networks_and_denials_name_no_port() {
        for rule in ["allow = [\"203.0.113.0/24\"]", "deny = [\"a.example\"]"] {
            let text = format!("[[rule]]\n{rule}\nports = [25]\n");
            assert!(!names_port(&[(Layer::Sandbox, &text)], 25), "{rule}");
        }
    }

    #[test]
    fn datagrams_reach_what_allow_rules_for_udp_name_and_nothing_else() {
        let text = "default = \"allow\"\n\
             [[rule]]\nallow = [\"203.0.113.0/24\", \"2001:db8::/32\"]\nprotocol = \"udp\"\n\
             ports = [3478, \"5000-5010\"]\n\
             [[rule]]\nallow = [\"198.51.100.7\"]\nprotocol = \"udp\"\n\
             [[rule]]\nallow = [\"192.0.2.0/24\"]\nports = [9]\n\
             [[rule]]\ndeny = [\"203.0.113.9\"]\nprotocol = \"udp\"\n";
        let policy = Policy::from_toml(text).expect("a policy");
        let layers = [(Layer::Platform, &policy), (Layer::Sandbox, &policy)];
        let reach = |net: &str, ports| Reach { net: net.parse().expect("a network"), ports };
        assert_eq!(
            Compiled::new(&layers, Revision(1)).datagrams(),
            [
                reach("198.51.100.7/32", None),
                reach("203.0.113.0/24", Some((3478, 3478))),
                reach("203.0.113.0/24", Some((5000, 5010))),
            ]
        );
    }
}
