//! What a policy document may say, and what is told to a person whose document is refused.

use policy::document::{MAX_DOCUMENT, MAX_PEERS};
use policy::{Effect, Layer, Peer, Policy, PolicyError, Rule};

fn refused(toml: &str) -> PolicyError {
    Policy::from_toml(toml).expect_err(toml)
}

#[test]
fn an_empty_document_is_the_policy_that_denies_everything() {
    for policy in [Policy::from_toml(""), Policy::from_toml("# nothing\n"), Policy::from_json("{}")]
    {
        assert_eq!(policy, Ok(Policy::default()));
    }
    assert_eq!(Policy::default().default_effect(), Effect::Deny);
    assert!(Policy::from_json("").is_err(), "no JSON at all");
}

#[test]
fn every_key_is_read_alike_from_toml_and_json() {
    let toml = r#"
        default = "allow"
        mode = "observe"
        [[rule]]
        allow = ["API.github.com.", "*.example.com"]
        ports = [443, "8000-8099"]
        methods = ["GET", "M-SEARCH"]
        paths = ["/v1/**", "/a*"]
        ech = "deny"
        always = true
        wake_on_data = false
        comment = "why"
        [[rule]]
        deny = ["203.0.113.0/24", "2001:db8::1", "10.1.2.3"]
        protocol = "udp"
    "#;
    let json = r#"{ "rule": [
        { "allow": ["api.github.com", "*.example.com"], "ports": [443, "8000-8099"],
          "methods": ["GET", "M-SEARCH"], "paths": ["/v1/**", "/a*"], "ech": "deny", "always": true, "wake_on_data": false, "comment": "why" },
        { "deny": ["203.0.113.0/24", "2001:db8::1/128", "10.1.2.3/32"], "protocol": "udp" }
    ], "default": "allow", "mode": "observe" }"#;
    let policy = Policy::from_toml(toml).expect("toml");
    assert_eq!(Policy::from_json(json), Ok(policy.clone()));
    assert_eq!(policy.rules().len(), 2);
    assert_eq!(serde_json::to_value(&policy).expect("json"), policy.to_json());
}

