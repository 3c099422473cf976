//! The first flight of every client in `data/hellos`, and every trick known against its readers.
#![expect(clippy::expect_used, clippy::indexing_slicing, reason = "tests, and their own bytes")]

mod attacks;
mod bytes;
mod clients;
mod oracle;
