//! The book adds up, whole or not at all, and stays bounded at the cost of whoever fills it.

use std::collections::BTreeMap;

use super::*;
use crate::usage::account::Owed;
use crate::usage::{By, Query, Used};

fn entry(account: u64, tenant: &str, sandbox: &str, hours: &[(u64, u64)]) -> Entry {
    let owed = |running_ms: u64| Owed {
        amounts: Amounts { running_ms, resident_peak_mib: running_ms, ..Amounts::default() },
        places: BTreeMap::new(),
    };
    Entry {
        account,
        tenant: tenant.parse().expect("name"),
        sandbox: sandbox.parse().expect("name"),
        hours: hours.iter().map(|(hour, ms)| (*hour, owed(*ms))).collect(),
        mark: Some(mark()),
    }
}

fn mark() -> Mark {
    let mark = "{\"boot\":\"b\",\"until\":7,\"phase\":\"running\",\"process\":null,\"had\":3}";
    serde_json::from_str(mark).expect("a mark")
}

fn ask(by: By) -> Query {
    let (tenant, sandbox) = (None, None);
    Query { tenant, sandbox, from: 0, to: 1 << 40, by, destinations: true, most: 1000 }
}

async fn told(book: &Book, by: By) -> Vec<(u64, String, String, u64)> {
    let rows = book.used(&ask(by)).await.expect("read").expect("few");
    let told = |row: Used| {
        (
            row.hour.unwrap_or_default(),
            row.tenant,
            row.sandbox.unwrap_or_default(),
            row.amounts.running_ms,
        )
    };
    rows.into_iter().map(told).collect()
}

fn open() -> (tempfile::TempDir, Book) {
    let dir = tempfile::tempdir().expect("a directory");
    let book = Book::open(&dir.path().join("usage.db")).expect("opened");
    (dir, book)
}

/// Promise 67.
#[tokio::test]
async fn what_is_added_adds_up_by_hour_by_sandbox_and_by_tenant_and_is_there_after_a_reopen() {
    let (dir, book) = open();
    let first = vec![entry(1, "a", "x", &[(10, 5), (11, 6)]), entry(2, "a", "y", &[(11, 7)])];
    book.add(first).await.expect("added");
    let again = vec![entry(1, "a", "x", &[(11, 1)]), entry(3, "b", "z", &[(11, 9)])];
    book.add(again).await.expect("added");
    drop(book);
    let book = Book::open(&dir.path().join("usage.db")).expect("opened again");
    let row = |hour, tenant: &str, sandbox: &str, ms| (hour, tenant.into(), sandbox.into(), ms);
    let hours = [row(10, "a", "x", 5), row(11, "a", "x", 7), row(11, "a", "y", 7)];
    let hours = [&hours[..], &[row(11, "b", "z", 9)]].concat();
    assert_eq!(told(&book, By::Hour).await, hours);
    let sandboxes = [row(0, "a", "x", 12), row(0, "a", "y", 7), row(0, "b", "z", 9)];
    assert_eq!(told(&book, By::Sandbox).await, sandboxes);
    assert_eq!(told(&book, By::Tenant).await, [row(0, "a", "", 19), row(0, "b", "", 9)]);
    let peak = book.used(&ask(By::Tenant)).await.expect("read").expect("few");
    assert_eq!(peak[0].amounts.resident_peak_mib, 7, "the peak is no sum");
    let one = Query { tenant: Some("b".parse().expect("name")), from: 11, to: 12, ..ask(By::Hour) };
    assert_eq!(book.used(&one).await.expect("read").expect("few").len(), 1);
    let few = Query { most: 3, ..ask(By::Hour) };
    assert_eq!(book.used(&few).await.expect("read"), None, "told to ask for less");
}