/// Document, field, line, a part of the whole message.
const REFUSED: &[(&str, &str, usize, &str)] = &[
    (
        "default = \"drop\"",
        "default",
        1,
        "\"drop\" is not one of the choices; write \"deny\" or \"allow\"",
    ),
    ("\ndefualt = \"deny\"", "", 2, "\"defualt\" is not a known key; did you mean 'default'?"),
    ("rules = []", "", 1, "did you mean 'rule'?"),
    ("mode = \"audit\"", "mode", 1, "write \"enforce\" or \"observe\""),
    ("zzzzzz = 1", "", 1, "the keys are default, mode, rule"),
    ("rule = 3", "rule", 1, "is a number; write a list of tables"),
    ("rule = [3]", "rule[0]", 1, "is a number; write a table"),
    ("[[rule]]\nalow = [\"a.ex.org\"]", "rule[0]", 2, "did you mean 'allow'?"),
    ("[[rule]]\nports = [1]", "rule[0]", 1, "names no host"),
    ("[[rule]]\nallow = [\"a.ex.org\"]\ndeny = [\"b.ex.org\"]", "rule[0]", 1, "make it two rules"),
    ("[[rule]]\nallow = []", "rule[0].allow", 2, "is empty"),
    ("[[rule]]\nallow = \"a.ex.org\"", "rule[0].allow", 2, "is a string; write a list"),
    (
        "[[rule]]\nallow = [\"a.ex.org\",\n\n  7]",
        "rule[0].allow[1]",
        4,
        "is a number; write a string",
    ),
    (
        "[[rule]]\nallow = [\"a.ex.org\"]\n[[rule]]\nallow = [\"ok.ex.org\",\n \"*.com\"]",
        "rule[1].allow[1]",
        5,
        "\"*.com\" is a wildcard over a whole public suffix",
    ),
    ("[[rule]]\nallow = [\"a.*.ex.org\"]", "rule[0].allow[0]", 2, "wildcard elsewhere"),
    ("[[rule]]\nallow = [\"0x7f.1\"]", "rule[0].allow[0]", 2, "is an IP address, not a name"),
    ("[[rule]]\nallow = [\"[::1]\"]", "rule[0].allow[0]", 2, "is an IP address, not a name"),
    ("[[rule]]\nallow = [\"https://a.ex.org\"]", "rule[0].allow[0]", 2, "is a URL"),
    ("[[rule]]\nallow = [\"a.ex.org:443\"]", "rule[0].allow[0]", 2, "a port goes under 'ports'"),
    ("[[rule]]\nallow = [\"a.ex.org/v1\"]", "rule[0].allow[0]", 2, "a path goes under 'paths'"),
    (
        "[[rule]]\nallow = [\"10.0.0.1/8\"]",
        "rule[0].allow[0]",
        2,
        "write \"10.0.0.0/8\", or \"10.0.0.1\"",
    ),
    ("[[rule]]\nallow = [\"10.0.0.0/33\"]", "rule[0].allow[0]", 2, "is not a network"),
    ("[[rule]]\nallow = [\"::ffff:10.0.0.0/104\"]", "rule[0].allow[0]", 2, "write \"10.0.0.0/8\""),
    ("[[rule]]\nallow = [\"a.ex.org\", \"A.ex.org.\"]", "rule[0].allow[1]", 2, "is named twice"),
    ("[[rule]]\nallow = [\"a.ex.org\"]\nports = [0]", "rule[0].ports[0]", 3, "\"0\" is not a port"),
    ("[[rule]]\nallow = [\"a.ex.org\"]\nports = [65536]", "rule[0].ports[0]", 3, "is not a port"),
    ("[[rule]]\nallow = [\"a.ex.org\"]\nports = [-1]", "rule[0].ports[0]", 3, "is not a port"),
    (
        "[[rule]]\nallow = [\"a.ex.org\"]\nports = [\"90-80\"]",
        "rule[0].ports[0]",
        3,
        "is not a port",
    ),
    (
        "[[rule]]\nallow = [\"a.ex.org\"]\nports = [\"http\"]",
        "rule[0].ports[0]",
        3,
        "is not a port",
    ),
    ("[[rule]]\nallow = [\"a.ex.org\"]\nports = [443.5]", "rule[0].ports[0]", 3, "is a fraction"),
    ("[[rule]]\nallow = [\"a.ex.org\"]\nports = []", "rule[0].ports", 3, "is empty"),
    (
        "[[rule]]\nallow = [\"a.ex.org\"]\nports = [81, \"80-90\"]",
        "rule[0].ports",
        3,
        "has a port twice",
    ),
    (
        "[[rule]]\nallow = [\"a.ex.org\"]\nprotocol = \"icmp\"",
        "rule[0].protocol",
        3,
        "write \"tcp\" or \"udp\"",
    ),
    (
        "[[rule]]\nallow = [\"a.ex.org\"]\nprotocol = \"udp\"",
        "rule[0].allow[0]",
        2,
        "is a name in a rule for UDP",
    ),
    (
        "[[rule]]\nallow = [\"a.ex.org\"]\nmethods = [\"get\"]",
        "rule[0].methods[0]",
        3,
        "upper-case token",
    ),
    (
        "[[rule]]\nallow = [\"a.ex.org\"]\nmethods = [\"A B\"]",
        "rule[0].methods[0]",
        3,
        "is not a request method",
    ),
    (
        "[[rule]]\nallow = [\"a.ex.org\"]\nmethods = [\"\"]",
        "rule[0].methods[0]",
        3,
        "is not a request method",
    ),
    (
        "[[rule]]\nallow = [\"a.ex.org\"]\nmethods = [\"GET\", \"GET\"]",
        "rule[0].methods[1]",
        3,
        "is named twice",
    ),
    ("[[rule]]\nallow = [\"a.ex.org\"]\nmethods = []", "rule[0].methods", 3, "is empty"),
    (
        "[[rule]]\nallow = [\"a.ex.org\"]\npaths = [\"v1\"]",
        "rule[0].paths[0]",
        3,
        "begin it with '/'",
    ),
    (
        "[[rule]]\nallow = [\"a.ex.org\"]\npaths = [\"/a/../b\"]",
        "rule[0].paths[0]",
        3,
        "write its canonical form, \"/b\"",
    ),
    (
        "[[rule]]\nallow = [\"a.ex.org\"]\npaths = [\"/v**\"]",
        "rule[0].paths[0]",
        3,
        "whole segment",
    ),
    (
        "[[rule]]\nallow = [\"10.0.0.0/8\"]\nmethods = [\"GET\"]",
        "rule[0].allow[0]",
        2,
        "is an address in a rule with methods",
    ),
    (
        "[[rule]]\nallow = [\"a.ex.org\"]\nech = true",
        "rule[0].ech",
        3,
        "is a boolean; write a string",
    ),
    (
        "[[rule]]\ndeny = [\"a.ex.org\"]\nech = \"deny\"",
        "rule[0].ech",
        3,
        "belongs to an allow rule",
    ),
    (
        "[[rule]]\ndeny = [\"a.ex.org\"]\nalways = true",
        "rule[0].always",
        3,
        "belongs to an allow rule",
    ),
    (
        "[[rule]]\nallow = [\"a.ex.org\"]\nalways = \"yes\"",
        "rule[0].always",
        3,
        "write true or false",
    ),
    (
        "[[rule]]\ndeny = [\"a.ex.org\"]\nwake_on_data = false",
        "rule[0].wake_on_data",
        3,
        "belongs to an allow rule; leave it out",
    ),
    (
        "[[rule]]\nallow = [\"192.0.2.1\"]\nprotocol = \"udp\"\nwake_on_data = false",
        "rule[0].wake_on_data",
        4,
        "belongs to a rule for TCP",
    ),
    (
        "[[rule]]\nallow = [\"a.ex.org\"]\nwake_on_data = \"no\"",
        "rule[0].wake_on_data",
        3,
        "write true or false",
    ),
    ("[[rule]]\nallow = [\"a.ex.org\"]\ncomment = 1", "rule[0].comment", 3, "write a string"),
    (
        "[[rule]]\nallow = [\"a.ex.org\"]\n[[rule]]\nallow = [\"a.ex.org\"]",
        "rule[1].allow[0]",
        4,
        "is already in rule[0]",
    ),
    (
        "[[rule]]\nallow = [\"a.ex.org\"]\n[[rule]]\nallow = [\"a.ex.org\"]\nports = [22, 443]",
        "rule[1].allow[0]",
        4,
        "is already in rule[0]",
    ),
    (
        "[[rule]]\ndeny = [\"a.ex.org\"]\n[[rule]]\ndeny = [\"a.ex.org\"]\nports = [25]",
        "rule[1].deny[0]",
        4,
        "is already in rule[0]",
    ),
    (
        "[[rule]]\nallow = [\"a.ex.org\"]\nports = [\"8000-9000\"]\n[[rule]]\nallow = [\"a.ex.org\"]\nports = [7000, \"8500-8600\"]",
        "rule[1].allow[0]",
        5,
        "is already in rule[0]",
    ),
    ("default = \"deny\"\ndefault = \"allow\"", "", 2, "duplicate key"),
    ("[[rule]]\nallow = [\"a.ex.org\"", "", 2, ""),
];

