//! The rules themselves: what all slots share, and the four chains of one slot.
//!
//! What is accepted is said first and whole. Everything below that only names why the rest is
//! dropped, for counters and samples: no rule there can let anything in.

use std::net::Ipv4Addr;

use policy::net::{GATEWAY_IP, GATEWAY_MAC, GUEST_IP, GUEST_MAC, INTERNAL_BASE};
use policy::{Reach, Slot};

use crate::fence::field::*;
use crate::fence::reach;
use crate::fence::reason::Reason;
use crate::fence::rule::{
    Chain, Expr, Family, Hook, Point, Rule, Ruleset, Set, Table, TableId, is, is_not, masked,
};
use crate::world::{EXCESS, MARK, REFUSED, RELAYED};

const TABLE: &str = "postern";
/// The kernel checks a whole table whenever a rule of it changes, about 0.008 ms for each slot in it;
/// `nft list ruleset` on the other hand reads every rule once for each table.
const SLOTS_A_TABLE: u16 = 128;
/// Addresses that no guest can reach, not even to be refused by name.
const NOWHERE: &str = "nowhere";
const DNS_PORT: u16 = 53;
const QUIC_PORT: u16 = 443;
/// How many bytes of a dropped packet are looked at, and how often.
const SNAPLEN: u32 = 128;
const SAMPLES: Expr = Expr::Limit { rate: 10, burst: 20 };
/// What of questions is worth to be read by who answers them: several times as many as are answered.
const QUESTIONS: Expr = Expr::Limit { rate: 1000, burst: 2000 };
/// Offset of the checksum in an IPv4 header, and of the quoted header's in an ICMP error.
const IP_CHECKSUM: u32 = 10;
const QUOTED_CHECKSUM: u32 = 18;
/// A budget that its guest's first frames, or its largest one, exceed would be none.
const LEAST_AT_ONCE: u32 = 10;
const LARGEST_FRAME: u32 = 1 << 18;
/// Before connection tracking and whatever else an operator may hang on a device.
const FIRST: i32 = -300;
const MANGLE: i32 = -150;

/// What the fence of one slot can be told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotFence {
    /// The nflog group that gets samples of what is dropped.
    pub nflog_group: u16,
    /// New TCP connections a second.
    pub syn_rate: u32,
    /// New TCP connections at once.
    pub syn_burst: u32,
    /// Frames a second, whatever they are, and a tenth of that at once.
    pub packets: u32,
    /// Bytes a second, and a tenth of that at once; none: as many as it can.
    pub bytes: Option<u64>,
    /// Where datagrams may go as far as the relay, which judges them.
    pub udp: Vec<Reach>,
}

impl SlotFence {
    /// 200 new connections a second, 400 at once, 100,000 frames a second of any length, and no
    /// datagrams but questions.
    #[must_use]
    pub fn new(nflog_group: u16) -> Self {
        Self {
            nflog_group,
            syn_rate: 200,
            syn_burst: 400,
            packets: 100_000,
            bytes: None,
            udp: Vec::new(),
        }
    }

    /// What is more than a guest may send; the cheapest question comes before all others.
    fn excess(&self) -> impl Iterator<Item = Rule> {
        let packets = u64::from(self.packets);
        let budgets = [(packets, LEAST_AT_ONCE, false)];
        let bytes = self.bytes.map(|bytes| (bytes, LARGEST_FRAME, true));
        budgets.into_iter().chain(bytes).map(|(rate, least, bytes)| {
            let burst = u32::try_from(rate / 10).unwrap_or(u32::MAX).max(least);
            Rule::new([Expr::Over { rate, burst, bytes }, Expr::Mark(EXCESS)])
        })
    }
}

