//! What people and programs see: tables and sentences, or JSON in stable shapes. Colours and moving
//! lines only on a terminal.

use std::fmt::Display;
use std::io::{self, IsTerminal, Write};

use comfy_table::{Cell, ContentArrangement, Table, presets};
use owo_colors::{OwoColorize, Style};
use serde::Serialize;
use serde_json::json;

use crate::config::plain_output;
use crate::error::{Error, chain};

/// Where output goes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Screen {
    json: bool,
    colours: bool,
}

impl Screen {
    pub(crate) fn new(json: bool) -> Self {
        Self { json, colours: !json && io::stdout().is_terminal() && !plain_output() }
    }

    pub(crate) fn is_json(&self) -> bool {
        self.json
    }

    /// Whether something may move on standard error.
    pub(crate) fn is_lively(&self) -> bool {
        !self.json && io::stderr().is_terminal() && !plain_output()
    }

    /// Writes a line to standard output.
    pub(crate) fn line(&self, text: impl Display) -> Result<(), Error> {
        let mut out = io::stdout().lock();
        writeln!(out, "{text}").and_then(|()| out.flush()).map_err(unwritable)
    }

    /// Writes bytes to standard output as they are.
    pub(crate) fn raw(&self, bytes: &[u8]) -> Result<(), Error> {
        let mut out = io::stdout().lock();
        out.write_all(bytes).and_then(|()| out.flush()).map_err(unwritable)
    }

    /// Writes a value as JSON on one line.
    pub(crate) fn value(&self, value: &impl Serialize) -> Result<(), Error> {
        self.line(serde_json::to_string(value).unwrap_or_default())
    }

    /// Writes a value as JSON, or what `human` makes of it.
    pub(crate) fn either<T: Serialize>(
        &self,
        value: &T,
        human: impl FnOnce(&T) -> String,
    ) -> Result<(), Error> {
        if self.json { self.value(value) } else { self.line(human(value)) }
    }

    /// Tells a person something that is not the result.
    pub(crate) fn note(&self, text: impl Display) {
        if !self.json {
            // Nothing is lost when nobody reads it.
            let _ = writeln!(io::stderr(), "{text}");
        }
    }

    /// Tells why it ended badly.
    pub(crate) fn error(&self, error: &Error) {
        let mut out = io::stderr().lock();
        let _ = if self.json {
            let told = match error {
                Error::Refused(problem) | Error::Config { source: problem, .. } => json!(problem),
                other => json!({ "code": "failed", "message": chain(other) }),
            };
            writeln!(out, "{}", json!({ "error": told }))
        } else {
            writeln!(out, "postern: {}", chain(error))
        };
    }

    pub(crate) fn paint(&self, text: &str, style: Style) -> String {
        if self.colours { text.style(style).to_string() } else { text.to_owned() }
    }

    pub(crate) fn good(&self, text: &str) -> String {
        self.paint(text, Style::new().green())
    }

    pub(crate) fn doubtful(&self, text: &str) -> String {
        self.paint(text, Style::new().yellow())
    }

    pub(crate) fn bad(&self, text: &str) -> String {
        self.paint(text, Style::new().red())
    }
}

/// A table without lines, as wide as it needs to be.
pub(crate) fn table<R: IntoIterator<Item = String>>(
    header: &[&str],
    rows: impl IntoIterator<Item = R>,
) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(header.iter().map(Cell::new));
    for row in rows {
        table.add_row(row.into_iter().map(Cell::new).collect::<Vec<_>>());
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table.trim_fmt()
}

/// Names and values, one a line.
pub(crate) fn fields(pairs: &[(&str, String)]) -> String {
    let width = pairs.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let line = |(name, value): &(&str, String)| format!("{name:width$}  {value}");
    pairs.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// What was done, and what is to be noted about it, one a line.
pub(crate) fn noted(done: String, notes: &[String]) -> String {
    notes.iter().fold(done, |told, note| format!("{told}\nnote: {note}"))
}

/// Bytes for a person.
pub(crate) fn bytes(n: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB"];
    if n < 1024 {
        return format!("{n} B");
    }
    let mut scaled = n / 1024;
    let mut unit = 0;
    while scaled >= 10_240 && unit + 1 < units.len() {
        scaled /= 1024;
        unit += 1;
    }
    format!("{scaled} {}", units.get(unit).copied().unwrap_or_default())
}

pub(crate) fn unwritable(source: io::Error) -> Error {
    Error::Terminal { doing: "writing the output", source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_no_trailing_blanks_and_one_line_a_row() {
        let drawn = table(&["NAME", "STATE"], [["a".to_owned(), "running".to_owned()]]);
        assert_eq!(drawn.lines().count(), 2);
        assert!(drawn.lines().all(|line| line == line.trim_end()), "{drawn:?}");
    }

    #[test]
    fn bytes_are_shown_in_a_unit_that_fits() {
        for (n, shown) in [(0, "0 B"), (1023, "1023 B"), (10 << 10, "10 KiB"), (50 << 20, "50 MiB")]
        {
            assert_eq!(bytes(n), shown);
        }
        assert_eq!(bytes(u64::MAX), "16777215 TiB");
    }
}
