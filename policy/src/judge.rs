//! The one decision: may this flow leave?
//!
//! Only this module makes a `Permit`, and only a permit opens a way out. `Undecidable` closes.
//! A flow leaves under a name that every layer lets through, or else to an address that every layer
//! lets through by its address rules; one layer's name and another's address do not add up.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use ipnet::IpNet;
use serde::Serialize;

use crate::class::{AddressClass, OwnAddresses, carried, host_service, special};
use crate::compile::{Clause, Compiled, LayerIndex, Shown};
use crate::document::{Effect, Layer};
use crate::id::Revision;
use crate::name::Host;
use crate::net::is_ours;
use crate::ports;
use crate::reading::{By, Case, Reading, Readings, Refusal, Sum, carries, sum};
use crate::reason::Code;

pub use crate::document::Protocol;
pub use crate::flow::{Evidence, Flow};

/// The answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It may leave, under this permit.
    Pass(Permit),
    /// It may not.
    Deny(Denial),
    /// It cannot be judged with this evidence, and so closes. The denial says what was missing.
    Undecidable(Denial),
}

/// A refusal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Denial {
    /// Why.
    pub code: Code,
    /// The layer that refused.
    pub layer: Option<Layer>,
    /// The rule that refused, as `explain` prints it; none when no rule matched.
    pub rule: Option<String>,
    /// The revision it was judged by.
    pub revision: Revision,
}

/// How the flow is carried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// TLS passed through unopened.
    Splice,
    /// HTTP, request by request.
    Requests,
    /// Bytes as they are.
    Raw,
    /// A DNS answer.
    Answer,
}

/// The right to open one connection. Only `judge` makes one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Permit {
    target: Target,
    port: u16,
    protocol: Protocol,
    mode: Mode,
    layer: Layer,
    rule: Shown,
    listed: bool,
    unwoken: bool,
    revision: Revision,
    would_deny: Option<Arc<Denial>>,
}

/// What a permit is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// This name, resolved by us.
    Name(Host),
    /// This address, because an address rule names it.
    Address(IpAddr),
}

/// The right to send to one address: what `dial` takes. Only `judge_address` makes one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dialable(SocketAddr);

impl Permit {
    /// What it is for.
    #[must_use]
    pub fn target(&self) -> &Target {
        &self.target
    }
    /// The port; 0 for the answer to a question, which nobody may dial.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }
    /// The transport.
    #[must_use]
    pub fn protocol(&self) -> Protocol {
        self.protocol
    }
    /// How the flow is carried.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.mode
    }
    /// The innermost layer that allowed it.
    #[must_use]
    pub fn layer(&self) -> Layer {
        self.layer
    }
    /// The rule that allowed it, as `explain` prints it.
    #[must_use]
    pub fn rule(&self) -> String {
        self.rule.to_string()
    }
    /// Whether a rule of some layer names the host by itself. If not, the guest chose labels of the
    /// name, and whoever resolves it is told them.
    #[must_use]
    pub fn is_listed(&self) -> bool {
        self.listed
    }
    /// Whether what its far side does wakes a sandbox that sleeps: unless some rule that lets it
    /// through, of whatever layer, says `wake_on_data = false`.
    #[must_use]
    pub fn wakes(&self) -> bool {
        !self.unwoken
    }
    /// The revision it was judged by.
    #[must_use]
    pub fn revision(&self) -> Revision {
        self.revision
    }
    /// The refusal that a layer in mode observe only has recorded. See [`Compiled::would_deny`].
    #[must_use]
    pub fn would_deny(&self) -> Option<&Denial> {
        self.would_deny.as_deref()
    }
}

impl Dialable {
    /// Where to connect.
    #[must_use]
    pub fn address(self) -> SocketAddr {
        self.0
    }
}

impl Denial {
    /// A refusal for a reason that is not a rule's.
    #[must_use]
    pub fn because(code: Code, revision: Revision) -> Self {
        Self { code, layer: None, rule: None, revision }
    }
}

/// Where a verdict came from: what `explain` reads again.
#[derive(Clone, Copy)]
pub(crate) enum Basis<'f> {
    Name(&'f Host, u16),
    Address(IpAddr),
    Nothing,
}

impl Compiled {
    /// Judges a flow.
    #[must_use]
    pub fn judge(&self, flow: &Flow<'_>) -> Verdict {
        self.decide(flow).0
    }

