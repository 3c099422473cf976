//! The past, read from the files backwards and put in one order. Holds at most twice what was asked
//! for, whoever wrote however much.
//!
//! What a tenant asks reads no more than a bounded part of the files; the answer says then where to go on.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::time::SystemTime;
use std::{fs, io};

use policy::AuditRecord;
use policy::audit::{Kind, Outcome};
use policy::trail::Owner;

use crate::auditlog::files::{self, Position};
use crate::auditlog::filter::Filter;
use crate::auditlog::worded;

/// Bytes that one question of a tenant has read, or else one file.
const READ: u64 = 64 << 20;

type Found = VecDeque<(SystemTime, String)>;

/// Where reading stopped: the files with these numbers and later ones were looked at. Written `7-0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cursor {
    /// Of those of a tenant.
    tenant: u64,
    /// Of those that are nobody's; an earlier version kept all tenants' records there.
    nobody: u64,
}

/// What is asked, by whom.
#[derive(Clone, Debug)]
pub(crate) struct Question {
    pub(crate) filter: Filter,
    pub(crate) limit: usize,
    pub(crate) before: Option<Cursor>,
    pub(crate) for_tenant: bool,
}

/// One reading.
struct Reading<'a> {
    dir: &'a Path,
    question: &'a Question,
    /// What a line must contain to be worth reading.
    marks: Vec<String>,
    /// Bytes that may still be read; none for as many as there are.
    left: Option<u64>,
    /// Whether no file was read yet.
    first: bool,
}

impl FromStr for Cursor {
    type Err = ();
    fn from_str(text: &str) -> Result<Self, ()> {
        let (tenant, nobody) = text.split_once('-').ok_or(())?;
        let number = |text: &str| text.parse().map_err(drop);
        Ok(Self { tenant: number(tenant)?, nobody: number(nobody)? })
    }
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.tenant, self.nobody)
    }
}

/// The newest records that pass, oldest first; before them, if a tenant's question stopped before it had
/// seen all files, a record that says so.
pub(crate) fn newest(
    dir: &Path,
    ends: &BTreeMap<Owner, Position>,
    question: &Question,
) -> io::Result<VecDeque<String>> {
    let bound = question.for_tenant.then_some(READ);
    newest_within(dir, ends, question, bound)
}

fn newest_within(
    dir: &Path,
    ends: &BTreeMap<Owner, Position>,
    question: &Question,
    bound: Option<u64>,
) -> io::Result<VecDeque<String>> {
    let Question { filter, limit, .. } = question;
    let marks = filter.marks();
    let mut reading = Reading { dir, question, marks, left: bound, first: true };
    let mut found = Found::new();
    let mut stopped = Cursor { tenant: 0, nobody: 0 };
    // A tenant's own files first: what is nobody's is of the node, and of an earlier version.
    for (owner, numbers) in files::numbers(dir)?.into_iter().rev() {
        // A tenant's records are in its own files only.
        let may_be = filter.tenant.is_none() || filter.tenant == owner || owner.is_none();
        if let Some(end) = ends.get(&owner).filter(|_| may_be) {
            let (here, at) = reading.of_one(&owner, &numbers, *end)?;
            match owner {
                Some(_) => stopped.tenant = at,
                None => stopped.nobody = at,
            }
            found = merged(found, here, *limit);
        }
    }
    let mut lines: VecDeque<String> = found.into_iter().map(|(_, line)| line).collect();
    if lines.len() < *limit && stopped != (Cursor { tenant: 0, nobody: 0 }) {
        lines.push_front(serde_json::to_string(&more(stopped)).unwrap_or_default());
    }
    Ok(lines)
}

/// What stands for the part that was not looked at.
fn more(stopped: Cursor) -> AuditRecord {
    AuditRecord {
        detail: Some(format!("older files were not looked at: go on with before={stopped}")),
        ..AuditRecord::new(fault::wall_clock(), Kind::Gap, Outcome::Fail)
    }
}

impl Reading<'_> {
    /// The same of one owner, file by file until there are enough; and the file before which it stopped
    /// because no more may be read, 0 if it did not.
    fn of_one(
        &mut self,
        owner: &Owner,
        numbers: &[u64],
        end: Position,
    ) -> io::Result<(Found, u64)> {
        let Question { filter, limit, before, .. } = self.question;
        let before = before.map_or(u64::MAX, |before| match owner {
            Some(_) => before.tenant,
            None => before.nobody,
        });
        let mut found = Found::new();
        let unseen = |number: &&u64| **number <= end.file && **number < before;
        let mut at = before.min(end.file.saturating_add(1));
        for &number in numbers.iter().rev().filter(unseen) {
            let file = fs::metadata(files::path(self.dir, owner, number));
            if found.len() >= *limit {
                break;
            }
            // Older files may have newer records: the clock may have been set back between two of them.
            let written = file.as_ref().ok().and_then(|file| file.modified().ok());
            if filter.since.zip(written).is_some_and(|(since, last)| last < since) {
                continue;
            }
            if !self.may_read(file.map_or(0, |file| file.len())) {
                return Ok((found, at));
            }
            let mut here = self.of_file(owner, number, end, limit - found.len())?;
            here.append(&mut found);
            (found, at) = (here, number);
        }
        Ok((found, 0))
    }

    /// Whether so much more may be read. The first file may, whatever its size: so every question gets on.
    fn may_read(&mut self, size: u64) -> bool {
        let Some(left) = &mut self.left else { return true };
        let fits = std::mem::take(&mut self.first) || size <= *left;
        *left = if fits { left.saturating_sub(size) } else { 0 };
        fits
    }

    /// The newest `wanted` of one file.
    fn of_file(
        &self,
        owner: &Owner,
        number: u64,
        end: Position,
        wanted: usize,
    ) -> io::Result<Found> {
        let mut here = Found::new();
        let marked = |line: &String| self.marks.iter().all(|mark| line.contains(mark));
        for line in files::lines(self.dir, owner, number, end)?.filter(marked) {
            let read = serde_json::from_str::<AuditRecord>(&line);
            let passes = |record: &AuditRecord| self.question.filter.passes(record);
            if let Some(record) = read.ok().filter(passes) {
                if here.len() == wanted {
                    here.pop_front();
                }
                here.push_back((record.time, worded(&record, line, self.question.for_tenant)));
            }
        }
        Ok(here)
    }
}

