//! The audit from record to reader, on a real folder.

use std::fs::File;
use std::path::Path;
use std::time::SystemTime;

use policy::{Code, Trail};

use super::*;
use crate::auditlog::followers::BEHIND;
use crate::units::Size;

fn opened(dir: &Path, queue: usize) -> (AuditLog, Trail) {
    let config =
        Audit { dir: dir.to_owned(), file_size: Size(20_000), total_size: Size(60_000), queue };
    let (trail, records) = Trail::bounded(queue);
    (AuditLog::open(&config, records).expect("open"), trail)
}

fn record(sandbox: &str, code: Option<Code>) -> AuditRecord {
    let outcome = if code.is_some() { Outcome::Deny } else { Outcome::Allow };
    let mut record = AuditRecord::new(SystemTime::now(), Kind::Connection, outcome);
    record.sandbox = sandbox.parse().ok();
    record.code = code;
    record
}

fn operator(log: &AuditLog) -> Reader {
    log.reader(None).expect("as many as it likes")
}

async fn all(log: &AuditLog, filter: Filter, limit: usize) -> Vec<AuditRecord> {
    let lines = log.query(operator(log), filter, limit, None).await.expect("read");
    lines.map(|line| serde_json::from_str(&line).expect("record")).collect()
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
    let (log, trail) = opened(dir.path(), 2048);
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
    let mut follow = log.follow(operator(&log), Filter::default(), 1_000).await.expect("follow");
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

/// Promise 50. And it is told so, without a number.
#[tokio::test]
async fn a_follower_that_is_too_slow_loses_lines_and_one_that_follows_another_tenant_none() {
    let dir = tempfile::tempdir().expect("folder");
    let (log, trail) = opened(dir.path(), 1024);
    let of = |tenant: &str| AuditRecord { tenant: tenant.parse().ok(), ..record("one", None) };
    let filter = |tenant: &str| Filter { tenant: tenant.parse().ok(), ..Filter::default() };
    let mut quiet = log.follow(operator(&log), filter("quiet"), 0).await.expect("follow");
    let mut slow = log.follow(operator(&log), filter("loud"), 0).await.expect("follow");
    let mut others = log.follow(operator(&log), Filter::default(), 0).await.expect("follow");
    for _ in 0..=BEHIND / 256 {
        (0..256).for_each(|_| trail.record(of("loud")));
        for _ in 0..256 {
            others.next().await.expect("it is written");
        }
    }
    trail.record(of("quiet"));
    let told = async |follow: &mut Follow| -> AuditRecord {
        let line = tokio::time::timeout(Duration::from_secs(5), follow.next()).await;
        serde_json::from_str(&line.expect("in time").expect("a line")).expect("record")
    };
    let first = told(&mut quiet).await;
    assert_eq!((first.kind, first.tenant), (Kind::Connection, "quiet".parse().ok()));
    let gap = told(&mut slow).await;
    assert_eq!((gap.kind, gap.count, gap.tenant), (Kind::Gap, None, None));
    assert!(gap.detail.is_some_and(|said| said.contains("too slow")));
    assert_eq!(told(&mut slow).await.tenant, "loud".parse().ok(), "control: and goes on");
    log.close();
}

/// Promise 22. What a record keeps from its tenant, it keeps in answers and from followers.
#[tokio::test]
async fn a_tenant_reads_a_record_in_the_words_for_it_and_the_operator_in_full() {
    let dir = tempfile::tempdir().expect("folder");
    let (log, trail) = opened(dir.path(), 16);
    let acme: TenantName = "acme".parse().expect("a name");
    let filter = || Filter { tenant: Some(acme.clone()), ..Filter::default() };
    let reader = |tenant: bool| log.reader(Some(&acme).filter(|_| tenant)).expect("a reader");
    let mut own = log.follow(reader(true), filter(), 0).await.expect("follow");
    let mut whole = log.follow(reader(false), filter(), 0).await.expect("follow");
    let record = AuditRecord { tenant: Some(acme.clone()), ..record("one", None) };
    trail.record(record.clone().saying("failed: /srv/x", "failed"));
    let (own, whole) = (own.next().await, whole.next().await);
    log.close();
    let query = async |tenant| {
        let mut found = log.query(reader(tenant), filter(), 9, None).await.expect("read");
        found.next()
    };
    for (own, whole) in [(own, whole), (query(true).await, query(false).await)] {
        let [own, whole] = [own, whole].map(|line| -> AuditRecord {
            serde_json::from_str(&line.expect("a line")).expect("a record")
        });
        assert_eq!((own.detail.as_deref(), own.told), (Some("failed"), None));
        assert_eq!(whole.detail.as_deref(), Some("failed: /srv/x"));
    }
}

#[tokio::test]
async fn a_question_whose_asker_has_left_keeps_its_turn_until_it_is_read() {
    let dir = tempfile::tempdir().expect("folder");
    fs::write(files::path(dir.path(), &None, 1), "{}\n".repeat(3_000_000)).expect("much to read");
    let (log, _trail) = opened(dir.path(), 16);
    let filter = Filter { sandbox: "a".parse().ok(), ..Filter::default() };
    let acme: TenantName = "acme".parse().expect("a name");
    let turns = async || log.reader(Some(&acme)).expect("one of few").turn().await;
    let asked = log.query(log.reader(Some(&acme)).expect("the first"), filter, 1, None);
    let asked = tokio::time::timeout(Duration::from_millis(20), asked).await;
    assert!(asked.is_err(), "control: it takes longer");
    let second = turns().await.expect("its second turn");
    let third = tokio::time::timeout(Duration::from_millis(20), turns()).await;
    assert!(third.is_err(), "the first is still taken");
    turns().await.expect("and given back in the end");
    drop(second);
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

/// Promise 23. Files are passed over by when they were last written.
#[tokio::test]
async fn a_clock_that_was_set_back_hides_no_record_and_keeps_their_order() {
    let dir = tempfile::tempdir().expect("folder");
    let now = SystemTime::now();
    let ahead = now + Duration::from_secs(3600);
    let written = |sandbox, time| {
        let (log, trail) = opened(dir.path(), 16);
        trail.record(AuditRecord { time, ..record(sandbox, None) });
        log.close();
    };
    written("before", ahead);
    let file = File::options().append(true).open(files::path(dir.path(), &None, 1));
    file.and_then(|file| file.set_modified(ahead)).expect("as it was when the clock was ahead");
    written("after", now);
    let (log, _trail) = opened(dir.path(), 16);
    let names = async |since: SystemTime| {
        let filter = Filter { since: Some(since), ..Filter::default() };
        let found = all(&log, filter, 9).await.into_iter();
        let names = found.filter_map(|record| record.sandbox.map(|name| name.to_string()));
        names.collect::<Vec<_>>()
    };
    assert_eq!(names(now - Duration::from_secs(60)).await, ["before", "after"]);
    assert_eq!(names(now + Duration::from_secs(1800)).await, ["before"]);
    log.close();
}

/// What the audit says is missing, by tenant and sandbox, and how many.
async fn missing(log: &AuditLog) -> Vec<(Owner, Option<String>, u64)> {
    let gaps = all(log, Filter { kind: Some(Kind::Gap), ..Filter::default() }, 99).await;
    let told = |gap: AuditRecord| {
        let sandbox = gap.sandbox.map(|sandbox| sandbox.to_string());
        (gap.tenant, sandbox, gap.count.expect("how many"))
    };
    gaps.into_iter().map(told).collect()
}

/// Promise 50. Attack K10.
#[tokio::test]
async fn records_lost_to_a_full_queue_are_those_of_the_tenant_that_filled_it_and_told() {
    let dir = tempfile::tempdir().expect("folder");
    let (trail, records) = Trail::bounded(64);
    let flooded = SystemTime::now();
    let of = |tenant: &str, flow| {
        let tenant = tenant.parse().ok();
        AuditRecord { tenant, flow: Some(flow), ..record("one", None) }
    };
    (0..1000).for_each(|n| trail.record(of("loud", n)));
    (0..10).for_each(|n| trail.record(of("quiet", n)));
    let config = Audit { dir: dir.path().to_owned(), ..Audit::default() };
    let log = AuditLog::open(&config, records).expect("open");
    let loud: Owner = "loud".parse().ok();
    let expected = (loud.clone(), Some("one".to_owned()), 1000 - 32);
    until(async || missing(&log).await == std::slice::from_ref(&expected)).await;
    assert_eq!(log.dropped(), 1000 - 32);
    for (tenant, kept) in [("loud", 32), ("quiet", 10)] {
        let filter = Filter { tenant: tenant.parse().ok(), ..Filter::default() };
        let found = all(&log, filter, 999).await;
        let flows: Vec<u64> = found.iter().filter_map(|record| record.flow).collect();
        assert_eq!(flows, (0..kept).collect::<Vec<_>>(), "{tenant}");
    }
    let filter = Filter { tenant: loud, kind: Some(Kind::Gap), ..Filter::default() };
    let [gap] = &all(&log, filter, 9).await[..] else { panic!("one gap") };
    let took = Duration::from_micros(gap.micros.expect("over what time"));
    let (first, now) = (gap.time - took, SystemTime::now());
    assert!(flooded <= first + Duration::from_micros(1) && gap.time <= now, "{gap:?}");
    log.close();
}

/// Promise 54.
#[tokio::test]
async fn a_gap_that_a_full_disk_kept_from_being_told_is_told_by_the_next_daemon() {
    let dir = tempfile::tempdir().expect("folder");
    let (log, trail) = opened(dir.path(), 64);
    let of = |tenant: &str| AuditRecord { tenant: tenant.parse().ok(), ..record("one", None) };
    trail.record(of("acme"));
    until(async || all(&log, Filter::default(), 9).await.len() == 1).await;
    // What is there can be written over; going on to a next file fails like a full disk.
    let path = |number| files::path(dir.path(), &"acme".parse().ok(), number);
    fs::create_dir(path(2)).expect("obstacle");
    fs::remove_file(path(1)).expect("removed");
    (0..7).for_each(|_| trail.record(of("acme")));
    until(async || log.dropped() == 7).await;
    log.close();
    let (log, _trail) = opened(dir.path(), 64);
    log.close();
    fs::remove_dir(path(2)).expect("obstacle gone");
    let (log, _trail) = opened(dir.path(), 64);
    let expected = ("acme".parse().ok(), Some("one".to_owned()), 7);
    until(async || missing(&log).await == std::slice::from_ref(&expected)).await;
    log.close();
    let (log, _trail) = opened(dir.path(), 64);
    tokio::time::sleep(2 * AGAIN).await;
    assert_eq!(missing(&log).await, [expected], "once");
    log.close();
}

#[tokio::test]
async fn a_full_disk_loses_records_but_neither_the_writer_nor_the_followers() {
    let dir = tempfile::tempdir().expect("folder");
    let (log, trail) = opened(dir.path(), 64);
    let mut follow = log.follow(operator(&log), Filter::default(), 0).await.expect("follow");
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
    let (gaps, kept): (Vec<_>, Vec<_>) = found.iter().partition(|one| one.kind == Kind::Gap);
    let missing: u64 = gaps.iter().filter_map(|gap| gap.count).sum();
    let kept = kept.len();
    assert_eq!((missing, kept), (log.dropped(), 201 - usize::try_from(missing).expect("few")));
    log.close();
}
