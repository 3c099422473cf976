//! The manual's examples are policies: every block parses, and the first one does what it says.

use policy::{Layer, Policy};

const MANUAL: &str = include_str!("../../../docs/policy.md");

fn blocks(language: &str) -> Vec<&'static str> {
    let fence = format!("```{language}\n");
    MANUAL.split(&fence).skip(1).filter_map(|rest| rest.split("```").next()).collect()
}

#[test]
fn every_example_of_the_manual_is_a_policy() {
    let toml = blocks("toml");
    assert!(toml.len() >= 5, "{}", toml.len());
    for block in toml {
        let policy = Policy::from_toml(block).unwrap_or_else(|error| panic!("{error}\n{block}"));
        let layer = if block.contains("always") { Layer::Platform } else { Layer::Sandbox };
        assert_eq!(policy.check_layer(layer), Ok(()), "{block}");
    }
    for block in blocks("json") {
        Policy::from_json(block).unwrap_or_else(|error| panic!("{error}\n{block}"));
    }
}

#[test]
fn the_manual_says_the_same_in_toml_and_json() {
    let (toml, json) = (blocks("toml"), blocks("json"));
    assert_eq!(
        Policy::from_toml(toml[0]).expect("toml"),
        Policy::from_json(json[0]).expect("json")
    );
}

#[test]
fn the_manual_lists_every_code_a_policy_can_give() {
    for code in [
        "no-rule",
        "rule",
        "port",
        "method",
        "path",
        "no-name",
        "undecidable",
        "protocol",
        "quic",
        "ech",
        "private-address",
    ] {
        assert!(MANUAL.contains(&format!("| `{code}` |")), "{code}");
    }
}
