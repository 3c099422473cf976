//! The guest's only link: `eth0` with the address every guest has, its gateway as the resolver.
//!
//! Uses `ip` of the image (iproute2): one process, one batch.

use std::fs;
use std::io::{self, Write};
use std::process::{Command, Stdio};

use crate::cmdline::Cmdline;

/// Brings the links up and writes `/etc/hosts` and `/etc/resolv.conf`.
pub(crate) fn set_up(cmdline: &Cmdline) -> io::Result<()> {
    let mut ip = Command::new("/sbin/ip").args(["-batch", "-"]).stdin(Stdio::piped()).spawn()?;
    if let Some(mut stdin) = ip.stdin.take() {
        stdin.write_all(batch(cmdline).as_bytes())?;
    }
    let status = ip.wait()?;
    if !status.success() {
        return Err(io::Error::other(format!("ip: {status}")));
    }
    let Cmdline { name, gateway, .. } = cmdline;
    let resolver = format!("nameserver {gateway}\noptions timeout:5 attempts:2\n");
    replace("/etc/resolv.conf", &resolver)?;
    replace("/etc/hosts", &format!("127.0.0.1 localhost\n127.0.1.1 {name}\n"))?;
    replace("/etc/hostname", &format!("{name}\n"))
}

fn batch(Cmdline { address, prefix, gateway, .. }: &Cmdline) -> String {
    format!(
        "link set lo up\naddress add {address}/{prefix} dev eth0\nlink set eth0 up\n\
         route add default via {gateway} dev eth0\n"
    )
}

/// Writes a file that may be a symbolic link to nowhere.
fn replace(path: &str, text: &str) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => fs::write(path, text),
    }
}
