//! `postern policy`: get, set, allow, deny, mode, explain.

use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::Subcommand;
use http::{HeaderMap, HeaderValue, Method, header};
use policy::{SandboxName, TenantName};
use serde_json::{Map, Value, json};

use crate::cli::screen::{Screen, noted};
use crate::client::{Client, Content};
use crate::error::{Error, in_file};
use crate::problem::Problem;
use crate::wire::{Change, Explained, Mode, Question, SetMode, TOML, Transport};

/// The exit code of `explain` for a flow that would not pass.
const DENIED: u8 = 4;

#[derive(Debug, Subcommand)]
pub(crate) enum Policy {
    /// Print a policy as TOML, or as JSON with --json.
    Get {
        /// A sandbox, `tenant/NAME`, or `platform` (over everything on the node).
        scope: Scope,
    },
    /// Replace a policy by a file.
    Set {
        /// A sandbox, `tenant/NAME`, or `platform` (over everything on the node).
        scope: Scope,
        /// The file, TOML or (by its ending) JSON; `-` reads TOML from standard input.
        file: PathBuf,
        /// Only if the policy is still at this revision.
        #[arg(long, value_name = "N")]
        if_revision: Option<u64>,
    },
    /// Add a rule that lets something through.
    Allow(Rule),
    /// Add a rule that refuses something; it beats every rule that allows it.
    Deny(Rule),
    /// Refuse what a policy does not allow, or only record it (and let it through).
    Mode {
        /// A sandbox, or `tenant/NAME`; the platform's policy is always enforced.
        scope: Scope,
        /// The mode.
        #[arg(value_enum)]
        mode: Mode,
        /// Only if the policy is still at this revision.
        #[arg(long, value_name = "N")]
        if_revision: Option<u64>,
    },
    /// Say what would happen to a flow, and why.
    Explain {
        /// The sandbox.
        name: SandboxName,
        /// `https://host/path`, `http://host/path`, `ws://host/path`, `host:port` or `address:port`.
        /// Names are not resolved.
        destination: String,
        /// Request method.
        #[arg(long)]
        method: Option<String>,
        /// Request path.
        #[arg(long)]
        path: Option<String>,
        /// Transport.
        #[arg(long, value_enum, default_value_t)]
        protocol: Transport,
    },
}

#[derive(Debug, clap::Args)]
pub(crate) struct Rule {
    /// A sandbox, `tenant/NAME`, or `platform` (over everything on the node).
    scope: Scope,
    /// Hosts (`x.org`, `*.x.org`, `.x.org`), addresses or networks.
    #[arg(required = true, value_name = "HOST")]
    peers: Vec<String>,
    /// Port or range, e.g. 443 or 8000-8010; may be given several times.
    #[arg(long = "port", value_name = "PORT", value_parser = port)]
    ports: Vec<Value>,
    /// Transport; `udp` only for addresses.
    #[arg(long, value_enum)]
    protocol: Option<Transport>,
    /// Request method; may be given several times.
    #[arg(long = "method", value_name = "METHOD")]
    methods: Vec<String>,
    /// Request path, `*` within a segment, `**` across; may be given several times.
    #[arg(long = "path", value_name = "PATH")]
    paths: Vec<String>,
    /// For `allow platform`: whatever the other layers leave out (a deny of theirs still holds).
    #[arg(long)]
    always: bool,
    /// For `allow`: what its far sides send or end wakes no sandbox that sleeps.
    #[arg(long)]
    no_wake_on_data: bool,
    /// A remark for people.
    #[arg(long)]
    comment: Option<String>,
}

/// Whose policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    Platform,
    Tenant(TenantName),
    Sandbox(SandboxName),
}

impl FromStr for Scope {
    type Err = &'static str;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const WRONG: &str = "use the name of a sandbox, tenant/NAME, or platform";
        match text.split_once('/') {
            None if text == "platform" => Ok(Self::Platform),
            None => text.parse().map(Self::Sandbox).map_err(|_| WRONG),
            Some(("tenant", name)) => name.parse().map(Self::Tenant).map_err(|_| WRONG),
            // For a sandbox that is called `platform`.
            Some(("sandbox", name)) => name.parse().map(Self::Sandbox).map_err(|_| WRONG),
            Some(_) => Err(WRONG),
        }
    }
}

