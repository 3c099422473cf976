//! The numbers that fence, revisions and incarnations: each larger than all before it. Never says how many
//! there were: tenants see them.

use std::time::UNIX_EPOCH;

use rusqlite::{Transaction, params};

/// The next number of a counter: the milliseconds since 1970, or one more than the last one if that is
/// larger. Two of them say how much time has passed, and not how many others had one in between.
pub(super) fn advance(store: &Transaction<'_>, counter: &str) -> rusqlite::Result<u64> {
    let since = fault::wall_clock().duration_since(UNIX_EPOCH).unwrap_or_default();
    store.query_row(
        "UPDATE counter SET value = max(value + 1, ?2) WHERE name = ?1 RETURNING value",
        params![counter, i64::try_from(since.as_millis()).unwrap_or_default()],
        |row| row.get(0),
    )
}

#[cfg(test)]
mod tests {
    use rusqlite::Connection;

    use super::*;

    /// Promise 22.
    #[test]
    fn numbers_follow_the_clock_and_grow_though_it_is_set_back() {
        let mut table = Connection::open_in_memory().unwrap();
        let sql =
            "CREATE TABLE counter (name TEXT, value INTEGER); INSERT INTO counter VALUES ('n', 7)";
        table.execute_batch(sql).unwrap();
        let mut next = |set: Option<u64>| {
            let store = table.transaction().unwrap();
            if let Some(value) = set {
                store.execute("UPDATE counter SET value = ?1", [value]).unwrap();
            }
            let next = advance(&store, "n").unwrap();
            store.commit().unwrap();
            next
        };
        let millis = || {
            let since = fault::wall_clock().duration_since(UNIX_EPOCH).unwrap();
            u64::try_from(since.as_millis()).unwrap()
        };
        let begun = millis();
        let first = next(None);
        assert!((begun..=millis()).contains(&first), "{first}");
        let ahead = first + 3_600_000;
        assert_eq!(next(Some(ahead)), ahead + 1);
        assert_eq!(next(None), ahead + 2);
    }
}
