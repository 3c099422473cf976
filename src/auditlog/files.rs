//! The audit's files: of each tenant, and of the node itself, `audit-<number>.<tenant>.jsonl`, numbers
//! rising, bounded all together. When there is too much, the oldest file of whoever has most goes:
//! nobody can push out what another did.
//!
//! Only whole lines are ever left behind: a write that fails half-way is cut off again, and a torn
//! line of a crash is closed by a line feed and skipped by readers.

use std::collections::{BTreeMap, VecDeque};
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use fault::Point;
use policy::trail::Owner;

/// Files that are kept open.
const OPEN: usize = 32;
/// Nobody's files are smaller, however many share the room.
const LEAST: u64 = 16 << 10;

/// A place in the files of one owner: the file's number and the bytes before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Position {
    /// The file's number, from 1.
    pub(crate) file: u64,
    /// Bytes into the file.
    pub(crate) offset: u64,
}

/// The writing end. One per folder.
#[derive(Debug)]
pub(crate) struct Files {
    dir: PathBuf,
    file_size: u64,
    total_size: u64,
    shelves: BTreeMap<Owner, Shelf>,
    /// Bytes in all files.
    held: u64,
    /// Appends so far.
    appends: u64,
}

/// The files of one owner.
#[derive(Debug)]
struct Shelf {
    /// Number and size, oldest first.
    closed: VecDeque<(u64, u64)>,
    at: Position,
    current: Option<File>,
    /// The append that was its last, counted over all owners.
    used: u64,
    /// Whether its newest file was closed before it was synced.
    unsynced: bool,
    /// When it was last written to: by our clock, and until we write by that of the disk, which may be
    /// another host's.
    written: SystemTime,
}

impl Shelf {
    fn new() -> Self {
        let at = Position { file: 1, offset: 0 };
        let closed = VecDeque::new();
        Self { closed, at, current: None, used: 0, unsynced: false, written: UNIX_EPOCH }
    }

    /// Waits until the newest file is on the disk: what one descriptor wrote, another can sync.
    fn sync(&mut self, dir: &Path, owner: &Owner) -> io::Result<()> {
        match &self.current {
            Some(file) => file.sync_data()?,
            None if self.unsynced => match File::open(path(dir, owner, self.at.file)) {
                Ok(file) => file.sync_data()?,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            },
            None => {}
        }
        self.unsynced = false;
        Ok(())
    }

    fn size(&self) -> u64 {
        self.at.offset + self.closed.iter().map(|(_, size)| size).sum::<u64>()
    }

    /// The next line goes to a file of its own.
    fn turn(&mut self) {
        self.closed.push_back((self.at.file, self.at.offset));
        self.at = Position { file: self.at.file + 1, offset: 0 };
        self.current = None;
        self.unsynced = false;
    }
}

impl Files {
    /// Goes on in the newest files of the folder, which exists. Writes nothing.
    pub(crate) fn open(dir: &Path, file_size: u64, total_size: u64) -> io::Result<Self> {
        let shelves = BTreeMap::new();
        let mut files =
            Self { dir: dir.to_owned(), file_size, total_size, shelves, held: 0, appends: 0 };
        for (owner, numbers) in numbers(dir)? {
            let shelf = files.shelves.entry(owner.clone()).or_insert_with(Shelf::new);
            for number in numbers {
                let found = fs::metadata(path(dir, &owner, number)).ok();
                let size = found.as_ref().map_or(0, Metadata::len);
                shelf.written = found.and_then(|it| it.modified().ok()).unwrap_or(UNIX_EPOCH);
                files.held += size;
                shelf.closed.push_back((number, size));
            }
            if let Some((file, offset)) = shelf.closed.pop_back() {
                shelf.at = Position { file, offset };
            }
        }
        Ok(files)
    }

    /// Where the next line of each owner goes.
    #[must_use]
    pub(crate) fn ends(&self) -> BTreeMap<Owner, Position> {
        self.shelves.iter().map(|(owner, shelf)| (owner.clone(), shelf.at)).collect()
    }

