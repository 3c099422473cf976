//! The audit's one writer: takes records from the trail, joins equal refusals, keeps them as JSON
//! lines on a bounded piece of disk, and shows them to those who ask or follow.
//!
//! Never holds traffic up: a full disk or a slow follower loses records, and the loss is counted
//! and itself recorded.

pub mod filter;
mod coalesce;
mod files;

use std::collections::VecDeque;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};
use std::{fs, io, thread};

use policy::audit::{Kind, Outcome};
use policy::{AuditRecord, Trail};
use tokio::sync::{Semaphore, broadcast};

use crate::auditlog::coalesce::Coalescer;
use crate::auditlog::files::{Files, Position};
use crate::auditlog::filter::Filter;
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
/// Questions about the past answered at once; each reads files.
const QUERIES: usize = 4;

/// The audit as others see it. Clones share one.
#[derive(Clone, Debug)]
pub struct AuditLog(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    dir: PathBuf,
    written: Mutex<Position>,
    lines: broadcast::Sender<Line>,
    dropped: AtomicU64,
    closing: AtomicBool,
    writer: Mutex<Option<JoinHandle<()>>>,
    queries: Arc<Semaphore>,
}

/// One record with its JSON, as followers get it.
#[derive(Clone, Debug)]
struct Line {
    /// Where it ends on disk; none if it could not be written.
    end: Option<Position>,
    record: Arc<AuditRecord>,
    json: Arc<str>,
}

/// Records as they are written, those before `Follow` was asked for first.
#[derive(Debug)]
pub struct Follow {
    filter: Filter,
    past: VecDeque<String>,
    seen: Position,
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
            written: Mutex::new(files.position()),
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
            unwritten: 0,
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
        let past = self.past(seen, filter.clone(), limit).await?;
        Ok(Follow { filter, past, seen, lines })
    }

    async fn past(
        &self,
        end: Position,
        filter: Filter,
        limit: usize,
    ) -> io::Result<VecDeque<String>> {
        let turn = Arc::clone(&self.0.queries).acquire_owned().await.map_err(io::Error::other)?;
        let dir = self.0.dir.clone();
        let read = move || {
            // Reading goes on when whoever asked has left, so the turn is the reader's.
            let _turn = turn;
            newest(&dir, end, &filter, limit)
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

    fn written(&self) -> Position {
        *self.0.written.lock().unwrap_or_else(PoisonError::into_inner)
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
                    let told = line.end.is_some_and(|end| end <= self.seen);
                    if !told && self.filter.passes(&line.record) {
                        return Some(line.json);
                    }
                }
                Err(broadcast::error::RecvError::Lagged(missed)) => {
                    let record = loss(missed, "this follower was too slow");
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
    unwritten: u64,
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
            synced &= batch.is_empty();
            self.write(batch);
            if idle && !synced {
                synced = self.files.sync().is_ok();
            }
            if closing && idle {
                return;
            }
        }
    }

    fn note_losses(&mut self, batch: &mut Vec<AuditRecord>) {
        let lost = self.trail.take_lost();
        if lost > 0 {
            self.shared.dropped.fetch_add(lost, Ordering::Relaxed);
            batch.push(loss(lost, "the audit queue was full"));
        }
    }

    /// Writes a batch in groups, each whole or not at all, and shows all to followers either way.
    fn write(&mut self, batch: Vec<AuditRecord>) {
        let mut lines = batch.into_iter().map(|record| {
            let json = serde_json::to_string(&record).unwrap_or_default();
            (record, json)
        });
        let mut group = Vec::new();
        let mut text = String::new();
        loop {
            let next = lines.next();
            let full = text.len() >= GROUP || next.is_none();
            if full && !group.is_empty() {
                let end = self.append(&text, group.len());
                for (record, json) in group.drain(..) {
                    let line = Line { end, record: Arc::new(record), json: String::into(json) };
                    // Fails only when nobody follows.
                    let _ = self.shared.lines.send(line);
                }
                text.clear();
            }
            let Some((record, json)) = next else { return };
            text.push_str(&json);
            text.push('\n');
            group.push((record, json));
        }
    }

    /// Where the text ends on disk; none if it could not be written.
    fn append(&mut self, text: &str, records: usize) -> Option<Position> {
        // What was lost is told by the first that is written again, on disk only: followers saw it.
        let mut told = String::new();
        if self.unwritten > 0 {
            let record = loss(self.unwritten, "the audit could not be written");
            told = serde_json::to_string(&record).unwrap_or_default() + "\n";
        }
        if let Err(error) = self.files.append((told + text).as_bytes()) {
            if self.unwritten == 0 {
                tracing::error!(%error, dir = %self.shared.dir.display(), "audit not written");
            }
            let count = u64::try_from(records).unwrap_or(u64::MAX);
            self.unwritten = self.unwritten.saturating_add(count);
            self.shared.dropped.fetch_add(count, Ordering::Relaxed);
            return None;
        }
        self.unwritten = 0;
        let end = self.files.position();
        *self.shared.written.lock().unwrap_or_else(PoisonError::into_inner) = end;
        Some(end)
    }
}

