//! Which addresses of an upstream's answer belong to the question: those of the name itself or of
//! the end of its CNAME chain (RFC 1034 section 3.6.2), and no others. An upstream, or whoever
//! writes a zone, can put any record beside them. Pure.

use std::fmt;
use std::net::IpAddr;

use hickory_proto::rr::{Name, RData, Record, RecordType};

/// CNAMEs followed from the question.
pub(crate) const MAX_ALIASES: usize = 8;
/// Addresses kept of one answer.
pub(crate) const MAX_ADDRESSES: usize = 32;

/// A family of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// IPv4: A records.
    V4,
    /// IPv6: AAAA records (RFC 3596).
    V6,
}

impl Family {
    pub(crate) const fn record_type(self) -> RecordType {
        match self {
            Self::V4 => RecordType::A,
            Self::V6 => RecordType::AAAA,
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        })
    }
}

/// The addresses that `name` leads to, without repeats, in order, and the lowest TTL in seconds on
/// the way. Empty when the chain leads nowhere, in a circle, or too far.
pub(crate) fn reachable(name: &Name, family: Family, records: &[Record]) -> (Vec<IpAddr>, u32) {
    let mut owner = name;
    let mut ttl = u32::MAX;
    for _ in 0..=MAX_ALIASES {
        let mut addresses = Vec::new();
        let mut alias = None;
        for record in records.iter().filter(|record| record.name == *owner) {
            let address: IpAddr = match (&record.data, family) {
                (RData::A(a), Family::V4) => a.0.into(),
                (RData::AAAA(aaaa), Family::V6) => aaaa.0.into(),
                (RData::CNAME(target), _) => {
                    alias = Some((&target.0, record.ttl));
                    continue;
                }
                _ => continue,
            };
            ttl = ttl.min(record.ttl);
            if addresses.len() < MAX_ADDRESSES && !addresses.contains(&address) {
                addresses.push(address);
            }
        }
        match alias {
            _ if !addresses.is_empty() => return (addresses, ttl),
            Some((target, hop)) => (owner, ttl) = (target, ttl.min(hop)),
            None => break,
        }
    }
    (Vec::new(), ttl)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use hickory_proto::rr::rdata::{A, CNAME};
    use proptest::prelude::*;

    use super::*;

    fn name(text: &str) -> Name {
        Name::from_ascii(text).expect("name")
    }
    fn a(owner: &str, last: u8, ttl: u32) -> Record {
        Record::from_rdata(name(owner), ttl, RData::A(A(Ipv4Addr::new(192, 0, 2, last))))
    }
    fn cname(owner: &str, target: &str, ttl: u32) -> Record {
        Record::from_rdata(name(owner), ttl, RData::CNAME(CNAME(name(target))))
    }
    fn lasts(records: &[Record]) -> (Vec<u8>, u32) {
        let (addresses, ttl) = reachable(&name("q.example."), Family::V4, records);
        let last = |ip| match ip {
            IpAddr::V4(v4) => v4.octets()[3],
            IpAddr::V6(_) => panic!("IPv6 told to an IPv4 question"),
        };
        (addresses.into_iter().map(last).collect(), ttl)
    }

    #[test]
    fn a_chain_is_followed_in_any_order_of_records_and_case_of_names() {
        let chain = [
            a("C.example.", 3, 60),
            cname("b.EXAMPLE.", "c.example.", 30),
            a("other.example.", 9, 1),
            cname("Q.example.", "b.example.", 90),
        ];
        assert_eq!(lasts(&chain), (vec![3], 30));
    }

    #[test]
    fn records_beside_the_chain_do_not_count() {
        assert_eq!(
            lasts(&[a("other.example.", 9, 60), cname("other.example.", "q.example.", 60)]).0,
            [0_u8; 0]
        );
        assert_eq!(lasts(&[a("q.example.", 1, 60), a("other.example.", 9, 60)]).0, [1]);
    }

    #[test]
    fn a_circle_and_an_endless_chain_lead_nowhere() {
        let circle = [cname("q.example.", "b.example.", 1), cname("b.example.", "q.example.", 1)];
        assert_eq!(lasts(&circle).0, [0_u8; 0]);
        let link = |n: usize| match n {
            0 => "q.example.".to_owned(),
            n => format!("n{n}.example."),
        };
        let chain = |aliases: usize| {
            let mut records: Vec<_> =
                (0..aliases).map(|n| cname(&link(n), &link(n + 1), 60)).collect();
            records.push(a(&link(aliases), 7, 60));
            records
        };
        assert_eq!(lasts(&chain(MAX_ALIASES)).0, [7]);
        assert_eq!(lasts(&chain(MAX_ALIASES + 1)).0, [0_u8; 0]);
    }

    proptest! {
        #[test]
        fn every_address_told_is_owned_by_a_name_on_the_chain(
            edges in prop::collection::vec((0..6_usize, 0..6_usize, any::<bool>()), 0..30),
        ) {
            let owner = |n: usize| if n == 0 { "q.example.".to_owned() } else { format!("n{n}.example.") };
            let records: Vec<_> = edges.iter().map(|&(from, to, alias)| {
                if alias { cname(&owner(from), &owner(to), 60) } else { a(&owner(from), u8::try_from(from).expect("small"), 60) }
            }).collect();
            // The oracle: every name that some path of aliases reaches.
            let mut reached = vec![0];
            for _ in 0..6 {
                for &(from, to, alias) in &edges {
                    if alias && reached.contains(&from) && !reached.contains(&to) { reached.push(to); }
                }
            }
            for last in lasts(&records).0 {
                prop_assert!(reached.contains(&usize::from(last)));
            }
        }
    }
}
