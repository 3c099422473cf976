//! The audit's files: `audit-<number>.jsonl`, numbers rising, bounded each and together.
//!
//! Only whole lines are ever left behind: a write that fails half-way is cut off again, and a torn
//! line of a crash is closed by a line feed and skipped by readers.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// A place in the audit: the file's number and the bytes before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
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
    current: File,
    at: Position,
}

impl Files {
    /// Goes on in the newest file of the folder, which exists.
    pub(crate) fn open(dir: &Path, file_size: u64, total_size: u64) -> io::Result<Self> {
        let number = numbers(dir)?.last().copied().unwrap_or(1);
        let mut current = open_file(dir, number)?;
        let mut offset = current.seek(SeekFrom::End(0))?;
        if offset > 0 {
            let mut last = [0];
            current.seek(SeekFrom::End(-1))?;
            current.read_exact(&mut last)?;
            if last != *b"\n" {
                current.write_all(b"\n")?;
                offset += 1;
            }
        }
        let at = Position { file: number, offset };
        Ok(Self { dir: dir.to_owned(), file_size, total_size, current, at })
    }

    /// Where the next line goes.
    #[must_use]
    pub(crate) fn position(&self) -> Position {
        self.at
    }

    /// Appends whole lines, first going on to the next file when this one is full. On failure
    /// nothing was appended.
    pub(crate) fn append(&mut self, lines: &[u8]) -> io::Result<()> {
        let length = u64::try_from(lines.len()).unwrap_or(u64::MAX);
        let full = self.at.offset > 0 && self.at.offset.saturating_add(length) > self.file_size;
        // Somebody may have removed the file: what is written to it would be lost unseen.
        if full || self.current.metadata()?.nlink() == 0 {
            self.rotate()?;
        }
        if let Err(error) = self.current.write_all(lines) {
            // Best effort: should this fail too, the next line still begins after a torn one.
            let _ = self.current.set_len(self.at.offset);
            return Err(error);
        }
        self.at.offset += length;
        Ok(())
    }

    /// Waits until what was appended is on the disk.
    pub(crate) fn sync(&self) -> io::Result<()> {
        self.current.sync_data()
    }

    fn rotate(&mut self) -> io::Result<()> {
        let next = self.at.file + 1;
        let file = open_file(&self.dir, next)?;
        self.current.sync_data()?;
        self.current = file;
        self.at = Position { file: next, offset: 0 };
        self.trim()
    }

    /// Removes the oldest files until what is left and one more full file fit the total.
    fn trim(&self) -> io::Result<()> {
        let size = |number: &u64| fs::metadata(path(&self.dir, *number)).map_or(0, |m| m.len());
        let closed: Vec<u64> =
            numbers(&self.dir)?.into_iter().filter(|number| *number < self.at.file).collect();
        let mut sum = self.file_size + closed.iter().map(size).sum::<u64>();
        for number in &closed {
            if sum <= self.total_size {
                break;
            }
            sum = sum.saturating_sub(size(number));
            fs::remove_file(path(&self.dir, *number))?;
        }
        Ok(())
    }
}

/// The numbers of the files of a folder, rising.
pub(crate) fn numbers(dir: &Path) -> io::Result<Vec<u64>> {
    let number = |entry: io::Result<fs::DirEntry>| {
        let name = entry.ok()?.file_name();
        name.to_str()?.strip_prefix("audit-")?.strip_suffix(".jsonl")?.parse().ok()
    };
    let mut found: Vec<u64> = fs::read_dir(dir)?.filter_map(number).collect();
    found.sort_unstable();
    Ok(found)
}

/// The path of a file.
#[must_use]
pub(crate) fn path(dir: &Path, number: u64) -> PathBuf {
    dir.join(format!("audit-{number:06}.jsonl"))
}

/// The whole lines of one file up to `end`. A file that is gone has none.
pub(crate) fn lines(
    dir: &Path,
    number: u64,
    end: Position,
) -> io::Result<impl Iterator<Item = String>> {
    let limit = if number == end.file { end.offset } else { u64::MAX };
    let file: Box<dyn Read> = match File::open(path(dir, number)) {
        Ok(file) => Box::new(file.take(limit)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Box::new(io::empty()),
        Err(error) => return Err(error),
    };
    let lines = BufReader::with_capacity(1 << 16, file).split(b'\n').map_while(Result::ok);
    Ok(lines.map(|line| String::from_utf8_lossy(&line).into_owned()))
}

fn open_file(dir: &Path, number: u64) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).append(true).create(true).mode(0o640).open(path(dir, number))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn everything(dir: &Path, end: Position) -> Vec<String> {
        let all = numbers(dir).expect("folder").into_iter();
        all.flat_map(|number| lines(dir, number, end).expect("file")).collect()
    }

    #[test]
    fn files_are_bounded_each_and_together_and_the_newest_stay() {
        let dir = tempfile::tempdir().expect("folder");
        let mut files = Files::open(dir.path(), 100, 300).expect("open");
        for n in 0..200 {
            files.append(format!("line {n:04}\n").as_bytes()).expect("append");
        }
        let sizes = |number| fs::metadata(path(dir.path(), number)).expect("file").len();
        let all = numbers(dir.path()).expect("folder");
        assert!(all.iter().all(|number| sizes(*number) <= 100));
        assert!(all.iter().map(|number| sizes(*number)).sum::<u64>() <= 300);
        let left = everything(dir.path(), files.position());
        let expected: Vec<String> =
            (200 - left.len()..200).map(|n| format!("line {n:04}")).collect();
        assert_eq!(left, expected, "no gap and no loss at the new end");
        assert!(left.len() >= 20);
    }

    #[test]
    fn a_torn_last_line_of_a_crash_does_not_spoil_the_next_one() {
        let dir = tempfile::tempdir().expect("folder");
        fs::write(path(dir.path(), 7), "whole\nto").expect("write");
        let mut files = Files::open(dir.path(), 1000, 3000).expect("open");
        files.append(b"next\n").expect("append");
        assert_eq!(everything(dir.path(), files.position()), ["whole", "to", "next"]);
        assert_eq!(files.position().file, 7);
    }

    #[test]
    fn a_file_that_somebody_removed_is_not_written_to_any_more() {
        let dir = tempfile::tempdir().expect("folder");
        let mut files = Files::open(dir.path(), 1000, 3000).expect("open");
        files.append(b"one\n").expect("append");
        fs::remove_file(path(dir.path(), 1)).expect("removed");
        files.append(b"two\n").expect("append");
        assert_eq!(everything(dir.path(), files.position()), ["two"]);
        fs::remove_dir_all(dir.path()).expect("removed");
        files.append(b"three\n").expect_err("there is no folder");
    }

    #[test]
    fn readers_stop_at_the_position_they_were_given() {
        let dir = tempfile::tempdir().expect("folder");
        let mut files = Files::open(dir.path(), 1000, 3000).expect("open");
        files.append(b"one\n").expect("append");
        let end = files.position();
        files.append(b"two\n").expect("append");
        assert_eq!(everything(dir.path(), end), ["one"]);
    }
}