impl Scope {
    /// What it means that no policy of this scope was ever written.
    const fn unset(&self) -> &'static str {
        match self {
            Self::Platform => "the platform has no say, tenants and sandboxes decide",
            Self::Tenant(_) => "this tenant has no say, the platform and its sandboxes decide",
            Self::Sandbox(_) => "nothing passes",
        }
    }
}

impl fmt::Display for Scope {
    /// The path of its policy.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Platform => f.write_str("/v1/platform/policy"),
            Self::Tenant(name) => write!(f, "/v1/tenants/{name}/policy"),
            Self::Sandbox(name) => write!(f, "/v1/sandboxes/{name}/policy"),
        }
    }
}

fn port(text: &str) -> Result<Value, &'static str> {
    let one = |text: &str| text.parse::<u16>().map_err(|_| "is not a port: use 1 to 65535, or A-B");
    match text.split_once('-') {
        None => one(text).map(Value::from),
        Some((first, last)) => one(first).and(one(last)).map(|_| Value::from(text)),
    }
}

impl Policy {
    pub(crate) async fn run(self, client: &Client, screen: &Screen) -> Result<u8, Error> {
        match self {
            Self::Get { scope } => get(&scope, client, screen).await?,
            Self::Set { scope, file, if_revision } => {
                let text = read(&file)?.into();
                let content =
                    if is_json(&file) { Content::Json(text) } else { Content::Toml(text) };
                let headers = only_if(if_revision);
                let sent = client.send(Method::PUT, &scope.to_string(), headers, content).await;
                let answer = sent.map_err(|error| in_file(error, &file))?;
                told(screen, &answer.json().await?)?;
            }
            Self::Allow(rule) => rule.add("allow", client, screen).await?,
            Self::Deny(rule) => rule.add("deny", client, screen).await?,
            Self::Mode { scope: Scope::Platform, .. } => {
                let problem = Problem::invalid("scope", "platform", "is always enforced");
                return Err(problem.fix("name a sandbox, or tenant/NAME").into());
            }
            Self::Mode { scope, mode, if_revision } => {
                let (path, headers) = (format!("{scope}/mode"), only_if(if_revision));
                let body = Content::json(&SetMode { mode })?;
                told(screen, &client.send(Method::PUT, &path, headers, body).await?.json().await?)?;
            }
            Self::Explain { name, destination, method, path, protocol } => {
                let question = Question { destination, method, path, protocol };
                let at = format!("/v1/sandboxes/{name}/policy/explain");
                let answer: Explained = client.post(&at, &question).await?;
                screen.either(&answer, |answer| explained(answer, screen))?;
                return Ok(if answer.allowed { 0 } else { DENIED });
            }
        }
        Ok(0)
    }
}

/// The header that makes a write depend on the revision that was read.
fn only_if(revision: Option<u64>) -> HeaderMap {
    let matching = revision.map(|revision| (header::IF_MATCH, HeaderValue::from(revision)));
    matching.into_iter().collect()
}

async fn get(scope: &Scope, client: &Client, screen: &Screen) -> Result<(), Error> {
    let mut headers = HeaderMap::new();
    let accept = if screen.is_json() { "application/json" } else { TOML };
    headers.insert(header::ACCEPT, HeaderValue::from_static(accept));
    let path = scope.to_string();
    let answer = client.send(Method::GET, &path, headers, Content::Nothing).await?;
    let revision = answer.etag().unwrap_or_default().trim_matches('"').to_owned();
    let text = answer.text().await?;
    if revision == "0" && !screen.is_json() {
        // What stands in its place denies everything, and would if it were written.
        return screen.line(format!("# none set: {}", scope.unset()));
    }
    screen.note(format_args!("# revision {revision}"));
    screen.line(text.trim_end())
}

