//! What stands around the daemon and is not its own: private networks that tenants' rules may open,
//! and a host that tracks connections. Looks, and never changes anything.

use std::process::{Command, Stdio};

use ipnet::IpNet;
use policy::{Effect, Peer, Policy};
use tokio::time::timeout;

use crate::client::{Client, Endpoint};
use crate::config::{Config, Reach};
use crate::doctor::Check;
use crate::doctor::checks::LISTING;

/// Private address space in which an operator's own machines usually are.
const PRIVATE: &[&str] =
    &["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7"];

/// Whether tenants, who write policies by their tokens, could open the networks around this host.
pub(crate) async fn private(config: &Config) -> Option<Check> {
    let tenants = config.api.token.iter().any(|token| matches!(token.tenant, Reach::Tenant(_)));
    if !tenants {
        return None;
    }
    let name = "private";
    let daemon = Client::new(Endpoint::Socket(config.api.socket.clone()), None);
    let asked = timeout(LISTING, daemon.get::<serde_json::Value>("/v1/platform/policy")).await;
    let platform = asked.ok()?.ok().and_then(|held| Policy::from_json(&held.to_string()).ok());
    let open = match platform {
        Some(policy) => unguarded(&policy),
        None => PRIVATE.to_vec(),
    };
    Some(match open.as_slice() {
        [] => Check::ok(name, "the platform policy says what tenants may open"),
        open => Check::warn(
            name,
            format!("rules of tenants can open {}", open.join(", ")),
            "deny what is not meant in the platform policy: see *Private networks* in operator.md",
        ),
    })
}

/// The private blocks of which a platform policy says nothing, and lets through.
fn unguarded(platform: &Policy) -> Vec<&'static str> {
    if platform.default_effect() == Effect::Deny {
        return Vec::new();
    }
    let denied = |block: &IpNet| {
        let denies = platform.rules().iter().filter(|rule| rule.effect == Effect::Deny);
        denies.flat_map(|rule| &rule.peers).any(
            |peer| matches!(peer, Peer::Net(net) if net.contains(block) || block.contains(net)),
        )
    };
    let open = |text: &&'static str| text.parse().is_ok_and(|block| !denied(&block));
    PRIVATE.iter().copied().filter(open).collect()
}

/// Whether the host's own rules track connections: one guest's could fill that table.
pub(crate) fn tracking() -> Check {
    let name = "conntrack";
    let hooks = Command::new("nft").args(["list", "hooks"]).stderr(Stdio::null()).output();
    let hooks = hooks.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    match hooks.is_ok_and(|hooks| hooks.contains("conntrack_in")) {
        false => Check::ok(name, "connections are not tracked"),
        true => Check::warn(
            name,
            "the host tracks connections: each one of a guest takes an entry for two minutes",
            "`notrack` for the egress addresses: see *Connection tracking* in operator.md",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_platform_policy_guards_what_it_denies_or_does_not_allow() {
        let open = |text: &str| unguarded(&Policy::from_toml(text).expect("a policy"));
        assert_eq!(open("default = \"deny\""), [""; 0]);
        assert_eq!(open("default = \"allow\""), PRIVATE);
        let deny = "default = \"allow\"\n[[rule]]\ndeny = [\"10.0.0.0/9\", \"172.16.0.0/12\"]\n";
        assert_eq!(open(deny), ["192.168.0.0/16", "100.64.0.0/10", "fc00::/7"]);
        let guide = include_str!("../../docs/operator.md");
        let shown = guide.split("default = \"allow\"\n\n[[rule]]\ndeny").nth(1).expect("the lines");
        let shown = shown.split("```").next().expect("their end");
        assert_eq!(open(&format!("default = \"allow\"\n\n[[rule]]\ndeny{shown}")), [""; 0]);
    }
}
