//! What the kernel answers, as values that can be compared with what was meant.
//! Bytes that are not what they should be end an iteration; they are never a panic.

use std::collections::BTreeMap;
use std::fmt;

/// One netlink message: kind, flags, sequence number, and what follows its header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Message<'a> {
    pub(crate) kind: u16,
    pub(crate) flags: u16,
    pub(crate) seq: u32,
    pub(crate) body: &'a [u8],
}

/// The messages in one datagram.
pub(crate) fn messages(mut bytes: &[u8]) -> impl Iterator<Item = Message<'_>> {
    std::iter::from_fn(move || {
        let (len, kind, flags, seq) =
            (u32_at(bytes, 0)?, u16_at(bytes, 4)?, u16_at(bytes, 6)?, u32_at(bytes, 8)?);
        let len = usize::try_from(len).ok()?;
        let body = bytes.get(16..len)?;
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some(Message { kind, flags, seq, body })
    })
}

/// The attributes of a message or of a nest: kind without its flags, and value.
pub(crate) fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let (len, kind) = (usize::from(u16_at(bytes, 0)?), u16_at(bytes, 2)? & 0x3fff);
        let value = bytes.get(4..len)?;
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

/// The first attribute of this kind.
pub(crate) fn attribute(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    attributes(bytes).find(|(found, _)| *found == kind).map(|(_, value)| value)
}

/// The error number of an acknowledgement (positive; 0 is success) and what the kernel says to it.
pub(crate) fn outcome(message: Message<'_>) -> (i32, String) {
    const CAPPED: u16 = 0x100;
    const TLVS: u16 = 0x200;
    let code = u32_at(message.body, 0).unwrap_or_default().cast_signed();
    let echoed = u32_at(message.body, 4).and_then(|len| usize::try_from(len).ok()).unwrap_or(16);
    let skip = 4 + if message.flags & CAPPED != 0 { 16 } else { echoed.next_multiple_of(4) };
    let said = (message.flags & TLVS != 0)
        .then(|| attribute(message.body.get(skip..)?, 1))
        .flatten()
        .map(text);
    (code.checked_neg().unwrap_or(i32::MAX), said.unwrap_or_default())
}

/// A rule as the kernel holds it, without what changes by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) exprs: Vec<HeldExpr>,
    pub(crate) userdata: Vec<u8>,
}

/// An expression: its name and its attributes by kind; a counter's values are left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HeldExpr {
    name: String,
    attributes: BTreeMap<u16, Vec<u8>>,
}

impl Held {
    /// From a rule's list of expressions and its user data.
    pub(crate) fn new(expressions: &[u8], userdata: &[u8]) -> Self {
        let exprs = attributes(expressions).map(|(_, element)| HeldExpr::new(element)).collect();
        Self { exprs, userdata: userdata.to_vec() }
    }

    /// From the body of a message about a rule.
    pub(crate) fn of_message(body: &[u8]) -> Self {
        let body = body.get(4..).unwrap_or_default();
        let part = |kind| attribute(body, kind).unwrap_or_default();
        Self::new(part(4), part(7))
    }
}

impl HeldExpr {
    fn new(element: &[u8]) -> Self {
        let name = attribute(element, 1).map(text).unwrap_or_default();
        let data = attribute(element, 2).unwrap_or_default();
        let volatile: &[u16] = match name.as_str() {
            "counter" => &[1, 2, 3],
            "limit" => &[6],
            _ => &[],
        };
        let attributes = attributes(data)
            .filter(|(kind, _)| !volatile.contains(kind))
            .map(|(kind, value)| (kind, value.to_vec()))
            .collect();
        Self { name, attributes }
    }
}

impl fmt::Display for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, expr) in self.exprs.iter().enumerate() {
            write!(f, "{}{}", if n > 0 { ", " } else { "" }, expr.name)?;
            for (kind, value) in &expr.attributes {
                write!(f, " {kind}=")?;
                value.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
            }
        }
        if self.userdata.is_empty() {
            return Ok(());
        }
        write!(f, " comment {:?}", String::from_utf8_lossy(&self.userdata))
    }
}

/// Packets and bytes of the counter in a rule's message, and the rule's comment.
pub(crate) fn counted(body: &[u8]) -> Option<(String, u64, u64)> {
    let body = body.get(4..)?;
    let comment = text(attribute(body, 7)?.get(2..)?);
    let counter = attributes(attribute(body, 4)?)
        .find(|(_, element)| attribute(element, 1).map(text).as_deref() == Some("counter"))
        .and_then(|(_, element)| attribute(element, 2))?;
    Some((comment, u64_of(attribute(counter, 2)?)?, u64_of(attribute(counter, 1)?)?))
}

