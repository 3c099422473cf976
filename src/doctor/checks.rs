//! The checks themselves. Each says what it found in a few words and, unless all is well, the one
//! thing to do about it.

use std::collections::BTreeSet;
use std::fs;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use nix::errno::Errno;
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{AccessFlags, access};
use policy::Host;
use tokio::time::timeout;

use crate::client::{Client, Endpoint};
use crate::config::Config;
use crate::doctor::Check;
use crate::error::chain;
use crate::host;
use crate::units::Span;
use crate::wire::{Mode, Sandbox, Sandboxes};

/// Rules of every kind that the fence is made of.
const PROBE: &str = "\
table netdev probe {
  chain in { type filter hook ingress device \"lo\" priority 0; ip saddr set 127.0.0.9 accept; }
  chain out { type filter hook egress device \"lo\" priority 0; log group 7; drop; }
}
table inet probe {
  chain divert { type filter hook prerouting priority mangle; meta l4proto tcp tproxy ip to 127.0.0.1:7; }
}
";

/// Capabilities the daemon needs: name and bit (capabilities(7)).
const CAPABILITIES: &[(&str, u32)] = &[
    ("CAP_CHOWN", 0),
    ("CAP_KILL", 5),
    ("CAP_SETGID", 6),
    ("CAP_SETUID", 7),
    ("CAP_NET_ADMIN", 12),
    ("CAP_NET_RAW", 13),
    ("CAP_SYS_ADMIN", 21),
];

/// Room below which the state folder is called full, in bytes.
const ROOM: u64 = 1 << 30;
/// How long the kernel keeps a port whose connection our side ended (`TCP_TIMEWAIT_LEN`).
const TIME_WAIT: Span = Span::seconds(60);

/// How long a daemon that runs may take to list its sandboxes.
pub(crate) const LISTING: Duration = Duration::from_secs(2);

/// What the daemon that runs here says of the policies over its sandboxes; nothing where none runs.
pub(crate) async fn policies(config: &Config) -> Vec<Check> {
    let daemon = Client::new(Endpoint::Socket(config.api.socket.clone()), None);
    let listed = timeout(LISTING, daemon.get::<Sandboxes>("/v1/sandboxes")).await;
    let Ok(Ok(Sandboxes { sandboxes })) = listed else { return Vec::new() };
    vec![observing(&sandboxes), readable(&sandboxes)]
}

fn observing(sandboxes: &[Sandbox]) -> Check {
    let observed = sandboxes.iter().filter(|sandbox| sandbox.mode == Mode::Observe);
    let names: Vec<_> = observed.map(|sandbox| sandbox.name.as_str()).collect();
    match names.as_slice() {
        [] => Check::ok("mode", "every sandbox is enforced"),
        names => Check::warn(
            "mode",
            format!(
                "in mode observe, nothing their policies refuse is refused: {}",
                names.join(", ")
            ),
            "`postern policy mode NAME enforce` once their rules are complete",
        ),
    }
}

fn readable(sandboxes: &[Sandbox]) -> Check {
    let closed = sandboxes.iter().filter_map(|sandbox| sandbox.closed_by.as_deref());
    let scopes: BTreeSet<&str> = closed.collect();
    if scopes.is_empty() {
        return Check::ok("policies", "every policy can be read");
    }
    let scopes = Vec::from_iter(scopes).join(", ");
    let found = format!("not readable, so nothing leaves what is under them: {scopes}");
    Check::warn("policies", found, "`postern policy set SCOPE FILE`: write them anew")
}

/// Room below which the journal is not opened, in bytes.
const LEAST_ROOM: u64 = 256 << 10;

/// What the daemon cannot do without.
pub(crate) fn essential(config: &Config) -> Vec<Check> {
    let mut checks = vec![
        privileges(),
        kernel(),
        tun(),
        fence(),
        egress(config),
        journal(folder("state", &config.state_dir, "state_dir"), &config.state_dir),
        folder("audit", &config.audit.dir, "audit.dir"),
        clock(),
    ];
    // Where it is not set the guests' memory is in `state_dir`.
    if !config.memory_dir.as_os_str().is_empty() {
        checks.push(folder("memory", &config.memory_dir, "memory_dir"));
    }
    checks
}

fn privileges() -> Check {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let held = effective.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0);
    let lacks = |(name, bit): &(&'static str, u32)| (held & (1 << bit) == 0).then_some(*name);
    let missing: Vec<&str> = CAPABILITIES.iter().filter_map(lacks).collect();
    if missing.is_empty() {
        return Check::ok("privileges", "all that are needed");
    }
    Check::fail("privileges", format!("lacks {}", missing.join(", ")), "run it as root")
}

fn kernel() -> Check {
    let Ok(system) = nix::sys::utsname::uname() else {
        return Check::warn("kernel", "did not say its version", "use Linux 5.17 or later");
    };
    let release = system.release().to_string_lossy().into_owned();
    let mut parts = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    let version = (parts.next().and_then(Result::ok), parts.next().and_then(Result::ok));
    if version >= (Some(5), Some(17)) {
        return Check::ok("kernel", release);
    }
    Check::fail("kernel", release, "use Linux 5.17 or later: the fence needs the egress hook")
}

fn tun() -> Check {
    let device = Path::new("/dev/net/tun");
    match fs::OpenOptions::new().read(true).write(true).open(device) {
        Ok(_) => Check::ok("tap devices", "/dev/net/tun opens"),
        Err(error) => {
            let remedy = match error.kind() {
                ErrorKind::PermissionDenied => "run it as root; in a container, allow the device",
                _ => "run `modprobe tun`; in a container, pass the device in",
            };
            Check::fail("tap devices", format!("/dev/net/tun: {error}"), remedy)
        }
    }
}

/// Loads one rule of each kind where nobody sees it: in a namespace of this check's own thread.
fn fence() -> Check {
    let name = "fence";
    let Some(nft) = program("nft") else {
        let remedy = "run `apt-get install nftables` to try and to read the rules";
        return Check::warn(name, "not tried: `nft` is not installed", remedy);
    };
    let tried = std::thread::spawn(move || -> std::io::Result<(bool, String)> {
        unshare(CloneFlags::CLONE_NEWNET)?;
        let mut child = Command::new(nft)
            .args(["-f", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        if let Some(mut rules) = child.stdin.take() {
            rules.write_all(PROBE.as_bytes())?;
        }
        let ended = child.wait_with_output()?;
        Ok((ended.status.success(), String::from_utf8_lossy(&ended.stderr).into_owned()))
    });
    let modules = "load nf_tables, nft_tproxy, nft_log and nfnetlink_log, \
                   or use a kernel that has them";
    match tried.join() {
        Ok(Ok((true, _))) => Check::ok(name, "ingress, egress, tproxy and nflog rules load"),
        Ok(Ok((false, said))) => {
            let first = said.lines().next().unwrap_or("no reason given");
            let remedy = if said.contains("not permitted") { "run it as root" } else { modules };
            Check::fail(name, format!("the kernel refuses a rule: {first}"), remedy)
        }
        Ok(Err(error)) => Check::fail(name, format!("not tried: {error}"), "run it as root"),
        Err(_) => Check::fail(name, "the check panicked", "report this"),
    }
}

fn egress(config: &Config) -> Check {
    let name = "egress";
    let list = |addresses: &[std::net::IpAddr]| {
        addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
    };
    let wanted = &config.egress.addresses;
    if wanted.is_empty() {
        let chosen = host::sources();
        if chosen.is_empty() {
            let remedy = "give the host an address and a route, or set `egress.addresses`";
            return Check::fail(name, "this host has no way out", remedy);
        }
        return Check::ok(name, format!("{}, chosen by the kernel", list(&chosen)));
    }
    let own = host::addresses().unwrap_or_default();
    let absent: Vec<_> = wanted.iter().filter(|address| !own.contains(address)).copied().collect();
    if absent.is_empty() {
        return Check::ok(name, list(wanted));
    }
    let remedy = "add it with `ip address add`, or correct `egress.addresses`";
    Check::fail(name, format!("{} is on no interface", list(&absent)), remedy)
}

/// Whether files can be made in a folder, or the folder where it is missing. Asks the kernel and
/// writes nothing.
fn folder(name: &'static str, dir: &Path, setting: &str) -> Check {
    let remedy = || format!("make it writable, or set `{setting}` to another folder");
    let Some(there) = dir.ancestors().find(|folder| folder.exists()) else {
        return Check::fail(name, format!("{}: no folder above it", dir.display()), remedy());
    };
    let usable = access(there, AccessFlags::W_OK | AccessFlags::X_OK);
    let usable = usable.and_then(|()| match there.is_dir() {
        true => Ok(()),
        false => Err(Errno::ENOTDIR),
    });
    if let Err(error) = usable {
        return Check::fail(name, format!("{}: {}", there.display(), error.desc()), remedy());
    }
    let Ok(held) = nix::sys::statvfs::statvfs(there) else {
        return Check::warn(name, format!("{}: its room is not known", dir.display()), remedy());
    };
    let free = held.blocks_available().saturating_mul(held.fragment_size());
    let made = if there == dir { "" } else { " will be made" };
    let found = format!("{}{made}, {} MiB free", dir.display(), free >> 20);
    if free < ROOM {
        return Check::warn(name, found, format!("free some room, or move `{setting}`"));
    }
    Check::ok(name, found)
}

/// The same for the folder of the journal, where a full disk is no small thing: what a daemon did that
/// cannot write it down, the next one could not undo.
fn journal(found: Check, dir: &Path) -> Check {
    let free = nix::sys::statvfs::statvfs(dir)
        .map_or(u64::MAX, |held| held.blocks_available().saturating_mul(held.fragment_size()));
    if free >= LEAST_ROOM {
        return found;
    }
    let problem = format!("{}: no space is left for the journal", dir.display());
    Check::fail(found.name, problem, "free some room, or move `state_dir`")
}

/// A clock that is behind the day this program was built is wrong.
fn clock() -> Check {
    let built = std::env::current_exe().and_then(fs::metadata).and_then(|file| file.modified());
    if built.is_ok_and(|built| SystemTime::now() < built) {
        let remedy = "set it, for instance with `timedatectl set-ntp true`";
        return Check::warn("clock", "is behind the day this program was built", remedy);
    }
    Check::ok("clock", "plausible")
}

/// What only the `qemu` driver needs.
pub(crate) async fn machine(config: &Config) -> Vec<Check> {
    let qemu = vmm::Qemu::new(&config.qemu.binary);
    let report = qemu.report(&config.qemu.image).await;
    let install = "run `apt-get install qemu-system-x86 qemu-utils`, or use the driver `external`";
    let program = match &report.version {
        Some(version) if report.missing_programs.is_empty() => Check::ok("qemu", version),
        Some(_) => {
            let missing = report.missing_programs.join(", ");
            Check::warn("qemu", format!("{missing} not installed"), install)
        }
        None => Check::warn("qemu", format!("{} does not run", report.binary.display()), install),
    };
    let image = if report.image_missing.is_empty() {
        Check::ok("image", report.image.display().to_string())
    } else {
        let missing = report.image_missing.join(", ");
        let found = format!("{} not in {}", missing, report.image.display());
        Check::warn("image", found, "build it with `make image`, or correct `qemu.image`")
    };
    let groups = match (report.cgroup_version, report.cgroup_missing.as_slice()) {
        (0, _) => Check::warn("cgroups", "none", "mount cgroup2 at /sys/fs/cgroup"),
        (version, []) => Check::ok("cgroups", format!("version {version}")),
        (version, missing) => {
            let found = format!("version {version}; not limited: {}", missing.join(", "));
            Check::warn("cgroups", found, "delegate these controllers to the daemon")
        }
    };
    vec![program, acceleration(&report.accel), image, groups]
}

fn acceleration(choice: &vmm::qemu::Choice) -> Check {
    let found = format!("{}: {}", choice.accel, choice.why);
    match choice.accel {
        vmm::qemu::Accel::Kvm => Check::ok("acceleration", found),
        vmm::qemu::Accel::Tcg => {
            let remedy = "use a host whose KVM works; guests are emulated, and slow, until then";
            Check::warn("acceleration", found, remedy)
        }
    }
}

/// A slot that is given away again while ports of its last guest rest, in TIME-WAIT, has fewer of them.
pub(crate) fn rest(config: &Config) -> Option<Check> {
    let rest = config.guests.slot_rest;
    (rest < TIME_WAIT).then(|| {
        let found = format!("a slot rests for {rest}, and ports of its last guest for a minute");
        let remedy = "set `guests.slot_rest` to 1m, or expect new sandboxes with few ports left";
        Check::warn("slots", found, remedy)
    })
}

/// Whether anybody answers questions. That a name does not exist is an answer too; `example.com` is
/// set apart for such uses (RFC 2606).
pub(crate) async fn upstreams(config: &Config) -> Check {
    let name = "resolver";
    let remedy = "set `dns.upstreams` to resolvers this host can reach";
    let resolver = match dns::Resolver::new(config.resolver()) {
        Ok(resolver) => resolver,
        Err(error) => return Check::warn(name, chain(&error), remedy),
    };
    let Ok(probe) = Host::parse("example.com") else {
        return Check::warn(name, "not asked", remedy);
    };
    match resolver.addresses(&probe, dns::Family::V4).await {
        Ok(_) | Err(dns::Error::NoSuchName { .. } | dns::Error::NoAddresses { .. }) => {
            Check::ok(name, "answers")
        }
        Err(error) => Check::warn(name, chain(&error), remedy),
    }
}

fn program(name: &str) -> Option<PathBuf> {
    let executable = |path: &PathBuf| {
        fs::metadata(path).is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
    };
    let folders = ["/usr/sbin", "/usr/bin", "/sbin", "/bin", "/usr/local/sbin", "/usr/local/bin"];
    folders.iter().map(|folder| Path::new(folder).join(name)).find(executable)
}
