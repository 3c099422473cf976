//! Who asks about the past at once. Each question reads files, and its answer is held until whoever
//! asked has taken it: a tenant takes neither the turns nor the memory from others, and none takes
//! the operator's.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use policy::TenantName;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Questions of one tenant whose answers it has not taken to their end.
pub const OPEN: usize = 8;
/// Of these, those for which files are read at the same time.
const READING: usize = 2;
/// The same, of all tenants together; and of the operator.
const READING_ALL: usize = 4;

/// The turns at reading.
#[derive(Debug)]
pub(crate) struct Readers {
    operator: Arc<Semaphore>,
    tenants: Arc<Semaphore>,
    /// Of each tenant that ever asked: those have tokens, so they are few.
    each: Mutex<HashMap<TenantName, Each>>,
}

#[derive(Clone, Debug)]
struct Each {
    open: Arc<Semaphore>,
    reading: Arc<Semaphore>,
}

/// The right to one question. Given back when its answer is.
#[derive(Debug)]
pub struct Reader {
    /// Taken one after another, the scarcest last.
    turns: Vec<Arc<Semaphore>>,
    open: Option<OwnedSemaphorePermit>,
}

impl Readers {
    pub(crate) fn new() -> Self {
        let turns = || Arc::new(Semaphore::new(READING_ALL));
        Self { operator: turns(), tenants: turns(), each: Mutex::default() }
    }

    /// One more question of this tenant, or of the operator; none if it has as many open as it may.
    pub(crate) fn admit(&self, whose: Option<&TenantName>) -> Option<Reader> {
        let Some(tenant) = whose else {
            return Some(Reader { turns: vec![Arc::clone(&self.operator)], open: None });
        };
        let mut each = self.each.lock().unwrap_or_else(PoisonError::into_inner);
        let each = each.entry(tenant.clone()).or_insert_with(|| Each {
            open: Arc::new(Semaphore::new(OPEN)),
            reading: Arc::new(Semaphore::new(READING)),
        });
        let open = Arc::clone(&each.open).try_acquire_owned().ok()?;
        let turns = vec![Arc::clone(&each.reading), Arc::clone(&self.tenants)];
        Some(Reader { turns, open: Some(open) })
    }
}

impl Reader {
    /// Whether a tenant asks, and not the operator.
    pub(crate) fn is_tenant(&self) -> bool {
        self.open.is_some()
    }

    /// Waits until its files may be read, and as long as what it gets is held.
    pub(crate) async fn turn(&self) -> io::Result<Vec<OwnedSemaphorePermit>> {
        let mut taken = Vec::new();
        for turn in &self.turns {
            taken.push(Arc::clone(turn).acquire_owned().await.map_err(io::Error::other)?);
        }
        Ok(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenant(name: &str) -> TenantName {
        name.parse().expect("a name")
    }

    #[tokio::test]
    async fn a_tenant_takes_not_all_turns_and_waits_for_its_own_only() {
        let readers = Readers::new();
        let turns_of = async |whose: Option<&TenantName>| {
            let mut taken = Vec::new();
            while let Some(reader) = readers.admit(whose) {
                let turn =
                    tokio::time::timeout(std::time::Duration::from_millis(50), reader.turn());
                let Ok(turn) = turn.await else { break };
                taken.push((reader, turn.expect("open")));
            }
            taken
        };
        let (loud, other) = (tenant("loud"), tenant("other"));
        let taken = turns_of(Some(&loud)).await;
        assert_eq!(taken.len(), READING);
        let others = turns_of(Some(&other)).await;
        assert_eq!(others.len(), READING, "another tenant's");
        assert_eq!(turns_of(None).await.len(), READING_ALL, "the operator's");
        drop(others);
        let waiting = readers.admit(Some(&loud)).expect("admitted");
        assert!(readers.tenants.available_permits() > 0);
        drop(taken);
        waiting.turn().await.expect("its turn");
    }

    #[test]
    fn a_tenant_has_so_many_questions_open_and_the_operator_as_many_as_it_likes() {
        let readers = Readers::new();
        let loud = tenant("loud");
        let mut open: Vec<_> = (0..OPEN).map_while(|_| readers.admit(Some(&loud))).collect();
        assert_eq!(open.len(), OPEN);
        assert!(readers.admit(Some(&loud)).is_none());
        assert!(readers.admit(Some(&tenant("other"))).is_some());
        assert_eq!((0..100).filter_map(|_| readers.admit(None)).count(), 100);
        open.pop();
        assert!(readers.admit(Some(&loud)).is_some());
    }
}
