//! Whether the process has descriptors to spare for one more thing of a guest.
//!
//! Guests leave the last ones alone: the control API, by which one of them can be removed, the audit
//! and the questions of others need them. A connection that finds no room is refused, never left to
//! wait in a queue that nobody empties.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit};

/// What guests leave to everything else, or a quarter of all there are if that is less.
const RESERVE: u64 = 512;

/// Whether this descriptor is one of the last, which are not for guests. The kernel gives the lowest
/// number that is free (open(2)), so a number near the limit says that all below are taken.
pub(crate) fn is_reserved(descriptor: &impl AsFd) -> bool {
    let limit = getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(soft, _)| soft);
    let number = descriptor.as_fd().as_raw_fd();
    u64::try_from(number).is_ok_and(|number| is_last(number, limit))
}

fn is_last(number: u64, limit: u64) -> bool {
    number >= limit - RESERVE.min(limit / 4)
}

/// Refuses such a descriptor as the kernel refuses one too many.
///
/// # Errors
/// `EMFILE` when it is one of the last.
pub(crate) fn check(descriptor: &impl AsFd) -> io::Result<()> {
    if is_reserved(descriptor) { Err(Errno::EMFILE.into()) } else { Ok(()) }
}

/// Whether this says that the process, or the machine, has no descriptor or no memory left for
/// another socket (accept(2), socket(2)).
pub(crate) fn is_exhausted(error: &io::Error) -> bool {
    let exhausted = [Errno::EMFILE, Errno::ENFILE, Errno::ENOBUFS, Errno::ENOMEM];
    exhausted.iter().any(|errno| error.raw_os_error() == Some(*errno as i32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_descriptors_are_reserved() {
        for (number, limit, reserved) in [
            (0, 1024, false),
            (767, 1024, false),
            (768, 1024, true),
            (1_048_063, 1 << 20, false),
            (1_048_064, 1 << 20, true),
            (u64::MAX / 2, u64::MAX, false),
        ] {
            assert_eq!(is_last(number, limit), reserved, "{number} of {limit}");
        }
    }

    #[test]
    fn only_a_want_of_resources_is_exhaustion() {
        let error = |errno: Errno| io::Error::from_raw_os_error(errno as i32);
        assert!(is_exhausted(&error(Errno::EMFILE)) && is_exhausted(&error(Errno::ENFILE)));
        assert!(!is_exhausted(&error(Errno::ECONNABORTED)));
        assert!(!is_exhausted(&io::ErrorKind::TimedOut.into()));
    }
}