#[test]
fn a_wrong_document_is_refused_with_field_line_value_and_fix() {
    for (toml, field, line, part) in REFUSED {
        let error = refused(toml);
        assert_eq!((error.field.as_str(), error.line), (*field, Some(*line)), "{toml}\n{error}");
        assert!(error.to_string().contains(part), "{toml}\n{error}");
        assert!(error.to_string().starts_with(&format!("line {line}: ")), "{error}");
    }
}

#[test]
fn json_is_refused_with_the_same_field_and_its_own_line() {
    for (json, field, line, part) in [
        (
            "{\n \"rule\": [\n  {\"allow\": [\"a.ex.org\"]},\n  {\"allow\": [\"a.ex.org\",\n   \"*.com\"]}\n ]}",
            "rule[1].allow[1]",
            5,
            "public suffix",
        ),
        ("{\n\"rules\": []}", "", 2, "did you mean 'rule'?"),
        (
            "{\"rule\": [{\"allow\": [\"a.ex.org\"],\n\"allow\": [\"b.ex.org\"]}]}",
            "",
            2,
            "duplicate key `allow`",
        ),
        (
            "{\"rule\": [\n{\"allow\": [\"a.ex.org\"], \"ports\": [1e3]}]}",
            "rule[0].ports[0]",
            2,
            "not a whole number",
        ),
        ("{\"default\": null}", "default", 1, "is null"),
        ("[]", "", 0, "is a list; write a table"),
        ("{\n\"rule\": [}", "", 2, "mend the JSON"),
        ("{} {}", "", 1, "trailing characters"),
        ("{\"rule\": [[[[[[[[]]]]]]]]}", "rule[0]", 1, "is a list; write a table"),
    ] {
        let error = Policy::from_json(json).expect_err(json);
        assert_eq!(error.field, field, "{json}\n{error}");
        assert_eq!(error.line.unwrap_or_default(), line, "{json}\n{error}");
        assert!(error.to_string().contains(part), "{json}\n{error}");
    }
}

