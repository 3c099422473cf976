//! Whether this machine can serve, found by trying: one check, one finding, one remedy each.
//!
//! Leaves nothing behind: rules are tried in a network namespace that ends with its thread.

mod checks;
mod neighbours;

use std::os::unix::fs::DirBuilderExt;

use serde::Serialize;

use crate::config::Config;

/// How a check came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Status {
    /// As it should be.
    Ok,
    /// It serves, but something will be missing.
    Warn,
    /// It cannot serve.
    Fail,
}

/// One check.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    /// What was looked at.
    pub name: &'static str,
    /// How it came out.
    pub status: Status,
    /// What was found.
    pub found: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

/// All checks.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The worst of them.
    pub status: Status,
    /// In the order they were made.
    pub checks: Vec<Check>,
}

impl Check {
    fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, status: Status::Ok, found: found.into(), remedy: None }
    }

    fn warn(name: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        let remedy = Some(remedy.into());
        Self { name, status: Status::Warn, found: found.into(), remedy }
    }

    fn fail(name: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        let remedy = Some(remedy.into());
        Self { name, status: Status::Fail, found: found.into(), remedy }
    }
}

impl Report {
    /// What keeps the daemon from serving, with the remedies, in one line; none if nothing does.
    #[must_use]
    pub fn unfit(&self) -> Option<String> {
        let failed = self.checks.iter().filter(|check| check.status == Status::Fail);
        let said: Vec<String> = failed
            .map(|check| {
                let remedy = check.remedy.as_deref().unwrap_or_default();
                format!("{}: {} ({remedy})", check.name, check.found)
            })
            .collect();
        (!said.is_empty()).then(|| said.join("; "))
    }
}

/// Makes every check. Nothing on this host is changed.
pub async fn examine(config: &Config) -> Report {
    let mut checks = essential(config).await;
    checks.extend(checks::machine(config).await);
    checks.push(checks::upstreams(config).await);
    checks.extend(checks::policies(config).await);
    checks.extend(checks::rest(config));
    checks.extend(neighbours::private(config).await);
    if let Ok(found) = tokio::task::spawn_blocking(neighbours::tracking).await {
        checks.push(found);
    }
    report(checks)
}

/// Makes only the checks whose failure keeps the daemon from serving: fast, and asks nobody. For the
/// daemon itself: the folders it will write to are made first.
pub async fn serviceable(config: &Config) -> Report {
    let dirs = [&config.state_dir, &config.audit.dir, &config.memory_dir];
    for dir in dirs.into_iter().filter(|dir| !dir.as_os_str().is_empty()) {
        // What it will hold is not for everybody on the host. A failure shows in the checks.
        let _ = std::fs::DirBuilder::new().recursive(true).mode(0o750).create(dir);
    }
    report(essential(config).await)
}

fn report(checks: Vec<Check>) -> Report {
    let status = checks.iter().map(|check| check.status).max().unwrap_or(Status::Ok);
    Report { status, checks }
}

async fn essential(config: &Config) -> Vec<Check> {
    let config = config.clone();
    let tried = tokio::task::spawn_blocking(move || checks::essential(&config)).await;
    tried.unwrap_or_else(|_| vec![Check::fail("checks", "a check panicked", "report this")])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Span;

    #[tokio::test]
    async fn a_folder_it_makes_is_not_open_to_everybody() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().expect("folder");
        let mut config = Config { state_dir: dir.path().join("state"), ..Config::default() };
        config.audit.dir = dir.path().join("audit");
        config.memory_dir = dir.path().join("memory");
        serviceable(&config).await;
        for made in [&config.state_dir, &config.audit.dir, &config.memory_dir] {
            let mode = std::fs::metadata(made).expect("made").permissions().mode();
            assert_eq!(mode & 0o007, 0, "{}: {mode:o}", made.display());
        }
    }

    #[test]
    fn the_folders_of_the_shipped_unit_are_not_open_to_everybody() {
        let unit = include_str!("../deploy/postern.service");
        for line in
            ["StateDirectoryMode=0750", "LogsDirectoryMode=0750", "RuntimeDirectoryMode=0711"]
        {
            assert!(unit.lines().any(|written| written == line), "{line}");
        }
    }

    #[tokio::test]
    async fn to_examine_makes_nothing_and_foretells_what_serving_will_make() {
        let dir = tempfile::tempdir().expect("folder");
        let mut config = Config { state_dir: dir.path().join("a/state"), ..Config::default() };
        config.audit.dir = "/dev/null/audit".into();
        config.memory_dir = "/dev/null/memory".into();
        let report = report(essential(&config).await);
        assert_eq!(std::fs::read_dir(dir.path()).expect("listed").count(), 0);
        let of = |name: &str| report.checks.iter().find(|check| check.name == name).expect(name);
        assert_eq!(of("state").status, Status::Ok, "{:?}", of("state"));
        assert!(of("state").found.contains("will be made"), "{:?}", of("state"));
        assert_eq!(of("audit").status, Status::Fail, "{:?}", of("audit"));
        assert_eq!(of("memory").status, Status::Fail, "{:?}", of("memory"));
    }

    #[test]
    fn a_slot_that_rests_for_less_than_its_ports_is_told() {
        let mut config = Config::default();
        assert!(checks::rest(&config).is_none(), "control: the usual");
        config.guests.slot_rest = Span::seconds(59);
        let told = checks::rest(&config).expect("a check");
        assert_eq!(told.status, Status::Warn);
        assert!(told.found.contains("59s"), "{told:?}");
    }

    #[tokio::test]
    async fn every_finding_that_is_not_ok_names_its_remedy() {
        let dir = tempfile::tempdir().expect("folder");
        let mut config = Config { state_dir: dir.path().join("new"), ..Config::default() };
        config.egress.addresses = vec!["192.0.2.77".parse().expect("address")];
        config.qemu.image = dir.path().join("none");
        let report = serviceable(&config).await;
        for check in &report.checks {
            assert_eq!(check.status == Status::Ok, check.remedy.is_none(), "{check:?}");
        }
        let egress = report.checks.iter().find(|check| check.name == "egress").expect("checked");
        assert_eq!(egress.status, Status::Fail);
        assert!(report.unfit().is_some_and(|said| said.contains("192.0.2.77")));
    }
}
