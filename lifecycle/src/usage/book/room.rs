//! How the book stays within its bounds: the destinations of an hour, the rows of all, and the age of the
//! oldest. What is given up is detail, of whoever has most of it; sums stay until their time is over.

use std::collections::BTreeMap;

use rusqlite::{Transaction, params};

use crate::error::Error;
use crate::usage::amount::{Amounts, PEAK};
use crate::usage::book::{Book, Key, PLACES, add_to_hour, add_to_place, number};

impl Book {
    /// Gives up the rows of hours before this one, and joins the oldest ones of whoever has most while there
    /// are more than so many rows.
    pub(crate) async fn trim(&self, first: u64, most: u64) -> Result<(), Error> {
        self.run("bounding the accounts", move |book| {
            for table in ["used", "carried"] {
                let old = format!("DELETE FROM {table} WHERE hour < ?1");
                book.execute(&old, [number(first)])?;
            }
            let mut rows = rows(book)?;
            while rows.values().sum::<u64>() > most {
                // Only rows that can be joined: one a tenant and hour stays.
                let largest = rows.iter().max_by_key(|(_, rows)| **rows);
                let Some((tenant, _)) = largest.filter(|(_, rows)| **rows > 0) else { break };
                let tenant = tenant.clone();
                let left = match oldest(book, &tenant)? {
                    None => 0,
                    Some((hour, apart)) => {
                        join(book, &tenant, hour)?;
                        rows.get(&tenant).copied().unwrap_or_default().saturating_sub(apart)
                    }
                };
                rows.insert(tenant, left);
            }
            Ok(())
        })
        .await
    }
}

/// Rows by tenant that tell sandboxes and destinations apart.
fn rows(book: &Transaction<'_>) -> rusqlite::Result<BTreeMap<String, u64>> {
    let mut rows = BTreeMap::new();
    for table in ["used", "carried"] {
        let count =
            format!("SELECT tenant, COUNT(*) FROM {table} WHERE sandbox <> '' GROUP BY tenant");
        let mut count = book.prepare(&count)?;
        let counted = count.query_map([], |row| Ok((row.get(0)?, row.get::<_, u64>(1)?)))?;
        for counted in counted {
            let (tenant, more): (String, u64) = counted?;
            *rows.entry(tenant).or_default() += more;
        }
    }
    Ok(rows)
}

/// The oldest hour of a tenant that has such rows, and how many.
fn oldest(book: &Transaction<'_>, tenant: &str) -> rusqlite::Result<Option<(u64, u64)>> {
    let hour: Option<u64> = book.query_row(
        "SELECT MIN(hour) FROM used WHERE tenant = ?1 AND sandbox <> ''",
        [tenant],
        |row| row.get(0),
    )?;
    let Some(hour) = hour else { return Ok(None) };
    let rows = book.query_row(
        "SELECT (SELECT COUNT(*) FROM used WHERE tenant = ?1 AND hour = ?2 AND sandbox <> '')
              + (SELECT COUNT(*) FROM carried WHERE tenant = ?1 AND hour = ?2 AND sandbox <> '')",
        params![tenant, number(hour)],
        |row| row.get(0),
    )?;
    Ok(Some((hour, rows)))
}

/// Makes one row of all of a tenant's for an hour.
fn join(book: &Transaction<'_>, tenant: &str, hour: u64) -> rusqlite::Result<()> {
    let sums: Vec<String> = Amounts::COLUMNS
        .iter()
        .map(|name| if *name == PEAK { format!("MAX({name})") } else { format!("SUM({name})") })
        .collect();
    let sums = format!(
        "SELECT {} FROM used WHERE tenant = ?1 AND hour = ?2 AND sandbox <> ''",
        sums.join(", ")
    );
    let sums: Vec<u64> = book.query_row(&sums, params![tenant, number(hour)], |row| {
        (0..Amounts::COLUMNS.len()).map(|at| row.get(at)).collect()
    })?;
    let mut values: Vec<rusqlite::types::Value> =
        vec![tenant.to_owned().into(), number(hour), String::new().into()];
    values.extend(sums.into_iter().map(number));
    book.execute(&add_to_hour(), rusqlite::params_from_iter(values))?;
    for table in ["used", "carried"] {
        let joined =
            format!("DELETE FROM {table} WHERE tenant = ?1 AND hour = ?2 AND sandbox <> ''");
        book.execute(&joined, params![tenant, number(hour)])?;
    }
    Ok(())
}

/// Keeps the destinations with most bytes apart; the others count together.
pub(super) fn keep_the_largest(book: &Transaction<'_>, key: Key<'_>) -> rusqlite::Result<()> {
    let (tenant, hour, sandbox) = key;
    let mut smallest = book.prepare_cached(
        "SELECT place, bytes_out, bytes_in FROM carried
         WHERE tenant = ?1 AND hour = ?2 AND sandbox = ?3 AND place <> ''
         ORDER BY bytes_out + bytes_in DESC, place LIMIT -1 OFFSET ?4",
    )?;
    let found = smallest.query_map(
        params![tenant, number(hour), sandbox, i64::try_from(PLACES).unwrap_or(i64::MAX)],
        |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)),
    )?;
    let found: Vec<(String, u64, u64)> = found.collect::<rusqlite::Result<_>>()?;
    for (place, out, back) in found {
        book.prepare_cached(
            "DELETE FROM carried WHERE tenant = ?1 AND hour = ?2 AND sandbox = ?3 AND place = ?4",
        )?
        .execute(params![tenant, number(hour), sandbox, place])?;
        add_to_place(book, key, "", (out, back))?;
    }
    Ok(())
}
