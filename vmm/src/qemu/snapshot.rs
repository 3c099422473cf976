//! The file of a saved machine's state: what it must meet to be resumed, then what QEMU wrote.
//!
//! Written under a temporary name and renamed when it is whole. A file that is torn, of another version
//! or of another machine is refused and says why. The sums find damage, not an attacker: what stands
//! here was written by a process of the guest's and is read by one, in the same jail.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::error::Error;
use crate::qemu::{file, remove_file};

const MAGIC: &[u8; 14] = b"postern state\n";
/// Of the layout below; moves with any change to it.
const VERSION: u16 = 1;
/// Bytes before what QEMU wrote: magic, version and length of the JSON (2 bytes each, big endian), the
/// JSON, zeros, and the SHA-256 of all that.
const HEAD: usize = 8192;
const SUM: usize = 32;
/// The most that a machine's devices may have to say; QEMU says less than one.
const MOST: u64 = 64 << 20;

/// What a machine must meet to go on from such a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Meets {
    /// The machine as QEMU was told it, and the disk below the guest's own.
    pub(super) machine: Vec<String>,
    /// QEMU's version: major, minor, micro.
    pub(super) qemu: [u64; 3],
    /// The boot of the host. What a crash of the host left of memory is nobody's guess.
    pub(super) boot_id: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct Head {
    meets: Meets,
    bytes: u64,
    digest: String,
}

/// A file that is whole, open where QEMU's part of it begins.
#[derive(Debug)]
pub(super) struct Whole {
    pub(super) file: File,
    pub(super) meets: Meets,
    pub(super) bytes: u64,
    pub(super) digest: String,
}

/// Where it is written.
fn unfinished(path: &Path) -> PathBuf {
    path.with_extension("new")
}

/// Begins one: a file open where QEMU's part of it begins, which it writes by itself.
pub(super) fn begin(path: &Path) -> Result<File, Error> {
    let at = &unfinished(path);
    let begin = || {
        let mut state =
            OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(at)?;
        state.seek(SeekFrom::Start(HEAD as u64))?;
        Ok(state)
    };
    begin().map_err(|source| file("make", at, source))
}

/// Ends one that QEMU has written: sums, head, disk, name. Gives its length and digest.
pub(super) fn end(path: &Path, meets: &Meets) -> Result<(u64, String), Error> {
    let at = &unfinished(path);
    let end = || {
        let state = OpenOptions::new().read(true).write(true).open(at)?;
        let (bytes, digest) = sum(&state)?;
        let head = Head { meets: meets.clone(), bytes, digest: digest.clone() };
        state.write_all_at(&encode(&head)?, 0)?;
        state.sync_all()?;
        fault::at(fault::Point::QemuStateWritten);
        fs::rename(at, path)?;
        if let Some(dir) = path.parent() {
            File::open(dir)?.sync_all()?;
        }
        Ok((bytes + HEAD as u64, digest))
    };
    end().map_err(|source| file("write", at, source))
}

/// Gives a whole one that was elsewhere this name and this boot of the host. It may be that of another machine:
/// it is of the one that is `called` so from here on, and like it in all else or of no use. Gives its length and
/// digest.
pub(super) fn adopt(
    path: &Path,
    from: &Path,
    boot_id: &str,
    called: &str,
) -> Result<(u64, String), Error> {
    let Some(Whole { meets, bytes, digest, .. }) = open(from)? else {
        let problem = "is not there".to_owned();
        return Err(Error::Unusable { path: from.to_owned(), problem });
    };
    let name = || {
        let mut meets = Meets { boot_id: boot_id.to_owned(), ..meets };
        let names = |word: &&mut String| word.starts_with("-name ");
        meets.machine.iter_mut().filter(names).for_each(|word| called.clone_into(word));
        let head = Head { meets, bytes: bytes - HEAD as u64, digest: digest.clone() };
        let state = OpenOptions::new().write(true).open(from)?;
        state.write_all_at(&encode(&head)?, 0)?;
        state.sync_all()?;
        fs::rename(from, path)?;
        if let Some(dir) = path.parent() {
            File::open(dir)?.sync_all()?;
        }
        Ok((bytes, digest))
    };
    name().map_err(|source| file("take back", from, source))
}

/// Removes what a save that did not end has left.
pub(super) fn abandon(path: &Path) {
    remove_file(&unfinished(path));
}

/// Removes it: what it describes is about to go on, or nobody wants it.
pub(super) fn consume(path: &Path) -> Result<(), Error> {
    abandon(path);
    match fs::remove_file(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(file("consume", path, source))
        }
        _ => Ok(()),
    }
}

