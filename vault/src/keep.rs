//! The verbs: keep files under a key, give them back, forget them, and say which keys there are.
//!
//! The list of the files is written last and forgotten first: a key without it is none. What is kept is
//! whole when `put` returns, and not before.

use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use fault::Point;
use futures_util::StreamExt;
use object_store::path::Path as Object;
use object_store::{ObjectStore, ObjectStoreExt};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::carry::{self, Carried, hex, store_error};
use crate::error::Error;
use crate::place::Location;

/// The name of the list, and the most bytes it may have.
const LIST: &str = "manifest.json";
const MOST: u64 = 1 << 20;
/// The most objects that there are under one key, under all, and the longest key of ours.
const OBJECTS: usize = 64;
const LISTED: usize = 1 << 16;
const LONGEST_KEY: usize = 128;
/// How S3 says that a bucket is there and an object is not.
const NO_SUCH_KEY: &str = "<Code>NoSuchKey</Code>";
/// Of the layout of lists and objects.
const VERSION: u16 = 1;

/// A file to keep or to get, and what it is called in the store.
#[derive(Clone, Debug)]
pub struct File {
    /// One of a key's own names, such as `memory`.
    pub name: &'static str,
    /// Where it is on this node.
    pub path: PathBuf,
}

/// Files that are kept, as their owner notes it: enough to get them back, and to know that they are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stored {
    /// Under which key.
    pub key: String,
    /// In which store.
    pub url: String,
    /// Bytes there.
    pub bytes: u64,
    /// SHA-256 of the list, in hexadecimal digits.
    pub list: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct List {
    version: u16,
    /// What the files are of, for people.
    of: serde_json::Value,
    files: Vec<Listed>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Listed {
    name: String,
    #[serde(flatten)]
    carried: Carried,
}

/// A part of a store that is one installation's alone. Clones are the same.
#[derive(Clone)]
pub struct Vault {
    store: Arc<dyn ObjectStore>,
    root: Object,
    /// Where that is on this node.
    folder: Option<PathBuf>,
    url: String,
}

impl fmt::Debug for Vault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vault").field("url", &self.url).finish_non_exhaustive()
    }
}

impl Vault {
    /// The part of an installation of this name. A folder is made where there is none; S3 is not asked
    /// before it is needed.
    ///
    /// # Errors
    /// [`Error::Place`].
    pub fn open(location: &Location, installation: &str) -> Result<Self, Error> {
        let (store, prefix) = location.open()?;
        let root = prefix.join(installation);
        let folder = location.url.is_empty().then(|| location.folder.join(installation));
        Ok(Self { store, root, folder, url: location.told() })
    }

    /// Keeps these files under a key that was never used, with what they are of. Packs on a thread of its own:
    /// how many do that at once is the caller's to bound. May be dropped at any time: what is there then is no
    /// whole key, and to be forgotten.
    ///
    /// # Errors
    /// When a file cannot be read or the store does not take it; the same holds then.
    pub async fn put(
        &self,
        key: &str,
        of: serde_json::Value,
        files: &[File],
    ) -> Result<Stored, Error> {
        let mut list = List { version: VERSION, of, files: Vec::new() };
        for file in files {
            let carried =
                carry::put(&*self.store, &self.object(key, file.name), &file.path).await?;
            list.files.push(Listed { name: file.name.to_owned(), carried });
            fault::at(Point::FileStored);
        }
        let (object, text) = (self.object(key, LIST), json(&list)?);
        let digest = hex(&Sha256::digest(&text));
        let files: u64 = list.files.iter().map(|file| file.carried.bytes).sum();
        let bytes = files.saturating_add(text.len() as u64);
        let written = self.store.put(&object, text.into()).await;
        written.map_err(store_error("writing", &object))?;
        fault::at(Point::ListStored);
        Ok(Stored { key: key.to_owned(), url: self.url.clone(), bytes, list: digest })
    }

