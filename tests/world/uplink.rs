//! The way out goes away and comes back: refusals have their own words meanwhile, nothing leaves from
//! another address, and nobody has to do anything afterwards.

use std::time::Duration;

use world::client::{self, PATIENT};
use world::poll::eventually;
use world::world::{EGRESS, HOST, UNBOUND};
use world::{Guest, Site, World, allow};

/// How long a far side that says nothing is waited for.
const DIALLED: Duration = Duration::from_secs(10);

/// A request in clear to an address and name that resolved before; its status and reason.
fn asked(guest: &Guest<'_>, site: &Site) -> (u16, String) {
    let resolve = format!("{}:80:{}", site.name, site.ip);
    let got = guest.curl(&["--resolve", &resolve, &format!("http://{}/", site.name)]);
    let why = got.head.lines().find_map(|line| line.strip_prefix("postern-deny: "));
    (got.status, why.unwrap_or_default().trim().to_owned())
}

fn from_elsewhere(world: &World, site: &Site) -> usize {
    let foreign = |seen: &world::wire::Seen| seen.is_to(site.ip) && !seen.is_from(EGRESS);
    world.wire.frames(|seen| foreign(seen) && (seen.is_from(HOST) || seen.opens)).len()
}

/// Promise 52. An egress address that is gone is not replaced by another one.
#[test]
fn without_its_egress_address_a_sandbox_gets_out_from_no_other() {
    let world = World::new();
    let api = world.site("api");
    let guest = world.guest(&allow(&[&api]));
    guest.reaches(&api);
    world.host.ip(&format!("addr del {EGRESS}/28 dev uplink"));
    world.host.ip(&format!("route replace default via 93.184.216.1 src {UNBOUND}"));
    let (status, why) = asked(&guest, &api);
    assert_eq!((status, why.as_str()), (503, "egress-ip-unavailable"));
    guest.event(&[("code", "egress-ip-unavailable"), ("name", &api.name)]);
    let hello = client::client_hello(&world.authority, &api.name);
    let reply = guest.at_once(|| client::exchange(api.at(443), &[&hello], PATIENT));
    assert_eq!(reply.alert(), Some(client::ACCESS_DENIED), "{reply:?}");
    // The host itself still gets out: there was another way to take.
    world.settle();
    assert_eq!(from_elsewhere(&world, &api), 0);
    world.host.ip(&format!("addr add {EGRESS}/28 dev uplink"));
    eventually("it works again", PATIENT, || (asked(&guest, &api).0 == 200).then_some(()));
}

/// Promise 52. An uplink that goes down is told at once, and used again when it is back.
#[test]
fn without_an_uplink_refusals_are_fast_and_typed_and_it_recovers_by_itself() {
    let world = World::new();
    let api = world.site("api");
    let guest = world.guest(&allow(&[&api]));
    guest.reaches(&api);
    assert_eq!(asked(&guest, &api).0, 200, "control, and its address is known");
    for round in 0..2 {
        match round {
            0 => world.host.ip("link set uplink down"),
            _ => world.host.ip("route del default"),
        }
        let began = std::time::Instant::now();
        let (status, why) = asked(&guest, &api);
        assert_eq!((status, why.as_str()), (502, "upstream-unreachable"), "{round}");
        assert!(began.elapsed() < DIALLED, "{round}: {:?}", began.elapsed());
        world.host.ip("link set uplink up");
        world.host.ip(&format!("route replace default via 93.184.216.1 src {UNBOUND}"));
        eventually("it works again", 3 * PATIENT, || (asked(&guest, &api).0 == 200).then_some(()));
    }
    guest.event(&[("code", "upstream-unreachable"), ("name", &api.name)]);
}

/// Attack C15. A resolver that swallows questions: each is answered in time, who needs none does not
/// notice, and what is known is used.
#[test]
fn a_resolver_that_swallows_questions_holds_up_nobody_else() {
    let world = World::with("[dns]\ntimeout = \"1s\"\n");
    let (known, unknown) = (world.site("known"), world.site("unknown"));
    let policy = format!("{}[[rule]]\nallow = [\"{}\"]\n", allow(&[&known, &unknown]), known.ip);
    let (guest, other) = (world.guest(&policy), world.guest(&policy));
    guest.reaches(&known);
    world.internet.ip(&format!("route del local {}/32 dev lo", world::world::UPSTREAM));
    world.internet.ip(&format!("route add blackhole {}/32", world::world::UPSTREAM));
    // A stub that is not answered at all gives up after ten.
    let limit = Duration::from_secs(9);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let began = std::time::Instant::now();
            let got = guest.curl(&[&format!("https://{}/", unknown.name)]);
            (got.code, began.elapsed())
        });
        let began = std::time::Instant::now();
        other.reaches(&known);
        assert!(began.elapsed() < limit, "{:?}", began.elapsed());
        let (code, took) = waiting.join().expect("curl");
        assert_eq!(code, 6, "it could not resolve");
        assert!(took < limit, "{took:?}");
    });
    guest.event(&[("kind", "dns"), ("code", "unresolvable"), ("name", &unknown.name)]);
    world.internet.ip(&format!("route del blackhole {}/32", world::world::UPSTREAM));
    world.internet.ip(&format!("route add local {}/32 dev lo", world::world::UPSTREAM));
    eventually("it resolves again", 3 * PATIENT, || {
        (guest.curl(&[&format!("https://{}/", unknown.name)]).status == 200).then_some(())
    });
}
