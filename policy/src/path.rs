//! Request paths in one canonical form, and the globs that name them.
//!
//! What was judged must be what is sent: a path that two servers could read differently has no
//! canonical form, and so matches no rule that names paths.

mod glob;

pub use crate::path::glob::{PathGlob, Segments};

/// Longest path that is judged, in bytes, and most segments of it: both bound what a glob costs.
const MAX_PATH: usize = 4096;
const MAX_SEGMENTS: usize = 256;

/// The canonical form of a request path without its query (RFC 3986, section 6.2.2): unreserved
/// characters decoded, other escapes in upper case, dot segments resolved. None for a path that is
/// not one (no leading `/`, controls, not ASCII, over 4096 bytes or 256 segments) or that servers disagree about:
/// `//`, `\`, an encoded slash, backslash or control, a broken escape, `..;`, `/;x/`, and parameters
/// both behind `;` and `%3B`.
#[must_use]
pub fn canonical_path(path: &str) -> Option<String> {
    if path.len() > MAX_PATH {
        return None;
    }
    let decoded = decode(path)?;
    if decoded.contains(';') && decoded.contains(ENCODED) {
        return None;
    }
    let rest = decoded.strip_prefix('/')?;
    let mut segments: Vec<&str> = Vec::new();
    let mut parts = rest.split('/').peekable();
    while let Some(part) = parts.next() {
        let last = parts.peek().is_none();
        let bare = without_parameters(part);
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
            _ if bare == "." || bare == ".." || (bare.is_empty() && !last) => return None,
            _ => segments.push(part),
        }
    }
    (segments.len() <= MAX_SEGMENTS).then(|| format!("/{}", segments.join("/")))
}

/// A semicolon that is escaped, in canonical form.
const ENCODED: &str = "%3B";

/// A segment without its parameters (RFC 3986, section 3.3), as servers that know them read it. Some
/// look for them after they have decoded it.
fn without_parameters(segment: &str) -> &str {
    let plain = segment.split(';').next().unwrap_or_default();
    plain.split(ENCODED).next().unwrap_or_default()
}

/// A request path as rules judge it: as it is written, and as it is without parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestPath {
    written: Segments,
    /// Where it is another.
    bare: Option<Segments>,
}

impl RequestPath {
    /// Reads the path of a request; none where it has no canonical form.
    #[must_use]
    pub fn read(path: &str) -> Option<Self> {
        let written = canonical_path(path)?;
        let with_parameters = written.contains(';') || written.contains(ENCODED);
        let bare = with_parameters.then(|| {
            let segments: Vec<&str> = written.split('/').map(without_parameters).collect();
            Segments::of(segments.join("/"))
        });
        Some(Self { written: Segments::of(written), bare })
    }

    /// Whether some of the globs names it, whichever way a server reads it: what lets it through.
    #[must_use]
    pub fn is_named(&self, globs: &[PathGlob]) -> bool {
        self.forms().all(|form| globs.iter().any(|glob| glob.matches(form)))
    }

    /// Whether some of the globs names it in one way that a server may read it: what denies it.
    #[must_use]
    pub fn may_be_named(&self, globs: &[PathGlob]) -> bool {
        self.forms().any(|form| globs.iter().any(|glob| glob.matches(form)))
    }

    fn forms(&self) -> impl Iterator<Item = &Segments> {
        std::iter::once(&self.written).chain(&self.bare)
    }
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
