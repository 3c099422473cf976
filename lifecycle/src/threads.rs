//! What this room does beside the threads that serve guests, and what threads share.
//!
//! A panic is a bug of ours, and an error to who asked; it spoils nothing for others.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::task::{JoinHandle, spawn_blocking};

use crate::error::Error;

/// Does work that takes long where no guest waits for it.
pub(crate) async fn aside<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Error> {
    joined(spawn_blocking(work)).await
}

/// What a task came to.
pub(crate) async fn joined<T>(task: JoinHandle<T>) -> Result<T, Error> {
    match task.await {
        Ok(done) => Ok(done),
        Err(lost) if lost.is_panic() => Err(Error::Panicked),
        Err(_) => Err(Error::Stopping),
    }
}

/// A lock whose holder panicked still guards a value that is whole: each section makes one change.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
