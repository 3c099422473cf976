//! Somebody's rule leads to a chain of a guest, so that the kernel lets nobody replace or remove that
//! chain: the guest stays shut in, its slot is nobody's, and nothing else waits for it.

use std::time::Duration;

use serde_json::Value;
use world::client::{self, PATIENT};
use world::poll::eventually;
use world::{Guest, Site, World, allow};

use crate::crash::taps;
use crate::fence::{listed, nft, table_of};

/// Room for so many sandboxes, in slots that do not rest.
fn room_for(sandboxes: usize) -> World {
    World::with(&format!("[guests]\nsandboxes = {sandboxes}\nslot_rest = \"0ms\"\n"))
}

/// Somebody's chain with such a rule.
struct Alien<'w> {
    world: &'w World,
    table: String,
}

impl<'w> Alien<'w> {
    fn leads_to(world: &'w World, guest: &Guest<'_>) -> Self {
        let (table, tap) = (table_of(world, guest), guest.slot.tap());
        nft(
            &world.taps,
            &format!("add chain {table} alien\nadd rule {table} alien jump guest_{tap}"),
        );
        Self { world, table }
    }

    fn goes(self) {
        nft(&self.world.taps, &format!("delete chain {} alien", self.table));
    }
}

fn stuck_slots(world: &World) -> Value {
    world.api("GET", "/v1/health", &[]).json["stuck_slots"].clone()
}

fn shown(world: &World, guest: &Guest<'_>) -> Value {
    world.api("GET", &format!("/v1/sandboxes/{}", guest.name), &[]).json
}

/// Nothing of a guest gets out, not even to what it is allowed.
fn is_shut_in(world: &World, guest: &Guest<'_>, site: &Site) {
    let opened = world.origin.connections(site.ip).len();
    let limit = Duration::from_millis(500);
    assert!(guest.run(|| client::connect(site.at(443), limit)).is_err());
    assert_eq!(world.origin.connections(site.ip).len(), opened);
}

/// Promise 16. And a guest that is removed meanwhile leaves nothing, once the rule is gone.
#[test]
fn a_guest_whose_fence_cannot_be_raised_at_a_takeover_is_shut_in_until_it_can() {
    let world = World::new();
    let api = world.site("api");
    let (guest, other) = (world.guest(&allow(&[&api])), world.guest(&allow(&[&api])));
    guest.reaches(&api);
    let before = shown(&world, &guest);
    let alien = Alien::leads_to(&world, &guest);
    for orderly in [false, true] {
        if orderly {
            assert_eq!(world.daemon().terminate(), Some(0), "nor does the end wait for it");
        } else {
            world.daemon().kill();
        }
        world.daemon().start(&world.host);
        let now = shown(&world, &guest);
        assert_eq!(now["state"], "running", "{now}");
        assert!(now["reason"].as_str().is_some_and(|it| it.contains("shut in")), "{now}");
        is_shut_in(&world, &guest, &api);
        other.reaches(&api);
    }
    guest.event(&[("kind", "control"), ("outcome", "fail")]);
    alien.goes();
    eventually("it works again", PATIENT, || {
        let url = format!("https://{}/", api.name);
        (guest.curl(&["-m", "2", &url]).status == 200).then_some(())
    });
    let after = shown(&world, &guest);
    for field in ["state", "reason", "slot", "incarnation"] {
        assert_eq!(before[field], after[field], "{field}");
    }

    let alien = Alien::leads_to(&world, &guest);
    world.daemon().kill();
    world.daemon().start(&world.host);
    let removed = world.api("DELETE", &format!("/v1/sandboxes/{}", guest.name), &[]);
    assert_eq!(removed.status, 204, "{}", removed.text);
    assert_eq!((stuck_slots(&world), taps(&world)), (1.into(), vec![other.slot.tap()]));
    alien.goes();
    eventually("its chains go", PATIENT, || {
        (!listed(&world).contains(&format!("_{} ", guest.slot.tap()))).then_some(())
    });
    other.reaches(&api);
}

/// Promises 21, 28.
#[test]
fn what_would_not_go_of_a_sandbox_nobody_knows_keeps_its_slot_from_use_and_nothing_else() {
    let world = room_for(2);
    let api = world.site("api");
    let (guest, orphan) = (world.guest(&allow(&[&api])), world.guest(&allow(&[&api])));
    orphan.reaches(&api);
    let alien = Alien::leads_to(&world, &orphan);
    world.daemon().kill();
    let journal = rusqlite::Connection::open(world.dir().join("state/postern.db"));
    let forget = format!("DELETE FROM sandbox WHERE name = '{}'", orphan.name);
    journal.expect("the journal").execute_batch(&forget).expect("forgotten");
    world.daemon().start(&world.host);
    guest.reaches(&api);
    is_shut_in(&world, &orphan, &api);
    assert_eq!(stuck_slots(&world), 1);
    let name = world.fresh_name();
    let early = world.create(&name, "default", &allow(&[&api]));
    assert_eq!(early.status, 503, "{}", early.text);
    alien.goes();
    let next = eventually("its slot is free again", PATIENT, || {
        let next = world.create(&name, "default", &allow(&[&api]));
        (next.status != 503).then_some(next)
    });
    assert_eq!((next.status, &next.json["tap"]), (201, &orphan.created["tap"]), "{}", next.text);
    assert_eq!(stuck_slots(&world), 0);
    Guest::behind(&world, &name, next.json).reaches(&api);
}

/// Promises 20, 28. Whatever daemon finds them.
#[test]
fn chains_of_a_removed_guest_that_would_not_go_keep_its_slot_from_use_until_they_do() {
    let world = room_for(1);
    let api = world.site("api");
    let guest = world.guest(&allow(&[&api]));
    guest.reaches(&api);
    let alien = Alien::leads_to(&world, &guest);
    let removed = world.api("DELETE", &format!("/v1/sandboxes/{}", guest.name), &[]);
    assert_eq!(removed.status, 204, "{}", removed.text);
    let name = world.fresh_name();
    for restarted in [false, true] {
        if restarted {
            world.daemon().kill();
            world.daemon().start(&world.host);
        }
        assert_eq!((stuck_slots(&world), taps(&world)), (1.into(), vec![]), "{restarted}");
        let early = world.create(&name, "default", &allow(&[&api]));
        assert_eq!(early.status, 503, "{restarted}: {}", early.text);
    }
    assert!(listed(&world).contains(&guest.slot.tap()), "control");
    alien.goes();
    let next = eventually("its slot is free again", PATIENT, || {
        let next = world.create(&name, "default", &allow(&[&api]));
        (next.status != 503).then_some(next)
    });
    assert_eq!(next.status, 201, "{}", next.text);
    let next = Guest::behind(&world, &name, next.json);
    next.reaches(&api);
    drop(next);
    let left = listed(&world);
    assert!(!left.contains("netdev"), "the table goes with its last chain: {left}");
}
