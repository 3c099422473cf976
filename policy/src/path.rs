//! Request paths in one canonical form, and the globs that name them.
//!
//! What was judged must be what is sent: a path that two servers could read differently has no
//! canonical form, and so matches no rule that names paths.

use std::fmt;

use crate::audit::shown;

/// Longest path that is judged, and longest glob, in bytes.
const MAX_PATH: usize = 8192;
const MAX_GLOB: usize = 512;

/// The canonical form of a request path without its query (RFC 3986, section 6.2.2): unreserved
/// characters decoded, other escapes in upper case, dot segments resolved. None for a path that is
/// not one (no leading `/`, controls, not ASCII, over 8192 bytes) or that servers disagree about:
/// `//`, `\`, an encoded slash, backslash or control, a broken escape, `..;`.
#[must_use]
pub fn canonical_path(path: &str) -> Option<String> {
    if path.len() > MAX_PATH {
        return None;
    }
    let decoded = decode(path)?;
    let rest = decoded.strip_prefix('/')?;
    let mut segments: Vec<&str> = Vec::new();
    let mut parts = rest.split('/').peekable();
    while let Some(part) = parts.next() {
        let last = parts.peek().is_none();
        let bare = part.split(';').next().unwrap_or_default();
        match part {
            "." | ".." => {
                if part == ".." {
                    segments.pop();
                }
                if last {
                    segments.push("");
                }
            }
            "" if !last => return None,
            _ if bare == "." || bare == ".." => return None,
            _ => segments.push(part),
        }
    }
    Some(format!("/{}", segments.join("/")))
}

fn decode(path: &str) -> Option<String> {
    let mut out = String::with_capacity(path.len());
    let mut bytes = path.bytes();
    while let Some(byte) = bytes.next() {
        match byte {
            b'%' => {
                let high = char::from(bytes.next()?).to_digit(16)?;
                let low = char::from(bytes.next()?).to_digit(16)?;
                let byte = u8::try_from(high * 16 + low).ok()?;
                match byte {
                    b'/' | b'\\' | 0..=0x1f | 0x7f => return None,
                    b if b.is_ascii_alphanumeric() || b"-._~".contains(&b) => {
                        out.push(char::from(b));
                    }
                    b => out.push_str(&format!("%{b:02X}")),
                }
            }
            b'\\' | b'?' | b'#' => return None,
            b if b.is_ascii_graphic() => out.push(char::from(b)),
            _ => return None,
        }
    }
    Some(out)
}

/// A glob over canonical paths: `*` is any run within a segment, a segment `**` is one or more
/// whole segments.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PathGlob(Box<str>);

impl PathGlob {
    /// Reads a glob. The error says what to write instead.
    pub fn parse(text: &str) -> Result<Self, String> {
        if !text.starts_with('/') {
            return Err("begin it with '/'".into());
        }
        if text.len() > MAX_GLOB {
            return Err(format!("use at most {MAX_GLOB} bytes"));
        }
        if text.split('/').any(|part| part.contains("**") && part != "**") {
            return Err("let '**' be a whole segment, as in \"/v1/**\"".into());
        }
        match canonical_path(text) {
            Some(canonical) if canonical == text => Ok(Self(text.into())),
            Some(canonical) => Err(format!("write its canonical form, \"{}\"", shown(&canonical))),
            None => Err("use a path without query, '//', '\\' or escaped slashes".into()),
        }
    }

    /// The glob as it was written.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether it names a path in canonical form.
    #[must_use]
    pub fn matches(&self, path: &str) -> bool {
        let glob: Vec<&str> = self.0.split('/').collect();
        let path: Vec<&str> = path.split('/').collect();
        wildcard(
            &glob,
            &path,
            |part| *part == "**",
            1,
            |part, segment| {
                wildcard(part.as_bytes(), segment.as_bytes(), |b| *b == b'*', 0, |a, b| a == b)
            },
        )
    }
}

impl fmt::Display for PathGlob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Matches `text` against `pattern`, where a star stands for `least` or more items. Goes back to
/// the last star only, which is enough for one kind of star and bounds the time to the product of
/// the lengths.
fn wildcard<P, T>(
    pattern: &[P],
    text: &[T],
    star: impl Fn(&P) -> bool,
    least: usize,
    equal: impl Fn(&P, &T) -> bool,
) -> bool {
    let (mut p, mut t) = (0, 0);
    let mut back: Option<(usize, usize)> = None;
    loop {
        match (pattern.get(p), text.get(t)) {
            (Some(part), _) if star(part) => {
                t += least;
                p += 1;
                if t > text.len() {
                    return false;
                }
                back = Some((p, t));
            }
            (Some(part), Some(item)) if equal(part, item) => {
                p += 1;
                t += 1;
            }
            (None, None) => return true,
            _ => match back {
                Some((after, from)) if from < text.len() => {
                    (p, t) = (after, from + 1);
                    back = Some((after, from + 1));
                }
                _ => return false,
            },
        }
    }
}
