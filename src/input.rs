//! Documents from outside read whole or refused whole: JSON bodies and the TOML configuration.
//!
//! A refusal names the field, the line, the value and the fix, whatever serde had to say about it.

use serde::de::DeserializeOwned;
use serde_path_to_error::{Path, Segment};

use crate::problem::Problem;

/// Reads JSON.
pub fn json<T: DeserializeOwned>(text: &str) -> Result<T, Problem> {
    let mut source = serde_json::Deserializer::from_str(text);
    let value = serde_path_to_error::deserialize(&mut source).map_err(|error| {
        let line = Some(error.inner().line()).filter(|line| *line > 0);
        let message = error.inner().to_string();
        let message = message.rsplit_once(" at line ").map_or(&*message, |(said, _)| said);
        let given = serde_json::from_str::<serde_json::Value>(text).ok();
        let given = given.as_ref().and_then(|root| json_at(root, error.path()));
        described(error.path(), message, given).at(line)
    })?;
    source.end().map_err(|error| {
        Problem::invalid("", "", "has something after its end")
            .at(Some(error.line()))
            .fix("send one JSON value")
    })?;
    Ok(value)
}

/// Reads TOML.
pub fn toml<T: DeserializeOwned>(text: &str) -> Result<T, Problem> {
    let locate = |error: &toml::de::Error| {
        let span = error.span();
        let line = span.as_ref().map(|span| line_of(text, span.start));
        let given = span.and_then(|span| text.get(span));
        (line, given.map(|given| given.trim_matches(['"', '\'']).to_owned()))
    };
    let source = toml::Deserializer::parse(text).map_err(|error| {
        let (line, given) = locate(&error);
        Problem::invalid("", given.as_deref().unwrap_or_default(), error.message())
            .at(line)
            .fix("write it as TOML")
    })?;
    serde_path_to_error::deserialize(source).map_err(|error| {
        let (line, given) = locate(error.inner());
        described(error.path(), error.inner().message(), given).at(line)
    })
}

/// The line of the field at this path in a TOML document, from 1: for checks made after reading.
#[must_use]
pub fn toml_line(text: &str, path: &[&str]) -> Option<usize> {
    let table = toml::de::DeTable::parse(text).ok()?;
    let (first, rest) = path.split_first()?;
    let mut at = table.get_ref().get(*first)?;
    for step in rest {
        let next = match step.parse::<usize>() {
            Ok(index) => at.get_ref().as_array()?.get(index),
            Err(_) => at.get_ref().as_table()?.get(*step),
        };
        at = next?;
    }
    Some(line_of(text, at.span().start))
}

/// Of `known`, the one that was likely meant by `given`.
#[must_use]
pub fn meant<'a>(given: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let given = given.to_ascii_lowercase();
    let close = |word: &&str| distance(&given, word) <= 1 + word.len() / 4;
    known.into_iter().filter(close).min_by_key(|word| distance(&given, word))
}

/// What serde says, as a problem with a field and a fix. Our own types say `problem; fix`.
fn described(path: &Path, message: &str, given: Option<String>) -> Problem {
    let mut field = shown_path(path);
    let given = given.unwrap_or_default();
    let quoted: Vec<&str> = message.split('`').skip(1).step_by(2).collect();
    let inside = |field: &str, key: &str| match field {
        "" => key.to_owned(),
        _ if field == key || field.ends_with(&format!(".{key}")) => field.to_owned(),
        _ => format!("{field}.{key}"),
    };
    if let (true, Some((key, known))) = (message.starts_with("unknown field"), quoted.split_first())
    {
        field = inside(&field, key);
        let fix = meant(key, known.iter().copied()).map_or_else(
            || format!("remove it; the keys here are {}", known.join(", ")),
            |word| format!("did you mean `{word}`?"),
        );
        return Problem::invalid(field, key, "is not a key here").fix(fix);
    }
    if let (true, Some((name, known))) =
        (message.starts_with("unknown variant"), quoted.split_first())
    {
        return Problem::invalid(field, name, "is not one of the choices")
            .fix(format!("write one of {}", known.join(", ")));
    }
    if let (true, Some(key)) = (message.starts_with("missing field"), quoted.first()) {
        return Problem::invalid(inside(&field, key), "", "is missing").fix(format!("add `{key}`"));
    }
    if let (true, Some((_, expected))) =
        (message.starts_with("invalid "), message.split_once(", expected "))
    {
        return Problem::invalid(field, &given, "is not of the right kind")
            .fix(format!("write {}", plain(expected)));
    }
    let (problem, fix) = match message {
        "invalid socket address syntax" => {
            ("is not an address with a port", "write it as `192.0.2.53:53` or `[2001:db8::53]:53`")
        }
        "invalid IP address syntax" => ("is not an IP address", "write it as `192.0.2.1`"),
        other => other
            .split_once("; ")
            .or_else(|| other.split_once(": "))
            .unwrap_or((other, "see the documentation of this field")),
    };
    // Our types quote what they got; the value is told apart here.
    let problem = problem.rsplit_once("\" ").map_or(problem, |(_, said)| said);
    Problem::invalid(field, &given, problem).fix(fix)
}

/// What serde expected, in words for who does not read Rust.
fn plain(expected: &str) -> &str {
    match expected {
        "u8" => "a whole number from 0 to 255",
        "u16" => "a whole number from 0 to 65535",
        "u32" => "a whole number from 0 to 4294967295",
        "u64" | "usize" => "a whole number, 0 or more",
        "i8" | "i16" | "i32" | "i64" | "isize" => "a whole number",
        "a boolean" => "true or false",
        "a string" | "a borrowed string" | "path string" => "a string in quotes",
        "a sequence" => "a list: [ ... ]",
        "a map" => "a table of keys and values",
        other if other.starts_with("struct ") => "a table of keys and values",
        other if other.starts_with("socket address") => {
            "an address with a port, as in `192.0.2.53:53`"
        }
        other if other.starts_with("IP address") => "an address, as in `192.0.2.1`",
        other => other,
    }
}

