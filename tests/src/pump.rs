//! Moves frames between a sandbox's tap, opened as a hypervisor opens it, and the tap that is the
//! guest's own network card. It changes nothing; a test may put frames of its own on the tap.

use std::io::{self, PipeWriter};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::{read, write};

/// Enough for the largest frame with segmentation offload, and its virtio-net header.
const FRAME: usize = 1 << 17;

/// A running pump. It ends on drop, or when the sandbox's tap is deleted.
#[derive(Debug)]
pub struct Pump {
    sandbox: Option<Arc<OwnedFd>>,
    stop: Option<PipeWriter>,
    thread: Option<JoinHandle<()>>,
}

impl Pump {
    /// Starts to move frames. Both descriptors are non-blocking and have the same header size.
    ///
    /// # Panics
    /// When no pipe can be made.
    #[must_use]
    pub fn between(sandbox: OwnedFd, guest: OwnedFd) -> Self {
        let sandbox = Arc::new(sandbox);
        let (stopped, stop) = io::pipe().expect("pipe");
        let near = sandbox.clone();
        let thread = std::thread::spawn(move || {
            let mut frame = vec![0; FRAME];
            loop {
                let mut ready = [near.as_fd(), guest.as_fd(), stopped.as_fd()]
                    .map(|fd| PollFd::new(fd, PollFlags::POLLIN));
                let _ = poll(&mut ready, PollTimeout::NONE);
                let stop = ready[2].any().unwrap_or(true);
                if stop || !carry(&near, &guest, &mut frame) || !carry(&guest, &near, &mut frame) {
                    return;
                }
            }
        });
        Self { sandbox: Some(sandbox), stop: Some(stop), thread: Some(thread) }
    }

    /// Sends one frame into the sandbox's tap as its guest would, whatever it holds.
    ///
    /// # Errors
    /// As the kernel answers, e.g. for a tap that is down or gone.
    pub fn inject(&self, frame: &[u8]) -> io::Result<()> {
        let mut whole = vec![0; vmm::tap::VNET_HEADER];
        whole.extend_from_slice(frame);
        self.inject_raw(&whole)
    }

    /// The same with a virtio-net header of the caller's making in front.
    ///
    /// # Errors
    /// As the kernel answers.
    pub fn inject_raw(&self, bytes: &[u8]) -> io::Result<()> {
        let sandbox = self.sandbox.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        write(sandbox, bytes)?;
        Ok(())
    }

    /// Ends it and closes both descriptors, as a hypervisor that ends does.
    pub fn unplug(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        self.sandbox = None;
    }
}

impl Drop for Pump {
    fn drop(&mut self) {
        self.unplug();
    }
}

/// Carries what is there, in a burst of bounded length; false when the source is gone.
fn carry(from: &OwnedFd, to: &OwnedFd, frame: &mut [u8]) -> bool {
    for _ in 0..64 {
        match read(from, frame) {
            // A full or downed card loses frames, as a real one does.
            Ok(length) => drop(write(to, &frame[..length])),
            Err(Errno::EAGAIN | Errno::EINTR | Errno::EIO) => return true,
            Err(_) => return false,
        }
    }
    true
}
