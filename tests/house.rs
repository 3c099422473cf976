//! The shape of the house: which crate may know which, and which module may know which.
//! Adding an arrow means editing this file, in the open. Promise 1.
#[test]
fn placeholder() {}
