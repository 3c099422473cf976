//! Globs over request paths, matched in time that a tenant cannot make long.
//!
//! Each part between two stars is looked for once, from the left: the first place is as good as any
//! later one, because what follows only needs room. Never goes back.

use std::fmt;

use crate::audit::shown;
use crate::path::canonical_path;

/// Longest glob, in bytes.
const MAX_GLOB: usize = 512;

/// What looking for one part along a whole path weighs, in bytes of a glob that are compared once.
const SEARCH: usize = 512;

/// Longest piece of a glob that is compared at each place of a segment.
const SHORT: usize = 16;

/// A glob over canonical paths: `*` is any run within a segment, a segment `**` is one or more
/// whole segments.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PathGlob(Box<str>);

/// A canonical path, cut into segments once for all the globs that look at it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segments {
    text: String,
    /// Where each segment ends in `text`; it begins after the slash behind the one before.
    ends: Vec<usize>,
}

impl Segments {
    /// Cuts a path that begins with `/`.
    #[must_use]
    pub fn of(path: String) -> Self {
        let slashes = path.match_indices('/').map(|(at, _)| at).skip(1);
        let ends = slashes.chain([path.len()]).collect();
        Self { text: path, ends }
    }

    fn len(&self) -> usize {
        self.ends.len()
    }

    fn get(&self, at: usize) -> Option<&str> {
        let begin = match at.checked_sub(1) {
            Some(before) => self.ends.get(before)? + 1,
            None => 1,
        };
        self.text.get(begin..*self.ends.get(at)?)
    }

    /// Whether the parts of a group are the segments from `first` on.
    fn begin(&self, first: usize, group: &str) -> bool {
        let mut parts = group.split('/').skip(1).zip(first..);
        parts.all(|(part, at)| self.get(at).is_some_and(|segment| fits(part, segment)))
    }
}

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
            None => Err("use a path without query, '//', '/;', '\\' or escaped slashes".into()),
        }
    }

    /// The glob as it was written.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether it names a path. Takes time in proportion to its length, and for each search of
    /// [`PathGlob::weight`] to the path's.
    #[must_use]
    pub fn matches(&self, path: &Segments) -> bool {
        let Some((front, tail)) = self.0.rsplit_once("/**") else {
            return path.len() == size(&self.0) && path.begin(0, &self.0);
        };
        let mut groups = front.split("/**");
        let head = groups.next().unwrap_or_default();
        // Behind each group there is one segment at least for the `**` between it and the next.
        let Some(last) = path.len().checked_sub(size(tail)).filter(|last| *last > size(head))
        else {
            return false;
        };
        if !path.begin(0, head) || !path.begin(last, tail) {
            return false;
        }
        let mut next = size(head) + 1;
        for group in groups {
            let mut places = next..last.saturating_sub(size(group));
            let Some(place) = places.find(|place| path.begin(*place, group)) else {
                return false;
            };
            next = place + size(group) + 1;
        }
        next <= last
    }

    /// What matching it costs at most, in bytes that are compared: its own, and a path's for each
    /// part that has to be looked for along it.
    #[must_use]
    pub fn weight(&self) -> usize {
        let stars = |group: &str| group.split('/').any(|part| part.matches('*').count() > 1);
        let searches = match self.0.rsplit_once("/**") {
            None => usize::from(stars(&self.0)),
            Some((front, tail)) => {
                let mut groups = front.split("/**");
                let ends = stars(groups.next().unwrap_or_default()) || stars(tail);
                usize::from(ends) + groups.map(size).sum::<usize>()
            }
        };
        self.0.len() + searches * SEARCH
    }
}

/// How many segments a group names: each begins with its slash.
fn size(group: &str) -> usize {
    group.bytes().filter(|b| *b == b'/').count()
}

/// Whether one part of a glob, in which no star follows another, names a segment.
fn fits(part: &str, segment: &str) -> bool {
    // More than half of it must be there by itself: what cannot fit is not read.
    if part.len() > 2 * segment.len() + 1 {
        return false;
    }
    let Some((front, behind)) = part.split_once('*') else { return part == segment };
    let (middle, end) = match behind.rsplit_once('*') {
        Some((middle, end)) => (Some(middle), end),
        None => (None, behind),
    };
    let Some(mut rest) = segment.strip_prefix(front).and_then(|rest| rest.strip_suffix(end)) else {
        return false;
    };
    middle.into_iter().flat_map(|middle| middle.split('*')).all(|piece| {
        let found = found_in(rest, piece);
        found.map(|after| rest = after).is_some()
    })
}

/// What is behind the first place of a piece. Short ones, of which a glob may have many, are compared at
/// each place: to set a search up that is fast for any length takes longer.
fn found_in<'s>(text: &'s str, piece: &str) -> Option<&'s str> {
    match piece.as_bytes() {
        [] => Some(text),
        [only] => {
            let at = text.bytes().position(|there| there == *only)?;
            text.get(at + 1..)
        }
        short if short.len() <= SHORT => {
            let at = text.as_bytes().windows(short.len()).position(|there| there == short)?;
            text.get(at + short.len()..)
        }
        _ => text.split_once(piece).map(|(_, after)| after),
    }
}

impl fmt::Display for PathGlob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
