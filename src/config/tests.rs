//! The example is the defaults; what is wrong is named with its line.

use super::*;

const EXAMPLE: &str = include_str!("../../deploy/postern.toml");

#[test]
fn the_example_is_the_defaults_and_names_every_field() {
    assert_eq!(Config::parse(EXAMPLE).expect("as shipped"), Config::default());
    // With the settings uncommented it must still be the defaults, field by field.
    let setting = |line: &str| {
        let inner = line.strip_prefix("# ").unwrap_or(line);
        let set = inner.split_once(" = ").is_some_and(|(key, _)| {
            key.chars().all(|c| c.is_ascii_lowercase() || "_0123456789".contains(c))
        });
        if set { inner.to_owned() } else { line.to_owned() }
    };
    let plain = EXAMPLE.split("# [[api.token]]").next().expect("the part before tokens");
    let all: String = plain.lines().map(|line| setting(line) + "\n").collect();
    let given: toml::Table = all.parse().expect("toml");
    let defaults = toml::Table::try_from(Config::default()).expect("toml");
    let rest: Config = input::toml(&all).expect("uncommented");
    let mut expected = Config::default();
    expected.api.listen = rest.api.listen;
    (expected.sleep.ttl, expected.sleep.max_life) = (rest.sleep.ttl, rest.sleep.max_life);
    expected.tenants.max_life = rest.tenants.max_life;
    assert_eq!(rest, expected);
    for (name, value) in &defaults {
        let shown = given.get(name).unwrap_or_else(|| panic!("{name} is not in the example"));
        for key in value.as_table().into_iter().flat_map(toml::Table::keys) {
            let known = shown.get(key).is_some() || key == "token";
            assert!(known, "{name}.{key} is not in the example");
        }
    }
}

#[test]
fn the_tokens_of_the_example_are_valid_once_uncommented() {
    let tokens = EXAMPLE.split("# [[api.token]]").nth(1).expect("an example token");
    let text: String = tokens
        .lines()
        .map_while(|line| line.strip_prefix("# ").or(line.is_empty().then_some("")))
        .map(|line| format!("{line}\n"))
        .collect();
    let config = Config::parse(&format!("[[api.token]]{text}")).expect("valid");
    assert_eq!(config.api.token.len(), 1);
}

