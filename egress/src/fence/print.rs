//! The ruleset as nftables text: what `nft -f` takes, in the words that `nft list` answers with.

use std::fmt::{self, Display, Formatter, Write};
use std::net::Ipv4Addr;

use crate::fence::field::{ARPHRD_ETHER, Field, Shown};
use crate::fence::rule::{Chain, Expr, Family, Hook, Point, Rule, Ruleset, Set, Table, TableId};

impl Display for Ruleset {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|table| write!(f, "{table}"))
    }
}

impl Display for Table {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "table {} {{", self.id)?;
        for (n, set) in self.sets.iter().enumerate() {
            write!(f, "{}{set}", if n > 0 { "\n" } else { "" })?;
        }
        for (n, chain) in self.chains.iter().enumerate() {
            write!(f, "{}{chain}", if n + self.sets.len() > 0 { "\n" } else { "" })?;
        }
        writeln!(f, "}}")
    }
}

impl Display for TableId {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.family, self.name)
    }
}

impl Display for Family {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Inet => "inet",
            Self::Netdev => "netdev",
        })
    }
}

impl Display for Set {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let ranges: Vec<String> =
            self.ranges.iter().map(|&(first, last)| range(first, last)).collect();
        writeln!(f, "\tset {} {{\n\t\ttype ipv4_addr\n\t\tflags interval", self.name)?;
        writeln!(f, "\t\telements = {{ {} }}\n\t}}", ranges.join(", "))
    }
}

/// A range as a prefix where it is one.
fn range(first: Ipv4Addr, last: Ipv4Addr) -> String {
    let differing = first.to_bits() ^ last.to_bits();
    let whole = differing & differing.wrapping_add(1) == 0 && first.to_bits() & differing == 0;
    match (whole, differing.count_ones()) {
        (true, 0) => first.to_string(),
        (true, bits) => format!("{first}/{}", 32 - bits),
        (false, _) => format!("{first}-{last}"),
    }
}

impl Display for Chain {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "\tchain {} {{", self.name)?;
        if let Some(hook) = &self.hook {
            writeln!(f, "\t\t{hook}")?;
        }
        self.rules.iter().try_for_each(|rule| writeln!(f, "\t\t{rule}"))?;
        writeln!(f, "\t}}")
    }
}

impl Display for Hook {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "type filter hook {} ", self.point)?;
        if let Some(device) = &self.device {
            write!(f, "device \"{device}\" ")?;
        }
        match (self.point, self.priority) {
            (Point::Prerouting, -150) => f.write_str("priority mangle")?,
            (Point::Prerouting | Point::Input | Point::Forward | Point::Output, 0) => {
                f.write_str("priority filter")?;
            }
            (_, priority) => write!(f, "priority {priority}")?,
        }
        f.write_str("; policy drop;")
    }
}

impl Display for Point {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ingress => "ingress",
            Self::Egress => "egress",
            Self::Prerouting => "prerouting",
            Self::Input => "input",
            Self::Forward => "forward",
            Self::Output => "output",
        })
    }
}

impl Display for Rule {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for (n, expr) in self.exprs.iter().enumerate() {
            write!(f, "{}{expr}", if n > 0 { " " } else { "" })?;
        }
        self.comment.iter().try_for_each(|comment| write!(f, " comment \"{comment}\""))
    }
}

