//! From the kernel's hands to a root file system: mounts, drivers, the disk, the switch.
//!
//! The initramfs holds this program, the modules in the order of `/modules/order`, and nothing else.

use std::fs;
use std::io;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::kmod::{ModuleInitFlags, finit_module};
use nix::mount::{MsFlags, mount};
use nix::unistd::{chdir, chroot};

/// The disk whose root the guest lives on.
const DISK: &str = "/dev/vda";
/// How long the disk may take to appear.
const DISK_APPEARS: Duration = Duration::from_secs(20);
/// Where the program stays reachable, whatever the disk holds.
const HOME: &str = "/run/postern";

/// Mounts the kernel's file systems, loads the drivers and moves onto the disk.
pub(crate) fn switch_root() -> io::Result<()> {
    let closed = MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC | MsFlags::MS_NODEV;
    attach("proc", "/proc", "proc", closed, None)?;
    attach("sysfs", "/sys", "sysfs", closed, None)?;
    attach("devtmpfs", "/dev", "devtmpfs", MsFlags::MS_NOSUID, Some("mode=0755"))?;
    load_modules()?;
    let start = Instant::now();
    while !Path::new(DISK).exists() {
        if start.elapsed() > DISK_APPEARS {
            return Err(io::Error::new(io::ErrorKind::TimedOut, format!("{DISK} never appeared")));
        }
        thread::sleep(Duration::from_millis(5));
    }
    attach(DISK, "/root", "ext4", MsFlags::MS_NOATIME, None)?;
    for below in ["/proc", "/sys", "/dev"] {
        move_mount(below, &format!("/root{below}"))?;
    }
    attach(
        "tmpfs",
        "/root/run",
        "tmpfs",
        MsFlags::MS_NOSUID | MsFlags::MS_NODEV,
        Some("mode=0755"),
    )?;
    keep_program()?;
    chdir("/root")?;
    move_mount("/root", "/")?;
    chroot(".")?;
    chdir("/")?;
    attach(
        "devpts",
        "/dev/pts",
        "devpts",
        MsFlags::MS_NOSUID,
        Some("gid=5,mode=0620,ptmxmode=0666"),
    )?;
    attach("tmpfs", "/dev/shm", "tmpfs", MsFlags::MS_NOSUID | MsFlags::MS_NODEV, None)
}

/// Puts this program where the image's links to it (`poweroff`) point.
fn keep_program() -> io::Result<()> {
    let home = format!("/root{HOME}");
    fs::create_dir_all(&home)?;
    fs::copy("/init", format!("{home}/postern-guest"))?;
    Ok(())
}

fn load_modules() -> io::Result<()> {
    for name in fs::read_to_string("/modules/order")?.lines() {
        let file = fs::File::open(format!("/modules/{name}"))?;
        match finit_module(&file, c"", ModuleInitFlags::empty()) {
            Ok(()) | Err(Errno::EEXIST) => {}
            Err(error) => eprintln!("postern-guest: module {name}: {error}"),
        }
    }
    Ok(())
}

fn attach(
    source: &str,
    target: &str,
    kind: &str,
    flags: MsFlags,
    options: Option<&str>,
) -> io::Result<()> {
    fs::create_dir_all(target)?;
    match mount(Some(source), target, Some(kind), flags, options) {
        // The kernel may have mounted devtmpfs by itself.
        Ok(()) | Err(Errno::EBUSY) => Ok(()),
        Err(error) => Err(io::Error::other(format!("mount {source} at {target}: {error}"))),
    }
}

fn move_mount(from: &str, to: &str) -> io::Result<()> {
    fs::create_dir_all(to)?;
    mount(Some(from), to, None::<&str>, MsFlags::MS_MOVE, None::<&str>)
        .map_err(|error| io::Error::other(format!("move the mount {from} to {to}: {error}")))
}
