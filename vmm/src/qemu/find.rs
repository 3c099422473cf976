//! Finds the process of a machine without its [`Process`]: a daemon may die between the start of
//! one and the note of it in the journal. Looks at what only a process of ours has: the machine's
//! user id and its name on the command line. Never guesses by process id.

use std::fs;
use std::os::unix::fs::MetadataExt;

use crate::cgroup;
use crate::hypervisor::{DriverName, HostProcess, Machine, Process};
use crate::qemu::command::guest_name;

/// The process of this machine, if one runs.
pub(super) fn find(machine: &Machine) -> Option<Process> {
    let processes = fs::read_dir("/proc").ok()?;
    let pids = processes.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let host = pids.filter_map(|pid| identify(machine, pid)).find(HostProcess::is_alive)?;
    Some(Process::new(DriverName::Qemu, machine, Some(host)))
}

fn identify(machine: &Machine, pid: u32) -> Option<HostProcess> {
    let owner = fs::metadata(format!("/proc/{pid}")).ok()?.uid();
    let words = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let ours = owner == machine.uid && is_named(&words, &guest_name(&machine.name));
    ours.then(|| HostProcess::identify(pid, cgroup::existing(machine))).flatten()
}

/// Whether the value of `-name` on this command line is this.
fn is_named(cmdline: &[u8], name: &str) -> bool {
    let mut words = cmdline.split(|byte| *byte == 0);
    words.any(|word| word == b"-name") && words.next() == Some(name.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_line_names_one_machine() {
        let line = b"/usr/bin/qemu\0-name\0postern-a\0-m\x00256M\0";
        assert!(is_named(line, "postern-a"));
        assert!(!is_named(line, "postern-b") && !is_named(line, "postern"));
        assert!(!is_named(b"/usr/bin/qemu\0postern-a\0", "postern-a"));
        assert!(!is_named(b"", "postern-a"));
    }
}
