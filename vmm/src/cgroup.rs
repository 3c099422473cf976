//! A control group per microVM: memory, processor and number of tasks, whatever the guest does.
//!
//! Version 2 where its controllers are, else the hierarchies of version 1. A controller that this
//! host lacks is reported, never silently assumed.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::hypervisor::Machine;

/// Our own group, above the machines' groups.
const OURS: &str = "postern";
/// What is limited.
const CONTROLLERS: [&str; 3] = ["memory", "cpu", "pids"];
/// MiB beyond the guest's memory that its process may use: QEMU itself, its translation cache
/// (128 MiB under TCG), page tables, buffers of the disk and the network.
const OVERHEAD_MIB: u64 = 384;
/// Tasks of a process beside its virtual CPUs: the disk's worker threads.
const TASKS: u64 = 80;
/// Microseconds over which the processor is measured out.
const PERIOD: u64 = 100_000;

/// What one machine may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    memory_bytes: u64,
    vcpus: u64,
}

impl Limits {
    pub(crate) fn of(machine: &Machine) -> Self {
        let memory_bytes = (u64::from(machine.memory_mib) + OVERHEAD_MIB) << 20;
        Self { memory_bytes, vcpus: u64::from(machine.vcpus) }
    }

    /// File and value, for version 2 and version 1.
    fn files(self, unified: bool, controller: &str) -> Vec<(&'static str, String)> {
        let Self { memory_bytes, vcpus } = self;
        let (quota, tasks) = (vcpus * PERIOD, (vcpus + TASKS).to_string());
        match (unified, controller) {
            (true, "memory") => {
                vec![("memory.max", memory_bytes.to_string()), ("memory.swap.max", "0".to_owned())]
            }
            (true, "cpu") => vec![("cpu.max", format!("{quota} {PERIOD}"))],
            (false, "memory") => vec![("memory.limit_in_bytes", memory_bytes.to_string())],
            (false, "cpu") => vec![
                ("cpu.cfs_period_us", PERIOD.to_string()),
                ("cpu.cfs_quota_us", quota.to_string()),
            ],
            _ => vec![("pids.max", tasks)],
        }
    }
}

/// Where this host's controllers are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// The mounted version 2 hierarchy that has all of [`CONTROLLERS`].
    unified: Option<PathBuf>,
    /// Controller and mounted version 1 hierarchy.
    legacy: Vec<(&'static str, PathBuf)>,
}

impl Layout {
    pub(crate) fn find() -> Self {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        Self::parse(&mounts, |unified| {
            fs::read_to_string(unified.join("cgroup.controllers")).unwrap_or_default()
        })
    }

    fn parse(mountinfo: &str, controllers: impl Fn(&Path) -> String) -> Self {
        let mut layout = Self { unified: None, legacy: Vec::new() };
        for line in mountinfo.lines() {
            // proc(5): mount point is field 5; after " - ": type, source, super options.
            let Some((before, after)) = line.split_once(" - ") else { continue };
            let Some(point) = before.split(' ').nth(4).map(PathBuf::from) else { continue };
            let mut after = after.split(' ');
            match (after.next(), after.nth(1)) {
                (Some("cgroup2"), _) => {
                    let has = controllers(&point);
                    let has = |wanted: &str| has.split_ascii_whitespace().any(|one| one == wanted);
                    if CONTROLLERS.into_iter().all(has) {
                        layout.unified.get_or_insert(point);
                    }
                }
                (Some("cgroup"), Some(options)) => {
                    let here = |wanted: &&str| options.split(',').any(|option| option == *wanted);
                    let found = CONTROLLERS.into_iter().filter(here);
                    layout.legacy.extend(found.map(|controller| (controller, point.clone())));
                }
                _ => {}
            }
        }
        layout
    }

    /// 2, 1, or 0 when nothing can be limited.
    pub(crate) fn version(&self) -> u8 {
        match (&self.unified, self.legacy.is_empty()) {
            (Some(_), _) => 2,
            (None, false) => 1,
            (None, true) => 0,
        }
    }

    /// Controllers this host lacks.
    pub(crate) fn missing(&self) -> Vec<&'static str> {
        let has = |wanted: &&str| self.legacy.iter().any(|(controller, _)| controller == wanted);
        if self.unified.is_some() {
            return Vec::new();
        }
        CONTROLLERS.into_iter().filter(|controller| !has(controller)).collect()
    }
}

