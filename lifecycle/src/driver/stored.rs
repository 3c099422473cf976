//! A sandbox's way into the object store and back. While the journal says that the store has it, nothing of it
//! has run since, and what is here beside that is thrown away; so both changes of that are journalled within
//! these two acts, and one that cannot be is none.

use fault::Point;

use crate::driver::Task;
use crate::error::{Error, chain};
use crate::machine::Act;

impl Task {
    /// Puts the files of one that sleeps into the store. None when somebody wanted something of it
    /// meanwhile: it stays here then.
    pub(super) async fn store_away(&mut self) -> Option<Result<(), Error>> {
        let key = match self.store.next_key(&self.record.name).await {
            Ok(key) => key,
            Err(error) => return Some(Err(error)),
        };
        let mut put = None;
        {
            let (vault, files) = (self.vault.clone(), self.acts.hypervisors().files(&self.record));
            let of = serde_json::json!({
                "sandbox": self.record.name,
                "tenant": self.record.tenant,
                "incarnation": self.record.incarnation,
                "memory_mib": self.record.memory_mib,
                "vcpus": self.record.vcpus,
                "driver": self.record.driver,
            });
            let putting = vault.put(&key, of, &files);
            tokio::pin!(putting);
            loop {
                tokio::select! {
                    biased;
                    done = &mut putting => {
                        put = Some(done);
                        break;
                    }
                    Ok(()) = self.end.changed() => {
                        self.heed_end();
                        break;
                    }
                    verb = self.verbs.recv() => {
                        let Some(verb) = verb else { break };
                        self.heed_queued(Some(verb)).await;
                        if self.rest.is_awaited() {
                            break;
                        }
                    }
                    () = self.acts.wanted(&self.record) => {
                        self.rest.want();
                        break;
                    }
                }
            }
        }
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

    /// Gets the files of one that is in the store back. None when somebody wanted it removed meanwhile.
    pub(super) async fn fetch(&mut self) -> Option<Result<(), Error>> {
        let Some(stored) = self.record.stored.clone() else {
            return Some(Err(self.step(Act::Fetch, "it is in no store")));
        };
        if let Err(error) = self.acts.hypervisors().make_way(&self.record).await {
            return Some(Err(self.step(Act::Fetch, error)));
        }
        let got = {
            let (vault, files) =
                (self.vault.clone(), self.acts.hypervisors().files_to_fetch(&self.record));
            let getting = vault.get(&stored, &files);
            tokio::pin!(getting);
            tokio::select! {
                biased;
                done = &mut getting => Some(done),
                Ok(()) = self.end.changed() => None,
            }
        };
        if got.is_none() {
            self.heed_end();
        }
        Some(match got? {
            Ok(()) => self.take_back(stored).await,
            Err(error) => Err(self.step(Act::Fetch, error)),
        })
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
        self.forget_key(stored.key);
        Ok(())
    }

    /// Has a key forgotten, waited for by nobody: what fails is found by the next daemon.
    pub(super) fn forget_key(&self, key: String) {
        let vault = self.vault.clone();
        tokio::spawn(async move {
            if let Err(error) = vault.forget(&key).await {
                tracing::warn!(key, error = chain(&error), "not forgotten by the object store");
            }
        });
    }

    fn step(&self, act: Act, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
        let name = self.record.name.clone();
        Error::Step { doing: act.doing(), name, source: source.into() }
    }
}