impl Rule {
    async fn add(self, effect: &str, client: &Client, screen: &Screen) -> Result<(), Error> {
        let path = format!("{}/rules", self.scope);
        told(screen, &client.post(&path, &self.document(effect)).await?)
    }

    fn document(self, effect: &str) -> Value {
        let mut rule = Map::new();
        let mut put = |key: &str, value: Value| rule.insert(key.to_owned(), value);
        put(effect, json!(self.peers));
        if !self.ports.is_empty() {
            put("ports", json!(self.ports));
        }
        if let Some(protocol) = self.protocol {
            put("protocol", json!(protocol));
        }
        if !self.methods.is_empty() {
            put("methods", json!(self.methods));
        }
        if !self.paths.is_empty() {
            put("paths", json!(self.paths));
        }
        if self.always {
            put("always", json!(true));
        }
        if self.no_wake_on_data {
            put("wake_on_data", json!(false));
        }
        if let Some(comment) = self.comment {
            put("comment", json!(comment));
        }
        Value::Object(rule)
    }
}

fn told(screen: &Screen, change: &Change) -> Result<(), Error> {
    screen.either(change, |change| {
        let Change { revision, sandboxes, checked, cut, closing, notes } = change;
        let late = (*closing > 0).then(|| format!(", {closing} not over yet: write it again"));
        let done = format!(
            "revision {revision} is in force for {sandboxes} sandbox{}; {checked} open flow{} judged again, {cut} cut{}",
            if *sandboxes == 1 { "" } else { "es" },
            if *checked == 1 { "" } else { "s" },
            late.unwrap_or_default()
        );
        noted(done, notes)
    })
}

fn explained(answer: &Explained, screen: &Screen) -> String {
    let code = |key| answer.explanation.get(key).and_then(Value::as_str);
    let verdict = match (answer.allowed, code("would_deny")) {
        (true, None) => screen.good("passes"),
        (true, Some(code)) => screen.doubtful(&format!("passes, observed: {code}")),
        (false, _) => screen.bad(&format!("refused: {}", code("code").unwrap_or("refused"))),
    };
    let sentences = answer.explanation.get("sentences").and_then(Value::as_array);
    let sentences = sentences.into_iter().flatten().filter_map(Value::as_str);
    std::iter::once(verdict.as_str()).chain(sentences).collect::<Vec<_>>().join("\n")
}

/// The text of a file, or of standard input for `-`.
pub(crate) fn read(path: &Path) -> Result<String, Error> {
    let mut text = String::new();
    let read = if path == Path::new("-") {
        std::io::stdin().read_to_string(&mut text).map(|_| text)
    } else {
        std::fs::read_to_string(path)
    };
    read.map_err(|source| Error::ReadFile { path: path.to_owned(), source })
}

pub(crate) fn is_json(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scope_is_a_sandbox_unless_it_says_otherwise() {
        for (text, path) in [
            ("demo", "/v1/sandboxes/demo/policy"),
            ("tenant/acme", "/v1/tenants/acme/policy"),
            ("platform", "/v1/platform/policy"),
            ("sandbox/platform", "/v1/sandboxes/platform/policy"),
        ] {
            assert_eq!(text.parse::<Scope>().expect(text).to_string(), path);
        }
    }

    #[test]
    fn a_rule_from_the_command_line_is_one_the_policy_language_has() {
        let rule = Rule {
            scope: Scope::Platform,
            peers: vec!["203.0.113.0/24".into()],
            ports: vec![port("3478").expect("port"), port("4000-4010").expect("range")],
            protocol: Some(Transport::Udp),
            methods: Vec::new(),
            paths: Vec::new(),
            always: true,
            no_wake_on_data: false,
            comment: Some("turn".into()),
        };
        let document = json!({ "rule": [rule.document("allow")] }).to_string();
        let read = policy::Policy::from_json(&document).expect("valid");
        assert_eq!(read.rules().len(), 1);
        assert!(port("0x1").is_err() && port("70000").is_err() && port("1-x").is_err());
    }
}
