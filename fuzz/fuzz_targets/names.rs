//! Any bytes as a host name, a pattern, an authority and a path: no panic, and one canonical form.
#![no_main]

use libfuzzer_sys::fuzz_target;
use policy::{Authority, Host, Pattern, canonical_path};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(host) = Host::from_wire(bytes) {
        assert_eq!(Host::parse(&host.as_str().to_uppercase()).as_ref(), Ok(&host));
        assert!(host.as_str().len() <= 253);
        assert!(host.as_str().parse::<std::net::IpAddr>().is_err());
    }
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(host) = Host::parse(text) {
        assert_eq!(Host::from_wire(host.as_str().as_bytes()).as_ref(), Ok(&host));
    }
    if let Ok(pattern) = Pattern::parse(text) {
        assert_eq!(Pattern::parse(&pattern.to_string()), Ok(pattern));
    }
    let _ = Authority::parse(text);
    if let Some(path) = canonical_path(text) {
        assert_eq!(canonical_path(&path), Some(path));
    }
});
