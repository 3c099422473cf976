//! A guest for loads: a namespace behind a tap, with a cable that passes large frames whole, as
//! the network card of a microVM with segmentation offload does.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use policy::Slot;
use policy::net::{GATEWAY_IP, GUEST_IP, GUEST_MAC, GUEST_PREFIX};
use world::netns::Netns;
use world::pump::Pump;

/// A running guest. Dropping it pulls its cable.
#[derive(Debug)]
pub(crate) struct Machine {
    pub(crate) netns: Netns,
    pub(crate) cable: Pump,
}

impl Machine {
    /// Behind the router: as every guest of it is.
    pub(crate) fn behind_router(taps: &Netns, slot: Slot) -> Self {
        let tap = taps.run(|| vmm::tap::attach(slot).expect("attach to the tap"));
        let mac = GUEST_MAC.map(|byte| format!("{byte:02x}")).join(":");
        let address = format!("{GUEST_IP}/{GUEST_PREFIX}");
        Self::at(tap, slot, &mac, &address, &GATEWAY_IP.to_string())
    }

    /// Behind a gateway of its own in `yard`, where the peers listen and which forwards.
    pub(crate) fn behind_gateway(yard: &Netns, slot: Slot) -> Self {
        let tap = yard.run(|| vmm::tap::create(slot, None).expect("a tap"));
        let n = slot.number();
        yard.ip(&format!("addr add 10.77.{n}.1/30 dev {}", slot.tap()));
        yard.ip(&format!("link set {} up", slot.tap()));
        let mac = format!("02:00:00:00:01:{n:02x}");
        Self::at(tap, slot, &mac, &format!("10.77.{n}.2/30"), &format!("10.77.{n}.1"))
    }

    fn at(tap: OwnedFd, slot: Slot, mac: &str, address: &str, gateway: &str) -> Self {
        let netns = Netns::new(&format!("g{}", slot.number()));
        let card = netns.run(|| vmm::tap::create(slot, None).expect("the guest's card"));
        for end in [&tap, &card] {
            vmm::tap::offload(end).expect("segmentation offload");
        }
        let cable = Pump::between(tap, card);
        netns.ip(&format!("link set {} name eth0 address {mac}", slot.tap()));
        netns.ip(&format!("addr add {address} dev eth0"));
        netns.ip("link set eth0 up");
        netns.ip(&format!("route add default via {gateway}"));
        Self { netns, cable }
    }

    /// Where its gateway listens on `port`.
    pub(crate) fn gateway(slot: Slot, port: u16) -> SocketAddr {
        format!("10.77.{}.1:{port}", slot.number()).parse().expect("an address")
    }

    pub(crate) fn unplug(&mut self) {
        self.cable.unplug();
    }
}
