//! The audit's one writer: takes records from the trail, joins equal refusals, keeps them as JSON
//! lines on a bounded piece of disk, and shows them to those who ask or follow.
//!
//! Never holds traffic up: a full disk or a slow follower loses records, and the loss is counted
//! and itself recorded, as a gap.

pub mod filter;
mod past;
mod gap;
mod coalesce;
mod files;

use std::collections::{BTreeMap, VecDeque};
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::{fs, io, thread};

use policy::{AuditRecord, Trail};
use tokio::sync::{Semaphore, broadcast};

use crate::auditlog::coalesce::Coalescer;
use crate::auditlog::files::{Files, Owner, Position};
use crate::auditlog::filter::Filter;
use crate::auditlog::gap::{Gap, lost};
use crate::config::Audit;
use crate::error::Error;

/// Refusals are equal only within this time.
const WINDOW: Duration = Duration::from_secs(1);
/// Different refusals held at once.
const HELD: usize = 4096;
/// Records taken from the queue together.
const BATCH: usize = 1024;
/// Bytes after which a write is made: far below the size of a file.
const GROUP: usize = 16 << 10;
/// Lines a follower may be behind.
const BEHIND: usize = 4096;
/// How often an idle writer looks whether it should stop, and syncs.
const TICK: Duration = Duration::from_millis(100);
/// How often a disk that was full is tried again.
const AGAIN: Duration = Duration::from_secs(1);
/// Questions about the past answered at once; each reads files.
const QUERIES: usize = 4;

/// The audit as others see it. Clones share one.
#[derive(Clone, Debug)]
pub struct AuditLog(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    dir: PathBuf,
    written: Mutex<Written>,
    lines: broadcast::Sender<Line>,
    dropped: AtomicU64,
    closing: AtomicBool,
    writer: Mutex<Option<JoinHandle<()>>>,
    queries: Arc<Semaphore>,
}

/// How much is on disk.
#[derive(Clone, Debug, Default)]
struct Written {
    /// Groups of lines since the start.
    groups: u64,
    ends: BTreeMap<Owner, Position>,
}

/// One record with its JSON, as followers get it.
#[derive(Clone, Debug)]
struct Line {
    /// The group with which it was written; none if it could not be.
    group: Option<u64>,
    record: Arc<AuditRecord>,
    json: Arc<str>,
}

/// Records as they are written, those before `Follow` was asked for first.
#[derive(Debug)]
pub struct Follow {
    filter: Filter,
    past: VecDeque<String>,
    /// The groups that are in the past.
    seen: u64,
    lines: broadcast::Receiver<Line>,
}

impl AuditLog {
    /// Opens the folder, making it if missing, and starts the writer.
    pub fn open(
        config: &Audit,
        trail: Trail,
        records: Receiver<AuditRecord>,
    ) -> Result<Self, Error> {
        let prepare = |doing, source| Error::Prepare { doing, path: config.dir.clone(), source };
        // Who reached what is not for everybody on the host.
        let made = fs::DirBuilder::new().recursive(true).mode(0o750).create(&config.dir);
        made.map_err(|e| prepare("making the audit folder", e))?;
        let files = Files::open(&config.dir, config.file_size.0, config.total_size.0)
            .map_err(|e| prepare("opening the audit in", e))?;
        let shared = Arc::new(Shared {
            dir: config.dir.clone(),
            written: Mutex::new(Written { groups: 0, ends: files.ends() }),
            lines: broadcast::channel(BEHIND).0,
            dropped: AtomicU64::new(0),
            closing: AtomicBool::new(false),
            writer: Mutex::new(None),
            queries: Arc::new(Semaphore::new(QUERIES)),
        });
        let writer = Writer {
            shared: Arc::clone(&shared),
            files,
            coalescer: Coalescer::new(WINDOW, HELD),
            trail,
            gaps: BTreeMap::new(),
            last_tried: Instant::now(),
        };
        let thread = thread::Builder::new()
            .name("audit".into())
            .spawn(move || writer.run(&records))
            .map_err(|e| prepare("starting the writer of", e))?;
        *shared.writer.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        Ok(Self(shared))
    }

