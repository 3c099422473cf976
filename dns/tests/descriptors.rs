//! The resolver in a process that has few descriptors left. Alone in it: the limit is the process's.
#![expect(clippy::expect_used, clippy::indexing_slicing, reason = "a test fails by panicking")]

#[path = "dns/upstream.rs"]
#[expect(dead_code, reason = "the other tests use all of it")]
mod upstream;
#[path = "dns/world.rs"]
#[expect(dead_code, reason = "the other tests use all of it")]
mod world;

use std::fs::File;
use std::os::fd::AsRawFd;

use hickory_proto::rr::RecordType;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use policy::Code;
use policy::audit::Outcome;
use upstream::{Said, Upstream, address};
use world::world;

/// An eighth of them is not for lookups.
const LIMIT: u64 = 256;

/// Takes all descriptors but so many, the last ones.
fn leave(held: &mut Vec<File>, spare: usize) {
    held.extend(std::iter::from_fn(|| File::open("/dev/null").ok()));
    held.truncate(held.len() - spare);
}

fn limit(descriptors: u64) {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).expect("a limit");
    setrlimit(Resource::RLIMIT_NOFILE, descriptors, most).expect("a lower one");
}

/// The number that the next descriptor gets (open(2)).
fn next() -> u64 {
    let file = File::open("/dev/null").expect("there is room");
    u64::try_from(file.as_raw_fd()).expect("a number")
}

/// Attack C16. What is refused for want of descriptors says so, and is no fault of an upstream.
#[tokio::test]
async fn a_lookup_leaves_the_last_descriptors_alone() {
    let first = Upstream::start(|query| {
        let owner = query.name().to_ascii();
        // The whole answer is to be had over TCP, and what is free by then is among the last.
        if owner.starts_with("lowered") {
            limit(next() + 8);
        }
        let cut = owner.starts_with("lowered") || owner.starts_with("long");
        Said { cut, ..Said::records([address(&owner, "93.184.216.34", 60)]) }
    })
    .await;
    let second = Upstream::with(&["93.184.216.35"]).await;
    let rules = r#"
[[rule]]
allow = ["*.example.com"]
"#;
    let world = world(rules, &[&first, &second]);
    let look_up = async |name: &str| {
        world.ask(name, RecordType::A).await;
        let record = world.records.take().expect("a record");
        assert_eq!(record.name.as_deref(), Some(name));
        (record.outcome, record.code)
    };
    let refused = (Outcome::Deny, Some(Code::Limit));
    let passed = (Outcome::Allow, None);
    assert_eq!(look_up("before.example.com").await, passed, "the control");
    limit(LIMIT);
    let mut held = Vec::new();
    leave(&mut held, 16);
    assert_eq!(look_up("within.example.com").await, refused, "16 are left, and not for it");
    assert_eq!(first.names(), ["before.example.com."]);
    leave(&mut held, 48);
    assert_eq!(look_up("after.example.com").await, passed, "there is room");
    assert_eq!(look_up("lowered.example.com").await, refused, "there was room for the datagram");
    limit(LIMIT);
    assert_eq!(look_up("long.example.com").await, passed, "over TCP");
    let asked = ["before", "after", "lowered", "long", "long"];
    assert_eq!(first.names(), asked.map(|name| format!("{name}.example.com.")));
    assert!(second.asked().is_empty(), "the first was never set aside");
}
