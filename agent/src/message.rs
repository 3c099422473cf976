//! The two vocabularies: what the host may say, what the guest may say.
//!
//! Structured payloads are JSON, streams are raw bytes. Never add a kind that both sides take: a
//! guest must not be able to echo a host's words back.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::frame::Message;

/// Who is listening.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// [`crate::VERSION`] of the agent.
    pub version: u16,
    /// The guest kernel's boot id: moves when the guest was booted again.
    pub boot_id: String,
    /// Whether it takes [`FromHost::Entropy`]: agents of older images do not, and would hang up.
    #[serde(default)]
    pub reseeds: bool,
}

/// A command to run, without a shell.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Exec {
    /// The program, looked up in the guest's PATH, and its arguments. Not empty.
    pub argv: Vec<String>,
    /// Added to the agent's own small environment (PATH, HOME, LANG, TERM).
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Where it starts; the user's home when absent.
    #[serde(default)]
    pub cwd: Option<String>,
    /// A name in the guest's `/etc/passwd`; root when absent.
    #[serde(default)]
    pub user: Option<String>,
}

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// It exited with this code.
    Code(i32),
    /// This signal ended it.
    Signal(i32),
}

/// Said by the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FromHost {
    /// The time, in nanoseconds since the Unix epoch.
    Clock(u64),
    /// Random bytes, at most [`crate::MAX_ENTROPY`]: the kernel's generator begins anew with them. A guest
    /// that was saved goes on with the one it had, and so does every copy of it.
    Entropy(Vec<u8>),
    /// Run this; once per connection.
    Exec(Exec),
    /// Bytes for its standard input.
    Stdin(Vec<u8>),
    /// The end of its standard input.
    StdinEnd,
}

/// Said by the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FromGuest {
    /// First on every connection.
    Hello(Hello),
    /// The command could not be run, and why; last on its connection.
    Failed(String),
    /// Bytes of its standard output.
    Stdout(Vec<u8>),
    /// Bytes of its standard error.
    Stderr(Vec<u8>),
    /// It ended, and all it wrote came before; last on its connection.
    Exit(Status),
}

const CLOCK: u8 = 1;
const EXEC: u8 = 2;
const STDIN: u8 = 3;
const STDIN_END: u8 = 4;
const ENTROPY: u8 = 5;
const HELLO: u8 = 129;
const FAILED: u8 = 130;
const STDOUT: u8 = 131;
const STDERR: u8 = 132;
const EXIT: u8 = 133;

impl Message for FromHost {
    fn parse(kind: u8, payload: &[u8]) -> Result<Self, Error> {
        match kind {
            CLOCK => read(kind, payload).map(Self::Clock),
            EXEC => read(kind, payload).map(Self::Exec),
            STDIN => Ok(Self::Stdin(payload.to_vec())),
            STDIN_END => Ok(Self::StdinEnd),
            ENTROPY => Ok(Self::Entropy(payload.to_vec())),
            kind => Err(Error::UnknownKind { kind }),
        }
    }

    fn parts(&self) -> (u8, Cow<'_, [u8]>) {
        match self {
            Self::Clock(nanos) => (CLOCK, write(nanos)),
            Self::Exec(exec) => (EXEC, write(exec)),
            Self::Stdin(bytes) => (STDIN, Cow::Borrowed(bytes)),
            Self::StdinEnd => (STDIN_END, Cow::Borrowed(&[])),
            Self::Entropy(bytes) => (ENTROPY, Cow::Borrowed(bytes)),
        }
    }
}

impl Message for FromGuest {
    fn parse(kind: u8, payload: &[u8]) -> Result<Self, Error> {
        match kind {
            HELLO => read(kind, payload).map(Self::Hello),
            FAILED => read(kind, payload).map(Self::Failed),
            STDOUT => Ok(Self::Stdout(payload.to_vec())),
            STDERR => Ok(Self::Stderr(payload.to_vec())),
            EXIT => read(kind, payload).map(Self::Exit),
            kind => Err(Error::UnknownKind { kind }),
        }
    }

    fn parts(&self) -> (u8, Cow<'_, [u8]>) {
        match self {
            Self::Hello(hello) => (HELLO, write(hello)),
            Self::Failed(message) => (FAILED, write(message)),
            Self::Stdout(bytes) => (STDOUT, Cow::Borrowed(bytes)),
            Self::Stderr(bytes) => (STDERR, Cow::Borrowed(bytes)),
            Self::Exit(status) => (EXIT, write(status)),
        }
    }
}

fn read<T: DeserializeOwned>(kind: u8, payload: &[u8]) -> Result<T, Error> {
    serde_json::from_slice(payload).map_err(|source| Error::Malformed { kind, source })
}

#[expect(clippy::expect_used, reason = "strings, numbers and maps of strings always serialise")]
fn write<T: Serialize>(value: &T) -> Cow<'static, [u8]> {
    Cow::Owned(serde_json::to_vec(value).expect("plain data"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::frame::Decoder;

    fn there_and_back<M: Message>(message: &M) -> M {
        let mut bytes = Vec::new();
        message.encode(&mut bytes).expect("short enough");
        let mut decoder = Decoder::default();
        decoder.push(&bytes);
        decoder.message().expect("well formed").expect("whole")
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn what_the_host_says_arrives(
            nanos: u64, argv: Vec<String>, env: BTreeMap<String, String>, cwd: Option<String>,
            user: Option<String>, bytes: Vec<u8>,
        ) {
            let exec = Exec { argv, env, cwd, user };
            for said in [
                FromHost::Clock(nanos), FromHost::Entropy(bytes.clone()), FromHost::Exec(exec),
                FromHost::Stdin(bytes), FromHost::StdinEnd,
            ] {
                prop_assert_eq!(there_and_back(&said), said);
            }
        }

        #[test]
        fn what_the_guest_says_arrives(
            version: u16, text: String, reseeds: bool, out: Vec<u8>, err: Vec<u8>, code: i32,
            signal: i32,
        ) {
            let hello = Hello { version, boot_id: text.clone(), reseeds };
            for said in [
                FromGuest::Hello(hello), FromGuest::Failed(text),
                FromGuest::Stdout(out), FromGuest::Stderr(err), FromGuest::Exit(Status::Code(code)),
                FromGuest::Exit(Status::Signal(signal)),
            ] {
                prop_assert_eq!(there_and_back(&said), said);
            }
        }

        #[test]
        fn any_payload_of_any_kind_is_judged_without_panic(kind: u8, payload: Vec<u8>) {
            let (host, guest) = (FromHost::parse(kind, &payload), FromGuest::parse(kind, &payload));
            prop_assert!(host.is_err() || guest.is_err(), "no kind belongs to both sides");
        }
    }

    #[test]
    fn a_hello_of_an_older_agent_takes_no_entropy() {
        let payload = br#"{"version":1,"boot_id":"x"}"#;
        let hello = FromGuest::parse(HELLO, payload).expect("well formed");
        assert!(matches!(hello, FromGuest::Hello(Hello { reseeds: false, .. })));
    }

    #[test]
    fn an_exec_with_a_field_we_do_not_know_is_refused() {
        let payload = br#"{"argv":["id"],"shell":true}"#;
        assert!(matches!(FromHost::parse(EXEC, payload), Err(Error::Malformed { kind: EXEC, .. })));
    }
}
