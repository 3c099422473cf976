//! What left the host, by the kernel's own counters at the far end of its uplink: what the policies
//! allow, and everything else. It cannot miss a packet, however much there is.

use std::io::Write;
use std::net::UdpSocket;
use std::process::Stdio;
use std::time::Duration;

use world::netns::Netns;
use world::poll::eventually;

use crate::stage::{EGRESS, SITE, Stage, UPSTREAM};

/// The counters.
#[derive(Debug)]
pub(crate) struct Oracle {
    internet: String,
}

impl Oracle {
    /// Starts to count.
    pub(crate) fn in_front_of(stage: &Stage) -> Self {
        // The host's kernel has things to say of its own in IPv6.
        stage.host.run(|| {
            std::fs::write("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1").expect("no IPv6");
        });
        let text = format!(
            "table netdev oracle {{\n chain in {{\n  type filter hook ingress device \"core216\" priority 0; policy accept;\n\
             \x20 ether type arp accept\n\
             \x20 ip saddr {EGRESS} ip daddr {SITE} tcp dport 443 counter accept comment \"allowed\"\n\
             \x20 ip saddr {EGRESS} ip daddr {UPSTREAM} udp dport 53 counter accept comment \"allowed\"\n\
             \x20 ip saddr {EGRESS} ip daddr {UPSTREAM} tcp dport 53 counter accept comment \"allowed\"\n\
             \x20 ip saddr {EGRESS} ip daddr {{ {SITE}, {UPSTREAM} }} icmp type destination-unreachable counter accept comment \"allowed\"\n\
             \x20 counter comment \"forbidden\"\n }}\n}}\n"
        );
        let mut nft = nft(&stage.internet, &["-f", "-"]).spawn().expect("run nft");
        nft.stdin.take().expect("a pipe").write_all(text.as_bytes()).expect("the oracle's rules");
        assert!(nft.wait().expect("nft ends").success(), "{text}");
        Self { internet: stage.internet.name().to_owned() }
    }

    /// Packets so far: forbidden, allowed.
    pub(crate) fn seen(&self) -> (u64, u64) {
        let mut command = std::process::Command::new("ip");
        command.args(["netns", "exec", &self.internet, "nft", "list", "table", "netdev", "oracle"]);
        let listed =
            String::from_utf8_lossy(&command.output().expect("run nft").stdout).into_owned();
        let count = |kind: &str| {
            let lines = listed.lines().filter(|line| line.ends_with(&format!("\"{kind}\"")));
            lines
                .filter_map(|line| {
                    let mut words = line.split(' ').skip_while(|word| *word != "packets");
                    words.nth(1)?.parse::<u64>().ok()
                })
                .sum()
        };
        (count("forbidden"), count("allowed"))
    }

    /// Whether a packet of the host itself that no policy allows is counted: otherwise zero means nothing.
    pub(crate) fn sees_one(&self, stage: &Stage) -> bool {
        let (before, _) = self.seen();
        stage.host.run(|| {
            let socket = UdpSocket::bind((EGRESS, 0)).expect("a socket of the host");
            socket.send_to(b"oracle", "45.66.0.9:9").expect("sent");
        });
        eventually("the oracle counts", Duration::from_secs(5), || {
            (self.seen().0 > before).then_some(true)
        })
    }
}

fn nft(internet: &Netns, words: &[&str]) -> std::process::Command {
    let mut nft = internet.bare_command("nft");
    nft.args(words).stdin(Stdio::piped());
    nft
}
