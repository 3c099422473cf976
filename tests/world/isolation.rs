//! Guests, the host and its services cannot be reached; not by address, by name or by forgery.

use std::net::{Ipv4Addr, UdpSocket};
use std::time::Duration;

use policy::net::GATEWAY_IP;
use world::client::{self, End, PATIENT};
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
