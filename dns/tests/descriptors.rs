//! The resolver in a process that has few descriptors left. Alone in it: the limit is the process's.
#![expect(clippy::expect_used, clippy::indexing_slicing, reason = "a test fails by panicking")]

#[path = "dns/upstream.rs"]
#[expect(dead_code, reason = "the other tests use all of it")]
mod upstream;

use std::fs::File;

use dns::{Family, Resolver, ResolverConfig};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use policy::Host;
use upstream::Upstream;

/// An eighth of them is not for lookups.
const LIMIT: u64 = 256;

/// Attack C16.
#[tokio::test]
async fn a_lookup_leaves_the_last_descriptors_alone() {
    let upstream = Upstream::with(&["93.184.216.34"]).await;
    let upstreams = vec![upstream.address];
    let resolver = Resolver::new(ResolverConfig { upstreams, ..ResolverConfig::default() });
    let resolver = resolver.expect("resolver");
    let look_up = async |name| {
        let host = Host::parse(name).expect("host");
        resolver.addresses(&host, Family::V4).await
    };
    look_up("before.example.com").await.expect("the control");
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).expect("a limit");
    setrlimit(Resource::RLIMIT_NOFILE, LIMIT, most).expect("a lower one");
    let mut held: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    held.truncate(held.len() - 16);
    look_up("within.example.com").await.expect_err("16 are left, and not for it");
    assert_eq!(upstream.names(), ["before.example.com."]);
    held.truncate(held.len() - 32);
    look_up("after.example.com").await.expect("there is room");
}
