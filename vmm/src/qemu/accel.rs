//! KVM or TCG, decided by trying.
//!
//! `/dev/kvm` being there says little: some KVMs emulate every kernel-mode instruction, a few millions
//! a second, and a Linux never boots there. So a guest of 60 bytes runs 200 million kernel-mode
//! instructions, a tenth of a second of work for a KVM that deserves the name.

use std::fmt;
use std::fs;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use command_fds::{CommandFdExt, FdMapping};
use nix::sys::memfd::{MFdFlags, memfd_create};
use serde::Serialize;
use tokio::process::Command;
use tokio::time::timeout;

/// How long the probe may take, QEMU's own start included.
const LIMIT: Duration = Duration::from_secs(1);
/// The exit code QEMU's debug device makes of the probe's last word, 0x21.
const DONE: i32 = 0x21 << 1 | 1;

/// What executes a guest's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Accel {
    /// The processor, through the kernel.
    Kvm,
    /// QEMU's translator.
    Tcg,
}

impl fmt::Display for Accel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        })
    }
}

/// An accelerator and the reason for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Choice {
    /// What guests run on.
    pub accel: Accel,
    /// Why, for a person.
    pub why: String,
}

/// Tries KVM.
pub(super) async fn choose(binary: &Path) -> Choice {
    let start = Instant::now();
    let fault = match closed() {
        Some(fault) => Some(fault),
        None => match probe(binary).await {
            Ok(fault) => fault,
            Err(error) => Some(format!("the probe did not run: {error}")),
        },
    };
    let choice = match fault {
        Some(why) => Choice { accel: Accel::Tcg, why },
        None => Choice {
            accel: Accel::Kvm,
            why: format!("a guest's kernel code ran at speed, {:?} in all", start.elapsed()),
        },
    };
    tracing::info!(accel = %choice.accel, why = choice.why, "accelerator chosen");
    choice
}

/// Why a microVM's process could not open the device, if so: it has the device's group, no more.
fn closed() -> Option<String> {
    const GROUP: u32 = 0o060;
    match fs::metadata("/dev/kvm").map(|device| device.mode()) {
        Ok(mode) if mode & GROUP == GROUP => None,
        Ok(mode) => Some(format!(
            "/dev/kvm has mode {:03o}, its group may not open it: chgrp kvm and chmod 660 it",
            mode & 0o777
        )),
        Err(_) => Some("there is no /dev/kvm".to_owned()),
    }
}

/// What is wrong with this host's KVM, if anything.
async fn probe(binary: &Path) -> io::Result<Option<String>> {
    const ROM_FD: i32 = 3;
    let mut command = Command::new(binary);
    command
        .args(["-machine", "microvm", "-accel", "kvm", "-m", "16", "-nodefaults"])
        .args(["-no-user-config", "-display", "none", "-no-reboot"])
        .args(["-device", "isa-debug-exit,iobase=0xf4,iosize=4"])
        .args(["-bios", &format!("/proc/self/fd/{ROM_FD}")])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .fd_mappings(vec![FdMapping { parent_fd: rom()?, child_fd: ROM_FD }])
        .map_err(io::Error::other)?;
    let child = command.spawn()?;
    let Ok(output) = timeout(LIMIT, child.wait_with_output()).await else {
        let fault =
            format!("KVM did not run a guest's kernel code within {LIMIT:?}: it is emulated");
        return Ok(Some(fault));
    };
    let output = output?;
    if output.status.code() == Some(DONE) {
        return Ok(None);
    }
    Ok(Some(format!(
        "KVM cannot run a guest: {}",
        crate::error::said(Some(output.status), &output.stderr)
    )))
}

/// The probe as a machine's firmware: 64 KiB that end at the top of the 32-bit address space.
fn rom() -> io::Result<OwnedFd> {
    const SIZE: usize = 0x1_0000;
    let mut rom = GUEST.to_vec();
    rom.resize(SIZE - 16, 0);
    // The reset vector, 16 bytes below the end: jmp to the first byte.
    rom.extend([0xe9, 0x0d, 0x00]);
    rom.resize(SIZE, 0);
    let fd = memfd_create(c"postern-probe", MFdFlags::MFD_CLOEXEC)?;
    let mut file = fs::File::from(fd);
    file.write_all(&rom)?;
    Ok(file.into())
}

/// Real mode, then 32-bit protected mode in ring 0, then the loop.
#[rustfmt::skip]
const GUEST: [u8; 0x3e] = [
    0xfa,                                           // cli
    0x2e, 0x66, 0x0f, 0x01, 0x16, 0x38, 0x00,       // lgdtl cs:[0x38]
    0x0f, 0x20, 0xc0,                               // mov eax, cr0
    0x0c, 0x01,                                     // or al, 1
    0x0f, 0x22, 0xc0,                               // mov cr0, eax
    0x66, 0xea, 0x18, 0x00, 0xff, 0xff, 0x08, 0x00, // ljmpl 8:0xffff0018
    0xb9, 0x00, 0xe1, 0xf5, 0x05,                   // mov ecx, 100_000_000
    0x49,                                           // dec ecx
    0x75, 0xfd,                                     // jnz to dec
    0xb0, 0x21,                                     // mov al, 0x21
    0xe6, 0xf4,                                     // out 0xf4, al
    0xf4,                                           // hlt
    0xeb, 0xfd, 0x90,                               // jmp to hlt; nop
    0, 0, 0, 0, 0, 0, 0, 0,                         // descriptor 0: none
    0xff, 0xff, 0, 0, 0, 0x9a, 0xcf, 0,             // descriptor 1: code, 0 to 4 GiB
    0x0f, 0x00, 0x28, 0x00, 0xff, 0xff,             // limit and address of the descriptors
];
