//! `postern create`: the policy checked here, the work done there, each step shown.

use std::path::PathBuf;
use std::time::Duration;

use http::{HeaderMap, Method};
use indicatif::{ProgressBar, ProgressStyle};
use policy::{Layer, Policy, SandboxName, TenantName};
use serde_json::json;
use serde_json::value::RawValue;

use crate::cli::screen::{Screen, noted};
use crate::client::{Client, Content};
use crate::error::{Error, in_file};
use crate::problem::Problem;
use crate::units::{Size, Span};
use crate::wire::{self, ColdBoot, Driver, Mode, OnIdle, Sandbox, Step};

#[derive(Debug, clap::Args)]
pub(crate) struct Create {
    /// Name of the sandbox: 1 to 40 of a-z, 0-9 and '-'.
    name: SandboxName,
    #[command(flatten)]
    policy: GivenPolicy,
    /// Tenant it belongs to.
    #[arg(long)]
    tenant: Option<TenantName>,
    /// Guest memory, e.g. 256M.
    #[arg(long, value_name = "SIZE")]
    memory: Option<Size>,
    /// Virtual CPUs.
    #[arg(long, value_name = "N")]
    vcpus: Option<u8>,
    /// What runs it.
    #[arg(long, value_enum, default_value_t)]
    driver: Driver,
    #[command(flatten)]
    terms: GivenTerms,
}

/// The policy of a sandbox that is to be made.
#[derive(Debug, clap::Args)]
pub(crate) struct GivenPolicy {
    /// File with its policy, TOML or (by its ending) JSON; `-` reads TOML from standard input.
    #[arg(long, value_name = "FILE", conflicts_with = "allow")]
    policy: Option<PathBuf>,
    /// Host it may reach, as a rule of a policy would name it; may be given several times.
    #[arg(long, value_name = "HOST")]
    allow: Vec<String>,
    /// Whether its policy refuses what it does not allow, or only records it; none: as the file
    /// says, or `enforce`.
    #[arg(long, value_enum)]
    mode: Option<Mode>,
}

/// How it is to rest and live.
#[derive(Debug, clap::Args)]
pub(crate) struct GivenTerms {
    /// What becomes of it when it is idle; none: as configured.
    #[arg(long, value_enum)]
    pub(super) on_idle: Option<OnIdle>,
    /// How long nothing may go on before it is idle, e.g. 15s.
    #[arg(long, value_name = "SPAN")]
    pub(super) idle_after: Option<Span>,
    /// It is removed so long after it was made or renewed, e.g. 2h.
    #[arg(long, value_name = "SPAN")]
    pub(super) ttl: Option<Span>,
    /// It is removed so long after it was made, renewed or not, e.g. 7d.
    #[arg(long, value_name = "SPAN")]
    pub(super) max_life: Option<Span>,
    /// What becomes of it when its memory is lost, as when the host is started anew; none: as configured.
    #[arg(long, value_enum)]
    pub(super) cold_boot: Option<ColdBoot>,
}

impl Create {
    pub(crate) async fn run(self, client: &Client, screen: &Screen) -> Result<(), Error> {
        let (policy, terms) = (self.policy.read()?, self.terms);
        let body = Content::json(&wire::Create {
            name: self.name.clone(),
            tenant: self.tenant,
            driver: self.driver,
            memory: self.memory,
            vcpus: self.vcpus,
            policy,
            on_idle: terms.on_idle,
            idle_after: terms.idle_after,
            ttl: terms.ttl,
            max_life: terms.max_life,
            cold_boot: terms.cold_boot,
        })?;
        let path = "/v1/sandboxes?progress=true";
        let mut lines = client.send(Method::POST, path, HeaderMap::new(), body).await?.lines();
        let mut shown = Shown::begin(screen, &self.name);
        while let Some(line) = lines.next().await? {
            match serde_json::from_str(&line) {
                Ok(Step::Progress(step)) => shown.step(&step.doing, step.at_ms),
                Ok(Step::Sandbox(made)) => {
                    shown.end();
                    return screen.either(&made, |made| noted(done(made), &made.notes));
                }
                Ok(Step::Error(problem)) => {
                    shown.end();
                    return Err(problem.into());
                }
                Err(_) => return Err(Error::Answer("a step that is not known".into())),
            }
        }
        Err(Error::Answer("nothing at the end".into()))
    }
}

impl GivenPolicy {
    /// As the API takes it; none where nothing is given.
    pub(super) fn read(&self) -> Result<Option<Box<RawValue>>, Error> {
        let mut document = match &self.policy {
            Some(path) => {
                let text = crate::cli::policy::read(path)?;
                let json = crate::cli::policy::is_json(path);
                let read = if json { Policy::from_json(&text) } else { Policy::from_toml(&text) };
                let policy = read.map_err(Problem::from).and_then(|policy| {
                    policy.check_layer(Layer::Sandbox).map_err(|refused| {
                        let line = match json {
                            true => Policy::line_in_json(&text, &refused.field),
                            false => Policy::line_in_toml(&text, &refused.field),
                        };
                        Problem::from(refused).at(line)
                    })?;
                    Ok(policy)
                });
                policy.map_err(|problem| in_file(problem.into(), path))?.to_json()
            }
            None if self.allow.is_empty() && self.mode.is_none() => return Ok(None),
            None if self.allow.is_empty() => json!({}),
            None => json!({ "rule": [{ "allow": self.allow }] }),
        };
        if let (Some(mode), Some(keys)) = (self.mode, document.as_object_mut()) {
            keys.insert("mode".to_owned(), json!(mode));
        }
        Ok(serde_json::value::to_raw_value(&document).ok())
    }
}

fn done(made: &Sandbox) -> String {
    let is = format!("{} is {}", made.name, made.state);
    match (made.driver, &made.tap, &made.netns) {
        (Driver::External, Some(tap), Some(netns)) => {
            format!("{is}: open the tap {tap} in the network namespace {netns}")
        }
        _ => is,
    }
}

/// Steps on standard error: one moving line on a terminal, a line each elsewhere.
enum Shown {
    Moving(ProgressBar),
    Lines,
    Nothing,
}

impl Shown {
    fn begin(screen: &Screen, name: &SandboxName) -> Self {
        if screen.is_json() {
            return Self::Nothing;
        }
        if !screen.is_lively() {
            return Self::Lines;
        }
        let bar = ProgressBar::new_spinner();
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} ({elapsed})") {
            bar.set_style(style);
        }
        bar.set_message(format!("creating {name}"));
        bar.enable_steady_tick(Duration::from_millis(100));
        Self::Moving(bar)
    }

    fn step(&mut self, doing: &str, at_ms: u64) {
        match self {
            Self::Moving(bar) => bar.set_message(doing.to_owned()),
            Self::Lines => Screen::new(false).note(format!("{at_ms:>6} ms  {doing}")),
            Self::Nothing => {}
        }
    }

    fn end(&self) {
        if let Self::Moving(bar) = self {
            bar.finish_and_clear();
        }
    }
}
