//! The daemon's log: fields on standard error, for a person or as JSON. Secrets never come here.

use std::io;
use std::panic;
use std::sync::atomic::{AtomicU64, Ordering};

use tracing_subscriber::EnvFilter;

use crate::config::{Log, LogFormat};
use crate::error::Error;

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
    let filter = EnvFilter::try_new(&config.filter)
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