fn shown_path(path: &Path) -> String {
    let mut shown = String::new();
    for segment in path {
        match segment {
            Segment::Seq { index } => shown.push_str(&format!("[{index}]")),
            Segment::Map { key } | Segment::Enum { variant: key } => {
                if !shown.is_empty() {
                    shown.push('.');
                }
                shown.push_str(&crate::problem::shortened(key));
            }
            Segment::Unknown => {}
        }
    }
    shown
}

fn json_at(root: &serde_json::Value, path: &Path) -> Option<String> {
    let found = path.iter().try_fold(root, |at, segment| match segment {
        Segment::Seq { index } => at.get(index),
        Segment::Map { key } | Segment::Enum { variant: key } => at.get(key),
        Segment::Unknown => None,
    })?;
    Some(found.as_str().map_or_else(|| found.to_string(), str::to_owned))
}

fn line_of(text: &str, offset: usize) -> usize {
    1 + text.bytes().take(offset).filter(|byte| *byte == b'\n').count()
}

/// The Levenshtein distance of two short texts; long ones are simply far apart.
fn distance(a: &str, b: &str) -> usize {
    if a.len() > 64 || b.len() > 64 {
        return usize::MAX;
    }
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut corner = i;
        let mut left = i + 1;
        for (cell, y) in row.iter_mut().skip(1).zip(b.bytes()) {
            let best = (*cell + 1).min(left + 1).min(corner + usize::from(x != y));
            corner = std::mem::replace(cell, best);
            left = best;
        }
        if let Some(first) = row.first_mut() {
            *first = i + 1;
        }
    }
    row.last().copied().unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use policy::SandboxName;
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "only read by serde")]
    struct Outer {
        name: SandboxName,
        #[serde(default)]
        inner: Vec<Inner>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "only read by serde")]
    struct Inner {
        port: u16,
    }

    #[test]
    fn a_refused_document_names_field_line_value_and_fix() {
        // Text, then field, line, value, and a part of the fix.
        let cases: &[(&str, &str, Option<usize>, &str, &str)] = &[
            ("{\"nmae\": \"a\"}", "nmae", Some(1), "nmae", "did you mean `name`?"),
            ("{\n\"name\": \"A\"}", "name", Some(2), "A", "use 1 to 40"),
            (
                "{\"name\":\"a\",\n\"inner\":[{\"port\":7},{\"prt\":1}]}",
                "inner[1].prt",
                Some(2),
                "prt",
                "`port`",
            ),
            (
                "{\"name\":\"a\",\"inner\":[{\"port\":\"x\"}]}",
                "inner[0].port",
                Some(1),
                "x",
                "write a whole number from 0 to 65535",
            ),
            ("{\"name\":\"a\",\"inner\":7}", "inner", Some(1), "7", "write a list"),
            ("{\"inner\":[]}", "name", Some(1), "", "add `name`"),
            ("{\"name\":\"a\"} 1", "", Some(1), "", "one JSON value"),
        ];
        for (text, field, line, value, fix) in cases {
            let problem = json::<Outer>(text).expect_err(text);
            assert_eq!(problem.field.as_deref(), Some(*field), "{text}: {problem}");
            assert_eq!(problem.line, *line, "{text}: {problem}");
            assert_eq!(problem.value.as_deref(), Some(*value), "{text}: {problem}");
            assert!(problem.fix.as_deref().is_some_and(|f| f.contains(fix)), "{text}: {problem}");
        }
        let cases: &[(&str, &str, Option<usize>, &str, &str)] = &[
            ("nmae = 1", "nmae", Some(1), "nmae", "did you mean `name`?"),
            ("\nname = \"A\"", "name", Some(2), "A", "use 1 to 40"),
            (
                "name = \"a\"\n[[inner]]\nport = 1\n[[inner]]\nprt = 1",
                "inner[1].prt",
                Some(5),
                "prt",
                "`port`",
            ),
            (
                "name = \"a\"\n[[inner]]\nport = 70000",
                "inner[0].port",
                Some(3),
                "70000",
                "write a whole number from 0 to 65535",
            ),
            ("name = ", "", Some(1), "", "TOML"),
        ];
        for (text, field, line, value, fix) in cases {
            let problem = toml::<Outer>(text).expect_err(text);
            assert_eq!(problem.field.as_deref(), Some(*field), "{text}: {problem}");
            assert_eq!(problem.line, *line, "{text}: {problem}");
            assert_eq!(problem.value.as_deref(), Some(*value), "{text}: {problem}");
            assert!(problem.fix.as_deref().is_some_and(|f| f.contains(fix)), "{text}: {problem}");
        }
    }

    #[test]
    fn a_field_is_found_in_its_document() {
        let text = "a = 1\n[b]\nc = [\n 1,\n 2]\n";
        assert_eq!(toml_line(text, &["b", "c", "1"]), Some(5));
        assert_eq!(toml_line(text, &["b", "d"]), None);
    }

    #[test]
    fn what_was_meant_is_found_only_when_near() {
        assert_eq!(meant("adresses", ["addresses", "upstreams"]), Some("addresses"));
        assert_eq!(meant("Timeout", ["timeout"]), Some("timeout"));
        assert_eq!(meant("xyz", ["addresses", "upstreams"]), None);
        assert_eq!(meant(&"x".repeat(1 << 20), ["a"]), None);
    }
}
