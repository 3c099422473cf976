//! A rule as netlink attributes: value in, bytes out (`linux/netfilter/nf_tables.h`).
//!
//! It writes every attribute that the kernel gives back, so that reading back is a comparison.

use std::net::Ipv4Addr;

use crate::fence::field::{Field, Load};
use crate::fence::rule::{Expr, Rule};

/// The register everything is loaded to; the second is only for the port of a diversion.
const REG_1: u32 = 1;
const REG_2: u32 = 2;
const REG_VERDICT: u32 = 0;
const ACCEPT: i32 = 1;
/// The verdict, and the policy, that drops.
pub(crate) const DROP: i32 = 0;
const JUMP: i32 = -3;

/// A list of attributes, each a length, a kind, a value and padding.
#[derive(Default)]
pub(crate) struct Attributes(pub(crate) Vec<u8>);

impl Attributes {
    #[expect(clippy::cast_possible_truncation, reason = "our longest is one rule, about 1 kB")]
    pub(crate) fn put(&mut self, kind: u16, value: &[u8]) {
        self.0.extend((value.len() as u16 + 4).to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }

    pub(crate) fn number(&mut self, kind: u16, value: u32) {
        self.put(kind, &value.to_be_bytes());
    }

    pub(crate) fn text(&mut self, kind: u16, value: &str) {
        self.put(kind, &[value.as_bytes(), &[0]].concat());
    }

    pub(crate) fn nest(&mut self, kind: u16, fill: impl FnOnce(&mut Self)) {
        let mut inner = Self::default();
        fill(&mut inner);
        self.put(kind, &inner.0);
    }

    /// A value in the wrapping that the kernel wants around data.
    pub(crate) fn data(&mut self, kind: u16, value: &[u8]) {
        self.nest(kind, |data| data.put(1, value));
    }
}

/// A rule's comment in the form `nft` knows.
#[expect(clippy::cast_possible_truncation, reason = "a comment is a tap and a reason")]
pub(crate) fn userdata(comment: &str) -> Vec<u8> {
    let mut bytes = vec![0, comment.len() as u8 + 1];
    bytes.extend(comment.as_bytes());
    bytes.push(0);
    bytes
}

/// The expressions of a rule, as the list that the kernel takes and gives back.
pub(crate) fn expressions(rule: &Rule) -> Vec<u8> {
    let mut list = Attributes::default();
    for expr in &rule.exprs {
        put_expr(&mut list, expr);
    }
    list.0
}

fn one(list: &mut Attributes, name: &str, fill: impl FnOnce(&mut Attributes)) {
    list.nest(1, |element| {
        element.text(1, name);
        element.nest(2, fill);
    });
}

fn put_expr(list: &mut Attributes, expr: &Expr) {
    match expr {
        Expr::Match { field, mask, equal, value } => {
            load(list, field, value.len());
            if let Some(mask) = mask {
                one(list, "bitwise", |bits| {
                    bits.number(1, REG_1);
                    bits.number(2, REG_1);
                    bits.number(3, count(mask));
                    bits.data(4, mask);
                    bits.data(5, &vec![0; mask.len()]);
                    bits.number(6, 0);
                });
            }
            one(list, "cmp", |cmp| {
                cmp.number(1, REG_1);
                cmp.number(2, u32::from(!equal));
                cmp.data(3, value);
            });
        }
        Expr::Between { field, first, last } => {
            load(list, field, first.len());
            one(list, "range", |range| {
                range.number(1, REG_1);
                range.number(2, 0);
                range.data(3, first);
                range.data(4, last);
            });
        }
        Expr::In { field, set, inside } => {
            load(list, field, 4);
            one(list, "lookup", |lookup| {
                lookup.text(1, set);
                lookup.number(2, REG_1);
                lookup.number(5, u32::from(!inside));
            });
        }
        Expr::Limit { rate, burst } => bucket(list, u64::from(*rate), *burst, false, false),
        Expr::Over { rate, burst, bytes } => bucket(list, *rate, *burst, *bytes, true),
        Expr::Counter => one(list, "counter", |counter| {
            counter.put(1, &[0; 8]);
            counter.put(2, &[0; 8]);
        }),
        Expr::Log { group, snaplen, prefix } => one(list, "log", |log| {
            log.put(1, &group.to_be_bytes());
            log.text(2, prefix);
            log.number(3, *snaplen);
        }),
        Expr::Write { field, value, checksum, pseudo_header } => {
            immediate(list, REG_1, value);
            one(list, "payload", |payload| {
                put_place(payload, field, value.len());
                payload.number(5, REG_1);
                payload.number(6, 1);
                payload.number(7, *checksum);
                payload.number(8, u32::from(*pseudo_header));
            });
        }
        Expr::Mark(mark) => {
            immediate(list, REG_1, &mark.to_ne_bytes());
            one(list, "meta", |meta| {
                meta.number(2, 3);
                meta.number(3, REG_1);
            });
        }
        Expr::Divert(port) => {
            immediate(list, REG_1, &Ipv4Addr::LOCALHOST.octets());
            immediate(list, REG_2, &port.to_be_bytes());
            one(list, "tproxy", |tproxy| {
                tproxy.number(1, 2);
                tproxy.number(2, REG_1);
                tproxy.number(3, REG_2);
            });
        }
        Expr::RejectProhibited => one(list, "reject", |reject| {
            reject.number(1, 0);
            reject.put(2, &[13]);
        }),
        Expr::RejectReset => one(list, "reject", |reject| reject.number(1, 1)),
        Expr::Accept => verdict(list, ACCEPT, None),
        Expr::Drop => verdict(list, DROP, None),
        Expr::Jump(chain) => verdict(list, JUMP, Some(chain)),
    }
}

/// Loads a field; of a header only as many bytes as are compared, of what the kernel knows all.
fn load(list: &mut Attributes, field: &Field, len: usize) {
    match field.load {
        Load::Payload { .. } => one(list, "payload", |payload| {
            payload.number(1, REG_1);
            put_place(payload, field, len);
        }),
        Load::Meta(key) => one(list, "meta", |meta| {
            meta.number(1, REG_1);
            meta.number(2, key);
        }),
    }
}

fn put_place(payload: &mut Attributes, field: &Field, len: usize) {
    if let Load::Payload { base, offset } = field.load {
        payload.number(2, base);
        payload.number(3, offset);
        payload.number(4, u32::try_from(len).unwrap_or(u32::MAX));
    }
}

/// At most this much a second, of packets or bytes, or more than it.
fn bucket(list: &mut Attributes, rate: u64, burst: u32, bytes: bool, over: bool) {
    one(list, "limit", |limit| {
        limit.put(1, &rate.to_be_bytes());
        limit.put(2, &1_u64.to_be_bytes());
        limit.number(3, burst);
        limit.number(4, u32::from(bytes));
        limit.number(5, u32::from(over));
    });
}

fn immediate(list: &mut Attributes, register: u32, value: &[u8]) {
    one(list, "immediate", |immediate| {
        immediate.number(1, register);
        immediate.data(2, value);
    });
}

fn verdict(list: &mut Attributes, code: i32, chain: Option<&str>) {
    one(list, "immediate", |immediate| {
        immediate.number(1, REG_VERDICT);
        immediate.nest(2, |data| {
            data.nest(2, |verdict| {
                verdict.number(1, code.cast_unsigned());
                if let Some(chain) = chain {
                    verdict.text(2, chain);
                }
            });
        });
    });
}

fn count(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.len()).unwrap_or(u32::MAX)
}