#[test]
fn a_bad_configuration_is_refused_with_field_value_line_and_fix() {
    let token = |name: &str, tenant: &str, digit: &str| {
        format!(
            "[[api.token]]\nname = \"{name}\"\ntenant = \"{tenant}\"\nsha256 = \"{}\"\n",
            digit.repeat(64)
        )
    };
    let cases: &[(String, &str, usize, &str)] = &[
        ("nmae = 1".into(), "nmae", 1, "the keys here"),
        ("stat_dir = \"/x\"".into(), "stat_dir", 1, "did you mean `state_dir`?"),
        ("state_dir = \"x\"".into(), "state_dir", 1, "begin it with `/`"),
        ("memory_dir = \"x\"".into(), "memory_dir", 1, "begin it with `/`"),
        ("[external]\non_resume = [\"x\"]".into(), "external.on_resume", 2, "`on_standby`"),
        ("[dns]\ntimout = \"5s\"".into(), "dns.timout", 2, "did you mean `timeout`?"),
        ("[log]\nfilter = \"loud\"".into(), "log.filter", 2, "off, error, warn"),
        ("[log]\nfilter = \"info,egress=laut\"".into(), "log.filter", 2, "egress=debug"),
        ("[dns]\ntimeout = \"5\"".into(), "dns.timeout", 2, "`5s`"),
        ("[dns]\ntimeout = 5".into(), "dns.timeout", 2, "a string"),
        ("[dns]\ntimeout = \"0s\"".into(), "dns.timeout", 2, "1ms"),
        ("[dns]\nupstreams = [\"1.1.1.1\"]".into(), "dns.upstreams[0]", 2, "192.0.2.53:53"),
        ("[tenants]\nmax_life = \"0s\"".into(), "tenants.max_life", 2, "1s to 3650d"),
        (
            "[tenants]\nmax_life = \"1d\"\n[sleep]\nmax_life = \"7d\"".into(),
            "sleep.max_life",
            4,
            "use at most 1d",
        ),
        ("[usage]\nkeep = \"5m\"".into(), "usage.keep", 2, "1h to 3650d"),
        ("[usage]\nrows = 10".into(), "usage.rows", 2, "1000 to"),
        ("[dns]\nattempts = 0".into(), "dns.attempts", 2, "1 to 10"),
        (
            "[egress]\naddresses = [\n\"192.0.2.1\",\n\"192.0.2.2\"]".into(),
            "egress.addresses[1]",
            4,
            "at most one",
        ),
        ("[egress]\naddresses = [\"127.0.0.1\"]".into(), "egress.addresses[0]", 2, "way out"),
        ("[egress]\naddresses = [\"1.2.3\"]".into(), "egress.addresses[0]", 2, "192.0.2.1"),
        ("[guests]\nnetns = \"../x\"".into(), "guests.netns", 2, "letters"),
        ("[guests]\nudp_sessions = 0".into(), "guests.udp_sessions", 2, "1 to 4096"),
        ("[guests]\nudp_idle = \"2h\"".into(), "guests.udp_idle", 2, "1s to 1h"),
        ("[guests]\ndivert_port = 80".into(), "guests.divert_port", 2, "1024"),
        ("[qemu]\nmemory = \"1M\"".into(), "qemu.memory", 2, "128M to 64G"),
        ("[guests]\ndivert_port = 70000".into(), "guests.divert_port", 2, "from 0 to 65535"),
        (
            "[qemu]\nuid_base = 65000".into(),
            "qemu.uid_base",
            2,
            "use 65535 or more, or at most 533",
        ),
        ("[qemu]\nuid_base = 65534".into(), "qemu.uid_base", 2, "use 65535 or more"),
        (
            "[guests]\nsandboxes = 1534".into(),
            "qemu.uid_base",
            0,
            "at most 1533 `guests.sandboxes`",
        ),
        ("[qemu]\nmemory = \"lots\"".into(), "qemu.memory", 2, "`256M`"),
        ("[audit]\nfile_size = \"1G\"".into(), "audit.total_size", 0, "use 2G or more"),
        ("[log]\nformat = \"xml\"".into(), "log.format", 2, "text, json"),
        ("[api]\nlisten = \"127.0.0.1:1\"".into(), "api.listen", 2, "[[api.token]]"),
        (token("a b", "*", "0"), "api.token[0].name", 2, "without spaces"),
        (token("a", "B", "0"), "api.token[0].tenant", 3, "`*`"),
        (token("a", "b", "x"), "api.token[0].sha256", 4, "sha256sum"),
        (token("a", "b", "0") + &token("a", "b", "1"), "api.token[1].name", 6, "own name"),
        (token("a", "b", "0") + &token("b", "b", "0"), "api.token[1].sha256", 8, "its own"),
        (format!("[api]\nsocket = \"/{}\"\n", "s".repeat(107)), "api.socket", 2, "107 bytes"),
        ("[api\n".into(), "", 1, "TOML"),
    ];
    for (text, field, line, fix) in cases {
        let problem = Config::parse(text).expect_err(text);
        assert_eq!(problem.field.as_deref(), Some(*field), "{text}\n{problem}");
        assert_eq!(problem.line.unwrap_or(0), *line, "{text}\n{problem}");
        // What may be a token is not shown.
        let hidden = field.is_empty() || *fix == "sha256sum";
        assert_eq!(problem.value.is_none(), hidden, "{text}\n{problem}");
        assert!(problem.fix.as_deref().is_some_and(|f| f.contains(fix)), "{text}\n{problem}");
    }
}

#[test]
fn slots_may_have_all_users_up_to_nobody_and_those_behind() {
    for text in [
        "[guests]\nsandboxes = 1533",
        "[qemu]\nuid_base = 65535\n[guests]\nsandboxes = 65534",
        "[qemu]\nuid_base = 4000000000",
    ] {
        Config::parse(text).expect(text);
    }
}

#[test]
fn a_digest_is_read_in_either_case() {
    let upper: Digest = "AB".repeat(32).try_into().expect("hex");
    assert_eq!(String::from(upper), "ab".repeat(32));
}

/// The likeliest mistake with a digest is the token itself.
#[test]
fn a_token_where_its_digest_belongs_is_refused_without_being_shown() {
    for text in [
        "[[api.token]]\nname = \"a\"\ntenant = \"a\"\nsha256 = \"hunter2\"\n",
        "[[api.token]]\nname = \"a\"\ntenant = \"a\"\nsha256 = [\"hunter2\"]\n",
        "[[api.token]]\nname = \"a\"\ntenant = \"a\"\nsha256 = hunter2\n",
        "[[api.token]]\nname = \"a\"\ntenant = \"a\"\nsha256 = \"hunter2\n",
        "[api]\ntoken = [\"hunter2\"]\n",
        "[api]\ntoken = \"hunter2\"\n",
    ] {
        let problem = Config::parse(text).expect_err(text);
        assert!(!format!("{problem:?} {problem}").contains("hunter2"), "{problem}");
        assert!(problem.line.is_some(), "{problem}");
    }
}