fn loss(count: u64, why: &str) -> AuditRecord {
    let mut record = AuditRecord::new(SystemTime::now(), Kind::Control, Outcome::Fail);
    record.count = Some(count);
    record.detail = Some(format!("records lost: {why}"));
    record
}

/// Reads backwards, file by file, until `limit` records were found.
fn newest(
    dir: &Path,
    end: Position,
    filter: &Filter,
    limit: usize,
) -> io::Result<VecDeque<String>> {
    let mut found = VecDeque::new();
    for number in files::numbers(dir)?.into_iter().rev().filter(|number| *number <= end.file) {
        let modified = fs::metadata(files::path(dir, number)).and_then(|m| m.modified());
        let too_old = filter.since.zip(modified.ok()).is_some_and(|(since, last)| last < since);
        if too_old || found.len() >= limit {
            break;
        }
        let wanted = limit - found.len();
        let mut here = VecDeque::new();
        for line in files::lines(dir, number, end)?.filter(|line| filter.may_pass(line)) {
            let read = serde_json::from_str::<AuditRecord>(&line);
            if read.is_ok_and(|record| filter.passes(&record)) {
                if here.len() == wanted {
                    here.pop_front();
                }
                here.push_back(line);
            }
        }
        here.append(&mut found);
        found = here;
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use policy::Code;

    use super::*;
    use crate::units::Size;

    fn opened(dir: &Path, queue: usize) -> (AuditLog, Trail) {
        let config =
            Audit { dir: dir.to_owned(), file_size: Size(20_000), total_size: Size(60_000), queue };
        let (trail, records) = Trail::bounded(queue);
        (AuditLog::open(&config, trail.clone(), records).expect("open"), trail)
    }

    fn record(sandbox: &str, code: Option<Code>) -> AuditRecord {
        let outcome = if code.is_some() { Outcome::Deny } else { Outcome::Allow };
        let mut record = AuditRecord::new(SystemTime::now(), Kind::Connection, outcome);
        record.sandbox = sandbox.parse().ok();
        record.code = code;
        record
    }

    async fn all(log: &AuditLog, filter: Filter, limit: usize) -> Vec<AuditRecord> {
        let lines = log.query(filter, limit).await.expect("read");
        lines.iter().map(|line| serde_json::from_str(line).expect("record")).collect()
    }

    async fn until(mut holds: impl AsyncFnMut() -> bool) {
        for _ in 0..500 {
            if holds().await {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("not within five seconds");
    }

    #[tokio::test]
    async fn what_was_recorded_is_found_again_after_a_restart_within_the_bounds() {
        let dir = tempfile::tempdir().expect("folder");
        let (log, trail) = opened(dir.path(), 1024);
        for n in 0..1000_u64 {
            let mut record = record(if n % 2 == 0 { "even" } else { "odd" }, None);
            record.flow = Some(n);
            trail.record(record);
        }
        log.close();
        let on_disk: u64 = fs::read_dir(dir.path())
            .expect("folder")
            .map(|file| file.expect("file").metadata().expect("metadata").len())
            .sum();
        let (log, _trail) = opened(dir.path(), 1024);
        let odd = Filter { sandbox: "odd".parse().ok(), ..Filter::default() };
        let found = all(&log, odd, 5).await;
        let flows: Vec<_> = found.iter().filter_map(|record| record.flow).collect();
        assert_eq!(flows, [991, 993, 995, 997, 999], "the newest, oldest first, across files");
        assert!(on_disk <= 60_000, "{on_disk}");
        log.close();
    }

    #[tokio::test]
    async fn a_follower_sees_the_past_and_the_present_without_gap_or_repeat() {
        let dir = tempfile::tempdir().expect("folder");
        let (log, trail) = opened(dir.path(), 4096);
        let writing = {
            let trail = trail.clone();
            thread::spawn(move || {
                for n in 0..40_u64 {
                    let mut record = record("a", None);
                    record.flow = Some(n);
                    trail.record(record);
                    thread::sleep(Duration::from_millis(2));
                }
            })
        };
        until(async || !all(&log, Filter::default(), 9).await.is_empty()).await;
        let mut follow = log.follow(Filter::default(), 1_000).await.expect("follow");
        let mut flows = Vec::new();
        while flows.last() != Some(&39) {
            let line = tokio::time::timeout(Duration::from_secs(5), follow.next()).await;
            let line = line.expect("in time").expect("open");
            flows.extend(serde_json::from_str::<AuditRecord>(&line).expect("record").flow);
        }
        let first = flows.first().copied().expect("some");
        assert_eq!(flows, (first..40).collect::<Vec<_>>());
        writing.join().expect("wrote");
        log.close();
    }

    #[tokio::test]
    async fn a_question_whose_asker_has_left_keeps_its_turn_until_it_is_read() {
        let dir = tempfile::tempdir().expect("folder");
        fs::write(files::path(dir.path(), 1), "{}\n".repeat(3_000_000)).expect("much to read");
        let (log, _trail) = opened(dir.path(), 16);
        let filter = Filter { sandbox: "a".parse().ok(), ..Filter::default() };
        let asked = tokio::time::timeout(Duration::from_millis(20), log.query(filter, 1)).await;
        assert!(asked.is_err(), "control: it takes longer");
        assert_eq!(log.0.queries.available_permits(), QUERIES - 1);
        until(async || log.0.queries.available_permits() == QUERIES).await;
        log.close();
    }

    #[tokio::test]
    async fn equal_refusals_reach_the_disk_as_one_record_and_a_count() {
        let dir = tempfile::tempdir().expect("folder");
        let (log, trail) = opened(dir.path(), 4096);
        for _ in 0..50 {
            trail.record(record("a", Some(Code::NoRule)));
        }
        log.close();
        let (log, _trail) = opened(dir.path(), 16);
        let filter = Filter { code: Some(Code::NoRule), ..Filter::default() };
        let found = all(&log, filter, 100).await;
        assert_eq!(found.len(), 2);
        assert_eq!(found.iter().map(|record| record.count.unwrap_or(1)).sum::<u64>(), 50);
        log.close();
    }

    #[tokio::test]
    async fn records_lost_to_a_full_queue_are_counted_in_the_audit_itself() {
        let dir = tempfile::tempdir().expect("folder");
        let (trail, records) = Trail::bounded(1);
        for _ in 0..10 {
            trail.record(record("a", None));
        }
        let config = Audit { dir: dir.path().to_owned(), ..Audit::default() };
        let log = AuditLog::open(&config, trail, records).expect("open");
        until(async || log.dropped() == 9).await;
        let told = async || {
            let found = all(&log, Filter::default(), 9).await;
            found.iter().any(|record| record.kind == Kind::Control && record.count == Some(9))
        };
        until(told).await;
        log.close();
    }

    #[tokio::test]
    async fn a_full_disk_loses_records_but_neither_the_writer_nor_the_followers() {
        let dir = tempfile::tempdir().expect("folder");
        let (log, trail) = opened(dir.path(), 64);
        let mut follow = log.follow(Filter::default(), 0).await.expect("follow");
        // Every file from the second on is a folder: going on to it fails like a full disk.
        fs::create_dir(files::path(dir.path(), 2)).expect("obstacle");
        for n in 0..200_u64 {
            let mut record = record("a", None);
            record.flow = Some(n);
            trail.record(record);
            let line = tokio::time::timeout(Duration::from_secs(5), follow.next()).await;
            line.expect("in time").expect("followers see it all the same");
        }
        assert!(log.dropped() > 0);
        fs::remove_dir(files::path(dir.path(), 2)).expect("obstacle gone");
        trail.record(record("b", None));
        let told = async || {
            let found = all(&log, Filter::default(), 999).await;
            let lost = |record: &AuditRecord| {
                record.detail.as_deref().is_some_and(|said| said.contains("could not be written"))
            };
            found.iter().any(lost) && found.iter().any(|r| r.sandbox == "b".parse().ok())
        };
        until(told).await;
        let found = all(&log, Filter::default(), 999).await;
        let missing: u64 = found.iter().filter_map(|record| record.count).sum();
        let kept = found.iter().filter(|record| record.sandbox.is_some()).count();
        assert_eq!((missing, kept), (log.dropped(), 201 - usize::try_from(missing).expect("few")));
        log.close();
    }
}