impl Display for Expr {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Match { field, mask, equal, value } => {
                comparison(f, field, mask.as_deref(), *equal, value)
            }
            Self::Between { field, first, last } => {
                write!(f, "{} ", field.name)?;
                show(f, field, first)?;
                f.write_char('-')?;
                show(f, field, last)
            }
            Self::In { field, set, inside } => {
                write!(f, "{} {}@{set}", field.name, if *inside { "" } else { "!= " })
            }
            Self::Limit { rate, burst } => {
                write!(f, "limit rate {rate}/second burst {burst} packets")
            }
            Self::Over { rate, burst, bytes: false } => {
                write!(f, "limit rate over {rate}/second burst {burst} packets")
            }
            Self::Over { rate, burst, bytes: true } => {
                write!(f, "limit rate over {rate} bytes/second burst {burst} bytes")
            }
            Self::Counter => f.write_str("counter"),
            Self::Log { group, snaplen, prefix } => {
                write!(f, "log prefix \"{prefix}\" group {group} snaplen {snaplen}")
            }
            Self::Write { field, value, .. } => {
                write!(f, "{} set ", field.name)?;
                show(f, field, value)
            }
            Self::Mark(mark) => write!(f, "meta mark set {mark:#010x}"),
            Self::Divert(port) => write!(f, "tproxy ip to 127.0.0.1:{port}"),
            Self::RejectProhibited => f.write_str("reject with icmp admin-prohibited"),
            Self::RejectReset => f.write_str("reject with tcp reset"),
            Self::Accept => f.write_str("accept"),
            Self::Drop => f.write_str("drop"),
            Self::Jump(chain) => write!(f, "jump {chain}"),
        }
    }
}

fn comparison(
    f: &mut Formatter<'_>,
    field: &Field,
    mask: Option<&[u8]>,
    equal: bool,
    value: &[u8],
) -> fmt::Result {
    let unless = if equal { "" } else { "!= " };
    match (mask, field.shown) {
        (Some(mask), Shown::Flags(_)) if !equal && value.iter().all(|bits| *bits == 0) => {
            write!(f, "{} ", field.name)?;
            show(f, field, mask)
        }
        (Some(mask), Shown::Flags(_)) => {
            write!(f, "{} {unless}", field.name)?;
            show(f, field, value)?;
            f.write_str(" / ")?;
            show(f, field, mask)
        }
        (Some(mask), Shown::Ip) => {
            write!(f, "{} {unless}", field.name)?;
            show(f, field, value)?;
            write!(f, "/{}", mask.iter().map(|byte| byte.count_ones()).sum::<u32>())
        }
        (Some(mask), _) => {
            write!(f, "{} & ", field.name)?;
            show(f, field, mask)?;
            f.write_str(if equal { " == " } else { " != " })?;
            show(f, field, value)
        }
        (None, _) => {
            write!(f, "{} {unless}", field.name)?;
            show(f, field, value)
        }
    }
}

fn show(f: &mut Formatter<'_>, field: &Field, value: &[u8]) -> fmt::Result {
    match (field.shown, value) {
        (Shown::Mac, [first, rest @ ..]) => {
            write!(f, "{first:02x}")?;
            rest.iter().try_for_each(|byte| write!(f, ":{byte:02x}"))
        }
        (Shown::Ip, &[a, b, c, d]) => write!(f, "{}", Ipv4Addr::new(a, b, c, d)),
        (Shown::Ip, &[a, b]) => write!(f, "{a}.{b}.0.0/16"),
        (Shown::Decimal, bytes) => write!(f, "{}", number(bytes)),
        (Shown::Mark, &[a, b, c, d]) => {
            write!(f, "{:#010x}", u32::from_ne_bytes([a, b, c, d]))
        }
        (Shown::LinkType, bytes) if bytes == ARPHRD_ETHER => f.write_str("ether"),
        (Shown::Flags(names), &[bits]) => {
            let set = names.iter().filter(|(bit, _)| bits & bit != 0);
            f.write_str(&set.map(|(_, name)| *name).collect::<Vec<_>>().join(","))
        }
        (Shown::Interface, bytes) => {
            let shown = String::from_utf8_lossy(bytes);
            let open = if bytes.last() == Some(&0) { "" } else { "*" };
            write!(f, "\"{}{open}\"", shown.trim_end_matches('\0'))
        }
        (Shown::Named(names), bytes) => match names.iter().find(|(known, _)| *known == bytes) {
            Some((_, name)) => f.write_str(name),
            None => hex(f, bytes),
        },
        (_, bytes) => hex(f, bytes),
    }
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
}

fn hex(f: &mut Formatter<'_>, bytes: &[u8]) -> fmt::Result {
    f.write_str("0x")?;
    bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
    if bytes.is_empty() { f.write_char('0') } else { Ok(()) }
}
