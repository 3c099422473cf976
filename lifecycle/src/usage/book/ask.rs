//! What the book is asked: sums by sandbox, by tenant, or hour by hour, over a span of whole hours. Never
//! changes the book.

use rusqlite::Row;
use rusqlite::types::Value;

use crate::error::Error;
use crate::usage::amount::{Amounts, PEAK};
use crate::usage::book::{Book, PLACES, number};
use crate::usage::{By, Query, To, Used};

/// The most rows of destinations that one question reads.
const MOST_PLACES: usize = 200_000;

impl Book {
    /// What was used, in the order of hours, tenants and sandboxes; none where there would be more rows than
    /// are asked for.
    pub(crate) async fn used(&self, query: &Query) -> Result<Option<Vec<Used>>, Error> {
        let query = query.clone();
        self.run("reading the accounts", move |book| {
            let (filter, values) = filter(&query);
            let keys = keys(query.by);
            let sums: Vec<String> = Amounts::COLUMNS
                .iter()
                .map(|name| match *name {
                    PEAK => format!("MAX({name})"),
                    name => format!("SUM({name})"),
                })
                .collect();
            let sums = sums.join(", ");
            let ask = format!(
                "SELECT {keys}, {sums} FROM used WHERE {filter} GROUP BY 1, 2, 3 ORDER BY 1, 2, 3 LIMIT {}",
                query.most.saturating_add(1)
            );
            let mut ask = book.prepare(&ask)?;
            let rows = ask.query_map(rusqlite::params_from_iter(values.clone()), |row| {
                let amounts = (3..3 + Amounts::COLUMNS.len()).map(|at| row.get(at));
                let amounts: Vec<u64> = amounts.collect::<rusqlite::Result<_>>()?;
                let (amounts, places) = (Amounts::from_values(amounts), Vec::new());
                Ok((key(row)?, amounts, places))
            })?;
            let mut rows: Vec<(Key, Amounts, Vec<To>)> = rows.collect::<rusqlite::Result<_>>()?;
            if rows.len() > query.most {
                return Ok(None);
            }
            if query.destinations {
                let ask = format!(
                    "SELECT {keys}, place, SUM(bytes_out), SUM(bytes_in) FROM carried WHERE {filter} \
                     GROUP BY 1, 2, 3, 4 LIMIT {}",
                    MOST_PLACES + 1
                );
                let mut ask = book.prepare(&ask)?;
                let mut found = ask.query(rusqlite::params_from_iter(values))?;
                let mut seen = 0;
                while let Some(row) = found.next()? {
                    seen += 1;
                    if seen > MOST_PLACES {
                        return Ok(None);
                    }
                    let to: String = row.get(3)?;
                    let to = To {
                        to: Some(to).filter(|to| !to.is_empty()),
                        bytes_out: row.get(4)?,
                        bytes_in: row.get(5)?,
                    };
                    let key = key(row)?;
                    if let Ok(at) = rows.binary_search_by(|(other, ..)| other.cmp(&key))
                        && let Some((_, _, places)) = rows.get_mut(at)
                    {
                        places.push(to);
                    }
                }
            }
            Ok(Some(rows.into_iter().map(Used::from).collect()))
        })
        .await
    }
}

/// Hour, tenant, sandbox; those that are summed over are 0 or empty.
type Key = (u64, String, String);

fn key(row: &Row<'_>) -> rusqlite::Result<Key> {
    Ok((row.get(0)?, row.get(1)?, row.get(2)?))
}

const fn keys(by: By) -> &'static str {
    match by {
        By::Sandbox => "0, tenant, sandbox",
        By::Tenant => "0, tenant, ''",
        By::Hour => "hour, tenant, sandbox",
    }
}

fn filter(query: &Query) -> (String, Vec<Value>) {
    let mut filter = "hour >= ? AND hour < ?".to_owned();
    let mut values = vec![number(query.from), number(query.to)];
    if let Some(tenant) = &query.tenant {
        filter.push_str(" AND tenant = ?");
        values.push(tenant.as_str().to_owned().into());
    }
    if let Some(sandbox) = &query.sandbox {
        filter.push_str(" AND sandbox = ?");
        values.push(sandbox.as_str().to_owned().into());
    }
    (filter, values)
}

impl From<(Key, Amounts, Vec<To>)> for Used {
    /// The largest destinations first; those beyond the bound of an hour, and those that were joined, last.
    fn from(((hour, tenant, sandbox), amounts, mut places): (Key, Amounts, Vec<To>)) -> Self {
        places.sort_by_key(|one| {
            (one.to.is_none(), std::cmp::Reverse(one.bytes_out.saturating_add(one.bytes_in)))
        });
        let named = places.iter().take_while(|one| one.to.is_some()).count();
        let others = places.split_off(named.min(PLACES));
        let sum = |of: fn(&To) -> u64| places.iter().map(of).sum::<u64>();
        // Whatever is not told apart, for whatever reason: the sums are those of the amounts.
        let rest = To {
            to: None,
            bytes_out: amounts.bytes_out.saturating_sub(sum(|one| one.bytes_out)),
            bytes_in: amounts.bytes_in.saturating_sub(sum(|one| one.bytes_in)),
        };
        if !(places.is_empty() && others.is_empty()) && (rest.bytes_out > 0 || rest.bytes_in > 0) {
            places.push(rest);
        }
        Self {
            hour: Some(hour).filter(|hour| *hour > 0),
            tenant,
            sandbox: Some(sandbox).filter(|sandbox| !sandbox.is_empty()),
            amounts,
            destinations: places,
        }
    }
}
