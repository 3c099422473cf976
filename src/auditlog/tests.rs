//! The audit from record to reader, on a real folder.

use std::path::Path;
use std::time::SystemTime;

use policy::Code;
use policy::audit::{Kind, Outcome};

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
    fs::write(files::path(dir.path(), &None, 1), "{}\n".repeat(3_000_000)).expect("much to read");
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
        found.iter().any(|record| record.kind == Kind::Gap && record.count == Some(9))
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
    fs::create_dir(files::path(dir.path(), &None, 2)).expect("obstacle");
    for n in 0..200_u64 {
        let mut record = record("a", None);
        record.flow = Some(n);
        trail.record(record);
        let line = tokio::time::timeout(Duration::from_secs(5), follow.next()).await;
        line.expect("in time").expect("followers see it all the same");
    }
    assert!(log.dropped() > 0);
    fs::remove_dir(files::path(dir.path(), &None, 2)).expect("obstacle gone");
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
