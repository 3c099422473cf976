//! One file to an object and back: without its holes, compressed, summed, a piece at a time.
//!
//! Reading, packing and summing are done on a thread of their own; a channel of one piece is between it and
//! the store, so that neither runs ahead. Never has more than a few pieces in memory.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;
use object_store::path::Path as Object;
use object_store::{
    GetOptions, GetResult, GetResultPayload, MultipartUpload, ObjectStore, ObjectStoreExt,
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokio::sync::mpsc;

use crate::error::Error;
use crate::sparse;

/// Bytes of one piece: S3 takes none below 5 MiB but the last, and 10,000 of them.
const PIECE: usize = 8 << 20;
/// The quickest: what guests leave in memory is packed to a third by it.
const LEVEL: i32 = 1;
/// What unpacking may remember, as a power of two; packing at that level remembers half a MiB.
const WINDOW: u32 = 22;

/// A file as it is in the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Carried {
    /// Its length, in bytes.
    pub(crate) length: u64,
    /// The object's.
    pub(crate) bytes: u64,
    /// SHA-256 of the object, in hexadecimal digits.
    pub(crate) sha256: String,
    /// Bytes of it that are no hole, and a little more; none in a list of an earlier version.
    #[serde(default)]
    pub(crate) unpacked: Option<u64>,
}

impl Carried {
    /// Bytes that it needs on a disk, at most.
    pub(crate) fn needs(&self) -> u64 {
        self.unpacked.unwrap_or(self.length)
    }
}

/// Puts a file into the store. What was begun and failed, or is given up, leaves no object.
pub(crate) async fn put(
    store: &dyn ObjectStore,
    object: &Object,
    path: &Path,
) -> Result<Carried, Error> {
    let failed = |doing| store_error(doing, object);
    let (pieces, mut packed) = mpsc::channel(1);
    let from = path.to_owned();
    let packing = tokio::task::spawn_blocking(move || pack(&from, pieces));
    let mut upload = Begun(Some(store.put_multipart(object).await.map_err(failed("writing"))?));
    while let Some(piece) = packed.recv().await {
        let Some(begun) = upload.0.as_mut() else { break };
        begun.put_part(piece.into()).await.map_err(failed("writing"))?;
    }
    let carried = packing.await.unwrap_or_else(|lost| Err(io::Error::other(lost)));
    let carried = carried.map_err(|source| file("read", path, source))?;
    if let Some(mut begun) = upload.0.take() {
        let completed = begun.complete().await;
        if completed.is_err() {
            upload.0 = Some(begun);
        }
        completed.map_err(failed("writing"))?;
    }
    Ok(carried)
}

/// Gets a file that was put: it must not be there yet, and is whole and on the disk afterwards. After an
/// error there may be a part of it.
pub(crate) async fn get(
    store: &dyn ObjectStore,
    object: &Object,
    carried: &Carried,
    path: &Path,
) -> Result<(), Error> {
    let (pieces, packed) = mpsc::channel::<Bytes>(1);
    let (to, length) = (path.to_owned(), carried.length);
    let unpacking = tokio::task::spawn_blocking(move || unpack(&to, length, packed));
    let mut at = 0;
    while at < carried.bytes {
        // In ranges: a request that takes long is given up by clients on the way.
        let end = carried.bytes.min(at.saturating_add(PIECE as u64));
        let piece = take_range(store, object, at..end).await?;
        at = at.saturating_add(piece.len() as u64);
        if piece.is_empty() || pieces.send(piece).await.is_err() {
            break;
        }
    }
    drop(pieces);
    let unpacked = unpacking.await.unwrap_or_else(|lost| Err(Unpack::File(io::Error::other(lost))));
    let damaged = |problem: String| Error::Damaged { object: object.to_string(), problem };
    match unpacked {
        Ok(sha256) if sha256 == carried.sha256 => Ok(()),
        Ok(_) => Err(damaged("its sum is not the one it was written with".to_owned())),
        Err(Unpack::Stream(problem)) => Err(damaged(problem.to_string())),
        Err(Unpack::File(source)) => Err(file("write", path, source)),
    }
}

/// Reads a file that was put, and says whether it is that still.
pub(crate) async fn check(
    store: &dyn ObjectStore,
    object: &Object,
    carried: &Carried,
) -> Result<(), Error> {
    let (mut at, mut sum) = (0, Sha256::new());
    while at < carried.bytes {
        let end = carried.bytes.min(at.saturating_add(PIECE as u64));
        let piece = take_range(store, object, at..end).await?;
        if piece.is_empty() {
            break;
        }
        at = at.saturating_add(piece.len() as u64);
        // A moment for each piece, which is not kept.
        sum.update(&piece);
    }
    if hex(&sum.finalize()) == carried.sha256 {
        return Ok(());
    }
    let problem = "its sum is not the one it was written with".to_owned();
    Err(Error::Damaged { object: object.to_string(), problem })
}

