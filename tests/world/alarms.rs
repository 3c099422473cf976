//! Sandboxes that are put to sleep until a time, over daemons that come and go. Somebody else runs them:
//! hooks that have nothing to do.

use std::time::{Duration, Instant};

use serde_json::Value;
use world::World;
use world::poll::eventually;

const PATIENCE: Duration = Duration::from_secs(30);

fn shown(world: &World, name: &str) -> Value {
    world.api("GET", &format!("/v1/sandboxes/{name}"), &[]).json
}

fn restart(world: &World) {
    world.daemon().kill();
    world.daemon().start(&world.host);
}

/// Promise 64.
#[test]
fn an_alarm_outlives_its_daemon_and_no_clock_on_the_wall_moves_it() {
    let hooks = "[external]\non_standby = [\"true\"]\non_resume = [\"true\"]\n\
        [sleep]\non_idle = \"never\"\n";
    let world = World::with(hooks);
    let name = world.fresh_name();
    assert_eq!(world.create(&name, "default", "").status, 201);
    let standby = |words: &[&str]| world.cli(&[&["standby", &name], words].concat()).ok();
    let runs = |what: &str| {
        eventually(what, PATIENCE, || {
            Some(shown(&world, &name)).filter(|shown| shown["state"] == "running")
        })
    };

    let began = Instant::now();
    let told = standby(&["--wake-in", "15s"]).stdout;
    let asked = shown(&world, &name)["wake_at"].as_str().expect("a time").to_owned();
    assert!(told.contains(&asked), "{told}");
    restart(&world);
    let kept = shown(&world, &name);
    assert_eq!((&kept["state"], &kept["wake_at"]), (&"standby".into(), &asked.into()), "{kept}");
    let text = world.cli(&["show", &name]).ok().stdout;
    assert!(text.contains("wakes") && text.contains("it was asked for"), "{text}");
    let woken = runs("it is woken by the next daemon");
    assert!(began.elapsed() > Duration::from_secs(14), "{:?}", began.elapsed());
    assert_eq!((&woken["wakes"], &woken["wake_at"]), (&1.into(), &Value::Null));

    // Nobody was there at its time.
    standby(&["--wake-in", "1s"]);
    world.daemon().kill();
    std::thread::sleep(Duration::from_secs(2));
    world.daemon().start(&world.host);
    runs("it is woken late");

    // The clock of the host is set; and who wakes it before has woken it, for the next daemon, too.
    standby(&["--wake-in", "1h"]);
    world.daemon().kill();
    world.daemon().set_clock(7200);
    world.daemon().start(&world.host);
    std::thread::sleep(Duration::from_secs(2));
    let kept = shown(&world, &name);
    assert_eq!(kept["state"], "standby", "{kept}");
    assert!(kept["wakes_in"].as_u64().is_some_and(|left| (3500..=3600).contains(&left)), "{kept}");
    world.cli(&["resume", &name]).ok();
    standby(&[]);
    restart(&world);
    let kept = shown(&world, &name);
    assert_eq!((&kept["state"], &kept["wake_at"]), (&"standby".into(), &Value::Null), "{kept}");
    assert!(kept["wakes_in"].is_null(), "{kept}");
}
