//! The changes to a ruleset as one batch of netlink messages, and the questions about it: values in,
//! bytes out (`linux/netfilter/nfnetlink.h`, `linux/netfilter/nf_tables.h`).

use std::net::Ipv4Addr;

use crate::fence::encode::{Attributes, DROP, expressions, userdata};
use crate::fence::rule::{Chain, Family, Hook, Point, Set, TableId};

/// Flags of a request (`linux/netlink.h`).
const NLM_F_REQUEST: u16 = 0x001;
const NLM_F_ACK: u16 = 0x004;
const NLM_F_DUMP: u16 = 0x300;
const NLM_F_CREATE: u16 = 0x400;
const NLM_F_APPEND: u16 = 0x800;

const NFTABLES: u16 = 10;
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;

/// What a message asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(crate) enum Kind {
    NewTable = 0,
    GetTable = 1,
    DelTable = 2,
    NewChain = 3,
    GetChain = 4,
    DelChain = 5,
    NewRule = 6,
    GetRule = 7,
    DelRule = 8,
    NewSet = 9,
    NewElements = 12,
    GetElements = 13,
    DelElements = 14,
    NewGeneration = 15,
    GetGeneration = 16,
}

impl Kind {
    /// As it stands in a message's header.
    pub(crate) const fn number(self) -> u16 {
        NFTABLES << 8 | self as u16
    }
}

impl Family {
    /// The number of the family (`linux/netfilter.h`).
    pub(crate) const fn number(self) -> u8 {
        match self {
            Self::Inet => 1,
            Self::Netdev => 5,
        }
    }
}

impl Point {
    /// The number of the hook in its family.
    pub(crate) const fn number(self) -> u32 {
        match self {
            Self::Ingress | Self::Prerouting => 0,
            Self::Egress | Self::Input => 1,
            Self::Forward => 2,
            Self::Output => 3,
        }
    }
}

/// Operations that happen together or not at all.
#[derive(Default)]
pub(crate) struct Batch {
    messages: Vec<(Kind, u16, Family, Attributes)>,
    operations: Vec<String>,
}

impl Batch {
    pub(crate) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    fn push(
        &mut self,
        kind: Kind,
        flags: u16,
        table: &TableId,
        what: String,
        fill: impl FnOnce(&mut Attributes),
    ) {
        let mut attributes = Attributes::default();
        fill(&mut attributes);
        self.messages.push((kind, flags, table.family, attributes));
        self.operations.push(what);
    }

    pub(crate) fn add_table(&mut self, table: &TableId) {
        let what = format!("add the table {table}");
        self.push(Kind::NewTable, NLM_F_CREATE, table, what, |new| {
            new.text(1, &table.name);
            new.number(2, 0);
        });
    }

    pub(crate) fn delete_table(&mut self, table: &TableId) {
        let what = format!("delete the table {table}");
        self.push(Kind::DelTable, 0, table, what, |gone| gone.text(1, &table.name));
    }

    pub(crate) fn add_set(&mut self, table: &TableId, set: &Set) {
        let what = format!("add the set {}", set.name);
        self.push(Kind::NewSet, NLM_F_CREATE, table, what, |new| {
            const IPV4_ADDR: u32 = 7;
            const INTERVAL: u32 = 4;
            const KEY_IS_BIG_ENDIAN: [u8; 6] = [0, 4, 2, 0, 0, 0];
            new.text(1, &table.name);
            new.text(2, set.name);
            new.number(3, INTERVAL);
            new.number(4, IPV4_ADDR);
            new.number(5, 4);
            new.number(10, 1);
            new.put(13, &KEY_IS_BIG_ENDIAN);
        });
        let what = format!("empty the set {}", set.name);
        self.push(Kind::DelElements, 0, table, what, |gone| {
            gone.text(1, &table.name);
            gone.text(2, set.name);
        });
        let what = format!("fill the set {}", set.name);
        self.push(Kind::NewElements, NLM_F_CREATE, table, what, |new| {
            new.text(1, &table.name);
            new.text(2, set.name);
            new.nest(3, |list| {
                for (bound, is_end) in bounds(set) {
                    list.nest(1, |element| {
                        element.data(1, &bound.octets());
                        element.number(3, u32::from(is_end));
                    });
                }
            });
        });
    }

    pub(crate) fn add_chain(&mut self, table: &TableId, chain: &Chain) {
        let what = format!("add the chain {}", chain.name);
        self.push(Kind::NewChain, NLM_F_CREATE, table, what, |new| {
            new.text(1, &table.name);
            new.text(3, &chain.name);
            if let Some(hook) = &chain.hook {
                new.nest(4, |nest| put_hook(nest, hook));
                new.number(5, DROP.cast_unsigned());
                new.text(7, "filter");
            }
        });
        self.add_rules(table, chain);
    }

    /// Takes every rule out of a chain that exists, and puts these in.
    pub(crate) fn refill_chain(&mut self, table: &TableId, chain: &Chain) {
        let what = format!("empty the chain {}", chain.name);
        self.push(Kind::DelRule, 0, table, what, |gone| {
            gone.text(1, &table.name);
            gone.text(2, &chain.name);
        });
        self.add_rules(table, chain);
    }

