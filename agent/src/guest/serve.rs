//! The agent: accepts the gateway's connections and nobody else's, each on a thread of its own.

use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use nix::sys::signal::SigSet;

use crate::cmdline::Cmdline;
use crate::session;

/// Connections served at once; more are closed at once.
const CONNECTIONS: usize = 64;
/// Before accepting again after a failure.
const PAUSE: Duration = Duration::from_millis(20);

/// Serves for as long as the guest lives.
pub(crate) fn run() -> io::Result<()> {
    // Process 1 blocks signals for itself, and a mask is inherited: commands must not have it.
    SigSet::all().thread_unblock()?;
    let cmdline = Cmdline::read()?;
    let listener = TcpListener::bind((cmdline.address, cmdline.port))?;
    let places = Arc::new(());
    loop {
        // A connection that died between knock and accept is no reason to stop, nor is a guest that
        // has no descriptor left for a moment.
        let Ok((stream, from)) = listener.accept() else {
            thread::sleep(PAUSE);
            continue;
        };
        let full = Arc::strong_count(&places) > CONNECTIONS;
        if from.ip() != cmdline.gateway || full || stream.set_nodelay(true).is_err() {
            continue;
        }
        let place = Arc::clone(&places);
        thread::spawn(move || {
            if let Err(error) = session::serve(stream)
                && error.kind() != io::ErrorKind::UnexpectedEof
            {
                eprintln!("postern-guest: connection ended: {error}");
            }
            drop(place);
        });
    }
}
