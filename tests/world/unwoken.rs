//! A guest whose wake fails after its connections were put back: it sleeps on, and nothing faces it.

use std::io::{Read, Write};
use std::time::Duration;

use world::origin::port;
use world::poll::eventually;
use world::{World, client};

const PATIENCE: Duration = Duration::from_secs(30);

/// Promise 41.
#[test]
fn a_wake_that_fails_leaves_no_socket_that_faces_the_guest() {
    let asleep = std::env::temp_dir().join(format!("postern-unwoken-{}", std::process::id()));
    let hooks = format!(
        "[external]\non_standby = [\"true\"]\n\
         on_resume = [\"sh\", \"-c\", \"test ! -e {}\"]\n",
        asleep.display()
    );
    let world = World::with(&hooks);
    let echo = world.attacker();
    let rule = format!(
        "[[rule]]\nallow = [\"{}\"]\nports = [{}]\nprotocol = \"tcp\"\n",
        echo.ip,
        port::ECHO
    );
    let mut guest = world.guest(&rule);
    let mut stream = guest.run(|| client::connect(echo.at(port::ECHO), PATIENCE).expect("connect"));
    stream.write_all(b"hello\r\n").expect("sent");
    stream.read_exact(&mut [0; 7]).expect("echoed");
    let ours = guest.internal().to_string();
    let facing = || {
        let out = world.taps.command("ss").args(["-Htn", "state", "all"]).output().expect("run ss");
        let all = String::from_utf8_lossy(&out.stdout).into_owned();
        all.lines().filter(|line| line.contains(&ours)).map(str::to_owned).collect::<Vec<_>>()
    };
    assert!(!facing().is_empty(), "control: one faces it while it runs");
    let path = format!("/v1/sandboxes/{}", guest.name);
    let slept = world.api("POST", &format!("{path}/standby"), &[]);
    assert_eq!(slept.status, 200, "{}", slept.text);
    assert_eq!(facing(), Vec::<String>::new(), "control: none while it sleeps");
    // Its owner has let go of the tap.
    guest.cable.unplug();
    std::fs::write(&asleep, "").expect("marked");
    let woken = world.api("POST", &format!("{path}/resume"), &[]);
    assert_ne!(woken.status, 200, "{}", woken.text);
    eventually("it sleeps on", PATIENCE, || {
        (world.api("GET", &path, &[]).json["state"] == "standby").then_some(())
    });
    std::fs::remove_file(&asleep).expect("unmarked");
    assert_eq!(facing(), Vec::<String>::new(), "none faces it again");
}
