//! The classifier, row by row of the registries, and every way to carry IPv4 in IPv6.

use std::net::IpAddr;

use ipnet::IpNet;
use policy::class::{REACHABLE_V4, REACHABLE_V6, SPECIAL_V4, SPECIAL_V6};
use policy::{AddressClass, OwnAddresses};
use proptest::prelude::*;

fn class(text: &str) -> AddressClass {
    AddressClass::of(text.parse().expect(text), &OwnAddresses::default())
}

#[test]
#[rustfmt::skip]
fn addresses_have_the_class_of_their_registry() {
    for (text, expected) in [
        ("0.0.0.0", "This network"),
        ("0.1.2.3", "This network"),
        ("10.0.0.0", "Private-Use"),
        ("10.255.255.255", "Private-Use"),
        ("100.64.0.0", "Shared Address Space"),
        ("100.100.100.200", "Shared Address Space"),
        ("100.127.255.255", "Shared Address Space"),
        ("127.0.0.1", "Loopback"),
        ("127.255.255.255", "Loopback"),
        ("168.63.129.16", "Azure platform address"),
        ("169.254.169.254", "Link Local"),
        ("172.16.0.0", "Private-Use"),
        ("172.31.255.255", "Private-Use"),
        ("192.0.0.0", "IPv4 Service Continuity Prefix"),
        ("192.0.0.7", "IPv4 Service Continuity Prefix"),
        ("192.0.0.8", "IPv4 dummy address"),
        ("192.0.0.11", "IETF Protocol Assignments"),
        ("192.0.0.170", "NAT64/DNS64 Discovery"),
        ("192.0.0.171", "NAT64/DNS64 Discovery"),
        ("192.0.0.255", "IETF Protocol Assignments"),
        ("192.0.2.1", "Documentation (TEST-NET-1)"),
        ("192.88.99.1", "Deprecated (6to4 Relay Anycast)"),
        ("192.88.99.2", "6a44-relay anycast address"),
        ("192.168.255.255", "Private-Use"),
        ("198.18.0.1", "Benchmarking"),
        ("198.19.255.255", "Benchmarking"),
        ("198.51.100.1", "Documentation (TEST-NET-2)"),
        ("203.0.113.255", "Documentation (TEST-NET-3)"),
        ("224.0.0.1", "Multicast"),
        ("239.255.255.255", "Multicast"),
        ("240.0.0.1", "Reserved"),
        ("255.255.255.255", "Limited Broadcast"),
        ("::", "Unspecified Address"),
        ("::1", "Loopback Address"),
        ("::2", "IPv4-compatible Address"),
        ("64:ff9b:1::1", "IPv4-IPv6 Translation, local-use"),
        ("100::1", "Discard-Only Address Block"),
        ("100:0:0:1::1", "Dummy IPv6 Prefix"),
        ("100:0:0:2::1", "Not allocated for global unicast"),
        ("2001::1", "TEREDO"),
        ("2001:1::4", "IETF Protocol Assignments"),
        ("2001:2::1", "Benchmarking"),
        ("2001:2:1::1", "IETF Protocol Assignments"),
        ("2001:4:113::1", "IETF Protocol Assignments"),
        ("2001:10::1", "Deprecated (ORCHID)"),
        ("2001:1ff:ffff::1", "IETF Protocol Assignments"),
        ("2001:db8::1", "Documentation"),
        ("2002::1", "6to4"),
        ("3fff:0fff::1", "Documentation"),
        ("5f00::1", "Segment Routing (SRv6) SIDs"),
        ("4000::1", "Not allocated for global unicast"),
        ("9000::1", "Not allocated for global unicast"),
        ("fc00::1", "Unique-Local"),
        ("fd00:ec2::254", "Unique-Local"),
        ("fe80::1", "Link-Local Unicast"),
        ("fec0::1", "Deprecated (Site-Local)"),
        ("ff02::1", "Multicast"),
        ("ff0e::1", "Multicast"),
    ] {
        assert_eq!(class(text), AddressClass::Special(expected), "{text}");
    }
    for text in [
        "1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0",
        "126.255.255.255", "128.0.0.0", "168.63.129.15", "169.253.255.255", "169.255.0.0",
        "172.15.255.255", "172.32.0.0", "192.0.1.0", "192.0.3.0", "192.88.98.0",
        "192.167.255.255", "192.169.0.0", "198.17.255.255", "198.20.0.0", "223.255.255.255",
        "192.31.196.1", "192.52.193.1", "192.175.48.1", "2606:4700::1111", "2001:200::1",
        "2001:4860:4860::8888", "2620:4f:8000::1", "2003::1", "2000::1", "3ffe::1",
        "3fff:1000::1",
    ] {
        assert_eq!(class(text), AddressClass::Public, "{text}");
    }
}

#[test]
#[rustfmt::skip]
fn what_the_registry_calls_reachable_inside_a_special_block_is_public() {
    for text in [
        "192.0.0.9", "192.0.0.10", "2001:1::1", "2001:1::2", "2001:1::3", "2001:3::1",
        "2001:4:112::1", "2001:20::1", "2001:2f:ffff::1", "2001:30::1", "64:ff9b::808:808",
    ] {
        assert_eq!(class(text), AddressClass::Public, "{text}");
    }
}

