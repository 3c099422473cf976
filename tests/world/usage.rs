//! What is told of a sandbox's use is what it used: to the byte and within the time, over daemons that are
//! killed, asleep or not, and after it is gone.

use std::time::{Duration, Instant};

use serde_json::Value;
use world::client::PATIENT;
use world::poll::eventually;
use world::room::Room;
use world::{World, allow};

/// The one row of a sandbox of this name.
fn used(world: &World, name: &str) -> Value {
    let answer = world.api("GET", &format!("/v1/usage?sandbox={name}&destinations=true"), &[]);
    assert_eq!(answer.status, 200, "{}", answer.text);
    let rows = answer.json["rows"].as_array().expect("rows").clone();
    assert_eq!(rows.len(), 1, "{}", answer.text);
    rows[0].clone()
}

fn number(used: &Value, field: &str) -> f64 {
    used[field].as_f64().unwrap_or_else(|| panic!("{field} in {used}"))
}

/// Bytes out and in of all connections and requests of a sandbox that are over, by the audit; of these only
/// what one record each tells.
fn audited(world: &World, name: &str) -> (u64, u64) {
    let closed = world.records(&format!("sandbox={name}&outcome=closed"));
    let sum = |field: &str| closed.iter().filter_map(|record| record[field].as_u64()).sum();
    (sum("bytes_out"), sum("bytes_in"))
}

fn carried(used: &Value) -> (u64, u64) {
    let sum = |field: &str| used[field].as_u64().expect("bytes");
    (sum("bytes_out"), sum("bytes_in"))
}

/// Promise 67.
#[test]
fn bytes_and_seconds_are_counted_once_whenever_the_daemon_is_killed_and_after_the_sandbox_is_gone()
{
    let world = World::new();
    let (api, other) = (world.site("api"), world.site("other"));
    let begun = Instant::now();
    let guest = world.guest_of("acme", &allow(&[&api, &other]));
    let made = Instant::now();
    for round in 0..3 {
        guest.reaches(&api);
        guest.reaches(&other);
        assert_eq!(guest.curl(&[&format!("http://{}/", api.name)]).status, 200);
        // What is asked for is written first, so nothing is lost by the kill.
        let told = eventually("all that is over is counted", PATIENT, || {
            let told = used(&world, &guest.name);
            (carried(&told) == audited(&world, &guest.name)).then_some(told)
        });
        assert!(carried(&told).0 > 0, "{told}");
        world.daemon().kill();
        std::thread::sleep(Duration::from_secs(1));
        world.daemon().start(&world.host);
        let again = used(&world, &guest.name);
        assert_eq!(carried(&again), carried(&told), "round {round}: never twice");
        assert!(number(&again, "running_seconds") >= number(&told, "running_seconds") + 1.0);
    }
    let least = made.elapsed();
    let told = used(&world, &guest.name);
    let most = begun.elapsed();
    let life =
        ["running_seconds", "standby_seconds", "other_seconds"].map(|one| number(&told, one));
    let life: f64 = life.iter().sum();
    // The last look was a moment before.
    assert!(life <= most.as_secs_f64() && life >= least.as_secs_f64() - 2.0, "{life}, {most:?}");
    assert_eq!(number(&told, "vcpu_seconds"), number(&told, "running_seconds"), "it has one");
    let places: Vec<_> = told["destinations"].as_array().expect("destinations").clone();
    let names: Vec<&str> = places.iter().filter_map(|one| one["to"].as_str()).collect();
    assert!(names.len() == 2 && names.contains(&&*api.name) && names.contains(&&*other.name));
    let sum: u64 = places.iter().filter_map(|one| one["bytes_in"].as_u64()).sum();
    assert_eq!(sum, carried(&told).1, "by destination it is the same");
    let name = guest.name.clone();
    let tenant = world.cli(&["usage", "--tenant", "acme", "--by", "tenant", "--json"]).ok();
    assert_eq!(tenant.json_lines().len(), 1, "{}", tenant.stdout);
    drop(guest);
    let gone = used(&world, &name);
    assert_eq!(carried(&gone), carried(&told));
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(used(&world, &name), gone, "and it is over");
    world.daemon().kill();
    world.daemon().start(&world.host);
    assert_eq!(used(&world, &name), gone);
    let table = world.cli(&["usage", "--sandbox", &name, "--destinations"]).ok().stdout;
    assert!(table.contains(&name) && table.contains(&api.name), "{table}");
}

/// Promise 67. Killed with something unwritten, it loses that and tells nothing else.
#[test]
fn a_daemon_that_is_killed_at_any_time_counts_nothing_twice() {
    let world = World::new();
    let api = world.site("api");
    let guest = world.guest(&allow(&[&api]));
    let mut last = 0.0;
    for _ in 0..4 {
        guest.reaches(&api);
        world.daemon().kill();
        world.daemon().start(&world.host);
        let told = used(&world, &guest.name);
        let (out, back) = (carried(&told), audited(&world, &guest.name));
        assert!(out.0 <= back.0 && out.1 <= back.1, "{out:?} of {back:?}");
        assert!(number(&told, "running_seconds") > last, "its time is told, daemon or not");
        last = number(&told, "running_seconds");
    }
}

/// Promise 67.
#[test]
fn asleep_its_standby_grows_and_its_running_does_not() {
    let hooks = "[external]\non_standby = ['/bin/true']\non_resume = ['/bin/true']\n\
                 [sleep]\non_idle = 'never'\n";
    let world = World::with(hooks);
    let name = world.fresh_name();
    assert_eq!(world.create(&name, "default", "").status, 201);
    let pass = || std::thread::sleep(Duration::from_secs(1));
    world.cli(&["standby", &name]).ok();
    let slept = used(&world, &name);
    pass();
    // In its absence as well.
    world.daemon().kill();
    pass();
    world.daemon().start(&world.host);
    let later = used(&world, &name);
    assert_eq!(number(&later, "running_seconds"), number(&slept, "running_seconds"));
    assert!(
        number(&later, "standby_seconds") >= number(&slept, "standby_seconds") + 2.0,
        "{later}"
    );
    world.cli(&["resume", &name]).ok();
    let woken = used(&world, &name);
    pass();
    let awake = used(&world, &name);
    assert_eq!(number(&awake, "standby_seconds"), number(&woken, "standby_seconds"));
    assert!(
        number(&awake, "running_seconds") >= number(&woken, "running_seconds") + 1.0,
        "{awake}"
    );
}

/// Promises 53, 67. What cannot be written is owed, and written when there is room.
#[test]
fn on_a_full_disk_what_is_used_is_owed_and_told_to_the_last_byte_later() {
    let world = World::without_daemon("[limits]\nstate_reserve = \"0\"\n");
    let room = Room::small(&world.dir().join("state"), 2048);
    world.daemon().start(&world.host);
    let api = world.site("api");
    let guest = world.guest(&allow(&[&api]));
    guest.reaches(&api);
    room.fill();
    guest.reaches(&api);
    let query = format!("/v1/usage?sandbox={}", guest.name);
    eventually("it cannot be told", PATIENT, || {
        (world.api("GET", &query, &[]).status == 503).then_some(())
    });
    guest.reaches(&api);
    room.free();
    let told = eventually("all is counted", PATIENT, || {
        let told = used(&world, &guest.name);
        (carried(&told) == audited(&world, &guest.name)).then_some(told)
    });
    assert!(carried(&told).0 > 0 && number(&told, "running_seconds") > 0.0, "{told}");
    drop(guest);
    world.daemon().kill();
}