    /// Appends whole lines of one owner, first making room; gives where they end. On failure nothing
    /// was appended.
    pub(crate) fn append(&mut self, owner: &Owner, lines: &[u8]) -> io::Result<Position> {
        let length = wide(lines.len());
        let owners = wide(self.shelves.len()).max(1);
        // So that the first file to go is a small part of what its owner has.
        let size = self.file_size.min((self.total_size / owners / 4).max(LEAST));
        self.close_one_for(owner);
        self.appends += 1;
        let shelf = self.shelves.entry(owner.clone()).or_insert_with(Shelf::new);
        shelf.used = self.appends;
        let full = shelf.at.offset > 0 && shelf.at.offset.saturating_add(length) > size;
        // Somebody may have removed the file: what is written to it would be lost unseen.
        let current = shelf.current.as_ref().and_then(|file| file.metadata().ok());
        let removed = current.is_some_and(|found| found.nlink() == 0);
        // Readers go by when a file was last written: none has records from before and after a clock
        // was set back.
        let now = fault::wall_clock();
        let set_back = shelf.at.offset > 0 && shelf.written > now;
        if full || removed || set_back {
            shelf.sync(&self.dir, owner)?;
            shelf.turn();
            fault::at(Point::AuditRotated);
        }
        self.make_room(length);
        let shelf = self.shelves.entry(owner.clone()).or_insert_with(Shelf::new);
        let file = match &mut shelf.current {
            Some(file) => file,
            none => {
                let (file, offset) = open_file(&path(&self.dir, owner, shelf.at.file))?;
                self.held = self.held.saturating_sub(shelf.at.offset) + offset;
                shelf.at.offset = offset;
                none.insert(file)
            }
        };
        fault::at(Point::AuditToAppend);
        if fault::armed(Point::AuditHalfAppended) {
            // Half of several lines may be whole ones: the last is torn.
            let torn = lines.get(..lines.len().saturating_sub(2)).unwrap_or_default();
            let _ = file.write_all(torn);
            fault::at(Point::AuditHalfAppended);
        }
        if let Err(error) = file.write_all(lines) {
            // Best effort: should this fail too, the next line still begins after a torn one.
            let _ = file.set_len(shelf.at.offset);
            return Err(error);
        }
        shelf.at.offset += length;
        shelf.written = now;
        self.held += length;
        fault::at(Point::AuditAppended);
        Ok(shelf.at)
    }

    /// Waits until what was appended is on the disk.
    pub(crate) fn sync(&mut self) -> io::Result<()> {
        let dir = &self.dir;
        self.shelves.iter_mut().try_for_each(|(owner, shelf)| shelf.sync(dir, owner))
    }

    /// Where too many files are open for one more, closes the one that was longest not written to.
    /// It is synced with the others: waiting for the disk here would hold up every record.
    fn close_one_for(&mut self, owner: &Owner) {
        if self.shelves.get(owner).is_some_and(|shelf| shelf.current.is_some()) {
            return;
        }
        let open = self.shelves.values_mut().filter(|shelf| shelf.current.is_some());
        let mut open: Vec<&mut Shelf> = open.collect();
        if open.len() < OPEN {
            return;
        }
        if let Some(oldest) = open.iter_mut().min_by_key(|shelf| shelf.used) {
            oldest.current = None;
            oldest.unsynced = true;
        }
    }

    /// Removes oldest files of whoever has most until this much more fits the total.
    fn make_room(&mut self, length: u64) {
        while self.held > 0 && self.held.saturating_add(length) > self.total_size {
            let largest = self.shelves.iter_mut().max_by_key(|(_, shelf)| shelf.size());
            let Some((owner, shelf)) = largest else { return };
            if shelf.closed.is_empty() {
                shelf.turn();
            }
            let Some((number, size)) = shelf.closed.pop_front() else { return };
            self.held = self.held.saturating_sub(size);
            if let Err(error) = fs::remove_file(path(&self.dir, owner, number))
                && error.kind() != io::ErrorKind::NotFound
            {
                tracing::error!(%error, number, "an old file of the audit was not removed");
            }
            fault::at(Point::AuditTrimmed);
        }
    }
}

/// The numbers of each owner's files in a folder, rising.
pub(crate) fn numbers(dir: &Path) -> io::Result<BTreeMap<Owner, Vec<u64>>> {
    let mut found: BTreeMap<Owner, Vec<u64>> = BTreeMap::new();
    for entry in fs::read_dir(dir)? {
        let name = entry?.file_name();
        let name =
            name.to_str().and_then(|name| name.strip_prefix("audit-")?.strip_suffix(".jsonl"));
        let Some(name) = name else { continue };
        let (number, owner) = match name.split_once('.') {
            None => (name, Ok(None)),
            Some((number, tenant)) => (number, tenant.parse().map(Some)),
        };
        if let (Ok(number), Ok(owner)) = (number.parse(), owner) {
            found.entry(owner).or_default().push(number);
        }
    }
    found.values_mut().for_each(|numbers| numbers.sort_unstable());
    Ok(found)
}

