//! `writes`: what a write of a large policy over many sandboxes takes, and how long a neighbour's small
//! one takes while a crowd of those is under way.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::report::{Better, Row, keep};
use crate::stage::Stage;

const SANDBOXES: usize = 40;
const NAMES: usize = 9_999;
const CROWD: usize = 12;

const CONDITIONS: &str = "40 sandboxes of one tenant, whose policy of 10,000 names is replaced by another one over the unix socket; one sandbox of a neighbour. \
    Beside the crowd: the neighbour's write of one rule begins while twelve such writes are under way or wait.";

pub(crate) fn run(rounds: usize) {
    let stage = Stage::new(2, "");
    (0..SANDBOXES).for_each(|n| create(&stage, &format!("large{n}"), "large"));
    create(&stage, "small", "small");
    let mut versions = 0..;
    let mut write = |tenant: &str, names: usize| {
        let path = format!("/v1/tenants/{tenant}/policy");
        let names: Vec<String> = (0..names).map(|n| format!("h{n}.example.com")).collect();
        let version = versions.next().unwrap_or_default();
        let policy = format!(
            "default = \"allow\"\n[[rule]]\nallow = [\"v{version}.example.org\"]\n[[rule]]\nallow = {names:?}\n"
        );
        (path, policy)
    };
    let (mut large, mut alone, mut beside) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        alone.push(took(&stage, &write("small", 1)));
        large.push(took(&stage, &write("large", NAMES)));
        let crowd: Vec<_> = (0..CROWD).map(|_| write("large", NAMES)).collect();
        let small = write("small", 1);
        std::thread::scope(|scope| {
            for one in &crowd {
                scope.spawn(|| took(&stage, one));
            }
            std::thread::sleep(Duration::from_millis(200));
            beside.push(took(&stage, &small));
        });
    }
    let row = |what: &str, ms: &[f64]| Row::new(what, "ms", Better::Lower, ms).under(CONDITIONS);
    keep(
        "writes",
        &[
            row("a write of 10,000 names over 40 sandboxes", &large),
            row("a neighbour's write, alone", &alone),
            row("a neighbour's write, beside the crowd", &beside),
        ],
    );
}

fn create(stage: &Stage, name: &str, tenant: &str) {
    let wanted = json!({ "name": name, "tenant": tenant, "driver": "external" }).to_string();
    let created = stage.api("POST", "/v1/sandboxes", "application/json", &wanted);
    assert_eq!(created.status, 201, "{}", created.json);
}

/// Milliseconds from before the request to its answer.
fn took(stage: &Stage, (path, policy): &(String, String)) -> f64 {
    let begun = Instant::now();
    let written = stage.api("PUT", path, "application/toml", policy);
    assert_eq!(written.status, 200, "{}", written.json);
    begun.elapsed().as_secs_f64() * 1e3
}
