//! `postern exec`: a command in a guest with its input, output and exit code here.

use std::collections::BTreeMap;

use agent::{Decoder, FromGuest, FromHost, Message, Status};
use policy::SandboxName;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::cli::screen::unwritable;
use crate::client::Client;
use crate::error::Error;
use crate::problem::{Kind, Problem};
use crate::wire;

/// Bytes read at once from either side.
const CHUNK: usize = 32 * 1024;
/// The exit code of a command that could not be run, as shells have it.
const NOT_RUN: u8 = 127;

#[derive(Debug, clap::Args)]
pub(crate) struct Exec {
    /// The sandbox.
    name: SandboxName,
    /// Environment of the command, added to the guest's own; may be given several times.
    #[arg(long, value_name = "NAME=VALUE", value_parser = variable)]
    env: Vec<(String, String)>,
    /// Folder it starts in.
    #[arg(long, value_name = "DIR")]
    cwd: Option<String>,
    /// User it runs as; root if none is named.
    #[arg(long)]
    user: Option<String>,
    /// The command and its arguments, run without a shell.
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<String>,
}

fn variable(text: &str) -> Result<(String, String), &'static str> {
    let pair = text.split_once('=').filter(|(name, _)| !name.is_empty());
    pair.map(|(name, value)| (name.to_owned(), value.to_owned())).ok_or("write it as NAME=VALUE")
}

impl Exec {
    pub(crate) async fn run(self, client: &Client) -> Result<u8, Error> {
        let body = wire::Exec {
            argv: self.command,
            env: BTreeMap::from_iter(self.env),
            cwd: self.cwd,
            user: self.user,
        };
        let path = format!("/v1/sandboxes/{}/exec", self.name);
        let (from_guest, to_guest) =
            tokio::io::split(client.upgrade(&path, wire::EXEC_PROTOCOL, &body).await?);
        // Ends by itself, or with the program: standard input may never say anything.
        tokio::spawn(feed(tokio::io::stdin(), to_guest));
        show(from_guest, tokio::io::stdout(), tokio::io::stderr()).await
    }
}

/// Standard input to frames.
async fn feed(
    mut input: impl AsyncRead + Unpin,
    mut to_guest: impl AsyncWrite + Unpin,
) -> std::io::Result<()> {
    let mut chunk = vec![0; CHUNK];
    let mut frame = Vec::with_capacity(CHUNK + 8);
    loop {
        let read = input.read(&mut chunk).await.unwrap_or(0);
        let said = match chunk.get(..read) {
            Some([]) | None => FromHost::StdinEnd,
            Some(bytes) => FromHost::Stdin(bytes.to_vec()),
        };
        frame.clear();
        said.encode(&mut frame).map_err(std::io::Error::other)?;
        to_guest.write_all(&frame).await?;
        to_guest.flush().await?;
        if read == 0 {
            // The stream stays open: its end would mean that nobody reads the output any more.
            std::future::pending::<()>().await;
        }
    }
}

/// Frames to standard output and error, up to the exit code.
async fn show(
    mut from_guest: impl AsyncRead + Unpin,
    mut out: impl AsyncWrite + Unpin,
    mut err: impl AsyncWrite + Unpin,
) -> Result<u8, Error> {
    let broken = |source: Box<dyn std::error::Error + Send + Sync>| Error::Conversation {
        doing: "following the command",
        source,
    };
    let mut decoder = Decoder::<FromGuest>::default();
    let mut chunk = vec![0; CHUNK];
    loop {
        let read = from_guest.read(&mut chunk).await.map_err(|e| broken(e.into()))?;
        if read == 0 {
            return Err(broken("it ended before the command did".into()));
        }
        decoder.push(chunk.get(..read).unwrap_or_default());
        while let Some(said) = decoder.message().map_err(|e| broken(e.into()))? {
            match said {
                FromGuest::Hello(_) => {}
                FromGuest::Stdout(bytes) => {
                    out.write_all(&bytes).await.map_err(unwritable)?;
                    out.flush().await.map_err(unwritable)?;
                }
                FromGuest::Stderr(bytes) => {
                    err.write_all(&bytes).await.map_err(unwritable)?;
                    err.flush().await.map_err(unwritable)?;
                }
                FromGuest::Failed(why) => {
                    let why = policy::audit::shown(&why);
                    let told = format!("postern: the command could not be run: {why}\n");
                    err.write_all(told.as_bytes()).await.map_err(unwritable)?;
                    err.flush().await.map_err(unwritable)?;
                    return Ok(NOT_RUN);
                }
                FromGuest::Exit(status) => return code(status),
            }
        }
    }
}

