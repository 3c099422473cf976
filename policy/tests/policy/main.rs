//! The policy room from outside: its tables, its laws against a naive reference, its manual.

#[cfg(test)]
mod addresses;
#[cfg(test)]
mod decisions;
#[cfg(test)]
mod forgotten;
#[cfg(test)]
mod guarded;
#[cfg(test)]
mod hosts;
#[cfg(test)]
mod language;
#[cfg(test)]
mod laws;
#[cfg(test)]
mod manual;
#[cfg(test)]
mod paths;
#[cfg(test)]
mod questions;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod unwoken;
