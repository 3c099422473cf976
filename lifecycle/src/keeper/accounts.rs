//! What sandboxes have used, for who pays. Only asks the ledger; never counts anything itself.

use crate::error::Error;
use crate::keeper::Keeper;
use crate::usage::{Query, Used};

impl Keeper {
    /// What was used until now, those that are gone among them, in the order of hours, tenants and sandboxes;
    /// none where there would be more rows than are asked for.
    ///
    /// # Errors
    /// When the accounts cannot be written or read.
    pub async fn used(&self, query: &Query) -> Result<Option<Vec<Used>>, Error> {
        self.0.ledger.used(query).await
    }
}