/// Reads one and says what is wrong with it; none where there is no such file.
pub(super) fn open(path: &Path) -> Result<Option<Whole>, Error> {
    let mut state = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(|source| file("open", path, source))?,
    };
    let mut head = vec![0; HEAD];
    let unusable = |problem: String| Error::Unusable { path: path.to_owned(), problem };
    let read = state.read_exact(&mut head).and_then(|()| sum(&state));
    let (bytes, digest) = match read {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            return Err(unusable("is cut short".to_owned()));
        }
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            return Err(unusable(format!("is damaged: its {error}")));
        }
        read => read.map_err(|source| file("read", path, source))?,
    };
    let head = decode(&head).map_err(unusable)?;
    if head.bytes != bytes || head.digest != digest {
        return Err(unusable("is damaged: its sum is not the one it was written with".to_owned()));
    }
    let place = state.seek(SeekFrom::Start(HEAD as u64));
    place.map_err(|source| file("read", path, source))?;
    Ok(Some(Whole { file: state, meets: head.meets, bytes: bytes + HEAD as u64, digest }))
}

impl Meets {
    /// What keeps a machine that was saved as this from going on as `now`, if anything does.
    pub(super) fn differs(&self, now: &Self) -> Option<String> {
        if self.boot_id != now.boot_id {
            let why = "was saved before the host was started anew, which may not have kept the \
                       guest's memory whole";
            return Some(why.to_owned());
        }
        let ([major, minor, micro], [now_major, now_minor, now_micro]) = (self.qemu, now.qemu);
        if (major, minor) != (now_major, now_minor) {
            return Some(format!(
                "was saved by QEMU {major}.{minor}.{micro}, and this is {now_major}.{now_minor}.{now_micro}"
            ));
        }
        let longer = self.machine.len().max(now.machine.len());
        let word = |machine: &[String], n: usize| machine.get(n).cloned().unwrap_or_default();
        let mut words = (0..longer).map(|n| (word(&self.machine, n), word(&now.machine, n)));
        let (was, is) = words.find(|(was, is)| was != is)?;
        Some(format!("was saved of another machine: `{was}` there, `{is}` here"))
    }
}

/// Length and SHA-256 of QEMU's part.
fn sum(mut state: &File) -> io::Result<(u64, String)> {
    let bytes = state.metadata()?.len().checked_sub(HEAD as u64);
    let bytes = bytes.ok_or(io::ErrorKind::UnexpectedEof)?;
    if bytes > MOST {
        let problem = format!("{bytes} bytes are more than devices can have");
        return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
    }
    state.seek(SeekFrom::Start(HEAD as u64))?;
    let (mut sum, mut portion, mut seen) = (Sha256::new(), vec![0; 64 << 10], 0);
    let mut rest = state.take(bytes);
    loop {
        match rest.read(&mut portion)? {
            0 if seen == bytes => return Ok((bytes, hex(&sum.finalize()))),
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            length => {
                sum.update(portion.get(..length).unwrap_or_default());
                seen += length as u64;
            }
        }
    }
}

fn encode(head: &Head) -> io::Result<Vec<u8>> {
    let json = serde_json::to_vec(head)?;
    let length = u16::try_from(json.len()).map_err(io::Error::other)?;
    let mut bytes = MAGIC.to_vec();
    bytes.extend(VERSION.to_be_bytes());
    bytes.extend(length.to_be_bytes());
    bytes.write_all(&json)?;
    if bytes.len() > HEAD - SUM {
        return Err(io::Error::other("the description of the machine is too long"));
    }
    bytes.resize(HEAD - SUM, 0);
    let sum = Sha256::digest(&bytes);
    bytes.extend(sum);
    Ok(bytes)
}

