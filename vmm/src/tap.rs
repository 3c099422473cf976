//! Persistent taps named after their slot, in the network namespace of the calling thread.
//!
//! The only `unsafe` of this room: ioctls of `<linux/if_tun.h>`. Never brings a tap up and
//! never gives it an address, nor deletes it: that is the router's, which also takes it from whoever
//! holds it.
#![expect(unsafe_code, reason = "ioctl(2) on /dev/net/tun has no safe wrapper")]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::thread;
use std::time::{Duration, Instant};

use nix::libc;
use nix::net::if_::if_nametoindex;
use policy::Slot;

use crate::error::Error;

nix::ioctl_write_ptr_bad!(
    tunsetiff,
    nix::request_code_write!(b'T', 202, size_of::<libc::c_int>()),
    libc::ifreq
);
nix::ioctl_write_int_bad!(
    tunsetpersist,
    nix::request_code_write!(b'T', 203, size_of::<libc::c_int>())
);
nix::ioctl_write_int_bad!(
    tunsetowner,
    nix::request_code_write!(b'T', 204, size_of::<libc::c_int>())
);
nix::ioctl_write_int_bad!(
    tunsetoffload,
    nix::request_code_write!(b'T', 208, size_of::<libc::c_uint>())
);
nix::ioctl_write_ptr_bad!(
    tunsetvnethdrsz,
    nix::request_code_write!(b'T', 216, size_of::<libc::c_int>()),
    libc::c_int
);

/// Bytes of `struct virtio_net_hdr_mrg_rxbuf` (virtio 1.2, section 5.1.6): the header before every
/// frame read from or written to a tap.
pub const VNET_HEADER: usize = HEADER.unsigned_abs() as usize;
const HEADER: libc::c_int = 12;

/// How long a tap that was closed may still be held: a process being started has copies of all our
/// descriptors between its fork and its exec.
const LET_GO: Duration = Duration::from_millis(200);

/// Makes the slot's tap, persistent and down, and opens it: non-blocking, closed on exec, with a
/// [`VNET_HEADER`] before each frame and no offloads until its user asks for some. `owner` may open
/// it later without privilege.
///
/// # Errors
/// [`Error::Tap`]: it exists already, or this thread may not make one.
pub fn create(slot: Slot, owner: Option<u32>) -> Result<OwnedFd, Error> {
    let tap = slot.tap();
    let make = || {
        let file = open(&tap, libc::IFF_TUN_EXCL)?;
        let fd = file.as_raw_fd();
        if let Some(uid) = owner {
            let uid = libc::c_int::try_from(uid).map_err(io::Error::other)?;
            // SAFETY: the descriptor is open and the argument is passed by value.
            unsafe { tunsetowner(fd, uid) }?;
        }
        // SAFETY: as above; 1 keeps the tap when the last descriptor closes.
        unsafe { tunsetpersist(fd, 1) }?;
        Ok(file.into())
    };
    make().map_err(|source| Error::Tap { act: "create", tap: tap.clone(), source })
}

/// Opens the slot's existing tap, as [`create`] left it. One opener at a time; blocks for
/// [`LET_GO`] at most while another still has it.
///
/// # Errors
/// [`Error::Tap`]: there is none, or somebody has it open.
pub fn attach(slot: Slot) -> Result<OwnedFd, Error> {
    let tap = slot.tap();
    let deadline = Instant::now() + LET_GO;
    loop {
        match existing(&tap) {
            Err(held)
                if held.kind() == io::ErrorKind::ResourceBusy && Instant::now() < deadline =>
            {
                thread::sleep(Duration::from_millis(2));
            }
            opened => {
                let opened = opened.map(OwnedFd::from);
                return opened.map_err(|source| Error::Tap { act: "attach", tap, source });
            }
        }
    }
}

/// Lets the kernel hand over TCP segments of up to 64 KiB, and packets whose checksum is still to be
/// made, as the header before each frame then says (virtio 1.2, section 5.1.6.2). For whoever passes
/// frames on with that header, as a virtio-net card does.
///
/// # Errors
/// [`Error::Tap`]: it is no tap, or the kernel refuses.
pub fn offload(tap: &OwnedFd) -> Result<(), Error> {
    let wanted = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6;
    let wanted = libc::c_int::try_from(wanted).unwrap_or_default();
    // SAFETY: the descriptor is open and the argument is passed by value.
    let set = unsafe { tunsetoffload(tap.as_raw_fd(), wanted) };
    set.map(drop).map_err(|error| Error::Tap {
        act: "offload",
        tap: String::new(),
        source: error.into(),
    })
}

fn existing(tap: &str) -> io::Result<File> {
    // Asked first, because opening a name that is not there would make it.
    if_nametoindex(tap)?;
    open(tap, 0)
}

fn open(tap: &str, extra: libc::c_int) -> io::Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open("/dev/net/tun")?;
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | extra;
    let mut request = libc::ifreq {
        ifr_name: [0; libc::IFNAMSIZ],
        ifr_ifru: libc::__c_anonymous_ifr_ifru {
            // The field is 16 bits of flags; TUN_EXCL is its top bit.
            ifru_flags: i16::from_ne_bytes(low_half(flags)),
        },
    };
    for (to, from) in request.ifr_name.iter_mut().zip(tap.bytes()) {
        *to = from.cast_signed();
    }
    let fd = file.as_raw_fd();
    // SAFETY: the descriptor is open; the request is a whole `ifreq` with a name that ends in zero
    // (at most 7 of 16 bytes are set), alive during the call.
    unsafe { tunsetiff(fd, &raw const request) }?;
    // SAFETY: the descriptor is open; the argument points at a constant int.
    unsafe { tunsetvnethdrsz(fd, &HEADER) }?;
    // SAFETY: the descriptor is open and the argument is passed by value; 0 is no offload.
    unsafe { tunsetoffload(fd, 0) }?;
    Ok(file)
}

fn low_half(flags: libc::c_int) -> [u8; 2] {
    let [a, b, ..] = flags.to_le_bytes();
    u16::from_le_bytes([a, b]).to_ne_bytes()
}
