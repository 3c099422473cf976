//! One layer's opinion of one flow, and the opinions added up.
//!
//! Every match of a rule against a flow is made here: `judge` adds layers up, `explain` shows them.

use std::cell::OnceCell;

use crate::compile::{Clause, LayerIndex, Terms};
use crate::document::{Ech, Effect, Layer, Protocol};
use crate::flow::{Evidence, Flow};
use crate::path::RequestPath;
use crate::reason::Code;

/// A flow while it is judged; its path is read at most once.
pub(crate) struct Case<'a> {
    pub(crate) flow: Flow<'a>,
    path: OnceCell<Option<RequestPath>>,
}

/// What one layer says.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reading<'a> {
    pub(crate) layer: Layer,
    pub(crate) default: Effect,
    /// Whether what it refuses is let through and recorded: its layer is in mode observe.
    pub(crate) observes: bool,
    /// A deny rule that matches.
    pub(crate) denied: Option<&'a Clause>,
    /// A deny rule that may match, but needs to see requests.
    pub(crate) clouded: Option<&'a Clause>,
    /// An allow rule that matches.
    pub(crate) allowed: Option<&'a Clause>,
    /// The allow rule that came nearest, and what it lacked.
    pub(crate) missed: Option<(Code, &'a Clause)>,
    /// Whether an allow rule that matches names the host by itself, and not by a wildcard.
    pub(crate) listed: bool,
    /// Whether an allow rule that matches says `wake_on_data = false`.
    pub(crate) unwoken: bool,
}

/// What each layer said about one name or one address; none for an absent layer.
pub(crate) type Readings<'a> = [Option<Reading<'a>>; 3];

/// The layers added up.
pub(crate) enum Sum<'a> {
    Denied(Refusal<'a>),
    Clouded(Refusal<'a>),
    /// Every layer lets it through; whether by a rule.
    Open {
        by: By<'a>,
        by_rule: bool,
    },
    Closed(Refusal<'a>),
}

/// What lets a flow through.
#[derive(Clone, Copy, Debug)]
pub(crate) struct By<'a> {
    /// The innermost layer that does.
    pub(crate) layer: Layer,
    /// Its rule, unless it is the default.
    pub(crate) clause: Option<&'a Clause>,
    /// Whether a rule of some layer names the host by itself.
    pub(crate) listed: bool,
    /// Whether a rule of some layer that lets it through says `wake_on_data = false`.
    pub(crate) unwoken: bool,
}

/// The outermost layer that refuses, and the rule it does so by, or that came nearest. No code: no
/// rule came near.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Refusal<'a> {
    pub(crate) code: Option<Code>,
    pub(crate) layer: Option<Layer>,
    pub(crate) clause: Option<&'a Clause>,
}

impl<'a> Refusal<'a> {
    pub(crate) fn by(code: Code, layer: Layer, clause: &'a Clause) -> Self {
        Self { code: Some(code), layer: Some(layer), clause: Some(clause) }
    }
}

/// How far a flow fits a clause whose peer it has.
enum Fit {
    Whole,
    /// As far as can be seen; the rest is in requests that cannot be seen, or in bytes that are no
    /// protocol the rule stands for.
    Unseen,
    Lacks(Code),
    /// Another transport: as if the rule were not there.
    Foreign,
}

impl<'a> Case<'a> {
    pub(crate) fn new(flow: Flow<'a>) -> Self {
        let destination = flow.destination.map(|address| address.to_canonical());
        Self { flow: Flow { destination, ..flow }, path: OnceCell::new() }
    }

    /// The same at another port, for a question.
    pub(crate) fn at_port(&self, port: u16) -> Self {
        Self::new(Flow { port, protocol: Protocol::Tcp, ..self.flow })
    }

    fn path(&self, path: &str) -> Option<&RequestPath> {
        self.path.get_or_init(|| RequestPath::read(path)).as_ref()
    }

    fn fit(&self, clause: &Clause) -> Fit {
        let Flow { protocol, port, evidence, .. } = &self.flow;
        let Terms { conditions, ports, .. } = &*clause.terms;
        if !carries(clause, *protocol) {
            return Fit::Foreign;
        }
        if !ports.is_empty() {
            if !ports.contains(*port) {
                return Fit::Lacks(Code::Port);
            }
        } else if clause.effect == Effect::Allow && clause.net.is_none() {
            match (evidence, port) {
                (Evidence::Tls { .. }, 443)
                | (Evidence::Request { .. } | Evidence::Upgrade(_), 80) => {}
                (Evidence::Question(_), 80 | 443) => {}
                (Evidence::Pinned { .. }, 80 | 443) => return Fit::Unseen,
                _ => return Fit::Lacks(Code::Port),
            }
        }
        match evidence {
            Evidence::Tls { ech: true, .. } if conditions.ech == Ech::Deny => {
                return Fit::Lacks(Code::Ech);
            }
            // Bytes that are passed on unread may hold any hello.
            Evidence::Pinned { .. } | Evidence::Upgrade(_) if conditions.ech == Ech::Deny => {
                return Fit::Unseen;
            }
            _ => {}
        }
        if conditions.needs_requests() { self.fit_request(clause) } else { Fit::Whole }
    }