    fn add_rules(&mut self, table: &TableId, chain: &Chain) {
        for (n, rule) in chain.rules.iter().enumerate() {
            let what = format!("add rule {n} to the chain {}: {rule}", chain.name);
            self.push(Kind::NewRule, NLM_F_CREATE | NLM_F_APPEND, table, what, |new| {
                new.text(1, &table.name);
                new.text(2, &chain.name);
                new.put(4, &expressions(rule));
                if let Some(comment) = &rule.comment {
                    new.put(7, &userdata(comment));
                }
            });
        }
    }

    pub(crate) fn delete_chain(&mut self, table: &TableId, name: &str) {
        let what = format!("delete the chain {name}");
        self.push(Kind::DelChain, 0, table, what, |gone| {
            gone.text(1, &table.name);
            gone.text(3, name);
        });
    }

    /// The bytes to send, the sequence number of the last operation, and what each operation is, by
    /// sequence number; 0 is the batch itself. The last operation is the one acknowledged: kernels
    /// before 6.10 do not acknowledge the end of a batch.
    pub(crate) fn finish(self) -> (Vec<u8>, u32, Vec<String>) {
        let mut bytes = Vec::new();
        let mut seq = 0;
        put_message(&mut bytes, BATCH_BEGIN, NLM_F_REQUEST, seq, 0, NFTABLES, &[]);
        let last = self.messages.len();
        for (n, (kind, flags, family, attributes)) in self.messages.into_iter().enumerate() {
            let ack = if n + 1 == last { NLM_F_ACK } else { 0 };
            let flags = NLM_F_REQUEST | flags | ack;
            seq += 1;
            put_message(&mut bytes, kind.number(), flags, seq, family.number(), 0, &attributes.0);
        }
        put_message(&mut bytes, BATCH_END, NLM_F_REQUEST, seq + 1, 0, NFTABLES, &[]);
        let mut operations = vec!["commit the batch".to_owned()];
        operations.extend(self.operations);
        (bytes, seq, operations)
    }
}

/// Asks for the number that every change of the namespace's rules moves, whoever makes it.
pub(crate) fn get_generation() -> Vec<u8> {
    query(Kind::GetGeneration, Family::Inet, false, |_| {})
}

/// Asks for the tables of a family.
pub(crate) fn get_tables(family: Family) -> Vec<u8> {
    query(Kind::GetTable, family, true, |_| {})
}

/// Asks for one table.
pub(crate) fn get_table(table: &TableId) -> Vec<u8> {
    query(Kind::GetTable, table.family, false, |get| get.text(1, &table.name))
}

/// Asks for the chains of a family.
pub(crate) fn get_chains(family: Family) -> Vec<u8> {
    query(Kind::GetChain, family, true, |_| {})
}

/// Asks for one chain.
pub(crate) fn get_chain(table: &TableId, name: &str) -> Vec<u8> {
    query(Kind::GetChain, table.family, false, |get| {
        get.text(1, &table.name);
        get.text(3, name);
    })
}

/// Asks for the rules of one chain, in order.
pub(crate) fn get_rules(table: &TableId, chain: &str) -> Vec<u8> {
    query(Kind::GetRule, table.family, true, |get| {
        get.text(1, &table.name);
        get.text(2, chain);
    })
}

/// Asks for the elements of one set.
pub(crate) fn get_elements(table: &TableId, set: &str) -> Vec<u8> {
    query(Kind::GetElements, table.family, true, |get| {
        get.text(1, &table.name);
        get.text(2, set);
    })
}

fn query(kind: Kind, family: Family, dump: bool, fill: impl FnOnce(&mut Attributes)) -> Vec<u8> {
    let mut attributes = Attributes::default();
    fill(&mut attributes);
    let flags = NLM_F_REQUEST | if dump { NLM_F_DUMP } else { 0 };
    let mut bytes = Vec::new();
    put_message(&mut bytes, kind.number(), flags, 1, family.number(), 0, &attributes.0);
    bytes
}

/// A netlink header, a netfilter header and what follows them.
#[expect(clippy::cast_possible_truncation, reason = "the longest message is one rule, about 1 kB")]
fn put_message(
    bytes: &mut Vec<u8>,
    kind: u16,
    flags: u16,
    seq: u32,
    family: u8,
    resource: u16,
    attributes: &[u8],
) {
    bytes.extend((attributes.len() as u32 + 20).to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(flags.to_ne_bytes());
    bytes.extend(seq.to_ne_bytes());
    bytes.extend([0; 4]);
    bytes.extend([family, 0]);
    bytes.extend(resource.to_be_bytes());
    bytes.extend(attributes);
}

/// The bounds of a set's ranges as the kernel keeps them: where each begins, and where it no longer
/// holds (marked as an end), which the range up to the last address does not have.
pub(crate) fn bounds(set: &Set) -> Vec<(Ipv4Addr, bool)> {
    let ends = |last: Ipv4Addr| Some(Ipv4Addr::from_bits(last.to_bits().checked_add(1)?));
    set.ranges
        .iter()
        .flat_map(|&(first, last)| {
            [Some((first, false)), ends(last).map(|end| (end, true))].into_iter().flatten()
        })
        .collect()
}

fn put_hook(nest: &mut Attributes, hook: &Hook) {
    nest.number(1, hook.point.number());
    nest.number(2, hook.priority.cast_unsigned());
    if let Some(device) = &hook.device {
        nest.text(3, device);
    }
}
