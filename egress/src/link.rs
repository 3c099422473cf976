//! A tap as the kernel sees it from our side: its address, neighbour and route.
//!
//! The tap itself is made by its owner. Nothing here may bring a tap up by itself: the fence of its
//! slot comes first, and who orders that is the router.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use futures_util::TryStreamExt;
use policy::Slot;
use policy::net::{GATEWAY_IP, GATEWAY_MAC, GUEST_IP, GUEST_MAC};
use rtnetlink::packet_route::address::{AddressAttribute, AddressFlags};
use rtnetlink::packet_route::link::{LinkFlags, LinkMessage};
use rtnetlink::packet_route::route::{RouteProtocol, RouteScope};
use rtnetlink::{LinkUnspec, RouteMessageBuilder};
use tokio::time::{Instant, sleep};

use crate::error::Error;
use crate::world::{World, if_there, name_of, sysctl};

/// How long [`up`] waits for the carrier of a tap.
pub const CARRIER_WAIT: Duration = Duration::from_millis(2);
const CARRIER_POLL: Duration = Duration::from_micros(200);

/// Gives the tap of a slot its MAC address, its settings and our address, 169.254.100.1. It stays
/// as up or down as it is.
///
/// # Errors
/// [`Error::NoTap`] when there is none; otherwise when the kernel refuses a step.
pub async fn prepare(world: &World, slot: Slot) -> Result<(), Error> {
    let link = find(world, slot).await?.ok_or(Error::NoTap(slot))?;
    let index = link.header.index;
    world.run(move || settings(slot)).await??;
    let named = LinkUnspec::new_with_index(index).address(GATEWAY_MAC.to_vec()).build();
    let netlink = world.netlink();
    netlink.link().set(named).execute().await.map_err(failed("set the MAC address", slot))?;
    let mut address = netlink.address().add(index, IpAddr::V4(GATEWAY_IP), 32);
    address.message_mut().attributes.push(AddressAttribute::Flags(AddressFlags::Noprefixroute));
    address.execute().await.or_else(if_there).map_err(failed("add the address", slot))
}

/// Brings the tap up, with the guest as its only neighbour and the slot's address routed to it.
/// Returns whether it has a carrier, for which it waits up to [`CARRIER_WAIT`]: a tap has none
/// until something holds it open, which is not an error.
///
/// # Errors
/// [`Error::NoTap`] when there is none; otherwise when the kernel refuses a step.
pub async fn up(world: &World, slot: Slot) -> Result<bool, Error> {
    let link = find(world, slot).await?.ok_or(Error::NoTap(slot))?;
    let index = link.header.index;
    let netlink = world.netlink();
    let risen = LinkUnspec::new_with_index(index).up().build();
    netlink.link().set(risen).execute().await.map_err(failed("set the state", slot))?;
    netlink
        .neighbours()
        .add(index, IpAddr::V4(GUEST_IP))
        .link_layer_address(&GUEST_MAC)
        .replace()
        .execute()
        .await
        .map_err(failed("set the neighbour", slot))?;
    let route = RouteMessageBuilder::<Ipv4Addr>::new()
        .destination_prefix(slot.address(), 32)
        .gateway(GUEST_IP)
        .output_interface(index)
        .onlink()
        .scope(RouteScope::Universe)
        .protocol(RouteProtocol::Static)
        .build();
    let route = netlink.route().add(route).replace();
    route.execute().await.map_err(failed("add the route", slot))?;
    carrier(world, slot, CARRIER_WAIT).await
}

/// Whether the tap has a carrier, waiting for it up to `patience`.
///
/// # Errors
/// When the kernel cannot be asked.
pub async fn carrier(world: &World, slot: Slot, patience: Duration) -> Result<bool, Error> {
    let deadline = Instant::now() + patience;
    loop {
        let link = find(world, slot).await?.ok_or(Error::NoTap(slot))?;
        // Not LowerUp: the kernel throws away what is sent until it has noticed the carrier.
        if link.header.flags.contains(LinkFlags::LowerUp | LinkFlags::Running) {
            return Ok(true);
        }
        if Instant::now() >= deadline {
            return Ok(false);
        }
        sleep(CARRIER_POLL).await;
    }
}

/// Takes the tap down and our address off it; its neighbour and route go with that. A tap that is
/// already gone is as good.
///
/// # Errors
/// When the kernel refuses.
pub async fn down(world: &World, slot: Slot) -> Result<(), Error> {
    let Some(link) = find(world, slot).await? else { return Ok(()) };
    let index = link.header.index;
    let netlink = world.netlink();
    let fallen = LinkUnspec::new_with_index(index).down().build();
    netlink.link().set(fallen).execute().await.map_err(failed("set the state", slot))?;
    let listed = netlink.address().get().set_link_index_filter(index).execute();
    let addresses: Vec<_> =
        listed.try_collect().await.map_err(failed("list the addresses", slot))?;
    for address in addresses {
        let removed = netlink.address().del(address).execute().await;
        removed.map_err(failed("remove an address", slot))?;
    }
    Ok(())
}

/// Deletes the tap, whoever holds it open. A tap that is already gone is as good.
///
/// # Errors
/// When the kernel refuses.
pub async fn delete(world: &World, slot: Slot) -> Result<(), Error> {
    let Some(link) = find(world, slot).await? else { return Ok(()) };
    let deleted = world.netlink().link().del(link.header.index).execute().await;
    deleted.map_err(failed("delete the interface", slot))
}

/// The slots that have a tap, in order.
///
/// # Errors
/// When the kernel cannot be asked.
pub async fn list(world: &World) -> Result<Vec<Slot>, Error> {
    let links: Vec<LinkMessage> =
        world.netlink().link().get().execute().try_collect().await.map_err(|source| {
            Error::Link { act: "list the interfaces", link: world.name().to_owned(), source }
        })?;
    let mut slots: Vec<Slot> = links.iter().filter_map(name_of).filter_map(Slot::of_tap).collect();
    slots.sort_unstable();
    Ok(slots)
}

async fn find(world: &World, slot: Slot) -> Result<Option<LinkMessage>, Error> {
    let found: Result<Vec<LinkMessage>, _> =
        world.netlink().link().get().match_name(slot.tap()).execute().try_collect().await;
    match found {
        Ok(links) => Ok(links.into_iter().next()),
        Err(rtnetlink::Error::NetlinkError(message))
            if message.raw_code() == -(nix::errno::Errno::ENODEV as i32) =>
        {
            Ok(None)
        }
        Err(source) => Err(failed("find the interface", slot)(source)),
    }
}

/// What the namespace's defaults already say, said again for a tap that is older than they are.
fn settings(slot: Slot) -> Result<(), Error> {
    let tap = slot.tap();
    for (name, value) in [
        ("rp_filter", "0"),
        ("arp_ignore", "1"),
        ("send_redirects", "0"),
        ("accept_redirects", "0"),
    ] {
        sysctl(&format!("net/ipv4/conf/{tap}/{name}"), value)?;
    }
    sysctl(&format!("net/ipv6/conf/{tap}/disable_ipv6"), "1")
}

fn failed(act: &'static str, slot: Slot) -> impl FnOnce(rtnetlink::Error) -> Error {
    move |source| Error::Link { act, link: slot.tap(), source }
}