/// Promise 67. A sandbox and a later one of its name.
#[tokio::test]
async fn an_account_is_closed_by_its_own_end_only() {
    let (_dir, book) = open();
    book.add(vec![entry(1, "a", "x", &[]), entry(2, "a", "x", &[])]).await.expect("added");
    let closed = Entry { mark: None, ..entry(1, "a", "x", &[(9, 4)]) };
    book.add(vec![closed]).await.expect("added");
    let opened = book.open_accounts().await.expect("read");
    assert_eq!(opened.values().map(|(_, mark)| mark).collect::<Vec<_>>(), [&mark()]);
    book.close_others(vec!["y".parse().expect("name")]).await.expect("closed");
    assert_eq!(book.open_accounts().await.expect("read").len(), 0);
    assert_eq!(told(&book, By::Sandbox).await.len(), 1, "what was used stays");
}

/// Promise 67.
#[tokio::test]
async fn the_largest_destinations_are_told_and_the_others_together_to_the_last_byte() {
    let (_dir, book) = open();
    let many = 3 * PLACES as u64;
    for round in 0..2 {
        let mut entry = entry(1, "a", "x", &[(10, 1)]);
        let owed = entry.hours.get_mut(&10).expect("there");
        for n in 1..=many {
            owed.places.insert(format!("h{n:03}").into(), (n, 1));
            owed.amounts.bytes_out += n;
            owed.amounts.bytes_in += 1;
        }
        book.add(vec![entry]).await.expect("added");
        let rows = book.used(&ask(By::Sandbox)).await.expect("read").expect("few");
        let [used] = &rows[..] else { panic!("one") };
        assert_eq!(used.destinations.len(), PLACES + 1);
        let largest = used.destinations.first().expect("there");
        assert_eq!(largest.to.as_deref(), Some(&*format!("h{many:03}")));
        assert_eq!(largest.bytes_out, many * (round + 1));
        let sum: u64 = used.destinations.iter().map(|one| one.bytes_out).sum();
        assert_eq!(sum, used.amounts.bytes_out);
        assert_eq!(used.destinations.last().expect("there").to, None);
    }
}

/// Promise 67.
#[tokio::test]
async fn a_tenant_that_fills_the_book_loses_its_own_detail_and_nobody_a_sum() {
    let (_dir, book) = open();
    for hour in 0..20 {
        let few = entry(1, "small", "x", &[(hour + 100, 1)]);
        let many = (0..50).map(|n| entry(n + 2, "loud", &format!("s{n}"), &[(hour + 100, 1)]));
        book.add(many.chain([few]).collect()).await.expect("added");
    }
    book.trim(0, 300).await.expect("trimmed");
    let hours = told(&book, By::Hour).await;
    let of = |whose: &'static str| hours.iter().filter(move |(_, tenant, ..)| tenant == whose);
    assert!(of("small").all(|(_, _, sandbox, _)| sandbox == "x"), "its detail is there");
    assert!(hours.len() <= 300 + 20, "{}", hours.len());
    let tenants = told(&book, By::Tenant).await;
    let loud = ("loud".to_owned(), 1000);
    let sums: Vec<_> = tenants.into_iter().map(|(_, tenant, _, ms)| (tenant, ms)).collect();
    assert_eq!(sums, [loud, ("small".to_owned(), 20)]);
    assert!(of("loud").any(|(hour, _, sandbox, _)| *hour == 119 && sandbox == "s49"), "the newest");
    assert!(
        of("loud").any(|(hour, _, sandbox, ms)| *hour == 100 && sandbox.is_empty() && *ms == 50)
    );
    book.trim(119, 300).await.expect("trimmed");
    assert!(told(&book, By::Hour).await.iter().all(|(hour, ..)| *hour == 119), "the old are gone");
}

#[tokio::test]
async fn a_book_of_another_layout_is_refused() {
    let (dir, book) = open();
    drop(book);
    let path = dir.path().join("usage.db");
    rusqlite::Connection::open(&path)
        .expect("open")
        .execute_batch("PRAGMA user_version = 9")
        .expect("set");
    assert!(Book::open(&path).is_err());
}
