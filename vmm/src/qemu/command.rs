//! QEMU's command line as a value: what hardware a guest sees and how little the process may do.
//!
//! Pure. Names no path: every file arrives open, at the numbers below.

use std::ffi::OsString;
use std::path::Path;
use std::time::UNIX_EPOCH;

use policy::SandboxName;
use policy::net::{AGENT_PORT, GATEWAY_IP, GUEST_IP, GUEST_MAC, GUEST_PREFIX};

use crate::hypervisor::Machine;
use crate::qemu::accel::Accel;

/// Descriptors of the process beside its standard ones.
pub(super) const TAP: i32 = 3;
pub(super) const CONTROL: i32 = 4;
pub(super) const CONSOLE: i32 = 5;
pub(super) const BASE: i32 = 6;
pub(super) const DISK: i32 = 7;
pub(super) const KERNEL: i32 = 8;
pub(super) const INITRD: i32 = 9;
pub(super) const MEMORY: i32 = 10;

/// How a machine begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Begin {
    /// With its firmware.
    Boot,
    /// With the state of a saved machine, which it is told later; paused until it is told to go on.
    Saved,
}

/// Program and arguments.
pub(super) fn argv(binary: &Path, machine: &Machine, accel: Accel, begin: Begin) -> Vec<OsString> {
    let begin = match begin {
        Begin::Boot => vec!["-append".to_owned(), cmdline(machine, accel)],
        // The guest's kernel is in its memory, and read its command line long ago.
        Begin::Saved => ["-incoming", "defer", "-S"].map(str::to_owned).to_vec(),
    };
    let flags = ["-nodefaults", "-no-user-config", "-no-reboot"].map(str::to_owned);
    let options = options(machine, accel).into_iter();
    let options = options.flat_map(|(option, value)| [option.to_owned(), value]);
    let words = flags.into_iter().chain(options).chain(begin).map(OsString::from);
    std::iter::once(binary.into()).chain(words).collect()
}

/// The hardware in words, to be compared: a saved machine goes on only as itself.
pub(super) fn hardware(machine: &Machine, accel: Accel) -> Vec<String> {
    let options = options(machine, accel).into_iter();
    options.map(|(option, value)| format!("{option} {value}")).collect()
}

fn options(machine: &Machine, accel: Accel) -> Vec<(&'static str, String)> {
    let Machine { name, memory_mib, vcpus, .. } = machine;
    let [a, b, c, d, e, f] = GUEST_MAC;
    let accelerator = match accel {
        Accel::Kvm => "kvm".to_owned(),
        Accel::Tcg => "tcg,tb-size=128".to_owned(),
    };
    vec![
        ("-name", guest_name(name)),
        ("-machine", format!("{MACHINE},memory-backend=memory")),
        (
            "-object",
            // Shared, so that what the guest writes is in the file; `dump`: in no core of the process.
            format!(
                "memory-backend-file,id=memory,size={memory_mib}M,mem-path=/proc/self/fd/{MEMORY},\
                 share=on,dump=off"
            ),
        ),
        ("-accel", accelerator),
        ("-cpu", "max".to_owned()),
        ("-m", format!("{memory_mib}M")),
        ("-smp", vcpus.to_string()),
        ("-display", "none".to_owned()),
        ("-chardev", format!("socket,id=control,fd={CONTROL},server=on,wait=off")),
        ("-mon", "chardev=control,mode=control".to_owned()),
        ("-chardev", format!("socket,id=console,fd={CONSOLE},server=on,wait=off")),
        ("-serial", "chardev:console".to_owned()),
        ("-add-fd", format!("fd={BASE},set=1")),
        ("-add-fd", format!("fd={DISK},set=2")),
        (
            "-blockdev",
            "driver=raw,node-name=base,read-only=on,file.driver=file,file.filename=/dev/fdset/1"
                .to_owned(),
        ),
        (
            "-blockdev",
            "driver=qcow2,node-name=disk,backing=base,file.driver=file,file.filename=/dev/fdset/2"
                .to_owned(),
        ),
        ("-device", format!("virtio-blk-{BUS},drive=disk")),
        ("-netdev", format!("tap,id=net,fd={TAP},vhost=off")),
        (
            "-device",
            format!(
                "virtio-net-{BUS},netdev=net,mac={a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}"
            ),
        ),
        ("-object", "rng-builtin,id=random".to_owned()),
        ("-device", format!("virtio-rng-{BUS},rng=random")),
        ("-kernel", format!("/proc/self/fd/{KERNEL}")),
        ("-initrd", format!("/proc/self/fd/{INITRD}")),
        ("-device", "vmgenid,guid=auto".to_owned()),
        (
            "-sandbox",
            "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny".to_owned(),
        ),
    ]
}

/// QEMU's name for the machine, and how its process is found when all else is lost.
pub(super) fn guest_name(name: &SandboxName) -> String {
    format!("postern-{name}")
}

/// Versioned, because a snapshot must meet the hardware it was taken on, and without the devices a
/// sandbox has no use for. Booted under TCG it costs what the `microvm` machine does (2.9 s of
/// processor time to the agent's greeting), which would need the host's clock rate told.
const MACHINE: &str = "pc-q35-7.2,usb=off,smm=off,vmport=off,i8042=off,sata=off,smbus=off,hpet=off";
const BUS: &str = "pci";

/// The kernel's command line: quiet, because a console costs an exit a byte; no IPv6, which the
/// guests' world has not; and what the guest's process 1 must know.
fn cmdline(machine: &Machine, accel: Accel) -> String {
    let now = fault::wall_clock().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let tuned = match accel {
        Accel::Kvm => "",
        // Translated code has none of the processor's leaks, only the cost of the cures. And a timer
        // that ticks too seldom while the kernel looks is a busy host's, not a broken one: without
        // this the guest panics. Under KVM the kernel leaves that test out by itself.
        Accel::Tcg => " mitigations=off no_timer_check",
    };
    let Machine { name, cmdline, .. } = machine;
    let words = format!(
        "console=ttyS0 quiet panic=-1 reboot=t ipv6.disable=1 net.ifnames=0 random.trust_cpu=on\
         {tuned} postern.name={name} postern.address={GUEST_IP}/{GUEST_PREFIX} \
         postern.gateway={GATEWAY_IP} postern.port={AGENT_PORT} postern.clock={now} {cmdline}"
    );
    words.trim_end().to_owned()
}