/// What all slots share. What a slot's chains marked as refused is answered here and not there: the
/// kernels of Debian 12 cannot reject in a netdev chain. The errors name the slot's address until
/// the slot's way out makes them the guest's own again. TCP, and UDP for the relay, go to the
/// transparent sockets at `divert_port`, DNS over UDP to those at port 53; nothing is forwarded,
/// and only a guest is ever answered.
#[must_use]
pub fn base(divert_port: u16) -> Table {
    let from_tap = || is(IIFNAME, "pt");
    let to_tap = || is(OIFNAME, "pt");
    let marked = || is(META_MARK, MARK.to_ne_bytes());
    let refused = || is(META_MARK, REFUSED.to_ne_bytes());
    let relayed = || [is(META_MARK, RELAYED.to_ne_bytes()), is(META_L4PROTO, UDP)];
    let udp_to_dns = || [is(META_L4PROTO, UDP), is(UDP_DPORT, DNS_PORT.to_be_bytes())];
    let divert = |matched: &[Expr], port| {
        let taken = [Expr::Divert(port), Expr::Mark(MARK), Expr::Accept];
        Rule::new([&[from_tap()], matched, &taken].concat())
    };
    let chain = |name: &str, point, priority, rules| Chain {
        name: name.to_owned(),
        hook: Some(Hook { point, priority, device: None }),
        rules,
    };
    Table {
        id: TableId { family: Family::Inet, name: TABLE.to_owned() },
        sets: Vec::new(),
        chains: vec![
            chain(
                "divert",
                Point::Prerouting,
                MANGLE,
                vec![
                    Rule::new([is(IIFNAME, interface("lo")), Expr::Accept]),
                    Rule::new([from_tap(), refused(), is(META_L4PROTO, TCP), Expr::RejectReset]),
                    Rule::new([
                        from_tap(),
                        refused(),
                        is(META_NFPROTO, [2]),
                        Expr::RejectProhibited,
                    ]),
                    divert(&[is(META_L4PROTO, TCP)], divert_port),
                    divert(&relayed(), divert_port),
                    divert(&udp_to_dns(), DNS_PORT),
                ],
            ),
            chain(
                "input",
                Point::Input,
                0,
                vec![
                    Rule::new([is(IIFNAME, interface("lo")), Expr::Accept]),
                    Rule::new([from_tap(), marked(), Expr::Accept]),
                ],
            ),
            chain("forward", Point::Forward, 0, Vec::new()),
            chain(
                "output",
                Point::Output,
                0,
                vec![
                    Rule::new([is(OIFNAME, interface("lo")), Expr::Accept]),
                    Rule::new([
                        to_tap(),
                        is(META_NFPROTO, [2]),
                        is(META_L4PROTO, ICMP),
                        is(ICMP_TYPE, [5]),
                        Expr::Drop,
                    ]),
                    Rule::new([
                        to_tap(),
                        is(META_NFPROTO, [2]),
                        is(IP_DADDR, internal_prefix()),
                        Expr::Accept,
                    ]),
                ],
            ),
        ],
    }
}

/// The table with the chains of one slot, as if it were alone in it.
#[must_use]
pub fn slot(slot: Slot, fence: &SlotFence) -> Table {
    let [ingress, guest, udp, egress] = chain_names(slot);
    let hook = |point| Some(Hook { point, priority: FIRST, device: Some(slot.tap()) });
    let chains = vec![
        datagrams(slot, fence),
        Chain { name: guest.clone(), hook: None, rules: guest_rules(slot, fence, udp) },
        Chain { name: ingress, hook: hook(Point::Ingress), rules: in_rules(slot, fence, guest) },
        Chain { name: egress, hook: hook(Point::Egress), rules: out_rules(slot) },
    ];
    Table { id: table_of(slot), sets: vec![nowhere()], chains }
}

/// The chain of a slot that changes with its policy: which datagrams go to the relay.
pub(crate) fn datagrams(slot: Slot, fence: &SlotFence) -> Chain {
    let [_, _, name, _] = chain_names(slot);
    let rules = reach::rules(&fence.udp, &[rewrite(IP_SADDR, slot.address())]);
    Chain { name, hook: None, rules }
}

/// Everything: what all slots share, and the chains of these.
#[must_use]
pub fn ruleset(divert_port: u16, slots: &[(Slot, SlotFence)]) -> Ruleset {
    let mut tables = vec![base(divert_port)];
    for table in slots.iter().map(|(at, fence)| slot(*at, fence)) {
        match tables.iter_mut().find(|known| known.id == table.id) {
            Some(known) => known.chains.extend(table.chains),
            None => tables.push(table),
        }
    }
    Ruleset(tables)
}

/// The table that holds a slot's chains.
pub(crate) fn table_of(slot: Slot) -> TableId {
    let first = slot.number() - slot.number() % SLOTS_A_TABLE;
    TableId { family: Family::Netdev, name: format!("{TABLE}_{first}") }
}

/// Whether a table of this name is one of ours.
pub(crate) fn is_ours(name: &str) -> bool {
    name.strip_prefix(TABLE).is_some_and(|rest| rest.is_empty() || rest.starts_with('_'))
}

