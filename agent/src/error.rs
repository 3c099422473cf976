//! Why the other side's bytes were refused. Carries no byte of theirs beyond a number.

/// A reason to close the connection: nothing after it can be trusted.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A frame announces a payload over [`crate::MAX_PAYLOAD`].
    #[error("a frame announces {length} bytes, more than allowed")]
    TooLong {
        /// The announced length.
        length: u32,
    },
    /// A kind this side does not take.
    #[error("unexpected kind of frame: {kind}")]
    UnknownKind {
        /// The kind on the wire.
        kind: u8,
    },
    /// A structured payload that is not what its kind says.
    #[error("malformed payload in a frame of kind {kind}")]
    Malformed {
        /// The kind on the wire.
        kind: u8,
        /// What the JSON reader found.
        #[source]
        source: serde_json::Error,
    },
}