#[test]
fn a_shown_value_is_short_and_harmless() {
    let long = format!("[[rule]]\nallow = [\"\\u001b[2J{}\"]", "x".repeat(5000));
    let value = refused(&long).value.expect("value");
    assert!(value.len() < 100 && value.starts_with("\\u{1b}") && value.ends_with("..."), "{value}");
}

#[test]
fn rules_for_one_host_that_differ_are_no_duplicates() {
    let policy = Policy::from_toml(
        r#"
        [[rule]]
        allow = ["a.ex.org"]
        [[rule]]
        allow = ["a.ex.org"]
        ports = [8443]
        [[rule]]
        allow = ["a.ex.org"]
        methods = ["GET"]
        [[rule]]
        allow = ["a.ex.org"]
        methods = ["POST"]
        [[rule]]
        deny = ["a.ex.org"]
        [[rule]]
        allow = [".a.ex.org"]
    "#,
    );
    assert_eq!(policy.expect("policy").rules().len(), 6);
}

#[test]
fn limits_hold_and_are_told() {
    let names = |count: usize| {
        let names: Vec<String> = (0..count).map(|i| format!("\"h{i}.ex.org\"")).collect();
        format!("[[rule]]\nallow = [{}]", names.join(","))
    };
    assert!(Policy::from_toml(&names(MAX_PEERS)).is_ok());
    assert!(refused(&names(MAX_PEERS + 1)).to_string().contains("more than 10000"));
    assert!(refused(&"#".repeat(MAX_DOCUMENT + 1)).to_string().contains("bytes"));
    let many = |key: &str, item: &dyn Fn(usize) -> String| {
        let items: Vec<String> = (0..33).map(item).collect();
        refused(&format!("[[rule]]\nallow = [\"a.ex.org\"]\n{key} = [{}]", items.join(",")))
    };
    assert!(many("ports", &|i| (i + 1).to_string()).to_string().contains("more than 32"));
    assert!(many("methods", &|i| format!("\"M{i}\"")).to_string().contains("more than 32"));
    assert!(many("paths", &|i| format!("\"/{i}\"")).to_string().contains("more than 32"));
    let same: String =
        (1..=33).map(|i| format!("[[rule]]\nallow = [\"a.ex.org\"]\nports = [{i}]\n")).collect();
    assert!(refused(&same).to_string().contains("more than 32 rules"));
}

/// A policy is kept as JSON, in which a comment of quotes or backslashes is twice as long.
#[test]
fn what_is_accepted_can_be_read_back_however_much_longer_its_json_is() {
    for filler in ["\\", "\t", "é"] {
        let comment = filler.repeat(1000 / filler.len());
        let rule = |n| format!("[[rule]]\nallow = [\"h{n}.ex.org\"]\ncomment = '{comment}'\n");
        let read = |count: usize| Policy::from_toml(&(0..count).map(rule).collect::<String>());
        // The most rules that are accepted.
        let (mut most, mut refused) = (256, 1200);
        while refused - most > 1 {
            let middle = usize::midpoint(most, refused);
            match read(middle) {
                Ok(_) => most = middle,
                Err(error) => {
                    assert!(error.to_string().contains("bytes"), "{error}");
                    refused = middle;
                }
            }
        }
        let policy = read(most).expect("accepted");
        let one_more = read(1).expect("a rule").rules()[0].clone();
        let longer = policy.with_rule(one_more);
        assert!(longer.is_err() || filler != "\\", "{filler:?}: rules one by one are bounded, too");
        for policy in [&policy, &policy.with_mode(policy::PolicyMode::Observe)] {
            let read = Policy::from_json(&policy.to_json().to_string());
            assert!(read.as_ref() == Ok(policy), "{filler:?}: {most} rules: {:?}", read.err());
        }
    }
}

