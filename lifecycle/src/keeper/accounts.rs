//! What sandboxes have used, for who pays. Only asks the ledger; never counts anything itself.

use std::collections::BTreeMap;

use policy::TenantName;

use crate::error::Error;
use crate::keeper::Keeper;
use crate::usage::{Amounts, Query, Used};

impl Keeper {
    /// What was used until now, those that are gone among them, in the order of hours, tenants and sandboxes;
    /// none where there would be more rows than are asked for.
    ///
    /// # Errors
    /// When the accounts cannot be written or read.
    pub async fn used(&self, query: &Query) -> Result<Option<Vec<Used>>, Error> {
        self.0.ledger.used(query).await
    }

    /// What each tenant's sandboxes have used since the daemon started, those that are gone among them: what
    /// only grows, but for the peak.
    pub async fn totals(&self) -> BTreeMap<TenantName, Amounts> {
        self.0.ledger.totals().await
    }
}
