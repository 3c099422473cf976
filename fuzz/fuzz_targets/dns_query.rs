//! Any bytes as a guest's DNS message: reading never panics, and what is read can be named.
#![no_main]

use dns::question::Question;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(question) = Question::read(bytes) {
        let shown = question.shown();
        assert!(!shown.contains(char::is_control));
        if let Some(host) = question.host() {
            assert!(host.as_str().len() <= 253);
        }
        let _ = question.record_type().to_string();
    }
});
