//! Any text as a policy: no panic, an error that helps, and a policy that is read back equal.
#![no_main]

use libfuzzer_sys::fuzz_target;
use policy::{Compiled, Layer, Policy, Revision};

fuzz_target!(|text: &str| {
    for read in [Policy::from_toml(text), Policy::from_json(text)] {
        match read {
            Ok(policy) => {
                assert_eq!(Policy::from_toml(&policy.to_toml()).as_ref(), Ok(&policy));
                assert_eq!(Policy::from_json(&policy.to_json().to_string()).as_ref(), Ok(&policy));
                let _ = Compiled::new(&[(Layer::Sandbox, &policy)], Revision(1));
            }
            Err(error) => assert!(!error.problem.is_empty() && !error.fix.is_empty()),
        }
    }
});
