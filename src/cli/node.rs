//! Commands about this machine and this program: `doctor`, `openapi`, `completions`, `version`.

use std::path::PathBuf;

use clap::CommandFactory;
use serde_json::json;

use crate::cli::Arguments;
use crate::cli::screen::{Screen, table};
use crate::config::Config;
use crate::doctor::{self, Status};
use crate::error::Error;

#[derive(Debug, clap::Args)]
pub(crate) struct Local {
    /// Configuration file; without it, /etc/postern/postern.toml if there is one.
    #[arg(long, value_name = "FILE", env = "POSTERN_CONFIG")]
    pub(crate) config: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Completions {
    /// The shell.
    shell: clap_complete::Shell,
}

impl Local {
    pub(crate) async fn doctor(self, screen: &Screen) -> Result<u8, Error> {
        let config = Config::load(self.config.as_deref())?;
        let report = doctor::examine(&config).await;
        screen.either(&report, |report| {
            let rows = report.checks.iter().map(|check| {
                let status = match check.status {
                    Status::Ok => screen.good("ok"),
                    Status::Warn => screen.doubtful("warn"),
                    Status::Fail => screen.bad("fail"),
                };
                let remedy = check.remedy.clone().unwrap_or_default();
                [status, check.name.to_owned(), check.found.clone(), remedy]
            });
            table(&["", "CHECK", "FOUND", "REMEDY"], rows)
        })?;
        Ok(u8::from(report.status == Status::Fail))
    }
}

impl Completions {
    pub(crate) fn run(&self, screen: &Screen) -> Result<(), Error> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut Arguments::command(), "postern", &mut script);
        screen.raw(&script)
    }
}

pub(crate) fn openapi(screen: &Screen) -> Result<(), Error> {
    screen.line(crate::api::description().to_pretty_json().unwrap_or_default())
}

pub(crate) fn version(screen: &Screen) -> Result<(), Error> {
    let version = env!("CARGO_PKG_VERSION");
    screen.either(&json!({ "version": version }), |_| format!("postern {version}"))
}
