//! What is missing in the audit and not told there yet, by whose it was and why. It is kept in a file
//! of fixed size, made while there is room and then only written over, which a full disk allows: what
//! one daemon could not tell before it stopped, the next one does.
//!
//! A daemon that dies between telling and forgetting tells twice rather than never.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use policy::trail::{Gap, Owner, add_gap};
use serde::{Deserialize, Serialize};

/// The file's size, in bytes.
pub(crate) const SIZE: usize = 16 << 10;

/// Why records are missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Why {
    /// More came than could be written at the time.
    QueueFull,
    /// The disk took them not.
    Unwritten,
}

impl Why {
    /// For a person.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::QueueFull => "the audit queue was full",
            Self::Unwritten => "the audit could not be written",
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct Entry {
    tenant: Owner,
    why: Why,
    gap: Gap,
}

/// The gaps to be told.
#[derive(Debug)]
pub(crate) struct Untold {
    path: PathBuf,
    gaps: BTreeMap<(Owner, Why), Gap>,
    /// Whether the file says the same.
    kept: bool,
    /// Whether the file says anything.
    some_kept: bool,
}

impl Untold {
    /// Those that an earlier daemon left in this folder.
    pub(crate) fn open(dir: &Path) -> io::Result<Self> {
        let path = dir.join("untold.json");
        let found = match fs::read(&path) {
            Ok(found) => found,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(error),
        };
        // What stands behind the first value is left of an earlier one.
        let mut values = serde_json::Deserializer::from_slice(&found).into_iter::<Vec<Entry>>();
        let entries = values.next().and_then(Result::ok).unwrap_or_default();
        let gaps = entries.into_iter().map(|Entry { tenant, why, gap }| ((tenant, why), gap));
        let gaps: BTreeMap<_, _> = gaps.collect();
        let kept = found.len() == SIZE;
        let mut untold = Self { path, some_kept: !gaps.is_empty(), gaps, kept };
        if !kept && let Err(error) = untold.write() {
            let path = untold.path.display();
            tracing::warn!(%error, %path, "no room to keep what the audit will not have told");
        }
        Ok(untold)
    }

    /// These are missing, too.
    pub(crate) fn add(&mut self, owner: Owner, why: Why, gap: Gap) {
        add_gap(&mut self.gaps, (owner, why), gap);
        self.kept = false;
    }

    /// Whether nothing is.
    pub(crate) fn is_empty(&self) -> bool {
        self.gaps.is_empty()
    }

    /// Of whom something is.
    pub(crate) fn owners(&self) -> BTreeSet<Owner> {
        self.gaps.keys().map(|(owner, _)| owner.clone()).collect()
    }

    /// The lines that tell it of one owner.
    pub(crate) fn lines(&self, owner: &Owner) -> String {
        let own = self.gaps.iter().filter(|((whose, _), _)| whose == owner);
        own.map(|((_, why), gap)| gap.record(owner, why.as_str()))
            .filter_map(|record| serde_json::to_string(&record).ok())
            .map(|line| line + "\n")
            .collect()
    }

    /// It was told; whether there was something.
    pub(crate) fn forget(&mut self, owner: &Owner) -> bool {
        let before = self.gaps.len();
        self.gaps.retain(|(whose, _), _| whose != owner);
        let some = self.gaps.len() < before;
        self.kept &= !some;
        some
    }

    /// Leaves it to the next daemon, whatever becomes of this one.
    pub(crate) fn keep(&mut self) -> io::Result<()> {
        let nothing = self.gaps.is_empty() && !self.some_kept;
        if self.kept || nothing { Ok(()) } else { self.write() }
    }

    fn write(&mut self) -> io::Result<()> {
        let mut options = OpenOptions::new();
        let file = options.write(true).create(true).truncate(false).mode(0o640).open(&self.path)?;
        file.write_all_at(&self.file(), 0)?;
        file.sync_data()?;
        (self.kept, self.some_kept) = (true, !self.gaps.is_empty());
        Ok(())
    }

    /// All of it as one JSON value, as long as the file. Where so many do not fit, their sum.
    fn file(&self) -> Vec<u8> {
        let text = |gaps: &BTreeMap<(Owner, Why), Gap>| {
            let entry = |((tenant, why), gap): (&(Owner, Why), &Gap)| Entry {
                tenant: tenant.clone(),
                why: *why,
                gap: gap.clone(),
            };
            serde_json::to_vec(&gaps.iter().map(entry).collect::<Vec<_>>()).unwrap_or_default()
        };
        let mut bytes = text(&self.gaps);
        if bytes.len() >= SIZE {
            let mut sums = BTreeMap::new();
            for ((_, why), gap) in &self.gaps {
                add_gap(&mut sums, (None, *why), gap.clone());
            }
            bytes = text(&sums);
        }
        bytes.resize(SIZE - 1, b' ');
        bytes.push(b'\n');
        bytes
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use policy::AuditRecord;
    use policy::audit::{Kind, Outcome};

    use super::*;

    fn gap(second: u64) -> Gap {
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(second);
        Gap::of(&AuditRecord::new(time, Kind::Dns, Outcome::Deny))
    }

    fn told(untold: &Untold) -> Vec<String> {
        untold.owners().iter().map(|owner| untold.lines(owner)).collect()
    }

    #[test]
    fn what_was_not_told_is_left_to_the_next_until_it_is_forgotten() {
        let dir = tempfile::tempdir().expect("folder");
        let mut untold = Untold::open(dir.path()).expect("open");
        let acme: Owner = "acme".parse().ok();
        for owner in [&acme, &None, &acme] {
            untold.add(owner.clone(), Why::QueueFull, gap(7));
        }
        untold.add(acme.clone(), Why::Unwritten, gap(9));
        untold.keep().expect("kept");
        let mut next = Untold::open(dir.path()).expect("open");
        assert_eq!(told(&next), told(&untold));
        let lines = next.lines(&acme);
        assert!(lines.contains("\"count\":2") && lines.contains("queue was full"), "{lines}");
        assert!(lines.contains("could not be written") && lines.lines().count() == 2, "{lines}");
        assert!(next.forget(&acme) && !next.forget(&acme));
        next.keep().expect("kept");
        assert_eq!(Untold::open(dir.path()).expect("open").owners(), BTreeSet::from([None]));
    }

    #[test]
    fn its_file_has_one_size_however_much_it_says_and_is_read_when_it_was_half_written_over() {
        let dir = tempfile::tempdir().expect("folder");
        let mut untold = Untold::open(dir.path()).expect("open");
        let size = || fs::metadata(dir.path().join("untold.json")).expect("a file").len();
        assert_eq!(size(), SIZE as u64, "made while there is room");
        for n in 0..1000 {
            untold.add(format!("t{n}").parse().ok(), Why::Unwritten, gap(n));
        }
        untold.keep().expect("kept");
        assert_eq!(size(), SIZE as u64);
        let next = Untold::open(dir.path()).expect("open");
        let [sum] = &told(&next)[..] else { panic!("one sum: {:?}", next.owners()) };
        assert!(sum.contains("\"count\":1000") && sum.contains("\"micros\":999000000"), "{sum}");
        let mut file = fs::read(&next.path).expect("read");
        file[4096..].fill(b'x');
        fs::write(&next.path, file).expect("write");
        assert_eq!(told(&Untold::open(dir.path()).expect("open")), told(&next));
        fs::write(&next.path, "[{").expect("write");
        assert!(Untold::open(dir.path()).expect("open").is_empty());
        assert_eq!(size(), SIZE as u64, "made again");
    }
}
