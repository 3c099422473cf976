//! The open connections of one sandbox: what they were judged by, and how they are cut.
//!
//! A connection is registered before it is judged, so that a revocation in between cannot miss it.

/// What judging the open connections again did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rejudged {
    /// Connections that were judged again.
    pub checked: usize,
    /// Of these, those that were cut.
    pub cut: usize,
}
