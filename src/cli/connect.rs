//! `postern connect`: standard input and output as one end of a connection to a port of a guest.

use policy::SandboxName;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};

use crate::cli::screen::unwritable;
use crate::client::Client;
use crate::error::Error;
use crate::wire::{self, CONNECT_PROTOCOL};

#[derive(Debug, clap::Args)]
pub(crate) struct Connect {
    /// The sandbox, which is woken if it sleeps.
    name: SandboxName,
    /// TCP port on which a program of the guest listens.
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,
}

impl Connect {
    pub(crate) async fn run(self, client: &Client) -> Result<(), Error> {
        let path = format!("/v1/sandboxes/{}/connect", self.name);
        let body = wire::Connect { port: self.port };
        let guest = client.upgrade(&path, CONNECT_PROTOCOL, &body).await?;
        let (from_guest, to_guest) = tokio::io::split(guest);
        // The end of the input is passed on; the end of what the guest says is ours.
        tokio::spawn(feed(tokio::io::stdin(), to_guest));
        show(from_guest, tokio::io::stdout()).await
    }
}

async fn feed(
    mut input: impl AsyncRead + Unpin,
    mut to_guest: impl AsyncWrite + Unpin,
) -> std::io::Result<()> {
    tokio::io::copy(&mut input, &mut to_guest).await?;
    to_guest.shutdown().await?;
    // It is kept: to drop this half is to close it, whole perhaps.
    std::future::pending().await
}

async fn show(
    mut from_guest: impl AsyncRead + Unpin,
    mut out: impl AsyncWrite + Unpin,
) -> Result<(), Error> {
    tokio::io::copy(&mut from_guest, &mut out).await.map_err(unwritable)?;
    out.flush().await.map_err(unwritable)
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, duplex};

    use super::*;

    #[tokio::test]
    async fn the_end_of_the_input_reaches_the_guest_which_may_still_answer() {
        let (ours, mut guest) = duplex(64);
        let (from_guest, to_guest) = tokio::io::split(ours);
        let feeding = tokio::spawn(feed(&b"question"[..], to_guest));
        let mut heard = String::new();
        guest.read_to_string(&mut heard).await.expect("text");
        assert_eq!(heard, "question");
        guest.write_all(b"answer").await.expect("open");
        drop(guest);
        let mut said = Vec::new();
        show(from_guest, &mut said).await.expect("shown");
        assert_eq!(said, b"answer");
        feeding.abort();
    }
}
