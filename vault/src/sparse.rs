//! A file with holes as a stream of what is not one: pieces with their places, and at the end the length.
//!
//! Pure but for the file. A stream that is none of these, or that would write beyond the length that was
//! promised, is refused; what it wrote until then is the caller's to throw away.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;

use nix::errno::Errno;
use nix::unistd::{Whence, lseek};

/// Bytes of one piece: what is all zeros in these is left out, too.
const PIECE: usize = 64 << 10;

/// Writes what the file holds: each piece with its offset (8 bytes) and length (4), big endian; a piece of
/// no length at the end of the file ends it.
pub(crate) fn write(file: &File, to: &mut impl Write) -> io::Result<u64> {
    let length = file.metadata()?.len();
    let mut piece = vec![0; PIECE];
    let mut at = 0;
    while let Some(begin) = seek(file, at, Whence::SeekData)?.filter(|begin| *begin < length) {
        let end = seek(file, begin, Whence::SeekHole)?.unwrap_or(length).min(length);
        at = begin;
        while at < end {
            let size = usize::try_from(end - at).unwrap_or(PIECE).min(PIECE);
            let bytes = piece.get_mut(..size).unwrap_or_default();
            file.read_exact_at(bytes, at)?;
            if bytes.iter().any(|byte| *byte != 0) {
                head(to, at, size)?;
                to.write_all(bytes)?;
            }
            at += size as u64;
        }
    }
    head(to, length, 0)?;
    Ok(length)
}

/// Reads such a stream into an empty file, which has this length then.
pub(crate) fn read(from: &mut impl Read, file: &File, length: u64) -> io::Result<()> {
    let wrong = |what| Err(io::Error::new(io::ErrorKind::InvalidData, what));
    file.set_len(length)?;
    let mut piece = vec![0; PIECE];
    let mut last = 0;
    loop {
        let (mut at, mut size) = ([0; 8], [0; 4]);
        from.read_exact(&mut at)?;
        from.read_exact(&mut size)?;
        let (at, size) = (u64::from_be_bytes(at), u32::from_be_bytes(size));
        if size == 0 {
            return match at == length && from.read(&mut [0; 1])? == 0 {
                true => Ok(()),
                false => wrong("it ends where it should not"),
            };
        }
        let end = at.checked_add(u64::from(size)).filter(|end| *end <= length && at >= last);
        let (Some(end), Some(bytes)) = (end, piece.get_mut(..size as usize)) else {
            return wrong("a piece of it is out of place");
        };
        from.read_exact(bytes)?;
        file.write_all_at(bytes, at)?;
        last = end;
    }
}

fn head(to: &mut impl Write, at: u64, size: usize) -> io::Result<()> {
    to.write_all(&at.to_be_bytes())?;
    to.write_all(&u32::try_from(size).map_err(io::Error::other)?.to_be_bytes())
}

/// Where the next data or hole is; none behind the last.
fn seek(file: &File, from: u64, whence: Whence) -> io::Result<Option<u64>> {
    let from = i64::try_from(from).map_err(io::Error::other)?;
    match lseek(file, from, whence) {
        Ok(at) => u64::try_from(at).map(Some).map_err(io::Error::other),
        Err(Errno::ENXIO) => Ok(None),
        Err(other) => Err(other.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    fn file() -> File {
        tempfile::tempfile().expect("a file")
    }

    fn there_and_back(content: &[(u64, &[u8])], length: u64) -> (u64, File, usize) {
        let from = file();
        from.set_len(length).expect("as long");
        for (at, bytes) in content {
            from.write_all_at(bytes, *at).expect("written");
        }
        let mut stream = Vec::new();
        assert_eq!(write(&from, &mut stream).expect("read"), length);
        let to = file();
        read(&mut stream.as_slice(), &to, length).expect("written");
        let all = |file: &File| {
            let mut bytes = vec![0; usize::try_from(length).expect("small")];
            file.read_exact_at(&mut bytes, 0).expect("read");
            bytes
        };
        assert!(all(&from) == all(&to), "the same bytes");
        (to.metadata().expect("there").blocks() * 512, to, stream.len())
    }

    #[test]
    fn a_file_comes_back_as_it_was_and_its_holes_cost_nothing() {
        let (held, _, stream) = there_and_back(&[(5, b"a"), (40 << 20, &[7; 200_000])], 64 << 20);
        assert!(stream < 400_000 && held < 1 << 20, "{stream}, {held}");
        for length in [0, 1, PIECE as u64, PIECE as u64 + 1] {
            there_and_back(&[], length);
            there_and_back(&[(length.saturating_sub(1), b"z")], length.max(1));
        }
        // What was written and is zeros again is none of the stream.
        let (_, _, stream) = there_and_back(&[(0, &[0; 300_000])], 1 << 20);
        assert!(stream < 100, "{stream}");
    }

    #[test]
    fn a_stream_that_is_none_is_refused_and_writes_nothing_beyond_the_length() {
        let stream = |parts: &[(u64, u32, usize)]| {
            let mut bytes = Vec::new();
            for (at, size, given) in parts {
                bytes.extend(at.to_be_bytes());
                bytes.extend(size.to_be_bytes());
                bytes.extend(vec![1; *given]);
            }
            bytes
        };
        for parts in [
            &[(0, 10, 10)][..],
            &[(0, 10, 4)],
            &[(95, 10, 10), (100, 0, 0)],
            &[(u64::MAX, 10, 10), (100, 0, 0)],
            &[(50, 10, 10), (40, 10, 10), (100, 0, 0)],
            &[(0, (64 << 10) + 1, PIECE + 1), (100, 0, 0)],
            &[(99, 0, 0)],
            &[(100, 0, 1)],
        ] {
            let to = file();
            assert!(read(&mut stream(parts).as_slice(), &to, 100).is_err(), "{parts:?}");
            assert_eq!(to.metadata().expect("there").len(), 100);
        }
        let good = [(0, 10, 10), (50, 50, 50), (100, 0, 0)];
        read(&mut stream(&good).as_slice(), &file(), 100).expect("control");
    }
}