/// The names of a slot's chains, in the order in which they can be removed.
pub(crate) fn chain_names(slot: Slot) -> [String; 4] {
    ["in", "guest", "udp", "out"].map(|part| format!("{part}_{}", slot.tap()))
}

/// The slot to which a chain of this name belongs.
pub(crate) fn slot_of_chain(name: &str) -> Option<Slot> {
    let (part, tap) = name.split_once('_')?;
    matches!(part, "in" | "guest" | "udp" | "out").then(|| Slot::of_tap(tap)).flatten()
}

/// Every frame of the guest enters here.
fn in_rules(slot: Slot, fence: &SlotFence, guest: String) -> Vec<Rule> {
    let why = |reason, matched: &[Expr]| refusal(slot, fence, reason, matched, &[Expr::Drop]);
    let plain_header = [0x45];
    let to_nowhere = || Expr::In { field: IP_DADDR, set: NOWHERE, inside: true };
    // One bucket each: what it finds is marked, so that counter and samples are of the same frames.
    let excess = why(Reason::Rate, &[is(META_MARK, EXCESS.to_ne_bytes())]);
    let mut rules: Vec<Rule> = fence.excess().chain(excess).collect();
    rules.extend([
        Rule::new([
            ethernet(),
            is(ETHER_TYPE, ETHERTYPE_IP),
            is(ETHER_DADDR, GATEWAY_MAC),
            is(ETHER_SADDR, GUEST_MAC),
            is(IP_VERSION_IHL, plain_header),
            masked(IP_FRAG_OFF, [0x3f, 0xff], true, [0, 0]),
            is(IP_SADDR, GUEST_IP.octets()),
            Expr::In { field: IP_DADDR, set: NOWHERE, inside: false },
            Expr::Jump(guest),
        ]),
        arp_request(GATEWAY_MAC),
        arp_request([0xff; 6]),
    ]);
    let named = [
        why(Reason::Spoof, &[ethernet(), is_not(ETHER_SADDR, GUEST_MAC)]),
        why(Reason::Arp, &[ethernet(), is(ETHER_TYPE, ETHERTYPE_ARP)]),
        why(Reason::Ipv6, &[ethernet(), is(ETHER_TYPE, ETHERTYPE_IP6)]),
        why(Reason::Ethertype, &[ethernet(), is_not(ETHER_TYPE, ETHERTYPE_IP)]),
        why(Reason::Spoof, &[ip(), is_not(IP_SADDR, GUEST_IP.octets())]),
        why(Reason::Destination, &[ethernet(), is_not(ETHER_DADDR, GATEWAY_MAC)]),
        why(Reason::IpOptions, &[is_not(IP_VERSION_IHL, plain_header)]),
        why(Reason::Fragment, &[ip(), masked(IP_FRAG_OFF, [0x3f, 0xff], false, [0, 0])]),
        refusal(
            slot,
            fence,
            Reason::Destination,
            &[ip(), to_nowhere(), is(META_L4PROTO, TCP)],
            &refuse(slot),
        ),
        why(Reason::Destination, &[ip(), to_nowhere()]),
        why(Reason::Protocol, &[is_not(META_L4PROTO, TCP), is_not(META_L4PROTO, UDP)]),
        why(Reason::Malformed, &[]),
    ];
    rules.extend(named.into_iter().flatten());
    rules
}

/// The guest asks for its gateway, in person, and nothing else.
fn arp_request(to: [u8; 6]) -> Rule {
    Rule::new([
        ethernet(),
        is(ETHER_TYPE, ETHERTYPE_ARP),
        is(ETHER_DADDR, to),
        is(ETHER_SADDR, GUEST_MAC),
        is(ARP_HTYPE, [0, 1]),
        is(ARP_PTYPE, ETHERTYPE_IP),
        is(ARP_HLEN, [6]),
        is(ARP_PLEN, [4]),
        is(ARP_OPERATION, [0, 1]),
        is(ARP_SADDR_ETHER, GUEST_MAC),
        is(ARP_SADDR_IP, GUEST_IP.octets()),
        is(ARP_DADDR_IP, GATEWAY_IP.octets()),
        Expr::Accept,
    ])
}

