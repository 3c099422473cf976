//! The audit's one writer: takes records from the trail, joins equal refusals, keeps them as JSON
//! lines on a bounded piece of disk, and shows them to those who ask or follow.
//!
//! Never holds traffic up: a full queue, a full disk or a slow follower loses records, and the loss is
//! counted and itself recorded, as a gap.

pub mod filter;
mod readers;
mod followers;
mod past;
mod untold;
mod coalesce;
mod files;

use std::collections::{BTreeMap, VecDeque};
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::{fs, io, thread};

use policy::audit::{Kind, Outcome};
use policy::trail::{Gap, Owner, Records};
use policy::{AuditRecord, Code, TenantName};

use crate::auditlog::coalesce::Coalescer;
use crate::auditlog::files::{Files, Position};
use crate::auditlog::filter::Filter;
use crate::auditlog::followers::{Followers, Following, Line, Next};
use crate::auditlog::past::Question;
use crate::auditlog::readers::Readers;
use crate::auditlog::untold::{Untold, Why};
use crate::config::Audit;
use crate::error::Error;

pub use past::Cursor;
pub use readers::{OPEN as MOST_OPEN, Reader};

/// Refusals are equal only within this time.
const WINDOW: Duration = Duration::from_secs(1);
/// Different refusals held at once.
const HELD: usize = 4096;
/// Records taken from the queue together.
const BATCH: usize = 1024;
/// How long a record waits for others to be written with: to wake for each costs more than it does
/// to write it.
const GATHER: Duration = Duration::from_millis(10);
/// Bytes after which a write is made: far below the size of a file.
const GROUP: usize = 16 << 10;
/// How often an idle writer looks whether it should stop, and syncs.
const TICK: Duration = Duration::from_millis(100);
/// How often a disk that was full is tried again.
const AGAIN: Duration = Duration::from_secs(1);

/// The audit as others see it. Clones share one.
#[derive(Clone, Debug)]
pub struct AuditLog(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    dir: PathBuf,
    written: Mutex<Written>,
    followers: Followers,
    dropped: AtomicU64,
    decided: Mutex<BTreeMap<Decision, u64>>,
    closing: AtomicBool,
    writer: Mutex<Option<JoinHandle<()>>>,
    readers: Readers,
}

/// What a record says in the fewest words.
pub type Decision = (Kind, Outcome, Option<Code>);

/// How much is on disk.
#[derive(Clone, Debug, Default)]
struct Written {
    /// Groups of lines since the start.
    groups: u64,
    ends: BTreeMap<Owner, Position>,
}

/// Records of the past as JSON lines, oldest first.
#[derive(Debug)]
pub struct Past {
    lines: VecDeque<String>,
    _reader: Reader,
}

impl Iterator for Past {
    type Item = String;
    fn next(&mut self) -> Option<String> {
        self.lines.pop_front()
    }
}

/// Records as they are written, those before `Follow` was asked for first.
#[derive(Debug)]
pub struct Follow {
    past: Option<Past>,
    /// The groups that are in the past.
    seen: u64,
    lines: Following,
    /// Whether a tenant reads it.
    for_tenant: bool,
}

impl AuditLog {
    /// Opens the folder, making it if missing, and starts the writer.
    pub fn open(config: &Audit, records: Records) -> Result<Self, Error> {
        let prepare = |doing, source| Error::Prepare { doing, path: config.dir.clone(), source };
        // Who reached what is not for everybody on the host.
        let made = fs::DirBuilder::new().recursive(true).mode(0o750).create(&config.dir);
        made.map_err(|e| prepare("making the audit folder", e))?;
        let room = config.total_size.0.saturating_sub(untold::SIZE as u64);
        let files = Files::open(&config.dir, config.file_size.0, room)
            .map_err(|e| prepare("opening the audit in", e))?;
        let untold = Untold::open(&config.dir)
            .map_err(|e| prepare("reading what was not told of the audit in", e))?;
        let shared = Arc::new(Shared {
            dir: config.dir.clone(),
            written: Mutex::new(Written { groups: 0, ends: files.ends() }),
            followers: Followers::default(),
            dropped: AtomicU64::new(0),
            decided: Mutex::default(),
            closing: AtomicBool::new(false),
            writer: Mutex::new(None),
            readers: Readers::new(),
        });
        let writer = Writer {
            shared: Arc::clone(&shared),
            files,
            coalescer: Coalescer::new(WINDOW, HELD),
            records,
            untold,
            failing: false,
            last_tried: Instant::now(),
        };
        let thread = thread::Builder::new()
            .name("audit".into())
            .spawn(move || writer.run())
            .map_err(|e| prepare("starting the writer of", e))?;
        *shared.writer.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        Ok(Self(shared))
    }