#[test]
fn the_largest_documents_are_read_in_time() {
    let start = std::time::Instant::now();
    let rules: String = (0..10_000)
        .map(|i| format!("[[rule]]\nallow=[\"h{i}.ex.org\"]\nports=[{}]\n", i + 1))
        .collect();
    assert!(Policy::from_toml(&rules).is_ok());
    let deep = format!("rule = {}", "[".repeat(200_000));
    assert!(Policy::from_toml(&deep).is_err());
    assert!(Policy::from_json(&"[".repeat(200_000)).is_err());
    let keys: String = (0..60_000).map(|i| format!("k{i} = 1\n")).collect();
    assert!(Policy::from_toml(&keys).is_err());
    assert!(start.elapsed() < std::time::Duration::from_secs(20), "{:?}", start.elapsed());
}

#[test]
fn a_rule_is_added_as_if_it_had_been_written() {
    let peer = |text: &str| -> Peer { text.parse().expect("peer") };
    let one = Policy::default()
        .with_rule(Rule::new(Effect::Allow, vec![peer("a.ex.org")]))
        .expect("policy");
    assert_eq!(one, Policy::from_toml("[[rule]]\nallow = [\"a.ex.org\"]").expect("policy"));
    let again = one.with_rule(Rule::new(Effect::Allow, vec![peer("A.ex.org")])).expect_err("twice");
    assert_eq!((again.field.as_str(), again.line), ("rule[1].allow[0]", None));
    assert!(one.with_rule(Rule::new(Effect::Deny, vec![])).is_err());
    assert!(Policy::default().rules().is_empty(), "the old one stays");
}

#[test]
fn always_belongs_to_the_platform_alone() {
    let policy =
        Policy::from_toml("[[rule]]\nallow = [\"a.ex.org\"]\nalways = true").expect("policy");
    assert_eq!(policy.check_layer(Layer::Platform), Ok(()));
    for layer in [Layer::Tenant, Layer::Sandbox] {
        let error = policy.check_layer(layer).expect_err("refused");
        assert_eq!(error.field, "rule[0].always");
        assert!(error.to_string().contains(layer.as_str()), "{error}");
    }
}

#[test]
fn the_policy_of_the_platform_is_always_enforced() {
    let policy = Policy::from_toml("mode = \"observe\"").expect("policy");
    for layer in [Layer::Tenant, Layer::Sandbox] {
        assert_eq!(policy.check_layer(layer), Ok(()));
    }
    assert_eq!(policy.check_layer(Layer::Platform).expect_err("refused").field, "mode");
}

#[test]
fn a_rule_that_tls_cannot_show_is_noted_for_its_writer() {
    let notes = |rule: &str| {
        let text = format!("[[rule]]\nallow = [\"a.ex.org\"]\n[[rule]]\n{rule}");
        Policy::from_toml(&text).expect(rule).notes()
    };
    for closed in [
        "allow = [\"b.ex.org\"]\nmethods = [\"GET\"]",
        "allow = [\"b.ex.org\"]\npaths = [\"/v1/**\"]",
    ] {
        let [note] = &notes(closed)[..] else { panic!("{closed}") };
        assert!(note.starts_with("rule[1] "), "{note}");
    }
    for open in [
        "allow = [\"b.ex.org\"]",
        "deny = [\"b.ex.org\"]\npaths = [\"/v1/**\"]",
        "allow = [\"b.ex.org\"]\npaths = [\"/v1/**\"]\nports = [80, 8080]",
    ] {
        assert!(notes(open).is_empty(), "{open}");
    }
}
