//! Link-local and metadata addresses: only the operator opens them. Never lets a tenant's rule do it.

use std::net::IpAddr;

use policy::{
    Compiled, Evidence, Explanation, Flow, Layer, OwnAddresses, Policy, Protocol, Revision, explain,
};

const GUARDED: [&str; 9] = [
    "169.254.169.254",
    "169.254.0.1",
    "168.63.129.16",
    "100.100.100.200",
    "192.0.0.192",
    "fe80::a9fe:a9fe",
    "fd00:ec2::254",
    "64:ff9b::169.254.169.254",
    "2002:a9fe:a9fe::1",
];

fn compiled(layers: &[(Layer, String)]) -> Compiled {
    let read = |text: &String| Policy::from_toml(text).expect("a policy");
    let policies: Vec<(Layer, Policy)> = layers.iter().map(|(l, t)| (*l, read(t))).collect();
    let layers: Vec<(Layer, &Policy)> = policies.iter().map(|(l, p)| (*l, p)).collect();
    Compiled::new(&layers, Revision(0))
}

/// What becomes of a connection to this address.
fn told(layers: &[(Layer, String)], address: &str) -> Explanation {
    let destination: IpAddr = address.parse().expect("an address");
    let flow = Flow {
        protocol: Protocol::Tcp,
        port: 80,
        destination: Some(destination),
        evidence: Evidence::Address,
    };
    explain(&compiled(layers), &flow, &OwnAddresses::default())
}

fn allows(peer: &str) -> String {
    format!("[[rule]]\nallow = [\"{peer}\"]\n")
}

fn block(address: &str) -> &'static str {
    match address.parse().expect("an address") {
        IpAddr::V4(v4) if v4.is_link_local() => "169.254.0.0/16",
        IpAddr::V4(v4) if v4.octets()[0] == 100 => "100.64.0.0/10",
        IpAddr::V4(_) => "192.0.0.0/24",
        IpAddr::V6(v6) if v6.segments()[0] == 0xfd00 => "fc00::/7",
        IpAddr::V6(_) => "fe80::/10",
    }
}

/// 169.254.169.254 where RFC 6052, section 2.2, puts it behind prefixes of each length: in the network
/// for local use of RFC 8215, and in private ones.
const TRANSLATED: [&str; 10] = [
    "64:ff9b:1:a9fe:a9:fe00::",
    "64:ff9b:1:aaa9:fe:a9fe::",
    "64:ff9b:1:aaaa:a9:fea9:fe00:0",
    "64:ff9b:1:aaaa::a9fe:a9fe",
    "fd00:64:a9fe:a9fe::",
    "fd00:64:aaa9:fea9:fe::",
    "fd00:64:aaaa:a9fe:a9:fe00::",
    "fd00:64:aaaa:aaa9:fe:a9fe::",
    "fd00:64:aaaa:aaaa:a9:fea9:fe00:0",
    "fd00:64:aaaa:aaaa::a9fe:a9fe",
];

/// Promise 10. Attacks C04 and F04. A translator (NAT64) reads over what stands behind the address.
#[test]
fn a_metadata_service_is_known_behind_a_translators_prefix_of_any_length() {
    for address in TRANSLATED {
        let bits = address.parse::<std::net::Ipv6Addr>().expect("an address").to_bits();
        for address in [bits, bits | 1].map(|bits| std::net::Ipv6Addr::from_bits(bits).to_string())
        {
            let named = allows(&address);
            let refused = told(&[(Layer::Sandbox, named.clone())], &address);
            assert_eq!(
                refused.code.map(|code| code.as_str()),
                Some("private-address"),
                "{address}"
            );
            let layers = [(Layer::Platform, named.clone()), (Layer::Sandbox, named)];
            assert_eq!(told(&layers, &address).code, None, "{address}: the operator's rule");
        }
        let other = address.replace("a9", "a8");
        assert_eq!(told(&[(Layer::Sandbox, allows(&other))], &other).code, None, "{other}");
    }
}

/// Promise 10. Attack F04.
#[test]
fn a_rule_of_a_tenant_or_a_sandbox_opens_no_metadata_service() {
    let open = "default = \"allow\"\n".to_owned();
    for address in GUARDED {
        for peer in [address, block(address)] {
            let named = allows(peer);
            for layers in [
                vec![(Layer::Sandbox, named.clone())],
                vec![(Layer::Tenant, named.clone()), (Layer::Sandbox, named.clone())],
                vec![(Layer::Platform, open.clone()), (Layer::Sandbox, named.clone())],
            ] {
                let told = told(&layers, address);
                assert!(told.code.is_some(), "{address} by {peer}: {told:?}");
            }
        }
        let told = told(&[(Layer::Sandbox, allows(address))], address);
        assert_eq!(told.code.map(|code| code.as_str()), Some("private-address"), "{address}");
        let last = told.sentences.last().expect("a sentence");
        assert!(last.contains("only a rule of the platform policy"), "{address}: {last}");
    }
}

#[test]
fn a_rule_of_the_platform_that_names_it_opens_it_and_a_wider_network_does_not() {
    for address in GUARDED {
        let of = |platform: String| {
            told(&[(Layer::Platform, platform), (Layer::Sandbox, allows(address))], address)
        };
        let told = of(allows(address));
        assert_eq!(told.code, None, "{address}: {told:?}");
        let wide = match address.contains(':') {
            true => "::/0",
            false => "0.0.0.0/0",
        };
        assert!(of(allows(wide)).code.is_some(), "{address}");
    }
    let of = |net: &str, address: &str| {
        let layers = [(Layer::Platform, allows(net)), (Layer::Sandbox, allows(address))];
        told(&layers, address).code
    };
    assert_eq!(of("169.254.0.0/16", "169.254.169.254"), None, "the block itself");
    assert!(of("100.64.0.0/10", "100.100.100.200").is_some(), "a block that also holds it");
    assert_eq!(of("100.64.0.0/10", "100.100.100.201"), None, "control");
}

#[test]
fn other_private_networks_are_opened_by_the_rule_of_whoever_names_them() {
    for (peer, address) in [("10.0.0.0/8", "10.2.3.4"), ("fd00:1::/32", "fd00:1::1")] {
        assert_eq!(told(&[(Layer::Sandbox, allows(peer))], address).code, None, "{address}");
    }
}
