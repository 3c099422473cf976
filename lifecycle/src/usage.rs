//! Who pays: what each sandbox used of time, processors, memory, disk while asleep, and of the way out.
//!
//! The account of a sandbox is a value (`account`), the book of all is on disk (`book`), and the ledger
//! (here) feeds the one and writes the other, every few seconds and whenever a sandbox turns. Never holds up
//! a sandbox: a book that cannot be written is owed.

mod tab;
mod book;
mod account;
mod amount;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use egress::Router;
use policy::{SandboxName, TenantName};
use tokio::sync::Notify;
use tokio::time::interval;

use crate::config::UsageBounds;
use crate::error::{Error, chain};
use crate::state::State;
use crate::store::Record;
use crate::threads::{aside, locked};
use crate::usage::account::HOUR;
use crate::usage::book::{Book, Opened};
pub(crate) use crate::usage::tab::Tab;
use crate::usage::tab::now;

pub use crate::usage::amount::Amounts;

/// How often those that run are looked at.
const LOOK: Duration = Duration::from_secs(1);
/// Looks from one writing of what is owed to the next: so much a daemon that is killed loses at most.
const LOOKS: u32 = 5;

/// What is asked of the accounts.
#[derive(Clone, Debug)]
pub struct Query {
    /// Of this tenant only.
    pub tenant: Option<TenantName>,
    /// Of sandboxes of this name only, there or not.
    pub sandbox: Option<SandboxName>,
    /// The first hour since 1970, and the first one that is not meant any more.
    pub from: u64,
    /// See there.
    pub to: u64,
    /// What there is a row for.
    pub by: By,
    /// Whether bytes are told by destination, too.
    pub destinations: bool,
    /// As many rows as there may be.
    pub most: usize,
}

/// What there is a row for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum By {
    /// Each sandbox.
    #[default]
    Sandbox,
    /// Each tenant.
    Tenant,
    /// Each sandbox and hour.
    Hour,
}

/// What was used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Used {
    /// Its hour since 1970, where it is of one.
    pub hour: Option<u64>,
    /// Whose.
    pub tenant: String,
    /// By which sandbox; none: by several.
    pub sandbox: Option<String>,
    /// How much.
    pub amounts: Amounts,
    /// Bytes by destination, the most first, if that was asked for. Add up to those of `amounts`.
    pub destinations: Vec<To>,
}

/// Bytes to and from one destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct To {
    /// Its name, or its address; none: all that are not told apart.
    pub to: Option<String>,
    /// Payload bytes to it.
    pub bytes_out: u64,
    /// Payload bytes from it.
    pub bytes_in: u64,
}

/// The accounts of this node. Clones are the same.
#[derive(Clone, Debug)]
pub(crate) struct Ledger(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    book: Book,
    bounds: UsageBounds,
    router: Router,
    /// Of earlier daemons, until their sandboxes are taken up.
    opened: Mutex<BTreeMap<SandboxName, Opened>>,
    /// By the incarnation with which they began.
    tabs: Mutex<BTreeMap<u64, Tab>>,
    turned: Arc<Notify>,
    /// What has been written since the daemon started.
    totals: Mutex<BTreeMap<TenantName, Amounts>>,
    /// One writing at a time.
    writing: tokio::sync::Mutex<()>,
}

impl Ledger {
    /// Opens the book.
    pub(crate) async fn open(
        path: &Path,
        bounds: UsageBounds,
        router: Router,
    ) -> Result<Self, Error> {
        let book = Book::open(path)?;
        let opened = book.open_accounts().await?;
        Ok(Self(Arc::new(Shared {
            book,
            bounds,
            router,
            opened: Mutex::new(opened),
            tabs: Mutex::default(),
            turned: Arc::default(),
            totals: Mutex::default(),
            writing: tokio::sync::Mutex::default(),
        })))
    }

    /// The account of a sandbox: goes on with that of an earlier daemon, or begins.
    pub(crate) fn tab(&self, record: &Record, state: State, files: [PathBuf; 2]) -> Tab {
        let opened = locked(&self.0.opened).remove(&record.name);
        let opened = opened.filter(|(tenant, _)| *tenant == record.tenant);
        let tab = Tab::new(record, state, opened.map(|(_, mark)| mark), files, &self.0.turned);
        locked(&self.0.tabs).insert(record.incarnation, tab.clone());
        tab
    }

    /// All sandboxes of earlier daemons are taken up: who is left among the accounts is not there.
    pub(crate) async fn settled(&self) {
        let left = std::mem::take(&mut *locked(&self.0.opened));
        if left.is_empty() {
            return;
        }
        let there = self.tabs(None).iter().map(Tab::name).collect();
        if let Err(error) = self.0.book.close_others(there).await {
            tracing::warn!(error = chain(&error), "accounts not closed");
        }
    }

