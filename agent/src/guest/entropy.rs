//! The kernel's random numbers after a resume: begun anew with bytes of the host.
//!
//! The only `unsafe` of this program: one ioctl of random(4). Credits no entropy, since the kernel's
//! generator is ready when this is called; and never keeps or shows what it was given.
#![expect(unsafe_code, reason = "ioctl(2) on /dev/urandom has no safe wrapper")]

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::fd::AsRawFd;

use agent::MAX_ENTROPY;

nix::ioctl_none!(rndreseedcrng, b'R', 7);

/// Mixes the bytes into the kernel's pool and makes its generator begin anew from there, rather than up
/// to a minute later as by itself (random(4), `RNDRESEEDCRNG`).
pub(crate) fn reseed(bytes: &[u8]) -> io::Result<()> {
    if bytes.len() > MAX_ENTROPY {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the host sent too much entropy"));
    }
    let mut random = OpenOptions::new().write(true).open("/dev/urandom")?;
    random.write_all(bytes)?;
    // SAFETY: the descriptor is open and the request takes no argument.
    unsafe { rndreseedcrng(random.as_raw_fd()) }?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By root, as the agent is; anybody else is told that it may not.
    #[test]
    fn the_kernel_takes_what_it_is_given_and_no_more_than_agreed() {
        let begun_anew = reseed(&[7; MAX_ENTROPY]);
        let allowed = nix::unistd::geteuid().is_root();
        assert_eq!(begun_anew.is_ok(), allowed, "{begun_anew:?}");
        let error = reseed(&[7; MAX_ENTROPY + 1]).expect_err("too long");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
}