/// The newest `limit` of two, by time; each keeps its own order, whatever the clock did.
fn merged(mut one: Found, mut other: Found, limit: usize) -> Found {
    let mut found = Found::new();
    while found.len() < limit {
        let newest = |found: &Found| found.back().map(|(time, _)| *time);
        let newer = newest(&one) >= newest(&other);
        let Some(next) = (if newer { one.pop_back() } else { other.pop_back() }) else { break };
        found.push_front(next);
    }
    found
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn two_pasts_become_one_and_each_keeps_its_order() {
        let at = |seconds: &[u64]| -> Found {
            let time = |s: &u64| SystemTime::UNIX_EPOCH + Duration::from_secs(*s);
            seconds.iter().map(|s| (time(s), s.to_string())).collect()
        };
        // The clock of the second was set back from 9 to 3.
        let both = merged(at(&[1, 4, 8]), at(&[2, 9, 3, 5]), 10);
        let both: Vec<String> = both.into_iter().map(|(_, line)| line).collect();
        assert_eq!(both, ["1", "2", "9", "3", "4", "5", "8"].map(str::to_owned));
        let few = merged(at(&[1, 4, 8]), at(&[2, 5]), 2);
        assert_eq!(few, at(&[5, 8]));
        assert_eq!(merged(Found::new(), at(&[1]), 5), at(&[1]));
    }

    /// Promise 50. One after another, the questions see every record once, and each reads a bounded part.
    #[test]
    fn a_question_reads_a_part_and_says_where_to_go_on_until_all_was_read() {
        const EACH: u64 = 4;
        let dir = tempfile::tempdir().expect("folder");
        let acme: Owner = "acme".parse().ok();
        let mut ends = BTreeMap::new();
        let mut size = 0;
        for (owner, files) in [(&acme, 5), (&None, 3)] {
            for file in 1..=files {
                let record = |n| AuditRecord {
                    tenant: acme.clone(),
                    flow: Some(file * 10 + n + if owner.is_none() { 1000 } else { 0 }),
                    ..AuditRecord::new(SystemTime::UNIX_EPOCH, Kind::Dns, Outcome::Deny)
                };
                let lines = (0..EACH).map(|n| serde_json::to_string(&record(n)).expect("JSON"));
                let text = lines.map(|line| line + "\n").collect::<String>();
                size = size.max(text.len() as u64);
                fs::write(files::path(dir.path(), owner, file), text).expect("written");
            }
            ends.insert(owner.clone(), Position { file: files, offset: u64::MAX });
        }
        let ask = |before: Option<&str>, limit, bound| {
            let question = Question {
                filter: Filter { tenant: acme.clone(), ..Filter::default() },
                limit,
                before: before.map(|text| text.parse().expect("a cursor")),
                for_tenant: true,
            };
            let found = newest_within(dir.path(), &ends, &question, bound).expect("read");
            let mut records: VecDeque<AuditRecord> =
                found.iter().map(|line| serde_json::from_str(line).expect("a record")).collect();
            let more = records.pop_front_if(|first| first.kind == Kind::Gap);
            let more = more.map(|more| more.detail.expect("where"));
            let more = more.map(|more| more.rsplit_once('=').expect("a cursor").1.to_owned());
            (records.into_iter().filter_map(|record| record.flow).collect::<Vec<_>>(), more)
        };
        let (all, more) = ask(None, 999, None);
        assert_eq!((all.len() as u64, more), (8 * EACH, None), "control: without a bound");
        for bound in [0, 1, size, 2 * size, 3 * size + 1] {
            let (mut seen, mut at) = (Vec::new(), None::<String>);
            for _ in 0..20 {
                let (part, more) = ask(at.as_deref(), 999, Some(bound));
                assert!(part.len() as u64 <= EACH * (bound / size).max(1), "{bound}: {part:?}");
                seen.extend(part);
                at = more;
                if at.is_none() {
                    break;
                }
            }
            seen.sort_unstable();
            let mut all = all.clone();
            all.sort_unstable();
            assert_eq!(seen, all, "{bound}");
        }
        let (newest, more) = ask(None, 2, Some(size));
        assert_eq!((newest, more), (vec![52, 53], None), "enough was found");
        for wrong in ["", "7", "-", "a-b", "7-0-1", "-1-0"] {
            assert_eq!(wrong.parse::<Cursor>(), Err(()), "{wrong}");
        }
    }
}
