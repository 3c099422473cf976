//! The ruleset as a value: tables, sets, chains, rules and the few expressions they need.
//! Every base chain drops what no rule of it accepts; there is no way to say otherwise.

use std::net::Ipv4Addr;

use crate::fence::field::Field;

/// Everything of one or more tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ruleset(pub Vec<Table>);

/// One table of a family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// Which it is.
    pub id: TableId,
    /// Its sets.
    pub sets: Vec<Set>,
    /// Its chains; one that is jumped to stands before the one that jumps.
    pub chains: Vec<Chain>,
}

/// A table's family and name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableId {
    /// Its family.
    pub family: Family,
    /// Its name in that family.
    pub name: String,
}

/// The families we have tables in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// IPv4 and IPv6.
    Inet,
    /// The frames of one device.
    Netdev,
}

/// A named set of IPv4 address ranges.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Set {
    /// Its name.
    pub name: &'static str,
    /// First and last address of each range, ascending, neither touching nor overlapping.
    pub ranges: Vec<(Ipv4Addr, Ipv4Addr)>,
}

/// A chain of rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// Its name.
    pub name: String,
    /// Where packets enter it; a chain without one is only jumped to.
    pub hook: Option<Hook>,
    /// Its rules, in order.
    pub rules: Vec<Rule>,
}

/// Where packets enter a base chain, whose policy is drop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hook {
    /// The hook.
    pub point: Point,
    /// Its priority among the chains of that hook.
    pub priority: i32,
    /// The device of a netdev chain.
    pub device: Option<String>,
}

/// The hooks we use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// Frames that a device received.
    Ingress,
    /// Frames about to leave by a device.
    Egress,
    /// Packets before routing.
    Prerouting,
    /// Packets to a socket of this namespace.
    Input,
    /// Packets to be forwarded.
    Forward,
    /// Packets of a socket of this namespace.
    Output,
}

/// Conditions and actions, from left to right; the first condition that fails ends the rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// What it consists of.
    pub exprs: Vec<Expr>,
    /// What it is for.
    pub comment: Option<String>,
}

/// One condition or action.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expr {
    /// The field, under the mask where there is one, is or is not the value. A value shorter than
    /// the field is a prefix.
    Match {
        /// What is compared.
        field: Field,
        /// The bits that are compared, as long as the value.
        mask: Option<Vec<u8>>,
        /// Whether it must be equal, or must not.
        equal: bool,
        /// What it is compared with, in network byte order.
        value: Vec<u8>,
    },
    /// The field is one of these values or between them, in network byte order.
    Between {
        /// What is compared.
        field: Field,
        /// The least value.
        first: [u8; 2],
        /// The greatest.
        last: [u8; 2],
    },
    /// The field is in the set of this table, or is not.
    In {
        /// The field, as long as the set's key.
        field: Field,
        /// The set.
        set: &'static str,
        /// Whether it must be in it, or must not.
        inside: bool,
    },
    /// No more often than this.
    Limit {
        /// Packets a second.
        rate: u32,
        /// Packets at once.
        burst: u32,
    },
    /// More often than this.
    Over {
        /// Packets, or bytes, a second.
        rate: u64,
        /// How many at once.
        burst: u32,
        /// What is meant is bytes.
        bytes: bool,
    },
    /// Counts packets and bytes.
    Counter,
    /// Hands the first bytes of the packet to who listens to this group.
    Log {
        /// The nflog group.
        group: u16,
        /// How many bytes of it.
        snaplen: u32,
        /// What is said about it, at most 127 bytes.
        prefix: String,
    },
    /// Writes to the packet and mends the IPv4 checksum at this offset of the field's header, and
    /// the pseudo header in the one of the transport where asked.
    Write {
        /// What is written to.
        field: Field,
        /// What is written.
        value: [u8; 4],
        /// Offset in bytes of the checksum.
        checksum: u32,
        /// Whether the transport's checksum covers the field.
        pseudo_header: bool,
    },
    /// Marks the packet.
    Mark(u32),
    /// Gives the packet to a transparent socket of 127.0.0.1 at this port.
    Divert(u16),
    /// Refuses with ICMP type 3 code 13 (RFC 1812, section 5.2.7.1).
    RejectProhibited,
    /// Refuses with a TCP reset.
    RejectReset,
    /// Lets it pass.
    Accept,
    /// Lets it vanish.
    Drop,
    /// Goes on in another chain of this table, and comes back at its end.
    Jump(String),
}

impl Rule {
    /// A rule without a comment.
    #[must_use]
    pub(crate) fn new(exprs: impl Into<Vec<Expr>>) -> Self {
        Self { exprs: exprs.into(), comment: None }
    }
}

/// The field is this value, or begins with it.
pub(crate) fn is(field: Field, value: impl AsRef<[u8]>) -> Expr {
    Expr::Match { field, mask: None, equal: true, value: value.as_ref().to_vec() }
}

/// The field is not this value.
pub(crate) fn is_not(field: Field, value: impl AsRef<[u8]>) -> Expr {
    Expr::Match { field, mask: None, equal: false, value: value.as_ref().to_vec() }
}

/// The field under a mask is this value, or is not.
pub(crate) fn masked<const N: usize>(
    field: Field,
    mask: [u8; N],
    equal: bool,
    value: [u8; N],
) -> Expr {
    Expr::Match { field, mask: Some(mask.to_vec()), equal, value: value.to_vec() }
}