    /// Looks and writes until it is dropped.
    pub(crate) async fn run(self) {
        let mut look = interval(LOOK);
        let (mut looks, mut trimmed, mut failing) = (0_u32, None, false);
        loop {
            tokio::select! {
                _ = look.tick() => {
                    looks = looks.wrapping_add(1);
                    self.look(None, looks.is_multiple_of(LOOKS)).await;
                    if !looks.is_multiple_of(LOOKS) {
                        continue;
                    }
                }
                // Looked at as soon as it runs: what its slot counts is known from then on.
                () = self.0.turned.notified() => self.look(None, false).await,
            }
            let written = self.write(None, false).await;
            if let Err(error) = &written
                && !failing
            {
                tracing::error!(error = chain(error), "accounts not written; they are owed");
            }
            failing = written.is_err();
            let hour = now().wall / HOUR;
            if trimmed != Some(hour) && !failing {
                trimmed = self.trim(hour).await.then_some(hour);
            }
        }
    }

    /// Takes a last look and writes all that is owed.
    pub(crate) async fn close(&self) {
        self.look(None, true).await;
        if let Err(error) = self.write(None, true).await {
            tracing::error!(error = chain(&error), "accounts not written");
        }
    }

    /// What was used until now; none where there would be more rows than may be.
    pub(crate) async fn used(&self, query: &Query) -> Result<Option<Vec<Used>>, Error> {
        self.look(query.tenant.as_ref(), true).await;
        self.write(query.tenant.as_ref(), true).await?;
        self.0.book.used(query).await
    }

    /// What each tenant's sandboxes have used since the daemon started, as far as it is written: never less
    /// than it was.
    pub(crate) async fn totals(&self) -> BTreeMap<TenantName, Amounts> {
        self.look(None, true).await;
        if let Err(error) = self.write(None, true).await {
            tracing::debug!(error = chain(&error), "accounts not written; they are owed");
        }
        locked(&self.0.totals).clone()
    }

    fn tabs(&self, tenant: Option<&TenantName>) -> Vec<Tab> {
        let tabs = locked(&self.0.tabs);
        tabs.values().filter(|tab| tenant.is_none_or(|of| tab.is_of(of))).cloned().collect()
    }

    /// Looks at the processes, the meters and, if so, the files of those asleep.
    async fn look(&self, tenant: Option<&TenantName>, files: bool) {
        let (tabs, router) = (self.tabs(tenant), self.0.router.clone());
        // What is read are files.
        let looked = aside(move || tabs.iter().for_each(|tab| tab.look(&router, files)));
        if let Err(error) = looked.await {
            tracing::error!(error = chain(&error), "accounts not looked at");
        }
    }

    /// Writes what is owed: of all, or of those for which it is time. What is not written is owed again.
    async fn write(&self, tenant: Option<&TenantName>, all: bool) -> Result<(), Error> {
        let _writing = self.0.writing.lock().await;
        // The oldest first: of two of one name the later one is noted.
        let due: Vec<Tab> =
            self.tabs(tenant).into_iter().filter(|tab| all || tab.is_due()).collect();
        let entries: Vec<_> = due.iter().map(Tab::take).collect();
        if entries.is_empty() {
            return Ok(());
        }
        // To its end, whoever waits for it: what is written must not be owed again.
        let (book, writing) = (self.0.book.clone(), entries.clone());
        let added = tokio::spawn(async move { book.add(writing).await });
        let added = added.await.map_err(|_| Error::Panicked).flatten();
        for (tab, entry) in due.iter().zip(entries) {
            if added.is_ok() {
                let mut totals = locked(&self.0.totals);
                let total = totals.entry(entry.tenant.clone()).or_default();
                entry.hours.values().for_each(|owed| total.add(&owed.amounts));
            }
            match &added {
                Ok(()) if entry.mark.is_none() => _ = locked(&self.0.tabs).remove(&entry.account),
                Ok(()) => {}
                Err(_) => tab.owe_again(entry),
            }
        }
        added
    }

    async fn trim(&self, hour: u64) -> bool {
        let UsageBounds { keep, rows } = self.0.bounds;
        let first = hour.saturating_sub(keep.as_secs() / 3600);
        let trimmed = self.0.book.trim(first, rows).await;
        if let Err(error) = &trimmed {
            tracing::error!(error = chain(error), "accounts not bounded");
        }
        trimmed.is_ok()
    }
}