/// Makes the machine's groups with their limits. Empty, with a warning, where the host has none.
pub(crate) fn create(machine: &Machine) -> Result<Vec<PathBuf>, Error> {
    let (name, limits) = (&name_of(machine), Limits::of(machine));
    let layout = Layout::find();
    if !layout.missing().is_empty() {
        tracing::warn!(missing = ?layout.missing(), "this host cannot limit microVMs");
    }
    let mut groups = Vec::new();
    let make = |groups: &mut Vec<PathBuf>| {
        if let Some(root) = &layout.unified {
            let enable = CONTROLLERS.map(|controller| format!("+{controller}")).join(" ");
            write(&root.join("cgroup.subtree_control"), &enable)?;
            make_dir(&root.join(OURS))?;
            write(&root.join(OURS).join("cgroup.subtree_control"), &enable)?;
            return add(groups, root, name, |group| {
                CONTROLLERS.into_iter().try_for_each(|one| set(group, limits.files(true, one)))
            });
        }
        for (controller, root) in &layout.legacy {
            make_dir(&root.join(OURS))?;
            add(groups, root, name, |group| set(group, limits.files(false, controller)))?;
        }
        Ok(())
    };
    make(&mut groups).inspect_err(|_| remove(&groups))?;
    Ok(groups)
}

/// The name of a machine's groups: its own directory, of which no other machine of this host has
/// the same, whatever installation it belongs to.
fn name_of(machine: &Machine) -> String {
    let words = machine.run_dir.iter().filter_map(|word| word.to_str());
    words.filter(|word| *word != "/").collect::<Vec<_>>().join(".")
}

/// The groups of a machine that are there.
pub(crate) fn existing(machine: &Machine) -> Vec<PathBuf> {
    let name = name_of(machine);
    let layout = Layout::find();
    let roots = layout.unified.iter().chain(layout.legacy.iter().map(|(_, root)| root));
    let mut groups: Vec<PathBuf> = roots.map(|root| root.join(OURS).join(&name)).collect();
    groups.retain(|group| group.is_dir());
    groups.sort();
    groups.dedup();
    groups
}

/// The processes in these groups.
pub(crate) fn processes(groups: &[PathBuf]) -> Vec<u32> {
    let listed =
        groups.iter().filter_map(|group| fs::read_to_string(group.join("cgroup.procs")).ok());
    let mut pids: Vec<u32> = listed
        .flat_map(|list| list.lines().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>())
        .collect();
    pids.sort_unstable();
    pids.dedup();
    pids
}

/// Removes groups that hold no process any more.
pub(crate) fn remove(groups: &[PathBuf]) {
    for group in groups {
        if let Err(error) = fs::remove_dir(group)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(group = %group.display(), %error, "control group not removed");
        }
    }
}

fn add(
    groups: &mut Vec<PathBuf>,
    root: &Path,
    name: &str,
    fill: impl FnOnce(&Path) -> Result<(), Error>,
) -> Result<(), Error> {
    let group = root.join(OURS).join(name);
    make_dir(&group)?;
    // Two controllers of version 1 may share a hierarchy.
    if !groups.contains(&group) {
        groups.push(group.clone());
    }
    fill(&group)
}

fn set(group: &Path, files: Vec<(&'static str, String)>) -> Result<(), Error> {
    for (file, value) in files {
        // Kernels without swap accounting lack this file, and then there is nothing to limit.
        if file == "memory.swap.max" && !group.join(file).exists() {
            continue;
        }
        write(&group.join(file), &value)?;
    }
    Ok(())
}

fn make_dir(path: &Path) -> Result<(), Error> {
    match fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made.map_err(|source| file("make the control group", path, source)),
    }
}

fn write(path: &Path, value: &str) -> Result<(), Error> {
    fs::write(path, value).map_err(|source| file("set", path, source))
}

fn file(act: &'static str, path: &Path, source: io::Error) -> Error {
    Error::File { act, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIFIED: &str =
        "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate";
    const LEGACY: &str = "\
        31 24 0:27 / /sys/fs/cgroup/memory rw shared:5 - cgroup cgroup rw,memory\n\
        32 24 0:28 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
        33 24 0:29 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n";

    #[test]
    fn version_two_is_taken_when_it_has_every_controller() {
        let layout = Layout::parse(UNIFIED, |_| "cpuset cpu io memory hugetlb pids".into());
        assert_eq!((layout.version(), layout.missing()), (2, Vec::new()));
        assert_eq!(layout.unified, Some("/sys/fs/cgroup".into()));
    }

    #[test]
    fn an_empty_version_two_beside_version_one_is_passed_over_and_gaps_are_named() {
        let layout = Layout::parse(&format!("{LEGACY}{UNIFIED}"), |_| String::new());
        assert_eq!((layout.version(), layout.missing()), (1, vec!["pids"]));
        assert_eq!(layout.legacy[1], ("cpu", "/sys/fs/cgroup/cpu,cpuacct".into()));
        let none = Layout::parse("", |_| String::new());
        assert_eq!((none.version(), none.missing().len()), (0, 3));
    }
}
