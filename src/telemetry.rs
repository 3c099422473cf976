//! The daemon's log: fields on standard error, for a person or as JSON. Secrets never come here.

use std::io;

use tracing_subscriber::EnvFilter;

use crate::config::{Log, LogFormat};
use crate::error::Error;

/// Starts logging, once in a process; a second call changes nothing.
pub fn start(config: &Log) -> Result<(), Error> {
    let filter = EnvFilter::try_new(&config.filter)
        .map_err(|source| Error::LogFilter { filter: config.filter.clone(), source })?;
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr);
    let started = match config.format {
        LogFormat::Text => log.with_ansi(false).try_init(),
        LogFormat::Json => log.json().flatten_event(true).try_init(),
    };
    if started.is_err() {
        tracing::debug!("logging was started before");
    }
    Ok(())
}