#[test]
fn ipv4_inside_ipv6_is_never_more_public_than_itself() {
    for (text, name) in [
        ("::ffff:127.0.0.1", "Loopback"),
        ("::ffff:169.254.169.254", "Link Local"),
        ("::127.0.0.1", "IPv4-compatible Address"),
        ("::8.8.8.8", "IPv4-compatible Address"),
        ("::ffff:0:127.0.0.1", "IPv4-translated Address"),
        ("64:ff9b::10.0.0.1", "Private-Use"),
        ("64:ff9b::169.254.169.254", "Link Local"),
        ("64:ff9b:1::10.0.0.1", "IPv4-IPv6 Translation, local-use"),
        ("64:ff9b:1:ffff:ffff:ffff:a9fe:a9fe", "IPv4-IPv6 Translation, local-use"),
        ("2002:7f00:1::1", "6to4"),
        ("2002:808:808::1", "6to4"),
        // Teredo: server 10.0.0.1; then the obfuscated client 127.0.0.1.
        ("2001:0:a00:1::", "TEREDO"),
        ("2001:0:808:808:0:0:80ff:fffe", "TEREDO"),
        ("2606:4700::5efe:10.0.0.1", "ISATAP"),
        ("2606:4700::200:5efe:8.8.8.8", "ISATAP"),
        ("fe80::5efe:10.0.0.1", "Link-Local Unicast"),
    ] {
        assert_eq!(class(text), AddressClass::Special(name), "{text}");
    }
    assert_eq!(class("::ffff:8.8.8.8"), AddressClass::Public);
    assert_eq!(class("2606:4700::100:5efe:a00:1"), AddressClass::Public, "another identifier");
}

#[test]
#[rustfmt::skip]
fn an_address_of_this_host_is_own_in_every_spelling_and_for_every_clone() {
    let own = OwnAddresses::default();
    let clone = own.clone();
    let address: IpAddr = "198.51.100.10".parse().expect("address");
    assert!(!clone.contains(address));
    own.replace([address, "::ffff:8.8.4.4".parse().expect("address")]);
    for text in ["198.51.100.10", "::ffff:198.51.100.10", "64:ff9b::198.51.100.10", "8.8.4.4"] {
        assert_eq!(
            AddressClass::of(text.parse().expect(text), &clone),
            AddressClass::Own,
            "{text}"
        );
    }
    own.replace([]);
    assert!(!clone.contains(address));
    let net = |text: &str| text.parse::<IpNet>().expect(text);
    own.replace_all([address], [net("45.99.0.0/24"), net("45.98.0.7/32")]);
    for text in ["198.51.100.10", "45.99.0.7", "64:ff9b::45.99.0.255", "45.98.0.7"] {
        let class = AddressClass::of(text.parse().expect(text), &clone);
        assert_eq!(class, AddressClass::Own, "{text}");
    }
    for text in ["45.99.1.0", "45.98.0.6"] {
        let class = AddressClass::of(text.parse().expect(text), &clone);
        assert_eq!(class, AddressClass::Public, "{text}");
    }
}

#[test]
fn tables_put_the_narrow_before_the_wide_and_holes_inside_blocks() {
    fn before<N: Copy + Into<IpNet>>(rows: &[(N, &str)]) {
        for (at, (wide, name)) in rows.iter().enumerate() {
            for (later, _) in rows.iter().skip(at + 1) {
                let (wide, later): (IpNet, IpNet) = ((*wide).into(), (*later).into());
                assert!(!wide.contains(&later), "{later} is hidden by {wide} {name}");
            }
            let net: IpNet = (*wide).into();
            assert_eq!(net, net.trunc(), "{name}");
        }
    }
    fn inside<N: Copy + Into<IpNet>>(holes: &[(N, &str)], blocks: &[(N, &str)]) {
        for (hole, name) in holes {
            let hole: IpNet = (*hole).into();
            let held = blocks.iter().any(|(block, _)| (*block).into().contains(&hole));
            assert!(held, "{hole} {name}");
        }
    }
    before(SPECIAL_V4);
    before(SPECIAL_V6);
    inside(REACHABLE_V4, SPECIAL_V4);
    inside(REACHABLE_V6, SPECIAL_V6);
}

proptest! {
    #[test]
    fn a_mapped_address_has_the_class_of_its_ipv4(bits: u32) {
        let v4 = std::net::Ipv4Addr::from_bits(bits);
        let own = OwnAddresses::default();
        let plain = AddressClass::of(v4.into(), &own);
        prop_assert_eq!(AddressClass::of(v4.to_ipv6_mapped().into(), &own), plain);
        let nat64: IpAddr = format!("64:ff9b::{v4}").parse().expect("address");
        prop_assert_eq!(AddressClass::of(nat64, &own), plain);
        let agrees = v4.is_private() || v4.is_loopback() || v4.is_link_local() || v4.is_multicast()
            || v4.is_broadcast() || v4.is_documentation() || v4.is_unspecified();
        prop_assert!(!agrees || plain != AddressClass::Public, "{}", v4);
    }

    #[test]
    fn only_allocated_ipv6_is_public(bits: u128) {
        let v6 = std::net::Ipv6Addr::from_bits(bits);
        if AddressClass::of(v6.into(), &OwnAddresses::default()) == AddressClass::Public {
            prop_assert_eq!(bits >> 125, 1);
        }
    }
}
