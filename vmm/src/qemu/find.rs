//! Finds the process of a machine without its [`Process`]: a daemon may die between the start of
//! one and the note of it in the journal. Looks at what only a process of ours has: the machine's
//! user id and its name on the command line. Never guesses by process id.

use std::fs;
use std::os::unix::fs::MetadataExt;

use crate::cgroup;
use crate::hypervisor::{DriverName, HostProcess, Machine, Process, stat};

/// The process of this machine, if one runs.
pub(super) fn find(machine: &Machine) -> Option<Process> {
    let processes = fs::read_dir("/proc").ok()?;
    let pids = processes.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let host = pids.filter_map(|pid| identify(machine, pid)).find(HostProcess::is_alive)?;
    Some(Process::new(DriverName::Qemu, machine, Some(host)))
}

fn identify(machine: &Machine, pid: u32) -> Option<HostProcess> {
    let owner = fs::metadata(format!("/proc/{pid}")).ok()?.uid();
    if owner != machine.uid {
        return None;
    }
    let words = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let marker = marker(&words, &format!("postern-{}", machine.name))?;
    let (_, start_time) = stat(pid)?;
    Some(HostProcess { pid, start_time, marker, groups: cgroup::existing(&machine.name) })
}

/// The value of `-uuid` on a command line whose `-name` is this.
fn marker(cmdline: &[u8], name: &str) -> Option<String> {
    let words: Vec<&[u8]> = cmdline.split(|byte| *byte == 0).collect();
    let value = |option: &str| {
        let at = words.iter().position(|word| *word == option.as_bytes())?;
        words.get(at + 1).copied()
    };
    if value("-name")? != name.as_bytes() {
        return None;
    }
    String::from_utf8(value("-uuid")?.to_vec()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_named_machine_has_its_marker() {
        let line = b"/usr/bin/qemu\0-name\0postern-a\0-uuid\x001234\0";
        assert_eq!(marker(line, "postern-a").as_deref(), Some("1234"));
        assert_eq!(marker(line, "postern-b"), None);
        assert_eq!(marker(b"/usr/bin/qemu\0-name\0postern-a", "postern-a"), None);
        assert_eq!(marker(b"", "postern-a"), None);
    }
}