/// These bytes of an object, or fewer.
async fn take_range(
    store: &dyn ObjectStore,
    object: &Object,
    range: Range<u64>,
) -> Result<Bytes, Error> {
    let options = GetOptions::new().with_range(Some(range.clone()));
    let found = store.get_opts(object, options).await.map_err(store_error("reading", object))?;
    take(found, object, range.end.saturating_sub(range.start)).await
}

/// What was found, which must be no more than so many bytes: what the store says of its length is no bound of
/// what it sends.
pub(crate) async fn take(found: GetResult, object: &Object, most: u64) -> Result<Bytes, Error> {
    let long = found.range.end.saturating_sub(found.range.start);
    if matches!(found.payload, GetResultPayload::File(..)) && long <= most {
        // No more is read, and in one go.
        return found.bytes().await.map_err(store_error("reading", object));
    }
    let mut stream = found.into_stream();
    let mut taken = BytesMut::new();
    while let Some(more) = stream.next().await {
        let more = more.map_err(store_error("reading", object))?;
        if taken.len().saturating_add(more.len()) as u64 > most {
            let problem =
                format!("the store sends more of it than {most} bytes that it was asked for");
            return Err(Error::Damaged { object: object.to_string(), problem });
        }
        taken.extend_from_slice(&more);
    }
    Ok(taken.freeze())
}

/// An upload that is given up when this is dropped.
struct Begun(Option<Box<dyn MultipartUpload>>);

impl Drop for Begun {
    fn drop(&mut self) {
        let Some(mut begun) = self.0.take() else { return };
        tokio::spawn(async move {
            if let Err(error) = begun.abort().await {
                tracing::debug!(%error, "upload not given up");
            }
        });
    }
}

fn pack(path: &Path, pieces: mpsc::Sender<Bytes>) -> io::Result<Carried> {
    let file = File::open(path)?;
    let mut packed = Packed { pieces, piece: BytesMut::new(), bytes: 0, sum: Sha256::new() };
    let mut counted = Counted { to: zstd::Encoder::new(&mut packed, LEVEL)?, bytes: 0 };
    let length = sparse::write(&file, &mut counted)?;
    let Counted { to: encoder, bytes } = counted;
    encoder.finish()?;
    packed.send()?;
    let (sha256, unpacked) = (hex(&packed.sum.finalize()), Some(bytes));
    Ok(Carried { length, bytes: packed.bytes, sha256, unpacked })
}

/// Counts what is written to it.
struct Counted<W> {
    to: W,
    bytes: u64,
}

impl<W: Write> Write for Counted<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.to.write(bytes)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// What the encoder writes to.
struct Packed {
    pieces: mpsc::Sender<Bytes>,
    piece: BytesMut,
    bytes: u64,
    sum: Sha256,
}

impl Packed {
    fn send(&mut self) -> io::Result<()> {
        let piece = self.piece.split().freeze();
        self.bytes += piece.len() as u64;
        self.sum.update(&piece);
        self.pieces.blocking_send(piece).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

impl Write for Packed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let (now, _) = bytes.split_at(bytes.len().min(PIECE - self.piece.len()));
        self.piece.extend_from_slice(now);
        if self.piece.len() == PIECE {
            self.send()?;
        }
        Ok(now.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Whose fault it is.
enum Unpack {
    Stream(io::Error),
    File(io::Error),
}

fn unpack(path: &Path, length: u64, packed: mpsc::Receiver<Bytes>) -> Result<String, Unpack> {
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).create_new(true).mode(0o600).open(path);
    let file = file.map_err(Unpack::File)?;
    let mut given = Given { packed, piece: Bytes::new(), sum: Sha256::new() };
    let decoder = zstd::Decoder::new(&mut given).and_then(|mut decoder| {
        decoder.window_log_max(WINDOW)?;
        Ok(decoder)
    });
    let unpacked = decoder.and_then(|mut decoder| sparse::read(&mut decoder, &file, length));
    match unpacked {
        Ok(()) => {}
        Err(error) if error.raw_os_error().is_some() => return Err(Unpack::File(error)),
        Err(error) => return Err(Unpack::Stream(error)),
    }
    // What is behind it counts for the sum, too.
    io::copy(&mut given, &mut io::sink()).map_err(Unpack::Stream)?;
    file.sync_all().map_err(Unpack::File)?;
    Ok(hex(&given.sum.finalize()))
}

/// What the decoder reads from.
struct Given {
    packed: mpsc::Receiver<Bytes>,
    piece: Bytes,
    sum: Sha256,
}

impl Read for Given {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.piece.is_empty() {
            let Some(piece) = self.packed.blocking_recv() else { return Ok(0) };
            self.sum.update(&piece);
            self.piece = piece;
        }
        let now = self.piece.split_to(self.piece.len().min(into.len()));
        into.get_mut(..now.len()).unwrap_or_default().copy_from_slice(&now);
        Ok(now.len())
    }
}

pub(crate) fn store_error(
    doing: &'static str,
    object: &Object,
) -> impl Fn(object_store::Error) -> Error {
    let object = object.to_string();
    move |source| Error::Store { doing, object: object.clone(), source: Box::new(source) }
}

fn file(act: &'static str, path: &Path, source: io::Error) -> Error {
    Error::File { act, path: PathBuf::from(path), source }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