    /// Records that were lost since the start: by a full queue, or because the disk was full.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.0.dropped.load(Ordering::Relaxed)
    }

    /// The newest `limit` records that pass, oldest first, as JSON lines.
    pub async fn query(&self, filter: Filter, limit: usize) -> io::Result<VecDeque<String>> {
        self.past(self.written(), filter, limit).await
    }

    /// The newest `limit` records that pass, then every one that is written from now on, without
    /// a gap or a repeat between.
    pub async fn follow(&self, filter: Filter, limit: usize) -> io::Result<Follow> {
        let lines = self.0.lines.subscribe();
        let seen = self.written();
        let groups = seen.groups;
        let past = self.past(seen, filter.clone(), limit).await?;
        Ok(Follow { filter, past, seen: groups, lines })
    }

    async fn past(
        &self,
        written: Written,
        filter: Filter,
        limit: usize,
    ) -> io::Result<VecDeque<String>> {
        let turn = Arc::clone(&self.0.queries).acquire_owned().await.map_err(io::Error::other)?;
        let dir = self.0.dir.clone();
        let read = move || {
            // Reading goes on when whoever asked has left, so the turn is the reader's.
            let _turn = turn;
            past::newest(&dir, &written.ends, &filter, limit)
        };
        tokio::task::spawn_blocking(read).await.map_err(io::Error::other)?
    }

    /// Writes what has been recorded so far, and ends the writer. Blocks until that is done.
    pub fn close(&self) {
        self.0.closing.store(true, Ordering::Release);
        let writer = self.0.writer.lock().unwrap_or_else(PoisonError::into_inner).take();
        if writer.is_some_and(|writer| writer.join().is_err()) {
            tracing::error!("the audit writer panicked");
        }
    }

    fn written(&self) -> Written {
        self.0.written.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Follow {
    /// The next line; none when the daemon stops. A follower that was too slow is told how many
    /// lines it missed by a record of its own.
    pub async fn next(&mut self) -> Option<Arc<str>> {
        if let Some(line) = self.past.pop_front() {
            return Some(line.into());
        }
        loop {
            match self.lines.recv().await {
                Ok(line) => {
                    let told = line.group.is_some_and(|group| group <= self.seen);
                    if !told && self.filter.passes(&line.record) {
                        return Some(line.json);
                    }
                }
                Err(broadcast::error::RecvError::Lagged(missed)) => {
                    let record = lost(missed, "this follower was too slow");
                    return serde_json::to_string(&record).ok().map(Into::into);
                }
                Err(broadcast::error::RecvError::Closed) => return None,
            }
        }
    }
}

struct Writer {
    shared: Arc<Shared>,
    files: Files,
    coalescer: Coalescer,
    trail: Trail,
    /// What could not be written, by whose it was.
    gaps: BTreeMap<Owner, Gap>,
    last_tried: Instant,
}

impl Writer {
    fn run(mut self, records: &Receiver<AuditRecord>) {
        let mut synced = true;
        loop {
            let closing = self.shared.closing.load(Ordering::Acquire);
            let mut batch = Vec::new();
            let first =
                if closing { records.try_recv().ok() } else { records.recv_timeout(TICK).ok() };
            let now = Instant::now();
            let idle = first.is_none();
            for record in first.into_iter().chain(records.try_iter()).take(BATCH) {
                self.coalescer.push(record, now, &mut batch);
            }
            self.coalescer.end(now, &mut batch);
            if closing && idle {
                self.coalescer.end_all(&mut batch);
            }
            self.note_losses(&mut batch);
            synced &= batch.is_empty() && self.gaps.is_empty();
            self.write(batch);
            if self.last_tried.elapsed() >= AGAIN {
                self.tell_gaps();
            }
            if idle && !synced {
                synced = self.files.sync().is_ok();
            }
            if closing && idle {
                self.tell_gaps();
                return;
            }
        }
    }

    fn note_losses(&mut self, batch: &mut Vec<AuditRecord>) {
        let lost = self.trail.take_lost();
        if lost > 0 {
            tracing::error!(lost, "the audit queue was full");
            self.shared.dropped.fetch_add(lost, Ordering::Relaxed);
            batch.push(gap::lost(lost, "the audit queue was full"));
        }
    }

    /// Writes a batch in groups of one owner each, each whole or not at all, and shows all to followers
    /// either way.
    fn write(&mut self, batch: Vec<AuditRecord>) {
        let mut groups: BTreeMap<Owner, Group> = BTreeMap::new();
        for record in batch {
            let owner = record.tenant.clone();
            let group = groups.entry(owner.clone()).or_default();
            let json = serde_json::to_string(&record).unwrap_or_default();
            group.text.push_str(&json);
            group.text.push('\n');
            group.records.push((record, json));
            if group.text.len() >= GROUP {
                let group = std::mem::take(group);
                self.append(&owner, group);
            }
        }
        for (owner, group) in groups {
            self.append(&owner, group);
        }
    }

    fn append(&mut self, owner: &Owner, group: Group) {
        if group.records.is_empty() {
            return;
        }
        let written = self.put(owner, &group.text);
        if written.is_none() {
            let count = u64::try_from(group.records.len()).unwrap_or(u64::MAX);
            self.shared.dropped.fetch_add(count, Ordering::Relaxed);
            let gap = self.gaps.entry(owner.clone()).or_insert_with(Gap::begin);
            group.records.iter().for_each(|(record, _)| gap.add(record));
        }
        for (record, json) in group.records {
            let line = Line { group: written, record: Arc::new(record), json: json.into() };
            // Fails only when nobody follows.
            let _ = self.shared.lines.send(line);
        }
    }

    /// Says on disk what is missing there, as soon as that can be said; followers saw it all.
    fn tell_gaps(&mut self) {
        self.last_tried = Instant::now();
        let owners: Vec<Owner> = self.gaps.keys().cloned().collect();
        for owner in owners {
            if self.put(&owner, "").is_none() {
                return;
            }
        }
    }

    /// Puts text behind what is missing before it; the number of the group, none if nothing of it
    /// could be written.
    fn put(&mut self, owner: &Owner, text: &str) -> Option<u64> {
        let gap = self.gaps.get(owner);
        let told = gap.map(|gap| gap.told(owner) + "\n").unwrap_or_default();
        let end = match self.files.append(owner, (told + text).as_bytes()) {
            Ok(end) => end,
            Err(error) => {
                if self.gaps.is_empty() {
                    tracing::error!(%error, dir = %self.shared.dir.display(), "audit not written");
                }
                return None;
            }
        };
        if self.gaps.remove(owner).is_some() && self.gaps.is_empty() {
            tracing::warn!(dir = %self.shared.dir.display(), "audit written again");
        }
        let mut written = self.shared.written.lock().unwrap_or_else(PoisonError::into_inner);
        written.groups += 1;
        written.ends.insert(owner.clone(), end);
        Some(written.groups)
    }
}

/// Lines of one owner that are written together.
#[derive(Debug, Default)]
struct Group {
    text: String,
    records: Vec<(AuditRecord, String)>,
}

#[cfg(test)]
mod tests;