/// The path of a file.
#[must_use]
pub(crate) fn path(dir: &Path, owner: &Owner, number: u64) -> PathBuf {
    dir.join(match owner {
        None => format!("audit-{number:06}.jsonl"),
        Some(tenant) => format!("audit-{number:06}.{tenant}.jsonl"),
    })
}

/// The whole lines of one file up to `end`. A file that is gone has none.
pub(crate) fn lines(
    dir: &Path,
    owner: &Owner,
    number: u64,
    end: Position,
) -> io::Result<impl Iterator<Item = String>> {
    let limit = if number == end.file { end.offset } else { u64::MAX };
    let file: Box<dyn Read> = match File::open(path(dir, owner, number)) {
        Ok(file) => Box::new(file.take(limit)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Box::new(io::empty()),
        Err(error) => return Err(error),
    };
    let lines = BufReader::with_capacity(1 << 16, file).split(b'\n').map_while(Result::ok);
    Ok(lines.map(|line| String::from_utf8_lossy(&line).into_owned()))
}

/// Opens a file to go on behind its last whole line; gives where that is.
fn open_file(path: &Path) -> io::Result<(File, u64)> {
    let mut options = OpenOptions::new();
    let mut file = options.read(true).append(true).create(true).mode(0o640).open(path)?;
    let mut offset = file.seek(SeekFrom::End(0))?;
    if offset > 0 {
        let mut last = [0];
        file.seek(SeekFrom::End(-1))?;
        file.read_exact(&mut last)?;
        if last != *b"\n" {
            file.write_all(b"\n")?;
            offset += 1;
        }
    }
    Ok((file, offset))
}

fn wide(length: usize) -> u64 {
    u64::try_from(length).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn everything(files: &Files, owner: &Owner) -> Vec<String> {
        let (dir, end) = (&files.dir, files.ends()[owner]);
        let all = numbers(dir).expect("folder").remove(owner).unwrap_or_default().into_iter();
        all.flat_map(|number| lines(dir, owner, number, end).expect("file")).collect()
    }

    fn on_disk(dir: &Path) -> u64 {
        let files = fs::read_dir(dir).expect("folder");
        files.map(|file| file.expect("file").metadata().expect("metadata").len()).sum()
    }

    fn tenant(name: &str) -> Owner {
        Some(name.parse().expect("a name"))
    }

    #[test]
    fn files_are_bounded_together_and_the_newest_stay() {
        let dir = tempfile::tempdir().expect("folder");
        let mut files = Files::open(dir.path(), 100, 300).expect("open");
        for n in 0..200 {
            files.append(&None, format!("line {n:04}\n").as_bytes()).expect("append");
            assert!(on_disk(dir.path()) <= 300);
        }
        let left = everything(&files, &None);
        let expected: Vec<String> =
            (200 - left.len()..200).map(|n| format!("line {n:04}")).collect();
        assert_eq!(left, expected, "no gap and no loss at the new end");
        assert!(left.len() >= 20);
    }

    /// Promise 50.
    #[test]
    fn who_writes_much_pushes_out_what_is_its_own() {
        const LINE: usize = 1000;
        let dir = tempfile::tempdir().expect("folder");
        let total = 8 * LEAST;
        let mut files = Files::open(dir.path(), LEAST, total).expect("open");
        let (quiet, loud) = (tenant("quiet"), tenant("loud"));
        let line = |n: usize| format!("{n:0width$}\n", width = LINE - 1);
        for n in 0..10 {
            files.append(&quiet, line(n).as_bytes()).expect("append");
            files.append(&None, line(n).as_bytes()).expect("append");
        }
        for n in 0..1000 {
            files.append(&loud, line(n).as_bytes()).expect("append");
        }
        assert!(on_disk(dir.path()) <= total);
        for owner in [&quiet, &None] {
            assert_eq!(everything(&files, owner).len(), 10, "{owner:?}");
        }
        let kept = everything(&files, &loud);
        assert!(kept.len() > 80, "{}", kept.len());
        assert_eq!(kept.last().map(String::as_str), Some(line(999).trim_end()));
        let found = Files::open(dir.path(), LEAST, total).expect("open again");
        assert_eq!((found.held, found.ends()), (files.held, files.ends()));
    }

    #[test]
    fn many_owners_have_their_files_in_turn() {
        let dir = tempfile::tempdir().expect("folder");
        let mut files = Files::open(dir.path(), 1000, 1 << 20).expect("open");
        for round in 0..3 {
            for n in 0..2 * OPEN {
                let owner = tenant(&format!("t{n}"));
                files.append(&owner, format!("{round}\n").as_bytes()).expect("append");
            }
        }
        for n in 0..2 * OPEN {
            assert_eq!(everything(&files, &tenant(&format!("t{n}"))), ["0", "1", "2"]);
        }
    }

    #[test]
    fn only_the_file_that_was_longest_not_written_to_is_closed_and_it_is_synced_later() {
        let dir = tempfile::tempdir().expect("folder");
        let mut files = Files::open(dir.path(), 1000, 1 << 20).expect("open");
        let owner = |n: usize| tenant(&format!("t{n}"));
        let open = |files: &Files| -> Vec<bool> {
            (0..=OPEN)
                .map(|n| files.shelves.get(&owner(n)).is_some_and(|s| s.current.is_some()))
                .collect()
        };
        for n in (0..OPEN).chain([0, OPEN, OPEN]) {
            files.append(&owner(n), b"line\n").expect("append");
        }
        let mut expected = vec![true; OPEN + 1];
        expected[1] = false;
        assert_eq!(open(&files), expected, "the second was written to first");
        let unsynced = |files: &Files| files.shelves.values().filter(|s| s.unsynced).count();
        assert_eq!(unsynced(&files), 1);
        files.sync().expect("sync");
        assert_eq!(unsynced(&files), 0);
    }

    #[test]
    fn a_torn_last_line_of_a_crash_does_not_spoil_the_next_one() {
        let dir = tempfile::tempdir().expect("folder");
        fs::write(path(dir.path(), &None, 7), "whole\nto").expect("write");
        let mut files = Files::open(dir.path(), 1000, 3000).expect("open");
        files.append(&None, b"next\n").expect("append");
        assert_eq!(everything(&files, &None), ["whole", "to", "next"]);
        assert_eq!(files.ends()[&None].file, 7);
    }

    #[test]
    fn a_file_that_somebody_removed_is_not_written_to_any_more() {
        let dir = tempfile::tempdir().expect("folder");
        let mut files = Files::open(dir.path(), 1000, 3000).expect("open");
        files.append(&None, b"one\n").expect("append");
        fs::remove_file(path(dir.path(), &None, 1)).expect("removed");
        files.append(&None, b"two\n").expect("append");
        assert_eq!(everything(&files, &None), ["two"]);
        fs::remove_dir_all(dir.path()).expect("removed");
        files.append(&None, b"three\n").expect_err("there is no folder");
    }

    #[test]
    fn a_disk_whose_clock_is_ahead_has_one_file_begun_at_a_start_and_no_more() {
        let dir = tempfile::tempdir().expect("folder");
        let ahead = SystemTime::now() + Duration::from_secs(3600);
        let mut written = Vec::new();
        for start in 1..=2 {
            let mut files = Files::open(dir.path(), 1000, 3000).expect("open");
            for n in 0..20 {
                written.push(format!("{start}-{n}"));
                let end = files.append(&None, format!("{start}-{n}\n").as_bytes()).expect("append");
                assert_eq!(end.file, start);
                let file = File::options().append(true).open(path(dir.path(), &None, end.file));
                file.and_then(|file| file.set_modified(ahead)).expect("as the disk has it");
            }
            assert_eq!(everything(&files, &None), written);
        }
    }

    #[test]
    fn a_clock_that_is_set_back_has_one_file_begun() {
        let dir = tempfile::tempdir().expect("folder");
        let mut files = Files::open(dir.path(), 1000, 3000).expect("open");
        files.append(&None, b"before\n").expect("append");
        let ahead = SystemTime::now() + Duration::from_secs(3600);
        files.shelves.get_mut(&None).expect("its files").written = ahead;
        for _ in 0..3 {
            assert_eq!(files.append(&None, b"after\n").expect("append").file, 2);
        }
    }

    #[test]
    fn readers_stop_at_the_position_they_were_given() {
        let dir = tempfile::tempdir().expect("folder");
        let mut files = Files::open(dir.path(), 1000, 3000).expect("open");
        let end = files.append(&None, b"one\n").expect("append");
        files.append(&None, b"two\n").expect("append");
        let read = lines(dir.path(), &None, end.file, end).expect("file");
        assert_eq!(read.collect::<Vec<_>>(), ["one"]);
    }
}