/// What is left of it: whole IPv4 packets of the guest to an address outside. Here it gets the
/// slot's address.
fn guest_rules(slot: Slot, fence: &SlotFence, relayed: String) -> Vec<Rule> {
    let admit = [rewrite(IP_SADDR, slot.address()), Expr::Accept];
    let opening =
        |equal| [ip(), is(META_L4PROTO, TCP), masked(TCP_FLAG_BITS, [0x12], equal, [0x02])];
    let rate = Expr::Limit { rate: fence.syn_rate, burst: fence.syn_burst };
    let udp_to = |port: u16| [ip(), is(META_L4PROTO, UDP), is(UDP_DPORT, port.to_be_bytes())];
    let udp = [ip(), is(META_L4PROTO, UDP)];
    let mut rules = vec![
        Rule::new([&opening(false)[..], &admit].concat()),
        Rule::new([&opening(true)[..], &[rate], &admit].concat()),
        Rule::new([&udp_to(DNS_PORT)[..], &[QUESTIONS], &admit].concat()),
    ];
    let named = [
        refusal(slot, fence, Reason::SynRate, &opening(true), &[Expr::Drop]),
        refusal(slot, fence, Reason::Rate, &udp_to(DNS_PORT), &[Expr::Drop]),
    ];
    rules.extend(named.into_iter().flatten());
    // After all that is said of questions: none may ever be relayed.
    rules.push(Rule::new([&udp[..], &[Expr::Jump(relayed)]].concat()));
    let named = [
        refusal(slot, fence, Reason::Quic, &udp_to(QUIC_PORT), &refuse(slot)),
        refusal(slot, fence, Reason::Udp, &udp, &refuse(slot)),
    ];
    rules.extend(named.into_iter().flatten());
    rules
}

/// Everything towards the guest leaves here: answers to its slot's address, and errors whose quoted
/// packet must be the guest's own again.
fn out_rules(slot: Slot) -> Vec<Rule> {
    let ours = slot.address().octets();
    let to_slot = || is(IP_DADDR, ours);
    let deliver = || [rewrite(IP_DADDR, GUEST_IP), Expr::Accept];
    let quoting = |icmp_type| {
        Rule::new([
            ip(),
            to_slot(),
            is(META_L4PROTO, ICMP),
            is(ICMP_TYPE, [icmp_type]),
            is(ICMP_QUOTED_SADDR, ours),
            Expr::Write {
                field: ICMP_QUOTED_SADDR,
                value: GUEST_IP.octets(),
                checksum: QUOTED_CHECKSUM,
                pseudo_header: false,
            },
        ])
    };
    vec![
        Rule::new([&[ip(), is_not(IP_PROTOCOL, ICMP), to_slot()][..], &deliver()].concat()),
        quoting(3),
        quoting(11),
        quoting(12),
        Rule::new([&[ip(), to_slot()][..], &deliver()].concat()),
        Rule::new([
            is(META_PROTOCOL, ETHERTYPE_ARP),
            is(ARP_OPERATION, [0, 2]),
            is(ARP_SADDR_IP, GATEWAY_IP.octets()),
            is(ARP_DADDR_IP, GUEST_IP.octets()),
            Expr::Accept,
        ]),
        Rule { exprs: vec![Expr::Counter, Expr::Drop], comment: Some(Reason::Stray.tag(slot)) },
    ]
}

/// True of every tap. Without it nftables lists what follows about the link layer as raw bytes.
/// It has no meaning towards the guest: there is no incoming interface.
fn ethernet() -> Expr {
    is(META_IIFTYPE, ARPHRD_ETHER)
}

/// The kernel takes it for IPv4.
fn ip() -> Expr {
    is(META_PROTOCOL, ETHERTYPE_IP)
}

/// Two rules, so that the counter is exact and the samples are bounded.
fn refusal(
    slot: Slot,
    fence: &SlotFence,
    reason: Reason,
    matched: &[Expr],
    verdict: &[Expr],
) -> [Rule; 2] {
    let tag = reason.tag(slot);
    let log = Expr::Log { group: fence.nflog_group, snaplen: SNAPLEN, prefix: tag.clone() };
    [
        Rule::new([matched, &[SAMPLES, log]].concat()),
        Rule { exprs: [matched, &[Expr::Counter], verdict].concat(), comment: Some(tag) },
    ]
}

/// Lets the packet as far as the base, which answers it with a refusal.
fn refuse(slot: Slot) -> [Expr; 3] {
    [rewrite(IP_SADDR, slot.address()), Expr::Mark(REFUSED), Expr::Accept]
}

fn rewrite(field: Field, to: Ipv4Addr) -> Expr {
    Expr::Write { field, value: to.octets(), checksum: IP_CHECKSUM, pseudo_header: true }
}