    fn fit_request(&self, clause: &Clause) -> Fit {
        let conditions = &clause.terms.conditions;
        let (method, path) = match self.flow.evidence {
            Evidence::Request { method, path, .. } => (method, path),
            // Some request could pass, and some could not be denied.
            Evidence::Question(_) if clause.effect == Effect::Allow => return Fit::Whole,
            _ => return Fit::Unseen,
        };
        if !conditions.methods.is_empty() && !conditions.methods.iter().any(|m| m == method) {
            return Fit::Lacks(Code::Method);
        }
        if conditions.paths.is_empty() {
            return Fit::Whole;
        }
        match (self.path(path), clause.effect) {
            (Some(path), Effect::Allow) if path.is_named(&conditions.paths) => Fit::Whole,
            // A path that servers may read differently may be the one that is denied.
            (Some(path), Effect::Deny) if path.may_be_named(&conditions.paths) => Fit::Whole,
            (None, Effect::Deny) => Fit::Whole,
            _ => Fit::Lacks(Code::Path),
        }
    }
}

/// Whether a rule is about this transport: an allow rule about TCP and a deny rule about both,
/// unless it says.
pub(crate) fn carries(clause: &Clause, protocol: Protocol) -> bool {
    match (clause.terms.conditions.protocol, clause.effect) {
        (Some(named), _) => named == protocol,
        (None, Effect::Allow) => protocol == Protocol::Tcp,
        (None, Effect::Deny) => true,
    }
}

impl<'a> Reading<'a> {
    pub(crate) fn new(index: &LayerIndex) -> Self {
        Self {
            layer: index.layer,
            default: index.default,
            observes: index.observes,
            denied: None,
            clouded: None,
            allowed: None,
            missed: None,
            listed: false,
            unwoken: false,
        }
    }

    /// Adds one clause that names the flow's peer.
    pub(crate) fn see(&mut self, case: &Case<'_>, clause: &'a Clause) {
        match (clause.effect, case.fit(clause)) {
            (Effect::Deny, Fit::Whole) => {
                self.denied.get_or_insert(clause);
            }
            (Effect::Deny, Fit::Unseen) if !matches!(case.flow.evidence, Evidence::Question(_)) => {
                self.clouded.get_or_insert(clause);
            }
            (Effect::Allow, Fit::Whole) => {
                self.listed |= clause.exact;
                self.unwoken |= clause.terms.conditions.unwoken;
                if clause.terms.conditions.always || self.allowed.is_none() {
                    self.allowed = Some(clause);
                }
            }
            (Effect::Allow, Fit::Unseen) => self.miss(Code::Undecidable, clause),
            (Effect::Allow, Fit::Lacks(code)) => self.miss(code, clause),
            _ => {}
        }
    }

    fn miss(&mut self, code: Code, clause: &'a Clause) {
        // The order of the codes is the order in which a rule is compared.
        if self.missed.is_none_or(|(other, _)| other < code) {
            self.missed = Some((code, clause));
        }
    }

    /// Whether this layer lets the flow through, as long as nothing denies it.
    pub(crate) fn lets(&self) -> bool {
        self.allowed.is_some() || self.default == Effect::Allow
    }

    /// The same, with its refusals waived if its layer only observes.
    fn waived(self) -> Self {
        match self.observes {
            true => Self { default: Effect::Allow, denied: None, clouded: None, ..self },
            false => self,
        }
    }

    /// Whether it lets the flow through whatever other layers lack: the platform's right alone.
    pub(crate) fn always(&self) -> bool {
        self.layer == Layer::Platform
            && self.allowed.is_some_and(|clause| clause.terms.conditions.always)
    }
}

/// Adds the layers up: none may deny, and each must let through. With `waive`, a layer in mode
/// observe refuses nothing, as if it had a rule for everything.
pub(crate) fn sum<'a>(readings: &Readings<'a>, waive: bool) -> Sum<'a> {
    let readings = readings.map(|one| one.map(|one| if waive { one.waived() } else { one }));
    let each = || readings.iter().flatten();
    if let Some((layer, clause)) = each().find_map(|r| Some((r.layer, r.denied?))) {
        return Sum::Denied(Refusal::by(Code::Rule, layer, clause));
    }
    if let Some((layer, clause)) = each().find_map(|r| Some((r.layer, r.clouded?))) {
        return Sum::Clouded(Refusal::by(Code::Undecidable, layer, clause));
    }
    let always = each().any(Reading::always);
    if let Some(reading) = each().find(|r| !r.lets() && !always) {
        let (code, clause) = reading.missed.unzip();
        return Sum::Closed(Refusal { code, layer: Some(reading.layer), clause });
    }
    match each().rfind(|r| r.lets()) {
        Some(reading) => Sum::Open {
            by: By {
                layer: reading.layer,
                clause: reading.allowed,
                listed: each().any(|r| r.listed),
                unwoken: each().any(|r| r.unwoken),
            },
            by_rule: each().any(|r| r.allowed.is_some() || (waive && r.observes)),
        },
        None => Sum::Closed(Refusal::default()),
    }
}
