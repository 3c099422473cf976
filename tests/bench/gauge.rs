//! What a process costs: processor time of it and its children, and its memory. Read from /proc.
//! Time that the kernel spends on packets outside of any process is not in it.

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use nix::sys::resource::{UsageWho, getrusage};

/// Processor time that this process and its descendants have used, all threads that still run.
pub(crate) fn cpu(pid: u32) -> Duration {
    let nanos = family(pid).into_iter().flat_map(threads).map(|thread| {
        let stat = fs::read_to_string(format!("{thread}/schedstat")).unwrap_or_default();
        stat.split(' ').next().and_then(|nanos| nanos.parse::<u64>().ok()).unwrap_or(0)
    });
    Duration::from_nanos(nanos.sum())
}

/// Processor time that we ourselves have used: the load, the guests' cables and the far side.
pub(crate) fn own_cpu() -> Duration {
    let usage = getrusage(UsageWho::RUSAGE_SELF).expect("our own usage");
    let time = |of: nix::sys::time::TimeVal| {
        let nanos = i128::from(of.tv_sec()) * 1_000_000_000 + i128::from(of.tv_usec()) * 1000;
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(0))
    };
    time(usage.user_time()) + time(usage.system_time())
}

/// Bytes of memory that a process holds, shared pages included.
pub(crate) fn memory(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
    let kib = line.split_whitespace().next().and_then(|kib| kib.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

/// Open descriptors of a process.
pub(crate) fn descriptors(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count)
}

/// A process and all below it.
fn family(pid: u32) -> BTreeSet<u32> {
    let (mut found, mut left) = (BTreeSet::new(), vec![pid]);
    while let Some(pid) = left.pop() {
        if found.insert(pid) {
            for thread in threads(pid) {
                let children = fs::read_to_string(format!("{thread}/children"));
                let children = children.unwrap_or_default();
                left.extend(children.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
            }
        }
    }
    found
}

fn threads(pid: u32) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task"));
    let tasks = tasks.into_iter().flatten().flatten();
    tasks.map(|task| task.path().display().to_string()).collect()
}