/// The name in the body of a message about a table.
pub(crate) fn table_name(body: &[u8]) -> Option<String> {
    attribute(body.get(4..)?, 1).map(text)
}

/// The flags in the body of a message about a table.
pub(crate) fn table_flags(body: &[u8]) -> Option<u32> {
    attribute(body.get(4..)?, 2).and_then(u32_be)
}

/// How many chains and sets are in the table that the body of a message is about.
pub(crate) fn table_uses(body: &[u8]) -> Option<u32> {
    attribute(body.get(4..)?, 3).and_then(u32_be)
}

/// The number in the body of a message about a generation of the rules.
pub(crate) fn generation(body: &[u8]) -> Option<u32> {
    attribute(body.get(4..)?, 1).and_then(u32_be)
}

/// A chain as the kernel holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HeldChain {
    pub(crate) table: String,
    pub(crate) name: String,
    /// Hook, priority, device, policy; none for a chain that is only jumped to.
    pub(crate) hook: Option<(u32, u32, String, u32)>,
}

impl HeldChain {
    /// From the body of a message about a chain.
    pub(crate) fn of_message(body: &[u8]) -> Option<Self> {
        let body = body.get(4..)?;
        let hook = attribute(body, 4).and_then(|hook| {
            let device = attribute(hook, 3).map(text).unwrap_or_default();
            let number = |kind| u32_be(attribute(hook, kind)?);
            Some((number(1)?, number(2)?, device, u32_be(attribute(body, 5)?)?))
        });
        Some(Self { table: text(attribute(body, 1)?), name: text(attribute(body, 3)?), hook })
    }
}

/// The bounds of a set's ranges in the body of a message about its elements.
pub(crate) fn elements(body: &[u8]) -> Vec<([u8; 4], bool)> {
    let list = body.get(4..).and_then(|body| attribute(body, 3)).unwrap_or_default();
    attributes(list)
        .filter_map(|(_, element)| {
            let key = attribute(attribute(element, 1)?, 1)?.try_into().ok()?;
            let flags = attribute(element, 3).and_then(u32_be).unwrap_or_default();
            Some((key, flags & 1 != 0))
        })
        .collect()
}

/// Text up to its NUL.
pub(crate) fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(bytes.get(..end).unwrap_or_default()).into_owned()
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u32_be(bytes: &[u8]) -> Option<u32> {
    Some(u32::from_be_bytes(*bytes.first_chunk()?))
}

fn u64_of(bytes: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(*bytes.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::fence::batch::{Batch, Kind};
    use crate::fence::encode::{expressions, userdata};
    use crate::fence::layout::{SlotFence, slot};

    #[test]
    fn what_is_encoded_decodes_to_the_same_rules() {
        let at = policy::Slot::new(9).expect("in range");
        let table = slot(at, &SlotFence::new(5));
        let chains = &table.chains;
        let mut batch = Batch::default();
        chains.iter().for_each(|chain| batch.add_chain(&table.id, chain));
        let (bytes, last, operations) = batch.finish();
        let sent: Vec<Message<'_>> = messages(&bytes).collect();
        assert_eq!(sent.len(), operations.len() + 1, "each operation, and the end of the batch");
        assert_eq!(sent[sent.len() - 2].seq, last);
        let found: Vec<Held> = sent
            .iter()
            .filter(|message| message.kind == Kind::NewRule.number())
            .map(|message| Held::of_message(message.body))
            .collect();
        let meant: Vec<Held> = chains
            .iter()
            .flat_map(|chain| &chain.rules)
            .map(|rule| {
                let comment = rule.comment.as_deref().map(userdata).unwrap_or_default();
                Held::new(&expressions(rule), &comment)
            })
            .collect();
        assert_eq!(found, meant);
        assert!(meant.iter().all(|held| !held.exprs.is_empty()));
    }

    proptest! {
        #[test]
        fn no_answer_makes_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
            for message in messages(&bytes) {
                let _ = (outcome(message), counted(message.body), elements(message.body));
                let _ = (HeldChain::of_message(message.body), Held::of_message(message.body));
                let _ = (table_flags(message.body), table_uses(message.body));
            }
            let _ = (counted(&bytes), elements(&bytes), Held::of_message(&bytes).to_string());
        }
    }
}
