//! Which datagrams of a slot the fence lets as far as the relay: the networks and ports that its
//! policy names. Pure.
//!
//! More may pass here than the policy allows, and never less: the relay judges each session. So a
//! policy that names much is held in few rules, which say less.

use policy::Reach;

use crate::fence::field::{ETHERTYPE_IP, IP_DADDR, META_L4PROTO, META_PROTOCOL, UDP, UDP_DPORT};
use crate::fence::rule::{Expr, Rule, is, masked};
use crate::world::RELAYED;

/// Rules a slot has for this: each is tried for every datagram, and checked by the kernel whenever
/// a slot of the same table changes.
const MOST: usize = 32;

/// The rules, each of which does `mend` to the packet and lets it pass with the relay's mark.
pub(crate) fn rules(udp: &[Reach], mend: &[Expr]) -> Vec<Rule> {
    let rule = |reach: Reach| {
        let (net, mask) = (reach.net.network().octets(), reach.net.netmask().octets());
        let mut exprs = vec![is(META_PROTOCOL, ETHERTYPE_IP), is(META_L4PROTO, UDP)];
        exprs.extend(match reach.net.prefix_len() {
            0 => None,
            32 => Some(is(IP_DADDR, net)),
            _ => Some(masked(IP_DADDR, mask, true, net)),
        });
        exprs.extend(reach.ports.map(|(first, last)| match first == last {
            true => is(UDP_DPORT, first.to_be_bytes()),
            false => Expr::Between {
                field: UDP_DPORT,
                first: first.to_be_bytes(),
                last: last.to_be_bytes(),
            },
        }));
        exprs.extend(mend.iter().cloned());
        exprs.extend([Expr::Mark(RELAYED), Expr::Accept]);
        Rule::new(exprs)
    };
    few(udp).into_iter().map(rule).collect()
}

/// At most [`MOST`] that hold all of these: first without their ports, then everything.
fn few(udp: &[Reach]) -> Vec<Reach> {
    if udp.len() <= MOST {
        return udp.to_vec();
    }
    let mut wider: Vec<Reach> =
        udp.iter().map(|reach| Reach { net: reach.net, ports: None }).collect();
    wider.sort_unstable();
    wider.dedup();
    if wider.len() <= MOST {
        return wider;
    }
    vec![Reach { net: ipnet::Ipv4Net::default(), ports: None }]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reach(text: &str, ports: Option<(u16, u16)>) -> Reach {
        Reach { net: text.parse().expect("a network"), ports }
    }

    #[test]
    fn a_policy_that_names_much_is_held_in_few_rules_that_hold_it_all() {
        let port = |n| reach("192.0.2.0/24", Some((n, n)));
        let ports: Vec<Reach> = (1..=33).map(port).collect();
        assert_eq!(few(&ports[..32]), ports[..32]);
        assert_eq!(few(&ports), [reach("192.0.2.0/24", None)]);
        let nets: Vec<Reach> = (1..=33).map(|n| reach(&format!("10.{n}.0.0/16"), None)).collect();
        assert_eq!(few(&nets), [reach("0.0.0.0/0", None)]);
        assert_eq!(few(&[]), []);
    }

    #[test]
    fn every_rule_is_for_datagrams_only_and_marks_them_for_the_relay() {
        let all = [reach("0.0.0.0/0", None), reach("10.0.0.0/9", Some((7, 9)))];
        for rule in rules(&all, &[]) {
            assert!(rule.exprs.contains(&is(META_L4PROTO, UDP)), "{rule}");
            assert!(rule.exprs.ends_with(&[Expr::Mark(RELAYED), Expr::Accept]), "{rule}");
        }
    }
}