    /// Decisions whose records were lost since the start, by a full queue or a full disk: as many as
    /// the gaps count.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.0.dropped.load(Ordering::Relaxed)
    }

    /// How many decisions of each kind have been recorded since the start, those whose records were lost on
    /// the way to the disk included.
    #[must_use]
    pub fn decided(&self) -> BTreeMap<Decision, u64> {
        self.0.decided.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The right to ask one question, for this tenant or the operator; none if it has as many open as
    /// it may, which is [`MOST_OPEN`].
    #[must_use]
    pub fn reader(&self, whose: Option<&TenantName>) -> Option<Reader> {
        self.0.readers.admit(whose)
    }

    /// The newest `limit` records that pass, oldest first; of those, if so asked, that were not looked at
    /// for an earlier answer. A tenant's question reads a bounded part of the files, and says so.
    pub async fn query(
        &self,
        reader: Reader,
        filter: Filter,
        limit: usize,
        before: Option<Cursor>,
    ) -> io::Result<Past> {
        self.past(reader, self.written(), filter, limit, before).await
    }

    /// The newest `limit` records that pass, then every one that is written from now on, without
    /// a gap or a repeat between.
    pub async fn follow(&self, reader: Reader, filter: Filter, limit: usize) -> io::Result<Follow> {
        let lines = self.0.followers.follow(filter.clone());
        let (seen, for_tenant) = (self.written(), reader.is_tenant());
        let groups = seen.groups;
        let past = Some(self.past(reader, seen, filter, limit, None).await?);
        Ok(Follow { past, seen: groups, lines, for_tenant })
    }

    async fn past(
        &self,
        reader: Reader,
        written: Written,
        filter: Filter,
        limit: usize,
        before: Option<Cursor>,
    ) -> io::Result<Past> {
        let turn = reader.turn().await?;
        let dir = self.0.dir.clone();
        let for_tenant = reader.is_tenant();
        let read = move || {
            // Reading goes on when whoever asked has left, so the turn is the reading's.
            let _turn = turn;
            let question = Question { filter, limit, before, for_tenant };
            past::newest(&dir, &written.ends, &question)
        };
        let lines = tokio::task::spawn_blocking(read).await.map_err(io::Error::other)??;
        Ok(Past { lines, _reader: reader })
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
    /// The next line; none when the daemon stops. A follower that was too slow is told so by a record
    /// of its own, without a number: what it missed may be other tenants'.
    pub async fn next(&mut self) -> Option<String> {
        if let Some(line) = self.past.as_mut().and_then(Iterator::next) {
            return Some(line);
        }
        self.past = None;
        loop {
            match self.lines.next().await {
                Next::Line(line) => {
                    if line.group.is_none_or(|group| group > self.seen) {
                        return Some(worded(&line.record, line.json.clone(), self.for_tenant));
                    }
                }
                Next::Missed => return serde_json::to_string(&too_slow()).ok(),
                Next::End => return None,
            }
        }
    }
}

/// The JSON of a record in the words for whoever reads it.
fn worded(record: &AuditRecord, json: String, for_tenant: bool) -> String {
    if !for_tenant || record.told.is_none() {
        return json;
    }
    // What cannot be put in other words is not told.
    serde_json::to_string(&record.clone().for_tenant()).unwrap_or_default()
}

/// What a follower is told in place of what it missed.
fn too_slow() -> AuditRecord {
    AuditRecord {
        detail: Some("this follower was too slow: it may have missed records".to_owned()),
        ..AuditRecord::new(fault::wall_clock(), Kind::Gap, Outcome::Fail)
    }
}

struct Writer {
    shared: Arc<Shared>,
    files: Files,
    coalescer: Coalescer,
    records: Records,
    untold: Untold,
    /// Whether it was logged that the disk takes nothing.
    failing: bool,
    last_tried: Instant,
}

impl Writer {
    fn run(mut self) {
        self.write_all();
        self.shared.followers.close();
    }

    fn write_all(&mut self) {
        let mut synced = true;
        loop {
            let closing = self.shared.closing.load(Ordering::Acquire);
            let mut batch = Vec::new();
            let first = if closing { self.records.take() } else { self.records.take_within(TICK) };
            if first.is_some() && !closing {
                thread::sleep(GATHER);
            }
            let now = Instant::now();
            let idle = first.is_none();
            for record in first.into_iter().chain(self.records.drain()).take(BATCH) {
                self.count(&record);
                self.coalescer.push(record, now, &mut batch);
            }
            self.coalescer.end(now, &mut batch);
            if closing && idle {
                self.coalescer.end_all(&mut batch);
            }
            self.note_missing();
            synced &= batch.is_empty() && self.untold.is_empty();
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

    fn count(&self, record: &AuditRecord) {
        let mut decided = self.shared.decided.lock().unwrap_or_else(PoisonError::into_inner);
        let count = decided.entry((record.kind, record.outcome, record.code)).or_default();
        *count = count.saturating_add(record.count.unwrap_or(1));
    }

    /// Counts what the queue had no room for, and shows it to followers.
    fn note_missing(&mut self) {
        for (owner, gap) in self.records.take_missing() {
            let tenant = owner.as_ref().map(TenantName::as_str);
            tracing::error!(lost = gap.count(), tenant, "the audit queue was full");
            let record = gap.record(&owner, Why::QueueFull.as_str());
            let json = serde_json::to_string(&record).unwrap_or_default();
            self.show(None, record, json);
            self.miss(owner, Why::QueueFull, gap);
        }
    }

    fn miss(&mut self, owner: Owner, why: Why, gap: Gap) {
        self.shared.dropped.fetch_add(gap.count(), Ordering::Relaxed);
        self.untold.add(owner, why, gap);
    }

    fn show(&self, group: Option<u64>, record: AuditRecord, json: String) {
        self.shared.followers.show(Line { group, record, json });
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
        for (record, json) in group.records {
            if written.is_none() {
                self.miss(owner.clone(), Why::Unwritten, Gap::of(&record));
            }
            self.show(written, record, json);
        }
    }

    /// Says on disk what is missing there, as soon as that can be said, and keeps what cannot be;
    /// followers saw it all.
    fn tell_gaps(&mut self) {
        self.last_tried = Instant::now();
        for owner in self.untold.owners() {
            if self.put(&owner, "").is_none() {
                break;
            }
        }
        self.keep_untold();
    }

    fn keep_untold(&mut self) {
        if let Err(error) = self.untold.keep() {
            tracing::debug!(%error, "what is missing in the audit is not kept");
        }
    }

    /// Puts text behind what is missing before it; the number of the group, none if nothing of it
    /// could be written.
    fn put(&mut self, owner: &Owner, text: &str) -> Option<u64> {
        let told = self.untold.lines(owner);
        let end = match self.files.append(owner, (told + text).as_bytes()) {
            Ok(end) => end,
            Err(error) => {
                if !std::mem::replace(&mut self.failing, true) {
                    tracing::error!(%error, dir = %self.shared.dir.display(), "audit not written");
                }
                return None;
            }
        };
        if self.untold.forget(owner) {
            self.keep_untold();
        }
        if self.untold.is_empty() && std::mem::take(&mut self.failing) {
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
