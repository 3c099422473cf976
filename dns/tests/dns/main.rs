//! The dns room against an upstream on loopback that says what a test tells it to, and remembers
//! what it was asked: the oracle of every claim that something was not asked.
#![expect(clippy::expect_used, clippy::indexing_slicing, reason = "a test fails by panicking")]

mod below;
mod guest;
mod hostile;
mod malformed;
mod resolver;
mod stream;
mod upstream;
mod world;