    /// Bytes that each of these files needs on a disk when it is got back, at most.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub async fn needs(&self, stored: &Stored, files: &[File]) -> Result<Vec<u64>, Error> {
        let list = self.lost_or(self.list_of(stored).await).await?;
        files.iter().map(|file| Ok(self.listed(&list, stored, file)?.carried.needs())).collect()
    }

    /// Gets these files back: they must not be there yet, and are whole and on the disk afterwards.
    ///
    /// # Errors
    /// [`Error::Missing`] when the store has them no more, [`Error::Damaged`] when they are not what was
    /// kept, and others; there may be parts of the files then.
    pub async fn get(&self, stored: &Stored, files: &[File]) -> Result<(), Error> {
        self.lost_or(self.get_files(stored, files).await).await
    }

    async fn get_files(&self, stored: &Stored, files: &[File]) -> Result<(), Error> {
        let list = self.list_of(stored).await?;
        for file in files {
            let (object, listed) =
                (self.object(&stored.key, file.name), self.listed(&list, stored, file)?);
            carry::get(&*self.store, &object, &listed.carried, &file.path).await?;
            fault::at(Point::FileFetched);
        }
        Ok(())
    }

    /// Whether these files could be got back now: each is read whole, and none is written.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub async fn check(&self, stored: &Stored, files: &[File]) -> Result<(), Error> {
        self.lost_or(self.check_files(stored, files).await).await
    }

    async fn check_files(&self, stored: &Stored, files: &[File]) -> Result<(), Error> {
        let list = self.list_of(stored).await?;
        for file in files {
            let object = self.object(&stored.key, file.name);
            carry::check(&*self.store, &object, &self.listed(&list, stored, file)?.carried).await?;
        }
        Ok(())
    }

    fn listed<'a>(
        &self,
        list: &'a List,
        stored: &Stored,
        file: &File,
    ) -> Result<&'a Listed, Error> {
        let listed = list.files.iter().find(|listed| listed.name == file.name);
        listed.ok_or_else(|| Error::Missing(self.object(&stored.key, file.name).to_string()))
    }

    /// What was come to, where an error may say that the store has lost something.
    async fn lost_or<T>(&self, done: Result<T, Error>) -> Result<T, Error> {
        match done {
            Err(Error::Store { object, source, .. }) if self.lost_it(&source).await => {
                Err(Error::Missing(object))
            }
            done => done,
        }
    }

    /// Whether the store says with this that it had an object and has it no more. A bucket or a folder that is
    /// not there, or somebody on the way who knows neither, says nothing of what is in it.
    async fn lost_it(&self, error: &object_store::Error) -> bool {
        let object_store::Error::NotFound { source, .. } = error else { return false };
        let Some(folder) = self.folder.clone() else {
            return source.to_string().contains(NO_SUCH_KEY);
        };
        // Made with the first key, and never taken away.
        let there = tokio::task::spawn_blocking(move || folder.is_dir());
        there.await.unwrap_or_default()
    }

    async fn list_of(&self, stored: &Stored) -> Result<List, Error> {
        if stored.url != self.url {
            return Err(Error::Elsewhere { was: stored.url.clone(), is: self.url.clone() });
        }
        let object = self.object(&stored.key, LIST);
        let damaged = |problem: &str| Error::Damaged {
            object: object.to_string(),
            problem: problem.to_owned(),
        };
        let found = self.store.get(&object).await.map_err(store_error("reading", &object))?;
        if found.meta.size > MOST {
            return Err(damaged("it is too long"));
        }
        let text = carry::take(found, &object, MOST).await?;
        if hex(&Sha256::digest(&text)) != stored.list {
            return Err(damaged("its sum is not the one that was noted"));
        }
        let list: List = serde_json::from_slice(&text).map_err(|_| damaged("it is no list"))?;
        match list.version {
            VERSION => Ok(list),
            other => {
                Err(damaged(&format!("it is of version {other}, this program reads {VERSION}")))
            }
        }
    }

    /// Forgets a key, whole or not; one that is not there is as good.
    ///
    /// # Errors
    /// When the store does not do it; what is left is no whole key.
    pub async fn forget(&self, key: &str) -> Result<(), Error> {
        let list = self.object(key, LIST);
        match self.store.delete(&list).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => {}
            Err(error) => return Err(store_error("deleting", &list)(error)),
        }
        fault::at(Point::ListForgotten);
        let under = self.root.clone().join(key);
        let failed = store_error("deleting", &under);
        let mut found = Vec::new();
        let mut listed = self.store.list(Some(&under));
        while let Some(object) = listed.next().await {
            found.push(object.map_err(&failed)?);
            if found.len() > OBJECTS {
                return Err(self.endless(&under, OBJECTS));
            }
        }
        drop(listed);
        // Whatever else it lists is not of this key.
        for object in found.into_iter().filter(|object| object.location.prefix_matches(&under)) {
            match self.store.delete(&object.location).await {
                Ok(()) | Err(object_store::Error::NotFound { .. }) => {}
                Err(error) => return Err(failed(error)),
            }
        }
        Ok(())
    }

    /// Every key of which there is anything.
    ///
    /// # Errors
    /// When the store does not say.
    pub async fn keys(&self) -> Result<BTreeSet<String>, Error> {
        let (mut keys, mut listed) = (BTreeSet::new(), 0_usize);
        let mut found = self.store.list(Some(&self.root));
        while let Some(object) = found.next().await {
            let object = object.map_err(store_error("listing", &self.root))?;
            listed = listed.saturating_add(1);
            if listed > LISTED {
                return Err(self.endless(&self.root, LISTED));
            }
            let under = object.location.prefix_match(&self.root).and_then(|mut parts| parts.next());
            let key = under.map(|part| part.as_ref().to_owned());
            keys.extend(key.filter(|key| key.len() <= LONGEST_KEY));
        }
        Ok(keys)
    }

    fn endless(&self, under: &Object, most: usize) -> Error {
        let problem = format!("it lists more than {most} objects under {under}");
        Error::Place { url: self.url.clone(), problem }
    }

    fn object(&self, key: &str, name: &str) -> Object {
        self.root.clone().join(key).join(name)
    }
}

fn json(list: &List) -> Result<Vec<u8>, Error> {
    serde_json::to_vec(list).map_err(|error| Error::File {
        act: "describe",
        path: LIST.into(),
        source: error.into(),
    })
}

#[cfg(test)]
mod tests;
