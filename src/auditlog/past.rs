//! The past, read from the files backwards and put in one order. Holds at most twice what was asked
//! for, whoever wrote however much.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::time::SystemTime;
use std::{fs, io};

use policy::AuditRecord;
use policy::trail::Owner;

use crate::auditlog::files::{self, Position};
use crate::auditlog::filter::Filter;

type Found = VecDeque<(SystemTime, String)>;

/// The newest `limit` records that pass, oldest first.
pub(crate) fn newest(
    dir: &Path,
    ends: &BTreeMap<Owner, Position>,
    filter: &Filter,
    limit: usize,
) -> io::Result<VecDeque<String>> {
    let mut found = Found::new();
    for (owner, numbers) in files::numbers(dir)? {
        // A tenant's records are in its own files only.
        let may_be = filter.tenant.is_none() || filter.tenant == owner || owner.is_none();
        if let Some(end) = ends.get(&owner).filter(|_| may_be) {
            let here = of_one(dir, &owner, &numbers, *end, filter, limit)?;
            found = merged(found, here, limit);
        }
    }
    Ok(found.into_iter().map(|(_, line)| line).collect())
}

/// The same of one owner: file by file until there are enough.
fn of_one(
    dir: &Path,
    owner: &Owner,
    numbers: &[u64],
    end: Position,
    filter: &Filter,
    limit: usize,
) -> io::Result<Found> {
    let mut found = Found::new();
    for &number in numbers.iter().rev().filter(|number| **number <= end.file) {
        let modified = fs::metadata(files::path(dir, owner, number)).and_then(|m| m.modified());
        if found.len() >= limit {
            break;
        }
        // Older files may have newer records: the clock may have been set back between two of them.
        if filter.since.zip(modified.ok()).is_some_and(|(since, last)| last < since) {
            continue;
        }
        let wanted = limit - found.len();
        let mut here = Found::new();
        for line in files::lines(dir, owner, number, end)?.filter(|line| filter.may_pass(line)) {
            let read = serde_json::from_str::<AuditRecord>(&line);
            if let Some(record) = read.ok().filter(|record| filter.passes(record)) {
                if here.len() == wanted {
                    here.pop_front();
                }
                here.push_back((record.time, line));
            }
        }
        here.append(&mut found);
        found = here;
    }
    Ok(found)
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
}