    /// The verdict, and what it was made from. What is refused is judged once more without the
    /// layers that only observe, but for UDP: the kernel refuses it before anybody is asked.
    pub(crate) fn decide<'f>(&self, flow: &Flow<'f>) -> (Verdict, Basis<'f>) {
        let case = Case::new(*flow);
        let weigh = |waive| match flow.evidence {
            Evidence::Question(host) => self.question(&case, host, waive),
            _ => self.connection(&case, waive),
        };
        let enforced = weigh(false);
        let asked = matches!(flow.evidence, Evidence::Question(_));
        if !self.observes() || !(asked || flow.protocol == Protocol::Tcp) {
            return enforced;
        }
        match (enforced, weigh(true)) {
            ((Verdict::Deny(by) | Verdict::Undecidable(by), _), (Verdict::Pass(permit), basis)) => {
                let would_deny = Some(Arc::new(by));
                let rule = Shown::instead(BY_OBSERVING);
                (Verdict::Pass(Permit { would_deny, rule, ..permit }), basis)
            }
            ((Verdict::Deny(_) | Verdict::Undecidable(_), _), waived) => waived,
            (passed, _) => passed,
        }
    }

    fn question<'f>(&self, case: &Case<'f>, host: &'f Host, waive: bool) -> (Verdict, Basis<'f>) {
        let mut refused = (Refusal::default(), Basis::Name(host, 443));
        // Nearly always one of the two ports that are implied says it; the others are looked at last.
        let telling = || ports::telling(self.layers(), host, waive);
        for port in [443, 80].into_iter().chain(std::iter::once_with(telling).flatten()) {
            let basis = Basis::Name(host, port);
            match sum(&self.name(&case.at_port(port), host), waive) {
                Sum::Open { by, .. } => {
                    let target = Target::Name(host.clone());
                    return (Verdict::Pass(self.permit(&case.at_port(0), target, by)), basis);
                }
                Sum::Denied(by) => refused = (by, basis),
                Sum::Clouded(by) | Sum::Closed(by) if refused.0.code.is_none() => {
                    refused = (by, basis);
                }
                _ => {}
            }
        }
        (Verdict::Deny(self.denial(refused.0, Code::NoRule)), refused.1)
    }

    fn connection<'f>(&self, case: &Case<'f>, waive: bool) -> (Verdict, Basis<'f>) {
        let Flow { protocol, port, destination, evidence } = case.flow;
        let nothing = match (protocol, port) {
            (Protocol::Udp, 443) => Code::Quic,
            (Protocol::Udp, _) => Code::Protocol,
            _ if !evidence.names().is_empty() => Code::NoRule,
            _ if destination.is_some_and(|address| special(address).is_some()) => {
                Code::PrivateAddress
            }
            _ => Code::NoName,
        };
        // What a default lets through has a name that the bytes carry; raw bytes where TLS and HTTP
        // are expected carry none that can be trusted.
        let default_is_enough = protocol == Protocol::Tcp
            && !(matches!(evidence, Evidence::Pinned { .. }) && matches!(port, 80 | 443));

        let (mut passed, mut clouded) = (None, None);
        let mut refused = (Refusal::default(), Basis::Nothing);
        for host in evidence.names() {
            let basis = Basis::Name(host, port);
            match sum(&self.name(case, host), waive) {
                Sum::Denied(by) => return (Verdict::Deny(self.denial(by, nothing)), basis),
                Sum::Clouded(by) => clouded = Some((by, basis)),
                Sum::Open { by, by_rule } if by_rule || default_is_enough => {
                    passed = passed.or(Some((host, by)));
                }
                Sum::Open { .. } => {
                    let code = (protocol == Protocol::Tcp).then_some(Code::Undecidable);
                    refused = nearer(refused, (Refusal { code, ..Refusal::default() }, basis));
                }
                Sum::Closed(by) => refused = nearer(refused, (by, basis)),
            }
        }
        if matches!(evidence, Evidence::Pinned { all: false, .. }) && clouded.is_none() {
            let layer = self.denies_names_at(protocol, port, waive);
            let by =
                |layer| Refusal { code: Some(Code::Undecidable), layer: Some(layer), clause: None };
            clouded = layer.map(|layer| (by(layer), Basis::Nothing));
        }
        if let Some((by, basis)) = clouded {
            return (Verdict::Undecidable(self.denial(by, nothing)), basis);
        }
        if let Some((host, by)) = passed {
            let permit = self.permit(case, Target::Name(host.clone()), by);
            return (Verdict::Pass(permit), Basis::Name(host, port));
        }
        if let Some(address) = destination {
            let basis = Basis::Address(address);
            match sum(&self.address(case, address), waive) {
                Sum::Open { by, by_rule: true } => {
                    let permit = self.permit(case, Target::Address(address), by);
                    return (Verdict::Pass(permit), basis);
                }
                Sum::Denied(by) => return (Verdict::Deny(self.denial(by, nothing)), basis),
                Sum::Clouded(by) | Sum::Closed(by) => refused = nearer(refused, (by, basis)),
                Sum::Open { .. } => refused = nearer(refused, (Refusal::default(), basis)),
            }
        }
        let (by, basis) = refused;
        let denial = self.denial(by, nothing);
        match denial.code {
            Code::Undecidable => (Verdict::Undecidable(denial), basis),
            _ => (Verdict::Deny(denial), basis),
        }
    }

    /// What each layer says of the name or address that a verdict was made from.
    pub(crate) fn readings(&self, flow: &Flow<'_>, basis: Basis<'_>) -> Readings<'_> {
        let case = Case::new(*flow);
        match (basis, flow.evidence) {
            (Basis::Name(host, port), Evidence::Question(_)) => {
                self.name(&case.at_port(port), host)
            }
            (Basis::Name(host, _), _) => self.name(&case, host),
            (Basis::Address(address), _) => self.address(&case, address),
            (Basis::Nothing, _) => [None; 3],
        }
    }

    fn name(&self, case: &Case<'_>, host: &Host) -> Readings<'_> {
        self.read(|index, reading| index.named(host, |clause| reading.see(case, clause)))
    }

    fn address(&self, case: &Case<'_>, address: IpAddr) -> Readings<'_> {
        self.read(|index, reading| {
            index.holding(address, |clause| reading.see(case, clause));
            if let Some(v4) = carried(address) {
                index.holding(v4.into(), |clause| {
                    if clause.effect == Effect::Deny {
                        reading.see(case, clause);
                    }
                });
            }
        })
    }

    fn read<'a>(&'a self, see: impl Fn(&'a LayerIndex, &mut Reading<'a>)) -> Readings<'a> {
        let mut readings = [None; 3];
        for (slot, index) in readings.iter_mut().zip(self.layers()) {
            if let Some(index) = index {
                see(index, slot.insert(Reading::new(index)));
            }
        }
        readings
    }

    fn permit(
        &self,
        case: &Case<'_>,
        target: Target,
        By { layer, clause, listed, unwoken }: By<'_>,
    ) -> Permit {
        let mode = match case.flow.evidence {
            Evidence::Question(_) => Mode::Answer,
            Evidence::Tls { .. } => Mode::Splice,
            Evidence::Request { .. } => Mode::Requests,
            Evidence::Upgrade(_) | Evidence::Pinned { .. } | Evidence::Address => Mode::Raw,
        };
        let rule = clause.map_or_else(|| Shown::instead(BY_DEFAULT), Clause::shown);
        let Flow { port, protocol, .. } = case.flow;
        let revision = self.revision();
        let would_deny = None;
        Permit { target, port, protocol, mode, layer, rule, listed, unwoken, revision, would_deny }
    }

    fn denial(&self, by: Refusal<'_>, nothing: Code) -> Denial {
        let rule = by.clause.map(|clause| clause.shown().to_string());
        let code = by.code.unwrap_or(nothing);
        Denial { code, layer: by.layer, rule, revision: self.revision() }
    }

    /// Judges one address that the permit's target has. Every address is judged before it is
    /// dialled, and by the resolver before it is told to a guest.
    ///
    /// A special-purpose address passes only if an allow rule names a network within its block, and
    /// only as far as the layers above that rule's let the address through; a link-local or metadata
    /// address only if a rule of the platform does. An address of this host never passes.
    pub fn judge_address(
        &self,
        permit: &Permit,
        address: IpAddr,
        own: &OwnAddresses,
    ) -> Result<Dialable, Denial> {
        self.weigh_address(permit, address, own).map(|(dialable, _)| dialable)
    }

    /// The refusal that mode observe keeps from being one, of what the permit is for or of this
    /// address of it: what is recorded in place of the rule that let it through.
    #[must_use]
    pub fn would_deny(
        &self,
        permit: &Permit,
        address: IpAddr,
        own: &OwnAddresses,
    ) -> Option<Denial> {
        if !self.observes() {
            return None;
        }
        let waived = || self.weigh_address(permit, address, own).ok()?.1;
        permit.would_deny().cloned().or_else(waived)
    }

    fn weigh_address(
        &self,
        permit: &Permit,
        address: IpAddr,
        own: &OwnAddresses,
    ) -> Result<(Dialable, Option<Denial>), Denial> {
        let address = address.to_canonical();
        let closed = |code| Err(Denial::because(code, self.revision()));
        if matches!(permit.target, Target::Address(only) if only != address) {
            return closed(Code::NoRule);
        }
        let class = AddressClass::of(address, own);
        // No rule opens a service of this host: a tenant could write it.
        let host = |address: IpAddr| address.is_loopback() || address.is_unspecified();
        let ours = class == AddressClass::Own
            || is_ours(address)
            || host(address)
            || carried(address).is_some_and(|v4| host(v4.into()));
        let public = class == AddressClass::Public;
        let service = host_service(address);
        let (mut opened, mut above, mut always, mut waived) = (public, true, false, None);
        for index in self.layers().iter().flatten() {
            let (mut denied, mut lets) = (None, index.default == Effect::Allow);
            index.holding(address, |clause| match clause.effect {
                _ if !permit.reaches(clause) => {}
                Effect::Deny => denied = Some(clause),
                Effect::Allow => {
                    lets = true;
                    always |= index.layer == Layer::Platform && clause.terms.conditions.always;
                    let means = names(clause, address);
                    opened |= above && !ours && means && may_open(index.layer, clause, service);
                }
            });
            if let Some(v4) = carried(address) {
                index.holding(v4.into(), |clause| {
                    if clause.effect == Effect::Deny && permit.reaches(clause) {
                        denied = Some(clause);
                    }
                });
            }
            // Observing opens no special-purpose address: there, every layer is enforced.
            let waives = index.observes && public;
            if let Some(clause) = denied {
                let by = self.denial(Refusal::by(Code::Rule, index.layer, clause), Code::Rule);
                match waives {
                    true => waived = waived.or(Some(by)),
                    false => return Err(by),
                }
            }
            above &= lets || waives;
        }
        if !opened {
            return closed(Code::PrivateAddress);
        }
        if !above && !always && matches!(permit.target, Target::Address(_)) {
            return closed(Code::NoRule);
        }
        Ok((Dialable(SocketAddr::new(address, permit.port)), waived))
    }
}

