//! The conversation with a guest's agent, as far as this room has one: who it is, what time it is, what to
//! run. What the agent says is a guest's word: it is bounded, and believed in nothing.

use std::fs::File;
use std::io::{self, Read};
use std::time::{Duration, UNIX_EPOCH};

use agent::{Decoder, Exec, FromGuest, FromHost, Message};
use egress::{GuestStream, Router};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use crate::error::{Error, Field};
use crate::store::Record;

/// How long an agent that listens may take to say who it is.
const HELLO: Duration = Duration::from_secs(5);

/// Starts a command: connects to the agent, hears its hello, says what to run.
pub(crate) async fn exec(
    router: &Router,
    record: &Record,
    exec: &Exec,
) -> Result<GuestStream, Error> {
    let mut bytes = Vec::new();
    FromHost::Exec(exec.clone()).encode(&mut bytes).map_err(|error| {
        let fix = "pass what is long as standard input or as a file";
        Error::Invalid(Field::new("argv", "", &format!("is too long: {error}"), fix))
    })?;
    let mut stream = hello(router, record).await?;
    let sent = stream.write_all(&bytes).await;
    sent.map_err(|error| mute(record, format!("went away: {error}")))?;
    Ok(stream)
}

/// Connects to the agent, hears its hello, and tells it the time and random bytes: both may have stood
/// still, and nothing of a connection tells whether.
pub(crate) async fn hello(router: &Router, record: &Record) -> Result<GuestStream, Error> {
    let port = policy::net::AGENT_PORT;
    let mut stream = router.connect(record.slot, port).await.map_err(|source| Error::Agent {
        name: record.name.clone(),
        problem: "cannot be reached".to_owned(),
        source: Some(Box::new(source)),
    })?;
    greet(&mut stream).await.map_err(|problem| mute(record, problem))?;
    Ok(stream)
}

/// An agent that is reached and does not do as it should.
fn mute(record: &Record, problem: String) -> Error {
    Error::Agent { name: record.name.clone(), problem, source: None }
}

async fn greet(stream: &mut GuestStream) -> Result<(), String> {
    let said = timeout(HELLO, first_word(stream)).await;
    let hello = match said {
        Ok(Ok(FromGuest::Hello(hello))) if hello.version == agent::VERSION => hello,
        Ok(Ok(FromGuest::Hello(hello))) => {
            return Err(format!("speaks version {}, not {}", hello.version, agent::VERSION));
        }
        Ok(Ok(_)) => return Err("did not begin with a hello".to_owned()),
        Ok(Err(problem)) => return Err(problem),
        Err(_) => return Err(format!("said nothing within {HELLO:?}")),
    };
    let now = fault::wall_clock().duration_since(UNIX_EPOCH).unwrap_or_default();
    let clock = FromHost::Clock(u64::try_from(now.as_nanos()).unwrap_or(u64::MAX));
    let mut bytes = Vec::new();
    clock.encode(&mut bytes).map_err(|error| error.to_string())?;
    if hello.reseeds {
        let fresh = fresh().map_err(|error| format!("gets no entropy: {error}"))?;
        FromHost::Entropy(fresh).encode(&mut bytes).map_err(|error| error.to_string())?;
    }
    stream.write_all(&bytes).await.map_err(|error| format!("went away: {error}"))
}

/// Random bytes of the host's, for a guest whose own may have been slept over or copied.
fn fresh() -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; 32];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Reads one message and not a byte more, since what follows belongs to whoever gets the stream.
async fn first_word(stream: &mut GuestStream) -> Result<FromGuest, String> {
    let mut decoder = Decoder::default();
    loop {
        let byte = stream.read_u8().await.map_err(|error| format!("went away: {error}"))?;
        decoder.push(&[byte]);
        match decoder.message() {
            Ok(Some(message)) => return Ok(message),
            Ok(None) => {}
            Err(error) => return Err(format!("broke the protocol: {error}")),
        }
    }
}