fn code(status: Status) -> Result<u8, Error> {
    let code = match status {
        Status::Code(code) => code & 0xff,
        Status::Signal(signal) => (128 + (signal & 0x7f)) & 0xff,
    };
    u8::try_from(code)
        .map_err(|_| Problem::new(Kind::Failed, "the command has no exit code").into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames(said: &[FromGuest]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for message in said {
            message.encode(&mut bytes).expect("short");
        }
        bytes
    }

    #[tokio::test]
    async fn output_goes_where_it_belongs_and_the_code_is_the_commands() {
        let said = frames(&[
            FromGuest::Stdout(b"out".to_vec()),
            FromGuest::Stderr(b"err".to_vec()),
            FromGuest::Stdout(b"more".to_vec()),
            FromGuest::Exit(Status::Code(42)),
        ]);
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let code = show(&said[..], &mut out, &mut err).await.expect("exit");
        assert_eq!((code, &out[..], &err[..]), (42, &b"outmore"[..], &b"err"[..]));
        for (status, expected) in
            [(Status::Signal(9), 137), (Status::Code(256), 0), (Status::Code(-1), 255)]
        {
            let said = frames(&[FromGuest::Exit(status)]);
            let code = show(&said[..], Vec::new(), Vec::new()).await.expect("exit");
            assert_eq!(code, expected);
        }
    }

    #[tokio::test]
    async fn a_command_that_could_not_run_is_told_from_one_that_failed() {
        let said = frames(&[FromGuest::Failed("no such\u{1b}file".into())]);
        let mut err = Vec::new();
        let code = show(&said[..], Vec::new(), &mut err).await.expect("told");
        assert_eq!(code, NOT_RUN);
        let told = String::from_utf8(err).expect("text");
        assert!(told.contains("no such\\u{1b}file"), "{told}");
    }

    #[tokio::test]
    async fn a_stream_that_ends_early_is_an_error_and_not_a_success() {
        let said = frames(&[FromGuest::Stdout(b"x".to_vec())]);
        assert!(show(&said[..], Vec::new(), Vec::new()).await.is_err());
        assert!(show(&[255, 0, 0, 0, 0][..], Vec::new(), Vec::new()).await.is_err());
    }

    #[tokio::test]
    async fn input_arrives_whole_and_then_its_end_while_the_stream_stays_open() {
        let input: Vec<u8> = (0..100_000).map(|n| u8::try_from(n % 251).expect("small")).collect();
        let (ours, theirs) = tokio::io::duplex(1 << 20);
        let fed = input.clone();
        let feeding = tokio::spawn(async move { feed(&fed[..], theirs).await });
        let (mut from_host, _keep) = tokio::io::split(ours);
        let mut decoder = Decoder::<FromHost>::default();
        let mut got = Vec::new();
        let mut chunk = vec![0; 4096];
        'reading: loop {
            let read = from_host.read(&mut chunk).await.expect("open");
            assert!(read > 0, "closed");
            decoder.push(&chunk[..read]);
            while let Some(said) = decoder.message().expect("well formed") {
                match said {
                    FromHost::Stdin(bytes) => got.extend(bytes),
                    FromHost::StdinEnd => break 'reading,
                    other => panic!("{other:?}"),
                }
            }
        }
        assert_eq!(got, input);
        assert!(!feeding.is_finished());
        feeding.abort();
    }
}