/// Where nobody is: this network (RFC 791), loopback, the guest's own link but for its gateway, the
/// guests' internal range, multicast, reserved and broadcast. Private and metadata addresses are
/// not among them: those connections reach the router, which refuses them at once, with a record.
fn nowhere() -> Set {
    let net = |a, b, c, d, bits: u32| {
        let first = Ipv4Addr::new(a, b, c, d);
        (first, Ipv4Addr::from_bits(first.to_bits() | (u32::MAX >> bits)))
    };
    let beside_gateway = |n| Ipv4Addr::from_bits(GUEST_IP.to_bits() - 2 + n);
    let ranges = vec![
        net(0, 0, 0, 0, 8),
        net(127, 0, 0, 0, 8),
        (beside_gateway(0), beside_gateway(0)),
        (beside_gateway(2), beside_gateway(3)),
        net(198, 18, 0, 0, 16),
        net(224, 0, 0, 0, 3),
    ];
    Set { name: NOWHERE, ranges }
}

fn internal_prefix() -> [u8; 2] {
    let [a, b, ..] = INTERNAL_BASE.octets();
    [a, b]
}

/// A whole name of an interface: padded to the 16 bytes that the kernel compares.
fn interface(name: &str) -> [u8; 16] {
    let mut padded = [0; 16];
    padded.iter_mut().zip(name.bytes()).for_each(|(to, from)| *to = from);
    padded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_base_reads_as_nftables_text() {
        insta::assert_snapshot!(base(3128));
    }

    #[test]
    fn a_slot_reads_as_nftables_text() {
        let reach = |net: &str, ports| Reach { net: net.parse().expect("a network"), ports };
        let udp = vec![reach("192.0.2.0/28", None), reach("203.0.113.7/32", Some((3478, 3481)))];
        let fence = SlotFence { udp, ..SlotFence::new(5) };
        insta::assert_snapshot!(slot(Slot::new(258).expect("in range"), &fence));
    }

    #[test]
    fn every_drop_says_why_and_is_counted() {
        let at = Slot::new(7).expect("in range");
        for rule in slot(at, &SlotFence::new(5)).chains.iter().flat_map(|chain| &chain.rules) {
            let refuses =
                rule.exprs.iter().any(|expr| matches!(expr, Expr::Drop | Expr::Mark(REFUSED)));
            let tag = rule.comment.as_deref().and_then(Reason::of_tag);
            assert_eq!(refuses, tag.is_some_and(|(slot, _)| slot == at), "{rule}");
            assert_eq!(refuses, rule.exprs.contains(&Expr::Counter), "{rule}");
        }
    }

    #[test]
    fn no_question_gets_as_far_as_the_rules_for_the_relay() {
        let at = Slot::new(7).expect("in range");
        let rules = guest_rules(at, &SlotFence::new(5), "udp_pt7".to_owned());
        let jump = |rule: &Rule| rule.exprs.contains(&Expr::Jump("udp_pt7".to_owned()));
        let jump = rules.iter().position(jump).expect("a jump");
        let question = is(UDP_DPORT, DNS_PORT.to_be_bytes());
        let last = rules.iter().rposition(|rule| rule.exprs.contains(&question));
        let last = last.expect("rules about questions");
        assert!(last < jump && rules[last].exprs.ends_with(&[Expr::Drop]));
        assert_eq!(rules[last].exprs[..3], [ip(), is(META_L4PROTO, UDP), question], "any at all");
    }

    #[test]
    fn slots_share_tables_that_stay_small() {
        let at = |n| Slot::new(n).expect("in range");
        let slots: Vec<_> = (1..=300).map(|n| (at(n), SlotFence::new(5))).collect();
        let Ruleset(tables) = ruleset(3128, &slots);
        let names: Vec<&str> = tables.iter().map(|table| table.id.name.as_str()).collect();
        assert_eq!(names, ["postern", "postern_0", "postern_128", "postern_256"]);
        assert!(tables.iter().all(|table| table.chains.len() <= 4 * 128));
        assert_eq!(tables.iter().map(|table| table.chains.len()).sum::<usize>(), 4 + 1200);
        assert!(names.into_iter().all(is_ours) && !is_ours("posterns") && !is_ours("filter"));
    }

    #[test]
    fn a_chain_name_leads_back_to_its_slot() {
        let at = Slot::new(7).expect("in range");
        assert!(chain_names(at).iter().all(|name| slot_of_chain(name) == Some(at)));
        assert_eq!(slot_of_chain("pre_pt7"), None);
        assert_eq!(slot_of_chain("in_pt07"), None);
    }
}