fn decode(bytes: &[u8]) -> Result<Head, String> {
    let foreign = || "is not the state of a saved machine".to_owned();
    let rest = bytes.strip_prefix(MAGIC).ok_or_else(foreign)?;
    let Some((version, rest)) = rest.split_first_chunk::<2>() else { return Err(foreign()) };
    let version = u16::from_be_bytes(*version);
    if version != VERSION {
        return Err(format!("is of version {version}, and this program reads {VERSION}"));
    }
    let (said, sum) = bytes.split_at_checked(HEAD - SUM).ok_or_else(foreign)?;
    if Sha256::digest(said).as_slice() != sum {
        return Err("is damaged: the sum of its head is not the one it was written with".to_owned());
    }
    let json = rest
        .split_first_chunk::<2>()
        .and_then(|(length, json)| json.get(..usize::from(u16::from_be_bytes(*length))));
    serde_json::from_slice(json.ok_or_else(foreign)?)
        .map_err(|error| format!("has a head that is none: {error}"))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meets() -> Meets {
        let machine = ["-m 256M", "-name postern-a"].map(str::to_owned).to_vec();
        Meets { machine, qemu: [7, 2, 22], boot_id: "this".to_owned() }
    }

    fn written(dir: &Path) -> PathBuf {
        let path = dir.join("state");
        begin(&path).expect("begun").write_all(&[7; 100_000]).expect("written");
        let (bytes, _) = end(&path, &meets()).expect("ended");
        assert_eq!(bytes, fs::metadata(&path).expect("there").len());
        path
    }

    fn problem(path: &Path) -> String {
        match open(path) {
            Err(Error::Unusable { problem, .. }) => problem,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_was_written_is_read_and_nothing_is_left_beside_it() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = written(dir.path());
        let mut whole = open(&path).expect("whole").expect("there");
        assert_eq!(whole.meets, meets());
        let mut rest = Vec::new();
        whole.file.read_to_end(&mut rest).expect("read");
        assert_eq!(rest, [7; 100_000], "open where QEMU's part begins");
        assert_eq!(fs::read_dir(dir.path()).expect("listed").count(), 1);
        consume(&path).expect("consumed");
        consume(&path).expect("twice is no error");
        assert!(open(&path).expect("no file is no error").is_none());
    }

    #[test]
    fn a_file_that_was_cut_or_changed_anywhere_is_refused() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = written(dir.path());
        let bytes = fs::read(&path).expect("read");
        for length in [0, 10, HEAD - 1, HEAD, HEAD + 1, bytes.len() - 1] {
            fs::write(&path, &bytes[..length]).expect("written");
            let problem = problem(&path);
            assert!(problem.contains("cut short") || problem.contains("damaged"), "{problem}");
        }
        for at in [0, 14, 15, 17, 40, HEAD - 40, HEAD - 1, HEAD, bytes.len() - 1] {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            fs::write(&path, damaged).expect("written");
            problem(&path);
        }
        fs::write(&path, [&bytes[..], b"x"].concat()).expect("written");
        assert!(problem(&path).contains("damaged"));
        fs::write(&path, &bytes).expect("written");
        assert!(open(&path).is_ok(), "control: it was good");
    }

    #[test]
    fn a_state_that_was_elsewhere_is_one_of_this_boot_when_it_is_back_and_a_damaged_one_is_none() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = written(dir.path());
        let away = dir.path().join("away");
        fs::rename(&path, &away).expect("moved");
        let (bytes, digest) = adopt(&path, &away, "another", "-name postern-b").expect("back");
        let whole = open(&path).expect("whole").expect("there");
        assert_eq!((whole.bytes, whole.digest, &*whole.meets.boot_id), (bytes, digest, "another"));
        // Of another name, and in all else what it was.
        assert_eq!(whole.meets.machine, ["-m 256M", "-name postern-b"]);
        assert!(!away.exists());
        fs::rename(&path, &away).expect("moved");
        let mut damaged = fs::read(&away).expect("read");
        *damaged.last_mut().expect("not empty") ^= 1;
        fs::write(&away, damaged).expect("written");
        assert!(adopt(&path, &away, "third", "-name postern-b").is_err() && !path.exists());
    }

    #[test]
    fn a_file_of_another_version_says_which() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = written(dir.path());
        let mut bytes = fs::read(&path).expect("read");
        bytes[MAGIC.len() + 1] = 2;
        fs::write(&path, bytes).expect("written");
        assert_eq!(problem(&path), "is of version 2, and this program reads 1");
    }

    #[test]
    fn another_machine_hypervisor_or_boot_is_told_by_what_differs() {
        let was = meets();
        assert_eq!(was.differs(&meets()), None);
        let newer = Meets { qemu: [7, 2, 23], ..meets() };
        assert_eq!(was.differs(&newer), None, "a fix of the same version reads it");
        let other = Meets { qemu: [8, 0, 0], ..meets() };
        assert!(
            was.differs(&other).is_some_and(|why| why.contains("7.2.22") && why.contains("8.0.0"))
        );
        let mut bigger = meets();
        bigger.machine[0] = "-m 512M".to_owned();
        assert!(
            was.differs(&bigger).is_some_and(|why| why.contains("`-m 256M` there, `-m 512M` here"))
        );
        let fewer = Meets { machine: Vec::new(), ..meets() };
        assert!(was.differs(&fewer).is_some() && fewer.differs(&was).is_some());
        let rebooted = Meets { boot_id: "another".to_owned(), ..meets() };
        assert!(was.differs(&rebooted).is_some_and(|why| why.contains("started anew")));
    }
}
