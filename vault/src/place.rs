//! Where the store is, and how it is opened. The only module that sees credentials; never shows one.

use std::fmt;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{ObjectStore, RetryConfig};

use crate::bounded::Bounded;
use crate::error::Error;

/// How often a request is made again, and for how long.
const TRIES: usize = 4;
const PATIENCE: Duration = Duration::from_secs(60);

/// Where a store is.
#[derive(Clone, Default)]
pub struct Location {
    /// `s3://bucket/prefix`; empty: the folder.
    pub url: String,
    /// The folder on this node.
    pub folder: PathBuf,
    /// Options of S3 by their names in the environment, such as `AWS_SECRET_ACCESS_KEY`.
    pub options: Vec<(String, String)>,
}

impl fmt::Debug for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.options.iter().map(|(name, _)| name.as_str()).collect();
        let Self { url, folder, .. } = self;
        f.debug_struct("Location")
            .field("url", url)
            .field("folder", folder)
            .field("options", &names)
            .finish()
    }
}

impl Location {
    /// As people are told of it.
    pub(crate) fn told(&self) -> String {
        match self.url.as_str() {
            "" => self.folder.display().to_string(),
            url => url.to_owned(),
        }
    }

    /// Opens it: the store, and the path below which everything is.
    pub(crate) fn open(&self) -> Result<(Arc<dyn ObjectStore>, Path), Error> {
        let place = |problem: String| Error::Place { url: self.told(), problem };
        if self.url.is_empty() {
            // What guests had in memory is nobody's to read.
            let made = DirBuilder::new().recursive(true).mode(0o700).create(&self.folder);
            made.map_err(|error| place(error.to_string()))?;
            let local = LocalFileSystem::new_with_prefix(&self.folder);
            let local = local.map_err(|error| place(error.to_string()))?.with_fsync(true);
            return Ok((Arc::new(local), Path::default()));
        }
        let Some(rest) = self.url.strip_prefix("s3://") else {
            return Err(place("use `s3://bucket/prefix`, or leave `store.url` out".to_owned()));
        };
        let prefix = rest.split_once('/').map_or("", |(_, prefix)| prefix);
        let retry =
            RetryConfig { max_retries: TRIES, retry_timeout: PATIENCE, ..RetryConfig::default() };
        let mut builder = AmazonS3Builder::new().with_url(&self.url).with_retry(retry);
        builder = builder.with_http_connector(Bounded::default());
        for (name, value) in &self.options {
            // The environment has others, too.
            if let Ok(key) = name.to_ascii_lowercase().parse::<AmazonS3ConfigKey>() {
                builder = builder.with_config(key, value);
            }
        }
        let store = builder.build().map_err(|error| place(error.to_string()))?;
        let prefix = Path::parse(prefix).map_err(|error| place(error.to_string()))?;
        Ok((Arc::new(store), prefix))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_never_shows_its_credentials_and_says_what_is_wrong_with_it() {
        let options = vec![("AWS_SECRET_ACCESS_KEY".to_owned(), "hunter2".to_owned())];
        let place = Location { url: "ftp://x".to_owned(), folder: PathBuf::new(), options };
        assert!(!format!("{place:?}").contains("hunter2"));
        let error = place.open().expect_err("refused").to_string();
        assert!(error.contains("s3://bucket/prefix") && !error.contains("hunter2"), "{error}");
    }
}