impl Permit {
    /// Whether a rule's ports and transport are the permit's. An answer has no port yet: any port
    /// will do to let it through, and every port must be meant to deny it.
    fn reaches(&self, clause: &Clause) -> bool {
        let ports = &clause.terms.ports;
        match (self.mode, clause.effect) {
            (Mode::Answer, Effect::Allow) => true,
            (Mode::Answer, Effect::Deny) => {
                ports.is_empty() && clause.terms.conditions.protocol.is_none()
            }
            _ => carries(clause, self.protocol) && (ports.is_empty() || ports.contains(self.port)),
        }
    }
}

/// The refusal whose rule came nearer; the first of equals.
fn nearer<'a, 'f>(
    old: (Refusal<'a>, Basis<'f>),
    new: (Refusal<'a>, Basis<'f>),
) -> (Refusal<'a>, Basis<'f>) {
    if matches!(old.1, Basis::Nothing) || old.0.code < new.0.code { new } else { old }
}

/// Whether an allow rule means this address and not merely a wide network around it: `0.0.0.0/0` is
/// the internet, not the loopback.
fn names(clause: &Clause, address: IpAddr) -> bool {
    let Some(net) = clause.net else { return false };
    net.prefix_len() == net.max_prefix_len()
        || special(address).is_some_and(|(block, _)| block.contains(&net))
}

/// Whether a rule of this layer may open what it names: a metadata service says the host's secrets, so
/// only the operator does, by a rule for that service and not for a wider network.
fn may_open(layer: Layer, clause: &Clause, service: Option<IpNet>) -> bool {
    service.is_none_or(|block| {
        layer == Layer::Platform && clause.net.is_some_and(|net| block.contains(&net))
    })
}

/// What is shown in place of a rule.
const BY_DEFAULT: &str = "default allow";
const BY_OBSERVING: &str = "mode observe";
