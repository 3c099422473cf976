//! A sandbox's way into the object store and back. While the journal says that the store has it, nothing of it
//! has run since, and what is here beside that is thrown away; so both changes of that are journalled within
//! these two acts, and one that cannot be is none.

use std::sync::Arc;

use egress::Wanted;
use fault::Point;
use policy::SandboxName;
use vault::Vault;

use crate::acts::Hypervisors;
use crate::driver::Task;
use crate::error::{Error, chain};
use crate::machine::Act;
use crate::store::Store;

impl Task {
    /// Puts the files of one that sleeps into the store. None when somebody wanted something of it meanwhile, or
    /// its alarm or its end has come: it stays here then.
    pub(super) async fn store_away(&mut self) -> Option<Result<(), Error>> {
        let key = match self.store.next_key(&self.record.name).await {
            Ok(key) => key,
            Err(error) => return Some(Err(error)),
        };
        let put = self.put(&key, false).await;
        match put {
            None => {
                self.forget_key(key);
                self.machine.stay();
                None
            }
            Some(Err(error)) => {
                self.forget_key(key);
                Some(Err(self.step(Act::Store, error)))
            }
            Some(Ok(stored)) => {
                self.record.stored = Some(stored);
                let noted = self.note().await;
                if noted.is_err() {
                    self.record.stored = None;
                    self.forget_key(key);
                }
                Some(noted)
            }
        }
    }

    /// Puts its files into the store under this key, when its turn has come among all that are. None when
    /// somebody wanted it removed meanwhile, or its time was over; or, unless it goes on `anyway`, when somebody
    /// wanted something of it, or its alarm has come: that is seen to where it rests.
    pub(super) async fn put(
        &mut self,
        key: &str,
        anyway: bool,
    ) -> Option<Result<vault::Stored, vault::Error>> {
        let (vault, files) = (self.vault.clone(), self.acts.hypervisors().files(&self.record));
        let of = serde_json::json!({
            "sandbox": self.record.name,
            "tenant": self.record.tenant,
            "incarnation": self.record.incarnation,
            "memory_mib": self.record.memory_mib,
            "vcpus": self.record.vcpus,
            "driver": self.record.driver,
        });
        let place = self.puts.ask(&self.record.tenant);
        let putting = async {
            // Turns do not end before those who wait for them.
            let _turn = place.await;
            vault.put(key, of, &files).await
        };
        tokio::pin!(putting);
        loop {
            tokio::select! {
                biased;
                done = &mut putting => return Some(done),
                Ok(()) = self.end.changed() => {
                    self.heed_end();
                    return None;
                }
                verb = self.verbs.recv() => {
                    self.heed_queued(Some(verb?)).await;
                    if !anyway && self.rest.is_awaited() {
                        return None;
                    }
                }
                by = self.acts.wanted(&self.record, Wanted::Data), if !anyway => {
                    self.rest.want(by);
                    return None;
                }
                () = self.rest.due(), if !anyway => return None,
                () = self.rest.ends() => {
                    self.look(self.machine.state());
                    return None;
                }
            }
        }
    }

    /// Gets the files of one that is in the store back. None when somebody wanted it removed meanwhile, or its
    /// time was over.
    pub(super) async fn fetch(&mut self) -> Option<Result<(), Error>> {
        let Some(stored) = self.record.stored.clone() else {
            return Some(Err(self.step(Act::Fetch, "it is in no store")));
        };
        if let Err(error) = self.acts.hypervisors().make_way(&self.record, &stored.key).await {
            return Some(Err(self.step(Act::Fetch, error)));
        }
        let got = {
            let files = self.acts.hypervisors().files_to_fetch(&self.record);
            let (vault, fetches, name) =
                (self.vault.clone(), self.rest.fetches.clone(), self.record.name.clone());
            let failed = |source: vault::Error| {
                let (doing, name) = (Act::Fetch.doing(), name.clone());
                Error::Step { doing, name, source: source.into() }
            };
            let getting = async {
                let needs = vault.needs(&stored, &files).await.map_err(failed)?;
                let paths = files.iter().map(|file| file.path.clone());
                let _room = fetches.hold(paths.zip(needs).collect()).await?;
                vault.get(&stored, &files).await.map_err(failed)
            };
            self.unless_it_ends(getting).await
        };
        Some(match got? {
            Ok(()) => {
                let taken = self.take_back(stored).await;
                if taken.is_ok() {
                    self.rest.fetched();
                }
                taken
            }
            Err(error) => Err(error),
        })
    }

    /// What this comes to; none when somebody wants the sandbox removed first, or its time is over. What else
    /// is wanted of it is taken up meanwhile.
    pub(super) async fn unless_it_ends<T>(&mut self, doing: impl Future<Output = T>) -> Option<T> {
        tokio::pin!(doing);
        loop {
            tokio::select! {
                biased;
                done = &mut doing => return Some(done),
                Ok(()) = self.end.changed() => {
                    self.heed_end();
                    return None;
                }
                // It may be given more time before that is over.
                Some(verb) = self.verbs.recv() => self.heed_queued(Some(verb)).await,
                () = self.rest.ends() => {
                    self.look(self.machine.state());
                    return None;
                }
            }
        }
    }

    /// What was got back is what it is, from here on, and the store's copy is nobody's.
    async fn take_back(&mut self, stored: vault::Stored) -> Result<(), Error> {
        let saved = self.acts.hypervisors().restore(&self.record).await;
        let saved = saved.map_err(|error| self.step(Act::Fetch, error))?;
        fault::at(Point::FetchedNamed);
        (self.record.saved, self.record.stored) = (Some(saved), None);
        if let Err(error) = self.note().await {
            (self.record.saved, self.record.stored) = (None, Some(stored));
            return Err(error);
        }
        fault::at(Point::FetchNoted);
        self.release_key(stored.key);
        Ok(())
    }

    /// This sandbox has a key no more: it is forgotten if nobody else has it, such as a snapshot. What fails is
    /// found by the next daemon.
    pub(super) fn release_key(&self, key: String) {
        let (vault, hypervisors) = (self.vault.clone(), self.acts.hypervisors_shared());
        let (store, name) = (self.store.clone(), Some(self.record.name.clone()));
        tokio::spawn(release(vault, store, hypervisors, key, name));
    }

    /// Has a key forgotten that nobody ever had, waited for by nobody: what fails is found by the next daemon.
    pub(super) fn forget_key(&self, key: String) {
        let vault = self.vault.clone();
        tokio::spawn(async move {
            if let Err(error) = vault.forget(&key).await {
                tracing::warn!(key, error = chain(&error), "not forgotten by the object store");
            }
        });
    }

    pub(super) fn step(
        &self,
        act: Act,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Error {
        let name = self.record.name.clone();
        Error::Step { doing: act.doing(), name, source: source.into() }
    }
}

/// Forgets a key if nobody has it, other than this sandbox.
pub(crate) async fn release(
    vault: Vault,
    store: Store,
    hypervisors: Arc<Hypervisors>,
    key: String,
    but: Option<SandboxName>,
) {
    match store.is_held(key.clone(), but).await {
        Ok(false) => {}
        Ok(true) => return,
        Err(error) => {
            return tracing::warn!(key, error = chain(&error), "not known who has a key");
        }
    }
    hypervisors.drop_image(&key).await;
    if let Err(error) = vault.forget(&key).await {
        tracing::warn!(key, error = chain(&error), "not forgotten by the object store");
    }
}
