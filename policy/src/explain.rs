//! What would happen to a flow, and why, by the same code that decides.

use serde::Serialize;

/// The answer to "would this pass?", layer by layer.
#[derive(Clone, Debug, Serialize)]
pub struct Explanation {}
