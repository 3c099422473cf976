//! The daemon dies at every step of starting and stopping a microVM: no process, control group or file
//! is left that the next daemon does not take away.

use std::path::PathBuf;
use std::process::Command;

use crate::machine::Machine;
use fault::{On, Point};
use world::World;
use world::client::PATIENT;
use world::poll::eventually;

/// Whatever bears the name of the sandbox outside of the journal.
pub(crate) fn traces(world: &World, name: &str) -> Vec<String> {
    let named = format!("-name postern-{name}( |$)");
    let found = Command::new("pgrep").args(["-f", "--", &named]).output().expect("pgrep");
    let pids = String::from_utf8_lossy(&found.stdout).into_owned();
    let mut traces: Vec<String> = pids.lines().map(|pid| format!("process {pid}")).collect();
    let group = world.dir().join("run/sandboxes").join(name);
    let group = group.to_string_lossy().trim_matches('/').replace('/', ".");
    let roots = std::fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten();
    let roots = roots.map(|entry| entry.path()).chain([PathBuf::from("/sys/fs/cgroup")]);
    let groups = roots.map(|root| root.join("postern").join(&group)).filter(|it| it.exists());
    traces.extend(groups.map(|group| group.display().to_string()));
    for folder in ["state", "run"] {
        let folder = world.dir().join(folder).join("sandboxes").join(name);
        traces.extend(folder.exists().then(|| folder.display().to_string()));
    }
    let links = world.taps.command("ip").args(["-o", "link"]).output().expect("ip");
    let links = String::from_utf8_lossy(&links.stdout).into_owned();
    traces.extend(links.lines().filter(|line| !line.contains("lo:")).map(str::to_owned));
    traces
}

/// Promises 20, 21. Attack K01.
#[test]
fn a_daemon_that_dies_at_any_step_of_a_microvm_leaves_nothing_of_it() {
    let world = Machine::world();
    let name = world.machine_name();
    let path = format!("/v1/sandboxes/{name}");
    let wanted = format!("{{\"name\":\"{name}\",\"driver\":\"qemu\"}}");
    let points = Point::ALL.iter().copied();
    for point in points.filter(|point| matches!(point.on(), On::CreateQemu | On::RemoveQemu)) {
        let at = point.name();
        world.daemon().arm(point, "die");
        let create = world.daemon().request("POST", "/v1/sandboxes", &["--json", &wanted]);
        std::thread::scope(|scope| {
            scope.spawn(|| create.attempt());
            if point.on() == On::RemoveQemu {
                eventually("its process runs", PATIENT, || {
                    world.api("GET", &path, &[]).json["pid"].as_i64()
                });
                assert!(traces(&world, &name).len() > 3, "control: {:?}", traces(&world, &name));
                world.daemon().request("DELETE", &path, &[]).attempt();
            }
            world.daemon().dies(point);
        });
        world.daemon().start(&world.host);
        eventually(&format!("it is gone after {at}"), PATIENT, || {
            (world.api("GET", &path, &[]).status == 404).then_some(())
        });
        eventually(&format!("nothing is left after {at}"), PATIENT, || {
            traces(&world, &name).is_empty().then_some(())
        });
    }
}
