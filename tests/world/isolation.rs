//! Guests, the host and its services cannot be reached; not by address, by name or by forgery.

use std::net::{Ipv4Addr, UdpSocket};
use std::time::Duration;

use policy::net::GATEWAY_IP;
use world::client::{self, End, PATIENT};
use world::poll::eventually;
use world::wire::Wire;
use world::world::{EGRESS, HOST, HOST_SERVICE};
use world::{Site, World, allow};

/// Promise 10. Attack A04. There is no path from one guest to another.
#[test]
fn a_guest_reaches_no_other_guest() {
    let world = World::shared();
    let api = world.site("api");
    let (one, other) = (world.guest(&allow(&[&api])), world.guest(&allow(&[&api])));
    let heard = Wire::tapped(&other.netns);
    for number in [80, 443, 1007, 8080] {
        let reached = one.run(|| {
            client::connect((other.internal(), number).into(), Duration::from_millis(300))
                .map(|mut stream| client::read_to_end(&mut stream, &mut Vec::new(), PATIENT))
        });
        assert!(matches!(reached, Err(_) | Ok(End::Reset)), "port {number}: {reached:?}");
    }
    one.run(|| {
        let socket = UdpSocket::bind("0.0.0.0:0").expect("bind");
        let _ = socket.send_to(b"psst", (other.internal(), 9000));
    });
    other.reaches(&api);
    let from_one =
        |seen: &world::wire::Seen| seen.is_from(one.internal()) || seen.is_to(one.internal());
    assert!(heard.any(|seen| seen.ports.is_some_and(|(_, to)| to == 443)), "control");
    assert!(heard.frames(from_one).is_empty());
    assert!(heard.frames(|seen| seen.ports.is_some_and(|(_, to)| to == 9000)).is_empty());
}

/// Promise 10. Attacks B04, B05. Nor to the host, at any of its addresses, by number or by name.
#[test]
fn a_guest_reaches_no_service_of_the_host() {
    let world = World::shared();
    let rule = format!("[[rule]]\nallow = [\"*.example.com\"]\nports = [{HOST_SERVICE}]\n");
    let guest = world.guest(&rule);
    // A name each, so that no answer is an earlier one's that is still remembered.
    let by_name = |scheme: &str, trap: &Site| {
        let resolve = format!("{}:{HOST_SERVICE}:{}", trap.name, trap.ip);
        guest.curl(&["--resolve", &resolve, &format!("{scheme}://{}:{HOST_SERVICE}/", trap.name)])
    };
    for address in [EGRESS, HOST, GATEWAY_IP, guest.internal(), Ipv4Addr::LOCALHOST] {
        let reply =
            guest.run(|| client::exchange((address, HOST_SERVICE).into(), &[b"x\r\n"], PATIENT));
        assert_eq!((reply.end, reply.text()), (End::Reset, String::new()), "{address}");
        let trap = world.site("trap");
        world.names.set(&trap.name, &[address.into()]);
        let refused = by_name("http", &trap);
        assert_eq!(refused.status, 403, "{address}: {} {}", refused.text(), refused.stderr);
        assert_eq!(refused.json()["error"]["code"], "private-address", "{address}");
        assert_eq!(by_name("https", &trap).code, 35, "{address}: an alert");
    }
    // The control: the same port and way, to an address that is not the host's.
    let got = by_name("http", &world.site("fair"));
    assert_eq!(got.status, 200, "{} {}", got.text(), got.stderr);
}

/// Promise 10. Attack B05. Nor at an address that only a route says is the host's, nor at one that it got
/// a moment ago.
#[test]
fn a_guest_reaches_no_service_of_the_host_at_an_address_that_no_interface_has() {
    let world = World::new();
    let (routed, added) = (Ipv4Addr::new(45, 99, 0, 7), Ipv4Addr::new(45, 98, 0, 7));
    let (by_route, by_address) = (world.site("routed"), world.site("added"));
    world.names.set(&by_route.name, &[routed.into()]);
    world.names.set(&by_address.name, &[added.into()]);
    let names = [&by_route.name, &by_address.name].map(|name| format!("\"{name}\"")).join(", ");
    let rule = format!("[[rule]]\nallow = [{names}, \"45.0.0.0/8\"]\nports = [{HOST_SERVICE}]\n");
    let guest = world.guest(&rule);
    let ask = |address: Ipv4Addr| {
        let url = format!("http://{address}:{HOST_SERVICE}/");
        let got = guest.curl(&["--http0.9", &url]);
        (got.status, got.text().contains("private-address"))
    };
    // The control: until they are the host's, they are somebody's on the internet.
    for address in [routed, added] {
        assert!(!ask(address).1, "{address}");
    }
    world.host.ip("route add local 45.99.0.0/24 dev lo");
    world.host.ip("address add 45.98.0.7/32 dev lo");
    // Well before the next look by the clock could be told from it.
    eventually("they are the host's", Duration::from_secs(2), || {
        [routed, added].into_iter().all(|address| ask(address) == (403, true)).then_some(())
    });
    for site in [&by_route, &by_address] {
        let url = format!("http://{}:{HOST_SERVICE}/", site.name);
        let resolve = format!("{}:{HOST_SERVICE}:{}", site.name, site.ip);
        let got = guest.curl(&["--resolve", &resolve, "--http0.9", &url]);
        assert_eq!(got.status, 403, "{url} {}", got.text());
        assert!(got.text().contains("private-address"), "{url} {}", got.text());
    }
}

/// Promise 10. Attacks B04, B11. The router's own port is no service: a connection to it does not loop.
#[test]
fn a_connection_to_the_routers_own_port_is_refused() {
    let world = World::shared();
    let api = world.site("api");
    let guest = world.guest(&allow(&[&api]));
    for address in [GATEWAY_IP, guest.internal()] {
        for number in [15_000, 22, 1007] {
            let reached = guest.run(|| {
                client::connect((address, number).into(), Duration::from_millis(300))
                    .map(|mut stream| client::read_to_end(&mut stream, &mut Vec::new(), PATIENT))
            });
            assert!(matches!(reached, Err(_) | Ok(End::Reset)), "{address}:{number} {reached:?}");
        }
    }
    guest.reaches(&api);
}
