//! What would happen to a flow, and why, by the same code that decides.

use serde::Serialize;

use crate::class::{OwnAddresses, host_service};
use crate::compile::Compiled;
use crate::document::{Effect, Layer};
use crate::id::Revision;
use crate::judge::{Denial, Flow, Mode, Permit, Protocol, Target, Verdict};
use crate::reading::Reading;
use crate::reason::Code;

/// The answer to "would this pass?", layer by layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Explanation {
    /// What happens to the flow.
    pub verdict: Outcome,
    /// Why not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub code: Option<Code>,
    /// The layer that decided.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer: Option<Layer>,
    /// The rule that decided.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
    /// The name or address that would be dialled. Its addresses are judged again when it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// The port that would be dialled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// How it would be carried.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<Mode>,
    /// Why it would be refused, if it passes only because a layer is in mode observe.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub would_deny: Option<Code>,
    /// Whether what comes of it wakes the sandbox while that sleeps; none where nothing passes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wake_on_data: Option<bool>,
    /// The revision it was judged by.
    pub revision: Revision,
    /// What each layer said, outermost first. Absent layers are left out.
    pub layers: Vec<LayerView>,
    /// The same for a person, a sentence each.
    pub sentences: Vec<String>,
}

/// What happens to a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// It leaves.
    Pass,
    /// It is refused.
    Deny,
    /// It is refused, because what it shows is not enough to judge it.
    Undecidable,
}

/// What one layer said.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LayerView {
    /// Which layer.
    pub layer: Layer,
    /// What it said.
    pub verdict: Outcome,
    /// The rule it said it by; none where its default decided.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
    /// Why it refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub code: Option<Code>,
    /// Whether it is in mode observe: what it refuses passes, and is recorded.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub observes: bool,
}

/// Judges a flow and tells how. An address is judged as it would be when it is dialled; the addresses
/// of a name are known only then.
#[must_use]
pub fn explain(compiled: &Compiled, flow: &Flow<'_>, own: &OwnAddresses) -> Explanation {
    let (mut verdict, basis) = compiled.decide(flow);
    let mut hint = None;
    if let Verdict::Pass(permit) = &verdict
        && let Target::Address(address) = *permit.target()
        && let Err(denial) = compiled.judge_address(permit, address, own)
    {
        let service = denial.code == Code::PrivateAddress && host_service(address).is_some();
        hint = service.then_some(OPERATORS_ONLY);
        verdict = Verdict::Deny(denial);
    }
    let would_deny = match &verdict {
        Verdict::Pass(permit) => match *permit.target() {
            Target::Address(address) => compiled.would_deny(permit, address, own),
            Target::Name(_) => permit.would_deny().cloned(),
        },
        _ => None,
    };
    let readings = compiled.readings(flow, basis);
    let layers: Vec<LayerView> = readings.iter().flatten().map(view).collect();
    let mut sentences: Vec<String> = layers.iter().map(LayerView::sentence).collect();
    let mut told = match &verdict {
        Verdict::Pass(permit) => passed(permit, would_deny.as_ref()),
        Verdict::Deny(denial) => refused(Outcome::Deny, denial),
        Verdict::Undecidable(denial) => refused(Outcome::Undecidable, denial),
    };
    sentences.append(&mut told.sentences);
    sentences.extend(hint.map(str::to_owned));
    Explanation { layers, sentences, ..told }
}

/// What to do about a metadata service that somebody else's rule names.
const OPERATORS_ONLY: &str = "It is a link-local or metadata address, which can say the host's own \
                              secrets: only a rule of the platform policy that names it opens it.";

fn view(reading: &Reading<'_>) -> LayerView {
    let (verdict, clause, code) = match *reading {
        Reading { denied: Some(clause), .. } => (Outcome::Deny, Some(clause), Some(Code::Rule)),
        Reading { clouded: Some(clause), .. } => {
            (Outcome::Undecidable, Some(clause), Some(Code::Undecidable))
        }
        Reading { allowed: Some(clause), .. } => (Outcome::Pass, Some(clause), None),
        Reading { default: Effect::Allow, .. } => (Outcome::Pass, None, None),
        Reading { missed: Some((Code::Undecidable, clause)), .. } => {
            (Outcome::Undecidable, Some(clause), Some(Code::Undecidable))
        }
        Reading { missed: Some((code, clause)), .. } => (Outcome::Deny, Some(clause), Some(code)),
        _ => (Outcome::Deny, None, Some(Code::NoRule)),
    };
    let rule = clause.map(|clause| clause.shown().to_string());
    LayerView { layer: reading.layer, verdict, rule, code, observes: reading.observes }
}

impl LayerView {
    fn sentence(&self) -> String {
        let Self { layer, verdict, rule, code, .. } = self;
        match (verdict, rule, code) {
            (Outcome::Pass, Some(rule), _) => {
                format!("The {layer} policy lets it through: {rule}.")
            }
            (Outcome::Pass, None, _) => {
                format!(
                    "The {layer} policy lets it through: no rule matches, and its default is allow."
                )
            }
            (_, Some(rule), Some(Code::Rule)) => format!("The {layer} policy denies it: {rule}."),
            (_, Some(rule), Some(code)) => {
                format!("The {layer} policy does not let it through by {rule}: {}.", code.meaning())
            }
            (_, rule, _) => {
                let near = rule.as_deref().unwrap_or("no rule matches");
                format!("The {layer} policy does not let it through: {near}.")
            }
        }
    }
}

/// What a rule says of its far sides.
const ASLEEP: &str = "While the sandbox sleeps, nothing that the far side does wakes it: a rule says \
                      wake_on_data = false.";

fn passed(permit: &Permit, would_deny: Option<&Denial>) -> Explanation {
    let target = match permit.target() {
        Target::Name(host) => host.to_string(),
        Target::Address(address) => address.to_string(),
    };
    let connects = permit.mode() != Mode::Answer;
    let told = match permit.mode() {
        Mode::Answer => format!("The question is answered: {target} could pass on some port."),
        Mode::Splice => format!("It passes to {target} port {}, TLS unopened.", permit.port()),
        Mode::Requests => format!("The request passes to {target} port {}.", permit.port()),
        Mode::Raw => format!("It passes to {target} port {}, as raw bytes.", permit.port()),
    };
    let observed = would_deny.map(|denial| {
        let Denial { code, .. } = denial;
        format!("It passes because of mode observe only, and is recorded as such; enforced, it is refused ({code}): {}.", code.meaning())
    });
    let asleep = (connects && !permit.wakes()).then(|| ASLEEP.to_owned());
    Explanation {
        verdict: Outcome::Pass,
        code: None,
        layer: Some(permit.layer()),
        rule: Some(permit.rule()),
        target: Some(target),
        port: connects.then_some(permit.port()),
        mode: Some(permit.mode()),
        would_deny: would_deny.map(|denial| denial.code),
        wake_on_data: (connects && permit.protocol() == Protocol::Tcp).then_some(permit.wakes()),
        revision: permit.revision(),
        layers: Vec::new(),
        sentences: std::iter::once(told).chain(observed).chain(asleep).collect(),
    }
}

fn refused(verdict: Outcome, denial: &Denial) -> Explanation {
    Explanation {
        verdict,
        code: Some(denial.code),
        layer: denial.layer,
        rule: denial.rule.clone(),
        target: None,
        port: None,
        mode: None,
        would_deny: None,
        wake_on_data: None,
        revision: denial.revision,
        layers: Vec::new(),
        sentences: vec![format!("It is refused ({}): {}.", denial.code, denial.code.meaning())],
    }
}
