//! The daemon's log: fields on standard error, for a person or as JSON. Secrets never come here.

use std::io;
use std::panic;
use std::sync::atomic::{AtomicU64, Ordering};

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::ParseError;

use crate::config::{Log, LogFormat};
use crate::error::Error;

/// What the DNS library finds wrong with a message: a guest would write the log by sending some, or by
/// asking for names of a zone that answers with some. What came of it is in the audit.
const QUIET: &str = "hickory_net=error,hickory_proto=error";

/// Panics since the start. Each ended one task and nothing else.
static PANICS: AtomicU64 = AtomicU64::new(0);

/// From now on a panic is counted, and logged with its place instead of being printed.
pub fn count_panics() {
    panic::set_hook(Box::new(|panic| {
        PANICS.fetch_add(1, Ordering::Relaxed);
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        let said = panic.payload_as_str().unwrap_or_default();
        tracing::error!(place, said, "a task panicked: this is a bug, please report it");
    }));
}

/// How many there were.
#[must_use]
pub fn panics() -> u64 {
    PANICS.load(Ordering::Relaxed)
}

/// Starts logging, once in a process; a second call changes nothing.
pub fn start(config: &Log) -> Result<(), Error> {
    let filter = filter(&config.filter)
        .map_err(|source| Error::LogFilter { filter: config.filter.clone(), source })?;
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(|| OneLine);
    let started = match config.format {
        LogFormat::Text => log.with_ansi(false).try_init(),
        LogFormat::Json => log.json().flatten_event(true).try_init(),
    };
    if started.is_err() {
        tracing::debug!("logging was started before");
    }
    Ok(())
}

/// What is said: of the DNS library's messages only where the operator asks for that by name.
fn filter(wanted: &str) -> Result<EnvFilter, ParseError> {
    EnvFilter::try_new(format!("{QUIET},{wanted}"))
}

/// Standard error, an event a line: what a library or a guest calls things breaks none.
struct OneLine;

impl io::Write for OneLine {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        io::stderr().lock().write_all(one_line(event).as_bytes())?;
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// The bytes of one event, its control characters escaped but for the line feed at its end.
fn one_line(event: &[u8]) -> String {
    let text = String::from_utf8_lossy(event);
    let mut line = String::with_capacity(text.len());
    for c in text.strip_suffix('\n').unwrap_or(&text).chars() {
        if c.is_control() {
            line.extend(c.escape_default());
        } else {
            line.push(c);
        }
    }
    line.push('\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_says_what_guests_provoke_only_where_it_is_named() {
        use tracing_subscriber::layer::SubscriberExt;
        let said = |wanted: &str| {
            let log = tracing_subscriber::registry().with(filter(wanted).expect("valid"));
            tracing::subscriber::with_default(log, || {
                [
                    tracing::enabled!(target: "hickory_net::udp", tracing::Level::WARN),
                    tracing::enabled!(target: "hickory_net::udp", tracing::Level::ERROR),
                    tracing::enabled!(target: "egress", tracing::Level::INFO),
                ]
            })
        };
        assert_eq!(said("info"), [false, true, true]);
        assert_eq!(said("debug"), [false, true, true]);
        assert_eq!(said("info,hickory_net=warn"), [true, true, true]);
        assert_eq!(said("off"), [false, true, false]);
    }

    /// Attack K05.
    #[test]
    fn an_event_is_one_line_whatever_is_in_it() {
        assert_eq!(
            one_line(b"a name=\x1b[2J\r\nFORGED \xff\n"),
            "a name=\\u{1b}[2J\\r\\nFORGED \u{fffd}\n"
        );
        assert_eq!(one_line("plain, ü\n".as_bytes()), "plain, ü\n");
    }
}
